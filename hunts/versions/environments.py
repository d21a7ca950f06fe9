"""Virtual environments with other releases of torch and diffusers, kept between runs in the user's cache folder.

torch comes as it stands on the package index, without the NVIDIA libraries that it links: `stand_ins` replaces them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from hunts.versions import stand_ins
from tests.pairs import DIFFUSERS

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "fastac", "versions")

OWN = "2.13.0"
"""What the environment has that runs this."""

OF_TORCH = ("filelock", "fsspec", "Jinja2", "networkx", "setuptools", "sympy", "typing_extensions")
OF_TESTS = (
    "hypothesis",
    "numpy",
    "pytest",
    "pytest-timeout",
    "pytest-xdist",
    "psutil",
    "PyYAML",
    "rich",
    "transformers",
)
BESIDE_TORCH = ("accelerate", "peft")
"""Installed without what they ask for: pip would bring the NVIDIA libraries along for torch."""


def python_of(release: str) -> str:
    """The interpreter of a release's environment, which is made where it is missing or was made in another way."""
    if release == OWN:
        return sys.executable
    folder = FOLDER / f"torch-{release}"
    python = folder / "bin" / "python"
    torch, *rest = _requirements(release)
    recipe = "\n".join([torch, *rest, sys.version, Path(stand_ins.__file__).read_text()])
    stamp = folder / "recipe"
    if not stamp.is_file() or stamp.read_text() != recipe:
        print(f"making an environment with {torch} in {folder}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        _install(python, "--no-deps", torch)
        _install(python, *rest)
        _install(python, "--no-deps", *map(_pinned, BESIDE_TORCH))
        (libraries,) = folder.glob("lib/python*/site-packages/torch/lib")
        stand_ins.make(libraries)
        stamp.write_text(recipe)
    return str(python)


def _requirements(release: str) -> list[str]:
    return [f"torch=={release}", f"diffusers=={DIFFUSERS[release]}", *map(_pinned, (*OF_TORCH, *OF_TESTS))]


def _pinned(name: str) -> str:
    (found,) = re.findall(rf"^{name}==.*$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return str(found)


def _install(python: Path, *what: str) -> None:
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *what]
    # The releases are asked for by number: no constraint of the machine's is to choose others.
    environment = {**os.environ, "PIP_CONSTRAINT": os.devnull}
    done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}")
