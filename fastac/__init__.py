"""Selective activation checkpointing that knows attention backends.

fastac.enable(transformer, policy="attn_only")

Torch is imported with the first use of a public name, not by `fastac --help`.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

# Type checkers and editors see the public names here. At run time, `__getattr__` finds them.
if TYPE_CHECKING:
    from fastac.backends.opaque import make_visible
    from fastac.checkpointing import checkpoint, patch_checkpoint
    from fastac.compiled.blocks import Compilation, compile_attention
    from fastac.errors import FastacError, PolicyNotAppliedError, UnsupportedBackendError
    from fastac.hook import compile, disable, enable, first_blocks  # noqa: A004 as torch.compile
    from fastac.planning import Auto, Plan, plan
    from fastac.policy import Policy
    from fastac.registry import AttentionOp, OpaqueFunction, Row, register
    from fastac.verification.report import Report, report
    from fastac.verification.verify import Verification, verify

__version__ = "0.1.0"

__all__ = [
    "AttentionOp",
    "Auto",
    "Compilation",
    "FastacError",
    "NothingFitsError",
    "OpaqueFunction",
    "Plan",
    "Policy",
    "PolicyNotAppliedError",
    "Report",
    "Row",
    "UnsupportedBackendError",
    "Verification",
    "checkpoint",
    "compile",
    "compile_attention",
    "disable",
    "enable",
    "first_blocks",
    "make_visible",
    "patch_checkpoint",
    "plan",
    "register",
    "report",
    "verify",
]

_ROOMS = (
    "checkpointing",
    "compiled.blocks",
    "backends.opaque",
    "errors",
    "hook",
    "planning",
    "policy",
    "registry",
    "verification.report",
    "verification.verify",
)
"""Modules that define the public names."""


def _load() -> None:
    """Register the rows of the catalogue and import every public name."""
    from fastac.engine import releases

    # This comes before the other imports: with a torch that is too old, one of them would fail without saying so.
    releases.need(releases.ENGINE, "Install a newer torch.")
    importlib.import_module("fastac.backends")
    for room in _ROOMS:
        module = importlib.import_module(f"fastac.{room}")
        globals().update({name: vars(module)[name] for name in __all__ if name in vars(module)})
    # Both calls come last: ops get formulas by the rows, and dynamo is told about the modules, that are loaded by now.
    # The copy of sys.modules is for other threads, which may import meanwhile.
    from fastac.engine import torch_private
    from fastac.registry import flops

    flops.register_formulas()
    torch_private.run_eagerly([module for name, module in sys.modules.copy().items() if name.startswith("fastac.")])


def __dir__() -> list[str]:
    # Completion offers names that are not loaded yet.
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    # Python and its tools also ask for names that are not public, such as __path__. These do not import torch.
    if name not in __all__:
        raise AttributeError(f"module 'fastac' has no attribute {name!r}")
    _load()
    return globals()[name]
