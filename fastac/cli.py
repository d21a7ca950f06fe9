"""fastac backends | check: what can be saved on this machine, and proof on a tiny model."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from rich.table import Table

from fastac import models, preflight, registry, verification
from fastac.backends.diffusers import BACKENDS, DiffusersBackend
from fastac.errors import FastacError
from fastac.policy import NAMED
from fastac.registry import AttentionOp, Verdict
from fastac.reporting import render

CAN_BE_SAVED = "can be saved"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; 0 when all is as promised, 1 when it is not, 2 for a wrong call."""
    parser = argparse.ArgumentParser(prog="fastac", description="Selective activation checkpointing for attention.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("backends", help="every attention backend of diffusers: what fastac can do for it here")
    check = commands.add_parser("check", help="prove the promise on a tiny model with random weights, on this machine")
    check.add_argument("model", metavar="CLASS", help=f"a diffusers class: {', '.join(models.MODELS)}")
    check.add_argument("--policy", default="attn_only", choices=list(NAMED), help="default: %(default)s")
    check.add_argument("--engine", default="tape", choices=["tape", "sac"], help="default: %(default)s")
    check.add_argument("--backend", help="a diffusers attention backend, as `fastac backends` lists them")
    check.add_argument("--dtype", default="fp32", choices=list(DTYPES), help="default: %(default)s")
    check.add_argument("--device", default="cpu", help="default: %(default)s")
    options = parser.parse_args(arguments)
    try:
        return _backends() if options.command == "backends" else _check(options)
    except FastacError as error:
        print(f"fastac: {error}", file=sys.stderr)
        return 1


def _backends() -> int:
    table = Table(title=f"attention backends of diffusers, torch {torch.__version__}", title_justify="left")
    for heading in ("backend", "on this machine", "verdict", "what it is, or why not"):
        table.add_column(heading, max_width=56, overflow="fold")
    here = {name: _here(backend) for name, backend in BACKENDS.items()}
    for name, backend in sorted(BACKENDS.items(), key=lambda item: (here[item[0]] != CAN_BE_SAVED, item[0])):
        table.add_row(name, here[name], backend.verdict.value.replace("_", " "), backend.reason)
    print(render(table))
    ops = Table(title="attention ops that are saved when they are called", title_justify="left")
    for heading in ("op", "rows of"):
        ops.add_column(heading)
    for op in sorted(registry.present_ops(), key=lambda op: op.name):
        if isinstance(op.row, AttentionOp):
            ops.add_row(op.qualified_name, op.row.backend)
    print(render(ops))
    return 0


def _here(backend: DiffusersBackend) -> str:
    if backend.verdict is not Verdict.SAVABLE:
        return "refused"
    missing = preflight.unavailable(backend.family, backend.op)
    return CAN_BE_SAVED if missing is None else f"refused: {missing}"


def _check(options: argparse.Namespace) -> int:
    row = models.MODELS.get(options.model)
    if row is None:
        raise FastacError(f"check {options.model}: no tiny model of this class. There are {', '.join(models.MODELS)}.")
    dtype = DTYPES[options.dtype]
    try:
        model, inputs = models.tiny_model(row, dtype, options.device)
    except (RuntimeError, AssertionError) as error:  # torch without this device says so in either way
        raise FastacError(f"check --device {options.device}: torch can not use it here: {error}") from error
    if options.backend is not None:
        _set_backend(model, options.backend)
    print(verification.verify(model, **inputs, policy=options.policy, engine=options.engine))
    return 0


def _set_backend(model: torch.nn.Module, backend: str) -> None:
    try:
        model.set_attention_backend(backend)  # type: ignore[operator]
    except (ValueError, RuntimeError, ImportError) as error:
        raise FastacError(f"check --backend {backend}: diffusers can not use it here: {error}") from error


if __name__ == "__main__":
    sys.exit(main())
