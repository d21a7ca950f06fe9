"""Sparse-linear attention (SLA): fastvideo-kernel's autograd.Function over Triton, and FastVideo's layer that calls it.

No op shows it: fastac makes the Function visible when its module is loaded. The Triton kernels are the real ones,
interpreted. Of the package fastvideo only the layer's file is imported, without the package around it.
"""

from __future__ import annotations

import functools
import importlib.util
import logging
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.backends import packages

packages.use("sla")

from tests.backends import triton_on_cpu

for _name in ("fastvideo", "fastvideo.attention", "fastvideo.attention.backends"):
    _package = ModuleType(_name)
    _package.__path__ = [str(Path(path, *_name.split("."))) for path in sys.path if Path(path, "fastvideo").is_dir()]
    sys.modules[_name] = _package
_logger = ModuleType("fastvideo.logger")
_logger.init_logger = logging.getLogger  # type: ignore[attr-defined]
sys.modules[_logger.__name__] = _logger

from fastvideo.attention.backends import sla
from fastvideo_kernel.triton_kernels import sla_triton as kernels

import fastac
from fastac.engine import interception
from fastac.backends import fastvideo
from tests.backends.kept import kept_of
from tests.backends.parity import Case, Parity, swapped
from tests.backends.sparse import assert_choice_is_kept, attention, mask_of, means, nearest
from tests.support import assert_same, train_step

OP = "fastac_opaque::fastvideo_kernel_triton_kernels_sla_triton__attention"
LAUNCHES = "sla_triton._attn_fwd"
BLOCK = 64
BLOCKS = 3
TOKENS = BLOCKS * BLOCK
MAP = torch.tensor([[[[1, 0, 1], [0, 1, 1], [1, 1, 0]], [[1, 1, 0], [0, 1, 1], [1, 0, 1]]]], dtype=torch.int8)
"""(1, heads, blocks of queries, blocks of keys): which blocks attend, TOP in each row."""
TOP = 2
LIST = MAP.nonzero()[:, -1].clone().view(*MAP.shape[:3], TOP)
HEADS, DIM = 2, 16

triton_on_cpu.count_launches(kernels, "_attn_fwd", LAUNCHES)
interception.install()  # as fastac.enable does


def function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> torch.Tensor:
    tensors = [tensor.contiguous() for tensor in (query, key, value)]
    return kernels._attention.apply(*tensors, MAP, LIST, TOP, BLOCK, BLOCK)  # type: ignore[no-any-return]


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return attention(query, key, value, mask_of(MAP, BLOCK)[..., : query.shape[2], : key.shape[2]])


@functools.cache
def layer() -> Any:
    """Its projection of the linear branch begins as zeros: what comes out is the sparse attention."""
    return bfloat16_layer()


def bfloat16_layer() -> Any:
    """Its projection, in float32, it calls under CUDA's autocast, which means nothing here."""
    found = sla.SLAAttentionImpl(HEADS, DIM, topk_ratio=TOP / BLOCKS, BLKQ=BLOCK)
    found.proj_l.bfloat16()
    return found


def layer_reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    blocks = nearest(means(query, BLOCK), means(key - key.mean(2, keepdim=True), BLOCK), TOP)
    return attention(query, key, value, mask_of(blocks, BLOCK))


def case(way: str, call: Callable[..., torch.Tensor], expected: Any, **options: Any) -> Case:
    shape = {"batch": 1, "queries": TOKENS, "keys": TOKENS, "dim": DIM} | options
    return Case(OP, call, way, kernel=LAUNCHES, reference=expected, counts_backward=False, **shape)


@swapped
def layer_call(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> torch.Tensor:
    return layer()(query, key, value, SimpleNamespace())  # type: ignore[no-any-return]


CASES = [
    case("function", function, reference, pairs=12 * BLOCK**2),
    case(
        "last block in part",
        function,
        reference,
        queries=TOKENS - 24,
        keys=TOKENS - 24,
        pairs=12 * (TOKENS - 24) ** 2 // BLOCKS**2,  # as if all blocks were equal
    ),
    # It calculates in bfloat16, whatever it is given.
    case(
        "FastVideo's layer",
        layer_call,
        layer_reference,
        tolerances={torch.float32: 0.05, torch.bfloat16: 0.05},
        pairs=HEADS * TOKENS * TOP * BLOCK,
    ),
]


class TestParity(Parity):
    cases = CASES
    rows = tuple(row for row in fastvideo.FUNCTIONS if row.backend == "sla")


def test_layer_through_its_parameters() -> None:
    """The layer as a block of its own: also the gradients of its projection."""
    torch.manual_seed(0)
    block = bfloat16_layer()
    torch.nn.init.normal_(block.proj_l.weight)
    inputs = {name: torch.randn(1, TOKENS, HEADS, DIM, requires_grad=True) for name in ("query", "key", "value")}

    class Checkpointed(torch.nn.Module):
        def __init__(self, policy: str) -> None:
            super().__init__()
            self.block, self.policy = block, policy

        def forward(self, **tensors: torch.Tensor) -> Any:
            if self.policy == "none":
                return self.block(**tensors, attn_metadata=None)
            return fastac.checkpoint(self.block, **tensors, attn_metadata=None, policy=self.policy)

    reference = train_step(Checkpointed("none"), inputs)
    assert "gradient of block.proj_l.weight" in reference
    assert_same(train_step(Checkpointed("attn_only"), inputs), reference)


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_what_is_kept(engine: str) -> None:
    """Beyond the output: one number of statistics per query, in float32, and the chosen blocks, as a map and a list."""
    held, extra = kept_of(CASES[0], engine=engine)
    assert extra == HEADS * TOKENS * 4 + MAP.numel() + LIST.numel() * 8
    assert 0 < held - extra - HEADS * TOKENS * DIM * 4 < 256, "a few numbers beside the tensors"


def test_module_that_is_loaded_later(attention_executions: Counter[str]) -> None:
    """SLA's own package has the same file under another name. It is found by the first region after its import."""
    inputs = CASES[0].inputs()
    train_step(functools.partial(fastac.checkpoint, CASES[0].region), inputs)  # fastac has looked around before
    name = "sparse_linear_attention.kernel"
    specification = importlib.util.spec_from_file_location(name, kernels.__file__)
    assert specification is not None
    assert specification.loader is not None
    sys.modules["sparse_linear_attention"] = ModuleType("sparse_linear_attention")
    module = sys.modules[name] = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    apply = module._attention.apply  # as somebody has captured it who imported it before
    triton_on_cpu.count_launches(module, "_attn_fwd", "later")

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(apply(torch.tanh(query), key, value, MAP, LIST, TOP, BLOCK, BLOCK))

    reference = train_step(region, inputs)
    attention_executions.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, region), inputs), reference)
    assert attention_executions == {"later": 1}


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_recompute_keeps_the_chosen_blocks(engine: str) -> None:
    """FastVideo's layer chooses them before it calls the Function, to which they are inputs."""
    assert_choice_is_kept(CASES[-1], engine, (torch, "topk"))
