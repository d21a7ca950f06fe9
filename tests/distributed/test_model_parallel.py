"""Models that communicate: exchanges and sums are saved, gathers of keys or of a sequence are issued again.

Context parallelism of diffusers and of torch, tensor parallelism with DTensor, and Ulysses in a traced step.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from diffusers import ContextParallelConfig
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention, context_parallel
from torch.profiler import ProfilerActivity, profile

import fastac
import fastac.graph
from fastac.policy import Policy
from tests import support
from tests.backends import aten_on_cpu
from tests.distributed import ranks, steps
from tests.distributed.models import EXCHANGES, TensorParallel, part_of_inputs, ulysses_stack
from tests.distributed.steps import Measured
from tests.engine.simulated import simulated
from tests.graph.steps import step_of
from tests.ways import recipes

ALL_TO_ALL, ALL_GATHER = "gloo:all_to_all", "gloo:all_gather"

RECOMPUTED = Policy("attn_only", collectives="recompute")
WAYS: dict[str, Any] = {
    "none": "none",
    "full": "full",
    "attn_only": "attn_only",
    "repeated": RECOMPUTED,
    "offloaded": Policy("attn_only", offload=True, keep=1),
}


class Trained(NamedTuple):
    """One step on one rank, and how many collectives `fastac.report` says were issued, saved, issued again."""

    step: Measured
    reported: tuple[int, ...]


def _trained(model: torch.nn.Module, step: Measured) -> Trained:
    said = [row.communication for row in fastac.report(model).rows if row.communication is not None]
    return Trained(step, tuple(number for one in said for number in (one.issued, one.saved, one.again)))


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
        for way, (step, _) in found.items():
            support.assert_same(step.tensors, found["none"].step.tensors)
            assert step.forward == Counter({ALL_TO_ALL: 8, ALL_GATHER: 1}), way
            assert step.backward == Counter({ALL_TO_ALL: 16 if way in ("full", "repeated") else 8}), way
            assert step.attention == (4, 6 if way == "full" else 2), way
        assert found["attn_only"].reported == found["offloaded"].reported == (8, 8, 0)
        assert found["repeated"].reported == (8, 0, 8)


# torch's ring: the keys go round


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value)  # found when it is called: torch exchanges it


def scaled_dot_product_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """By the kernel that torch's context parallelism knows."""
    return torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True)[0]


def _torch(rotation: str) -> dict[str, Trained]:
    _attention.set_rotate_method(rotation)
    _attention._cp_options.enable_load_balance = False  # for causal attention alone
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    with (
        aten_on_cpu.registered(),
        mock.patch.object(F, "scaled_dot_product_attention", scaled_dot_product_attention),
    ):
        for policy in ("none", "torch", "attn_only"):
            model = support.stack(block=lambda: support.AttentionBlock(attend=_attend), policy=policy)
            batch = {name: tensor.detach() for name, tensor in support.stack_inputs().items()}
            support.executions.clear()
            forward: list[int] = []

            def loss_of(outputs: torch.Tensor, forward: list[int] = forward) -> torch.Tensor:
                forward.append(support.executions.total())
                return support.loss_of(outputs)

            with context_parallel(mesh, buffers=list(batch.values()), buffer_seq_dims=[1, 1]):
                step = steps.measured(model, batch, loss_of)
            step.attention = forward[0], support.executions.total() - forward[0]
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
    backward = {"none": plain, "torch": Counter(plain) + Counter(forward), "attn_only": saved}
    for found in ranks.run(_torch, rotation):
        for policy, (step, _) in found.items():
            support.assert_same(step.tensors, found["none"].step.tensors)
            assert (step.forward, step.backward) == (forward, backward[policy]), policy
            assert step.attention == (8, 8 if policy == "torch" else 0), policy
        assert found["attn_only"].reported == reported


# Tensor parallelism


def _tensor_parallel(kind: str) -> dict[str, Trained]:
    x = torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(1))
    models = {policy: TensorParallel(kind, policy) for policy in ("none", "torch", "attn_only")}
    return {policy: _trained(model, steps.measured(model, {"x": x})) for policy, model in models.items()}


ISSUED = {"plain": (2, 0, (4, 4, 0)), "sequence": (6, 4, (8, 4, 4)), "hidden": (3, 0, (3, 3, 0))}
"""Kind -> collectives that backward issues again under full and under attn_only, and what is reported.

A recompute ends before the last sum of a block, which backward does not need. The fourth of "hidden" is outside the
blocks. A redistribution inside an op of DTensor, as of a partial sum added to a replicated tensor, is saved as well.
"""


@pytest.mark.parametrize("kind", ISSUED)
def test_tensor_parallel(kind: str) -> None:
    full, saved, reported = ISSUED[kind]
    for found in ranks.run(_tensor_parallel, kind):
        plain = found["none"].step
        forward, backward = plain.collectives
        for policy, again in (("torch", full), ("attn_only", saved)):
            step = found[policy].step
            support.assert_same(step.tensors, plain.tensors)
            assert step.attention == (2, 2 if policy == "torch" else 0)
            assert step.collectives == (forward, backward + again), f"{policy}: {step.backward}"
        assert found["attn_only"].reported == reported


# Traced steps

AGAIN: dict[Any, int] = {"attn_only": 0, RECOMPUTED: 2 * EXCHANGES, "full": 2 * EXCHANGES}
"""Policy -> all-to-alls of one block that recompute issues again."""


def _traced() -> list[tuple[support.Tensors, int]]:
    """A step in eager mode, and traced under each policy."""
    model, inputs = ulysses_stack(layers=1), part_of_inputs()
    calls = [step_of(model)]
    found = []
    for policy in AGAIN:
        model.policy = "attn_only"
        calls.append(fastac.graph.apply(fastac.graph.trace(step_of(model), model, **inputs), policy))
        model.policy = "none"
    for call in calls:
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            outputs = support.flat_tensors(call(**inputs), "step")
        copies = {name: tensor.detach().clone() for name, tensor in outputs.items()}
        found.append((copies, steps.collectives(profiled)[ALL_TO_ALL]))
    return found


def test_traced_steps() -> None:
    for (expected, plain), *found in ranks.run(_traced):
        for (policy, again), (tensors, count) in zip(AGAIN.items(), found, strict=True):
            support.assert_same(tensors, expected)
            assert count == plain + again == 4 * EXCHANGES + again, policy
