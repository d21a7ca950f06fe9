"""What enable and disable promise for each host: diffusers' function, the block's forward, torch's wrapper."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from accelerate.utils import compile_regions
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrappers

import fastac
from fastac import Policy
from tests import support
from tests.hook.hosts import HOSTS, Host, diffuser, reference, step_of, wrap_blocks
from tests.live_bytes import allocated
from tests.support import executions_of, stack_inputs, state_of, train_step

MIXED = {"blocks.0": "full", "*": "attn_only"}
SOME = {"blocks.0": "full", "*": "none"}


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> Host:
    return HOSTS[request.param]


def functions_of(model: torch.nn.Module) -> list[Any]:
    """What wrappers checkpoint with."""
    return [module.checkpoint_fn for module in model.modules() if hasattr(module, "checkpoint_fn")]


def test_policies_and_the_way_back(host: Host) -> None:
    """Attention runs as often as a policy says. Policies can be switched. disable restores every attribute."""
    model = host.make()
    before, keys, functions = state_of(model), list(model.state_dict()), functions_of(model)
    long = Policy("attn_only", min_kv=support.TEXT_TOKENS + 1)
    policies = (("attn_only", 4), ("full", 8), (long, 6), (MIXED, 6), (SOME, 6), ("none", 4), ("attn_only", 4))
    for policy, executions in policies:
        host.enable(model, policy)
        for _ in range(2):
            assert step_of(model) == executions, policy
        report = fastac.report(model)
        assert "seen" not in str(report).partition("class")[0], "under full blocks are not watched"
        (row,) = report.rows
        assert (row.blocks, row.blocks_full, row.blocks_none) == (2, policy in (MIXED, SOME), policy is SOME)
    assert list(model.state_dict()) == keys
    once = state_of(model)
    host.enable(model)
    assert state_of(model).keys() == once.keys()
    assert len(model._forward_pre_hooks) == len(once[""][5]["_forward_pre_hooks"]), "enabled twice is enabled once"
    fastac.disable(model)
    assert state_of(model) == before
    assert functions_of(model) == functions
    assert step_of(model) == host.executions
    fastac.disable(model)
    assert state_of(model) == before


@pytest.mark.parametrize("name", ["diffusers", "wrapped blocks"])
def test_blocks_that_are_not_checkpointed(name: str) -> None:
    """Each holds what it holds without checkpointing, and the others what they hold with it."""
    host = HOSTS[name]
    model, held = host.make(), {}
    bare = support.stack()
    for policy in ("attn_only", fastac.first_blocks(bare, 1, blocks="blocks"), {"blocks.1": "attn_only", "*": "none"}):
        host.enable(model, policy)
        train_step(model, stack_inputs())
        held[str(policy)] = allocated(lambda: model(**stack_inputs()))
        report = fastac.report(model)
        assert report.rows[0].blocks_none == len(held) // 2, report
        assert ("1 not checkpointed" in str(report)) == (len(held) > 1)
        fastac.verify(model, **stack_inputs())
    host.enable(model, "none")
    plain = allocated(lambda: model(**stack_inputs()))
    assert plain == allocated(lambda: bare(**stack_inputs()))
    (saved, *some) = held.values()
    assert some == [pytest.approx((saved + plain) / 2, rel=0.02)] * 2
    assert plain > 2 * saved


@pytest.mark.parametrize("copied", [copy.deepcopy, support.pickled])
def test_copies_and_pickles(host: Host, copied: Any) -> None:
    """A copy trains, is reported and is disabled by itself."""
    model = host.make()
    host.enable(model, MIXED)
    assert step_of(model) == 6
    other = copied(model)
    report = fastac.report(other)
    assert (report.active, report.rows[0].blocks_seen) == (True, 0)
    assert step_of(other) == 6
    assert fastac.report(other).rows == fastac.report(model).rows
    fastac.disable(other)
    assert step_of(other) == host.executions
    assert step_of(model) == 6
    with torch.no_grad():
        next(other.blocks.parameters()).zero_()
    assert not torch.equal(train_step(other, stack_inputs())["output"], reference()["output"])
    assert step_of(model) == 6


@pytest.mark.parametrize(
    ("kind", "wrap"),
    [
        ("diffusers", wrap_blocks),
        ("blocks", wrap_blocks),
        ("diffusers", lambda model: wrap_blocks(model, functools.partial(torch.compile, backend="eager"))),
        ("diffusers", lambda model: compile_regions(model, backend="eager")),  # another model, as of accelerate.prepare
    ],
    ids=["diffusers", "blocks", "diffusers, compiled", "diffusers, by accelerate"],
)
def test_blocks_that_are_wrapped_after_enable(kind: str, wrap: Any) -> None:
    torch._dynamo.reset()
    model = HOSTS[kind].make()
    HOSTS[kind].enable(model, MIXED)
    model = wrap(model)
    train_step(model, stack_inputs())
    assert step_of(model) == 6
    assert fastac.report(model).active


def test_verify_leaves_it_as_it_was(host: Host) -> None:
    """The reference is not checkpointed, not by wrappers either."""
    model = host.make()
    before, functions = state_of(model), functions_of(model)
    found = fastac.verify(model, **stack_inputs(), blocks=host.blocks)
    assert (found.reference_executions, found.policy_executions, found.saved) == ((4, 0), (4, 0), 4)
    assert (state_of(model), functions_of(model)) == (before, functions)
    host.enable(model, MIXED)
    enabled = state_of(model)
    assert fastac.verify(model, **stack_inputs()).policy_executions == (4, 2), "the policy it is enabled with"
    assert state_of(model).keys() == enabled.keys()
    assert step_of(model) == 6
    fastac.disable(model)
    assert state_of(model) == before


def test_a_refused_change_leaves_what_was_enabled(host: Host) -> None:
    model = host.make()
    host.enable(model)
    before = state_of(model)
    for wrong in ("attention", {"layers.*": "full", "*": "attn_only"}):
        with pytest.raises(fastac.FastacError):
            host.enable(model, wrong)
        assert state_of(model) == before


# Other wrappers of torch


def test_blocks_below_an_offloading_wrapper() -> None:
    """save_on_cpu around all blocks."""
    model, inputs = torch.nn.Sequential(), stack_inputs()
    model.inner = wrappers.offload_wrapper(support.stack())
    model.forward = lambda **inputs: model.inner(**inputs)
    expected = train_step(model, inputs)
    fastac.enable(model, blocks="inner.blocks")
    assert executions_of(model, inputs, expected) == 4


OTHERS = {
    "reentrant": lambda block: wrappers.checkpoint_wrapper(block, wrappers.CheckpointImpl.REENTRANT),
    "debug": lambda block: wrappers.checkpoint_wrapper(block, debug=True),
    "own function": lambda block: wrappers.checkpoint_wrapper(block, checkpoint_fn=lambda block, *args: block(*args)),
    "context_fn": lambda block: wrappers.checkpoint_wrapper(
        block, context_fn=functools.partial(torch.utils.checkpoint.checkpoint)
    ),
}


@pytest.mark.parametrize("enabled_first", [True, False])
@pytest.mark.parametrize("other", OTHERS)
def test_other_ways_to_checkpoint_are_refused(other: str, enabled_first: bool) -> None:
    model = diffuser()
    if enabled_first:
        fastac.enable(model)
    wrap_blocks(model, OTHERS[other])
    before = state_of(model)
    with pytest.raises(fastac.FastacError, match=r"CheckpointWrapper"):
        train_step(model, stack_inputs()) if enabled_first else fastac.enable(model)
    assert enabled_first or state_of(model) == before
