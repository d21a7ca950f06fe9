"""fastac plan: its table, its JSON, its picture, and one clear line for what can not be planned."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fastac
from fastac import cli, models
from fastac.plans import Plan, PolicyPlan
from fastac.policy import Policy
from fastac.video_planning import Training

POLICIES = ["none", "full", "long_attn_only", "attn_only", "ops"]


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """The command for a Wan transformer of three small blocks, and a short video."""
    config = {**models.MODELS["WanTransformer3DModel"].config, "num_layers": 3}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"_class_name": "WanTransformer3DModel", **config}))
    return ["plan", str(path), "--frames", "9", "--height", "32", "--width", "48", "--text-tokens", "8"]


def cells_of(table: str) -> dict[str, list[str]]:
    """Policy -> the other cells of its row."""
    return {row[0]: row[1:] for line in table.splitlines() if (row := [c.strip() for c in line.split("│")[1:-1]])}


@pytest.mark.slow
def test_the_command_of_the_readme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wan 1.3B on 77 frames of 720p, in less than a minute."""
    picture = tmp_path / "p.png"
    video = ["--frames", "77", "--height", "720", "--width", "1280"]
    command = ["plan", "wan2.1-t2v-1.3b", *video, "--budget", "40GiB", "--plot"]
    begin = time.process_time()
    assert cli.main([*command, str(picture)]) == 0
    assert time.process_time() - begin < 60
    captured = capsys.readouterr()
    assert captured.err == ""
    cells = cells_of(captured.out)
    assert list(cells) == ["none", "full", "long_attn_only", "attn_only", "ops (torchtitan)", "budget(40.0 GiB)"]
    assert cells["full"] == ["0 B", "7.3 GiB", "25.1 GiB", "1,143", "1.000"]
    assert cells["long_attn_only"][:2] == ["6.3 GiB", "13.6 GiB"]
    assert cells["budget(40.0 GiB)"][0] == "40.0 GiB"
    relative = {policy: float(row[-1]) for policy, row in cells.items()}
    assert sorted(relative, key=relative.__getitem__)[:2] == ["none", "budget(40.0 GiB)"]
    assert captured.out.splitlines()[-1] == 'fastac.enable(transformer, policy=fastac.Policy.budget("40GiB"))'
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_plan_as_json(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """All that a plan has, and where the configuration is from; nothing else is printed."""
    assert cli.main([*small, "--budget", "20KiB", "--json"]) == 0
    captured = capsys.readouterr()
    found: dict[str, Any] = json.loads(captured.out)
    assert captured.err == ""
    assert set(found) == {"configuration", *(field.name for field in dataclasses.fields(Plan))}
    assert found["configuration"] == found["subject"] == small[1]
    assert found["inputs"] == "1 x 9 frames of 32 x 48, 8 tokens of text, bfloat16, all weights, adamw"
    assert [one["policy"] for one in found["policies"]] == [*POLICIES, "budget(20.0 KiB)"]
    assert all(set(one) == {field.name for field in dataclasses.fields(PolicyPlan)} for one in found["policies"])
    assert (found["budget"], found["memory"]) == (20 * 2**10, None)
    assert found["largest"] == {}
    assert found["frontier"][0] == [0, 1.0]
    blocks = {name: Policy(**one) for name, one in found["blocks"].items()}
    assert list(blocks) == ["blocks.0", "blocks.1", "blocks.2"]
    model, _ = models.tiny_model(
        dataclasses.replace(
            models.MODELS["WanTransformer3DModel"], config=json.loads(Path(small[1]).read_text()) | {"num_layers": 3}
        )
    )
    fastac.enable(model, blocks)


def test_a_plan_as_a_table(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """With the line of code that does it: the largest budget that fits, where none is named."""
    assert cli.main([*small, "--memory", "256KiB", "--optimizer", "sgd", "--dtype", "fp32"]) == 0
    table = capsys.readouterr().out
    cells = cells_of(table)
    title = " ".join(table.split())
    assert "float32, all weights, sgd" in title
    assert "longest video in 256.0 KiB" in title
    assert [cells[name][-1].split()[-1] for name in ("none", "full")] == ["frames", "frames"]
    assert table.splitlines()[-1].startswith("fastac.enable(transformer, policy=fastac.Policy.budget(")


@pytest.mark.parametrize(("suffix", "begins"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")])
def test_a_plot(suffix: str, begins: bytes, small: list[str], tmp_path: Path) -> None:
    assert cli.main([*small, "--budget", "20KiB", "--plot", str(tmp_path / f"frontier{suffix}")]) == 0
    assert (tmp_path / f"frontier{suffix}").read_bytes().startswith(begins)


def test_a_plot_needs_matplotlib(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert cli.main([*small, "--plot", str(tmp_path / "p.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


def test_what_can_not_be_planned_is_one_message(
    small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    for arguments, message in (
        (["plan", "wan-of-tomorrow"], "configuration 'wan-of-tomorrow': no such name, class or file. There are"),
        (["plan", str(tmp_path / "nowhere.json")], "no such name, class or file"),
        (["plan", str(tmp_path)], "no such name, class or file"),
        (["plan", str(tmp_path / "list.json")], "no _class_name"),
        (["plan", str(tmp_path / "broken.json")], "not JSON"),
        (["plan", str(tmp_path / "other.json")], "how the inputs of FluxTransformer2DModel follow"),
        (["plan", "AllegroTransformer3DModel", "--lora", "4"], "LoRA of AllegroTransformer3DModel"),
        ([*small, "--frames", "10"], "frames 10 is not a multiple of 4, plus 1"),
        ([*small, "--frames", "-3"], "frames is -3. Use a whole number from 1 on"),
        ([*small, "--height", "33"], "height 33 is not a multiple of 16"),
        ([*small, "--batch", "0"], "batch is 0"),
        ([*small, "--frames", "1001"], "does not run on 1 x 1001 frames"),
        ([*small, "--budget", "much"], "'much': expected bytes"),
        ([*small, "--budget=-1GiB"], "expected bytes"),
        ([*small, "--budget", "40"], "plan --budget 40: of what? 40GiB, say"),
        ([*small, "--memory", "80"], "plan --memory 80: of what? 80GiB, say"),
        ([*small, "--memory", "80G"], "expected bytes"),
        ([*small, "--lora", "-1"], "plan --lora -1: a rank of 1 or more"),
        ([*small, "--gpus", "3", "--context-parallel", "2"], "does not divide 3 GPUs"),
        ([*small, "--gpus", "0"], "does not divide 0 GPUs"),
        ([*small, "--plot", str(tmp_path / "nowhere" / "p.png")], "there is no folder"),
        ([*small, "--plot", str(tmp_path / "p.txt")], "a plot is a file that ends in .png, .svg, .pdf, not p.txt"),
        ([*small, "--plot", str(tmp_path)], "a plot is a file that ends in"),
    ):
        assert cli.main(arguments) == 1, arguments
        captured = capsys.readouterr()
        assert captured.out == "", arguments
        assert captured.err.startswith("fastac: "), captured.err
        assert captured.err.count("\n") == 1, captured.err
        assert message in captured.err, captured.err


@pytest.mark.parametrize(
    "arguments",
    [[], ["--frames", "nine"], ["--optimizer", "lion"], ["--dtype", "int8"], ["--gpus", "two"]],
    ids=lambda value: " ".join(value),
)
def test_a_wrong_call(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *(["wan2.1-t2v-1.3b"] if arguments else []), *arguments])
    assert ended.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_wrong_options_cost_no_simulation(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are known before minutes are spent."""
    monkeypatch.setattr("fastac.subjects.simulate", None)
    for arguments, message in (
        (["--budget", "much"], "expected bytes"),
        (["--memory", "80G"], "expected bytes"),
        (["--plot", str(tmp_path / "p.txt")], "a plot is a file"),
    ):
        assert cli.main([*small, *arguments]) == 1
        assert message in capsys.readouterr().err


def test_a_terminal_is_told_what_is_done(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    assert cli.main(small) == 0
    captured = capsys.readouterr()
    assert "simulating" in captured.err
    assert "simulating" not in captured.out


def test_the_installed_command() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "fastac.cli", "plan", "wan2.1-t2v-1.3b", "--plot", "nowhere/p.png"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.splitlines()[-1].startswith("fastac: plan: can not write the plot nowhere/p.png")
    assert "Traceback" not in ran.stderr


def test_training_is_what_the_options_say(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Training] = []

    def noted(configuration: object, video: object, training: Training, **options: object) -> Any:
        seen.append(training)
        raise fastac.FastacError("enough")

    monkeypatch.setattr("fastac.plan_command.plan_video", noted)
    options = ["--lora", "8", "--optimizer", "adamw8bit", "--gpus", "8", "--context-parallel", "4"]
    assert cli.main([*small, *options]) == 1
    assert seen == [Training(8, "adamw8bit", 8, 4)]
