"""fastac.checkpoint is exact wherever torch's own checkpoint is: cases of tests/engine/outcomes.py, bit for bit.

It runs the function as often; where torch's own raises, it raises or is exact. Then: failed recomputes, and memory.
"""

from __future__ import annotations

import functools
import gc
import importlib
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import checkpoint as torch_module

import fastac
from fastac import FastacError
from tests import support
from tests.engine.cases import OneAttention, RegionInside
from tests.engine.outcomes import CASES, MAY_RAISE, NEW, NOTHING, Cases, Run
from tests.marks import needs_torch
from tests.support import CPU_ATTENTION, WIDTH, AttentionBlock, Tensors, assert_same, run_checkpointed

POLICIES = pytest.mark.parametrize("policy", ["full", "attn_only"])
IN_A_GROUP = "one output, in a group"


def parameters(names: Any) -> Any:
    needed = {IN_A_GROUP: "2.10", **NEW}
    marked = [pytest.param(one, marks=[needs_torch(needed[one])] if one in needed else ()) for one in names]
    return pytest.mark.parametrize("name", marked)


@functools.cache
def expected_of(name: str) -> tuple[Tensors, int, int | None]:
    """Results and attention calls of a case without checkpointing; function calls under torch's, None if it raises."""
    plain, theirs = Cases("none"), Cases("torch")
    support.executions.clear()
    expected = plain.step(CASES[name])
    executions = support.executions[CPU_ATTENTION]
    assert any(key.startswith("gradient") and one.count_nonzero() for key, one in expected.items())
    try:
        found = theirs.step(CASES[name])
    except Exception:
        if name not in MAY_RAISE:
            raise
        return expected, executions, None
    assert_same(found, expected)
    assert theirs.calls > plain.calls or name == "nothing is saved"
    return expected, executions, theirs.calls


@pytest.mark.filterwarnings("ignore")
@parameters(CASES)
def test_outcome(name: str, attention_executions: Counter[str]) -> None:
    expected, executions, calls = expected_of(name)
    for policy in ("attn_only", "attn_only", "full"):  # the first region of its kind is watched
        run = Cases(policy)
        attention_executions.clear()
        try:
            found = run.step(CASES[name])
        except (RuntimeError, FastacError):
            assert calls is None
            continue
        assert_same(found, expected)
        assert calls in (None, run.calls)
        assert policy == "full" or attention_executions[CPU_ATTENTION] == executions


MISMATCHES: dict[str, Callable[[torch.Tensor, bool], torch.Tensor]] = {
    "fewer": lambda hidden, again: hidden if again else hidden.sin(),
    "more": lambda hidden, again: hidden.sin().cos() if again else hidden.sin(),
    "another shape": lambda hidden, again: hidden[..., : 3 if again else 5].sin(),
    "more dimensions": lambda hidden, again: (hidden[None, 0] if again else hidden[0, 0, 0]).sin(),
    "another dtype": lambda hidden, again: hidden.to(torch.float64 if again else torch.float32).sin(),
    "another device": lambda hidden, again: hidden.to("meta" if again else "cpu").sin(),
    "attention of another shape": lambda hidden, again: F.scaled_dot_product_attention(
        *[hidden[..., again:]] * 3
    ).sin(),
}


@pytest.mark.parametrize(("policy", "early_stop"), [("attn_only", True), ("full", False)])
@parameters(MISMATCHES)
def test_recompute_that_saves_something_else(name: str, early_stop: bool, policy: str) -> None:
    """It is an error that torch's CheckpointError catches as well; without the mismatch, backward works afterwards."""
    run, again = Run(policy), False

    def function(video: torch.Tensor) -> torch.Tensor:
        return MISMATCHES[name](run.attention(video).unsqueeze(1), again)

    expected = torch.autograd.grad(function(run.video).sum(), run.video)
    output = run(function, run.video, options={"early_stop": early_stop})
    again = True
    harmless = name == "more" and early_stop  # it stops before
    with NOTHING if harmless else pytest.raises(torch_module.CheckpointError) as raised:
        torch.autograd.grad(output.sum(), run.video, retain_graph=True)
    assert harmless or issubclass(raised.type, FastacError)
    again = False
    assert torch.equal(*torch.autograd.grad(output.sum(), run.video), *expected)
    assert run.calls == 3


