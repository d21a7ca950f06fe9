"""The machine that something was measured on: its processor, its GPU, versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch


def facts() -> dict[str, Any]:
    """What JSON has of the machine. A distribution that is not installed has no version; without CUDA there is no gpu.

    load_average: well above `threads`, others were at work as well.
    """
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "threads": torch.get_num_threads(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "diffusers", "fastac")},
        **({"gpu": gpu()} if torch.cuda.is_available() else {}),
    }


def gpu(device: torch.device | int | None = None) -> dict[str, Any]:
    """A CUDA device, by default the current one: its name and memory, and the versions of what drives it."""
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "driver": _driver(),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _processor() -> str:
    """The processor's name, which `platform` does not know on Linux."""
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def version(distribution: str) -> str | None:
    """The installed version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _driver() -> str | None:
    """The version of NVIDIA's driver, as its own tool tells it; torch does not."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    ran = subprocess.run(
        [tool, "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    lines = ran.stdout.split()
    return lines[0] if ran.returncode == 0 and lines else None
