"""examples/diffusers_script.md changes diffusers_script.py as it says, and the script then does what it says."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
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


def test_the_script_before_and_after_the_change(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without checkpointing, with full, after the first change of the guide, and after both."""
    script, output = tmp_path / "script.py", tmp_path / "output"
    support.count_cpu_attention()

    def run(text: str, *options: str) -> tuple[list[str], support.Tensors, int, str]:
        """Losses and weights of a form of the script, how often attention kernels ran in it, and what it printed."""
        script.write_text(text, encoding="utf-8")
        monkeypatch.setattr(sys, "argv", [str(script), "--output_dir", str(output), *options])
        support.executions.clear()
        runpy.run_path(str(script), run_name="__main__")
        forget_accelerate()
        printed = capsys.readouterr().out
        losses = re.findall(r"^step \d+: loss (\S+)$", printed, flags=re.MULTILINE)
        weights = load_file(output / "pytorch_lora_weights.safetensors")
        return losses, weights, support.executions[support.CPU_ATTENTION], printed

    plain = SCRIPT.read_text(encoding="utf-8")
    first, second = code_blocks(GUIDE, "diff")
    changed = apply(first, plain, tmp_path)
    expected, weights, forward, _ = run(plain)
    assert forward == 4 * 2 * 4  # attention calls, micro-batches, steps
    assert len(set(expected)) == 4
    assert any(weight.any() for name, weight in weights.items() if "lora_B" in name)
    executions = []
    for text in (plain, changed, apply(second, changed, tmp_path)):
        losses, found, ran, printed = run(text, "--gradient_checkpointing")
        executions.append(ran)
        assert losses == expected
        support.assert_same(found, weights)
    assert executions[:2] == [2 * forward, forward]
    (shown,) = code_blocks(GUIDE, "text")
    assert all(line in printed for line in shown.splitlines() if line.startswith("│"))


def test_one_line_and_an_import_are_changed() -> None:
    first, _ = code_blocks(GUIDE, "diff")
    changes = [line for line in first.splitlines() if re.match(r"[+-](?![+-])", line)]
    (line,) = code_blocks(GUIDE, "python")[0].splitlines()[1:]
    assert changes == ["+", "+import fastac", f"-    {line}", '+        fastac.enable(transformer, policy="attn_only")']
    assert "fastac" not in SCRIPT.read_text(encoding="utf-8").split('"""', 2)[2].replace("diffusers_script", "")
