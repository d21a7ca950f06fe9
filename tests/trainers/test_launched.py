"""A script of diffusers' shape as a process of `accelerate launch`, unchanged and with the line of the README.

diffusers' own scripts come with no package; docs/trainers.md says how they were run by hand, on the same pipelines.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import diffusers
import pytest
from safetensors.torch import load_file

from tests import support
from tests.trainers import pipelines

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = (*(Path(sys.executable).with_name("accelerate"), "launch"), *("--num_processes", "1", "--num_machines", "1"))
LAUNCH += (*("--mixed_precision", "no", "--dynamo_backend", "no", "--cpu"), "-m", "tests.trainers.counted")


def launch(script: Path, model: Path, output: Path) -> str:
    command = [*LAUNCH, script, "--gradient_checkpointing", "--pretrained_model_name_or_path", model]
    command += ["--output_dir", output, "--max_train_steps", "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*map(str, command)], env=environment, cwd=ROOT, timeout=200, text=True, capture_output=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_launched_with_one_line_changed(tmp_path: Path) -> None:
    """Losses and the LoRA that is written are the same; attention runs in forward alone."""
    plain = (ROOT / "examples" / "diffusers_script.py").read_text(encoding="utf-8")
    line = "transformer.enable_gradient_checkpointing()"
    changed = plain.replace("import torch\n", "import fastac\nimport torch\n", 1)
    changed = changed.replace(line, 'fastac.enable(transformer, policy="attn_only")')
    transformer, _ = support.build("WanTransformer3DModel", num_layers=2)
    transformer.save_pretrained(tmp_path / "model" / "transformer")
    found = {}
    for name, text in {"plain": plain, "changed": changed}.items():
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
        printed = launch(tmp_path / f"{name}.py", tmp_path / "model", tmp_path / name)
        kernels = re.findall(r"^attention in (\w+), over \d+ keys: (\d+)$", printed, flags=re.MULTILINE)
        losses = re.findall(r"^step \d: loss (\S+)$", printed, flags=re.MULTILINE)
        found[name] = losses, load_file(tmp_path / name / "pytorch_lora_weights.safetensors"), sorted(kernels)
    (losses, weights, ran_plain), (losses_changed, weights_changed, ran_changed) = found["plain"], found["changed"]
    assert len(losses) == 2
    assert losses == losses_changed
    support.assert_same(weights_changed, weights)
    calls = [("forward", "8"), ("forward", "8")]  # of two blocks in four micro-batches: over the clip, over the text
    assert ran_changed == calls
    assert ran_plain == [("backward", "8"), ("backward", "8"), *calls]


@pytest.mark.slow
def test_the_pipelines_load(tmp_path: Path) -> None:
    pipelines.main(tmp_path)
    assert len(list((tmp_path / "clips").glob("*.mp4"))) == len(pipelines.PROMPTS)
    for name, kind in {"cogvideox": "CogVideoXPipeline", "flux": "FluxPipeline", "ltx": "LTXPipeline"}.items():
        assert type(diffusers.DiffusionPipeline.from_pretrained(tmp_path / name)).__name__ == kind
