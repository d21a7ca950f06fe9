"""examples/custom_kernel.py shows what it promises, and its exit code tells when it does not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "custom_kernel.py"


def test_both_kernels_run_once_per_call() -> None:
    ran = subprocess.run([sys.executable, str(EXAMPLE)], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    lines = re.findall(r"^(.+?) +(none|full|attn_only) +(\d+)  (\w+)$", ran.stdout, flags=re.MULTILINE)
    assert lines == [
        (way, policy, executions, "equal")
        for way in ("custom op + row", "Function + make_visible")
        for policy, executions in (("none", "12"), ("full", "24"), ("attn_only", "12"))
    ]
    assert '[project.entry-points."fastac.backends"]\nmy_kernels = "my_kernels.fastac_rows"' in ran.stdout
    assert ran.stderr == ""


def test_it_fails_when_nothing_is_saved() -> None:
    script = f"""
import runpy
import sys
import fastac

fastac.checkpoint = lambda function, *args, policy: __import__("torch").utils.checkpoint.checkpoint(
    function, *args, use_reentrant=False
)
sys.argv = ["custom_kernel.py"]
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""
    ran = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert re.search(r"attn_only +24 ", ran.stdout)
