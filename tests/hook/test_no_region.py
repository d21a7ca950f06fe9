"""The third net: a forward that opened no region, and attention that runs in a backward outside a replay."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, UNet2DConditionModel, UNet2DModel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from fastac import Policy, PolicyNotAppliedError
from tests import support
from tests.hook.hosts import (
    ATTENDING,
    HOSTS,
    SIZES,
    UNET,
    Caller,
    CheckpointsItself,
    Diffuser,
    alone,
    caller,
    diffuser,
    step_of,
)
from tests.marks import NEEDS_COMPILED_MODELS
from tests.support import assert_same, stack, stack_inputs, train_step


class LibrariesCheckpoint(torch.autograd.Function):
    """A reentrant checkpoint, as trainers and libraries write them."""

    @staticmethod
    def forward(ctx: Any, run: Any, *args: torch.Tensor) -> torch.Tensor:
        ctx.run = run
        ctx.save_for_backward(*args)
        return run(*args)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with torch.enable_grad():
            args = [one.detach().requires_grad_() for one in ctx.saved_tensors]
            torch.autograd.backward(ctx.run(*args), grad)
        return None, *[one.grad for one in args]


reentrant = functools.partial(torch_checkpoint, use_reentrant=True)
not_reentrant = functools.partial(torch_checkpoint, use_reentrant=False)


OverridesForward = type("OverridesForward", (Diffuser,), {"call": lambda self, block, *args: block(*args)})
"""A user's subclass, whose forward does not checkpoint."""


def past_the_call() -> Caller:
    """With gradients on it calls the forward of a block's class, never the block."""
    return caller(lambda block, *args: type(block).forward(block, *args) if torch.is_grad_enabled() else block(*args))


EXACT = ("full", {"blocks.0": "full", "*": "none"})


@pytest.mark.parametrize(
    ("make", "blocks", "advice", "policies"),
    [
        (lambda: diffuser(CheckpointsItself), None, r'fastac\.enable\(model, blocks="blocks"\)', ()),
        (lambda: diffuser(OverridesForward), None, r'fastac\.enable\(model, blocks="blocks"\)', EXACT),
        (past_the_call, "blocks", r"module lists are 'blocks', 'blocks\.0\.norms'", EXACT),
    ],
    ids=["diffusers, checkpoints itself", "diffusers, another forward", "blocks, called past"],
)
def test_a_forward_that_opened_no_region(make: Any, blocks: Any, advice: str, policies: Any) -> None:
    """An error in every step with gradients, unless checkpointing is off. A model whose blocks it names trains."""
    model = make()
    expected = train_step(model, stack_inputs())
    for policy in ("attn_only", *policies):
        fastac.enable(model, policy, blocks=blocks)
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                model(**stack_inputs())
        for _ in range(2):
            with pytest.raises(PolicyNotAppliedError, match=f"(?s){type(model).__name__}.*called fastac.*{advice}"):
                train_step(model, stack_inputs())
    fastac.enable(model, "none", blocks=blocks)
    assert_same(train_step(model, stack_inputs()), expected)
    if blocks is None:
        fastac.enable(model)
        model.disable_gradient_checkpointing()
        assert_same(train_step(model, stack_inputs()), expected)
        fastac.enable(model, blocks="blocks")
        assert step_of(model) == 4
    fastac.disable(model)
    assert_same(train_step(model, stack_inputs()), expected)


class TwoForwards(Diffuser):
    """One forward that opens regions, and one that does not."""

    plainly = False

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        if not self.plainly:
            return self.run(video, text)
        for block in self.blocks:
            video = block(video, text)
        return video

    run = Diffuser.forward


@NEEDS_COMPILED_MODELS
@pytest.mark.parametrize("policy", ["attn_only", "full"])
def test_a_trace_speaks_for_the_forward_that_runs_it_alone(policy: str) -> None:
    """Regions in a compiled graph open unseen. The forward that runs the graph is no error; every other still is."""
    inputs, compiled = stack_inputs(), diffuser(TwoForwards)
    others = [diffuser(TwoForwards), diffuser(OverridesForward)]
    expected = train_step(compiled, inputs)
    frozen = diffuser(TwoForwards).requires_grad_(False)
    fastac.enable(frozen)  # torch does not compile the forward of frozen blocks under "full"
    for model in (compiled, *others):
        fastac.enable(model, policy)
    for model in (compiled, frozen):
        model.run = torch.compile(model.run, backend="aot_eager")
    for _ in range(2):
        assert_same(train_step(compiled, inputs), expected)
        frozen(**{name: tensor.detach() for name, tensor in inputs.items()})
        compiled.plainly = others[0].plainly = True
        for model in (compiled, *others):
            with pytest.raises(PolicyNotAppliedError, match="called fastac for none"):
                train_step(model, {**inputs, "video": compiled.run(**inputs)})
        compiled.plainly = False


