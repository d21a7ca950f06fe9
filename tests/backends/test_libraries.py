"""Every attention library: the files of tests/backends/libraries, in two processes.

What they load must not leak: substitutes for compiled modules, kernels for ops, and what diffusers found at its import.
A library whose package is not here is skipped, with that as the reason, unless FASTAC_TEST_BACKENDS names it: then it
fails. That variable holds names of files, separated by spaces or commas; one that does not exist is an error.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.backends import packages

LIBRARIES = Path(__file__).with_name("libraries")
ROOT = Path(__file__).resolve().parents[2]

GROUPS = {
    "flash": ("flash_attn_2", "xformers", "diffusers_backends", "varlen", "fastvideo", "vmoba", "flash_attn_4"),
    "triton": ("flash_attn_3", "attn_qat", "fastvideo_kernel", "longcat", "sage", "sla", "vsa"),
}
"""Libraries whose substitutes do not clash, in the order of their imports.

flash-attn 2 comes before flash-attn 4, which lies in a folder of it, and before diffusers is imported. flash-attn 3 of
July 2025 has an op of the name that one of flash-attn 2 has.
"""

NOT_ON_A_GPU = "not run on a GPU"


def named(variable: str, known: Collection[str]) -> frozenset[str]:
    """The libraries that the value of FASTAC_TEST_BACKENDS names. Raises pytest.UsageError for one there is not."""
    names = frozenset(variable.replace(",", " ").split())
    if unknown := sorted(names - set(known)):
        raise pytest.UsageError(
            f"FASTAC_TEST_BACKENDS names {', '.join(unknown)}. There are {', '.join(sorted(known))}."
        )
    return names


REQUIRED = named(os.environ.get("FASTAC_TEST_BACKENDS", ""), packages.LIBRARIES)


def not_here(libraries: Collection[str], required: Collection[str]) -> list[str]:
    """Why libraries are not covered. Fails when one of them is required."""
    reasons = {
        library: f"not covered: {library} needs {', '.join(missing)} in {packages.FOLDER}"
        for library in libraries
        if (missing := packages.missing(library))
    }
    if refused := [reason for library, reason in reasons.items() if library in required]:
        pytest.fail("\n".join([*refused, "FASTAC_TEST_BACKENDS names it"]), pytrace=False)
    return list(reasons.values())


def verdict(libraries: Collection[str], returncode: int, output: str) -> str:
    """What is wrong with the run of these libraries, or ""."""
    if returncode:
        return f"failed:\n{output}"
    skipped = [line for line in output.splitlines() if line.startswith("SKIPPED") and NOT_ON_A_GPU not in line]
    passed = set(re.findall(r"^PASSED tests/backends/libraries/(\w+)\.py", output, flags=re.MULTILINE))
    if skipped or passed != set(libraries):
        return f"did not run all tests of {', '.join(libraries)}:\n{output}"
    return ""


@pytest.mark.slow
@pytest.mark.timeout(660)
@pytest.mark.parametrize("group", GROUPS)
def test_libraries(group: str) -> None:
    absent = not_here(GROUPS[group], REQUIRED)
    libraries = [library for library in GROUPS[group] if not packages.missing(library)]
    files = [str(LIBRARIES / f"{library}.py") for library in libraries]
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--color=no", *files]
    ran = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
    if wrong := verdict(libraries, ran.returncode, ran.stdout):
        pytest.fail(wrong, pytrace=False)
    if absent:
        pytest.skip("\n".join(absent))


# The list


def test_every_library_is_in_a_group_and_says_what_it_needs() -> None:
    files = sorted(path.stem for path in LIBRARIES.glob("*.py"))
    assert files == sorted(packages.LIBRARIES) == sorted(library for group in GROUPS.values() for library in group)


def test_ci_names_every_library() -> None:
    found = re.search(r'FASTAC_TEST_BACKENDS="([^"]*)"', (ROOT / ".ci" / "run").read_text())
    assert found is not None
    assert named(found.group(1), packages.LIBRARIES) == set(packages.LIBRARIES)
