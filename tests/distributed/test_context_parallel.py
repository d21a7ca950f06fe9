"""Context parallelism, diffusers' and torch's: exchanges are saved with attention, gathers of keys are issued again.

Every rank computes the gradient of its own tokens: their sum is that of a single process. What diffusers 0.42 does not
train at all, or not under any checkpointing, is told here by what it raises.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from diffusers import ContextParallelConfig
from diffusers.models.attention_dispatch import AttentionBackendName
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import _attention, context_parallel
from torch.utils.checkpoint import CheckpointError
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from fastac.policy import Policy
from tests import support
from tests.backends import aten_on_cpu, kernels_on_cpu
from tests.distributed import ranks, steps
from tests.distributed.steps import Measured
from tests.marks import slow
from tests.ways import recipes

ALL_TO_ALL, ALL_GATHER = "gloo:all_to_all", "gloo:all_gather"

RECOMPUTED = Policy("attn_only", collectives="recompute")


class Way(NamedTuple):
    """How a model is checkpointed. policy: "none" for not at all; "single": not parallel either."""

    policy: str | Policy
    engine: str = "tape"


SINGLE, NONE, FULL, ATTN_ONLY = Way("single"), Way("none"), Way("full"), Way("attn_only")
SAC, REPEATED = Way("attn_only", "sac"), Way(RECOMPUTED)


class Trained(NamedTuple):
    """One step on one rank, and the collectives as `fastac.report` has them: issued, saved, again."""

    step: Measured
    reported: tuple[int, int, int] | None


def _trained(model: torch.nn.Module, step: Measured) -> Trained:
    rows = fastac.report(model).rows
    found = rows[0].communication if rows else None
    assert not any(row.writing for row in rows)
    counts = (found.issued, found.saved, found.again) if found is not None else None
    return Trained(step, counts)


def _counted(model: torch.nn.Module, batch: dict[str, Any], loss_of: Any = support.loss_of) -> Measured:
    """One step; attention is counted by the stand-ins themselves. No collective is inside one, so none can hang."""
    support.executions.clear()
    forward = []

    def loss(outputs: Any) -> torch.Tensor:
        forward.append(support.executions.total())
        return loss_of(outputs)

    step = steps.measured(model, batch, loss)
    step.attention = forward[0], support.executions.total() - forward[0]
    return step


def _set_flash(model: torch.nn.Module) -> None:
    """`_native_flash` where attention is context parallel: outside, it is scaled_dot_product_attention's to choose."""
    for name, module in model.named_modules():
        if name.endswith("attn1"):
            module.processor._attention_backend = AttentionBackendName._NATIVE_FLASH


# diffusers


def _diffusers(name: str, ways: list[Way], backend: str, options: dict[str, Any]) -> dict[Way, Trained]:
    found = {}
    kernels = aten_on_cpu.registered() if backend != "native" else contextlib.nullcontext()
    with kernels, ranks.one_accelerator():
        for way in ways:
            model, batch = recipes.build(name)
            if way.policy != "single":
                if backend != "native":
                    _set_flash(model)
                model.enable_parallelism(config=ContextParallelConfig(**options))  # type: ignore[operator]
            if way.policy == "torch":
                model.enable_gradient_checkpointing(  # type: ignore[operator]
                    lambda function, *args: torch_checkpoint(function, *args, use_reentrant=False)
                )
            elif way.policy not in ("none", "single"):
                fastac.enable(model, way.policy, engine=way.engine)
            measure = _counted if backend != "native" else steps.measured
            found[way] = _trained(model, measure(model, batch))
    return found


def assert_parallel(results: list[dict[Way, Trained]], single: Way = SINGLE, none: Way = NONE) -> None:
    """The ranks' gradients add up to those of one process, and checkpointing changes no bit on any rank."""
    expected = results[0][single].step.tensors
    for name, tensor in expected.items():
        of_ranks = [found[none].step.tensors[name] for found in results]
        summed = torch.stack(of_ranks).sum(0) if name.startswith("gradient") else of_ranks[0]
        largest = max(float(expected[name].abs().max()), 1e-3)
        assert torch.allclose(summed, tensor, rtol=0, atol=1e-5 * largest + 1e-6), name
    for found in results:
        for way in found:
            if way.policy != "single":
                support.assert_same(found[way].step.tensors, found[none].step.tensors)


