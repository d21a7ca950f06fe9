"""The machine on which something was measured, for JSON."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from fastac.cli import version


def machine() -> dict[str, Any]:
    """The machine. The version of a distribution that is not installed is None; without CUDA there is no gpu.

    A `load_average` well above `threads` means that other processes were running.
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


def gpu() -> dict[str, Any]:
    """Name and memory of the current CUDA device, and the versions of CUDA and cuDNN."""
    properties = torch.cuda.get_device_properties()
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": f"{properties.major}.{properties.minor}",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def _processor() -> str:
    """The processor's name, which `platform` does not know on Linux."""
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
