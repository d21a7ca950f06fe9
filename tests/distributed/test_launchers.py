"""examples/train_wan.py under accelerate launch, and under torchrun from the checkpoint on that the first left.

Each run has two processes on a CPU, with a share of the weights each. They are compared with one process that
accumulates the gradients of the two batches.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from PIL import Image

from tests.examples.test_train_wan import EXAMPLES, main, metrics, write_video

SCRIPT = str(EXAMPLES / "train_wan.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT, "--fsdp")
ACCELERATE = (
    *(str(Path(sys.executable).parent / "accelerate"), "launch", "--num_processes", "2", "--main_process_port", "0"),
    *("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"),
    *("--fsdp_activation_checkpointing", "true", SCRIPT),
)
"""With accelerate's own activation checkpointing around the blocks, whose place fastac takes."""

TINY = (
    *("--width", "32", "--resolution", "16", "--frames", "4", "--sampling-steps", "2", "--lr-warmup-steps", "0"),
    *("--layers", "1", "--steps", "4", "--checkpoint-every", "2", "--batch-size", "1"),
)
PATIENCE = ("timeout", "-k", "10", "500")
ABORTED_AT_EXIT = "terminate called without an active exception"
"""What a rank says whose interpreter ends while gloo's thread lets go of a tensor: docs/distributed.md."""


def launch(*command: object, folder: Path, output: Path) -> str:
    """What a launcher wrote. It and its processes end after PATIENCE at the latest."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    arguments = *TINY, "--video", folder / "videos", "--output", output
    process = subprocess.run(
        [*PATIENCE, *map(str, (*command, *arguments))],
        env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)},
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    written = process.stdout
    assert process.returncode == 0 or ("written to" in written and ABORTED_AT_EXIT in written), written
    return written


def weights(output: Path) -> dict[str, torch.Tensor]:
    model: Any = WanTransformer3DModel.from_pretrained(output / "transformer")
    return dict(model.state_dict())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_launched_and_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Losses and weights are those of one process but for the order of sums; a resumed run repeats them bit for bit."""
    (tmp_path / "videos").mkdir()
    for seed in range(3):
        write_video(tmp_path / "videos" / f"{seed}.mp4", seed=seed)
    alone, launched, resumed = (tmp_path / name for name in ("alone", "launched", "resumed"))
    arguments = (*TINY, "--video", tmp_path / "videos")
    assert main(*arguments, "--output", alone, "--gradient-accumulation-steps", 2) == 0

    written = launch(*ACCELERATE, folder=tmp_path, output=launched)
    assert "2 in forward, 0 again in backward" in written
    for name in ("loss", "lr", "gradient_norm"):
        numbers = [[line[name] for line in metrics(output)] for output in (launched, alone)]
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)
    mine, theirs = weights(launched), weights(alone)
    assert mine.keys() == theirs.keys()
    # Adam's step does not depend on how large a gradient is, so that rounding moves a weight whose gradient is near 0.
    assert all(torch.allclose(mine[key], theirs[key], atol=1e-4) for key in theirs)
    with Image.open(launched / "sample.gif") as sample:
        assert sample.n_frames == 4
    shards = list((launched / "checkpoint-4").rglob("*.distcp"))
    assert len(shards) == 2 * 2  # of the model and of the optimizer, from each process

    shutil.copytree(launched, resumed)
    shutil.rmtree(resumed / "checkpoint-4")
    launch(*TORCHRUN, "--resume", folder=tmp_path, output=resumed)
    for name in ("loss", "lr", "gradient_norm"):
        assert [line[name] for line in metrics(resumed)] == [line[name] for line in metrics(launched)]
    again = weights(resumed)
    assert all(torch.equal(again[key], mine[key]) for key in mine)

    # A checkpoint belongs to as many processes as there were.
    capsys.readouterr()
    assert main(*arguments, "--output", launched, "--resume", "--steps", 6) == 2
    assert "processes was 2 and is 1" in capsys.readouterr().err
