"""fastac.verify on several ranks: it holds on all or fails on all, and no rank takes a step that the others do not."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard

import fastac
from fastac.engine import torch_private
from tests.distributed import ranks
from tests.distributed.models import part_of_inputs, ulysses, ulysses_stack
from tests.ways.recipes import WAN, build

LIMIT = 3.0


def _sharded() -> tuple[Any, dict[str, Any]]:
    model, batch = build(WAN)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, batch


def _in_parallel() -> tuple[Any, dict[str, Any]]:
    model, batch = build(WAN)
    return torch.nn.parallel.DistributedDataParallel(model), batch


def _split() -> tuple[Any, dict[str, Any]]:
    return ulysses_stack(), part_of_inputs()


MODELS: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "fsdp2": _sharded,
    "ddp": _in_parallel,
    "ulysses": _split,
}


def _verify(kind: str, per_block: bool) -> tuple[Any, ...]:
    model, batch = MODELS[kind]()
    options: dict[str, Any] = {"blocks": "blocks"} if kind == "ulysses" else {"per_block": per_block}
    found = fastac.verify(model, **options, **batch)
    return found.subject, found.compared, found.different, found.policy_executions, found.saved


@pytest.mark.parametrize("per_block", [False, True])
@pytest.mark.parametrize("kind", ["fsdp2", "ddp"])
def test_it_holds(kind: str, per_block: bool, tmp_path: Path) -> None:
    found = ranks.run(tmp_path, _verify, kind, per_block)
    assert found[0] == found[1]
    subject, compared, different, executions, saved = found[0]
    assert (subject, different, executions, saved) == (WAN, (), (4, 0), 4)
    assert compared > 40


def test_it_holds_where_blocks_communicate(tmp_path: Path) -> None:
    for _, compared, different, executions, saved in ranks.run(tmp_path, _verify, "ulysses", False):
        assert (different, executions, saved) == ((), (4, 0), 4)
        assert compared > 20


class Noisy(torch.nn.Module):
    """Adds another little number in every call, on rank 1: as kernels that are not deterministic do."""

    calls = 0

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return tensor + 1e-6 * (self.calls % 7) if dist.get_rank() == 1 else tensor


def _verify_noisy() -> tuple[str, float]:
    model, batch = _split()
    model.blocks.append(Noisy())
    model.forward = _through_all.__get__(model)
    try:
        found = fastac.verify(model, blocks=list(model.blocks[:-1]), **batch)
    except fastac.FastacError as error:
        return str(error), -1.0
    return "", found.noise


def _through_all(model: Any, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
    for block in model.blocks[:-1]:
        video = block(video, text)
    return model.blocks[-1](video)  # last: what other ranks get of it would differ there, too


def test_every_rank_takes_the_same_steps(tmp_path: Path) -> None:
    """Where one rank sees a difference, the step that measures the noise runs on all."""
    (first, quiet), (second, noise) = ranks.run(tmp_path, _verify_noisy, timeout=LIMIT)
    assert (first, second, quiet) == ("", "", 0.0)
    assert noise > 0


def _decomposed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return ulysses(query, key, value, dropout_p=0.5 if dist.get_rank() == 1 else 0.0)


def _raising(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    if dist.get_rank() == 1:
        raise ValueError("this rank's own")
    return ulysses(query, key, value)


def _verify_failing(attend: Callable[..., torch.Tensor]) -> tuple[str, str, int]:
    model, batch = _split()
    for block in model.blocks:
        block.attend = attend
    groups = len(dist.distributed_c10d._world.pg_map)
    try:
        fastac.verify(model, blocks="blocks", **batch)
    except Exception as error:
        return type(error).__name__, str(error), len(dist.distributed_c10d._world.pg_map) - groups
    return "", "", 0


def test_it_fails_on_all_where_it_fails_on_one(tmp_path: Path) -> None:
    first, second = ranks.run(tmp_path, _verify_failing, _decomposed, timeout=LIMIT)
    assert second[0] == "PolicyNotAppliedError"
    assert second[1].startswith("rank 1 of 2: attn_only: not every attention call at")
    assert first[0] == "PolicyNotAppliedError"
    assert first[1].startswith(
        "rank 0 of 2: verify failed on another rank. rank 1 of 2: attn_only: not every attention"
    )
    assert (first[2], second[2]) == (0, 0), "a process group was left behind"


def test_another_error_on_one_rank(tmp_path: Path) -> None:
    first, second = ranks.run(tmp_path, _verify_failing, _raising, timeout=LIMIT)
    assert second[:2] == ("ValueError", "this rank's own")
    assert first[:2] == (
        "FastacError",
        "rank 0 of 2: verify failed on another rank. rank 1 of 2: ValueError: this rank's own",
    )


def _other_in_recompute(forward: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """A block that is not the same in recompute, so that its gradient is wrong."""
    output = forward(*args)
    return output * torch.full_like(output, 1.0 + torch_private.in_backward())


def _broken_on_one_rank() -> tuple[str, str]:
    model, batch = build(WAN)
    if dist.get_rank() == 1:
        for block in model.blocks:
            block.forward = functools.partial(_other_in_recompute, block.forward)
    try:
        fastac.verify(model, **batch)
    except fastac.FastacError as error:
        return type(error).__name__, str(error)
    return "", ""


def test_a_difference_on_one_rank(tmp_path: Path) -> None:
    class_and_message = ranks.run(tmp_path, _broken_on_one_rank, timeout=LIMIT)
    (first, message), (second, own) = class_and_message
    assert (first, second) == ("FastacError", "FastacError"), class_and_message
    assert message.startswith("rank 0 of 2: verify failed on another rank. rank 1 of 2: ")
    assert own in message


def _reported() -> tuple[str, str]:
    """The report of a step, before and after a verification under another policy."""
    model, batch = _split()
    fastac.enable(model, fastac.Policy("attn_only", collectives="recompute"), blocks="blocks")
    model(**batch).sum().backward()
    before = str(fastac.report(model))
    fastac.verify(model, policy="attn_only", blocks="blocks", **batch)
    return before, str(fastac.report(model))


def test_it_leaves_the_report_as_it_was(tmp_path: Path) -> None:
    for before, after in ranks.run(tmp_path, _reported):
        assert "16 issued again in backward" in before
        assert before == after


def _unequal() -> str:
    model, batch = build(WAN)
    if dist.get_rank() == 1:
        del model.blocks[1]
    try:
        fastac.verify(model, per_block=True, **batch)
    except fastac.FastacError as error:
        return str(error)
    return ""


def test_unequal_numbers_of_blocks(tmp_path: Path) -> None:
    for rank, message in enumerate(ranks.run(tmp_path, _unequal, timeout=LIMIT)):
        assert f"rank {rank} of 2" in message
        assert "ranks have different numbers of blocks" in message