def check_ulysses(folder: Path, name: str = recipes.WAN) -> None:
    """8 exchanges in the forward, 8 of diffusers' own backward; `full` issues the first 8 again, attn_only none.

    diffusers' backward of native attention runs its forward again, without any checkpointing: twice here.
    """
    ways = [SINGLE, NONE, FULL, ATTN_ONLY, SAC, REPEATED]
    results = ranks.run(folder, _diffusers, name, ways, "native", {"ulysses_degree": 2})
    assert_parallel(results)
    for found in results:
        for way in (NONE, FULL, ATTN_ONLY, SAC, REPEATED):
            assert found[way].step.forward == Counter({ALL_TO_ALL: 8, ALL_GATHER: 1}), way
        again = {way: found[way].step.backward for way in found if way.policy != "single"}
        assert again[NONE] == again[ATTN_ONLY] == again[SAC] == Counter({ALL_TO_ALL: 8}), again
        assert again[FULL] == again[REPEATED] == Counter({ALL_TO_ALL: 16}), again
        assert [found[way].step.attention for way in (NONE, FULL, ATTN_ONLY, SAC)] == [(4, 2), (4, 6), (4, 2), (4, 2)]
        assert found[ATTN_ONLY].reported == found[SAC].reported == (8, 8, 0)
        assert found[REPEATED].reported == (8, 0, 8)


def test_ulysses(tmp_path: Path) -> None:
    check_ulysses(tmp_path)


def test_ulysses_over_a_kernel_with_statistics(tmp_path: Path) -> None:
    ways = [SINGLE, NONE, FULL, ATTN_ONLY, SAC]
    results = ranks.run(tmp_path, _diffusers, recipes.WAN, ways, "_native_flash", {"ulysses_degree": 2})
    assert_parallel(results)
    for found in results:
        attention = [found[way].step.attention for way in (NONE, FULL, ATTN_ONLY, SAC)]
        assert attention == [(2, 0), (2, 2), (2, 0), (2, 0)]
        collectives = [found[way].step.collectives for way in (NONE, FULL, ATTN_ONLY, SAC)]
        assert collectives == [(9, 8), (9, 16), (9, 8), (9, 8)]


def _ring(policy: str, options: dict[str, Any]) -> tuple[str, Any]:
    try:
        found = _diffusers(recipes.WAN, [SINGLE, Way(policy)], "_native_flash", options)
    except CheckpointError as error:
        return str(error), None
    return "", found


@pytest.mark.parametrize("options", [{"ring_degree": 2}, *slow({"ring_degree": 2, "ulysses_degree": 2})])
def test_ring_of_diffusers_trains_under_no_checkpointing(tmp_path: Path, options: dict[str, Any]) -> None:
    """Its backward reads its saved tensors twice, which torch's checkpoint refuses: with fastac or without."""
    world = options["ring_degree"] * options.get("ulysses_degree", 1)
    plain = ranks.run(tmp_path, _ring, "none", options, world=world)
    assert_parallel([found for _, found in plain])
    for policy in ("torch", "attn_only"):
        for error, _ in ranks.run(tmp_path, _ring, policy, options, world=world):
            assert "already unpacked once" in error, policy


def test_ulysses_of_any_length_has_no_backward(tmp_path: Path) -> None:
    options = {"ulysses_degree": 2, "ulysses_anything": True}
    for outcome in ranks.outcomes(tmp_path, _diffusers, recipes.WAN, [NONE], "native", options):
        assert "NotImplementedError: Backward pass for Ulysses Anything" in outcome.error


def _compiled(policies: list[str], backend: str) -> dict[Way, Trained]:
    found = {}
    with ranks.one_accelerator():
        for policy in policies:
            torch._dynamo.reset()
            model, batch = recipes.build(recipes.WAN)
            model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))  # type: ignore[operator]
            if policy == "none":
                for block in model.blocks:  # type: ignore[union-attr]
                    block.compile(backend=backend)
            else:
                fastac.compile(model, policy, backend=backend)
            steps.measured(model, batch)
            found[Way(policy)] = _trained(model, steps.measured(model, batch))
    return found


@pytest.mark.slow
def test_compiled_blocks(tmp_path: Path) -> None:
    for found in ranks.run(tmp_path, _compiled, ["none", "attn_only"], "aot_eager"):
        assert [found[way].step.collectives for way in (NONE, ATTN_ONLY)] == [(9, 8), (9, 8)]
        assert [found[way].step.attention for way in (NONE, ATTN_ONLY)] == [(4, 2), (4, 2)]
        support.assert_same(found[ATTN_ONLY].step.tensors, found[NONE].step.tensors)


