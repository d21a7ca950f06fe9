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


def test_the_installed_command() -> None:
    ran = subprocess.run([sys.executable, "-m", "fastac.cli", "check", "Wan"], capture_output=True, text=True)
    assert ran.returncode == 1
    assert "Traceback" not in ran.stderr
    help_text = subprocess.run([sys.executable, "-m", "fastac.cli", "--help"], capture_output=True, text=True)
    assert help_text.returncode == 0
    assert "backends" in help_text.stdout
