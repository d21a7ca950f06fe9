"""flash-attn 3: the real Python layer of 2.8.3 (`hopper`) over ops of its schema, and the generation after it.

The later one is on no package index. Its op is defined here with its schema, in each namespace that it had: at first
that of flash-attn 2, which this process does without, and those of builds from the hub.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fastac
from fastac.backends import flash_attn_3
from fastac.registry import classify
from tests import support
from tests.backends import flash_on_cpu, packages
from tests.backends.kernels_on_cpu import backward_kernel, forward_kernel
from tests.backends.parity import (
    DIM,
    HEADS,
    KEY_LENGTHS,
    QUERIES,
    QUERY_LENGTHS,
    Case,
    Parity,
    causal,
    ends,
    op_of,
    swapped,
    window,
)
from tests.support import assert_same, train_step

packages.use("flash_attn_3")

FORWARD_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None, "
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, "
    "int? max_seqlen_k = None, Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, "
    "Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, "
    "int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0"
)
BACKWARD_ARGUMENTS = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, "
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "float softcap = 0.0, bool deterministic = False, int sm_margin = 0"
)
"""As 2.8.3 registers them in C++."""

# The later generation says of no argument that it is written.
LATER_ARGUMENTS = (
    FORWARD_ARGUMENTS.replace("(k_new!)", "")
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
LATER = ("flash_attn_3", "_flash_attn3_48fe103", "_flash_attn_3_1a2b3c4", JULY)

_libraries: list[torch.library.Library] = []


def define_extension(namespace: str, counted_as: str) -> None:
    """What the compiled extension registers: `fwd` and `bwd`."""
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(f"fwd({FORWARD_ARGUMENTS}) -> (Tensor(out!), Tensor, Tensor, Tensor)")
    library.define(
        f"bwd({BACKWARD_ARGUMENTS}) -> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
    forward = forward_kernel(counted_as, op_of(f"{namespace}::fwd"), "bshd", ("out", "logsumexp", "", ""))
    backward = backward_kernel(op_of(f"{namespace}::bwd"), "bshd")

    def forward_into(*args: Any) -> Any:
        """The output goes into `out` where it is given. The last two are there only when the keys are split."""
        out, statistics, *_ = forward(*args)
        written = args[6] if len(args) > 6 else None
        return (out if written is None else written.copy_(out)), statistics, None, None

    def backward_into(*args: Any) -> Any:
        backward(*args)
        return (*args[6:9], *[torch.empty(0)] * 5)

    library.impl("fwd", forward_into, "CPU")
    library.impl("bwd", backward_into, "CPU")
    _libraries.append(library)


def define_later_generation(namespace: str, arguments: str) -> Callable[..., torch.Tensor]:
    """A custom op around `fwd`, and the attention function over it: (q, k, v, **its arguments)."""
    extension = getattr(torch.ops, namespace if namespace != JULY else LATER[0])

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
    defaults = {argument.name: argument.default_value for argument in op_of(name)._schema.arguments}

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, options: dict[str, Any]) -> Any:
            given = defaults | {"causal": False} | options
            out, statistics, *_ = op(q, k, v, *[value for name, value in given.items() if name not in "qkv"])
            ctx.save_for_backward(q, k, v, out, statistics)
            ctx.options = {name: value for name, value in given.items() if name.endswith(("_q", "_k", "scale"))}
            ctx.causal = given["causal"]
            return out

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            q, k, v, out, statistics = ctx.saved_tensors
            gradients = [torch.empty_like(tensor) for tensor in (q, k, v)]
            packed = [ctx.options[name] for name in ("cu_seqlens_q", "cu_seqlens_k")]
            backward_op(grad, q, k, v, out, statistics, *packed, *gradients, ctx.causal)
            return *gradients, None

    return lambda q, k, v, **options: Attention.apply(q, k, v, options)


flash_on_cpu.stand_in("flash_attn_3")
flash_on_cpu.stand_in("flash_attn_3._C")
FIRST = "flash_attn_3::fwd"
define_extension("flash_attn_3", FIRST)

import flash_attn_interface as library
from diffusers.models import attention_dispatch

for _namespace in LATER[1:-1]:
    define_extension(_namespace, f"{_namespace}::fwd")
later = {
    namespace: define_later_generation(namespace, JULY_ARGUMENTS if namespace == JULY else LATER_ARGUMENTS)
    for namespace in LATER
}


def dense(**options: Any) -> Callable[..., torch.Tensor]:
    return swapped(lambda q, k, v, p: library.flash_attn_func(q, k, v, **options))


def packed(keys: tuple[int, ...] = KEY_LENGTHS, **options: Any) -> Callable[..., torch.Tensor]:
    return lambda q, k, v, p: library.flash_attn_varlen_func(q, k, v, *lengths(keys).values(), **options)


def lengths(keys: tuple[int, ...]) -> dict[str, Any]:
    return {
        "cu_seqlens_q": ends(QUERY_LENGTHS),
        "cu_seqlens_k": ends(keys),
        "max_seqlen_q": max(QUERY_LENGTHS),
        "max_seqlen_k": max(keys),
    }


def later_cases(namespace: str) -> list[Case]:
    attention, op = later[namespace], f"{namespace}::_flash_attn_forward"
    case = functools.partial(Case, op, kernel=FIRST if namespace == JULY else f"{namespace}::fwd")
    return [
        case(swapped(lambda q, k, v, p: attention(q, k, v)), way=f"{namespace}, cross"),
        case(swapped(lambda q, k, v, p: attention(q, k, v)), way=f"{namespace}, grouped", heads=6, kv_heads=2),
        case(
            swapped(lambda q, k, v, p: attention(q, k, v, causal=True)),
            way=f"{namespace}, causal",
            keys=QUERIES,
            mask=causal,
        ),
        case(lambda q, k, v, p: attention(q, k, v, **lengths(KEY_LENGTHS)), way=f"{namespace}, packed", packed=True),
    ]


CASES = [
    Case(FIRST, dense(), way="cross"),
    Case(FIRST, dense(), way="self", keys=QUERIES),
    Case(FIRST, dense(), way="grouped", heads=6, kv_heads=2),
    Case(FIRST, dense(causal=True), way="causal", keys=QUERIES, mask=causal),
    Case(FIRST, dense(window_size=(3, 2)), way="window", keys=QUERIES, mask=window(3, 2)),
    Case(
        FIRST,
        swapped(lambda q, k, v, p: library.flash_attn_qkvpacked_func(torch.stack([q, k, v], dim=2))),
        way="qkvpacked",
        keys=QUERIES,
    ),
    Case(
        FIRST,
        swapped(lambda q, k, v, p: library.flash_attn_qkvpacked_func(torch.cat([q, k, v], dim=2), num_heads_q=6)),
        way="qkvpacked, grouped",
        heads=6,
        kv_heads=2,
        keys=QUERIES,
    ),
    Case(FIRST, packed(), way="packed", packed=True),
    Case(FIRST, packed(), way="packed, grouped", packed=True, heads=6, kv_heads=2),
    Case(
        FIRST,
        packed(QUERY_LENGTHS, causal=True),
        way="packed, self, causal",
        packed=True,
        key_lengths=QUERY_LENGTHS,
        mask=causal,
    ),
    *[case for namespace in LATER for case in later_cases(namespace)],
]


class TestParity(Parity):
    cases = CASES
    rows = flash_attn_3.ROWS


@pytest.mark.parametrize("namespace", LATER)
def test_rows_of_flash_attn_2_do_not_claim_it(namespace: str) -> None:
    for name in ("_flash_attn_forward", "fwd"):
        if (namespace, name) != (JULY, "fwd"):
            resolved = classify(op_of(f"{namespace}::{name}"))
            assert resolved is not None
            assert resolved.row in flash_attn_3.ROWS


@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("written", ["out", "k_new", "v_new"])
def test_a_call_that_writes_an_argument_is_refused(written: str, engine: str) -> None:
    inputs = {name: torch.randn(2, QUERIES, HEADS, DIM, requires_grad=True) for name in ("query", "key", "value")}

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():  # as the autograd.Functions of the library call it
            return torch.tanh(query) + torch.ops.flash_attn_3.fwd(query, key, value, **{written: query.clone()})[0]

    with pytest.raises(fastac.FastacError, match=f"called with '{written}', which it writes"):
        train_step(functools.partial(fastac.checkpoint, region, engine=engine), inputs)


@pytest.mark.parametrize("namespace", LATER)
def test_the_later_generation_can_write_nothing(namespace: str, attention_executions: Counter[str]) -> None:
    """Its schema hides that `out` is written, but torch takes no output of a custom op that is an input."""
    inputs = {name: torch.randn(2, QUERIES, HEADS, DIM, requires_grad=True) for name in ("query", "key", "value")}
    out = "out" if namespace == JULY else "out_"

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return later[namespace](query, key, value, **{out: torch.zeros_like(query)})

    with pytest.raises(RuntimeError, match="alias"):
        train_step(functools.partial(fastac.checkpoint, region), inputs)


TAKES_OVER = """
import functools, torch, fastac
from tests.support import assert_same, executions, train_step
from tests.backends import flash_on_cpu, packages
from tests.backends.libraries import flash_attn_3

