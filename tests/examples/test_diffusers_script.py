"""examples/diffusers_script.md changes diffusers_script.py as it says, and the script then does what it says."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from tests import support
from tests.conftest import forget_accelerate
from tests.support import code_blocks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "diffusers_script.py"
GUIDE = ROOT / "examples" / "diffusers_script.md"


def apply(diff: str, text: str, folder: Path) -> str:
    """Apply a unified diff of the guide: with the lines and the context that its headers name."""
    (folder / SCRIPT.name).write_text(text, encoding="utf-8")
    # An editor may have taken the space from an empty line of context.
    lines = [line if line.strip("\n") else " \n" for line in diff.splitlines(keepends=True)]
    subprocess.run(["git", "apply", "-"], input="".join(lines), text=True, cwd=folder, check=True)
    return (folder / SCRIPT.name).read_text(encoding="utf-8")


class Ran(NamedTuple):
    """What a run printed and wrote, and how often attention kernels ran in it."""

    output: str
    weights: dict[str, torch.Tensor]
    executions: int

    @property
    def losses(self) -> list[str]:
        return re.findall(r"^step \d+: loss (\S+)$", self.output, flags=re.MULTILINE)


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """Run a form of the script in this process; what accelerate keeps for the process is undone."""

    def run(text: str, *arguments: str) -> Ran:
        output, script = tmp_path / "output", tmp_path / "script.py"
        script.write_text(text, encoding="utf-8")
        monkeypatch.setattr(sys, "argv", [str(script), "--output_dir", str(output), *arguments])
        support.count_cpu_attention()
        support.executions.clear()
        try:
            runpy.run_path(str(script), run_name="__main__")
        finally:
            forget_accelerate()
        executions = support.executions[support.CPU_ATTENTION]
        return Ran(capsys.readouterr().out, load_file(output / "pytorch_lora_weights.safetensors"), executions)

    return run


def test_the_script_before_and_after_the_change(run: Callable[..., Ran], tmp_path: Path) -> None:
    """Without checkpointing, with full, after the first change of the guide, and after both."""
    plain = SCRIPT.read_text(encoding="utf-8")
    first, second = code_blocks(GUIDE, "diff")
    changed = apply(first, plain, tmp_path)
    expected = run(plain)
    full = run(plain, "--gradient_checkpointing")
    with_fastac = run(changed, "--gradient_checkpointing")
    with_report = run(apply(second, changed, tmp_path), "--gradient_checkpointing")
    assert len(set(expected.losses)) == 4
    assert any(weight.any() for name, weight in expected.weights.items() if "lora_B" in name)
    for found in (full, with_fastac, with_report):
        assert found.losses == expected.losses
        support.assert_same(found.weights, expected.weights)
    forward = 4 * 2 * 4  # attention calls, micro-batches, steps
    assert (expected.executions, full.executions, with_fastac.executions) == (forward, 2 * forward, forward)
    (shown,) = code_blocks(GUIDE, "text")
    assert all(line in with_report.output for line in shown.splitlines() if line.startswith("│"))


def test_one_line_and_an_import_are_changed() -> None:
    first, _ = code_blocks(GUIDE, "diff")
    changes = [line for line in first.splitlines() if re.match(r"[+-](?![+-])", line)]
    (line,) = code_blocks(GUIDE, "python")[0].splitlines()[1:]
    assert changes == ["+", "+import fastac", f"-    {line}", '+        fastac.enable(transformer, policy="attn_only")']
    assert "fastac" not in SCRIPT.read_text(encoding="utf-8").split('"""', 2)[2].replace("diffusers_script", "")
