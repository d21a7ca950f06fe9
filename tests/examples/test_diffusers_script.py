"""examples/diffusers_script.md changes diffusers_script.py as it says, and the script then does what it says."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState
from safetensors.torch import load_file

import fastac
from tests import support

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "diffusers_script.py"
GUIDE = ROOT / "examples" / "diffusers_script.md"


def blocks_of(language: str) -> list[str]:
    text = GUIDE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def apply(diff: str, text: str) -> str:
    """Apply a unified diff: every hunk at the line that its header names, with the context that it has there."""
    lines = text.splitlines(keepends=True)
    _, *hunks = re.split(r"^@@ -(\d+),(\d+) \+\d+,\d+ @@\n", diff, flags=re.MULTILINE)
    moved = 0
    for start, count, body in zip(hunks[0::3], hunks[1::3], hunks[2::3], strict=True):
        # An editor may have taken the space from an empty line of context.
        changes = [line if line.strip("\n") else " \n" for line in body.splitlines(keepends=True)]
        before = [line[1:] for line in changes if line[0] in " -"]
        after = [line[1:] for line in changes if line[0] in " +"]
        assert len(before) == int(count)
        first = int(start) - 1 + moved
        assert lines[first : first + len(before)] == before, f"line {start} of {SCRIPT.name} is not as the guide has it"
        lines[first : first + len(before)] = after
        moved += len(after) - len(before)
    assert hunks, "no hunk"
    return "".join(lines)


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
            AcceleratorState._reset_state(reset_partial_state=True)
        executions = support.executions[support.CPU_ATTENTION]
        return Ran(capsys.readouterr().out, load_file(output / "pytorch_lora_weights.safetensors"), executions)

    return run


def test_the_script_before_and_after_the_change(run: Callable[..., Ran]) -> None:
    """Without checkpointing, with full, after the first change of the guide, and after both."""
    plain = SCRIPT.read_text(encoding="utf-8")
    first, second = blocks_of("diff")
    changed = apply(first, plain)
    expected = run(plain)
    full = run(plain, "--gradient_checkpointing")
    with_fastac = run(changed, "--gradient_checkpointing")
    with_report = run(apply(second, changed), "--gradient_checkpointing")
    assert len(set(expected.losses)) == 4
    assert any(weight.any() for name, weight in expected.weights.items() if "lora_B" in name)
    for found in (full, with_fastac, with_report):
        assert found.losses == expected.losses
        support.assert_same(found.weights, expected.weights)
    forward = 4 * 2 * 4  # attention calls, micro-batches, steps
    assert (expected.executions, full.executions, with_fastac.executions) == (forward, 2 * forward, forward)
    (shown,) = blocks_of("text")
    assert all(line in with_report.output for line in shown.splitlines() if line.startswith("│"))


def test_one_line_and_an_import_are_changed() -> None:
    first, _ = blocks_of("diff")
    changes = [line for line in first.splitlines() if re.match(r"[+-](?![+-])", line)]
    (line,) = blocks_of("python")[0].splitlines()[1:]
    assert changes == ["+", "+import fastac", f"-    {line}", '+        fastac.enable(transformer, policy="attn_only")']
    assert "fastac" not in SCRIPT.read_text(encoding="utf-8").split('"""', 2)[2].replace("diffusers_script", "")


def test_traps() -> None:
    """Those of the guide that are about calls of diffusers; the others are tested where their errors are made."""
    transformer, inputs = support.build("WanTransformer3DModel")
    fastac.enable(transformer)
    transformer.enable_gradient_checkpointing()
    with pytest.raises(fastac.PolicyNotAppliedError, match="called fastac for none"):
        transformer(**inputs)
    fastac.enable(transformer)
    transformer(**inputs)
    transformer.disable_gradient_checkpointing()
    assert "switched off" in fastac.report(transformer).problem
    with pytest.raises(fastac.FastacError, match=r"pipe\.transformer"):
        fastac.enable(object())
