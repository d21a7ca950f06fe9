"""Trainers' real models and real checkpointing, on a CPU: the files of hunts/trainers/trainers, in two processes.

They are put on sys.path, with stand-ins for packages that they import and no training step uses.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends import packages
from tests.backends.groups import run

TRAINERS = Path(__file__).with_name("trainers")

GROUPS = {
    "by name": ("transformers_models", "ltx_core", "diffsynth"),
    "wrappers": ("finetrainers", "nemo_automodel", "torchtitan", "fastvideo_training"),
}
"""Those whose models call torch's checkpoint, and those that put CheckpointWrappers around blocks."""


@pytest.mark.soak
@pytest.mark.timeout(660)
@pytest.mark.parametrize("group", GROUPS)
def test_trainers(group: str) -> None:
    run(TRAINERS, GROUPS[group])


def test_every_trainer_is_in_a_group_and_says_what_it_needs() -> None:
    files = sorted(path.stem for path in TRAINERS.glob("*.py"))
    assert files == sorted(packages.HUNTS) == sorted(trainer for group in GROUPS.values() for trainer in group)