def raised_in_recompute(error: BaseException, policy: str = "attn_only") -> BaseException:
    """What a backward raises whose recompute raises an error."""
    run = Run(policy)

    def function(video: torch.Tensor) -> torch.Tensor:
        hidden = run.attention(video).sin()
        if run.calls == 2:
            raise error
        return hidden.sin()

    with pytest.raises(BaseException) as raised:  # noqa: PT011 the caller looks at it
        run(function, run.video).sum().backward()
    return raised.value


@POLICIES
@pytest.mark.parametrize("kind", [IndexError, KeyError, ValueError, TypeError, AttributeError, RuntimeError])
def test_recompute_that_raises_names_the_cause(kind: type[Exception], policy: str) -> None:
    error = kind("past the end")
    raised = raised_in_recompute(error, policy)
    assert all(isinstance(raised, one) for one in (kind, FastacError, torch_module.CheckpointError))
    assert raised.__cause__ is error
    assert all(one in str(raised) for one in ("past the end", "recompute raised", "\nThe block probably read state"))
    assert str(pickle.loads(pickle.dumps(raised))) == str(raised)


OTHER_ERRORS = [
    *(torch.OutOfMemoryError(), MemoryError(), KeyboardInterrupt(), OSError()),
    *map(RuntimeError, ("CPUAllocator: no", "CUDA error: out of memory")),
]


@pytest.mark.parametrize("error", OTHER_ERRORS, ids=repr)
def test_what_else_a_recompute_raises_is_that(error: BaseException) -> None:
    """A trainer catches a lack of memory and tries again."""
    assert raised_in_recompute(error) is error


