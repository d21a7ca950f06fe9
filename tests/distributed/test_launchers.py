"""examples/train_wan.py under torchrun and accelerate launch: two processes on a CPU, with all weights each or a share.

A launched run costs ten seconds of imports, so that one run serves several tests. What it is compared with is one
process that accumulates the gradients of the two batches.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from diffusers import WanTransformer3DModel
from PIL import Image

from tests.examples.test_train_wan import EXAMPLES, losses, main, metrics, write_video

BIN = Path(sys.executable).parent
SCRIPT = str(EXAMPLES / "train_wan.py")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
ACCELERATE = (str(BIN / "accelerate"), "launch", "--num_processes", "2", "--main_process_port", "0")
SHARDED = ("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")
FOUR_STEPS = ("--layers", "1", "--steps", "4", "--checkpoint-every", "2", "--batch-size", "1")
PATIENCE = 100

FAULTY = f"""
import os, sys
sys.path.insert(0, {str(EXAMPLES)!r})
import train_wan

if os.environ["RANK"] == "1" and "--video" not in sys.argv[-2:]:
    loss, calls = train_wan.flow_loss, []

    def flow_loss(*args):
        calls.append(args)
        if len(calls) == 3:
            raise ValueError("this rank alone")
        return loss(*args)

    train_wan.flow_loss = flow_loss
arguments = sys.argv[1:] if os.environ["RANK"] == "1" or "--video" not in sys.argv[-2:] else sys.argv[1:-2]
sys.exit(train_wan.main(arguments))
"""
"""The script, where process 1 fails: at what `--video` at the end of its arguments says, else in its third step."""


@dataclasses.dataclass
class Launched:
    """A launched run. told: all that it wrote to stdout and stderr."""

    code: int
    told: str
    output: Path


@dataclasses.dataclass
class Runs:
    """Runs in a folder, each on the same videos and with the same arguments."""

    folder: Path

    @property
    def arguments(self) -> tuple[str, ...]:
        tiny = ("--width", "32", "--resolution", "16", "--frames", "4", "--sampling-steps", "2")
        return (*tiny, *FOUR_STEPS, "--lr-warmup-steps", "0", "--video", str(self.folder / "videos"))

    def launch(self, name: str, *command: object) -> Launched:
        """Start a launcher in a session of its own, which ends with it, at the latest after PATIENCE seconds."""
        output = self.folder / name
        line = [*map(str, command)]
        script = next(i for i, part in enumerate(line) if part.endswith(".py"))
        line[script + 1 : script + 1] = [*self.arguments, "--output", str(output)]
        environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
        process = subprocess.Popen(
            line,
            env=environment | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(EXAMPLES.parent)},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            told, _ = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            told, _ = process.communicate()
            pytest.fail(f"not done after {PATIENCE} s: {told[-3000:]}")
        return Launched(process.returncode, told, output)

    def trained(self, name: str, *command: object) -> Launched:
        launched = self.launch(name, *command)
        assert launched.code == 0, launched.told
        return launched

    def alone(self, name: str, *arguments: object) -> Path:
        """The same script in this process."""
        assert main(*self.arguments, "--output", self.folder / name, *arguments) == 0
        GradientState._reset_state()
        return self.folder / name


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("runs")
    (folder / "videos").mkdir()
    for seed in range(3):
        write_video(folder / "videos" / f"{seed}.mp4", seed=seed)
    return Runs(folder)


@pytest.fixture(scope="module")
def alone(runs: Runs) -> Path:
    return runs.alone("alone", "--gradient-accumulation-steps", 2)


@pytest.fixture(scope="module")
def parallel(runs: Runs) -> Launched:
    return runs.trained("parallel", *ACCELERATE, "--multi_gpu", SCRIPT)


@pytest.fixture(scope="module")
def sharded(runs: Runs) -> Launched:
    """With accelerate's own activation checkpointing around the blocks, whose place fastac takes."""
    return runs.trained("sharded", *ACCELERATE, *SHARDED, "--fsdp_activation_checkpointing", "true", SCRIPT)


@pytest.fixture(autouse=True)
def _accelerate_as_in_a_fresh_process() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def weights(output: Path) -> dict[str, torch.Tensor]:
    model: Any = WanTransformer3DModel.from_pretrained(output / "transformer")
    return dict(model.state_dict())


def assert_trained_like(found: Launched, expected: Path) -> None:
    """Losses and weights are those of one process but for the order of sums; attention runs once; all is saved."""
    assert "2 in forward, 0 again in backward" in found.told
    for name in ("loss", "lr", "gradient_norm"):
        assert [line[name] for line in metrics(found.output)] == pytest.approx(
            [line[name] for line in metrics(expected)], rel=1e-5
        )
    assert len(set(losses(expected))) == 4
    mine, theirs = weights(found.output), weights(expected)
    assert mine.keys() == theirs.keys()
    # Adam's step does not depend on how large a gradient is, so that rounding moves a weight whose gradient is near 0.
    assert all(torch.allclose(mine[key], theirs[key], atol=1e-4) for key in theirs)
    with Image.open(found.output / "sample.gif") as sample:
        assert sample.n_frames == 4
    assert not list(found.output.glob(".partial-*"))


