"""Which tests `make test` leaves to `make test-slow`, and which need a newer torch or diffusers."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import pytest

from fastac.engine import releases


def slow(*cases: Any) -> list[Any]:
    """Parameters of a test: one more case each of what takes several."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def soak(*cases: Any) -> list[Any]:
    """Parameters of a test whose faults other cases see: before a release, outside CI."""
    return [pytest.param(case, marks=pytest.mark.soak) for case in cases]


def quick(names: Iterable[Any], *of: Any) -> list[Any]:
    """Parameters of a test: names, all of them slow but for some. A name that there is not would leave none."""
    names = list(names)
    assert all(name in names for name in of), of
    return [name if name in of else slow(name)[0] for name in names]


def needs_torch(release: str) -> pytest.MarkDecorator:
    """A test of what torch has since a release, such as "2.12"."""
    return pytest.mark.skipif(not releases.is_at_least(release), reason=f"needs torch {release}")


def needs(feature: str) -> pytest.MarkDecorator:
    """A test of a feature that only some of the releases have: `fastac.engine.releases`."""
    return pytest.mark.skipif(not releases.has(feature), reason=_reason(feature))


def skip_module_without(feature: str) -> None:
    """Skip the module that calls it, as one test, where torch lacks a feature."""
    if not releases.has(feature):
        pytest.skip(_reason(feature), allow_module_level=True)


def _reason(feature: str) -> str:
    return f"not covered: {feature} needs torch {releases.FIRST_TORCH[feature]}"


NEEDS_COMPILED_MODELS = needs(releases.COMPILED_MODELS)
NEEDS_TRACES = needs(releases.TRACES)


def needs_diffusers(release: str) -> pytest.MarkDecorator:
    """A test of what diffusers has since a release, such as "0.40"."""
    here = version("diffusers")
    return pytest.mark.skipif(not releases.is_at_least(release, here), reason=f"needs diffusers {release}")