def contiguous(*heads: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(*map(torch.Tensor.contiguous, heads))


def written_later(tensor: torch.Tensor) -> torch.Tensor:
    """The result of an op that another op writes, in place."""
    return tensor.mul_(2)


WRONG: dict[str, tuple[str, Any, Any, str]] = {
    "another call": ("attn_only", {}, {"attend": contiguous}, r"strides \(384.* strides \(1152.*\n.*use_cache"),
    "a call less": ("attn_only", {}, {"attend": lambda query, key, value: query * key * value}, ""),
    "an output that was written": ("attn_only", {"change": written_later}, {}, ""),
    "other values": ("full", {}, {"change": torch.tanh}, ""),
    "another dtype": ("full", {"change": torch.tanh}, {"change": lambda output: output.double().tanh().float()}, ""),
    "an error": ("full", {}, {"attend": {}.__getitem__}, ""),
}
"""Policy, attributes of a block in its forward, and in its recompute, and words of the error."""


@pytest.mark.parametrize("name", WRONG)
def test_an_error_of_a_recompute_begins_with_its_block(name: str) -> None:
    """Not with the block whose recompute was the first. A copy of the error says so, too."""
    policy, forward, recompute, words = WRONG[name]
    model: Any = support.stack(block=OneAttention)
    fastac.enable(model, policy, blocks="blocks")
    vars(model.blocks[0]).update(forward)
    loss = support.loss_of(model(**support.stack_inputs()))
    vars(model.blocks[0]).update(recompute)
    with pytest.raises(FastacError, match=rf"^AttentionStack\.blocks\.0: .*{words}") as raised:
        loss.backward()
    assert str(raised.value).count("AttentionStack.blocks") == 1
    assert len(str(raised.value).splitlines()) <= 5
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


@POLICIES
@pytest.mark.parametrize("of", ["RegionInside", "AttentionBlock"])
def test_of_nested_regions_the_one_that_failed_is_named(of: str, policy: str) -> None:
    outer, inputs = RegionInside(policy), support.stack_inputs()
    outer.after = torch.nn.Identity()  # the outer recompute ends before the inner region
    loss = support.loss_of(fastac.checkpoint(outer, **inputs, policy=policy))
    if of == "RegionInside":
        outer.before = lambda video: video.tanh().tanh()
    else:
        outer.inner.attend = lambda query, key, value: {}[query]
    with pytest.raises(FastacError, match=f"^{of}: recompute"):
        loss.backward()


# Memory


class Watch(list[Any]):
    """Which tensors are alive, by the names that a test gives them and by weak references to their memory."""

    def __call__(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        self.append((name, weakref.ref(tensor.untyped_storage())))
        return tensor

    def alive(self, *names: str) -> list[str]:
        return [name for name, storage in self if storage() is not None and name in (names or name)]


@pytest.fixture
def watch() -> Iterator[Watch]:
    """No garbage is collected meanwhile: what is in a cycle stays."""
    gc.disable()
    yield Watch()
    gc.enable()


def branches(watch: Watch, policy: str, hook: Callable[[torch.Tensor], None]) -> list[torch.Tensor]:
    """Two outputs of a region, "left" and "right", after attention, whose gradient the hook gets."""
    block = AttentionBlock()

    def function(video: torch.Tensor) -> list[torch.Tensor]:
        attention = watch("attention", block._attention(*block.qkv(video).chunk(3, dim=-1)))
        attention.register_hook(hook)
        return [watch("left", attention * 2).sin(), watch("right", attention * 3).sin()]

    video = watch("argument", torch.randn(1, support.VIDEO_TOKENS, WIDTH)).requires_grad_()
    return run_checkpointed(function, video, policy=policy)


def in_a_group(outputs: list[torch.Tensor]) -> None:
    with torch_module.GraphExecGroup():
        outputs[0].sum().backward(retain_graph=True)


USES: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "not used": len,
    "both outputs": lambda outputs: (outputs[0] + outputs[1]).sum().backward(),
    "one output": lambda outputs: outputs[0].sum().backward(),
    "one output, retained": lambda outputs: outputs[1].sum().backward(retain_graph=True),
    IN_A_GROUP: in_a_group,
    "read": lambda outputs: (outputs[0].grad_fn._saved_self, outputs[0].grad_fn._saved_self),
    "a hook raises": lambda outputs: outputs[0].sum().backward(torch.tensor(0.0)),
}


@POLICIES
@parameters(USES)
def test_what_is_kept(name: str, policy: str, watch: Watch) -> None:
    """Nothing that was recomputed outlives a backward that ended well, and nothing at all outlives the graph."""

    def hook(gradient: torch.Tensor) -> None:
        if not gradient.count_nonzero():
            raise KeyError

    outputs = branches(watch, policy, hook)
    assert watch.alive("left", "right") == []
    with pytest.raises(KeyError) if name == "a hook raises" else NOTHING:
        USES[name](outputs)
    assert name in ("a hook raises", IN_A_GROUP) or watch.alive("left", "right") == []
    assert len(watch) == (4 if name == "not used" else 10 if name == "read" else 7)
    del outputs
    assert watch.alive() == []


@POLICIES
@pytest.mark.parametrize("kept", [1, 2])
def test_part_of_the_graph_that_was_dropped(kept: int, policy: str, watch: Watch) -> None:
    """What is recomputed for it is not kept, not even during the backward."""
    seen: list[list[str]] = []
    outputs = branches(watch, policy, lambda gradient: seen.append(watch.alive("left", "right")))[:kept]
    for _ in range(2):
        outputs[0].sum().backward(retain_graph=True)
    assert seen == [["right"] * (kept - 1)] * 2


class KeepsWhatItMade(AttentionBlock):
    """As routers of experts do, for a loss."""

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        self.kept = super().forward(video, text).tanh()
        return self.kept.exp().sin()


@POLICIES
@pytest.mark.parametrize("raises", [False, True])
def test_block_that_keeps_what_it_made_is_freed(raises: bool, policy: str) -> None:
    block = KeepsWhatItMade()
    output = run_checkpointed(block, *support.stack_inputs().values(), policy=policy)
    if raises:
        block.ffn.register_forward_hook(lambda module, args, output: output.double())
    with pytest.raises(FastacError) if raises else NOTHING:
        output.sum().backward()
    reference = weakref.ref(block)
    del block, output
    gc.collect()
    assert reference() is None


def test_a_block_that_writes_buffers_is_freed_at_once(watch: Watch) -> None:
    """Its record does not refer to it."""
    block = torch.nn.Sequential(torch.nn.BatchNorm1d(WIDTH))
    fastac.checkpoint(block, torch.ones(3, WIDTH, requires_grad=True), policy="full").sum().backward()
    gc.collect()
    reference = weakref.ref(block)
    del block
    assert reference() is None


def test_nothing_stays_of_a_forward_that_raised(watch: Watch) -> None:
    """The batch that did not fit is skipped, and the next one needs its memory."""
    importlib.import_module("torch._dynamo")  # torch does so in its first checkpoint, and its frames stay for a while

    def block(x: torch.Tensor) -> None:
        large = watch("large", torch.tanh(x * 2))
        raise torch.OutOfMemoryError(len(large))

    try:
        fastac.checkpoint(block, torch.ones(3, requires_grad=True))
    except torch.OutOfMemoryError:  # it is alive here, and so is what it came by
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert watch.alive() == []
