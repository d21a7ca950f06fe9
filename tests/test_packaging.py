"""What gets installed: the whole package, and nothing at top level but `fastac`."""

from __future__ import annotations

import configparser
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of this tree, built from a copy: a `build` folder left in the tree would leak old files into it."""
    source = tmp_path_factory.mktemp("source")
    tracked_or_new = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    for name in filter(None, tracked_or_new.split("\0")):
        original, copy = ROOT / name, source / name
        if not os.path.lexists(original):  # deleted, and not yet committed
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        if original.is_symlink():
            copy.symlink_to(original.readlink())
        else:
            copy.write_bytes(original.read_bytes())
    target = tmp_path_factory.mktemp("wheel")
    build = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_the_whole_package(wheel: zipfile.ZipFile) -> None:
    """Nothing else at top level; and packages are listed by name in pyproject.toml, one may be forgotten there."""
    files = [path for path in (ROOT / "fastac").rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    expected = {path.relative_to(ROOT).as_posix() for path in files}
    assert any(name.endswith(".json") for name in expected)
    metadata = {name for name in wheel.namelist() if name.split("/")[0].endswith(".dist-info")}
    assert set(wheel.namelist()) - metadata == expected


def test_licence_is_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/LICENSE"))
    assert wheel.read(name) == (ROOT / "LICENSE").read_bytes()


def test_console_script(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/entry_points.txt"))
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(name).decode())
    assert dict(entry_points["console_scripts"]) == {"fastac": "fastac.cli:main"}


@pytest.mark.parametrize("catalogue", ["backends", "models"])
def test_root_links(catalogue: str) -> None:
    link = ROOT / catalogue
    assert link.is_symlink()
    assert link.readlink() == Path("fastac", catalogue)  # relative: it holds wherever the repository is cloned
    assert (link / "__init__.py").samefile(ROOT / "fastac" / catalogue / "__init__.py")
