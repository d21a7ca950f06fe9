"""enable(model, blocks=...): fastac checkpoints the forward of each block. For models that are not diffusers'."""

from __future__ import annotations

import copy
import functools
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from diffusers.hooks import HookRegistry
from diffusers.hooks import ModelHook as DiffusersHook

import fastac
from fastac import FastacError, PolicyNotAppliedError
from tests import support
from tests.hook.hosts import CheckpointsItself, Diffuser, diffuser
from tests.support import AttentionBlock as Block
from tests.support import executions_of, stack_inputs, state_of, train_step

# What may be named


class Nest(torch.nn.Module):
    """Blocks in a dict, in a list, and one alone; called one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = Block()
        self.named = torch.nn.ModuleDict({"a": Block(), "b": Block()})
        self.listed = torch.nn.ModuleList([Block()])

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in (self.first, *self.named.values(), *self.listed):
            video = block(video, text=text)
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
def test_what_blocks_may_be(blocks: Any, count: int) -> None:
    """Under "full" the named blocks run again, and no others."""
    model, inputs = Nest(), stack_inputs()
    expected = train_step(model, inputs)
    for policy, executions in (("full", 8 + 2 * count), ("attn_only", 8)):
        fastac.enable(model, policy, blocks=blocks(model))
        assert executions_of(model, inputs, expected) == executions


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ("layers", r"Nest has no such module\. Its.*'listed'"),
        (["first", "lists"], r'Did you mean "listed"\?'),
        ([Block()], "not a module of Nest"),
        (["first", "first.norms"], r"'first\.norms\.0' is inside block 'first'"),
        ("empty", "no block"),
    ],
)
def test_what_cannot_be_named(blocks: Any, message: str) -> None:
    model = Nest()
    model.empty = torch.nn.ModuleList()
    before = state_of(model)
    with pytest.raises(FastacError, match=message):
        fastac.enable(model, blocks=blocks)
    assert state_of(model) == before


# What is found


def test_the_only_list_of_attention_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    """A log line names it. The model's own gradient checkpointing, of any kind, has to be off."""
    caplog.set_level("INFO", "fastac")
    model = support.stack()
    fastac.enable(model)
    assert "AttentionStack: took the blocks in 'blocks'" in caplog.text
    assert executions_of(model, stack_inputs()) == 4
    assert fastac.report(model).rows[0].saved == 4
    fastac.disable(model)
    model.blocks[0].gradient_checkpointing = True
    with pytest.raises(FastacError, match="on already"):
        fastac.enable(model)


def test_the_only_list_of_equal_blocks_is_taken() -> None:
    """If no name says attention: the first region shows whether there is any."""

    model = support.stack(block=type("Layer", (Block,), {}))
    fastac.enable(model)
    assert executions_of(model, stack_inputs()) == 4
    for layer in model.blocks:
        layer.attend = lambda query, key, value: query + value.mean(2, keepdim=True)
    fastac.enable(model)
    with pytest.raises(PolicyNotAppliedError, match="no attention is saved in any block"):
        train_step(model, stack_inputs())


class Flux(torch.nn.Module):
    """No name in its single blocks says attention. Its heads are not blocks."""

    def __init__(self) -> None:
        super().__init__()
        single = [torch.nn.Sequential(torch.nn.LayerNorm(4), torch.nn.Conv1d(4, 4, 1)) for _ in range(2)]
        self.double_blocks = torch.nn.ModuleList([torch.nn.MultiheadAttention(4, 1)])
        self.single_blocks = torch.nn.ModuleList(single)
        self.heads = torch.nn.ModuleList([torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Nest, r'Nest has 2 .*fastac\.enable\(model, blocks=\["named", "listed"\]\)'),
        (Flux, r'Flux has 2 .*fastac\.enable\(model, blocks=\["double_blocks", "single_blocks"\]\)'),
        (lambda: torch.nn.ModuleDict({"rest": torch.nn.ModuleList([torch.nn.Linear(2, 2)])}), r"has no .*'rest'"),
        (lambda: torch.nn.Linear(2, 2), "Linear.*no module list"),
    ],
    ids=["several", "one that does not say attention", "others", "none"],
)
def test_no_list_that_can_be_taken(make: Any, message: str) -> None:
    model = make()
    before = state_of(model)
    with pytest.raises(FastacError, match=message):
        fastac.enable(model)
    assert state_of(model) == before


def found(model: torch.nn.Module) -> dict[str, tuple[str, int]]:
    """Container -> class of its blocks, and how many they are."""
    fastac.enable(model)
    return {row.container: (row.block_class, row.blocks) for row in fastac.report(model).rows}


