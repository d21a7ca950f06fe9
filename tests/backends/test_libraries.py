"""Attention libraries and a trainer: the files of two folders, in three processes, so that nothing leaks.

Other trainers are in hunts/trainers.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.backends import packages
from tests.backends.groups import ROOT, named, run

LIBRARIES = Path(__file__).with_name("libraries")
TRAINERS = ROOT / "tests" / "trainers"

GROUPS = {
    "flash": ("flash_attn_2", "xformers", "diffusers_backends", "varlen", "fastvideo", "vmoba", "flash_attn_4"),
    "triton": ("flash_attn_3", "attn_qat", "fastvideo_kernel", "longcat", "sage", "sla", "vsa"),
}
"""Libraries whose substitutes do not clash, in the order of their imports: flash-attn 2 before 4, which lies in its
folder, and before diffusers. flash-attn 3 of July 2025 has an op of the name that one of flash-attn 2 has."""


@pytest.mark.slow
@pytest.mark.timeout(660)
@pytest.mark.parametrize("group", [*GROUPS, "trainers"])
def test_libraries(group: str) -> None:
    run(LIBRARIES, GROUPS[group]) if group in GROUPS else run(TRAINERS, packages.TRAINERS)


# The list


def test_every_library_is_in_a_group_and_says_what_it_needs() -> None:
    files = sorted(path.stem for path in LIBRARIES.glob("*.py"))
    assert files == sorted(packages.LIBRARIES) == sorted(library for group in GROUPS.values() for library in group)


def test_ci_names_every_library_and_trainer() -> None:
    found = re.search(r'FASTAC_TEST_BACKENDS="([^"]*)"', (ROOT / ".ci" / "run").read_text())
    assert named(found.group(1), packages.NEEDS) == set(packages.IN_CI)
