"""The benchmarks as modules, which import each other by their names alone."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[2] / "benchmarks"))
    return importlib.import_module


@pytest.fixture
def run(benchmark: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a benchmark with options, and reads what it wrote."""

    def run(name: str, *options: str) -> Any:
        output, threads = tmp_path / "new" / "result.json", torch.get_num_threads()
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *options, "--output", str(output)])
        try:
            assert benchmark(name).main() == 0
        finally:
            torch.set_num_threads(threads)
        result = json.loads(output.read_text())
        assert result["command"].startswith(f"python benchmarks/{name}.py")
        assert {"processor", "cores", "threads", "python", "torch", "diffusers", "fastac"} <= result["machine"].keys()
        return result

    return run
