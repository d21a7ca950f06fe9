"""The command line: tables a user understands, one clear line for a wrong call."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName

from fastac import cli, models, verification
from fastac.backends import LIBRARIES
from fastac.errors import PolicyNotAppliedError


@pytest.fixture(autouse=True)
def _without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables are as wide as where they are piped to a file, whatever these tests are run in."""
    monkeypatch.setenv("COLUMNS", str(cli.WIDTH))


def test_backends_lists_every_backend_and_what_this_machine_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split("│")[1].strip(): line for line in lines if "│" in line}
    assert {backend.value for backend in AttentionBackendName} <= set(cells)
    assert "can be saved" in cells["native"]
    assert "decomposed" in cells["_native_math"]
    assert "refused" in cells["sage"]
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in cells


def test_backends_lists_every_library_and_how_it_is_saved(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["backends"]) == 0
    table = capsys.readouterr().out
    assert max(map(len, table.splitlines())) <= cli.WIDTH
    text = " ".join(" ".join(line.split("│")[1].split()) for line in table.splitlines() if "│" in line)
    for library in LIBRARIES:
        assert library.name in text, "names are whole, on as many lines as they need"

    assert cli.main(["backends", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["versions"]) == {"fastac", "torch", "diffusers"}
    assert found["versions"]["torch"] == torch.__version__
    libraries = {library["name"]: library for library in found["libraries"]}
    assert list(libraries) == [library.name for library in LIBRARIES]
    for library in LIBRARIES:
        told = libraries[library.name]
        assert (told["verdict"], told["how"], told["advice"]) == (library.verdict, library.how, library.advice)
        assert library.distribution or told["installed"] == torch.__version__
    sdpa = libraries["scaled_dot_product_attention"]
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in sdpa["ops"]
    assert all(op in table for op in sdpa["ops"])
    backends = {backend["name"]: backend for backend in found["diffusers_backends"]}
    assert {backend.value for backend in AttentionBackendName} <= set(backends)
    assert (backends["native"]["can_be_saved"], backends["native"]["missing"]) == (True, None)
    assert (backends["sage"]["can_be_saved"], backends["sage"]["verdict"]) == (False, "not_trainable")


def test_backends_tells_versions_without_importing(tmp_path: Path) -> None:
    """A library that is installed and can not be imported here, as CUDA libraries can not everywhere."""
    (tmp_path / "flash_attn_4-4.5.dist-info").mkdir()
    (tmp_path / "flash_attn_4-4.5.dist-info" / "METADATA").write_text("Name: flash-attn-4\nVersion: 4.5\n")
    (tmp_path / "xformers-0.1.dist-info").mkdir()
    (tmp_path / "xformers-0.1.dist-info" / "METADATA").write_text("Name: xformers\nVersion: 0.1\n")
    (tmp_path / "flash_attn").mkdir()
    for module in ("flash_attn/__init__.py", "vsa.py", "fastvideo.py", "fastvideo_kernel.py"):
        (tmp_path / module).write_text("import sys; sys.exit('imported')")
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[1])))
    ran = subprocess.run(
        [sys.executable, "-m", "fastac.cli", "backends", "--json"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    installed = {library["name"]: library["installed"] for library in json.loads(ran.stdout)["libraries"]}
    assert (installed["flash-attn 4"], installed["xFormers"]) == ("4.5", "0.1")


@pytest.mark.parametrize("class_name", ["WanTransformer3DModel", "LTXVideoTransformer3DModel"])
@pytest.mark.parametrize("options", [[], ["--dtype", "bf16"], ["--policy", "full"], ["--engine", "sac"]], ids=str)
def test_check_proves_the_promise(class_name: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", class_name, *options]) == 0
    table = capsys.readouterr().out
    assert class_name in table
    assert "bitwise equal" in table
    assert "attention runs in backward" in table


@pytest.fixture
def three_models(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A catalogue of a plain model, one with attention outside its blocks, one that does not look at the backend."""
    names = ["WanTransformer3DModel", "HunyuanVideoTransformer3DModel", "CogVideoXTransformer3DModel"]
    monkeypatch.setattr(models, "MODELS", {name: models.MODELS[name] for name in names})
    return names


def test_check_all_is_a_table_of_every_class(three_models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--all"]) == 0
    table = capsys.readouterr().out
    cells = {row[0]: row[1:] for line in table.splitlines() if (row := [c.strip() for c in line.split("│")[1:-1]])}
    assert list(cells) == three_models
    assert cells["WanTransformer3DModel"] == ["4", "0", "4", "52.0 KiB", "as set", "kept", ""]
    assert cells["HunyuanVideoTransformer3DModel"][:3] == ["5", "0", "4"]
    assert cells["HunyuanVideoTransformer3DModel"][-1] == "1 outside the blocks"
    assert cells["CogVideoXTransformer3DModel"][4] == "always SDPA"

    assert cli.main(["check", "--all", "--json", "--policy", "full", "--dtype", "bf16", "--engine", "sac"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {name: found[name] for name in ("policy", "engine", "dtype", "device")} == {
        "policy": "full",
        "engine": "sac",
        "dtype": "bf16",
        "device": "cpu",
    }
    assert set(found["versions"]) == {"fastac", "torch", "diffusers"}
    wan, hunyuan_video, _ = found["models"]
    assert (wan["attention"], wan["in_blocks"], wan["again"], wan["saved"], wan["verdict"]) == (4, 4, 4, 0, "kept")
    assert [hunyuan_video[name] for name in ("attention", "in_blocks", "again")] == [5, 4, 4]

    assert cli.main(["check", "--all", "--policy", "long_attn_only"]) == 0
    table = capsys.readouterr().out
    assert table.count("no attention over 1,024") == 3, "what was not tried is not told as if it were"
    assert table.splitlines()[-1] == "3 kept"


def test_check_all_tells_what_is_refused(three_models: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--all", "--json", "--backend", "_native_math"]) == 0
    refused = {model["name"]: model["verdict"] for model in json.loads(capsys.readouterr().out)["models"]}
    assert refused["WanTransformer3DModel"] == "refused"
    assert refused["CogVideoXTransformer3DModel"] == "kept", "it does not look at the backend"


@pytest.mark.parametrize("kind", [PolicyNotAppliedError, TypeError])
def test_check_all_goes_on_after_a_class_that_fails(
    kind: type[Exception],
    three_models: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A broken promise makes the command fail; a model that diffusers itself can not train here does not."""
    verify, error = verification.verify, kind("verify: ran 4 attention kernels in backward\nand a table")

    def broken(model: torch.nn.Module, **options: Any) -> Any:
        if type(model).__name__ == "WanTransformer3DModel":
            raise error
        return verify(model, **options)

    monkeypatch.setattr(verification, "verify", broken)
    assert cli.main(["check", "--all"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if "Transformer3DModel" in line]
    assert [("failed" in line, "kept" in line) for line in lines] == [(True, False), (False, True), (False, True)]
    assert "verify: ran 4 attention" in lines[0]


def test_check_all_tells_of_what_can_not_be_built_or_is_not_there(
    three_models: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wan, hunyuan_video, _ = three_models
    rows = dict(models.MODELS)
    rows[wan] = dataclasses.replace(rows[wan], class_name="NoSuchTransformer3DModel")
    rows[hunyuan_video] = dataclasses.replace(rows[hunyuan_video], config={"num_layers": "two"})
    monkeypatch.setattr(models, "MODELS", rows)
    assert cli.main(["check", "--all", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["models"]
    assert [one["verdict"] for one in found] == ["does not train here", "failed", "kept"]
    assert found[0]["problem"] == "this diffusers has no NoSuchTransformer3DModel"
    assert found[1]["problem"].startswith("it can not be built: ")


@pytest.mark.parametrize("arguments", [["check"], ["check", "--all", "WanTransformer3DModel"]])
def test_check_wants_a_class_or_all(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "--all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "WanTransformer"], "no tiny model of this class"),
        (["check", "WanTransformer3DModel", "--json"], "it is for --all"),
        (["check", "--all", "--device", "nonsense"], "--device nonsense"),
        (["check", "WanTransformer3DModel", "--backend", "_native_math"], "is decomposed"),
        (["check", "WanTransformer3DModel", "--backend", "sage"], "diffusers can not use it here"),
        (["check", "WanTransformer3DModel", "--backend", "nonsense"], "diffusers can not use it here"),
        (["check", "WanTransformer3DModel", "--device", "nonsense"], "--device nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_can_not_be_done_is_one_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("fastac: ")
    assert message in captured.err
    assert captured.out == ""


@pytest.mark.slow
def test_bench_measures_a_tiny_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    written = tmp_path / "bench.json"
    arguments = ["bench", "WanTransformer3DModel", "--dtype", "fp32", "--rounds", "2", "--budget", "20KiB"]
    assert cli.main([*arguments, "--json", str(written)]) == 0
    captured = capsys.readouterr()
    assert captured.err == "", "what is being done is told to a terminal alone"
    cells = {
        row[0]: row[1:] for line in captured.out.splitlines() if (row := [c.strip() for c in line.split("│")[1:-1]])
    }
    assert [cells[name][4] for name in ("none", "full", "attn_only", "torch SAC, by name")] == ["4", "8", "4", "4"]
    assert {row[5] for row in cells.values()} == {"bitwise"}

    found = json.loads(written.read_text())
    assert str(tmp_path) not in found["command"]
    assert found["command"].split()[1:] == [*arguments[:4], "--device", "cpu", *arguments[4:]]
    assert {"processor", "cores", "torch", "fastac"} < found["machine"].keys()
    assert (found["rounds"], found["budget"], found["reference"]) == (2, 20 * 2**10, "none")
    for row in found["rows"]:
        assert len(row["seconds"]) == 2
        assert cells[row["variant"]][4] == str(row["attention"])


@pytest.fixture
def small_configuration(tmp_path: Path) -> Path:
    """The config.json of a Wan transformer that is small, and has three blocks."""
    config = {**models.MODELS["WanTransformer3DModel"].config, "num_layers": 3}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"_class_name": "WanTransformer3DModel", **config}))
    return path


SMALL = ["--frames", "5", "--height", "32", "--width", "48", "--text-tokens", "8", "--rounds", "1"]


@pytest.mark.slow
def test_bench_of_a_configuration_and_a_video(small_configuration: Path, capsys: pytest.CaptureFixture[str]) -> None:
    written = small_configuration.with_name("bench.json")
    command = ["bench", str(small_configuration), *SMALL, "--json", str(written)]
    assert cli.main([*command, "--batch", "2"]) == 0
    table = capsys.readouterr().out
    title = " ".join(table.split())  # it is folded to the width of the table
    assert "2 x 5 frames of 32 x 48, 8 text tokens, blocks x 3, bf16 on cpu" in title
    all_blocks = json.loads(written.read_text())
    assert [row["attention"] for row in all_blocks["rows"][:3]] == [6, 12, 6]

    assert cli.main([*command, "--layers", "2"]) == 0
    assert "blocks x 2" in capsys.readouterr().out
    two_blocks = json.loads(written.read_text())
    assert [row["attention"] for row in two_blocks["rows"][:3]] == [4, 8, 4]
    assert two_blocks["weights"] < all_blocks["weights"]


@pytest.mark.slow
def test_bench_goes_on_where_a_policy_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["bench", "WanTransformer3DModel", "--layers", "1", "--rounds", "1", "--backend", "_native_math"]
    assert cli.main(arguments) == 0
    table = capsys.readouterr().out
    cells = {row[0]: row[1:] for line in table.splitlines() if (row := [c.strip() for c in line.split("│")[1:-1]])}
    assert [cells[name][5] for name in ("none", "full", "attn_only", "budget")] == ["bitwise"] * 2 + ["refused"] * 2
    assert "blocks x 1" in table
    assert "is decomposed" in table


def test_bench_refuses_what_does_not_fit(
    small_configuration: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    nowhere = str(tmp_path / "nowhere" / "bench.json")
    for arguments, message in (
        ([str(small_configuration), *SMALL, "--layers", "4"], "has blocks x 3"),
        ([str(small_configuration), *SMALL, "--frames", "6"], "frames 6 is not"),
        ([str(small_configuration), *SMALL, "--json", nowhere], "there is no folder"),
        (["WanTransformer3DModel", "--frames", "5"], "--frames: WanTransformer3DModel stands for its tiny model"),
        (["WanTransformer3DModel", "--batch", "2"], "--batch: WanTransformer3DModel stands for its tiny model"),
        (["WanTransformer3DModel", "--rounds", "0"], "--rounds 0: 1 or more"),
        (["WanTransformer3DModel", "--layers", "0"], "--layers 0: 1 or more"),
        (["WanTransformer3DModel", "--budget", "much"], "expected bytes"),
        (["WanTransformer3DModel", "--backend", "nonsense"], "bench --backend nonsense: diffusers can not use it"),
        (["WanTransformer3DModel", "--device", "nonsense"], "bench --device nonsense: torch can not use it here"),
        (["WanTransformer3DModel", "--device", "meta"], "nothing is computed there"),
        (["wan-of-tomorrow"], "wan2.1-t2v-1.3b"),
        (["AnyFlowFARTransformer3DModel"], "no step could be run here"),
    ):
        assert cli.main(["bench", *arguments]) == 1, arguments
        captured = capsys.readouterr()
        assert captured.out == "", arguments
        assert captured.err.splitlines()[-1].startswith("fastac: "), captured.err
        assert message in captured.err, captured.err


def test_bench_wants_a_device_whose_bytes_it_can_measure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fastac.bench_command.require_device", lambda command, device: None)
    assert cli.main(["bench", "WanTransformer3DModel", "--device", "mps"]) == 1
    assert "bytes can be measured on cpu and cuda" in capsys.readouterr().err


@pytest.mark.slow
def test_bench_tells_a_terminal_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes it for a terminal
    assert cli.main(["bench", "WanTransformer3DModel", "--rounds", "1"]) == 0
    captured = capsys.readouterr()
    assert "warm-up" in captured.err
    assert "warm-up" not in captured.out


def test_the_installed_command() -> None:
    ran = subprocess.run([sys.executable, "-m", "fastac.cli", "check", "Wan"], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    help_text = subprocess.run([sys.executable, "-m", "fastac.cli", "--help"], capture_output=True, text=True)
    assert help_text.returncode == 0
    assert "backends" in help_text.stdout


def test_output_that_nobody_reads_to_its_end() -> None:
    """As in `fastac backends | head -1`."""
    command = [sys.executable, "-m", "fastac.cli", "backends", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        told = process.stderr.read()
        assert process.wait(60) == 1
    assert "Traceback" not in told
    assert "BrokenPipe" not in told
