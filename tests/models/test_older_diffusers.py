"""Older diffusers: four families of models train, each release in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.backends import packages
from tests.backends.groups import REQUIRED, ROOT, not_here
from tests.pairs import FAMILIES


@pytest.mark.slow
@pytest.mark.parametrize("case", packages.DIFFUSERS)
def test_parity(case: str) -> None:
    if absent := not_here([case], REQUIRED):
        pytest.skip(absent[0])
    (name,) = packages.DIFFUSERS[case]
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-k", FAMILIES]
    environment = {**os.environ, "PYTHONPATH": str(packages.place(name))}
    command.append("tests/models/test_parity.py::test_parity")
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert f"diffusers {packages.PACKAGES[name].version} has no WanAnimate2" in done.stdout, "another one ran"
    for family in ("Wan", "LTXVideo", "HunyuanVideo", "CogVideoX"):
        assert f"test_parity.py::test_parity[{family}Transformer3DModel]" in done.stdout, done.stdout