# torch


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value)  # found when it is called: torch exchanges it


def _efficient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(query, key, value, None, True)[0]
    return out


_efficient.__name__ = "scaled_dot_product_attention"


@contextlib.contextmanager
def _efficient_on_cpu() -> Iterator[None]:
    name, aten = "_scaled_dot_product_efficient_attention", torch.ops.aten
    library = torch.library.Library("aten", "IMPL")
    forward, backward = getattr(aten, name).default, getattr(aten, f"{name}_backward").default
    returns = ("out", "logsumexp", "seed", "seed")
    library.impl(name, kernels_on_cpu.forward_kernel(f"aten::{name}", forward, "bhsd", returns), "CPU")
    library.impl(f"{name}_backward", kernels_on_cpu.backward_kernel(backward, "bhsd"), "CPU")
    before, F.scaled_dot_product_attention = F.scaled_dot_product_attention, _efficient
    try:
        yield
    finally:
        F.scaled_dot_product_attention = before
        library._destroy()


def _block() -> torch.nn.Module:
    return support.AttentionBlock(attend=_attend)


class _Weighted(torch.nn.Module):
    """An AttentionStack whose loss weighs every element; the weights are split along the tokens, as the video is."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        policy = "none" if way.policy == "single" else way.policy
        self.stack = support.stack(block=_block, policy=policy, engine=way.engine)

    def forward(self, video: torch.Tensor, text: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return (self.stack(video, text) * weights).sum()


def _torch(ways: list[Way], rotation: str) -> dict[Way, Trained]:
    _attention.set_rotate_method(rotation)
    _attention._cp_options.enable_load_balance = False  # for causal attention alone
    mesh = init_device_mesh("cpu", (2,))
    found = {}
    with _efficient_on_cpu():
        for way in ways:
            model = _Weighted(way)
            batch = {name: tensor.detach() for name, tensor in support.stack_inputs().items()}
            batch["weights"] = torch.randn(batch["video"].shape, generator=torch.Generator().manual_seed(3))
            buffers = list(batch.values())
            split = context_parallel(mesh, buffers=buffers, buffer_seq_dims=[1] * len(buffers))
            blocks = {f"blocks.{i}": block for i, block in enumerate(model.stack.blocks)}
            with contextlib.nullcontext() if way.policy == "single" else split, support.reported_blocks(blocks):
                found[way] = _trained(model, _counted(model, batch, lambda loss: loss))
    for trained in found.values():
        trained.step.tensors = {k: v for k, v in trained.step.tensors.items() if k.startswith("gradient")}
    return found


ROTATIONS = {
    "allgather": ({ALL_GATHER: 4}, {ALL_GATHER: 4, ALL_TO_ALL: 8}, {ALL_GATHER: 8, ALL_TO_ALL: 8}, (4, 0, 4)),
    "alltoall": ({ALL_TO_ALL: 4}, {ALL_TO_ALL: 12}, {ALL_TO_ALL: 12}, (4, 4, 0)),
}
"""Way to rotate keys -> collectives in forward, in backward without checkpointing, under attn_only, as reported."""


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_ring_of_torch(tmp_path: Path, rotation: str) -> None:
    """Each of the 4 attention calls is 2 kernels here, and 1 rotation of keys: saved when exchanged, not when gathered.

    Torch's selective checkpointing saves the call on DTensors as a whole, and never sees what it does inside.
    """
    results = ranks.run(tmp_path, _torch, [SINGLE, NONE, FULL, ATTN_ONLY, SAC], rotation)
    assert_parallel(results)
    forward, plain, saved, reported = ROTATIONS[rotation]
    for found in results:
        attention = [found[way].step.attention for way in (SINGLE, NONE, FULL, ATTN_ONLY, SAC)]
        assert attention == [(4, 0), (8, 0), (8, 8), (8, 0), (8, 0)]
        assert all(found[way].step.forward == forward for way in (NONE, FULL, ATTN_ONLY, SAC))
        assert found[NONE].step.backward == found[SAC].step.backward == plain
        assert found[FULL].step.backward == Counter(plain) + Counter(forward)
        assert found[ATTN_ONLY].step.backward == saved
        assert (found[ATTN_ONLY].reported, found[SAC].reported) == (reported, None)
