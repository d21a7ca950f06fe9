"""fastac.checkpoint is exact wherever torch's own checkpoint is, bit for bit, and runs the function as often.

`CASES` has situations by name, most of them those of torch's own tests of checkpointing: each is called with a `Run`,
and returns outputs. Where torch's own raises, fastac raises or is exact. Then: failed recomputes, and memory.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import pickle
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu, saved_tensors_hooks
from torch.utils import checkpoint as torch_module

import fastac
from fastac import FastacError
from tests import support
from tests.engine.cases import OneAttention, RegionInside
from tests.engine.simulated import simulated
from tests.marks import needs_torch
from tests.support import CPU_ATTENTION, WIDTH, AttentionBlock, Tensors, assert_same, run_checkpointed

NOTHING = contextlib.nullcontext()


class Run:
    """One run of a case: blocks, inputs and random numbers are the same in each.

    policy: "none" without checkpointing, "torch" for torch's own, else one of fastac. calls: of what is checkpointed
    and of the modules. found: gradients of what is no leaf.
    """

    def __init__(self, policy: str) -> None:
        self.policy, self.calls = policy, 0
        self.found: list[torch.Tensor] = []
        torch.manual_seed(0)
        self.block, self.other = AttentionBlock(dropout=0.2), AttentionBlock(dropout=0.2)
        self.scale, self.plain = torch.randn(WIDTH, requires_grad=True), torch.randn(WIDTH)
        self.video, self.text = support.stack_inputs().values()
        for module in (self.block, self.block.ffn, self.other):
            module.register_forward_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1

    def __call__(self, function: Callable[..., Any], *args: Any, options: Any = None, **kwargs: Any) -> Any:
        """Checkpoint a call, with these options of torch's checkpoint."""

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return function(*args, **kwargs)

        options = options if options and self.policy != "none" else {}
        called = function if isinstance(function, torch.nn.Module) else counted
        return run_checkpointed(called, *args, policy=self.policy, **options, **kwargs)

    def by_torch(self, function: Callable[..., Any], *args: Any, use_reentrant: bool = False) -> Any:
        """Under torch's own checkpoint, whatever the policy."""
        if self.policy == "none":
            return function(*args)
        return torch_module.checkpoint(function, *args, use_reentrant=use_reentrant)

    def region(self) -> torch.Tensor:
        return self(self.block, self.video, self.text)

    def attention(self, video: torch.Tensor) -> torch.Tensor:
        return self.block._attention(*self.block.qkv(video).chunk(3, dim=-1))

    def parts(self, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.attention(video).sin()
        return hidden, self.block.ffn(hidden)

    def smooth(self, video: torch.Tensor) -> torch.Tensor:
        """Unlike attention, it can be differentiated any number of times."""
        return torch.tanh(self.block.qkv(video)).square() * video.norm(dim=-1, keepdim=True).sin()

    def grad(self, output: torch.Tensor, *leaves: torch.Tensor, **options: Any) -> torch.Tensor:
        """Gradients that are compared. Returns the first."""
        found = torch.autograd.grad(output.square().sum(), leaves, **{"retain_graph": True} | options)
        self.found += found
        return found[0]

    def step(self, case: Callable[[Run], Any]) -> Tensors:
        """Outputs, gradients, and what is drawn afterwards. Outputs that require grad are backpropagated."""
        torch.manual_seed(1)
        outputs = support.flat_tensors(case(self), "output")
        found = {name: one.detach().clone() for name, one in outputs.items()}
        if roots := {name: one for name, one in outputs.items() if one.requires_grad}:
            support.loss_of(roots).backward()
        inputs = {"video": self.video, "text": self.text, "scale": self.scale}
        leaves = support.leaves_of(torch.nn.ModuleList([self.block, self.other]), inputs)
        found |= {f"gradient {number}": one.detach() for number, one in enumerate(self.found)}
        return found | support.gradients(leaves) | {"drawn": torch.rand(3)}


class Saving(torch.autograd.Function):
    """Its backward reads what it saved so often, and runs a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, reads: int) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        ctx.reads = reads
        return x * y + y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, y = [ctx.saved_tensors for _ in range(ctx.reads)][-1]
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (square,) = torch.autograd.grad((inner * y).sin().sum(), inner)
        return gradient * y + square, None, None


CASES: dict[str, Callable[[Any], Any]] = {
    "a block": Run.region,
    "a bound forward": lambda run: run(run.block.forward, run.video, run.text),
    "a frozen block": lambda run: run(run.block.requires_grad_(False), run.video, run.text),
    "a partial": lambda run: run(functools.partial(run.other, text=run.text), run.region()),
    "a closure": lambda run: run(lambda: run.block(run.video, run.text) * run.scale),
    "no argument requires grad": lambda run: run(run.block, run.video.detach(), run.text.detach()),
    "nothing is saved": lambda run: run(lambda video: video * 2 + 1, run.video),
    "an argument returned": lambda run: run(lambda video, _: (run.attention(video), video), run.video, run.text),
    "written in place": lambda run: run(lambda video: run.attention(video).sin().mul_(run.scale), run.video).mul_(2),
    "an output dropped": lambda run: run(run.parts, run.video)[0],
    "a region dropped": lambda run: (run.region(), run.region())[1],
    "three deep": lambda run: run(lambda one: run(lambda two: run(run.parts, run(run.parts, two)[1]), one), run.video),
    "side by side": lambda run: run(lambda one: run(run.parts, one)[0] * run(run.other, one, run.text), run.video),
    "torch inside": lambda run: run(lambda one: run.by_torch(run.block.ffn, run.attention(one)).sin(), run.video),
    "torch around": lambda run: run.by_torch(
        lambda one: run(run.block.ffn, F.dropout(run(run.block.ffn, one))), run.video
    ),
    "reentrant inside": lambda run: run(
        lambda one: run.by_torch(run.block.ffn, run.attention(one), use_reentrant=True), run.video
    ),
    "reentrant around": lambda run: run.by_torch(
        lambda one: run(run.block.ffn, one).sin(), run.video, use_reentrant=True
    ),
    "jvp inside": lambda run: run(lambda one: torch.func.jvp(run.smooth, (one,), (one.cos(),)), run.video),
    "torch.func.grad inside": lambda run: run(torch.func.grad(lambda one: run.smooth(one).sum()), run.video),
}


def copying_hooks() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda tensor: [tensor.clone()], lambda held: held[0])


class Cases(Run):
    """Longer cases. Each returns outputs; calling `self` checkpoints."""

    def nested_values(self) -> Any:
        def function(first: Any, *, scale: torch.Tensor, second: dict[str, Any], number: int) -> Any:
            output = self.block(first[0], second["text"][0]) * scale
            return {"video": [output, None, (output.tanh(), number)]}

        second = {"text": [self.text], "none": None}
        nested = self(function, (self.video / 2, 1), scale=self.scale, second=second, number=3)
        return nested["video"][0] + nested["video"][2][0] * nested["video"][2][1]

    def argument_written_before_backward(self) -> Any:
        video = self.video.detach().clone()
        output = self(lambda video: self.scale.sin() * 2 + video, video)
        video.add_(1)
        return output

    def every_exception_caught_inside(self) -> Any:
        def function(video: torch.Tensor) -> Any:
            with contextlib.suppress(Exception):
                return self.attention(video).sin().cos()
            return video.sin()

        return self(function, self.video)

    # Which gradients are asked for, and how often

    def some_leaves(self) -> Any:
        output = self.region()
        self.grad(output, self.text)
        self.grad(output, self.block.ffn[2].weight, self.block.norms[0].weight)
        output.sum().backward(inputs=[self.video, self.block.qkv.weight], retain_graph=True)
        return output

    def read_outside_backward(self) -> Any:
        output = self(lambda video: self.attention(video).sin().exp(), self.video)
        node, sine = output.grad_fn, output.grad_fn.next_functions[0][0]
        self.found += [node._saved_result, sine._saved_self, node._saved_result]
        self.grad(output, self.video)
        self.found.append(node._saved_result)
        return output

    def double_backward(self) -> Any:
        output = self(lambda video: self(self.smooth, self(lambda one: one.sin().exp(), video)), self.video)
        return output, self.grad(self.grad(output, self.video, create_graph=True), self.video, create_graph=True)

    def group_of_backwards(self) -> Any:
        hidden, output = self(self.parts, self.video)
        with torch_module.GraphExecGroup():  # these do not overlap, and share a recompute
            hidden.backward(self.grad(output, hidden))

    def gradients_taken_inside(self) -> Any:
        def function(video: torch.Tensor) -> torch.Tensor:
            hidden = self.attention(video).sin()
            leaf = hidden.detach().requires_grad_()
            (penalty,) = torch.autograd.grad(self.attention(leaf).square().sum(), leaf)
            (inner,) = torch.autograd.grad(hidden.sum(), video, retain_graph=True)
            (freed,) = torch.autograd.grad(video.sin().cos().sum(), video)
            (smooth,) = torch.autograd.grad(self.smooth(video).sum(), video, create_graph=True)
            return self.block(hidden, self.text) * inner * freed * penalty + self.attention(smooth)

        return self(function, self.video)

    # Hooks, threads and functions of the user's own

    def saved_tensors_hooks_inside(self) -> Any:
        def function(video: torch.Tensor) -> torch.Tensor:
            with save_on_cpu():
                hidden = self.attention(video).sin()
            with copying_hooks():
                hidden = self.block.ffn(hidden)
            return hidden.cos()

        return self(function, self.video)

    def backward_in_another_thread(self) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.device("cpu"):
            output = self(lambda video: self.block(video, self.text) * torch.ones(WIDTH), self.video)
        with ThreadPoolExecutor(1) as pool:
            pool.submit(output.float().sum().backward).result()

    def gradients_off_inside(self) -> Any:
        def function(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                held = self.other(video, text)
            with torch.inference_mode():
                number = float(self.attention(video.detach()).sum())
            return self.block(video, text) * held * number

        return self(function, self.video, self.text)

    def saved(self, reads: int = 1) -> Any:
        return self(lambda video, y: Saving.apply(self.attention(video), y, reads), self.video, self.plain)

    def saved_and_read_twice(self) -> Any:
        return self.saved(reads=2)

    # Exceptions, after which everything works

    def exception_in_the_forward(self) -> Any:
        with pytest.raises(ZeroDivisionError):
            self(lambda video: self.attention(video).sin() * (1 // 0), self.video)
        return self.region()

    def exception_in_the_recompute(self) -> Any:
        def function(video: torch.Tensor) -> torch.Tensor:
            hidden = F.dropout(self.attention(video), 0.3)
            calls.append(True)
            if len(calls) == 2:
                raise KeyError
            return self(self.block, hidden, self.text).sin()

        calls: list[bool] = []
        output = self(function, self.video)
        with NOTHING if self.policy == "none" else pytest.raises(KeyError):
            torch.autograd.grad(output.sum(), self.video, retain_graph=True)
        self.grad(output, self.video)
        return output

    # Contexts in the forward, and others in the backward

    def default_device_of_the_forward(self) -> Any:
        with torch.device("meta"):  # which a backward does not see
            output = self(lambda video: (self.attention(video) * (2 + torch.empty(0).is_meta)).sin(), self.video)
        output.backward(torch.ones_like(output))


def around(context: Callable[[], Any], place: str, run: Run) -> Any:
    """Two regions, one in the other, with a context around a part of the step."""

    def function(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        with context() if place == "function" else NOTHING:
            return run(run.other, run.block(video, text) * torch.ones(WIDTH), text).float()

    with context() if place == "everything" else NOTHING:
        with context() if place == "forward" else NOTHING:
            output = run(function, run.video * 1, run.text)
        with context() if place == "backward" else NOTHING:
            output.sum().backward()
    return output.detach()


CONTEXTS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "the CPU as default device": lambda: torch.device("cpu"),
    "early stop off": lambda: torch_module.set_checkpoint_early_stop(False),
    "save_on_cpu": save_on_cpu,
}
CASES |= {name.replace("_", " "): one for name, one in vars(Cases).items() if not name.startswith("_")}
for _name, _context in CONTEXTS.items():
    for _place in ("function", "forward", "backward", "everything"):
        CASES[f"{_name} around {_place}"] = functools.partial(around, _context, _place)
CASES["saved tensors hooks around"] = functools.partial(around, copying_hooks, "everything")
for _context in (torch.autograd.detect_anomaly, allow_mutation_on_saved_tensors):
    CASES[_context.__name__] = functools.partial(around, _context, "everything")

MAY_RAISE = {
    "argument written before backward",
    "every exception caught inside",
    "saved and read twice",
    "torch.func.grad inside",
}
NEW = {
    "group of backwards": "2.10",
    "default device of the forward": "2.13",
}
"""They need a torch that has a GraphExecGroup, or whose own checkpoint takes default devices."""
assert CASES.keys() >= MAY_RAISE | NEW.keys()

POLICIES = pytest.mark.parametrize("policy", ["full", "attn_only"])
OFFLOADED = fastac.Policy("attn_only", offload=True)
IN_A_GROUP = "one output, in a group"


def parameters(names: Any) -> Any:
    needed = {IN_A_GROUP: "2.10", **NEW}
    marked = [pytest.param(one, marks=[needs_torch(needed[one])] if one in needed else ()) for one in names]
    return pytest.mark.parametrize("name", marked)


@pytest.mark.filterwarnings("ignore")
@parameters(CASES)
def test_outcome(name: str, attention_executions: Counter[str]) -> None:
    plain, theirs, calls = Cases("none"), Cases("torch"), None
    expected, executions = plain.step(CASES[name]), attention_executions[CPU_ATTENTION]
    assert any(key.startswith("gradient") and one.count_nonzero() for key, one in expected.items())
    try:
        found = theirs.step(CASES[name])
    except Exception:
        if name not in MAY_RAISE:
            raise
    else:
        assert_same(found, expected)
        calls = theirs.calls
        assert calls > plain.calls or name == "nothing is saved"
    for policy in ("attn_only", "attn_only", "full", OFFLOADED):  # the first region of its kind is watched
        run, is_offloaded = Cases(policy), policy is OFFLOADED
        attention_executions.clear()
        with simulated() if is_offloaded else NOTHING as device:
            try:
                found = run.step(CASES[name])
            except (RuntimeError, FastacError) as error:
                if calls is not None and not (is_offloaded and "saved_tensors_hooks of yours" in str(error)):
                    raise
                continue
        assert device is None or not device.faults
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


WRONG: dict[str, tuple[str, Any, Any, str]] = {
    "another call": (
        "attn_only",
        {},
        {"attend": lambda *heads: F.scaled_dot_product_attention(*map(torch.Tensor.contiguous, heads))},
        r"strides \(384.* strides \(1152.*\n.*use_cache",
    ),
    "a call less": ("attn_only", {}, {"attend": lambda query, key, value: query * key * value}, ""),
    "an output that was written": ("attn_only", {"change": lambda output: output.mul_(2)}, {}, ""),
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
    watch("weight", block[0].weight)
    gc.collect()
    del block
    assert watch.alive() == []


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
