"""A trainer's real models and real checkpointing, on a CPU, in a process of its own. Others are in hunts/trainers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends import packages
from tests.backends.groups import run


@pytest.mark.slow
@pytest.mark.timeout(660)
def test_simpletuner() -> None:
    run(Path(__file__).parent, packages.TRAINERS)
