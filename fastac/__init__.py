"""Selective activation checkpointing that knows attention backends.

fastac.enable(transformer, policy="attn_only")
"""

import sys as _sys

from fastac import backends as backends  # registers the rows
from fastac.checkpoint import checkpoint
from fastac.compile.blocks import Compilation, compile, compile_attention  # noqa: A004 as torch.compile
from fastac.engine import flops as _flops
from fastac.engine import torch_private as _torch_private
from fastac.engine.opaque import make_visible
from fastac.errors import FastacError, PolicyNotAppliedError, UnsupportedBackendError
from fastac.hook import disable, enable
from fastac.planning import Plan, plan
from fastac.policy import Policy
from fastac.registry import AttentionOp, OpaqueFunction, register
from fastac.verify import Report, Verification, report, verify

_flops.register_formulas()
_torch_private.run_eagerly([module for name, module in _sys.modules.copy().items() if name.startswith("fastac.")])

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
    "make_visible",
    "plan",
    "register",
    "report",
    "verify",
]
