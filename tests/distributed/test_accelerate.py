"""accelerate's FSDP plugin, version 2, and its DDP: what two ranks compute is what one process does on both batches.

accelerate shards on no CPU of itself: it takes a process on one for MULTI_CPU, whatever plugin it gets. It is told here
that it has GPUs, after it has set up gloo.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import fastac
from fastac import models
from tests import support
from tests.distributed import ranks, steps
from tests.marks import slow
from tests.support import Tensors, assert_same, relative_error
from tests.ways.recipes import ATTENTION, COGVIDEOX, HUNYUAN, LTX, WAN, batches, build

WORLD = 2
STEPS = 2
CLIP = 0.5

BLOCKS = {
    WAN: ["WanTransformerBlock"],
    LTX: ["LTXVideoTransformerBlock"],
    HUNYUAN: ["HunyuanVideoTransformerBlock", "HunyuanVideoSingleTransformerBlock"],
    COGVIDEOX: ["CogVideoXBlock"],
}


class Case(NamedTuple):
    """policy: "none" for no fastac; `enable` is called before or after `prepare`. plugin: options; None for DDP."""

    policy: str
    order: str = "before"
    plugin: dict[str, bool] | None = None
    mixed_precision: str = "no"


class Found(NamedTuple):
    """tensors: losses and gradients by step, before clipping, and the norms. attention, backward: of the last step.

    weights: those that accelerate gathers on the main process, at the beginning. wrappers, sharded: CheckpointWrappers
    and modules of FSDP in the model. saved, writing: attention calls, and collectives that write a buffer, as reported.
    """

    tensors: Tensors
    attention: steps.Counts
    backward: Counter[str]
    weights: Tensors
    wrappers: int
    sharded: int
    saved: int
    writing: int


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
    return accelerator


def plain(name: str) -> str:
    return name.replace("_checkpoint_wrapped_module.", "").replace("gradient of module.", "gradient of ")


def trained(name: str, case: Case) -> Found:
    """A few steps of SGD on this rank's batches."""
    accelerator = accelerator_for(case)
    model, batch = build(name)
    if case.plugin is not None:
        accelerator.state.fsdp_plugin.transformer_cls_names_to_wrap = BLOCKS[name]
    if case.policy != "none" and case.order == "before":
        fastac.enable(model, case.policy)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-2))
    if case.policy != "none" and case.order == "after":
        fastac.enable(model, case.policy)
    weights = accelerator.get_state_dict(model)
    own = batches(batch, WORLD * STEPS)[dist.get_rank() :: WORLD]
    tensors: Tensors = {}

    def keep(number: int, found: Tensors) -> None:
        tensors.update({f"step {number} {plain(key)}": steps.whole(tensor) for key, tensor in found.items()})

    def step(number: int) -> None:
        keep(number, {"norm": accelerator.clip_grad_norm_(model.parameters(), CLIP)})
        optimizer.step()

    for number, one in enumerate(own[:-1]):  # without the profiler, which takes longer than the step
        optimizer.zero_grad()
        loss = support.loss_of(model(**one))
        accelerator.backward(loss)
        keep(number, {"loss": loss} | support.gradients(support.leaves_of(model, {})))
        step(number)
    last = steps.measured(model, own[-1])
    keep(STEPS - 1, {key: value for key, value in last.tensors.items() if not key.startswith("output")})
    step(STEPS - 1)
    modules = list(model.modules())
    rows = fastac.report(model).rows if case.policy != "none" else ()
    return Found(
        tensors,
        last.attention,
        last.backward,
        {key: value.clone() for key, value in weights.items()} if accelerator.is_main_process else {},
        sum(isinstance(module, CheckpointWrapper) for module in modules),
        sum(isinstance(module, FSDPModule) for module in modules),
        sum(row.saved for row in rows),
        sum(row.writing for row in rows),
    )


def trained_in_turn(name: str, cases: list[Case]) -> list[Found]:
    return [trained(name, case) for case in cases]


def alone(name: str) -> Tensors:
    """The same steps by this process, on the batches of all ranks."""
    model, batch = build(name)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    found: Tensors = {}
    for number in range(STEPS):
        optimizer.zero_grad()
        for rank, one in enumerate(batches(batch, WORLD * STEPS)[WORLD * number :][:WORLD]):
            loss = support.loss_of(model(**one))
            found[f"step {number} loss of {rank}"] = loss.detach()
            (loss / WORLD).backward()
        found |= {
            f"step {number} {key}": value for key, value in support.gradients(support.leaves_of(model, {})).items()
        }
        found[f"step {number} norm"] = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
    return found


def assert_like_alone(name: str, found: list[Found]) -> None:
    """Losses of each rank, gradients, and norms, but for the order in which the ranks' parts are summed."""
    expected = alone(name)
    for rank, one in enumerate(found):
        for key, tensor in one.tensors.items():
            theirs = expected[f"{key} of {rank}" if key.endswith(" loss") else key]
            largest = max(1.0, float(theirs.abs().max()))
            assert (tensor - theirs).abs().max() <= 1e-5 * largest, (key, relative_error(tensor, theirs))
        for key in expected:
            assert "loss" in key or key in one.tensors, f"no {key}"


