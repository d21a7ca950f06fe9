"""The real packages that tests and hunts use, and their downloads.

They are downloaded and unpacked, not installed: an installed flash_attn without CUDA breaks `import diffusers`, and two
of them share a name. Only their Python files are used, so wheels for another Python or another machine will do.

    python -m tests.backends.packages FOLDER

puts each that is not there yet into FOLDER/<name>-<version>, and names on stderr what is not available. Those that only
hunts use come with --hunts.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple

VERSION_FILES = r"[^/]+\.(dist|egg)-info/(METADATA|PKG-INFO|entry_points\.txt)"
"""Kept of every package: what diffusers and others ask for its version."""

FOLDER = Path(sys.prefix, "backends")
"""Where `make test` puts them: in the virtual environment that runs."""


WHEEL = ("--only-binary", ":all:")
# pip asks a source release for its name, by running its setup.py: that needs what is installed here.
SOURCE = ("--no-binary", ":all:", "--no-build-isolation")


def wheel_for(version: str, *platforms: str) -> tuple[str, ...]:
    """The wheel for a Python version and platforms, whatever runs here."""
    return (*WHEEL, "--python-version", version, "--implementation", "cp", *(f"--platform={p}" for p in platforms))


class Package(NamedTuple):
    """One release on the package index.

    options: of pip. keep: regular expression for the files that are unpacked. project: what the index calls it, where
    that is not its name here.
    """

    version: str
    options: tuple[str, ...] = WHEEL
    keep: str = r".*\.(py|json)"
    project: str = ""


PACKAGES = {
    # With the folder `hopper`, which is flash-attn 3.
    "flash-attn": Package("2.8.3.post2", SOURCE, r"(flash_attn|hopper)/.*\.py"),
    "flash-attn-4": Package("4.0.0b36"),
    "xformers": Package("0.0.35", wheel_for("3.12", "manylinux_2_28_x86_64")),
    "fastvideo": Package("0.2.1", SOURCE, r"fastvideo/.*\.(py|json)"),
    "fastvideo-kernel": Package(
        "0.3.5", wheel_for("3.12", "manylinux_2_35_x86_64", "manylinux_2_34_x86_64"), r".*\.py"
    ),
    "vsa": Package("0.0.4", wheel_for("3.11", "manylinux2014_x86_64")),
    "sageattention": Package("1.0.6"),
    # For its interpreter, which needs neither the tools of CUDA and ROCm nor the compiler's headers. Triton 3.9 has no
    # block pointers any more, which VSA and LongCat use; the interpreter of 3.6 fails with numpy 2.4.
    "triton": Package("3.8.0", keep=r".*\.(py|json)|triton/_C/.*"),
    # Trainers: their models and what checkpoints them, without an __init__ that imports pipelines and tokenizers.
    "simpletuner": Package(
        "4.10.1",
        (*WHEEL, "--ignore-requires-python"),
        r"simpletuner/helpers/(models/(wan|hunyuanvideo|kandinsky5_video|ltxvideo2)/transformer\w*"
        r"|models/(flowmap|ltxvideo2/__init__)|training/(grounding/)?[a-z]\w*|musubi_block_swap|logging)\.py",
    ),
    "diffsynth": Package("2.1.12", keep=r"diffsynth/.*\.py"),
    "ltx-core": Package("1.0.0", keep=r"ltx_core/.*\.py"),
    "finetrainers": Package("0.2.0", keep=r"finetrainers/utils/(activation_checkpoint|_common)\.py"),
    "nemo-automodel": Package(
        "0.7.0", keep=r"nemo_automodel/(_diffusers/parallel\w+|(components/distributed|shared)/.*)\.py"
    ),
    "torchtitan": Package("0.3.0", keep=r"torchtitan/.*\.py"),
    "spmd-types": Package("0.3.1", keep=r"spmd_types/.*\.py"),
    # Older than the one that is installed.
    "diffusers-0.33": Package("0.33.1", project="diffusers"),
    "diffusers-0.36": Package("0.36.0", project="diffusers"),
    "diffusers-0.39": Package("0.39.0", project="diffusers"),
}

LIBRARIES = {
    "flash_attn_2": ("flash-attn",),
    "flash_attn_3": ("flash-attn/hopper",),
    "flash_attn_4": ("flash-attn-4", "fastvideo-kernel", "triton"),
    "xformers": ("xformers",),
    "varlen": (),
    "diffusers_backends": ("flash-attn", "flash-attn-4", "xformers"),
    "fastvideo": ("fastvideo", "flash-attn", "flash-attn-4"),
    "fastvideo_kernel": ("fastvideo-kernel", "triton"),
    "vsa": ("vsa", "triton"),
    "vmoba": ("fastvideo-kernel", "flash-attn", "triton"),
    "sla": ("fastvideo", "fastvideo-kernel", "triton"),
    "attn_qat": ("fastvideo-kernel", "triton"),
    "longcat": ("fastvideo", "triton"),
    "sage": ("sageattention", "triton"),
}
"""File in tests/backends/libraries -> what it finds on sys.path: a package, or a folder in one."""

TRAINERS = {"simpletuner": ("simpletuner",)}
"""File in tests/trainers -> the same."""

HUNTS = {
    "diffsynth": ("diffsynth",),
    "ltx_core": ("ltx-core",),
    "finetrainers": ("finetrainers",),
    "nemo_automodel": ("nemo-automodel",),
    "torchtitan": ("torchtitan", "spmd-types"),
    "fastvideo_training": ("fastvideo",),
    "transformers_models": (),
}
"""File in hunts/trainers/trainers -> the same. Not in CI."""

DIFFUSERS = {
    "diffusers_0_33": ("diffusers-0.33",),
    "diffusers_0_36": ("diffusers-0.36",),
    "diffusers_0_39": ("diffusers-0.39",),
}
"""Case of test_older_diffusers -> the same."""

IN_CI = LIBRARIES | TRAINERS | DIFFUSERS
NEEDS = IN_CI | HUNTS


def place(name: str, folder: Path | None = None) -> Path:
    return (folder or FOLDER) / f"{name}-{PACKAGES[name].version}"


def names(*libraries: str) -> list[str]:
    """The packages that the files of some libraries need."""
    return list(dict.fromkeys(PurePosixPath(path).parts[0] for library in libraries for path in NEEDS[library]))


def missing(library: str) -> list[str]:
    """The packages that the file of a library needs and that are not here, with their versions."""
    return [f"{name} {PACKAGES[name].version}" for name in names(library) if not place(name).is_dir()]


def use(library: str) -> None:
    """Put the packages that the file of a library needs first on sys.path.

    Raises ModuleNotFoundError when one is not here.
    """
    if absent := missing(library):
        raise ModuleNotFoundError(f"{library} needs {', '.join(absent)} in {FOLDER}: `make test` downloads them")
    paths = [PurePosixPath(path).parts for path in NEEDS[library]]
    sys.path[:0] = [str(place(name).joinpath(*inside)) for name, *inside in paths]


def download(name: str, folder: Path) -> None:
    """Unpack a package into FOLDER/<name>-<version>, which is there only when it is complete.

    Raises CalledProcessError, with pip's output, when it is not available.
    """
    package, unpacked_at = PACKAGES[name], place(name, folder)
    with tempfile.TemporaryDirectory(dir=folder, prefix=f".{name}-") as temporary:
        archives, unpacked = Path(temporary, "archives"), Path(temporary, "unpacked")
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        command += [*package.options, "--dest", str(archives), f"{package.project or name}=={package.version}"]
        without_cuda = {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE", "FLASH_ATTENTION_FORCE_BUILD": "TRUE"}
        subprocess.check_output(command, env=os.environ | without_cuda, text=True, stderr=subprocess.STDOUT)
        (archive,) = archives.iterdir()
        keep = re.compile(rf"{package.keep}|{VERSION_FILES}")
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as wheel:
                wheel.extractall(unpacked, [path for path in wheel.namelist() if keep.fullmatch(path)])
        else:
            with tarfile.open(archive) as source:
                files = [file for file in source if file.isfile()]
                for file in files:
                    file.name = file.name.partition("/")[2]  # a source release has a folder around it
                source.extractall(unpacked, [file for file in files if keep.fullmatch(file.name)])
        try:
            unpacked.rename(unpacked_at)
        except OSError:
            if not unpacked_at.is_dir():  # else another process was first
                raise


def main() -> None:
    """Download what is not there. With --stamp, touch that file when nothing is missing."""
    parser = argparse.ArgumentParser(prog="python -m tests.backends.packages", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stamp", type=Path)
    parser.add_argument("--hunts", action="store_true")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    needed = names(*(NEEDS if arguments.hunts else IN_CI))
    absent = [name for name in needed if not place(name, arguments.folder).is_dir()]
    with ThreadPoolExecutor(2) as pool:
        reasons = list(pool.map(lambda name: _try(name, arguments.folder), absent))
    if not any(reasons) and arguments.stamp is not None:
        arguments.stamp.touch()


def _try(name: str, folder: Path) -> str:
    """Download a package. If that fails, print why, and return it; else return ""."""
    full = f"{name} {PACKAGES[name].version}"
    print(f"downloading {full}", flush=True)
    try:
        download(name, folder)
    except (subprocess.CalledProcessError, OSError, tarfile.TarError, zipfile.BadZipFile) as error:
        reason = f"not available, so not covered: {full}\n{(getattr(error, 'stdout', None) or str(error)).strip()}"
        print(reason, file=sys.stderr)
        return reason
    return ""


if __name__ == "__main__":
    main()
