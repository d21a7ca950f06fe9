"""Context parallelism of diffusers and of torch: exchanges are saved, gathers of keys are issued again."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from diffusers import ContextParallelConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention, context_parallel

import fastac
from fastac.policy import Policy
from tests import support
from tests.distributed import ranks, steps
from tests.distributed.steps import Measured
from tests.engine.simulated import simulated
from tests.ways import recipes

ALL_TO_ALL, ALL_GATHER = "gloo:all_to_all", "gloo:all_gather"
EFFICIENT = "_scaled_dot_product_efficient_attention"

WAYS: dict[str, Any] = {
    "none": "none",
    "full": "full",
    "attn_only": "attn_only",
    "repeated": Policy("attn_only", collectives="recompute"),
    "offloaded": Policy("attn_only", offload=True, keep=1),
}


class Trained(NamedTuple):
    """One step on one rank, and `steps.numbers` of its report."""

    step: Measured
    reported: tuple[int, int, int] | None


def _trained(model: torch.nn.Module, step: Measured) -> Trained:
    rows = fastac.report(model).rows
    return Trained(step, steps.numbers(rows[0].communication) if rows else None)


def assert_same(found: dict[str, Trained]) -> None:
    """Checkpointing changes no bit on this rank."""
    for one in found.values():
        support.assert_same(one.step.tensors, found["none"].step.tensors)


def _diffusers() -> dict[str, Trained]:
    found = {}
    with ranks.one_accelerator():
        for way, policy in WAYS.items():
            model, batch = recipes.build(recipes.WAN)
            model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))
            if way != "none":
                fastac.enable(model, policy)
            with simulated() as device:
                found[way] = _trained(model, steps.measured(model, batch))
            assert (device.allocated > 0, device.faults) == (way == "offloaded", [])
    return found


def test_ulysses_of_diffusers() -> None:
    """8 exchanges in the forward, 8 in diffusers' own backward. `full` issues the first 8 again, attn_only none.

    diffusers' backward of native attention runs 2 of the 4 forwards again, also without checkpointing.
    """
    for found in ranks.run(_diffusers):
        assert_same(found)
        for way in found:
            assert found[way].step.forward == Counter({ALL_TO_ALL: 8, ALL_GATHER: 1}), way
        again = {way: found[way].step.backward for way in found}
        assert again["none"] == again["attn_only"] == again["offloaded"] == Counter({ALL_TO_ALL: 8}), again
        assert again["full"] == again["repeated"] == Counter({ALL_TO_ALL: 16}), again
        assert [one.step.attention for one in found.values()] == [(4, 2), (4, 6), (4, 2), (4, 2), (4, 2)]
        assert found["attn_only"].reported == found["offloaded"].reported == (8, 8, 0)
        assert found["repeated"].reported == (8, 0, 8)


# torch: the keys go round


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value)  # found when it is called: torch exchanges it


def _block() -> torch.nn.Module:
    return support.AttentionBlock(attend=_attend)


def _efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True)[0]


_efficient.__name__ = "scaled_dot_product_attention"


@contextlib.contextmanager
def _efficient_on_cpu() -> Iterator[None]:
    """The kernel that torch's context parallelism knows, for the CPU. Its executions are counted."""

    def forward(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        support.executions[EFFICIENT] += 1
        seed = torch.zeros((), dtype=torch.int64)
        return (*support.attention_math(query, key, value), seed, seed)

    def backward(grad: Any, query: Any, key: Any, value: Any, _: Any, out: Any, statistics: Any, *__: Any) -> Any:
        return (*support.attention_math_backward(grad, query, key, value, out, statistics), torch.zeros(()))

    library = torch.library.Library("aten", "IMPL")
    library.impl(EFFICIENT, forward, "CPU")
    library.impl(f"{EFFICIENT}_backward", backward, "CPU")
    before, F.scaled_dot_product_attention = F.scaled_dot_product_attention, _efficient
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
        library._destroy()


def _torch(rotation: str) -> dict[str, Trained]:
    _attention.set_rotate_method(rotation)
    _attention._cp_options.enable_load_balance = False  # for causal attention alone
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    with _efficient_on_cpu():
        for policy in ("none", "torch", "attn_only"):
            model = support.stack(block=_block, policy=policy)
            batch = {name: tensor.detach() for name, tensor in support.stack_inputs().items()}
            support.executions.clear()
            forward: list[int] = []

            def loss_of(outputs: torch.Tensor, forward: list[int] = forward) -> torch.Tensor:
                forward.append(support.executions[EFFICIENT])
                return support.loss_of(outputs)

            with context_parallel(mesh, buffers=list(batch.values()), buffer_seq_dims=[1, 1]):
                step = steps.measured(model, batch, loss_of)
            step.attention = forward[0], support.executions[EFFICIENT] - forward[0]
            found[policy] = _trained(model, step)
    return found


ROTATIONS = {
    "allgather": ({ALL_GATHER: 4}, {ALL_GATHER: 4, ALL_TO_ALL: 8}, {ALL_GATHER: 8, ALL_TO_ALL: 8}, (4, 0, 4)),
    "alltoall": ({ALL_TO_ALL: 4}, {ALL_TO_ALL: 12}, {ALL_TO_ALL: 12}, (4, 4, 0)),
}
"""Way to rotate keys -> collectives in forward, in backward without checkpointing, under attn_only, as reported."""


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_ring_of_torch(rotation: str) -> None:
    """Each of the 4 attention calls is 2 kernels and 1 rotation of keys, saved when exchanged, not when gathered."""
    forward, plain, saved, reported = ROTATIONS[rotation]
    for found in ranks.run(_torch, rotation):
        assert_same(found)
        assert [one.step.attention for one in found.values()] == [(8, 0), (8, 8), (8, 0)]
        assert all(found[way].step.forward == forward for way in ("none", "torch", "attn_only"))
        assert found["none"].step.backward == plain
        assert found["torch"].step.backward == Counter(plain) + Counter(forward)
        assert found["attn_only"].step.backward == saved
        assert found["attn_only"].reported == reported