class Encoded(support.AttentionStack):
    """Attends to few keys in its first block."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = torch.nn.ModuleList([support.AttentionBlock()])

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            text = self.encoder[0](text, text)
        return super().forward(video, text)


@pytest.mark.parametrize("call", ["the model", "its blocks"])
def test_frozen_blocks_are_not_judged(call: str) -> None:
    """They need not save. If those that train save nothing, that is an error, whether frozen blocks run before or not.

    A forward that is frozen as a whole says nothing of the next one.
    """
    model = Encoded().requires_grad_(False)
    run = model if call == "the model" else functools.partial(Encoded.forward, model)
    inputs = {name: tensor.detach() for name, tensor in stack_inputs().items()}
    for policy in ("attn_only", Policy("attn_only", min_kv=1000), Policy("attn_only", min_kv=10)):
        fastac.enable(model, policy, blocks=["encoder", "blocks"])
        for _ in range(2):
            assert not run(**inputs).requires_grad
    model.requires_grad_(True)
    train_step(run, stack_inputs())
    model.requires_grad_(False).blocks[1].requires_grad_(True)
    fastac.enable(model, blocks=["encoder", "blocks"])
    train_step(run, inputs)
    fastac.enable(model, Policy("attn_only", min_kv=1000), blocks=["encoder", "blocks"])
    with pytest.raises(PolicyNotAppliedError, match="nothing is saved in any block"):
        train_step(run, inputs)
    unseen = support.attention_function(support.define_attention_op(f"frozen_mixes_{call.replace(' ', '_')}"))
    for block in (*model.encoder, *model.blocks):
        block.attend = unseen
    fastac.enable(model, blocks=["encoder", "blocks"])
    with pytest.raises(PolicyNotAppliedError, match="saves nothing in it: no attention was seen"):
        train_step(run, inputs)


def test_blocks_under_none_in_a_checkpoint_of_the_model_s_own() -> None:
    model = caller(not_reentrant)
    fastac.enable(model, fastac.first_blocks(model, 1, blocks="blocks"), blocks="blocks")
    with pytest.raises(PolicyNotAppliedError, match=r"blocks\.1 should not be checkpointed.*own checkpointing off"):
        train_step(model, stack_inputs())


@pytest.mark.parametrize(("run", "first"), [(reentrant, 0), (reentrant, 1), (LibrariesCheckpoint.apply, 0)])
def test_reentrant_checkpoints_around_blocks(run: Any, first: int) -> None:
    """torch's or a trainer's own, around the blocks that `enable` named."""
    model = caller(lambda block, *args: run(block, *args) if block in list(model.blocks)[first:] else block(*args))
    fastac.enable(model, blocks="blocks")
    advice = "Leave that checkpoint out" if first else "own checkpointing off.*use_reentrant=False"
    for _ in range(2):
        with pytest.raises(PolicyNotAppliedError, match=advice):
            train_step(model, stack_inputs())


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_checkpoints_around_blocks_that_save_nothing(is_reentrant: bool) -> None:
    """All is exact. A reentrant one runs the blocks three times. Twice is what was asked for."""
    model, inputs = caller(reentrant if is_reentrant else not_reentrant), stack_inputs()
    expected = train_step(model, inputs)
    fastac.enable(model, "full", blocks="blocks")
    for _ in range(2):
        assert support.executions_of(model, inputs, expected) == (12 if is_reentrant else 8)


# Attention in a backward, outside a replay


ATTENTION = F.scaled_dot_product_attention


class RingAttention(LibrariesCheckpoint):
    """Not a checkpoint, by its name: an attention whose backward runs its forward again."""


class AttentionCheckpoint(LibrariesCheckpoint):
    """A checkpoint, by its name."""


AGAIN = "ran again in backward"
FULL_INSIDE = r'fastac\'s with policy="full"\)\. Leave that checkpoint out, or give'


@pytest.mark.parametrize(
    ("when", "own", "message"),
    [
        ("in all blocks", reentrant, AGAIN),
        ("in all blocks", LibrariesCheckpoint.apply, AGAIN),
        ("in all blocks", AttentionCheckpoint.apply, AGAIN),
        ("in the last block", reentrant, AGAIN),
        ("after a forward alone", LibrariesCheckpoint.apply, AGAIN),
        ("later", AttentionCheckpoint.apply, AGAIN),
        ("in all blocks", not_reentrant, "checkpoint"),
        ("in all blocks", functools.partial(fastac.checkpoint, policy="full"), FULL_INSIDE),
    ],
)
def test_attention_in_a_checkpoint_of_the_block_s_own(when: str, own: Any, message: str) -> None:
    """The forward shows nothing of those without hooks. The backward does: attention runs there, outside a replay."""
    model = stack()
    fastac.enable(model, blocks="blocks")
    if when == "later":
        train_step(model, stack_inputs())
    for i in range(when == "in the last block", 2):
        model.blocks[i].attend = functools.partial(own, ATTENTION)
    if when == "after a forward alone":
        model(**stack_inputs())
    for _ in range(2):
        with pytest.raises(PolicyNotAppliedError, match=message):
            train_step(model, stack_inputs())


class VisibleCheckpoint(LibrariesCheckpoint):
    """Its user made it visible: it is not a checkpoint."""


@pytest.mark.parametrize(
    ("attend", "blocks"),
    [
        (functools.partial(RingAttention.apply, ATTENTION), "blocks"),
        (functools.partial(VisibleCheckpoint.apply, ATTENTION), "blocks"),
        (functools.partial(reentrant, ATTENTION), "blocks.1"),
    ],
    ids=["an attention by its name", "made visible", "in no region"],
)
def test_attention_that_may_run_in_a_backward(attend: Any, blocks: str) -> None:
    """The attention's own backward runs it again, or fastac was not asked to save it."""
    fastac.make_visible(VisibleCheckpoint, layout="bhsd", dropout=None)
    model = stack()
    model.blocks[0].attend = attend
    expected = train_step(model, stack_inputs())
    fastac.enable(model, blocks=blocks)
    for _ in range(2):
        assert_same(train_step(model, stack_inputs()), expected)


