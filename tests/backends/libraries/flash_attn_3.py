"""flash-attn 3: the real Python layer of 2.8.3 (`hopper`) over ops of its schema, and the generation after it.

The later one is on no package index: its op is defined here, in each namespace that it had.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from fastac.backends import flash_attn_3
from fastac.registry import find_op
from tests.backends import flash_on_cpu, packages
from tests.backends.parity import LENGTHS, Case, Parity, swapped

packages.use("flash_attn_3")
flash_on_cpu.flash_attn_3()

import flash_attn_interface as library

# The later generation says of no argument that it is written.
LATER_ARGUMENTS = (
    flash_on_cpu.FORWARD_3.replace("(k_new!)", "")
    .replace("(v_new!)", "")
    .replace("(out!)? out", "? out_")
    .replace("? q_v", "? qv")
    .replace("is_causal", "causal")
    .replace("is_rotary_interleaved = False", "rotary_interleaved = True")
    .replace("num_splits = 0", "num_splits = 1")
)
LATER_BACKWARD_ARGUMENTS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor? cu_seqlens_q, "
    "Tensor? cu_seqlens_k, Tensor(dq!) dq, Tensor(dk!) dk, Tensor(dv!) dv, bool is_causal"
)
# And in July 2025, in flash-attn 2's namespace, `out` kept its name and the first of them had no defaults.
JULY = "flash_attn"
_first, _causal, _rest = LATER_ARGUMENTS.replace("out_", "out").partition("bool causal")
JULY_ARGUMENTS = _first.replace(" = None", "") + _causal + _rest.replace(" = False", "", 1)
FIRST, HUB = "flash_attn_3", "_flash_attn3_48fe103"


def define_later_generation(namespace: str, arguments: str = LATER_ARGUMENTS) -> Callable[..., torch.Tensor]:
    """A custom op around `fwd`, and the attention function over it: (q, k, v, **its arguments)."""
    extension = getattr(torch.ops, namespace if namespace != JULY else FIRST)

    def forward(*args: Any) -> Any:
        out, statistics, *_ = extension.fwd(*args)
        return out, statistics, torch.empty(0), torch.empty(0)

    name = f"{namespace}::_flash_attn_forward"
    schema = f"({arguments}) -> (Tensor, Tensor, Tensor, Tensor)"
    op = torch.library.custom_op(name, forward, mutates_args=(), device_types="cpu", schema=schema)

    def backward(*args: Any) -> torch.Tensor:
        *tensors, cum_seq_q, cum_seq_k, dq, dk, dv, is_causal = args
        extension.bwd(*tensors, dq, dk, dv, cum_seq_q, cum_seq_k, is_causal=is_causal)
        return torch.empty(0)

    written = ("dq", "dk", "dv")
    backward_name, backward_schema = f"{namespace}::_flash_attn_backward", f"({LATER_BACKWARD_ARGUMENTS}) -> Tensor"
    backward_op = torch.library.custom_op(backward_name, backward, mutates_args=written, schema=backward_schema)
    defaults = {argument.name: argument.default_value for argument in find_op(name)._schema.arguments}

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> Any:
            given = defaults | {"causal": False} | options
            out, statistics, *_ = op(q, k, v, *[value for name, value in given.items() if name not in "qkv"])
            ctx.save_for_backward(q, k, v, out, statistics)
            ctx.given = given
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            q, k, v, out, statistics = ctx.saved_tensors
            gradients = [torch.empty_like(tensor) for tensor in (q, k, v)]
            packed = [ctx.given[name] for name in ("cu_seqlens_q", "cu_seqlens_k")]
            backward_op(grad, q, k, v, out, statistics, *packed, *gradients, ctx.given["causal"])
            return *gradients, None

    return lambda q, k, v, **options: Attention.apply(q, k, v, options)


flash_on_cpu.flash_attn_3(HUB)
later = {
    JULY: define_later_generation(JULY, JULY_ARGUMENTS),
    FIRST: define_later_generation(FIRST),
    HUB: define_later_generation(HUB),
}


def later_cases(namespace: str) -> list[Case]:
    attend = later[namespace]
    case = functools.partial(
        Case, f"{namespace}::_flash_attn_forward", kernel=f"{FIRST if namespace == JULY else namespace}::fwd"
    )
    return [
        case(swapped(lambda q, k, v, p: attend(q, k, v)), way=f"{namespace}, grouped", heads=6, kv_heads=2),
        case(lambda q, k, v, p: attend(q, k, v, **LENGTHS), way=f"{namespace}, packed", packed=True),
    ]


class TestFlashAttn3(Parity):
    cases = (
        Case("flash_attn_3::fwd", swapped(lambda q, k, v, p: library.flash_attn_func(q, k, v)), heads=6, kv_heads=2),
        Case(
            "flash_attn_3::fwd",
            lambda q, k, v, p: library.flash_attn_varlen_func(q, k, v, *LENGTHS.values()),
            way="packed",
            packed=True,
        ),
        *(case for namespace in later for case in later_cases(namespace)),
    )
    rows = flash_attn_3.ROWS
