"""flash-attn 4 (CuTe), and the block-sparse attention of fastvideo-kernel that runs on it. No op shows either.

Both are made visible once their module is loaded. The Python layers are the real ones, their kernels stand-ins.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.backends import packages

packages.use("flash_attn_4")

from tests.backends import flash_4_on_cpu, triton_on_cpu
from tests.backends.flash_4_on_cpu import KERNEL

triton_on_cpu.takes_for_cuda("fastvideo_kernel")
interface = flash_4_on_cpu.flash_attn_4()
apply = interface.FlashAttnFunc.apply  # as somebody holds it who took it before fastac came

import fastvideo_kernel.block_sparse_attn_cute_fwd  # noqa: F401 it is loaded by the first call otherwise
from fastvideo_kernel import block_sparse_attn_256

import fastac
from fastac.engine import interception
from fastac.backends import fastvideo, flash_attn_4
from tests.backends.kept import kept_of
from tests.backends.parity import KEY_LENGTHS, QUERY_LENGTHS, Case, Parity, causal, ends, swapped, window
from tests.backends.sparse import attention, mask_of
from tests.support import assert_same, train_step

interception.install()  # as fastac.enable does

DENSE = "fastac_opaque::flash_attn_cute_interface_FlashAttnFunc"
PACKED = "fastac_opaque::flash_attn_cute_interface_FlashAttnVarlenFunc"
SPARSE = "fastac_opaque::fastvideo_kernel_block_sparse_attn_cute_fwd__CuteAttentionQ128"


def dense(**options: Any) -> Callable[..., torch.Tensor]:
    return swapped(lambda q, k, v, _: interface.flash_attn_func(q, k, v, **options)[0])


def packed(longest: bool = True, **options: Any) -> Callable[..., torch.Tensor]:
    options |= {"cu_seqlens_q": ends(QUERY_LENGTHS), "cu_seqlens_k": ends(KEY_LENGTHS)}
    if longest:
        options |= {"max_seqlen_q": max(QUERY_LENGTHS), "max_seqlen_k": max(KEY_LENGTHS)}
    return lambda q, k, v, _: interface.flash_attn_varlen_func(q, k, v, **options)[0]


def capped(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return (0.5 * torch.tanh(scores / 0.5)).softmax(-1) @ value


# Blocks of tokens that the sparse kernel takes as they are, and that it is given in halves.
NATIVE, HALVED = 128, 256
MAP = torch.tensor([[[[1, 0, 1], [0, 1, 1]], [[1, 1, 0], [0, 0, 1]]]], dtype=torch.bool)
"""(1, heads, blocks of queries, blocks of keys): which blocks attend."""


def sizes(block: int) -> torch.Tensor:
    """Keys that count in each block: not all of the last."""
    return torch.tensor([block, block, block - 40], dtype=torch.int32)


def sparse(block: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASTVIDEO_VSA_CUTEDSL", "1")
        patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (10, 0))
        attend = getattr(block_sparse_attn_256, f"block_sparse_attn_{block}")
        return attend(query, key, value, MAP, sizes(block))[0]  # type: ignore[no-any-return]


def sparse_reference(block: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return attention(query, key, value, mask_of(MAP, block, sizes(block)))


def sparse_case(op: str, block: int, pairs: int = 0) -> Case:
    return Case(
        op,
        functools.partial(sparse, block),
        f"blocks of {block}",
        batch=1,
        queries=2 * block,
        keys=3 * block,
        kernel=KERNEL,
        reference=functools.partial(sparse_reference, block),
        counts_backward=False,
        pairs=pairs,
    )


case = functools.partial(Case, kernel=KERNEL, counts_backward=False)
CASES = [
    case(DENSE, dense()),
    case(DENSE, dense(return_lse=True), "with statistics"),
    case(DENSE, dense(causal=True), "causal", keys=24, mask=causal),
    case(DENSE, dense(window_size=(3, 2)), "window", keys=24, mask=window(3, 2)),
    case(DENSE, dense(), "grouped", kv_heads=1),
    case(DENSE, dense(softcap=0.5), "capped", reference=capped),
    case(DENSE, swapped(lambda q, k, v, _: apply(q, k, v)[0]), "captured"),
    case(PACKED, packed(), packed=True),
    case(PACKED, packed(), "grouped", packed=True, kv_heads=1),
    # Nobody knows the longest: so many there are in all.
    case(PACKED, packed(longest=False), "of unknown lengths", packed=True, seen=(sum(KEY_LENGTHS),)),
    sparse_case(SPARSE, NATIVE, pairs=7 * NATIVE**2),
    sparse_case(DENSE, HALVED),  # counted as if it were dense: flash-attn 4 is given the blocks in an object of its own
]


class TestParity(Parity):
    cases = CASES
    rows = (*flash_attn_4.FUNCTIONS, *(row for row in fastvideo.FUNCTIONS if row.backend == "vsa"))


def test_what_is_kept() -> None:
    """Beyond output and statistics, which are outputs, nothing."""
    held, extra = kept_of(CASES[0])
    assert extra == 0
    assert 0 < held - 4 * 3 * 2 * 24 * (8 + 1) < 256, "a few numbers beside the tensors"


def test_build_from_the_hub_that_is_loaded_later(attention_executions: Counter[str]) -> None:
    """It has a module of its own. It is found by the first region after its import."""
    inputs = CASES[0].inputs()
    train_step(functools.partial(fastac.checkpoint, CASES[0].region), inputs)  # fastac has looked around before
    name = "_flash_attn4_cuda_a005f70.interface"
    specification = importlib.util.spec_from_file_location(name, interface.__file__)
    assert specification is not None
    assert specification.loader is not None
    sys.modules[name.partition(".")[0]] = ModuleType(name.partition(".")[0])
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    flash_attn_func = flash_4_on_cpu.with_kernels(module, counted_as="hub").flash_attn_func

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        tensors = [tensor.transpose(1, 2) for tensor in (torch.tanh(query), key, value)]
        return torch.tanh(flash_attn_func(*tensors)[0])

    reference = train_step(region, inputs)
    attention_executions.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, region), inputs), reference)
    assert attention_executions == {"hub": 1}
