"""fastac.verify finds what breaks the promise, and leaves the model as it was."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode

import fastac
from fastac import FastacError, Policy, PolicyNotAppliedError
from tests import support
from tests.hook.hosts import Diffuser, diffuser
from tests.marks import NEEDS_COMPILED_MODELS
from tests.support import CPU_ATTENTION, AttentionBlock, stack, stack_inputs, state_of, train_step

WAN = "WanTransformer3DModel"


def test_what_is_as_promised(attention_executions: Counter[str]) -> None:
    """verify counts what the kernel counts: the reference, and two runs of the policy."""
    model, inputs = support.build(WAN)
    for reference, backward in (("none", 0), ("full", 4)):
        attention_executions.clear()
        result = fastac.verify(model, **inputs, reference=reference)
        assert (result.reference_executions, result.policy_executions) == ((4, backward), (4, 0))
        assert (result.saved, result.recomputed, result.largest_difference, result.noise) == (4, 0, 0.0, 0.0)
        assert result.different == ()
        assert result.compared > len(list(model.parameters())), "outputs and inputs as well"
        assert "4 of 4" in str(result)
        assert "fastac.enable would" in str(result)
        ran = sum(result.reference_executions) + sum(result.policy_executions)
        assert attention_executions[CPU_ATTENTION] in (ran + 4, 2 * ran)


@pytest.mark.parametrize(
    ("policy", "per_block", "backward", "saved", "recomputed"),
    [
        ("full", False, 4, 0, 0),
        (Policy("attn_only", min_kv=support.TEXT_TOKENS + 1), True, 2, 2, 2),
        ({"blocks.0": "full", "*": "attn_only"}, True, 2, 2, 0),
    ],
    ids=str,
)
def test_each_policy(policy: Any, per_block: bool, backward: int, saved: int, recomputed: int) -> None:
    """The policy of the call, else the one that the model is enabled with."""
    model = diffuser()
    for enabled in (False, True):
        options = {} if enabled else {"policy": policy}
        if enabled:
            fastac.enable(model, policy)
        result = fastac.verify(model, **stack_inputs(), **options, per_block=per_block)
        assert result.policy_executions == (4, backward)
        assert (result.saved, result.recomputed) == (saved, recomputed)
        assert ("fastac.enable would" in str(result)) is not enabled
        assert result.policy == ("mixed (attn_only, full)" if isinstance(policy, dict) else str(policy))
    assert fastac.verify(model, policy="attn_only", **stack_inputs()).policy_executions == (4, 0)


@pytest.mark.parametrize("options", [{}, {"per_block": True}, {"reference": "full"}], ids=str)
def test_without_the_comparison_by_value(options: dict[str, Any]) -> None:
    """determinism_check is that of `enable`."""
    model, calls, zero = diffuser(), itertools.count(1.0), torch.zeros((), requires_grad=True)
    for block in model.blocks:  # what the product saves for the gradient of zero differs at every call
        block.ffn.register_forward_hook(lambda module, args, output: output + torch.full((), next(calls)) * zero)
    fastac.enable(model, determinism_check="none")
    assert fastac.verify(model, **stack_inputs(), **options).different == ()
    fastac.enable(model)
    with pytest.raises(FastacError, match="does not compute what the forward did"):
        fastac.verify(model, **stack_inputs(), **options)


def test_a_module_without_the_hook_is_one_block() -> None:
    result = fastac.verify(AttentionBlock(), **stack_inputs())
    assert (result.reference_executions, result.policy_executions, result.saved) == ((2, 0), (2, 0), 2)


# What it finds


class Outside(Diffuser):
    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return AttentionBlock.forward(self.blocks[0], video, text)


@pytest.mark.parametrize("traced_before", [False, pytest.param(True, marks=NEEDS_COMPILED_MODELS)])
def test_attention_outside_of_the_blocks_alone_is_found(traced_before: bool) -> None:
    """A trace of another model of the class proves nothing."""
    torch._dynamo.reset()
    if traced_before:
        other = diffuser()
        fastac.enable(other)
        train_step(torch.compile(other, backend="aot_eager"), stack_inputs())
    with pytest.raises(PolicyNotAppliedError, match="block"):
        fastac.verify(diffuser(Outside), **stack_inputs())


def test_every_block_is_watched() -> None:
    """Also a block whose class was seen before, in this model or another. Its adapter's kernel has no row."""
    hidden = support.attention_function(support.define_attention_op("verify_hidden_attention"))

    def adapter(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output + hidden(*[output.unflatten(-1, (2, -1))] * 3).flatten(2)

    fastac.verify(support.stack(), blocks="blocks", **stack_inputs())
    model = support.stack()
    fastac.enable(model, blocks="blocks")
    train_step(model, stack_inputs())
    model.blocks[1].ffn.register_forward_hook(adapter)
    with pytest.raises(PolicyNotAppliedError, match="verify_hidden"):
        fastac.verify(model, **stack_inputs())
    model.blocks[0].ffn.register_forward_hook(adapter)
    fastac.disable(model)
    fastac.enable(model, blocks="blocks")
    with pytest.raises(PolicyNotAppliedError, match="verify_hidden"):
        train_step(model, stack_inputs())


class FirstOutside(Diffuser):
    """Attends before its blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.first = AttentionBlock()

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return super().forward(self.first(video, text), text)


@pytest.mark.parametrize("policy", ["attn_only", Policy(min_kv=support.TEXT_TOKENS + 1), "full"], ids=str)
def test_attention_beside_the_blocks_is_told_apart(policy: Any) -> None:
    """Each call counts once, though its kernel calls another. Under "full" nobody sees which calls are in blocks."""
    model = diffuser(FirstOutside)
    for block in (model.first, *model.blocks):
        block.attend = support.custom_attention("verify_calls_sdpa", "nested")
    result = fastac.verify(model, policy=policy, **stack_inputs())
    assert (result.reference_executions[0], result.policy_executions[0]) == (6, 6)
    assert result.saved + result.recomputed == (0 if policy == "full" else 4)
    cells = support.cells_of(str(result))
    assert cells["attention runs in forward"] == ["6", "6", "yes"]
    assert cells.get("of them outside of blocks") == (None if policy == "full" else ["", "2", ""])
    assert "of them in frozen blocks" not in cells
    assert "of them outside of blocks" not in str(fastac.verify(diffuser(), **stack_inputs()))


@pytest.mark.parametrize("blocks", [None, "blocks"])
@pytest.mark.parametrize("frozen", [1, 2])
def test_frozen_blocks_count_as_neither_saved_nor_recomputed(blocks: Any, frozen: int) -> None:
    model, head = diffuser(), torch.nn.Linear(support.WIDTH, 1)
    model.head = head  # trains behind the blocks
    model.register_forward_hook(lambda module, args, output: head(output))
    model.blocks[:frozen].requires_grad_(False)
    fastac.enable(model, blocks=blocks)
    inputs = {name: tensor.detach() for name, tensor in stack_inputs().items()}
    train_step(model, inputs)
    result = fastac.verify(model, **inputs)
    assert (result.saved, result.recomputed, result.policy_executions) == (4 - 2 * frozen, 0, (4, 0))
    assert result.saved_bytes == fastac.report(model).rows[0].saved_bytes
    cells = support.cells_of(str(result))
    assert cells["of them in frozen blocks"] == ["", str(2 * frozen), ""]
    assert "of them outside of blocks" not in cells


def test_a_call_that_a_mode_makes_again_is_counted_once() -> None:
    class Counting(Diffuser):
        def forward(self, *args: torch.Tensor, **kwargs: torch.Tensor) -> torch.Tensor:
            with FlopCounterMode(display=False):
                return super().forward(*args, **kwargs)

    assert fastac.verify(diffuser(Counting), **stack_inputs()).reference_executions == (4, 0)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_an_eager_higher_order_op_is_counted() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return F.scaled_dot_product_attention(q, k, v) + flex_attention(q.detach(), k.detach(), v.detach())

    result = fastac.verify(AttentionBlock(attend=attend), **stack_inputs(), policy="full")
    assert result.kernels == (CPU_ATTENTION, "higher_order::flex_attention")
    assert result.reference_executions[0] == 4


@pytest.mark.usefixtures("rows_as_before")
def test_kernels_are_counted_whoever_stands_in_the_dispatcher() -> None:
    """Another package takes BackendSelect after `enable`: an error, and kernels are counted right."""
    attend = support.custom_attention("verify_shadowed")
    model = support.stack(block=lambda: AttentionBlock(attend=attend))
    fastac.enable(model, blocks="blocks")
    op = torch.ops.fastac_tests.verify_shadowed.default
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)

    def passed_on(keyset: Any, *args: Any) -> Any:
        return op.redispatch(keyset & below, *args)

    library = torch.library.Library(support.NAMESPACE, "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("verify_shadowed", passed_on, "BackendSelect", with_keyset=True, allow_override=True)
    assert fastac.verify(model, **stack_inputs(), policy="full").policy_executions == (4, 4)
    for call in (lambda: train_step(model, stack_inputs()), lambda: fastac.verify(model, **stack_inputs())):
        with pytest.raises(PolicyNotAppliedError, match="another package took its BackendSelect"):
            call()


@pytest.mark.parametrize(
    ("blocks", "policy", "message"),
    [
        (None, Policy("attn_only", min_kv=7), "0 known attention kernels ran"),
        ("blocks", "attn_only", r"no attention|nothing is saved in any block"),
    ],
)
def test_no_attention_seen_is_no_yes(blocks: Any, policy: Any, message: str) -> None:
    """A kernel whose name does not say attention."""
    mixed = support.attention_function(support.define_attention_op(support.new_name("verify_mixes")))
    block = functools.partial(AttentionBlock, attend=mixed)
    model = block() if blocks is None else stack(block=block)
    with pytest.raises(PolicyNotAppliedError, match=message):
        fastac.verify(model, **stack_inputs(), policy=policy, blocks=blocks)
    assert "none seen" in str(fastac.verify(model, **stack_inputs(), policy="full", blocks=blocks))


def test_nan_is_equal_to_nan_alone() -> None:
    """A gradient may be nan with and without checkpointing. One that becomes nan in recompute is found."""

    class Breaks(AttentionBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            outside = torch._C._current_graph_task_id() == -1
            return super().forward(video, text) * (torch.ones(()) if outside else torch.full((), float("nan")))

    block = AttentionBlock()
    block.ffn[0].bias.data[0] = float("nan")
    assert fastac.verify(block, **stack_inputs()).different == ()
    with pytest.raises(fastac.FastacError, match="differ"):
        fastac.verify(Breaks(), **stack_inputs())


# What it leaves


def count_calls(block: Any, owner: Any) -> Any:
    """Count the calls of a block in a buffer of a module, which is returned."""
    owner.register_buffer("counter", torch.zeros(2, dtype=torch.int64), persistent=False)

    def count(*_: Any) -> None:
        owner.counter.add_(1)

    block.register_forward_pre_hook(count)
    return owner


@pytest.mark.parametrize("per_block", [False, True])
def test_buffers_are_compared(per_block: bool) -> None:
    """A block's own are exact. One of the model's, which its block writes, is written twice, and named."""
    model, inputs = diffuser(), stack_inputs()
    before = fastac.verify(model, **inputs, per_block=per_block)
    count_calls(model.blocks[0], model.blocks[0])
    assert fastac.verify(model, **inputs, per_block=per_block).compared == before.compared + 1
    assert fastac.verify(model, **inputs, reference="full").compared > 0
    if not per_block:
        count_calls(model.blocks[1], model)
        with pytest.raises(FastacError, match=r"1 of \d+ outputs and gradients differ .*: buffer counter\."):
            fastac.verify(model, **inputs)


@pytest.mark.parametrize(
    ("options", "before"),
    [({}, "nothing"), ({"per_block": True}, "fastac"), ({"reference": "full"}, "torch")],
    ids=str,
)
def test_the_model_is_left_as_it_was(options: dict[str, Any], before: str) -> None:
    """Inputs and gradients, buffers, generators, checkpointing, the report."""
    model, inputs = diffuser(), stack_inputs()
    counting = count_calls(model.blocks[0], model.blocks[0])
    if before == "torch":
        model.enable_gradient_checkpointing()
    if before == "fastac":
        fastac.enable(model, Policy("attn_only", min_kv=support.TEXT_TOKENS + 1))
    train_step(model, inputs)
    report = str(fastac.report(model))
    held = [(t, t.detach().clone(), t.grad, t.grad.clone()) for t in support.leaves_of(model, inputs).values()]
    state, counter, generator = state_of(model), counting.counter.clone(), torch.get_rng_state()
    fastac.verify(model, **inputs, **options)
    assert state_of(model) == state
    assert torch.equal(counting.counter, counter)
    assert torch.equal(torch.get_rng_state(), generator)
    for tensor, value, gradient, of_gradient in held:
        assert tensor.grad is gradient
        assert torch.equal(tensor, value)
        assert torch.equal(gradient, of_gradient)
    assert str(dataclasses.replace(fastac.report(model), recompute=None)) == report
    fastac.disable(model)
    assert model.gradient_checkpointing == (before == "torch")


def test_the_model_is_left_as_it_was_after_an_error() -> None:
    model, inputs = support.build(WAN)
    model.blocks[1].attn1.processor._attention_backend = "_native_math"
    state = state_of(model)
    with pytest.raises(fastac.UnsupportedBackendError, match="_native_math"):
        fastac.verify(model, **inputs)
    assert state_of(model) == state


def test_wrong_calls() -> None:
    for options, message in (({"reference": "half"}, "reference='half'"), ({"policy": "attention"}, "attn_only")):
        with pytest.raises(FastacError, match=message):
            fastac.verify(diffuser(), **stack_inputs(), **options)
    with pytest.raises(FastacError, match="requires grad"):
        fastac.verify(AttentionBlock().requires_grad_(False), *(t.detach() for t in stack_inputs().values()))


CHANGES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "checkpointing of its own": (None, lambda model: model.enable_gradient_checkpointing()),
    "no checkpointing": (None, lambda model: model.disable_gradient_checkpointing()),
    "another forward": (
        "blocks",
        lambda model: setattr(model.blocks[1], "forward", functools.partial(AttentionBlock.forward, model.blocks[1])),
    ),
    "another block": ("blocks", lambda model: model.blocks.__setitem__(1, AttentionBlock())),
    "one more block": ("blocks", lambda model: model.blocks.append(AttentionBlock())),
}
"""What was changed -> what `enable` was told, and the change."""

ANOTHER, PER_BLOCK, AGAINST_FULL = {"policy": "full"}, {"per_block": True}, {"reference": "full"}


@pytest.mark.parametrize(
    ("change", "options"),
    [
        *(("checkpointing of its own", options) for options in ({}, PER_BLOCK, ANOTHER)),
        *(("no checkpointing", options) for options in ({}, AGAINST_FULL, ANOTHER | PER_BLOCK)),
        *(("another forward", options) for options in ({}, ANOTHER)),
        *(("one more block", options) for options in (AGAINST_FULL, ANOTHER)),
        ("another block", {}),
    ],
)
def test_what_was_changed_since_enable(change: str, options: dict[str, Any]) -> None:
    """It is verified as it is, which is an error, and it stays. Another policy is verified as `enable` would do it."""
    (blocks, make), model, inputs = CHANGES[change], diffuser(), stack_inputs()
    fastac.enable(model, blocks=blocks)
    train_step(model, inputs)
    make(model)
    if change != "no checkpointing":
        with pytest.raises(PolicyNotAppliedError):
            train_step(model, inputs)
    before, report = state_of(model), fastac.report(model)
    if "policy" in options:
        assert fastac.verify(model, **inputs, **options).saved == 0
    else:
        with pytest.raises(PolicyNotAppliedError, match=r"fastac\.enable again"):
            fastac.verify(model, **inputs, **options)
    assert state_of(model) == before
    assert dataclasses.replace(fastac.report(model), recompute=None) == report


@pytest.mark.parametrize("policy", [None, "full"])
def test_hooks_stay_in_their_order(policy: Any) -> None:
    """The user's stand before and after those of `enable`."""
    model, inputs, handles = stack(), stack_inputs(), []
    for is_enabled in (False, True):
        if is_enabled:
            fastac.enable(model, Policy(linear=("ffn.2",)), blocks="blocks")
        for module in (model, model.blocks[0].ffn[2]):
            handles.append(module.register_forward_hook(lambda *_: None))
            handles.append(module.register_forward_pre_hook(lambda *_: None))
    before = state_of(model)
    assert fastac.verify(model, policy=policy, **inputs).linear_saved == (0 if policy else 2)
    assert state_of(model) == before
    for handle in handles:
        handle.remove()
    assert len(model._forward_hooks) == len(model._forward_pre_hooks) == 1


@pytest.mark.parametrize("call", [fastac.verify, fastac.report])
def test_a_model_whose_part_is_enabled(call: Any) -> None:
    """They would report another policy than the one that trains."""
    model = torch.nn.ModuleDict({"part": support.stack()})
    fastac.enable(model["part"], "full", blocks="blocks")
    with pytest.raises(FastacError, match=r"\(model\.part, \.\.\.\)"):
        call(model)


def test_gradients_are_put_back_if_a_forward_was_wrapped_meanwhile() -> None:
    """`disable`, which ends verify of another policy, raises for it."""
    model, inputs, forwards = stack(), stack_inputs(), itertools.count()
    fastac.enable(model, blocks="blocks")
    train_step(model, inputs)
    before, block = [parameter.grad for parameter in model.parameters()], model.blocks[0]

    def wrap(*_: Any) -> None:
        if next(forwards) == 2:
            block.forward = functools.wraps(block.forward)(functools.partial(block.forward))

    model.register_forward_pre_hook(wrap)
    with pytest.raises(FastacError, match="wrapped since"):
        fastac.verify(model, policy="full", **inputs)
    assert all(parameter.grad is gradient for parameter, gradient in zip(model.parameters(), before, strict=True))
