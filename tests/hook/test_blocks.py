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
from fastac import FastacError, Policy, PolicyNotAppliedError
from tests import support
from tests.hook.substitutes import TEXT, OriginalWan, Plain
from tests.model_state import state_of
from tests.support import CPU_ATTENTION, assert_same, train_step


@pytest.mark.parametrize(("make", "blocks"), [(OriginalWan, "blocks"), (Plain, "decoder.layers")])
def test_parity(make: Any, blocks: str, attention_executions: Counter[str]) -> None:
    """Blocks as the repository of Wan and torch itself have them: four attention calls, two of them over the video."""
    torch.manual_seed(0)
    model, inputs = make().train(), make.inputs()
    expected = train_step(model, inputs)
    long = Policy("attn_only", min_kv=TEXT + 1)
    for policy, executions in (("attn_only", 4), ("full", 8), (long, 6)):
        fastac.enable(model, policy, blocks=blocks)
        for _ in range(2):
            attention_executions.clear()
            assert_same(train_step(model, inputs), expected)
            assert attention_executions == {CPU_ATTENTION: executions}, policy
    (row,) = fastac.report(model).rows
    assert (row.container, row.blocks, row.blocks_seen, row.saved) == (blocks, 2, 2, 2)
    fastac.disable(model)
    assert fastac.verify(model, **inputs, blocks=blocks).saved == 4


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
        (lambda model: [model.first, model.named["b"]], 2),
        (lambda model: model.named, 2),
        (lambda model: iter((model.listed, "first")), 2),
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
        (["first", "first.norms"], r"'first\.norms\.0' is inside block 'first'"),
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


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forward_that_cannot_be_replaced_is_refused() -> None:
    model = Nest()
    model.listed.append(torch.jit.trace(support.AttentionBlock(), tuple(support.stack_inputs().values())))
    fastac.enable(model, blocks="named")
    before = state_of(model)
    with pytest.raises(fastac.FastacError, match=r"'listed\.1'"):
        fastac.enable(model, blocks="listed")
    assert state_of(model) == before


# What is found


def test_the_only_list_of_attention_is_taken(
    attention_executions: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It is said which; gradient checkpointing of the model's own, of any kind, has to be off."""
    caplog.set_level("INFO", "fastac")
    model, inputs = OriginalWan(), OriginalWan.inputs()
    expected = train_step(model, inputs)
    fastac.enable(model)
    assert "OriginalWan: took the blocks in 'blocks'" in caplog.text
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(model, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: 4}
    fastac.disable(model)
    model.blocks[0].gradient_checkpointing = True
    with pytest.raises(FastacError, match="on already"):
        fastac.enable(model)


def test_the_only_list_of_equal_blocks_is_taken(attention_executions: Counter[str]) -> None:
    """Where nothing is called attention: the first region shows whether there is any."""

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = torch.nn.Linear(16, 48), torch.nn.Linear(16, 16)
            self.runs = torch.nn.functional.scaled_dot_product_attention

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.out(self.runs(*self.qkv(x)[:, None].chunk(3, dim=-1))[:, 0])

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Sequential(Layer(), Layer()))
    inputs = {"input": support.stack_inputs()["video"]}
    expected = train_step(model, inputs)
    fastac.enable(model[1])
    attention_executions.clear()
    assert_same(train_step(model, inputs), expected)
    assert attention_executions == {CPU_ATTENTION: 2}
    for layer in model[1]:
        layer.runs = lambda query, key, value: query * key * value
    fastac.enable(model[1])
    with pytest.raises(PolicyNotAppliedError, match="no attention is saved in any block"):
        train_step(model, inputs)


class Flux(torch.nn.Module):
    """Its single blocks call attention by themselves: nothing in them is called so. Its heads are no blocks."""

    def __init__(self) -> None:
        super().__init__()
        single = [torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Conv1d(4, 4, 1)) for _ in range(2)]
        self.double_blocks = torch.nn.ModuleList([torch.nn.MultiheadAttention(4, 1)])
        self.single_blocks = torch.nn.ModuleList(single)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])