def test_a_checkpoint_of_somebody_else_in_another_thread() -> None:
    """Autograd numbers nodes by thread: a node of another thread is not a node of a region here."""
    model = stack(policy="attn_only")
    expected = train_step(model, stack_inputs())
    other = stack(block=lambda: support.AttentionBlock(attend=functools.partial(reentrant, ATTENTION)))
    with ThreadPoolExecutor(1) as pool:
        assert_same(pool.submit(train_step, other, stack_inputs()).result(), expected)


@pytest.mark.parametrize("checkpoint", [reentrant, not_reentrant])
def test_attention_in_a_checkpoint_that_the_policy_recomputes_anyway(checkpoint: Any) -> None:
    """The block saves its self-attention, and checkpoints its cross-attention."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        is_cross = key.shape[2] == support.TEXT_TOKENS and torch.is_grad_enabled()
        return checkpoint(ATTENTION, query, key, value) if is_cross else ATTENTION(query, key, value)

    model = stack(block=lambda: support.AttentionBlock(attend=attend))
    expected = train_step(model, stack_inputs())
    model.policy = Policy("attn_only", min_kv=support.TEXT_TOKENS + 1)
    for _ in range(2):
        assert_same(train_step(model, stack_inputs()), expected)


def test_a_checkpoint_around_the_whole_model() -> None:
    """Its recompute runs every region's forward again in backward."""
    model = stack()
    fastac.enable(model, blocks="blocks")
    for _ in range(2):
        with pytest.raises(PolicyNotAppliedError):
            support.loss_of(alone(model)(**stack_inputs())).backward()


# A policy that saves nothing


@pytest.mark.parametrize("host", ["diffusers", "blocks"])
def test_a_policy_that_saves_nothing_in_any_block(host: str) -> None:
    """An error in a model's first step. "full" is fine, and so is a mapping that saves in one block."""
    model = HOSTS[host].make()
    HOSTS[host].enable(model, "long_attn_only")
    with pytest.raises(fastac.FastacError, match="long_attn_only"):
        train_step(model, stack_inputs())
    HOSTS[host].enable(model, {"blocks.0": "attn_only", "*": "long_attn_only"})
    assert step_of(model) == 6
    HOSTS[host].enable(model, "full")
    assert step_of(model) == 8


def test_a_policy_that_saves_nothing_in_a_function(caplog: pytest.LogCaptureFixture) -> None:
    block = support.AttentionBlock()
    for _ in range(3):
        fastac.checkpoint(block, **stack_inputs(), policy="long_attn_only").sum().backward()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "long_attn_only" in record.getMessage()


