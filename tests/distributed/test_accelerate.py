"""accelerate's FSDP plugin, version 2, and its DDP: what two ranks compute is what one process does on both batches.

accelerate shards on no CPU of itself: it takes a process on one for MULTI_CPU, whatever plugin it gets. It is told here
that it has GPUs, after it has set up gloo.
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule

import fastac
from tests import support
from tests.distributed import ranks, steps
from tests.support import Tensors, assert_same
from tests.ways.recipes import ATTENTION, WAN, batches, build

WORLD, STEPS, CLIP = 2, 2, 0.5


class Case(NamedTuple):
    """policy: "none" for no fastac; `enable` is called before or after `prepare`. plugin: options; None for DDP."""

    policy: str
    order: str = "before"
    plugin: dict[str, bool] | None = None
    mixed_precision: str = "no"


class Found(NamedTuple):
    """tensors: losses and gradients by step, before clipping, and the norms. attention, backward: of the last step.

    weights: names of those that accelerate gathers on the main process. wrappers, sharded: CheckpointWrappers and
    modules of FSDP in the model. saved: attention calls, as reported.
    """

    tensors: Tensors
    attention: steps.Counts
    backward: Counter[str]
    weights: list[str]
    wrappers: int
    sharded: int
    saved: int


def accelerator_for(case: Case) -> Accelerator:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)
    if case.plugin is None:
        return Accelerator(cpu=True, mixed_precision=case.mixed_precision)
    state = PartialState(cpu=True)
    assert state.distributed_type == DistributedType.MULTI_CPU
    state.distributed_type = DistributedType.MULTI_GPU
    options: dict[str, Any] = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap", **case.plugin}
    plugin = FullyShardedDataParallelPlugin(**options)
    accelerator = Accelerator(cpu=True, mixed_precision=case.mixed_precision, fsdp_plugin=plugin)
    assert accelerator.is_fsdp2
    accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = ["WanTransformerBlock"]
    return accelerator


def trained(case: Case) -> Found:
    """A few steps of SGD on this rank's batches."""
    accelerator = accelerator_for(case)
    model, batch = build(WAN)
    if case.policy != "none" and case.order == "before":
        fastac.enable(model, case.policy)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    if case.policy != "none" and case.order == "after":
        fastac.enable(model, case.policy)
    weights = accelerator.get_state_dict(model)
    tensors: Tensors = {}
    for number, one in enumerate(batches(batch, WORLD * STEPS)[dist.get_rank() :: WORLD]):
        optimizer.zero_grad()
        step = steps.measured(model, one)
        tensors |= {f"step {number} {steps.plain_name(key)}": tensor for key, tensor in step.tensors.items()}
        tensors[f"step {number} norm"] = steps.whole(accelerator.clip_grad_norm_(model.parameters(), CLIP))
        optimizer.step()
    modules = list(model.modules())
    return Found(
        {key: tensor for key, tensor in tensors.items() if " output" not in key},
        step.attention,
        step.backward,
        [steps.plain_name(key) for key in weights] if accelerator.is_main_process else [],
        sum(isinstance(module, CheckpointWrapper) for module in modules),
        sum(isinstance(module, FSDPModule) for module in modules),
        sum(row.saved for row in fastac.report(model).rows) if case.policy != "none" else 0,
    )


def trained_in_turn(cases: list[Case]) -> list[Found]:
    return [trained(case) for case in cases]


def alone(rank: int) -> Tensors:
    """The same steps by this process, on the batches of all ranks; the losses of one."""
    model, batch = build(WAN)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found: Tensors = {}
    for number in range(STEPS):
        optimizer.zero_grad()
        for other, one in enumerate(batches(batch, WORLD * STEPS)[WORLD * number :][:WORLD]):
            loss = support.loss_of(model(**one))
            (loss / WORLD).backward()
            if other == rank:
                found[f"step {number} loss"] = loss.detach()
        gradients = support.gradients(support.leaves_of(model, {}))
        found |= {f"step {number} {key}": value for key, value in gradients.items()}
        found[f"step {number} norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return found


def check(cases: list[Case], like_alone: bool = True) -> list[list[Found]]:
    """Train each case on two ranks: all have the bits of the first, which has no checkpointing and is like one process.

    None runs attention again, or issues another collective.
    """
    found = [list(of_case) for of_case in zip(*ranks.run(trained_in_turn, cases), strict=True)]
    keys = sorted(build(WAN)[0].state_dict())
    for rank, first in enumerate(found[0]):
        if like_alone:
            steps.assert_close(first.tensors, alone(rank), 1e-5)
        assert first.backward.total() > 0
        for case, of_case in zip(cases, found, strict=True):
            one = of_case[rank]
            assert_same(one.tensors, first.tensors)
            assert one.attention == (ATTENTION[WAN].calls, 0), case
            assert one.backward == first.backward, case
            assert one.saved == (ATTENTION[WAN].in_blocks if case.policy == "attn_only" else 0), case
            assert sorted(of_case[0].weights) == keys, case
    return found


PLAIN: dict[str, bool] = {}
CHECKPOINTED = {"activation_checkpointing": True}
OFFLOADED = CHECKPOINTED | {"activation_checkpointing_offload": True}
"""Options of the plugin. It then puts the blocks into CheckpointWrappers, which stay, and checkpoint as fastac says."""


def test_sharded() -> None:
    cases = [
        Case("none", plugin=PLAIN),
        Case("attn_only", "before", plugin=PLAIN),
        Case("attn_only", "before", plugin=CHECKPOINTED),
        Case("attn_only", "after", plugin=CHECKPOINTED),
        Case("attn_only", "after", plugin=OFFLOADED),
    ]
    found = check(cases)
    blocks = len(build(WAN)[0].blocks)  # type: ignore[arg-type]
    for case, of_case in zip(cases, found, strict=True):
        assert [one.wrappers for one in of_case] == [blocks if case.plugin else 0] * WORLD, case
        assert all(one.sharded > blocks for one in of_case)


def test_sharded_in_half_precision() -> None:
    """FSDP casts what it gathers, accelerate's autocast is around the model: the recompute sees the same."""
    half = {"mixed_precision": "bf16"}
    cases = [Case("none", plugin=PLAIN, **half), Case("attn_only", "after", plugin=CHECKPOINTED, **half)]
    check(cases, like_alone=False)


def test_parallel() -> None:
    """DistributedDataParallel as `prepare` makes it."""
    check([Case("none"), Case("attn_only", "before"), Case("attn_only", "after")])