class Stages(torch.nn.Module):
    """Lists of blocks inside the members of a list, one of which has none."""

    def __init__(self) -> None:
        super().__init__()
        listed = [torch.nn.Sequential(torch.nn.ModuleList([support.AttentionBlock()])) for _ in range(2)]
        self.stages = torch.nn.ModuleList([torch.nn.Sequential(torch.nn.Linear(4, 4)), *listed])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Nest, r'Nest has 2 .*fastac\.enable\(model, blocks=\["named", "listed"\]\)'),
        (Stages, r'fastac\.enable\(model, blocks="stages"\)'),
        (Flux, r'Flux has 2 .*fastac\.enable\(model, blocks=\["double_blocks", "single_blocks"\]\)'),
        (lambda: torch.nn.ModuleDict({"rest": torch.nn.ModuleList([torch.nn.Linear(2, 2)])}), r"has no .*'rest'"),
        (lambda: torch.nn.Linear(2, 2), "Linear.*no module list"),
    ],
    ids=["several", "lists in a list", "one that does not say attention", "others", "none"],
)
def test_no_list_that_can_be_taken(make: Any, message: str) -> None:
    model = make()
    before = state_of(model)
    with pytest.raises(FastacError, match=message):
        fastac.enable(model)
    assert state_of(model) == before


# Hooks of others around the same forward


def doubled(hook: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return (args[0] * 2, *args[1:]), kwargs


def hooked(model: Nest, library: str) -> None:
    if library == "accelerate":
        add_hook_to_module(model.first, type("Doubling", (ModelHook,), {"pre_forward": doubled})())
    else:
        hook = type("Doubling", (DiffusersHook,), {"pre_forward": doubled})()
        HookRegistry.check_if_exists_or_initialize(model.first).register_hook(hook, "doubling")


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
        assert sum(row.saved for row in fastac.report(model).rows) == (2 if policy == "attn_only" else 0)
    fastac.enable(model, fastac.Policy("attn_only", linear=("ffn.0",)), blocks="first")
    assert_same(train_step(model, inputs), expected)
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


@pytest.mark.parametrize("name", ["early_stop", "policy", "function"])
def test_a_keyword_of_the_block_that_is_an_option_of_checkpoint_is_the_blocks(name: str) -> None:

    class Own(support.AttentionBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor, **options: Any) -> torch.Tensor:
            return super().forward(video, text) * (2 if options else 1)

    model = torch.nn.ModuleDict({"block": Own()})
    fastac.enable(model, blocks="block")
    inputs = support.stack_inputs()
    for options in ({name: True}, {"args": True}):
        output = model["block"](**inputs, **options)
        assert torch.equal(output, 2 * model["block"](**inputs))
        output.sum().backward()


@pytest.mark.parametrize("what", ["block", "forward"])
def test_a_block_that_was_exchanged_is_noticed(what: str) -> None:
    """It would train without checkpointing."""
    model = support.stack()
    fastac.enable(model, blocks="blocks")
    other = support.AttentionBlock()
    if what == "block":
        model.blocks[1] = other
    else:
        model.blocks[1].forward = other.forward
    with pytest.raises(PolicyNotAppliedError, match=r"blocks\.1 .*replaced since fastac\.enable"):
        support.train_step(model, support.stack_inputs())
    fastac.enable(model, blocks="blocks")
    support.train_step(model, support.stack_inputs())
    del model.blocks[0]  # a stage of a pipeline
    support.train_step(model, support.stack_inputs())


@pytest.mark.parametrize("blocks", ["blocks", ["blocks.0", "blocks.1"]])
@pytest.mark.parametrize("how", ["appended", "inserted", "another list"])
def test_blocks_that_came_after_enable(how: str, blocks: Any) -> None:
    """They would train without checkpointing; what `enable` left out in the same list may."""
    model, new = support.stack(layers=3), support.AttentionBlock()
    fastac.enable(model, blocks=blocks)
    support.train_step(model, support.stack_inputs())
    if how == "another list":
        model.blocks = torch.nn.ModuleList([*model.blocks, new])
    else:
        model.blocks.insert(3 if how == "appended" else 0, new)
    for _ in range(2):
        with pytest.raises(PolicyNotAppliedError, match=r"blocks\.[03] \(AttentionBlock\).*enable again"):
            support.train_step(model, support.stack_inputs())
    fastac.enable(model, blocks="blocks")
    support.train_step(model, support.stack_inputs())


def test_a_list_whose_blocks_are_not_called(caplog: pytest.LogCaptureFixture) -> None:
    model = support.stack()
    model.unused = torch.nn.ModuleList([support.AttentionBlock()])
    fastac.enable(model, blocks=["blocks", "unused"])
    for _ in range(2):
        support.train_step(model, support.stack_inputs())
    assert caplog.text.count("none of the blocks in 'unused' was called") == 1
