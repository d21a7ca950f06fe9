"""examples/diffusers_script.md changes diffusers_script.py as it says, and the script then does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import fastac
from tests import support

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "diffusers_script.py"
GUIDE = ROOT / "examples" / "diffusers_script.md"

RUN = """
import runpy, sys
from tests import support

support.count_cpu_attention()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("attention executions:", support.executions[support.CPU_ATTENTION])
"""


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
    output: str
    weights: dict[str, torch.Tensor]

    @property
    def losses(self) -> list[str]:
        return re.findall(r"^step \d+: loss (\S+)$", self.output, flags=re.MULTILINE)

    @property
    def executions(self) -> int:
        (count,) = re.findall(r"^attention executions: (\d+)$", self.output, flags=re.MULTILINE)
        return int(count)


@pytest.mark.slow
def test_the_script_before_and_after_the_change(tmp_path: Path) -> None:
    """Without and with checkpointing, after the first change of the guide, and after both; two at a time."""
    plain = SCRIPT.read_text(encoding="utf-8")
    first, second = blocks_of("diff")
    changed = apply(first, plain)
    forms = {
        "no checkpointing": (plain, []),
        "full checkpointing": (plain, ["--gradient_checkpointing"]),
        "with fastac": (changed, ["--gradient_checkpointing"]),
        "report and verify": (apply(second, changed), ["--gradient_checkpointing"]),
    }
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}

    def run(name: str) -> Ran:
        text, arguments = forms[name]
        output = tmp_path / name
        script = tmp_path / f"{name}.py"
        script.write_text(text, encoding="utf-8")
        ran = subprocess.run(
            [sys.executable, "-c", RUN, str(script), "--output_dir", str(output), *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return Ran(ran.stdout, load_file(output / "pytorch_lora_weights.safetensors"))

    with ThreadPoolExecutor(2) as pool:
        ran = dict(zip(forms, pool.map(run, forms), strict=True))

    expected = ran["no checkpointing"]
    assert len(set(expected.losses)) == 4
    assert any(weight.any() for name, weight in expected.weights.items() if "lora_B" in name)
    for name in ("full checkpointing", "with fastac", "report and verify"):
        assert ran[name].losses == expected.losses, name
        support.assert_same(ran[name].weights, expected.weights)

    forward = 4 * 2 * 4  # attention calls, micro-batches, steps
    assert ran["no checkpointing"].executions == forward
    assert ran["full checkpointing"].executions == 2 * forward
    assert ran["with fastac"].executions == forward

    (shown,) = blocks_of("text")
    assert shown in ran["report and verify"].output


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
    with pytest.raises(fastac.PolicyNotAppliedError, match="enabled again without fastac"):
        transformer(**inputs)
    fastac.enable(transformer)
    transformer(**inputs)
    transformer.disable_gradient_checkpointing()
    assert "switched off" in fastac.report(transformer).problem
    with pytest.raises(fastac.FastacError, match=r"pipe\.transformer"):
        fastac.enable(object())
