"""vsa 0.0.4, the first release of video sparse attention: its real Triton kernels, and its op for the H100's extension.

On import it asks which GPU there is; an H100, so that it defines both its ops. The extension is a stand-in: its
backward is given the blocks of queries of each block of keys.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.backends import packages

packages.use("vsa")

import tests.backends.triton_on_cpu  # noqa: F401 Triton's interpreter

extension = ModuleType("vsa_cuda")
for _name in ("block_sparse_fwd", "block_sparse_bwd"):
    setattr(extension, _name, lambda *args, _name=_name: globals()[_name](*args))
sys.modules["vsa_cuda"] = extension
with pytest.MonkeyPatch.context() as _patch:
    _patch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    import vsa

from vsa import block_sparse_attn_triton as kernels
from vsa import block_sparse_wrapper as wrapper

import fastac
from fastac.backends import fastvideo
from tests import support
from tests.backends import without_selection
from tests.backends.parity import Case, Parity
from tests.support import assert_same, train_step

BLOCK = 64
BLOCKS = 3
TOKENS = BLOCKS * BLOCK
TOP = 2
MAP = torch.tensor([[[[1, 0, 1], [0, 1, 0], [1, 1, 0]], [[1, 1, 1], [0, 1, 1], [1, 0, 0]]]], dtype=torch.bool)
"""(1, heads, blocks of queries, blocks of keys): which blocks attend."""

SIZES = torch.tensor([64, 64, 64], dtype=torch.int32)
"""Keys that count in each block: all. With fewer in one the gradients of the queries are wrong in this release, whose
kernel looks the number up by a block's place among the chosen ones. fastvideo-kernel, its successor, is right."""


def kernel_on_cpu(op: Any, counts: bool = False) -> None:
    """Give an op of the library its own Python implementation as CPU kernel; it is registered for CUDA alone."""
    implementation = op._init_fn

    def kernel(*args: Any) -> Any:
        if counts:
            support.executions[op._qualname] += 1
        return implementation(*args)

    op.register_kernel("cpu")(kernel)


kernel_on_cpu(wrapper.block_sparse_attn_triton, counts=True)
kernel_on_cpu(wrapper.block_sparse_attn_backward_triton)
kernel_on_cpu(wrapper.block_sparse_attn_SM90, counts=True)
kernel_on_cpu(wrapper.block_sparse_attn_backward_SM90)


def block_sparse_fwd(*arguments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    output, statistics = kernels.triton_block_sparse_attn_forward(*arguments)
    return output, statistics[..., None]


def block_sparse_bwd(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    output: torch.Tensor,
    statistics: torch.Tensor,
    grad: torch.Tensor,
    index: torch.Tensor,
    number: torch.Tensor,
    sizes: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    queries = torch.zeros(*number.shape, BLOCKS, dtype=torch.bool)
    for place in torch.cartesian_prod(*map(torch.arange, number.shape)).tolist():
        queries[(*place, index[(*place, slice(number[tuple(place)]))].long())] = True
    of_queries = wrapper.map_to_index(queries.transpose(-1, -2))
    arguments = (grad, q, k, v, output, statistics[..., 0], *of_queries, index, number, sizes)
    return tuple(gradient.float() for gradient in kernels.triton_block_sparse_attn_backward(*arguments))


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ value


def of_blocks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    counts = (torch.arange(BLOCK) < SIZES[:, None]).flatten()
    mask = blocks.repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1) & counts
    return attention(query, key, value, mask)


def video_reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention between the means of blocks, plus attention to the blocks that matter most to each."""
    means = [tensor.unflatten(2, (-1, BLOCK)).sum(3) / SIZES[:, None] for tensor in (query, key, value)]
    scores = (means[0] @ means[1].transpose(-1, -2)).detach()
    blocks = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, scores.topk(TOP).indices, True)
    coarse = attention(*means, torch.ones((), dtype=torch.bool)).repeat_interleave(BLOCK, 2)
    return coarse + of_blocks(query, key, value, blocks)


def video(op: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> torch.Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vsa, "block_sparse_attn", op)  # the one it takes on this GPU
        return vsa.video_sparse_attn(query, key, value, SIZES, TOP, 4)  # type: ignore[no-any-return]


def cases(op: Any) -> list[Case]:
    # Kernels calculate in bfloat16 and take nothing else, and as many queries as keys.
    shape: dict[str, Any] = {"batch": 1, "queries": TOKENS, "keys": TOKENS, "dim": 16, "dtypes": (torch.bfloat16,)}
    return [
        Case(
            op._qualname,
            lambda q, k, v, _: op(q, k, v, MAP, SIZES)[0],
            reference=functools.partial(of_blocks, blocks=MAP),
            **shape,
        ),
        Case(op._qualname, functools.partial(video, op), "video_sparse_attn", reference=video_reference, **shape),
    ]


CASES = [*cases(wrapper.block_sparse_attn_triton), *cases(wrapper.block_sparse_attn_SM90)]


class TestParity(Parity):
    cases = CASES
    rows = tuple(row for row in fastvideo.ROWS if row.namespace == "vsa")


@pytest.fixture
def restless(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Blocks are chosen from scores of the other sign at every second call; call it to begin anew."""
    choose, calls = torch.topk, Counter[str]()

    def choose_otherwise(scores: torch.Tensor, top: int, dim: int) -> Any:
        calls["choices"] += 1
        return choose(scores * (1 if calls["choices"] % 2 else -1), top, dim=dim)

    monkeypatch.setattr(torch, "topk", choose_otherwise)
    return calls.clear


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_recompute_keeps_the_chosen_blocks(engine: str, restless: Callable[[], None]) -> None:
    region, inputs = CASES[1].region, CASES[1].inputs(torch.bfloat16)
    reference = train_step(region, inputs)
    for _ in range(2):
        restless()
        assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), inputs), reference)


def test_without_the_rows_of_selection_it_would_not() -> None:
    without_selection.assert_fails(__file__, "test_recompute_keeps_the_chosen_blocks[tape]")
