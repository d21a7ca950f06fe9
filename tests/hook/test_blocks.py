"""enable(model, blocks=...): models that are not diffusers', whose blocks' own forward is checkpointed."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers.hooks import HookRegistry
from diffusers.hooks import ModelHook as DiffusersHook

import fastac
from fastac import Policy
from tests import support
from tests.hook.substitutes import SUBSTITUTES, TEXT, substitute
from tests.model_state import state_of
from tests.support import CPU_ATTENTION, assert_same, train_step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", SUBSTITUTES)
def test_parity(name: str, dtype: torch.dtype, attention_executions: Counter[str]) -> None:
    """Blocks as the repository of Wan, FastVideo and torch itself have them."""
    of = SUBSTITUTES[name]
    model, inputs = substitute(name, dtype)
    before = state_of(model)
    expected = train_step(model, inputs)
    long = Policy("attn_only", min_kv=TEXT + 1)
    for policy, again in (("attn_only", 0), ("full", of.calls), (long, of.calls - of.long)):
        fastac.enable(model, policy, blocks=of.blocks)
        for _ in range(2):
            attention_executions.clear()
            assert_same(train_step(model, inputs), expected)
            assert attention_executions == {CPU_ATTENTION: of.calls + again}, policy
    (row,) = fastac.report(model).rows
    assert (row.container, row.blocks, row.blocks_seen, row.saved) == (of.blocks, 2, 2, of.long)
    fastac.disable(model)
    assert state_of(model) == before
    assert fastac.verify(model, **inputs, blocks=of.blocks).saved == of.calls


# What may be named


class Nest(torch.nn.Module):
    """Blocks in a dict, in a list, and one alone; called one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = support.AttentionBlock()
        self.named = torch.nn.ModuleDict({"a": support.AttentionBlock(), "b": support.AttentionBlock()})
        self.listed = torch.nn.ModuleList([support.AttentionBlock()])

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in (self.first, *self.named.values(), *self.listed):
            video = block(video, text)
        return video


@pytest.mark.parametrize(
    ("blocks", "count"),
    [
        (lambda _: "first", 1),
        (lambda _: ["first", "named", "listed"], 4),
        (lambda model: [model.first, model.named["b"]], 2),
        (lambda model: model.named, 2),
        (lambda model: (model.listed, "first"), 2),
        (lambda model: iter(model.listed), 1),
    ],
)
def test_what_blocks_may_be(blocks: Any, count: int, attention_executions: Counter[str]) -> None:
    """Under "full" what was named runs again, and what was not does not."""
    model, inputs = Nest(), support.stack_inputs()
    expected = train_step(model, inputs)
    for policy, executions in (("full", 8 + 2 * count), ("attn_only", 8)):
        fastac.enable(model, policy, blocks=blocks(model))
        attention_executions.clear()
        assert_same(train_step(model, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: executions}


def test_policies_by_names_of_several_lists(attention_executions: Counter[str]) -> None:
    model = Nest()
    fastac.enable(model, {"named.*": "full", "*": "attn_only"}, blocks=["first", "named", "listed"])
    train_step(model, support.stack_inputs())
    assert attention_executions == {CPU_ATTENTION: 8 + 4}
    assert [row.container for row in fastac.report(model).rows] == ["first", "named", "listed"]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ("layers", r"Nest.*'listed'"),
        ([support.AttentionBlock()], "no module of Nest"),
        ([3], "int is no module of Nest"),
        ([], "no block"),
        (["first", "first.norms"], r"'first\.norms\.0' is inside block 'first'"),
        (["", "first"], "'first' is inside block"),
        ("empty", "no block"),
    ],
)
def test_what_cannot_be_named(blocks: Any, message: str) -> None:
    model = Nest()
    model.empty = torch.nn.ModuleList()
    before = state_of(model)
    with pytest.raises(fastac.FastacError, match=message):
        fastac.enable(model, blocks=blocks)
    assert state_of(model) == before


