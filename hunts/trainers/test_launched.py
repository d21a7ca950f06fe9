"""The script of examples/, changed as the README says, as a process of `accelerate launch`.

tests/examples/test_diffusers_script.py compares it with the unchanged script. docs/trainers.md says how diffusers' own
scripts, which come with no package, were run by hand on the same pipelines.
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

from hunts.trainers import pipelines
from tests import support

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = (*(Path(sys.executable).with_name("accelerate"), "launch"), *("--num_processes", "1", "--num_machines", "1"))
LAUNCH += (*("--mixed_precision", "no", "--dynamo_backend", "no", "--cpu"), "-m", "hunts.trainers.counted")


@pytest.mark.soak
def test_launched_with_one_line_changed(tmp_path: Path) -> None:
    """Attention runs in forward alone."""
    text = (ROOT / "examples" / "diffusers_script.py").read_text(encoding="utf-8")
    text = text.replace("import torch\n", "import fastac\nimport torch\n", 1)
    line = "transformer.enable_gradient_checkpointing()"
    (tmp_path / "changed.py").write_text(text.replace(line, 'fastac.enable(transformer, policy="attn_only")'))
    transformer, _ = support.build("WanTransformer3DModel", num_layers=2)
    transformer.save_pretrained(tmp_path / "model" / "transformer")
    command = [*LAUNCH, tmp_path / "changed.py", "--gradient_checkpointing", "--max_train_steps", "2"]
    command += ["--pretrained_model_name_or_path", tmp_path / "model", "--output_dir", tmp_path / "output"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*map(str, command)], env=environment, cwd=ROOT, timeout=500, text=True, capture_output=True)
    assert ran.returncode == 0, ran.stderr
    kernels = re.findall(r"^attention in (\w+), over \d+ keys: (\d+)$", ran.stdout, flags=re.MULTILINE)
    assert kernels == [("forward", "8")] * 2, "two blocks in four micro-batches: over the clip, over the text"
    assert load_file(tmp_path / "output" / "pytorch_lora_weights.safetensors")


@pytest.mark.soak
def test_the_pipelines_load(tmp_path: Path) -> None:
    pipelines.main(tmp_path)
    assert len(list((tmp_path / "clips").glob("*.mp4"))) == len(pipelines.PROMPTS)
    for name, kind in {"cogvideox": "CogVideoXPipeline", "flux": "FluxPipeline", "ltx": "LTXPipeline"}.items():
        assert type(diffusers.DiffusionPipeline.from_pretrained(tmp_path / name)).__name__ == kind
