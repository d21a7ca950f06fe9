"""examples/custom_kernel.py shows what it promises, and its exit code tells when it does not."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch

import fastac

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "custom_kernel.py"


@pytest.mark.usefixtures("rows_as_before", "functions_as_before")
def test_both_kernels_run_once_per_call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    assert main() == 0
    printed = capsys.readouterr().out
    assert re.findall(r"^(.+?) +(none|full|attn_only) +(\d+)  (\w+)$", printed, flags=re.MULTILINE) == [
        (way, policy, executions, "equal")
        for way in ("custom op + row", "Function + make_visible")
        for policy, executions in (("none", "12"), ("full", "24"), ("attn_only", "12"))
    ]

    def recomputes_all(function: Any, *args: Any, policy: str) -> Any:
        return torch.utils.checkpoint.checkpoint(function, *args, use_reentrant=False)

    monkeypatch.setattr(fastac, "checkpoint", recomputes_all)
    assert main() == 1
    assert re.search(r"attn_only +24 ", capsys.readouterr().out)
