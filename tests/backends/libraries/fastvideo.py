"""FastVideo 0.2.1: its real custom ops around flash-attn, over flash-attn 2's real Python layer.

Its files are imported without the package around them, which needs a GPU and much else. flash-attn 4, which two of the
ops call past the dispatcher, has a stand-in with its signature.
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

import fastac
from fastac.engine import torch_private
from fastac.backends import fastvideo as catalogue
from tests import support
from tests.backends import flash_on_cpu, packages
from tests.backends.kernels_on_cpu import Attention, Layout
from tests.backends.parity import (
    HEADS,
    KEY_LENGTHS,
    KEYS,
    QUERIES,
    QUERY_LENGTHS,
    Case,
    Parity,
    causal,
    ends,
    swapped,
)
from tests.support import train_step

packages.use("fastvideo")
flash_on_cpu.flash_attn_2()
os.environ["FASTVIDEO_CONFIGURE_LOGGING"] = "0"

CUTE = "flash_attn.cute"


def _sequences(q: torch.Tensor, k: torch.Tensor, options: Mapping[str, Any]) -> tuple[Attention, Layout]:
    ends_of_both = (options.get(name) for name in ("cu_seqlens_q", "cu_seqlens_k"))
    cum_seq_q, cum_seq_k = ends_of_both
    call = SimpleNamespace(query=q, cum_seq_q=cum_seq_q, cum_seq_k=cum_seq_k)
    window = (-1, 0 if options["causal"] else -1)
    return Attention(scale=options["softmax_scale"], window=window), Layout(call, "bshd")


def _flash_attn_fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[Any, ...]:
    """Output, statistics, and what FastVideo leaves aside."""
    support.executions[CUTE] += 1
    attention, layout = _sequences(q, k, options)
    parts = zip(layout.apart(q), layout.apart(k, True), layout.apart(v, True), strict=True)
    outs, statistics = zip(*(attention.forward(*part) for part in parts), strict=True)
    return layout.together(outs), layout.statistics_together(statistics), None, None


def _flash_attn_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    dout: torch.Tensor,
    lse: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, ...]:
    attention, layout = _sequences(q, k, options)
    queries = layout.apart(q)
    keys = layout.apart(k, True), layout.apart(v, True)
    parts = zip(
        layout.apart(dout), queries, *keys, layout.apart(out), layout.statistics_apart(lse, queries), strict=True
    )
    gradients = zip(*(attention.backward(*part) for part in parts), strict=True)
    return tuple(layout.together(gradient) for gradient in gradients)


def _package(name: str, **content: Any) -> ModuleType:
    """A package of FastVideo without what its `__init__` imports."""
    module = flash_on_cpu.stand_in(name)
    module.__path__ = [str(Path(path, *name.split("."))) for path in sys.path]
    vars(module).update(content)
    return module


_package("fastvideo")
_package("fastvideo.attention")
_package("fastvideo.platforms", current_platform=None)
flash_on_cpu.stand_in(CUTE)
_interface = flash_on_cpu.stand_in(f"{CUTE}.interface")
vars(_interface).update(_flash_attn_fwd=_flash_attn_fwd, _flash_attn_bwd=_flash_attn_bwd)
with pytest.MonkeyPatch.context() as _patch:
    _patch.setattr(torch.cuda, "is_available", lambda: True)
    from fastvideo.attention.utils import flash_attn_cute as cute
from fastvideo.attention.utils import flash_attn_default as default
from fastvideo.attention.utils import flash_attn_no_pad as no_pad

cute._use_fa2 = lambda q, k, v: False  # a GPU as new as flash-attn 4 needs it
for _module in (default, no_pad, cute):
    for _op in list(vars(_module).values()):
        if getattr(_op, "_namespace", "") == "fastvideo":
            _op.register_kernel("cpu")(_op._init_fn)  # its own body

DENSE, PACKED = "flash_attn::_flash_attn_forward", "flash_attn::_flash_attn_varlen_forward"

# Which tokens are no padding.
QUERY_MASK = torch.arange(QUERIES) < torch.tensor(QUERY_LENGTHS)[:, None]
KEY_MASK = torch.arange(KEYS) < torch.tensor(KEY_LENGTHS)[:, None]


def masked(queries: torch.Tensor, keys: torch.Tensor, is_causal: bool = False) -> Callable[..., torch.Tensor]:
    """Attention to the keys that are no padding; zero where a query is."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mask = keys[:, None, None, :]
        if is_causal:
            mask = mask & causal(query.shape[-2], key.shape[-2])
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask) * queries[:, None, :, None]

    return attend


def of_qkv(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float, **options: Any) -> torch.Tensor:
    qkv = torch.stack([query, key, value], dim=2)
    return no_pad.flash_attn_no_pad_compilable(qkv, QUERY_MASK, **options)