PIXELS, TEXT = torch.ones(1, 4, 8, 8), torch.ones(1, 3, 8)


@pytest.mark.parametrize(
    ("make", "inputs", "saves", "saves_nothing", "what"),
    [
        (lambda: UNet2DConditionModel(**UNET), (PIXELS, 1, TEXT), [Policy(min_kv=64)], [Policy(min_kv=65)], "nothing"),
        # It checkpoints no attention. None runs again, as "attn_only" asks: a policy of lengths is not what was meant.
        (lambda: UNet2DModel(in_channels=4, out_channels=4, **SIZES, **ATTENDING), (PIXELS, 1), [], [], "no attention"),
        (lambda: AutoencoderKL(4, norm_num_groups=1, block_out_channels=(8,)), (PIXELS,), [], [], "nothing"),
    ],
    ids=["parts of blocks", "none of its attention", "autoencoder"],
)
def test_a_policy_that_saves_nothing_in_any_part_of_a_model(
    make: Any, inputs: Any, saves: list[Any], saves_nothing: list[Any], what: str
) -> None:
    """An error in each step; none if some part saves something."""
    model = make()
    for policy in ("long_attn_only", *saves_nothing):
        fastac.enable(model, policy)
        for _ in range(2):
            with pytest.raises(PolicyNotAppliedError, match=f"{what} is saved in any block"):
                model(*inputs).sample.sum().backward()
    for policy in ("attn_only", *saves, "full", "none"):
        fastac.enable(model, policy)
        model(*inputs).sample.sum().backward()


# Copies of parts of a model whose function calls fastac


@pytest.mark.parametrize("copied", [copy.deepcopy, support.pickled])
def test_a_copied_part_of_a_unet(copied: Any) -> None:
    """Its policy is that of the model, so without the model it is an error, which says what to do."""
    model = UNet2DConditionModel(**UNET).train()
    size = len(pickle.dumps(model.down_blocks[0]))
    fastac.enable(model)
    assert len(pickle.dumps(model.down_blocks[0])) < size + 10_000
    plain, other = UNet2DConditionModel(**UNET).train(), UNet2DConditionModel(**UNET).train()
    plain.load_state_dict(model.state_dict())
    other.load_state_dict(model.state_dict())
    part = copied(model.down_blocks[0])
    inputs = {"hidden_states": torch.randn(1, 8, 8, 8), "temb": torch.randn(1, 32)}
    inputs["encoder_hidden_states"] = torch.randn(1, 3, 8)
    expected = train_step(lambda **inputs: plain.down_blocks[0](**inputs)[0], inputs)
    with torch.no_grad():
        assert torch.equal(part(**inputs)[0], plain.down_blocks[0](**inputs)[0])
    with pytest.raises(fastac.FastacError, match=r"copied without(?s:.*)fastac\.enable"):
        part(**inputs)
    other.down_blocks[0] = copied(model.down_blocks[0])
    fastac.enable(other)
    other(PIXELS, 1, TEXT).sample.sum().backward()
    assert fastac.report(other).rows[0].saved == 2
    fastac.disable(other)
    assert_same(train_step(lambda **inputs: other.down_blocks[0](**inputs)[0], inputs), expected)
    fastac.disable(part)
    assert_same(train_step(lambda **inputs: part(**inputs)[0], inputs), expected)


@pytest.mark.parametrize("name", ["wrapped blocks", "diffusers, wrapped blocks"])
@pytest.mark.parametrize("to", ["wrapped blocks", "diffusers, wrapped blocks"])
def test_copied_blocks_in_wrappers(name: str, to: str) -> None:
    model, other = HOSTS[name].make(), HOSTS[to].make()
    HOSTS[name].enable(model)
    assert step_of(model) == 4
    for policy, executions in (("attn_only", 4), ("full", 8)):
        for i in range(2):
            other.blocks[i] = copy.deepcopy(model.blocks[i])
        HOSTS[to].enable(other, policy)
        assert step_of(other) == executions
    fastac.disable(other)
    step_of(other)
    assert step_of(model) == 4


def test_a_shallow_copy_is_not_kept() -> None:
    """torch.nn.DataParallel makes copies of a model in every step."""
    model = diffuser()
    fastac.enable(model)
    other = copy.copy(model)
    vars(other)["_modules"] = {"blocks": torch.nn.ModuleList([copy.copy(block) for block in model.blocks])}
    assert step_of(other) == 4
    kept = weakref.ref(other.blocks[0])
    del other
    gc.collect()
    assert kept() is None