@pytest.mark.slow
def test_each_with_all_weights(parallel: Launched, alone: Path) -> None:
    assert_trained_like(parallel, alone)


@pytest.mark.slow
def test_each_with_a_share_of_the_weights(sharded: Launched, alone: Path) -> None:
    """A checkpoint has the shards of each; what is saved in the end has all weights, under their names."""
    assert_trained_like(sharded, alone)
    shards = [path for path in (sharded.output / "checkpoint-4").rglob("*.distcp") if path.is_file()]
    assert len(shards) == 2 * 2  # of the model and of the optimizer, from each process


@pytest.mark.slow
def test_a_process_that_fails_ends_all_and_resume_goes_on(runs: Runs, sharded: Launched) -> None:
    """The launcher's summary has what the process raised. The rest of the training is that of one never interrupted."""
    (runs.folder / "faulty.py").write_text(FAULTY)
    failed = runs.launch("stopped", *TORCHRUN, runs.folder / "faulty.py", "--fsdp")
    assert failed.code not in (0, None)
    summary = failed.told[failed.told.index("faulty.py FAILED") :]
    assert re.search(r"rank +: 1 ", summary)
    assert "ValueError: this rank alone" in summary
    assert [path.name for path in failed.output.glob("checkpoint-*")] == ["checkpoint-2"]

    resumed = runs.trained("stopped", *TORCHRUN, SCRIPT, "--fsdp", "--resume")
    for name in ("loss", "lr", "gradient_norm"):
        assert [line[name] for line in metrics(resumed.output)] == [line[name] for line in metrics(sharded.output)]
    mine, theirs = weights(resumed.output), weights(sharded.output)
    assert all(torch.equal(mine[key], theirs[key]) for key in theirs)


@pytest.mark.slow
def test_bad_input_of_one_process(runs: Runs) -> None:
    (runs.folder / "faulty.py").write_text(FAULTY)
    failed = runs.launch("unused", *TORCHRUN, runs.folder / "faulty.py", "--video", "gone.mp4")
    assert failed.code not in (0, None)
    assert "train_wan.py: error: process 1 of 2: gone.mp4: no such file or folder\n" in failed.told
    cause = failed.told[failed.told.index("Root Cause") :]
    assert re.search(r"rank +: 1 ", cause)
    assert "InputError: gone.mp4: no such file or folder" in cause
    assert not failed.output.exists()


@pytest.mark.slow
def test_another_number_of_processes(runs: Runs, sharded: Launched, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint belongs to as many processes as there were: the order of clips and the noise follow from that."""
    assert main(*runs.arguments, "--output", sharded.output, "--resume", "--steps", 6) == 2
    assert "processes was 2 and is 1, sharded was True and is False" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("file", ["pytorch_model_fsdp_0/__1_0.distcp", "optimizer_0/.metadata"])
def test_a_broken_shard(runs: Runs, sharded: Launched, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    broken = runs.folder / file.replace("/", "-")
    shutil.copytree(sharded.output, broken)
    content = bytearray((broken / "checkpoint-4" / file).read_bytes())
    content[len(content) // 2] ^= 1
    (broken / "checkpoint-4" / file).write_bytes(content)
    assert main(*runs.arguments, "--output", broken, "--resume", "--steps", 6) == 2
    assert f"checkpoint-4 is broken: {file} is not what was saved" in capsys.readouterr().err


def test_one_process_has_nothing_to_share(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(*runs.arguments, "--output", runs.folder / "unused", "--fsdp") == 2
    assert "--fsdp: needs several processes" in capsys.readouterr().err


def test_the_first_version_of_fsdp(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert main(*runs.arguments, "--output", runs.folder / "unused") == 2
    assert "--use_fsdp --fsdp_version 2" in capsys.readouterr().err


@pytest.mark.slow
def test_adapters_and_half_precision_with_shared_weights(runs: Runs, alone: Path) -> None:
    options = ("--fsdp", "--mixed-precision", "bf16", "--transformer", alone / "transformer", "--lora-rank", 2)
    launched = runs.trained("adapters", *TORCHRUN, SCRIPT, *options)
    assert "2 in forward, 0 again in backward" in launched.told
    assert (launched.output / "lora").is_dir()
    norms = [line["gradient_norm"] for line in metrics(launched.output)]
    assert min(norms) > 0, "what is clipped is not what is trained"