def of_both(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> torch.Tensor:
    return no_pad.flash_attn_varlen_qk_no_pad_compilable(query, key, value, QUERY_MASK, KEY_MASK)


def called(function: Callable[..., torch.Tensor], **options: Any) -> Callable[..., torch.Tensor]:
    return swapped(lambda q, k, v, _: function(q, k, v, **options))


def packed(keys: tuple[int, ...], **options: Any) -> Callable[..., torch.Tensor]:
    lengths = ends(QUERY_LENGTHS), ends(keys), max(QUERY_LENGTHS), max(keys)
    return lambda q, k, v, _: cute.flash_attn_varlen_func(q, k, v, *lengths, **options)


OWN_PAIRS, PAIRS = (
    HEADS * sum(q * k for q, k in zip(QUERY_LENGTHS, lengths, strict=True)) for lengths in (QUERY_LENGTHS, KEY_LENGTHS)
)
_default = functools.partial(Case, "fastvideo::_flash_attn_default_forward", kernel=DENSE)
_no_pad = functools.partial(Case, "fastvideo::_flash_attn_no_pad_forward", kernel=PACKED, keys=QUERIES, pairs=OWN_PAIRS)
_cute = functools.partial(Case, "fastvideo::_flash_attn_cute_forward", kernel=CUTE, counts_backward=False)
_cute_packed = functools.partial(
    Case, "fastvideo::_flash_attn_cute_varlen_forward", kernel=CUTE, packed=True, counts_backward=False
)

CASES = [
    _default(called(default.flash_attn_func_compilable)),
    _default(called(default.flash_attn_func_compilable), way="grouped", heads=4, kv_heads=2),
    _default(called(default.flash_attn_func_compilable, causal=True), way="causal", keys=QUERIES, mask=causal),
    _default(called(default.flash_attn_func_compilable), way="frozen", differentiable=False),
    _no_pad(swapped(of_qkv), reference=masked(QUERY_MASK, QUERY_MASK)),
    _no_pad(
        swapped(functools.partial(of_qkv, causal=True)),
        way="causal",
        reference=masked(QUERY_MASK, QUERY_MASK, is_causal=True),
    ),
    Case(
        "fastvideo::_flash_attn_varlen_qk_no_pad_forward",
        swapped(of_both),
        kernel=PACKED,
        reference=masked(QUERY_MASK, KEY_MASK),
        pairs=PAIRS,
    ),
    _cute(called(cute.flash_attn_func)),
    _cute(called(cute.flash_attn_func, causal=True), way="causal", keys=QUERIES, mask=causal),
    _cute_packed(packed(KEY_LENGTHS)),
    _cute_packed(packed(QUERY_LENGTHS, causal=True), way="causal", key_lengths=QUERY_LENGTHS, mask=causal),
]

WITHOUT_BACKWARD = ("_flash_attn_cute_fp4_forward", "h3_vsa_sm100a_from_mask_compat")
_NO_STATE = "FastVideo's backward gives flash-attn no generator state: with dropout its gradients are always wrong"


class TestParity(Parity):
    cases = CASES
    rows = tuple(row for row in catalogue.ROWS if row.namespace == "fastvideo")
    not_run: ClassVar[Mapping[str, str]] = dict.fromkeys(WITHOUT_BACKWARD, "has no backward: test_it_is_refused")
    not_dropped: ClassVar[Mapping[str, str]] = {
        "_flash_attn_no_pad_forward": _NO_STATE,
        "_flash_attn_varlen_qk_no_pad_forward": _NO_STATE,
    }


@pytest.fixture
def inference() -> Iterator[None]:
    """The op of video sparse attention for MiniMax-H3, whose file needs fastvideo-kernel; schema as there."""
    library = torch.library.Library("fastvideo", "FRAGMENT")
    tensors = ", ".join(f"Tensor {name}" for name in ("q", "k", "v", "block_map", "variable_block_sizes"))
    library.define(f"h3_vsa_sm100a_from_mask_compat({tensors}) -> Tensor")
    library.impl("h3_vsa_sm100a_from_mask_compat", lambda q, *others: q.clone(), "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("name", WITHOUT_BACKWARD)
@pytest.mark.usefixtures("inference")
def test_it_is_refused(name: str, engine: str) -> None:
    """No gradient would come through it, and nobody would say so."""

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        tensors = [tensor.transpose(1, 2) for tensor in (query, key, value)]
        if name == "_flash_attn_cute_fp4_forward":
            return cute.flash_attn_fp4_func(*tensors, *tensors[:2])
        return torch.ops.fastvideo.h3_vsa_sm100a_from_mask_compat(*tensors, *tensors[:2])

    assert name in {schema_name(op) for op in torch_private.op_names()}
    with pytest.raises(fastac.UnsupportedBackendError, match=f"{name}.* does not train: it is for inference"):
        train_step(functools.partial(fastac.checkpoint, region, engine=engine), CASES[0].inputs())


def schema_name(op: str) -> str:
    return op.removeprefix("fastvideo::").partition(".")[0]


def test_every_attention_op_of_fastvideo_has_a_row() -> None:
    """Read from its files; the others of its custom ops are norms and the like."""
    found = set()
    for path in Path(default.__file__).parents[1].rglob("*.py"):
        found |= set(re.findall(r"custom_op\(\s*\"fastvideo::(\w+)", path.read_text()))
    assert found - {row.name for row in catalogue.ROWS} == {"nvfp4_quantize_fa4"}  # rounds, and attends to nothing
