"""What happens without fastac's rows of selection: a pytest plugin that takes them out, and a test that looks.

Interception is never taken off again, so it takes a process of its own, in which they never were.
"""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests() -> None:
    """Before anybody imports fastac: an empty file of these rows in the place of the real one."""
    assert "fastac" not in sys.modules
    empty = ModuleType("fastac.backends.selection")
    empty.ROWS = ()  # type: ignore[attr-defined]
    sys.modules[empty.__name__] = empty


def assert_fails(file: str, test: str) -> None:
    """A test of a library's file, by its name after `::`, finds wrong gradients without the rows."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", __name__, f"{file}::{test}"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert "1 failed" in found.stdout, found.stdout + found.stderr
    assert "tensors differ" in found.stdout, found.stdout
