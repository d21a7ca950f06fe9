"""fastac backends, and what all commands have in common."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest
from diffusers.models.attention_dispatch import AttentionBackendName

import fastac
from fastac import Policy
from tests import support
from tests.cli.conftest import Command
from tests.engine.simulated import simulated
from tests.support import cells_of


def test_every_library_and_backend_and_what_this_machine_can_do(command: Command) -> None:
    cells = cells_of(command("backends", "--all").out)
    assert {backend.value for backend in AttentionBackendName} <= set(cells)
    assert cells["native"][0].startswith("can be saved: ")
    assert cells["_native_math"][0].startswith("refused, decomposed: ")
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in cells
    libraries = {library["name"]: library for library in json.loads(command("backends", "--json").out)["libraries"]}
    assert set(libraries) <= set(cells)
    table = command("backends").out
    here = cells_of(table)
    assert {"native", "_native_math", "scaled_dot_product_attention"} <= set(here)
    absent = {name for name, library in libraries.items() if library["installed"] is None}
    assert not {"sage", "_native_npu", *absent} & set(here), "they are not installed"
    assert re.fullmatch(r"not installed, or cannot run here: \d+ more \(--all\)", table.splitlines()[-1])


def test_what_another_diffusers_does_not_have_is_no_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """None of them before 0.35, which has no dispatcher."""

    def names() -> list[str]:
        return [backend["name"] for backend in json.loads(command("backends", "--json").out)["diffusers_backends"]]

    package = tmp_path / "diffusers"
    package.mkdir()
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "diffusers", raising=False)
    assert not names()
    (package / "models").mkdir()
    (package / "models" / "attention_dispatch.py").write_text('NATIVE = "native"')
    assert names() == ["native"]


def test_json_of_the_installed_command_which_imports_no_library(tmp_path: Path) -> None:
    """A library that is installed and cannot be imported here, as CUDA libraries cannot everywhere, has its version."""
    (tmp_path / "xformers-0.1.dist-info").mkdir()
    (tmp_path / "xformers-0.1.dist-info" / "METADATA").write_text("Name: xformers\nVersion: 0.1\n")
    (tmp_path / "flash_attn").mkdir()
    for module in ("flash_attn/__init__.py", "vsa.py", "fastvideo.py", "fastvideo_kernel.py"):
        (tmp_path / module).write_text("import sys; sys.exit('imported')")
    path = os.pathsep.join((str(tmp_path), str(Path(__file__).parents[2])))
    ran = subprocess.run(
        [str(Path(sys.executable).with_name("fastac")), "backends", "--json"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["versions"]["torch"] == version("torch")
    libraries = {library["name"]: library for library in found["libraries"]}
    assert libraries["xFormers"]["installed"] == "0.1"
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in libraries["scaled_dot_product_attention"]["ops"]
    backends = {backend["name"]: backend for backend in found["diffusers_backends"]}
    assert (backends["native"]["can_be_saved"], backends["native"]["missing"]) == (True, None)
    assert (backends["sage"]["can_be_saved"], backends["sage"]["verdict"]) == (False, "not_trainable")


def test_everything_fits_80_columns(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """Where nothing says how wide a terminal is, and nothing is cut off. Tables of plan and bench have tests there."""
    model, inputs = support.build("WanTransformer3DModel")
    fastac.enable(model, {"blocks.0": "full", "*": Policy(min_kv=4, linear=("ffn.*",), offload=True)})
    with simulated(late=False):
        verified = fastac.verify(model, **inputs)
        support.train_step(model, inputs)
    for columns in (None, 50, 200):
        width = columns or 80
        monkeypatch.setenv("COLUMNS", str(width)) if columns else monkeypatch.delenv("COLUMNS")
        for arguments in (["backends"], ["backends", "--all"]):
            text = command(*arguments).out
            assert min(width, 81) - 10 < max(map(len, text.splitlines())) <= width, text
            assert "…" not in text
        for text in map(str, (verified, fastac.report(model))):
            assert min(width, 81) - 20 < max(map(len, text.splitlines())) <= width, text
            assert "…" not in text


@pytest.mark.slow
def test_a_process_prints_nothing_of_other_libraries() -> None:
    """Not even what libkineto logs of profiles."""
    program = """
import torch, fastac
class Model(torch.nn.Linear):
    def forward(self, x):
        x = super().forward(x)[None]
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)
print(fastac.verify(Model(8, 8), torch.ones(1, 4, 8)))
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "KINETO_LOG_LEVEL")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    run = partial(subprocess.run, env=environment, capture_output=True, text=True)
    ran = run([sys.executable, "-c", program])
    assert (ran.returncode, ran.stderr) == (0, "")
    assert all(line.startswith(("Model: ", "What recompute ran", *"┏┃┡│└")) for line in ran.stdout.splitlines())
    ran = run([sys.executable, "-m", "fastac", "--version"])
    assert (ran.stdout, ran.stderr) == (f"fastac {version('fastac')}\n", "")


def test_a_wrong_call(command: Command) -> None:
    for arguments in ([], ["check"], ["plan", "wan2.1-t2v-1.3b", "--frames", "nine"]):
        ran = command(*arguments)
        assert ran.status == 2
        assert "usage: fastac" in ran.err


def test_a_reader_that_has_read_enough(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback: nothing is said."""

    class Closed(io.TextIOWrapper):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with (tmp_path / "pipe").open("wb") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Closed(pipe))
        ran = command("backends")
    assert (ran.status, ran.err) == (1, "")
