"""What the benchmarks share: how a model is built, the facts of the machine, and how a result is written."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import diffusers
import torch

from fastac.machine import facts
from fastac.measuring import Allocated as Allocated
from fastac.measuring import allocated_bytes as allocated_bytes

RESULTS = Path(__file__).resolve().parent / "results"


def build_model(cls: Any, dtype: torch.dtype, **config: Any) -> Any:
    """A model with the same random weights in every call, to be trained, all of it in `dtype`."""
    diffusers.utils.logging.set_verbosity_error()  # it would rather keep norms in fp32: no matter without training
    torch.manual_seed(0)
    return cls(**config).to(dtype).train()


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write `result` as JSON, with the machine it was measured on and the command that measures it again."""
    command = shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"command": command, "machine": facts(), **result}, indent=2) + "\n")
