"""examples/train_wan.py trains, goes on where it stopped, and answers bad input with one line.

Every run here is a few steps of a tiny transformer on a tiny video.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import WanTransformer3DModel
from PIL import Image
from safetensors.torch import load_file

from tests.conftest import forget_accelerate

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
sys.path.insert(0, str(EXAMPLES))

TINY = (
    *("--layers", "2", "--width", "32", "--resolution", "16", "--frames", "4", "--batch-size", "2"),
    *("--steps", "2", "--sampling-steps", "2", "--lr-warmup-steps", "0"),
)

Run = Callable[..., Path]
Refused = Callable[..., str]


def main(*arguments: object) -> int:
    import train_wan  # here, as it needs av, which may be missing where tests are only collected, or run on a GPU

    code: int = train_wan.main([*TINY, *map(str, arguments)])
    forget_accelerate()
    return code


def write_video(path: Path, frames: int = 12, seed: int = 0) -> Path:
    """A moving square over a gradient, 32 x 24 pixels, 8 frames per second."""
    import av  # as above

    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=8)
        stream.width, stream.height, stream.pix_fmt = 32, 24, "yuv420p"
        for number in range(frames):
            image = np.zeros((24, 32, 3), dtype=np.uint8)
            image[..., seed % 3] = np.linspace(0, 255, 32, dtype=np.uint8)
            image[8:16, number : number + 8] = 255
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode())
    return path


@pytest.fixture(scope="module")
def video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_video(tmp_path_factory.mktemp("video") / "square.mp4")


@pytest.fixture
def run(tmp_path: Path, video: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Train in this process. Returns the run's folder."""

    def run(*arguments: object, output: Path = tmp_path / "run", code: int = 0) -> Path:
        videos = () if "--video" in arguments else ("--video", video)
        assert main(*videos, "--output", output, *arguments) == code, capsys.readouterr().err
        return output

    return run


