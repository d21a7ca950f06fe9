"""What the tests of the commands share: the command as it is installed, and the arguments for a small model."""

from __future__ import annotations

import importlib.resources
import json
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.models.tiny import TINY


class Ran(NamedTuple):
    """What a command returned and printed."""

    status: Any
    out: str
    err: str


Command = Callable[..., Ran]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """The installed command, in this process."""
    (installed,) = entry_points(group="console_scripts", name="fastac")
    main = installed.load()

    def run(*arguments: str) -> Ran:
        capfd.readouterr()
        monkeypatch.setattr(sys, "argv", ["fastac", *arguments])
        try:
            status = main()
        except SystemExit as ended:
            status = ended.code
        return Ran(status, *capfd.readouterr())

    return run


def configuration(folder: Path, name: str, **changes: Any) -> str:
    """The path of a config.json of a tiny model, by its class, or of a model that fastac ships."""
    if name in TINY:
        config = {"_class_name": name, **TINY[name].config}
    else:
        shipped = importlib.resources.files("fastac.models") / "configurations" / f"{name}.json"
        config = json.loads(shipped.read_text(encoding="utf-8"))["transformer"]
    path = folder / "config.json"
    path.write_text(json.dumps({**config, **changes}))
    return str(path)


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """The arguments for a Wan transformer of three small blocks, and a short video."""
    path = configuration(tmp_path, "WanTransformer3DModel", num_layers=3)
    return [path, "--frames", "5", "--height", "32", "--width", "48", "--text-tokens", "8"]


@pytest.fixture
def available(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Says how many bytes of memory the machine has left."""
    read = Path.read_text

    def say(size: int) -> None:
        def read_text(path: Path, *args: Any, **kwargs: Any) -> str:
            is_memory = str(path).startswith(("/proc/meminfo", "/sys/fs/cgroup"))
            return f"MemAvailable: {size // 1024} kB\n" if is_memory else read(path, *args, **kwargs)

        monkeypatch.setattr(Path, "read_text", read_text)

    return say
