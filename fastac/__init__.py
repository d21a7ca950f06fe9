"""Selective activation checkpointing that knows attention backends.

fastac.enable(transformer, policy="attn_only")
"""

import sys as _sys

from fastac import backends as backends  # registers the rows
from fastac import plugins as plugins  # looks for other packages' rows when they are first needed
from fastac import torch_internals as _torch_internals
from fastac.checkpointing import checkpoint
from fastac.compiling import Compilation, compile, compile_attention  # noqa: A004 as torch.compile
from fastac.errors import FastacError, PolicyNotAppliedError, UnsupportedBackendError
from fastac.hook import disable, enable
from fastac.opaque import make_visible
from fastac.outcome import Verification
from fastac.partitioner import inform_partitioner
from fastac.planning import Plan, plan
from fastac.policy import Policy
from fastac.registry import register
from fastac.reporting import Report, report
from fastac.rows import AttentionOp, OpaqueFunction
from fastac.verification import verify

_torch_internals.run_eagerly([module for name, module in _sys.modules.copy().items() if name.startswith("fastac.")])

__version__ = "0.1.0"

__all__ = [
    "AttentionOp",
    "Compilation",
    "FastacError",
    "OpaqueFunction",
    "Plan",
    "Policy",
    "PolicyNotAppliedError",
    "Report",
    "UnsupportedBackendError",
    "Verification",
    "checkpoint",
    "compile",
    "compile_attention",
    "disable",
    "enable",
    "inform_partitioner",
    "make_visible",
    "plan",
    "register",
    "report",
    "verify",
]