@pytest.fixture
def refused(run: Run, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Give bad input. Returns the one line on stderr."""

    def refused(*arguments: object) -> str:
        capsys.readouterr()
        run(*arguments, code=2)
        (error,) = capsys.readouterr().err.splitlines()
        assert error.startswith("train_wan.py: error: ")
        return str(error)

    return refused


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def metrics(output: Path, *names: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{name: line[name] for name in names or line} for line in lines]


def weights(output: Path, step: int = 2) -> dict[str, torch.Tensor]:
    return load_file(output / f"checkpoint-{step}" / "model.safetensors")


# A run and what it leaves behind


def test_outputs_exist_and_parse(run: Run, video: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And training is the same under `full`, which runs attention again, and under `auto`, with room for everything."""
    output = run("--steps", 4, "--checkpoint-every", 2)
    printed = capsys.readouterr().out
    assert "WanTransformer3DModel: policy attn_only" in printed
    assert "4 in forward, 0 again in backward" in printed
    full = run("--steps", 4, "--policy", "full", output=tmp_path / "full")
    assert metrics(full, "loss") == metrics(output, "loss")
    assert "4 in forward, 4 again in backward" in capsys.readouterr().out
    auto = run("--steps", 4, "--policy", "auto", "--memory", "1GiB", output=tmp_path / "auto")
    assert metrics(auto, "loss") == metrics(output, "loss")
    assert "no checkpointing" in capsys.readouterr().out

    lines = metrics(output)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert line.keys() == {"step", "loss", "lr", "gradient_norm", "seconds"}
        assert all(math.isfinite(line[name]) for name in ("loss", "lr", "gradient_norm"))
    assert sorted(path.name for path in output.iterdir()) == [
        *("checkpoint-2", "checkpoint-4", "loss.png", "metrics.jsonl", "sample.gif", "settings.json", "transformer"),
    ]
    settings = json.loads((output / "settings.json").read_text())
    assert settings["versions"]["torch"] == torch.__version__
    assert settings["training"]["clips"].keys() == {video.name}
    with Image.open(output / "loss.png") as plot:
        plot.load()
        assert plot.format == "PNG"
    with Image.open(output / "sample.gif") as sample:
        assert (sample.format, sample.n_frames) == ("GIF", 4)
    saved = WanTransformer3DModel.from_pretrained(output / "transformer")
    assert all(torch.equal(tensor, weights(output, 4)[name]) for name, tensor in saved.state_dict().items())


def test_lora_trains_adapters_alone(run: Run, tmp_path: Path) -> None:
    base = run(output=tmp_path / "base")
    output = run("--transformer", base / "transformer", "--lora-rank", 2, output=tmp_path / "lora")
    before = load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")
    after = weights(output)
    adapters = {name for name in after if "lora_" in name}
    assert len(adapters) == 2 * 2 * 2 * 4  # A and B, blocks, attentions, projections
    assert all(after[name].any() for name in adapters if "lora_B" in name), "an adapter stayed as it was initialised"
    frozen = {name.replace(".base_layer", ""): tensor for name, tensor in after.items() if name not in adapters}
    assert frozen.keys() == before.keys()
    assert all(torch.equal(frozen[name], before[name]) for name in before)

    import train_wan

    again = train_wan.load_transformer(base / "transformer")
    again.load_lora_adapter(output / "lora", prefix=None, weight_name="pytorch_lora_weights.safetensors")
    loaded = {name.replace(".default_0.", ".default."): tensor for name, tensor in again.state_dict().items()}
    assert all(torch.equal(loaded[name], after[name]) for name in adapters)


# Resume


def test_resumed_run_equals_uninterrupted_run(run: Run, tmp_path: Path) -> None:
    write_video(tmp_path / "other.mp4", seed=1)
    write_video(tmp_path / "third.mp4", seed=2)
    arguments = ("--video", tmp_path, "--steps", 5, "--checkpoint-every", 2, "--gradient-accumulation-steps", 2)
    whole = run(*arguments, output=tmp_path / "whole")
    # As it would be after a kill in step 4, before its line was complete.
    stopped = tmp_path / "stopped"
    shutil.copytree(whole, stopped, ignore=shutil.ignore_patterns("checkpoint-[45]", "loss.png", "transformer", "lora"))
    kept = "".join((whole / "metrics.jsonl").read_text().splitlines(keepends=True)[:3])
    (stopped / "metrics.jsonl").write_text(kept + '{"step": 4, "lo')

    run(*arguments, "--resume", output=stopped)
    names = ("loss", "lr", "gradient_norm")
    assert metrics(stopped, *names) == metrics(whole, *names)
    assert len({line["loss"] for line in metrics(whole)}) == 5
    assert all(torch.equal(tensor, weights(whole, 5)[name]) for name, tensor in weights(stopped, 5).items())
    assert (stopped / "loss.png").is_file()


# Bad input


def test_bad_input(refused: Refused, tmp_path: Path, video: Path) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.mp4")  # reading it would wait for ever
    (tmp_path / "cut.mp4").write_bytes(video.read_bytes()[:200])
    short = write_video(tmp_path / "short.mp4", frames=3)
    namesake = tmp_path / "sub" / video.name
    namesake.parent.mkdir()
    write_video(namesake)
    for given, said in [
        (("--video", "missing.mp4"), "missing.mp4: no such file or folder"),
        (("--video", tmp_path / "empty"), "no video in this folder"),
        (("--video", tmp_path / "pipe.mp4"), "neither a file nor a folder"),
        (("--video", tmp_path / "cut.mp4"), "not a"),
        (("--video", short), "too short: it has 3 frames, and --frames 4"),
        (("--video", video, namesake), "two of the videos have this name"),
        (("--policy", "everything"), "attn_only"),
        (("--policy", "auto", "--memory", "some"), "'some'"),
        (
            ("--policy", "auto", "--memory", "1KiB"),
            'policy "auto", WanTransformer3DModel: the first step would run out of memory',
        ),
        (("--memory", "1GiB"), "--memory needs --policy auto"),
        *([] if torch.accelerator.is_available() else [(("--policy", "auto"), "on a CPU needs --memory")]),
        (("--resolution", 18), "--resolution 18: must be a multiple of 4"),
        (("--learning-rate", "nan"), "--learning-rate nan: must be greater than 0"),
        (("--attention-backend", "fast"), "unknown; there are flash, "),
        (("--resume",), "no earlier run"),
        (("--attention-backend", "_native_math"), "_native_math"),
        (("--transformer", tmp_path), "no config.json"),
    ]:
        assert said in refused(*given)
    assert not (tmp_path / "run").exists()


def test_an_earlier_run_is_never_spoiled(run: Run, refused: Refused, tmp_path: Path) -> None:
    """Nor continued from a checkpoint that is broken, or of another training."""
    output = run("--checkpoint-every", 1)
    before = contents(output)
    more = ("--resume", "--steps", 4)
    assert "holds an earlier run" in refused()
    assert "width was 32 and is 64" in refused(*more, "--width", 64)
    optimizer = output / "checkpoint-2" / "optimizer.bin"
    optimizer.write_bytes(optimizer.read_bytes()[:1000])
    assert "checkpoint-2 is broken" in refused(*more)
    optimizer.write_bytes(before["checkpoint-2/optimizer.bin"])
    assert contents(output) == before
    run("--overwrite", "--seed", 1)
    assert contents(tmp_path / "run.previous-1") == before


class RunsCode:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_checkpoint_that_somebody_else_wrote(
    run: Run, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch and accelerate unpickle a checkpoint's files: nothing is read unless this machine sealed it."""
    checkpoint, trace = run("--checkpoint-every", 1) / "checkpoint-2", tmp_path / "it-ran"
    more = ("--resume", "--steps", 4)
    kept = shutil.copytree(checkpoint, tmp_path / "kept")
    for file in ("optimizer.bin", "sampler.bin"):
        (checkpoint / file).write_bytes(pickle.dumps(RunsCode(trace)))
        assert f"{file} is not what was saved" in refused(*more)
        sealed = json.loads((kept / "checkpoint.json").read_text())
        sealed["files"][file] = hashlib.sha256((checkpoint / file).read_bytes()).hexdigest()
        (checkpoint / "checkpoint.json").write_text(json.dumps(sealed))
        assert "is not sealed with" in refused(*more)
        (checkpoint / file).unlink()
        assert "is not sealed with" in refused(*more)
        shutil.copytree(kept, checkpoint, dirs_exist_ok=True)
    assert not trace.exists()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))  # a machine that never wrote a checkpoint
    assert "is not sealed with" in refused(*more)
