"""One rank fails: the others end with an error within the time limit of the group, and a restart goes on.

The message names what happened where it happened. No rank is left alone in a collective by fastac itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
import torch.distributed.checkpoint as distributed_checkpoint
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

import fastac
from fastac import diagnosis
from tests import support
from tests.distributed import ranks, steps
from tests.distributed.models import exchanged, part_of_inputs, ulysses, ulysses_stack
from tests.support import assert_same, stack, stack_inputs
from tests.ways.recipes import WAN, adamw, batches, build, narrow

LIMIT = 2.5
"""Seconds that a collective waits, in these tests."""

SLACK = 20.0
"""Seconds for all else: starting, and a machine that is busy."""


class Failing(torch.nn.Module):
    """Does what a test says when it is called for the n-th time on rank 1, recompute included."""

    def __init__(self, what: str, call: int) -> None:
        super().__init__()
        self.what = what
        self.left = call

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        self.left -= 1
        if self.left == 0 and dist.get_rank() == 1:
            if self.what == "leaves":
                os._exit(9)
            raise ValueError("the disk of this rank is full")
        return tensor


FORWARD, RECOMPUTE = 2, 3
"""Of two layers' calls: the second in the forward, the first in recompute."""


def _in_parallel(model: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.parallel.DistributedDataParallel(model)


def _sharded_inside(model: Any) -> torch.nn.Module:
    """With units inside the blocks, whose parameters are gathered while the block runs."""
    for block in model.blocks:
        fully_shard(block.qkv)
        fully_shard(block.kv)
    return _sharded(model)


def _sharded(model: Any) -> torch.nn.Module:
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


ENGINES: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
    "ddp": _in_parallel,
    "fsdp2": _sharded,
    "fsdp2 inside blocks": _sharded_inside,
}


def _train(engine: str, what: str, call: int) -> None:
    if engine == "ulysses":
        model, inputs = ulysses_stack(), part_of_inputs()
    else:
        model, inputs = stack(), stack_inputs(seed=dist.get_rank())
    failing = Failing(what, call)
    for block in model.blocks:
        block.norms[2] = torch.nn.Sequential(failing, block.norms[2])
    wrapped = ENGINES[engine](model) if engine in ENGINES else model
    fastac.enable(model, blocks="blocks")
    for _ in range(2):
        support.loss_of(wrapped(**inputs)).backward()


@pytest.mark.parametrize("call", [FORWARD, RECOMPUTE], ids=["forward", "recompute"])
@pytest.mark.parametrize("what", ["raises", "leaves"])
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "ulysses"])
def test_the_others_end_in_time(engine: str, what: str, call: int, tmp_path: Path) -> None:
    first, second = ranks.outcomes(tmp_path, _train, engine, what, call, timeout=LIMIT, patience=LIMIT + SLACK)
    assert "not done" not in first.error + second.error
    assert "RuntimeError" in first.error, f"rank 0 did not notice: {first.error!r}"
    if what == "raises":
        assert "ValueError: the disk of this rank is full" in second.error
    else:
        assert second.exit_code == 9


# fastac's own errors


