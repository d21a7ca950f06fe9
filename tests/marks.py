"""Which cases of a test `make test` leaves to `make test-slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*cases: Any) -> list[Any]:
    """Parameters of a test: one more case each of what takes several."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def quick(names: Iterable[Any], *of: Any) -> list[Any]:
    """Parameters of a test: names, all of them slow but for some. A name that there is not would leave none."""
    names = list(names)
    assert all(name in names for name in of), of
    return [name if name in of else slow(name)[0] for name in names]