def test_a_model_whose_class_names_its_blocks() -> None:
    """Other lists of attention are not its blocks, unless its class names none, which trains all the same."""
    model, inputs = support.build("HunyuanVideo15Transformer3DModel")
    expected = train_step(model, inputs)
    blocks = {"transformer_blocks": ("HunyuanVideo15TransformerBlock", 2)}
    assert found(model) == blocks
    calls = executions_of(model, inputs, expected)
    model.__class__ = type("HunyuanVideo15Transformer3DModelOfMine", (type(model),), {"_repeated_blocks": None})
    refiner = {"context_embedder.token_refiner.refiner_blocks": ("HunyuanVideo15IndividualTokenRefinerBlock", 1)}
    assert found(model) == refiner | blocks
    assert executions_of(model, inputs, expected) == calls


class Stage(torch.nn.Module):
    """A block that holds lists of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.ModuleList([Block()])
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(4)])


class Nested(Diffuser):
    """Beside an empty list of blocks."""

    def __init__(self) -> None:
        super().__init__(layers=0)
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(4)])
        self.stages = torch.nn.ModuleList([Stage(), Block()])
        self.streams = torch.nn.ModuleDict({"video": torch.nn.Sequential(Block())})
        self.named = torch.nn.ModuleDict({"a": Block()})


def test_outermost_lists_of_attention_are_containers() -> None:
    """Of any kind: lists, sequences, dicts, lists in dicts. One member without attention: the lists inside it."""
    model, other = Nested(), Nested()
    same = {"streams.video": ("AttentionBlock", 1), "named": ("AttentionBlock", 1)}
    assert found(model) == {"stages": ("Stage|AttentionBlock", 2), **same}
    other.stages.append(torch.nn.Linear(1, 1))
    assert found(other) == {"stages.0.attention": ("AttentionBlock", 1), **same}


# Hooks of others around the same forward


def doubled(hook: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    return (args[0] * 2, *args[1:]), kwargs


def hooked(model: Nest, library: str) -> Callable[[], None]:
    """Add a hook to the first block. Returns what takes it away."""
    if library == "accelerate":
        add_hook_to_module(model.first, type("Doubling", (ModelHook,), {"pre_forward": doubled})())
        return lambda: remove_hook_from_module(model.first)
    hooks = HookRegistry.check_if_exists_or_initialize(model.first)
    hooks.register_hook(type("Doubling", (DiffusersHook,), {"pre_forward": doubled})(), "doubling")
    return lambda: hooks.remove_hook("doubling")


LIBRARIES = pytest.mark.parametrize("library", ["accelerate", "diffusers"])


@LIBRARIES
def test_hooks_before_enable(library: str) -> None:
    model, inputs = Nest(), stack_inputs()
    hooked(model, library)
    expected = train_step(model, inputs)
    before = state_of(model)
    for policy, executions in (("full", 10), (fastac.Policy("attn_only", linear=("ffn.0",)), 8)):
        fastac.enable(model, policy, blocks="first")
        assert executions_of(model, inputs, expected) == executions
    (row,) = fastac.report(model).rows
    assert (row.saved, row.linear_saved) == (2, 1)
    fastac.disable(model)
    assert state_of(model) == before


@LIBRARIES
def test_hooks_after_enable(library: str) -> None:
    """A refused disable changes nothing."""
    model, inputs = Nest(), stack_inputs()
    other = copy.deepcopy(model)
    hooked(other, library)
    expected = train_step(other, inputs)
    fastac.enable(model, "full", blocks="first")
    unhook = hooked(model, library)
    for _ in range(2):
        assert executions_of(model, inputs, expected) == 10
        with pytest.raises(FastacError, match=r"Nest\.first was wrapped since"):
            fastac.disable(model)
    unhook()
    fastac.disable(model)
    assert executions_of(model, inputs) == 8


def test_a_hook_that_takes_the_forward_along_is_noticed() -> None:
    """A hook that came before `enable` and is removed after it restores the forward that it found."""
    model, inputs = Nest(), stack_inputs()
    unhook = hooked(model, "diffusers")
    fastac.enable(model, blocks="first")
    unhook()
    with pytest.raises(PolicyNotAppliedError, match="first"):
        train_step(model, inputs)
    fastac.enable(model, blocks="first")
    train_step(model, inputs)


def streamed(model: Any) -> Any:
    """Weights of each block that are there only while it runs: hooks on the block load them."""

    def unload(block: Any, *_: Any) -> None:
        for parameter in block.parameters():
            parameter.data = torch.empty(0)

    def load(weights: dict[str, torch.Tensor], block: Any, _: Any) -> None:
        for name, parameter in block.named_parameters():
            parameter.data = weights[name]

    for block in model.requires_grad_(False).blocks:
        weights = {name: parameter.data for name, parameter in block.named_parameters()}
        block.register_forward_pre_hook(functools.partial(load, weights))
        block.register_forward_hook(unload)
    return model


def test_hooks_on_a_block_do_not_run_in_recompute() -> None:
    """Its forward is checkpointed, inside them. The error names them, and two ways in which they run again."""
    inputs, expected = stack_inputs(), train_step(diffuser().requires_grad_(False), stack_inputs())
    model = streamed(diffuser())
    fastac.enable(model, blocks="blocks")
    with pytest.raises(FastacError, match=r"hooks on the block \(load, unload\) do not run again") as error:
        train_step(model, inputs)
    assert len(str(error.value).splitlines()) <= 5
    fastac.enable(model := streamed(diffuser()))
    assert executions_of(model, inputs, expected) == 4
    model = streamed(diffuser(CheckpointsItself))
    model.gradient_checkpointing = True
    with fastac.patch_checkpoint():
        assert executions_of(model, inputs, expected) == 4


def test_hooks_of_fastac_are_not_named() -> None:
    """A model that is its own block has some."""
    block = Block()
    fastac.enable(block, blocks=block)
    loss = support.loss_of(block(**stack_inputs()))
    with torch.no_grad():
        block.norms[0].weight.mul_(2)
    with pytest.raises(FastacError, match="written between forward and backward") as error:
        loss.backward()
    assert "hooks" not in str(error.value)


@pytest.mark.parametrize("name", ["early_stop", "policy", "function"])
def test_a_keyword_of_the_block_that_is_an_option_of_checkpoint_is_the_blocks(name: str) -> None:
    class Own(Block):
        def forward(self, video: torch.Tensor, text: torch.Tensor, **options: Any) -> torch.Tensor:
            return super().forward(video, text) * (2 if options else 1)

    model = torch.nn.ModuleDict({"block": Own()})
    fastac.enable(model, blocks="block")
    inputs = stack_inputs()
    for options in ({name: True}, {"args": True}):
        output = model["block"](**inputs, **options)
        assert torch.equal(output, 2 * model["block"](**inputs))
        output.sum().backward()


FULL_AND_NONE = {"blocks.0": "none", "*": "full"}


REPLACED, CAME = r"blocks\.1 .*replaced since fastac\.enable", r"blocks\.[02] \(AttentionBlock\).*enable again"
CHANGES: dict[str, tuple[Any, Callable[[Any], object], str]] = {
    "replaced": ("blocks", lambda model: operator.setitem(model.blocks, 1, Block()), REPLACED),
    "its forward": ("blocks", lambda model: setattr(model.blocks[1], "forward", Block().forward), REPLACED),
    "appended": ("blocks", lambda model: model.blocks.append(Block()), CAME),
    "inserted": (["blocks.0", "blocks.1"], lambda model: model.blocks.insert(0, Block()), CAME),
    "another list": ("blocks", lambda one: one.add_module("blocks", torch.nn.ModuleList([*one.blocks, Block()])), CAME),
}
"""What `enable` is given as blocks, what is done after it, and the error."""


@pytest.mark.parametrize("policy", ["attn_only", "full", FULL_AND_NONE])
@pytest.mark.parametrize("change", CHANGES)
def test_blocks_that_came_after_enable(change: str, policy: Any) -> None:
    """They would train without checkpointing; blocks that `enable` left out in the same list may."""
    blocks, changed, message = CHANGES[change]
    model = support.stack()
    fastac.enable(model, policy, blocks=blocks)
    train_step(model, stack_inputs())
    changed(model)
    for _ in range(2):
        with pytest.raises(PolicyNotAppliedError, match=message):
            train_step(model, stack_inputs())
    if message == REPLACED:
        report = fastac.report(model)
        assert (report.active, report.rows[0].blocks_full) == (False, 0)
        assert "blocks.1" in report.problem
    fastac.enable(model, blocks="blocks")
    train_step(model, stack_inputs())
    del model.blocks[0]  # a stage of a pipeline
    train_step(model, stack_inputs())


def test_a_list_whose_blocks_are_not_called(caplog: pytest.LogCaptureFixture) -> None:
    model = support.stack()
    model.unused = torch.nn.ModuleList([Block()])
    fastac.enable(model, blocks=["blocks", "unused"])
    for _ in range(2):
        train_step(model, stack_inputs())
    assert caplog.text.count("none of the blocks in") == caplog.text.count("'unused' was called") == 1
    caplog.clear()
    model = Nest()
    fastac.enable(model, {"listed.*": "none", "*": "attn_only"}, blocks=["named", "listed"])
    train_step(model, stack_inputs())
    assert "none of the blocks" not in caplog.text, "under no policy they are not seen"


# Copies of blocks without their model


def control_of(model: torch.nn.Module, copied: Callable[[Any], Any] = copy.copy) -> support.AttentionStack:
    """Trainable copies of the first blocks of a model, as a ControlNet has them."""
    control = support.stack()
    control.blocks = torch.nn.ModuleList([copied(block) for block in model.blocks])
    return control


def with_modules_of_its_own(block: Any) -> Any:
    """A shallow copy, as torch.nn.DataParallel makes one, whose weights are copies."""
    other = copy.copy(block)
    for name in ("_modules", "_parameters", "_buffers"):
        vars(other)[name] = copy.deepcopy(vars(block)[name])
    return other


def halved_and_plain(control: Any) -> support.AttentionStack:
    """Halve the weights of a control branch. Returns one that was never enabled, with these weights."""
    with torch.no_grad():
        for parameter in control.parameters():
            parameter.mul_(0.5)
    plain = support.stack()
    plain.load_state_dict(control.state_dict())
    return plain


@pytest.mark.parametrize("copied", [copy.deepcopy, support.pickled, with_modules_of_its_own])
@pytest.mark.parametrize("policy", ["attn_only", "full", FULL_AND_NONE])
def test_copies_of_blocks(copied: Any, policy: Any) -> None:
    """They have weights of their own and the policy of their block, are enabled anew, and become plain again."""
    model, inputs = support.stack(), stack_inputs()
    executions = {"attn_only": 4, "full": 8}.get(str(policy), 6)
    fastac.enable(model, policy, blocks="blocks")
    assert executions_of(model, inputs) == executions
    control = control_of(model, copied)
    plain = halved_and_plain(control)
    expected = train_step(plain, inputs)
    with torch.no_grad():
        assert torch.equal(control(**inputs), expected["output"])
    for _ in range(2):
        assert executions_of(control, inputs, expected) == executions
    fastac.disable(control)
    assert all("forward" not in vars(block) for block in control.blocks)
    assert executions_of(control, inputs, expected) == 4
    control = control_of(model, copied)
    control.load_state_dict(plain.state_dict())
    fastac.enable(control, "full", blocks="blocks")
    assert executions_of(control, inputs, expected) == 8, "one checkpoint, not one inside another"
    fastac.disable(control)
    assert executions_of(control, inputs, expected) == 4
    assert executions_of(model, inputs) == executions


def test_a_copy_of_a_block_carries_no_model() -> None:
    """Neither a deep copy nor a pickle grows with the number of blocks."""
    sizes = []
    for layers in (2, 8):
        model = support.stack(layers=layers)
        fastac.enable(model, blocks="blocks")
        train_step(model, stack_inputs())
        sizes.append(len(pickle.dumps(model.blocks[0])))
        memo: dict[int, Any] = {}
        copy.deepcopy(model.blocks[0], memo)
        assert id(model) not in memo
        assert id(model.blocks[1]) not in memo
    assert sizes[1] <= sizes[0] + 100


@pytest.mark.parametrize("around", [lambda model: [model.blocks[1], model], lambda model: [model]])
def test_copies_with_their_model_are_enabled(around: Any) -> None:
    model, inputs = support.stack(), stack_inputs()
    fastac.enable(model, "attn_only", blocks="blocks")
    *_, copied = copy.deepcopy(around(model))
    copied.blocks[0] = Block()
    with pytest.raises(PolicyNotAppliedError, match="replaced since"):
        train_step(copied, inputs)
    assert executions_of(model, inputs) == 4


def test_a_shallow_copy_has_a_state_of_its_own() -> None:
    """Its modules are others than those of its original, so they are looked at anew."""
    policy, inputs = fastac.Policy("attn_only", linear=("ffn.0",)), stack_inputs()
    model = support.stack(policy=policy)
    train_step(model, inputs)
    control = control_of(model)
    for block in control.blocks:
        vars(block)["_modules"] = Block()._modules
    control.policy = policy
    train_step(control, inputs)
    assert fastac.report(control).rows[0].linear_saved == 2


def test_a_copy_of_a_compiled_block_is_not_compiled() -> None:
    model, inputs = support.stack(), stack_inputs()
    fastac.compile(model, "attn_only", blocks="blocks", backend="eager")
    control = control_of(model, with_modules_of_its_own)
    assert executions_of(control, inputs, train_step(halved_and_plain(control), inputs)) == 4
