"""Test files that put packages on sys.path and substitutes in sys.modules: each group runs in a process of its own.

A file whose package is not here is skipped, with that as the reason, unless FASTAC_TEST_BACKENDS names it: then it
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

ROOT = Path(__file__).resolve().parents[2]

NOT_ON_A_GPU = "not run on a GPU"


def named(variable: str, known: Collection[str]) -> frozenset[str]:
    """The files that the value of FASTAC_TEST_BACKENDS names. Raises pytest.UsageError for one there is not."""
    names = frozenset(variable.replace(",", " ").split())
    if unknown := sorted(names - set(known)):
        raise pytest.UsageError(
            f"FASTAC_TEST_BACKENDS names {', '.join(unknown)}. There are {', '.join(sorted(known))}."
        )
    return names


REQUIRED = named(os.environ.get("FASTAC_TEST_BACKENDS", ""), packages.NEEDS)


def not_here(files: Collection[str], required: Collection[str]) -> list[str]:
    """Why files are not covered. Fails when one of them is required."""
    reasons = {
        name: f"not covered: {name} needs {', '.join(missing)} in {packages.FOLDER}"
        for name in files
        if (missing := packages.missing(name))
    }
    if refused := [reason for name, reason in reasons.items() if name in required]:
        pytest.fail("\n".join([*refused, "FASTAC_TEST_BACKENDS names it"]), pytrace=False)
    return list(reasons.values())


def run(folder: Path, group: Collection[str]) -> None:
    """Run the files of a group whose packages are here, and fail as they do. Skips, at its end, when some are not."""
    absent = not_here(group, REQUIRED)
    files = [name for name in group if not packages.missing(name)]
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--color=no"]
    command += [str(folder / f"{name}.py") for name in files]
    ran = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=600)
    if ran.returncode:
        pytest.fail(f"failed:\n{ran.stdout}", pytrace=False)
    skipped = [line for line in ran.stdout.splitlines() if line.startswith("SKIPPED") and NOT_ON_A_GPU not in line]
    passed = set(re.findall(r"^PASSED \S+/(\w+)\.py", ran.stdout, flags=re.MULTILINE))
    if skipped or passed != set(files):
        pytest.fail(f"did not run all tests of {', '.join(files)}:\n{ran.stdout}", pytrace=False)
    if absent:
        pytest.skip("\n".join(absent))