inputs = {name: torch.randn(2, 24, 2, 8, requires_grad=True) for name in ("query", "key", "value")}
train_step(functools.partial(fastac.checkpoint, flash_attn_3.later["flash_attn"]), dict(zip("qkv", inputs.values())))
packages.use("flash_attn_2")
library = flash_on_cpu.flash_attn_2()

def region(query, key, value):
    return torch.nn.functional.dropout(torch.tanh(library.flash_attn_func(query, key, value, dropout_p=0.3)), 0.3)

for _ in range(2):
    reference = train_step(region, inputs)
    executions.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, region), inputs), reference)
    assert executions == {"flash_attn::_flash_attn_forward": 1}, executions
"""


def test_flash_attn_2_takes_the_op_over_from_the_one_of_july() -> None:
    """The name is defined anew, with other arguments; torch lets the op that was there go."""
    root = Path(__file__).resolve().parents[3]
    command = [sys.executable, "-c", TAKES_OVER]
    ran = subprocess.run(command, cwd=root, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert ran.returncode == 0, ran.stdout


# In diffusers, under the backends that take the later generation


def as_diffusers_calls_it(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, return_attn_probs: bool = False, **options: Any
) -> torch.Tensor:
    """flash_attn_func and flash_attn_varlen_func of the later generation."""
    assert not return_attn_probs
    given = {name: options[name] for name in lengths(KEY_LENGTHS) if name in options}
    return later[LATER[1]](q, k, v, causal=causal, **given)


@pytest.mark.parametrize("backend", ["_flash_3_hub", "_flash_3_varlen_hub", "_flash_varlen_3"])
def test_wan(backend: str, attention_executions: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    name = attention_dispatch.AttentionBackendName(backend)
    if name in attention_dispatch._HUB_KERNELS_REGISTRY:
        config = attention_dispatch._HUB_KERNELS_REGISTRY[name]
        monkeypatch.setattr(config, "kernel_fn", as_diffusers_calls_it)
        monkeypatch.setattr(attention_dispatch, "_maybe_download_kernel_for_backend", lambda _: None)
    else:
        monkeypatch.setattr(attention_dispatch, "flash_attn_3_varlen_func", as_diffusers_calls_it)
    monkeypatch.setattr(attention_dispatch, "_check_attention_backend_requirements", lambda _: None)
    model, inputs = support.build("WanTransformer3DModel")
    model.set_attention_backend(backend)
    reference = train_step(model, inputs)
    op = f"{LATER[1]}::fwd"
    assert attention_executions == {op: 4}
    for policy, executions in (("attn_only", 4), ("full", 8)):
        fastac.enable(model, policy)
        attention_executions.clear()
        assert_same(train_step(model, inputs), reference)
        assert attention_executions == {op: executions}
