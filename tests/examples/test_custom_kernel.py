"""examples/custom_kernel.py shows what it promises, and its exit code tells when it does not."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "custom_kernel.py"


@pytest.mark.usefixtures("rows_as_before", "functions_as_before")
def test_both_kernels_run_once_per_call(capsys: pytest.CaptureFixture[str]) -> None:
    assert runpy.run_path(str(EXAMPLE))["main"]() == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^(.+?) +(none|full|attn_only) +(\d+)  (\w+)$", printed, flags=re.MULTILINE) == [
        (way, policy, executions, "equal")
        for way in ("custom op + row", "Function + make_visible")
        for policy, executions in (("none", "12"), ("full", "24"), ("attn_only", "12"))
    ]


@pytest.mark.slow
def test_where_nothing_is_saved_it_says_so() -> None:
    environment = {**os.environ, "FASTAC_DISABLE": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, EXAMPLE], env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert re.search(r"attn_only +24 ", done.stdout)
