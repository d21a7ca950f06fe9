"""examples/custom_kernel.py shows what it promises."""

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