def check(name: str, cases: list[Case], folder: Path, again: list[int], like_alone: bool = True) -> list[list[Found]]:
    """Train each case on two ranks. All must equal the first case, bit for bit, and that must equal one process.

    again: the attention kernels that run in backward, by case. What fastac is on for must issue in backward the
    collectives of the first case, which has no checkpointing.
    """
    by_rank = ranks.run(folder, trained_in_turn, name, cases, world=WORLD)
    found = [list(of_case) for of_case in zip(*by_rank, strict=True)]
    if like_alone:
        assert_like_alone(name, found[0])
    keys = list(build(name)[0].state_dict())
    for case, of_case, backward in zip(cases, found, again, strict=True):
        for one, first in zip(of_case, found[0], strict=True):
            assert_same(one.tensors, first.tensors)
            assert one.attention == (ATTENTION[name].calls, backward), case
            assert one.backward == first.backward, case
            assert one.writing == 0, case
            assert one.saved == (ATTENTION[name].in_blocks if case.policy == "attn_only" else 0), case
        assert first.backward.total() > 0
        assert sorted(key.removeprefix("module.") for key in of_case[0].weights) == sorted(keys), case
    return found


PLAIN: dict[str, bool] = {}
CHECKPOINTED = {"activation_checkpointing": True}
OFFLOADED = CHECKPOINTED | {"activation_checkpointing_offload": True}
"""Options of the plugin. It then puts the blocks into CheckpointWrappers, which stay, and checkpoint as fastac says."""


def wrappers_and_shards(name: str, cases: list[Case], found: list[list[Found]]) -> None:
    blocks = sum(type(module).__name__ in BLOCKS[name] for module in build(name)[0].modules())
    for case, of_case in zip(cases, found, strict=True):
        for one in of_case:
            assert one.wrappers == (blocks if case.plugin else 0), case
            assert one.sharded > blocks


@pytest.mark.slow
def test_sharded(tmp_path: Path) -> None:
    full = ATTENTION[WAN].in_blocks
    cases = [
        Case("none", plugin=PLAIN),
        Case("full", plugin=PLAIN),
        Case("attn_only", "before", plugin=PLAIN),
        Case("attn_only", "after", plugin=PLAIN),
        Case("none", plugin=CHECKPOINTED),
        Case("full", "after", plugin=CHECKPOINTED),
        Case("attn_only", "before", plugin=CHECKPOINTED),
        Case("attn_only", "after", plugin=CHECKPOINTED),
        Case("attn_only", "before", plugin=OFFLOADED),
        Case("attn_only", "after", plugin=OFFLOADED),
    ]
    found = check(WAN, cases, tmp_path, [0, full, 0, 0, full, full, 0, 0, 0, 0])
    wrappers_and_shards(WAN, cases, found)


@pytest.mark.slow
@pytest.mark.parametrize("name", [HUNYUAN, LTX, COGVIDEOX])
def test_other_models(name: str, tmp_path: Path) -> None:
    """Hunyuan has blocks of two kinds, and an attention outside of them."""
    cases = [
        Case("none", plugin=PLAIN),
        Case("attn_only", "before", plugin=PLAIN),
        Case("attn_only", "after", plugin=CHECKPOINTED),
    ]
    wrappers_and_shards(name, cases, check(name, cases, tmp_path, [0, 0, 0]))


HALF = [
    Case("none", plugin=PLAIN, mixed_precision="bf16"),
    Case("attn_only", "before", plugin=PLAIN, mixed_precision="bf16"),
    Case("attn_only", "after", plugin=CHECKPOINTED, mixed_precision="bf16"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", [WAN, HUNYUAN, LTX])
def test_sharded_in_half_precision(name: str, tmp_path: Path) -> None:
    """FSDP casts what it gathers, accelerate's autocast is around the model: the recompute sees the same."""
    check(name, HALF, tmp_path, [0, 0, 0], like_alone=False)


PARALLEL = [Case("none"), Case("full"), Case("attn_only", "before"), Case("attn_only", "after")]


@pytest.mark.parametrize("name", [WAN, *slow(HUNYUAN, COGVIDEOX)])
def test_parallel(name: str, tmp_path: Path) -> None:
    """DistributedDataParallel as `prepare` makes it."""
    check(name, PARALLEL, tmp_path, [0, ATTENTION[name].in_blocks, 0, 0])


SANA = "SanaWMTransformer3DModel"


def _remarks_on_a_sharded_model() -> tuple[str, tuple[str, ...], str]:
    model, _ = build(SANA)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    fastac.enable(model)
    row = models.row_of(model)
    return type(model).__name__, fastac.report(model).remarks, row.name if row else ""


def test_a_sharded_model_is_known_in_the_catalogue(tmp_path: Path) -> None:
    """fully_shard gives it another class, and only the catalogue says which of its modules are linear attention."""
    ((class_name, remarks, row),) = ranks.run(tmp_path, _remarks_on_a_sharded_model, world=1)
    assert class_name == f"FSDP{SANA}"
    assert row == SANA
    assert any("linear attention, which is recomputed" in remark for remark in remarks)


@pytest.mark.slow
def test_parallel_in_half_precision(tmp_path: Path) -> None:
    cases = [case._replace(mixed_precision="bf16") for case in PARALLEL]
    check(WAN, cases, tmp_path, [0, ATTENTION[WAN].in_blocks, 0, 0], like_alone=False)