def _needs_a_mask_gradient(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention that no fused kernel takes, on rank 1."""
    if dist.get_rank() == 0:
        return ulysses(query, key, value)
    tokens = query.shape[2] * dist.get_world_size()
    keys = key.shape[2] * dist.get_world_size()
    return ulysses(query, key, value, attn_mask=torch.zeros(tokens, keys, requires_grad=True))


def _counted_looks() -> list[Any]:
    """Grows with every second look of this rank, from now on."""
    looks: list[Any] = []
    original = diagnosis.look_again

    def look_again(function: Any, *args: Any) -> diagnosis.Look:
        looks.append(function)
        return original(function, *args)

    diagnosis.look_again = look_again
    return looks


def _refused_on_one_rank(engine: str) -> tuple[str, int]:
    """What this rank raised, and how often a region was looked at again."""
    looks = _counted_looks()
    model: Any = ulysses_stack() if engine == "ulysses" else stack()
    for block in model.blocks:
        if engine == "ulysses":
            block.attend = _needs_a_mask_gradient
        elif dist.get_rank() == 1:
            block.attend = lambda *qkv: F.scaled_dot_product_attention(*qkv, dropout_p=0.1)
    inputs = part_of_inputs() if engine == "ulysses" else stack_inputs(seed=dist.get_rank())
    wrapped = ENGINES[engine](model) if engine in ENGINES else model
    fastac.enable(model, blocks="blocks")
    try:
        support.loss_of(wrapped(**inputs)).backward()
    except fastac.PolicyNotAppliedError as error:
        return str(error), len(looks)
    except RuntimeError as error:
        return f"other: {error}", len(looks)
    return "", len(looks)


@pytest.mark.parametrize("engine", ["ulysses", "fsdp2 inside blocks"])
def test_no_second_look_in_a_block_that_communicates(engine: str, tmp_path: Path) -> None:
    """The block would be run once more on one rank alone, and its collectives would meet others of rank 0."""
    first, second = ranks.run(tmp_path, _refused_on_one_rank, engine, timeout=LIMIT)
    assert first[0].startswith("other: "), "rank 0 waits for rank 1 in vain"
    assert second[0].startswith("rank 1 of 2: attn_only: not every attention call at AttentionStack.blocks.0 was saved")
    assert "it was not looked at more closely: its block communicates with other ranks" in second[0]
    assert (first[1], second[1]) == (0, 0)


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
def test_a_second_look_where_no_rank_waits(engine: str, tmp_path: Path) -> None:
    """FSDP2 gathers a block's parameters before its forward begins, and frees them after it."""
    first, second = ranks.run(tmp_path, _refused_on_one_rank, engine, timeout=LIMIT)
    assert first[0].startswith("other: ")
    assert "it drops out (dropout_p=0.1)" in second[0]
    assert second[1] == 1


# Recompute that differs from rank to rank


def _reduced_behind(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    """A sum over the ranks that only rank 0 needs again for its backward: rank 1's recompute stops before it."""
    query, key = (tensor.unflatten(-1, (2, -1)).transpose(1, 2) for tensor in (video, text))
    own = F.scaled_dot_product_attention(query, key, key).transpose(1, 2).flatten(2)
    together = functional.all_reduce(own.detach(), "sum", dist.group.WORLD)
    together = functional.wait_tensor(together)
    return own * together if dist.get_rank() == 0 else own + together


def _diverge(policy: str) -> str:
    inputs = {name: tensor.detach().requires_grad_() for name, tensor in stack_inputs().items()}
    output = support.run_checkpointed(_reduced_behind, *inputs.values(), policy=policy)
    try:
        support.loss_of(output).backward()
        dist.barrier()
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_recompute_different_amounts(tmp_path: Path) -> None:
    """torch's own checkpointing issues the sum again on one rank alone; saved, it is issued by none."""
    found = ranks.run(tmp_path, _diverge, "torch", timeout=LIMIT)
    assert any(found), "the case shows nothing: full checkpointing gets through as well"
    assert ranks.run(tmp_path, _diverge, "attn_only", timeout=LIMIT) == ["", ""]


# Restart


def _train_and_save(folder: str, fails_at: int | None, stop: int) -> dict[str, torch.Tensor]:
    """Steps under FSDP2 from the latest checkpoint on, each saved by torch.distributed.checkpoint."""
    model, batch = build(WAN)
    fastac.enable(model)
    _sharded(model)
    optimizer = adamw(model)
    generator = torch.Generator().manual_seed(3)
    everything = batches(batch, stop, generator)
    state: dict[str, Any] = {"model": model.state_dict(), "step": torch.zeros((), dtype=torch.int64)}
    if (Path(folder) / ".metadata").exists():
        distributed_checkpoint.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
    losses = {}
    for number in range(int(state["step"]), stop):
        if number == fails_at and dist.get_rank() == 1:
            raise ValueError("the disk of this rank is full")
        loss = support.loss_of(model(**everything[number]))
        loss.backward()
        losses[f"loss {number}"] = loss.detach()
        with torch.no_grad():  # plain steps: a state of its own would have to be stored, too
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=1e-3)
        optimizer.zero_grad()
        state = {"model": model.state_dict(), "step": torch.tensor(number + 1)}
        distributed_checkpoint.save(state, checkpoint_id=folder)
    return losses | {name: steps.whole(tensor) for name, tensor in model.named_parameters()}


def test_a_restart_from_the_last_checkpoint(tmp_path: Path) -> None:
    expected = ranks.run(tmp_path, _train_and_save, str(tmp_path / "whole"), None, 4)[0]
    folder = str(tmp_path / "parts")
    first, second = ranks.outcomes(tmp_path, _train_and_save, folder, 2, 4, timeout=LIMIT)
    assert "the disk of this rank is full" in second.error
    assert "RuntimeError" in first.error
    found = ranks.run(tmp_path, _train_and_save, folder, None, 4)[0]
    assert "loss 1" not in found
    assert "loss 2" in found
    assert_same(found, {name: tensor for name, tensor in expected.items() if name in found})


# A block that saves less than others of its class


class Twice(torch.nn.Module):
    """A block of the class of others, whose attention may be written out, where no op shows it."""

    def __init__(self, communicates: bool, written_out: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)
        self.communicates, self.written_out = communicates, written_out

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.linear(x)
        if self.communicates:
            heads = exchanged(heads[None], gather=0, split=2)[0]
        if self.written_out:
            return torch.softmax(heads @ heads.transpose(-1, -2), -1) @ heads
        return F.scaled_dot_product_attention(heads, heads, heads)


def _hidden(communicates: bool, in_first: bool = False) -> tuple[str, int]:
    looks = _counted_looks()
    x = torch.randn(1, 2, 12, 8).requires_grad_()
    first, second = Twice(communicates, written_out=in_first), Twice(communicates, written_out=True)
    try:
        fastac.checkpoint(first, x).sum().backward()
        fastac.checkpoint(second, x).sum().backward()
    except fastac.PolicyNotAppliedError as error:
        return str(error), len(looks)
    return "", len(looks)


@pytest.mark.parametrize("communicates", [False, True])
def test_a_later_block_that_hides_its_attention(communicates: bool, tmp_path: Path) -> None:
    """It is not watched as the first of its class was. Where it communicates, it is not run again to see why."""
    for message, looks in ranks.run(tmp_path, _hidden, communicates, timeout=LIMIT):
        assert "not every attention call at Twice was saved" in message
        if communicates:
            assert "Others of its kind make 1 attention calls. It was not run again" in message
        assert looks == (0 if communicates else 1)


def test_a_first_block_that_hides_its_attention(tmp_path: Path) -> None:
    """It is watched; what was seen then is what is told."""
    for message, looks in ranks.run(tmp_path, _hidden, True, True, timeout=LIMIT):
        assert "in Twice over 12 keys ran as small ops" in message
        assert looks == 0


class FlashAttention(torch.autograd.Function):
    """Says that it is attention, and shows no op."""

    @staticmethod
    def forward(context: Any, *heads: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(*heads)
        return heads[0] * heads[1] * heads[2]

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        first, second, third = context.saved_tensors
        return gradient * second * third, gradient * first * third, gradient * first * second


class Elsewhere(Twice):
    """Attends in another thread, and in a Function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = super().forward(x)
        with ThreadPoolExecutor(1) as pool:
            other = pool.submit(F.scaled_dot_product_attention, heads, heads, heads).result()
        out: torch.Tensor = FlashAttention.apply(other, other * 2, other * 3)
        return out


def _unseen_in_two_ways() -> tuple[str, int]:
    looks = _counted_looks()
    try:
        fastac.checkpoint(Elsewhere(True, False), torch.randn(1, 2, 12, 8).requires_grad_())
    except fastac.PolicyNotAppliedError as error:
        return str(error), len(looks)
    return "", len(looks)


def test_what_a_first_look_has_seen_counts_once(tmp_path: Path) -> None:
    for message, looks in ranks.run(tmp_path, _unseen_in_two_ways, timeout=LIMIT):
        assert "(1 of 3 reached a registered op)" in message
        assert "was called in another thread" in message
        assert "FlashAttention" in message
        assert looks == 0


def _other_sizes_on_one_rank() -> list[float]:
    """Compiled blocks of FSDP2 get a new size on rank 1 alone, as aspect-ratio buckets do."""
    model, batch = build(WAN)
    fastac.enable(model)
    for block in model.blocks:
        block.compile(backend="aot_eager", dynamic=False)
    _sharded(model)
    losses = []
    for number in range(3):
        own = narrow(batch) if number == 1 and dist.get_rank() == 1 else batch
        loss = support.loss_of(model(**own))
        loss.backward()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
def test_other_sizes_on_one_rank_of_compiled_blocks(tmp_path: Path) -> None:
    first, second = ranks.run(tmp_path, _other_sizes_on_one_rank)
    assert first == [first[0]] * 3
    assert second == [first[0], second[1], first[0]]
