"""enable(model, blocks=...): models that are not diffusers', whose blocks' own forward is checkpointed."""

from __future__ import annotations

import copy
import io
from collections import Counter
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers.hooks import HookRegistry
from diffusers.hooks import ModelHook as DiffusersHook
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from fastac.policy import Policy
from tests import support
from tests.marks import slow
from tests.model_state import state_of
from tests.stand_ins import STAND_INS, TEXT, stand_in
from tests.support import CPU_ATTENTION, assert_same, train_step

NAMES = list(STAND_INS)


def long(min_kv: int = TEXT + 1) -> Policy:
    return Policy("attn_only", min_kv=min_kv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("name", NAMES)
def test_parity(name: str, engine: str, dtype: torch.dtype, attention_executions: Counter[str]) -> None:
    of = STAND_INS[name]
    model, inputs = stand_in(name, dtype)
    before, keys = state_of(model), list(model.state_dict())
    expected = train_step(model, inputs)
    assert attention_executions == {CPU_ATTENTION: of.calls}
    for policy, again in (("attn_only", 0), ("full", of.calls), (long(), of.calls - of.long)):
        fastac.enable(model, policy, blocks=of.blocks, engine=engine)
        for _ in range(2):
            attention_executions.clear()
            assert_same(train_step(model, inputs), expected)
            assert attention_executions == {CPU_ATTENTION: of.calls + again}, policy
        assert list(model.state_dict()) == keys
    fastac.disable(model)
    assert state_of(model) == before
    attention_executions.clear()
    assert_same(train_step(model, inputs), expected)
    assert attention_executions == {CPU_ATTENTION: of.calls}


@pytest.mark.parametrize("name", NAMES)
def test_report_and_verify(name: str) -> None:
    of = STAND_INS[name]
    model, inputs = stand_in(name)
    found = fastac.verify(model, **inputs, blocks=of.blocks)
    assert (found.saved, found.policy_executions, found.different) == (of.calls, (of.calls, 0), ())
    assert fastac.verify(model, **inputs, blocks=of.blocks, policy=long(), reference="full").saved == of.long
    assert not fastac.report(model).active
    fastac.enable(model, blocks=of.blocks)
    before = state_of(model)
    assert fastac.verify(model, **inputs).saved == of.calls, "the blocks it is enabled with"
    assert state_of(model).keys() == before.keys()
    train_step(model, inputs)
    report = fastac.report(model)
    assert (report.policy, report.engine, report.active, report.problem) == ("attn_only", "tape", True, "")
    (row,) = report.rows
    assert (row.container, row.blocks, row.blocks_seen, row.saved) == (of.blocks, 2, 2, of.calls)
    assert row.saved_bytes == found.saved_bytes > 0


@pytest.mark.parametrize("name", NAMES)
def test_copies_and_files(name: str, attention_executions: Counter[str]) -> None:
    of = STAND_INS[name]
    model, inputs = stand_in(name)
    expected = train_step(model, inputs)
    fastac.enable(model, {"*.0": "full", "*": "attn_only"}, blocks=of.blocks)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        fastac.disable(model)
        attention_executions.clear()
        assert_same(train_step(other, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: of.calls + of.calls // 2}
        with torch.no_grad():  # its own weights, not those of the model it was copied from
            next(other.get_submodule(of.blocks)[0].parameters()).zero_()
        assert not torch.equal(train_step(other, inputs)["output"], expected["output"])
        fastac.disable(other)
        assert state_of(other).keys() == state_of(model).keys()
        assert "forward" not in vars(other.get_submodule(of.blocks)[0])
    assert_same(train_step(model, inputs), expected)


@pytest.mark.parametrize("how", ["block.compile", *slow("wrapped block", "whole model", "enabled first")])
@pytest.mark.parametrize("name", NAMES)
def test_compiled(name: str, how: str, attention_executions: Counter[str]) -> None:
    """The first step of a compiled block is watched by running it once more; the second is counted.

    Compared with the model compiled in the same way without checkpointing, but for rounding: where the region is part
    of the graph, its gradients are added up in another order.
    """
    of = STAND_INS[name]

    def compiled(checkpointed: bool) -> tuple[Any, Any]:
        torch._dynamo.reset()
        model, inputs = stand_in(name)
        blocks = model.get_submodule(of.blocks)
        if checkpointed and how == "enabled first":
            fastac.enable(model, blocks=of.blocks)
        if how == "wrapped block":
            for i, block in enumerate(blocks):
                blocks[i] = torch.compile(block, backend="aot_eager")
        elif how != "whole model":
            for block in blocks:
                block.compile(backend="aot_eager")
        if checkpointed and how != "enabled first":
            fastac.enable(model, blocks=of.blocks)
        return torch.compile(model, backend="aot_eager") if how == "whole model" else model, inputs

    expected = train_step(*compiled(False))
    model, inputs = compiled(True)
    for _ in range(2):
        attention_executions.clear()
        found = train_step(model, inputs)
        assert found.keys() == expected.keys()
        assert max(support.relative_error(found[name], expected[name]) for name in expected) < 1e-6
    assert attention_executions == {CPU_ATTENTION: of.calls}


# What may be named


class Nest(torch.nn.Module):
    """Blocks in a dict, in a sequence, and one alone; called one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.first = support.AttentionBlock()
        self.named = torch.nn.ModuleDict({"a": support.AttentionBlock(), "b": support.AttentionBlock()})
        self.listed = torch.nn.ModuleList([support.AttentionBlock()])

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in (self.first, *self.named.values(), *self.listed):
            video = block(video, text)
        return video


def nest() -> Nest:
    torch.manual_seed(0)
    return Nest()


@pytest.mark.parametrize(
    ("blocks", "again"),
    [
        (lambda _: "first", 6),
        (lambda _: "named", 4),
        (lambda _: ["first", "named", "listed"], 0),
        (lambda model: [model.first, model.named["b"]], 4),
        (lambda model: model.named, 4),
        (lambda model: model.first, 6),
        (lambda model: (model.listed, "first"), 4),
        (lambda model: iter(model.listed), 6),
    ],
)
def test_what_blocks_may_be(blocks: Any, again: int, attention_executions: Counter[str]) -> None:
    """Under "full" what was named runs again, and what was not does not."""
    model, inputs = nest(), support.stack_inputs()
    expected = train_step(model, inputs)
    for policy, more in (("full", 8 - again), ("attn_only", 0)):
        fastac.enable(model, policy, blocks=blocks(model))
        attention_executions.clear()
        assert_same(train_step(model, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: 8 + more}


def test_policies_per_block(attention_executions: Counter[str]) -> None:
    model, inputs = nest(), support.stack_inputs()
    expected = train_step(model, inputs)
    fastac.enable(model, {"named.*": "full", "*": "attn_only"}, blocks=["first", "named", "listed"])
    attention_executions.clear()
    assert_same(train_step(model, inputs), expected)
    assert attention_executions == {CPU_ATTENTION: 8 + 4}
    assert [row.container for row in fastac.report(model).rows] == ["first", "named", "listed"]


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ("layers", r"Nest has no such module\. Its module lists are .*'listed'"),
        ([support.AttentionBlock()], "is no module of Nest"),
        ([3], "int 3 is no module of Nest"),
        ([], "there is no block in it"),
        (["first", "first.norms"], r"'first\.norms\.0' is inside block 'first'"),
        (["", "first"], "'first' is inside block ''"),
        (3, "int 3 is no module of Nest"),
    ],
)
def test_what_can_not_be_named(blocks: Any, message: str) -> None:
    model = nest()
    before = state_of(model)
    with pytest.raises(fastac.FastacError, match=message):
        fastac.enable(model, blocks=blocks)
    assert state_of(model) == before


def test_an_empty_list_is_refused() -> None:
    model = nest()
    model.listed = torch.nn.ModuleList()
    with pytest.raises(fastac.FastacError, match="no block in it"):
        fastac.enable(model, blocks="listed")


def test_a_model_without_hook_says_that_blocks_can_be_named() -> None:
    with pytest.raises(fastac.FastacError, match=r"Nest has no enable_gradient_checkpointing.*blocks="):
        fastac.enable(nest())


# Never silently inactive


class Halves(torch.nn.Module):
    """Calls a part of its blocks, never a block itself."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.ModuleList([support.AttentionBlock()]) for _ in range(2))

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            video = block[0](video, text)
        return video


def test_blocks_that_are_never_called_are_an_error() -> None:
    model, inputs = Halves(), support.stack_inputs()
    fastac.enable(model, blocks="blocks")
    with torch.no_grad():
        model(**inputs)
    with pytest.raises(fastac.PolicyNotAppliedError, match=r"none of its 2 blocks was called \('blocks\.0'"):
        train_step(model, inputs)
    fastac.disable(model)
    train_step(model, inputs)


def test_dropout_of_torch_s_own_layers_is_named() -> None:
    """Its default of 0.1 has no fused kernel on a CPU."""
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    fastac.enable(model, blocks="layers")
    with pytest.raises(fastac.PolicyNotAppliedError, match=r"dropout_p=0\.1.*train with dropout_p=0"):
        model(support.stack_inputs()["video"])


class HalfHalves(Halves):
    def __init__(self) -> None:
        super().__init__()
        self.whole = torch.nn.ModuleList([support.AttentionBlock()])

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return super().forward(self.whole[0](video, text), text)


def test_a_list_none_of_whose_blocks_is_called_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """No error: a list may have its turn another time."""
    model, inputs = HalfHalves(), support.stack_inputs()
    fastac.enable(model, blocks=["blocks", "whole"])
    for _ in range(2):
        train_step(model, inputs)
    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "HalfHalves ran, and no block of 'blocks' was called: where it calls parts of them, these are not checkpointed"
    ]


def test_a_block_that_was_exchanged_is_an_error(attention_executions: Counter[str]) -> None:
    model, inputs = nest(), support.stack_inputs()
    fastac.enable(model, blocks="named")
    model.named["b"] = support.AttentionBlock()
    with pytest.raises(fastac.PolicyNotAppliedError, match=r"block 'named\.b' is not checkpointed"):
        train_step(model, inputs)
    fastac.enable(model, blocks="named")
    attention_executions.clear()
    train_step(model, inputs)
    assert attention_executions == {CPU_ATTENTION: 8}


def test_a_diffusers_model_may_be_enabled_by_its_blocks(attention_executions: Counter[str]) -> None:
    model, inputs = support.build("WanTransformer3DModel")
    before = state_of(model)
    expected = train_step(model, inputs)
    for blocks, again in (("blocks", 0), ("blocks.1", 0), (None, 0)):
        fastac.enable(model, blocks=blocks)
        attention_executions.clear()
        assert_same(train_step(model, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: 4 + again}
        assert sum(row.blocks for row in fastac.report(model).rows) == (1 if blocks == "blocks.1" else 2)
    fastac.enable(model, "full", blocks="blocks.1")
    attention_executions.clear()
    assert_same(train_step(model, inputs), expected)
    assert attention_executions == {CPU_ATTENTION: 6}, "nothing was left of being enabled as a whole"
    fastac.disable(model)
    assert state_of(model) == before


def test_blocks_that_the_model_checkpoints_itself_are_refused() -> None:
    model, _ = support.build("WanTransformer3DModel")
    model.enable_gradient_checkpointing()
    before = state_of(model)
    with pytest.raises(fastac.FastacError, match="checkpointed twice"):
        fastac.enable(model, blocks="blocks")
    assert state_of(model) == before


class Optioned(support.AttentionBlock):
    def forward(self, video: torch.Tensor, text: torch.Tensor, debug: bool = False) -> torch.Tensor:
        return super().forward(video, text) * (2 if debug else 1)


def test_keyword_arguments_named_like_an_option_are_refused() -> None:
    """torch's checkpoint would take them for itself, and the block would run without."""
    model, inputs = Optioned(), support.stack_inputs()
    fastac.enable(model, blocks="")
    with pytest.raises(fastac.FastacError, match=r"Optioned is called .*\(debug\).*by position"):
        model(**inputs, debug=True)
    with torch.no_grad():
        model(**inputs, debug=True)
    model(inputs["video"], inputs["text"], True).sum().backward()


def test_a_shallow_copy_of_a_block_is_not_taken_for_it() -> None:
    """Its attribute `forward` runs the block that it was copied from, which a disable of the copy must leave alone."""
    model, other = nest(), torch.nn.Module()
    fastac.enable(model, blocks="first")
    before = state_of(model)
    other.block = copy.copy(model.first)
    assert not fastac.report(other).active
    fastac.disable(other)
    assert state_of(model) == before


class WithProperty(support.AttentionBlock):
    @property
    def forward(self) -> Any:
        return super().forward


class WithStaticmethod(support.AttentionBlock):
    @staticmethod
    def forward(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return video * text.mean()


def traced() -> Any:
    return torch.jit.trace(support.AttentionBlock(), tuple(support.stack_inputs().values()))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [WithProperty, WithStaticmethod, traced])
def test_a_forward_that_can_not_be_replaced_is_refused(make: Any) -> None:
    model = nest()
    model.listed.append(make())
    fastac.enable(model, blocks="named")
    before = state_of(model)
    with pytest.raises(fastac.FastacError, match=r"the forward of 'listed\.1' .* can not be replaced"):
        fastac.enable(model, blocks="listed")
    assert state_of(model) == before


class Guarded(support.AttentionBlock):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward":
            raise TypeError("not to be set")
        super().__setattr__(name, value)


class Sequence(torch.nn.Sequential):
    """A block that is a Sequential: it has a forward of its own."""

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](video, text), text)


def test_blocks_of_unusual_classes(attention_executions: Counter[str]) -> None:
    model, inputs = nest(), support.stack_inputs()
    model.listed.append(Guarded())
    model.listed.append(Sequence(support.AttentionBlock(), support.AttentionBlock()))
    expected = train_step(model, inputs)
    for blocks in ("listed", ["listed.0", "listed.1", "listed.2"]):
        fastac.enable(model, "full", blocks=blocks)
        attention_executions.clear()
        assert_same(train_step(model, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: 14 + 8}
        assert fastac.report(model).rows[0].blocks == 3


# More than one model


class Pair(torch.nn.Module):
    def __init__(self, first: torch.nn.Module, second: torch.nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(video, text), text)


def pair() -> Pair:
    return Pair(support.stack(), support.stack(seed=1))


def test_a_parent_undoes_what_its_parts_were_given() -> None:
    model, inputs = pair(), support.stack_inputs()
    before = state_of(model)
    fastac.enable(model.first, blocks="blocks")
    fastac.disable(model)
    assert state_of(model) == before
    train_step(model, inputs)


def test_verifying_a_parent_leaves_its_parts_as_they_were(attention_executions: Counter[str]) -> None:
    model, inputs = pair(), support.stack_inputs()
    fastac.enable(model.first, "full", blocks="blocks")
    fastac.enable(model.second, "attn_only", blocks="blocks")
    before = state_of(model)
    assert fastac.verify(model, **inputs).saved == 4, "each part under the policy it was given"
    assert state_of(model) == before
    assert fastac.verify(model, policy="attn_only", **inputs).saved == 8
    assert state_of(model) == before
    attention_executions.clear()
    train_step(model, inputs)
    assert attention_executions == {CPU_ATTENTION: 8 + 4}


def test_models_that_share_blocks_do_not_change_each_other_unnoticed(attention_executions: Counter[str]) -> None:
    teacher, student, inputs = support.stack(layers=3), support.stack(), support.stack_inputs()
    student.blocks = torch.nn.ModuleList(list(teacher.blocks)[:2])
    fastac.enable(teacher, "attn_only", blocks="blocks")
    fastac.enable(student, "full", blocks="blocks")
    train_step(student, inputs)
    with pytest.raises(fastac.PolicyNotAppliedError, match=r"'blocks\.0' .* a part of another model"):
        train_step(teacher, inputs)
    fastac.disable(student)
    with pytest.raises(fastac.PolicyNotAppliedError, match=r"'blocks\.0'"):
        train_step(teacher, inputs)
    fastac.enable(teacher, "attn_only", blocks="blocks")
    attention_executions.clear()
    train_step(teacher, inputs)
    assert attention_executions == {CPU_ATTENTION: 6}


@pytest.mark.parametrize("wrapped", [False, True])
def test_verify_leaves_nothing_behind(wrapped: bool) -> None:
    torch._dynamo.reset()
    model: Any = support.stack()
    inputs = support.stack_inputs()
    if wrapped:
        model = torch.compile(model, backend="eager")
    before = state_of(model)
    fastac.enable(model, blocks="blocks")
    enabled = state_of(model)
    fastac.verify(model, **inputs)
    assert state_of(model) == enabled
    fastac.disable(model)
    assert state_of(model) == before
    train_step(model, inputs)


def test_verify_does_not_hide_a_block_that_was_exchanged() -> None:
    model, inputs = support.stack(), support.stack_inputs()
    fastac.enable(model, blocks="blocks")
    model.blocks[1] = support.AttentionBlock()
    for _ in range(2):
        with pytest.raises(fastac.PolicyNotAppliedError, match=r"'blocks\.1'"):
            fastac.verify(model, **inputs)


def test_names_may_be_those_of_the_wrapper(attention_executions: Counter[str]) -> None:
    torch._dynamo.reset()
    model: Any = torch.compile(support.stack(), backend="eager")
    inputs = support.stack_inputs()
    fastac.enable(model, "full", blocks="_orig_mod.blocks")
    train_step(model, inputs)
    attention_executions.clear()
    train_step(model, inputs)
    assert attention_executions == {CPU_ATTENTION: 8}
    assert [row.container for row in fastac.report(model).rows] == ["blocks"]


# Checkpoints of somebody else


class SwitchedOn(torch.nn.Module):
    """As in transformers: a flag, by which the model checkpoints its blocks itself."""

    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.blocks = torch.nn.ModuleList(support.AttentionBlock() for _ in range(2))

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            on = self.gradient_checkpointing
            video = torch_checkpoint(block, video, text, use_reentrant=False) if on else block(video, text)
        return video


def test_checkpointing_that_is_switched_on_afterwards_is_an_error() -> None:
    model, inputs = SwitchedOn(), support.stack_inputs()
    fastac.enable(model, blocks="blocks")
    train_step(model, inputs)
    model.gradient_checkpointing = True
    with pytest.raises(fastac.PolicyNotAppliedError, match="switched on since"):
        train_step(model, inputs)
    fastac.disable(model)
    with pytest.raises(fastac.FastacError, match="on already"):
        fastac.enable(model, blocks="blocks")


class Inner(support.AttentionBlock):
    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return torch_checkpoint(super().forward, video, text, use_reentrant=False)


class Checkpointed(torch.nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch_checkpoint(self[0], x, use_reentrant=False)


class InnerFeedForward(support.AttentionBlock):
    """Checkpoints what holds no attention: that is nobody's business."""

    def __init__(self) -> None:
        super().__init__()
        self.ffn = Checkpointed(self.ffn)


def test_attention_in_a_checkpoint_inside_a_block_is_an_error() -> None:
    """It would run again in backward, where no region is open."""
    model, inputs = support.stack(block=Inner), support.stack_inputs()
    fastac.enable(model, blocks="blocks")
    with pytest.raises(fastac.PolicyNotAppliedError, match=r"inside a torch\.utils\.checkpoint of the block's own"):
        train_step(model, inputs)


def test_attention_that_is_recomputed_anyway_may_be_in_a_checkpoint_inside() -> None:
    model, inputs = support.stack(block=Inner), support.stack_inputs()
    expected = train_step(model, inputs)
    fastac.enable(model, long(support.VIDEO_TOKENS + 1), blocks="blocks")
    assert_same(train_step(model, inputs), expected)


def test_another_checkpoint_inside_a_block_is_none(attention_executions: Counter[str]) -> None:
    model, inputs = support.stack(block=InnerFeedForward), support.stack_inputs()
    expected = train_step(model, inputs)
    fastac.enable(model, blocks="blocks")
    attention_executions.clear()
    assert_same(train_step(model, inputs), expected)
    assert attention_executions == {CPU_ATTENTION: 4}


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


@pytest.mark.parametrize("library", ["accelerate", "diffusers"])
def test_hooks_before_enable(library: str, attention_executions: Counter[str]) -> None:
    model, inputs = nest(), support.stack_inputs()
    hooked(model, library)
    expected = train_step(model, inputs)
    before = state_of(model)
    for policy, again in (("attn_only", 0), ("full", 2)):
        fastac.enable(model, policy, blocks="first")
        for _ in range(2):
            attention_executions.clear()
            assert_same(train_step(model, inputs), expected)
            assert attention_executions == {CPU_ATTENTION: 8 + again}
    assert fastac.report(model).rows[0].blocks == 1
    fastac.disable(model)
    assert state_of(model) == before


@pytest.mark.parametrize("library", ["accelerate", "diffusers"])
def test_hooks_after_enable(library: str, attention_executions: Counter[str]) -> None:
    model, inputs = nest(), support.stack_inputs()
    plain = copy.deepcopy(model)
    hooked(plain, library)
    expected = train_step(plain, inputs)
    fastac.enable(model, "full", blocks="first")
    hooked(model, library)
    attention_executions.clear()
    assert_same(train_step(model, inputs), expected)
    assert attention_executions == {CPU_ATTENTION: 10}
    with pytest.raises(fastac.FastacError, match=r"Nest\.first was wrapped since"):
        fastac.disable(model)
    attention_executions.clear()
    assert_same(train_step(model, inputs), expected)
    assert attention_executions == {CPU_ATTENTION: 10}, "a refused disable changes nothing"
    unhooked(model, library)
    fastac.disable(model)
    attention_executions.clear()
    train_step(model, inputs)
    assert attention_executions == {CPU_ATTENTION: 8}


def test_a_hook_that_takes_the_forward_along_is_noticed() -> None:
    """Taken off after enable, a hook that was there before puts back what it found."""
    model, inputs = nest(), support.stack_inputs()
    hooked(model, "diffusers")
    fastac.enable(model, blocks="first")
    unhooked(model, "diffusers")
    with pytest.raises(fastac.PolicyNotAppliedError, match="a hook that came or went"):
        train_step(model, inputs)
    fastac.enable(model, blocks="first")
    train_step(model, inputs)
