"""Training on several ranks, each with a part of the batch: FSDP2, DistributedDataParallel, FSDP1."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fastac
from fastac.models import unwrapped
from tests import support
from tests.distributed import ranks
from tests.distributed.training import POLICIES, Setup, assert_trained_alike, on_each_rank
from tests.marks import slow
from tests.ways.recipes import HUNYUAN, LTX, Batch, build, narrow


def blocks_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The members of a model's module lists, in their order."""
    return [block for child in model.children() if isinstance(child, torch.nn.ModuleList) for block in child]


def root(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    return fully_shard(model, **options)


def blocks(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    for block in blocks_of(model):
        fully_shard(block, **options)
    return fully_shard(model, **options)


def blocks_kept(model: torch.nn.Module) -> torch.nn.Module:
    return blocks(model, reshard_after_forward=False)


def blocks_to_one(model: torch.nn.Module) -> torch.nn.Module:
    return blocks(model, reshard_after_forward=1)


def blocks_in_bf16(model: torch.nn.Module) -> torch.nn.Module:
    return blocks(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


def blocks_offloaded(model: torch.nn.Module) -> torch.nn.Module:
    return blocks(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def every_linear(model: torch.nn.Module) -> torch.nn.Module:
    for block in blocks_of(model):
        for module in block.modules():
            if isinstance(module, torch.nn.Linear):
                fully_shard(module)
    return blocks(model)


def queries_apart(model: torch.nn.Module) -> torch.nn.Module:
    """When the block has run, some of an attention's parameters are shards again, and others are not."""
    for name, module in model.named_modules():
        if name.endswith("to_q"):
            fully_shard(module)
    return blocks_kept(model)


SHARDED = [
    Setup(blocks),
    Setup(blocks, order="enable, wrap"),
    Setup(queries_apart),
    *slow(
        Setup(root),
        Setup(blocks_kept),
        Setup(every_linear),
        Setup(blocks, name=HUNYUAN),
        Setup(blocks_to_one),
        Setup(blocks_offloaded),
        Setup(every_linear, name=LTX),
        Setup(every_linear, order="enable, wrap"),
    ),
]


def described(setup: Setup) -> str:
    name = setup.name.removesuffix("Transformer3DModel")
    way = [setup.prepare, setup.enable, setup.last]
    return "-".join([name, setup.wrap.__name__, setup.order.replace(", ", "-"), *(one.__name__ for one in way if one)])


@pytest.mark.parametrize("setup", SHARDED, ids=described)
def test_fully_shard(tmp_path: Path, setup: Setup) -> None:
    assert_trained_alike(ranks.run(tmp_path, on_each_rank, setup), setup)


def test_fully_shard_in_bf16(tmp_path: Path) -> None:
    setup = Setup(blocks_in_bf16)
    assert_trained_alike(ranks.run(tmp_path, on_each_rank, setup), setup, rounding=0.1)


def adapted(model: torch.nn.Module) -> torch.nn.Module:
    """Adapters on a frozen model, as diffusers adds them."""
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["to_q", "to_v"]))
    support.fill_zeros(model)
    return model


def synchronized_last(model: torch.nn.Module, last: bool) -> None:
    model.set_requires_gradient_sync(last)


def without_sync(model: torch.nn.Module, last: bool) -> Any:
    return None if last else model.no_sync()


def on_two_by_two(model: torch.nn.Module) -> torch.nn.Module:
    return blocks(model, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


def test_adapters(tmp_path: Path) -> None:
    setup = Setup(blocks, prepare=adapted)
    assert_trained_alike(ranks.run(tmp_path, on_each_rank, setup), setup)


@pytest.mark.slow
def test_adapters_in_small_units(tmp_path: Path) -> None:
    """Backward does not need the weights of a frozen layer whose input has no gradient. Any recompute gathers them."""
    setup = Setup(every_linear, prepare=adapted)
    found = ranks.run(tmp_path, on_each_rank, setup)
    for trained, _ in found:
        plain, full, saved = (trained[policy].steps for policy in POLICIES)
        assert [one.backward for one in saved] == [one.backward for one in full]
        for one, other in zip(saved, plain, strict=True):
            assert 0 < one.backward["gloo:all_gather"] - other.backward["gloo:all_gather"] <= 3
        for other in (*full, *saved):
            other.backward = plain[0].backward
    assert_trained_alike(found, setup)


def test_accumulation(tmp_path: Path) -> None:
    setup = Setup(blocks, last=synchronized_last, micro_batches=2)
    assert_trained_alike(ranks.run(tmp_path, on_each_rank, setup), setup)


@pytest.mark.slow
def test_hybrid(tmp_path: Path) -> None:
    setup = Setup(on_two_by_two, world=4)
    assert_trained_alike(ranks.run(tmp_path, on_each_rank, setup, world=4), setup)


def default(model: torch.nn.Module) -> torch.nn.Module:
    return DistributedDataParallel(model)


def static(model: torch.nn.Module) -> torch.nn.Module:
    return DistributedDataParallel(model, static_graph=True)


def unused(model: torch.nn.Module) -> torch.nn.Module:
    return DistributedDataParallel(model, find_unused_parameters=True)


def views(model: torch.nn.Module) -> torch.nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=1)


def replicated(model: torch.nn.Module) -> torch.nn.Module:
    return replicate(model)


PARALLEL = [
    Setup(default),
    Setup(static),
    Setup(default, last=without_sync, micro_batches=2),
    *slow(
        Setup(unused),
        Setup(static, prepare=adapted),
        Setup(views),
        Setup(replicated),
        Setup(default, prepare=adapted),
        Setup(default, order="enable, wrap"),
        Setup(static, order="enable, wrap"),
        Setup(views, last=without_sync, micro_batches=2),
    ),
]


@pytest.mark.parametrize("setup", PARALLEL, ids=described)
def test_ddp(tmp_path: Path, setup: Setup) -> None:
    assert_trained_alike(ranks.run(tmp_path, on_each_rank, setup), setup)


def flat(model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    each = {type(block) for block in blocks_of(model)}
    return FullyShardedDataParallel(
        model, auto_wrap_policy=ModuleWrapPolicy(each), device_id=torch.device("cpu"), **options
    )


def flat_original(model: torch.nn.Module) -> torch.nn.Module:
    return flat(model, use_orig_params=True)


def flat_gradients_sharded(model: torch.nn.Module) -> torch.nn.Module:
    return flat(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


FLAT = [  # Wan's forward asks its own parameters for their dtype, and flat ones are none
    Setup(flat_original),
    *slow(
        Setup(flat, name=LTX),
        Setup(flat_original, order="enable, wrap"),
        Setup(flat_gradients_sharded, name=LTX),
    ),
]


@pytest.mark.parametrize("setup", FLAT, ids=described)
def test_fully_sharded_data_parallel(tmp_path: Path, setup: Setup) -> None:
    assert_trained_alike(ranks.run(tmp_path, on_each_rank, setup), setup, shards=True)


def uneven(batch: Batch, rank: int) -> Batch:
    """Another video size for rank 1, whose video requires grad."""
    if rank == 0:
        return batch
    batch = narrow(batch)
    return batch | {"hidden_states": batch["hidden_states"].requires_grad_()}


@pytest.mark.parametrize("wrap", [blocks, *slow(default)])
def test_ranks_that_recompute_unequally(tmp_path: Path, wrap: Any) -> None:
    setup = Setup(wrap, data=uneven)
    policies = ("none", "attn_only", "attn_only|full", "none|attn_only")
    assert_trained_alike(ranks.run(tmp_path, on_each_rank, setup, policies), setup)


def verified(setup: Setup) -> fastac.Verification:
    model, batch = build(setup.name)
    wrapped = setup.wrap(model)
    return fastac.verify(wrapped, **batch)


@pytest.mark.parametrize("wrap", [blocks, static, *slow(every_linear, default, flat_original)])
def test_verify(tmp_path: Path, wrap: Any) -> None:
    for found in ranks.run(tmp_path, verified, Setup(wrap)):
        assert found.different == ()
        assert found.saved == 4


def remarks(name: str) -> tuple[str, ...]:
    model, _ = build(name)
    return fastac.report(every_linear(model)).remarks


def test_what_is_known_of_a_class_holds_when_it_is_sharded(tmp_path: Path) -> None:
    """fully_shard changes the class of a module."""
    [found] = ranks.run(tmp_path, remarks, "SanaWMTransformer3DModel", world=1)
    assert [remark.split(":")[0] for remark in found] == ["linear attention, which is recomputed"]


def with_torch_engine(model: torch.nn.Module, policy: str) -> None:
    if policy != "none":
        fastac.enable(model, policy, engine="sac")


@pytest.mark.parametrize("wrap", [every_linear, *slow(blocks)])
def test_torch_engine(tmp_path: Path, wrap: Any) -> None:
    setup = Setup(wrap, enable=with_torch_engine)
    assert_trained_alike(ranks.run(tmp_path, on_each_rank, setup), setup)


def compile_blocks(model: torch.nn.Module, policy: str) -> None:
    if policy == "none":
        for block in blocks_of(unwrapped(model)):
            block.compile(backend="aot_eager")
    else:
        fastac.compile(model, policy, backend="aot_eager")


def compile_whole(model: torch.nn.Module, policy: str) -> None:
    if policy != "none":
        fastac.enable(model, policy)
    model.compile(backend="aot_eager")


COMPILED = [
    Setup(blocks, enable=compile_blocks, compiles=True, order="enable, wrap"),
    Setup(blocks, enable=compile_blocks, compiles=True),
    Setup(every_linear, enable=compile_blocks, compiles=True),
    Setup(default, enable=compile_blocks, compiles=True),
    Setup(default, enable=compile_whole, compiles=True, order="enable, wrap"),
]


@pytest.mark.slow
@pytest.mark.parametrize("setup", COMPILED, ids=described)
def test_compiled(tmp_path: Path, setup: Setup) -> None:
    policies = ("none", "attn_only")
    assert_trained_alike(ranks.run(tmp_path, on_each_rank, setup, policies, patience=280), setup)


@pytest.mark.slow
def test_compiled_as_a_whole_with_sharded_blocks(tmp_path: Path) -> None:
    """The compiler leaves out checkpoints around what FSDP2 hooks into: blocks run eagerly, which fastac tells."""
    setup = Setup(blocks, enable=compile_whole, compiles=True, order="enable, wrap")
    found = ranks.run(tmp_path, on_each_rank, setup, ("none", "attn_only"), patience=280)
    for trained, _ in found:
        [warning] = trained["attn_only"].warnings
        assert warning.startswith("WanTransformerBlock: runs eagerly, though torch.compile was applied")
        trained["attn_only"].warnings.clear()
    assert_trained_alike(found, setup)
