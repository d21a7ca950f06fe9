"""The command line: tables a user understands, one clear line for a wrong call."""

from __future__ import annotations

import subprocess
import sys

import pytest
from diffusers.models.attention_dispatch import AttentionBackendName

from fastac import cli


def test_backends_lists_every_backend_and_what_this_machine_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["backends"]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split("│")[1].strip(): line for line in lines if "│" in line}
    assert {backend.value for backend in AttentionBackendName} <= set(cells)
    assert "can be saved" in cells["native"]
    assert "decomposed" in cells["_native_math"]
    assert "refused" in cells["sage"]
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in cells


@pytest.mark.parametrize("class_name", ["WanTransformer3DModel", "LTXVideoTransformer3DModel"])
@pytest.mark.parametrize("options", [[], ["--dtype", "bf16"], ["--policy", "full"], ["--engine", "sac"]], ids=str)
def test_check_proves_the_promise(class_name: str, options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", class_name, *options]) == 0
    table = capsys.readouterr().out
    assert class_name in table
    assert "bitwise equal" in table
    assert "attention runs in backward" in table


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["check", "WanTransformer"], "no tiny model of this class"),
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
