"""Every attention library, each file of tests/backends/libraries in a process of its own.

What they load must not leak: stand-ins for compiled modules, kernels for ops, and what diffusers found at its import.
A library whose package is not here is skipped, with that as the reason, unless FASTAC_TEST_BACKENDS names it: then it
fails. That variable holds names of files, separated by spaces or commas; one that does not exist is an error.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.backends import packages

FILES = {path.stem: path for path in sorted(Path(__file__).with_name("libraries").glob("*.py"))}
ROOT = Path(__file__).resolve().parents[2]
SECONDS = 900
"""After which a library's process is ended. Each of its tests has the timeout of every test."""

NOT_ON_A_GPU = "not run on a GPU"


def named(variable: str, known: Iterable[str]) -> frozenset[str]:
    """The libraries that the value of FASTAC_TEST_BACKENDS names. Raises pytest.UsageError for one there is not."""
    names = frozenset(variable.replace(",", " ").split())
    if unknown := sorted(names - set(known)):
        raise pytest.UsageError(
            f"FASTAC_TEST_BACKENDS names {', '.join(unknown)}. There are {', '.join(sorted(known))}."
        )
    return names


REQUIRED = named(os.environ.get("FASTAC_TEST_BACKENDS", ""), FILES)


def verdict(library: str, returncode: int, output: str) -> str:
    """What is wrong with the run of a library, or ""."""
    if returncode:
        return f"{library} failed:\n{output}"
    skipped = [line for line in output.splitlines() if line.startswith("SKIPPED") and NOT_ON_A_GPU not in line]
    if skipped or not re.search(r"\b\d+ passed\b", output):
        return f"{library} did not run all of its tests:\n{output}"
    return ""


@pytest.mark.slow
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("library", FILES)
def test_library(library: str) -> None:
    if missing := packages.missing(library):
        reason = f"not covered: {library} needs {', '.join(missing)} in {packages.FOLDER}"
        if library in REQUIRED:
            pytest.fail(f"{reason}, and FASTAC_TEST_BACKENDS names it")
        pytest.skip(reason)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", str(FILES[library])]
    ran = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SECONDS
    )
    if wrong := verdict(library, ran.returncode, ran.stdout):
        pytest.fail(wrong, pytrace=False)


# What decides above


def test_every_library_says_what_it_needs() -> None:
    assert set(FILES) == set(packages.LIBRARIES)


def test_ci_names_every_library() -> None:
    found = re.search(r'FASTAC_TEST_BACKENDS="([^"]*)"', (ROOT / ".ci" / "run").read_text())
    assert found is not None
    assert named(found.group(1), FILES) == set(FILES)


def test_a_name_that_no_library_has_is_an_error() -> None:
    assert named("one, two", ["one", "two", "three"]) == {"one", "two"}
    with pytest.raises(pytest.UsageError, match=r"names four\. There are one, three, two"):
        named("one four", ["one", "two", "three"])


@pytest.mark.parametrize("required", [False, True])
def test_a_package_that_is_not_here(required: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "FOLDER", tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "REQUIRED", frozenset(["flash_attn_2"] if required else []))
    outcome = pytest.fail.Exception if required else pytest.skip.Exception
    with pytest.raises(outcome, match=r"not covered: flash_attn_2 needs flash-attn 2\.8\.3\.post2 in "):
        test_library("flash_attn_2")
    with pytest.raises(ModuleNotFoundError, match=r"needs flash-attn 2\.8\.3\.post2"):
        packages.use("flash_attn_2")


@pytest.mark.parametrize(
    ("returncode", "output", "expected"),
    [
        (0, "3 passed in 1s", ""),
        (0, "SKIPPED [1] x.py:3: not run on a GPU: no CUDA device here\n3 passed, 1 skipped in 1s", ""),
        (0, "SKIPPED [1] x.py:3: not today\n3 passed, 1 skipped in 1s", "did not run all"),
        (0, "SKIPPED [3] x.py:3: not run on a GPU: no CUDA device here\n3 skipped in 1s", "did not run all"),
        (1, "1 failed, 3 passed in 1s", "failed"),
        (5, "no tests ran in 1s", "failed"),
    ],
)
def test_what_passes(returncode: int, output: str, expected: str) -> None:
    found = verdict("mine", returncode, output)
    assert bool(found) == bool(expected)
    assert expected in found
