"""What gets installed: the whole package, and nothing at top level but `fastac`, with types for the user's code."""

from __future__ import annotations

import configparser
import contextlib
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_wheel_holds_the_whole_package(tmp_path: Path) -> None:
    """And nothing else at top level: pyproject.toml lists packages by name. With the licence and the command."""
    # Built from a copy: a `build` folder left in the tree would leak old files into it.
    source, target = tmp_path / "source", tmp_path / "wheel"
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # deleted, and not yet committed
            shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    build = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)],
        capture_output=True,
        text=True,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    (path,) = target.glob("*.whl")
    wheel = zipfile.ZipFile(path)
    files = [path for path in (ROOT / "fastac").rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    expected = {path.relative_to(ROOT).as_posix() for path in files}
    assert any(name.endswith(".json") for name in expected)
    metadata = {name for name in wheel.namelist() if name.split("/")[0].endswith(".dist-info")}
    assert set(wheel.namelist()) - metadata == expected
    (licence,) = (name for name in metadata if name.endswith("/LICENSE"))
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()
    (commands,) = (name for name in metadata if name.endswith("/entry_points.txt"))
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(commands).decode())
    assert dict(entry_points["console_scripts"]) == {"fastac": "fastac.cli:main"}


@pytest.mark.parametrize("catalogue", ["backends", "models"])
def test_root_links(catalogue: str) -> None:
    link = ROOT / catalogue
    assert link.is_symlink()
    assert link.readlink() == Path("fastac", catalogue)  # relative: it holds wherever the repository is cloned
    assert (link / "__init__.py").samefile(ROOT / "fastac" / catalogue / "__init__.py")


TYPED = """
    import fastac
    from typing_extensions import assert_type

    @fastac.checkpoint(policy=fastac.Policy("attn_only", min_kv=1024))
    def region(count: int, *, factor: float = 2.0) -> float:
        return count * factor

    class Block:
        @fastac.checkpoint(policy="full", early_stop=False)
        def forward(self, count: int) -> str:
            return str(count)

    def plain(count: int) -> float:
        return float(count)

    assert_type(region(3, factor=0.5), float)
    assert_type(Block().forward(3), str)
    assert_type(fastac.checkpoint(plain, 3, policy="long_attn_only", determinism_check="none"), float)
    assert_type(fastac.compile_attention(plain, dynamic=False)(3), float)
    region("3")  # type: ignore[arg-type]
    Block().forward()  # type: ignore[call-arg]
    fastac.checkpoint(polcy="full")  # type: ignore[call-overload]
"""
CONFIGURATION = """
    [mypy]
    strict = true
    [mypy-torch.*,rich.*]
    follow_imports = skip
    [mypy-fastac.*]
    follow_imports = silent
"""


def test_types_of_user_code(tmp_path: Path) -> None:
    """A decorated function keeps its parameters and its result, under `mypy --strict`. torch is not read: slow."""
    for name, text in (("user.py", TYPED), ("mypy.ini", CONFIGURATION)):
        (tmp_path / name).write_text(textwrap.dedent(text))
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "user.py"],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert found.returncode == 0, found.stdout + found.stderr