def test_names_may_be_those_of_the_wrapper(attention_executions: Counter[str]) -> None:
    torch._dynamo.reset()
    model: Any = torch.compile(support.stack(), backend="eager")
    fastac.enable(model, "full", blocks="_orig_mod.blocks")
    for _ in range(2):
        attention_executions.clear()
        train_step(model, support.stack_inputs())
    assert attention_executions == {CPU_ATTENTION: 8}
    assert [row.container for row in fastac.report(model).rows] == ["blocks"]


class WithProperty(support.AttentionBlock):
    @property
    def forward(self) -> Any:
        return super().forward


class WithStaticmethod(support.AttentionBlock):
    @staticmethod
    def forward(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return video * text.mean()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "make",
    [
        WithProperty,
        WithStaticmethod,
        lambda: torch.jit.trace(support.AttentionBlock(), tuple(support.stack_inputs().values())),
    ],
    ids=["property", "staticmethod", "traced"],
)
def test_a_forward_that_cannot_be_replaced_is_refused(make: Any) -> None:
    model = Nest()
    model.listed.append(make())
    fastac.enable(model, blocks="named")
    before = state_of(model)
    with pytest.raises(fastac.FastacError, match=r"'listed\.1'"):
        fastac.enable(model, blocks="listed")
    assert state_of(model) == before


# Hooks of others around the same forward


class Doubling(ModelHook):
    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] * 2, *args[1:]), kwargs


class DiffusersDoubling(DiffusersHook):
    def pre_forward(self, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] * 2, *args[1:]), kwargs


def hooked(model: Nest, library: str) -> None:
    if library == "accelerate":
        add_hook_to_module(model.first, Doubling())
    else:
        HookRegistry.check_if_exists_or_initialize(model.first).register_hook(DiffusersDoubling(), "doubling")


def unhooked(model: Nest, library: str) -> None:
    if library == "accelerate":
        remove_hook_from_module(model.first)
    else:
        HookRegistry.check_if_exists_or_initialize(model.first).remove_hook("doubling")


LIBRARIES = pytest.mark.parametrize("library", ["accelerate", "diffusers"])


@LIBRARIES
def test_hooks_before_enable(library: str, attention_executions: Counter[str]) -> None:
    model, inputs = Nest(), support.stack_inputs()
    hooked(model, library)
    expected = train_step(model, inputs)
    before = state_of(model)
    for policy, executions in (("attn_only", 8), ("full", 10)):
        fastac.enable(model, policy, blocks="first")
        attention_executions.clear()
        assert_same(train_step(model, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: executions}
    fastac.disable(model)
    assert state_of(model) == before


@LIBRARIES
def test_hooks_after_enable(library: str, attention_executions: Counter[str]) -> None:
    """A refused disable changes nothing."""
    model, inputs = Nest(), support.stack_inputs()
    other = copy.deepcopy(model)
    hooked(other, library)
    expected = train_step(other, inputs)
    fastac.enable(model, "full", blocks="first")
    hooked(model, library)
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(model, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: 10}
        with pytest.raises(fastac.FastacError, match=r"Nest\.first was wrapped since"):
            fastac.disable(model)
    unhooked(model, library)
    fastac.disable(model)
    attention_executions.clear()
    train_step(model, inputs)
    assert attention_executions == {CPU_ATTENTION: 8}


def test_a_hook_that_takes_the_forward_along_is_noticed() -> None:
    """Removed after enable, a hook that was there before puts back what it found."""
    model, inputs = Nest(), support.stack_inputs()
    hooked(model, "diffusers")
    fastac.enable(model, blocks="first")
    unhooked(model, "diffusers")
    with pytest.raises(fastac.PolicyNotAppliedError, match="first"):
        train_step(model, inputs)
    fastac.enable(model, blocks="first")
    train_step(model, inputs)
