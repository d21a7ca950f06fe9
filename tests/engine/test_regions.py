"""What torch lets users do around a checkpointed region, and what a region holds: tests/engine/test_hazards.py has
what went wrong once."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

import fastac
from fastac import FastacError
from fastac.cli.measuring import allocated_bytes
from fastac.engine.blocks import record_of
from fastac.engine.kinds import state as kinds
from fastac.engine.tape import Entry
from tests import support
from tests.engine.cases import OWN_ALONE, OneAttention, assert_exact
from tests.live_bytes import LiveBytes, allocated
from tests.support import CPU_ATTENTION, AttentionBlock, assert_same, custom_attention, stack, stack_inputs, train_step

# As torch.utils.checkpoint.checkpoint is called


class ScaledBlock(AttentionBlock):
    """Called in other ways than block(video, text)."""

    def scaled(self, video: torch.Tensor, text: torch.Tensor, *, scale: float = 1.0, extra: Any = None) -> torch.Tensor:
        return self.forward(video, text) * scale + (extra["shift"] if extra else 0)


CALLABLES: dict[str, Callable[[ScaledBlock], Callable[..., torch.Tensor]]] = {
    "module": lambda block: block,
    "bound __call__": lambda block: block.__call__,  # Cosmos3 and PRX in diffusers
    "partial of a method": lambda block: functools.partial(block.scaled, scale=0.5),
    "closure": lambda block: lambda video, text: block(video, text),
}


@pytest.mark.parametrize("kind", CALLABLES)
def test_callables(kind: str, attention_executions: Counter[str]) -> None:
    """With the options of torch's own function, which may be given and change nothing here."""
    inputs = stack_inputs()
    torch.manual_seed(0)
    block = ScaledBlock()
    function = CALLABLES[kind](block)
    options = {"use_reentrant": False, "preserve_rng_state": True, "determinism_check": "default", "early_stop": True}

    def step(call: Callable[..., torch.Tensor]) -> support.Tensors:
        block.zero_grad()
        found = train_step(lambda video, text: call(video, text=text), inputs)
        return found | support.gradients(support.leaves_of(block, {}))

    reference = step(function)
    for _ in range(2):
        attention_executions.clear()
        assert_same(step(functools.partial(fastac.checkpoint, function, **options)), reference)
        assert attention_executions == {CPU_ATTENTION: 2}


def test_decorator(attention_executions: Counter[str]) -> None:
    """Of a method and of a function, with options and without any; the name and the docstring stay."""

    class Decorated(AttentionBlock):
        @fastac.checkpoint(policy="attn_only", use_reentrant=False, context_fn=noop_context_fn)
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            """Of the block."""
            return super().forward(video, text)

    torch.manual_seed(0)
    reference = train_step(AttentionBlock(), stack_inputs())
    torch.manual_seed(0)
    block = Decorated()
    attention_executions.clear()
    assert_same(train_step(block, stack_inputs()), reference)
    assert attention_executions == {CPU_ATTENTION: 2}
    assert block.forward.__doc__ == "Of the block."
    attention_executions.clear()
    plain = functools.partial(AttentionBlock.forward, block)
    found = train_step(fastac.checkpoint()(functools.wraps(AttentionBlock.forward)(plain)), stack_inputs())
    assert_same(found, {name: one for name, one in reference.items() if name in found})
    assert attention_executions == {CPU_ATTENTION: 2}
    with pytest.raises(FastacError, match="without a function"):
        fastac.checkpoint(scale=1)


def test_none_inside_a_region_is_part_of_it(attention_executions: Counter[str]) -> None:
    def inner(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return fastac.checkpoint(block, video, text, policy="none")

    block, inputs = AttentionBlock(), stack_inputs()
    reference = train_step(inner, inputs)
    attention_executions.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, inner), inputs), reference)
    assert attention_executions == {CPU_ATTENTION: 2}


def test_arguments_and_outputs_of_any_structure(attention_executions: Counter[str]) -> None:
    """Keyword arguments (WanAnimate2 passes them), tensors in a dict; a dict, a tuple, None and a number come out."""

    class Structured(ScaledBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor, extra: Any) -> Any:
            output = AttentionBlock.forward(self, video, text) + extra["shift"]
            return {"video": output, "both": (output[:, :3], None, [output.mean()]), "count": 3}

    nested = {**stack_inputs(), "extra": {"shift": torch.randn(support.WIDTH, requires_grad=True)}}
    torch.manual_seed(0)
    block = Structured()
    reference = train_step(block, nested)
    attention_executions.clear()
    found = train_step(functools.partial(fastac.checkpoint, block), nested)
    assert_same(found, {name: tensor for name, tensor in reference.items() if name in found})
    assert len(found) == 6
    assert attention_executions == {CPU_ATTENTION: 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_reentrant": True}, "use_reentrant"),
        ({"context_fn": lambda: None}, "context_fn"),
        ({"policy": "attention"}, r"'attention'.*attn_only"),
    ],
    ids=["use_reentrant", "context_fn", "policy"],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_options_that_cannot_be_honoured(options: dict[str, Any], message: str, compiled: bool) -> None:
    """In a graph of dynamo's as well, which would have no use for them."""

    def run(video: torch.Tensor, text: torch.Tensor) -> Any:
        return fastac.checkpoint(block, video, text, **options)

    block = AttentionBlock()
    torch._dynamo.reset()
    with pytest.raises(FastacError, match=message):
        (torch.compile(run, backend="aot_eager") if compiled else run)(**stack_inputs())


# What users do around it


@pytest.mark.parametrize(
    "around",
    [
        lambda: torch.utils.checkpoint.set_checkpoint_early_stop(False),
        torch.autograd.graph.save_on_cpu,
        lambda: torch.autograd.set_detect_anomaly(True),
    ],
    ids=["early stop off", "save_on_cpu", "anomaly detection"],
)
def test_contexts_of_torch(around: Callable[[], Any], attention_executions: Counter[str]) -> None:
    with around():
        assert_exact(AttentionBlock, attention_executions, {CPU_ATTENTION: 4})


class Packing:
    """Hooks that hand out numbers for tensors, and keep these."""

    def __init__(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.change = change
        self.held: list[torch.Tensor] = []

    def pack(self, tensor: torch.Tensor) -> int:
        self.held.append(self.change(tensor))
        return len(self.held) - 1

    def unpack(self, number: int) -> torch.Tensor:
        return self.held[number]


def backward_twice(inputs: dict[str, torch.Tensor], block: torch.nn.Module) -> Callable[[torch.Tensor], None]:
    def backward(loss: torch.Tensor) -> None:
        loss.backward(retain_graph=True)
        for leaf in (*inputs.values(), *block.parameters()):
            leaf.grad = None
        loss.backward()

    return backward


@pytest.mark.parametrize(
    "change", [lambda tensor: tensor, torch.Tensor.contiguous, torch.clone], ids=["itself", "contiguous", "copy"]
)
@pytest.mark.parametrize("respect", [True, False])
def test_saved_tensors_hooks_around_it(respect: bool, change: Any, attention_executions: Counter[str]) -> None:
    """They get what is saved where the call asks for that: at any step, for a second backward, with a region inside."""
    torch.manual_seed(0)
    block, inputs = AttentionBlock(), stack_inputs()

    def inner(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return fastac.checkpoint(block, video, text, respect_saved_tensors_hooks=respect)

    def outer(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return fastac.checkpoint(inner, video, text, respect_saved_tensors_hooks=respect)

    def around(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return fastac.checkpoint(inner, video, text, policy=fastac.Policy("attn_only", min_kv=10))

    reference = train_step(block, inputs)
    for call in (inner, outer, around):
        for _ in range(2):
            attention_executions.clear()
            packing = Packing(change)
            with torch.autograd.graph.saved_tensors_hooks(packing.pack, packing.unpack):
                found = train_step(call, inputs, backward=backward_twice(inputs, block))
                found |= support.gradients(support.leaves_of(block, {}))
            assert_same(found, reference)
            assert attention_executions == {CPU_ATTENTION: 2}
            outputs = [one for one in packing.held if one.shape == (1, 2, support.VIDEO_TOKENS, support.WIDTH // 2)]
            assert len(outputs) == (2 if respect and call is not around else 0)


def test_hooks_that_keep_the_tensor_get_a_copy() -> None:
    """A forward that autograd does not follow may write into what was saved, and so does each recompute."""
    torch.manual_seed(0)
    block, inputs = OneAttention(change=lambda output: output.mul_(2)), stack_inputs()
    block.qkv.requires_grad_(False)
    inputs["video"].requires_grad_(False)
    packing = Packing(lambda tensor: tensor)

    def call(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return fastac.checkpoint(block, video, text, respect_saved_tensors_hooks=True)

    reference = train_step(block, inputs)
    with torch.autograd.graph.saved_tensors_hooks(packing.pack, packing.unpack):
        found = train_step(call, inputs, backward=backward_twice(inputs, block))
    assert_same(found | support.gradients(support.leaves_of(block, {})), reference)


def test_what_hooks_have_packed_is_reported_as_saved() -> None:
    """In bytes, wherever the hooks have put it."""
    block = AttentionBlock()
    with torch.autograd.graph.save_on_cpu():
        output = fastac.checkpoint(block, **stack_inputs(), respect_saved_tensors_hooks=True)
    latest = record_of(block).latest
    assert latest is not None
    assert [call.saved_bytes for call in latest.calls] == [CALL_BYTES] * 2
    output.sum().backward()


def test_tensor_hook_on_the_attention_output(attention_executions: Counter[str]) -> None:
    """Set again in recompute, on a graph that nobody walks: it fires once, with the same gradient."""
    seen: list[torch.Tensor] = []

    def scaled(output: torch.Tensor) -> torch.Tensor:
        def hook(grad: torch.Tensor) -> torch.Tensor:
            seen.append(grad.clone())
            return grad * 0.5

        output.register_hook(hook)
        return output

    assert_exact(lambda: OneAttention(change=scaled), attention_executions, {CPU_ATTENTION: 2})
    assert len(seen) == 3 * 2
    assert_same(dict(enumerate(seen[2:4])), dict(enumerate(seen[:2])))  # type: ignore[arg-type]


@pytest.mark.parametrize("parts", ["video", "text", "parameters"])
def test_partial_gradients(parts: str, attention_executions: Counter[str]) -> None:
    """autograd.grad of some leaves only: autograd does not walk the rest, and early stop ends the recompute sooner."""
    inputs = stack_inputs()

    def run(policy: str) -> support.Tensors:
        model = stack(policy=policy)
        leaves = support.leaves_of(model, inputs)
        wanted = {name: t for name, t in leaves.items() if name.startswith("input") == (parts != "parameters")}
        wanted = {name: t for name, t in wanted.items() if parts == "parameters" or name.endswith(parts)}
        loss = support.loss_of(model(**inputs))
        return dict(zip(wanted, torch.autograd.grad(loss, list(wanted.values())), strict=True))

    reference = run("none")
    attention_executions.clear()
    assert_same(run("attn_only"), reference)
    assert attention_executions == {CPU_ATTENTION: 4}


def test_frozen_model_and_frozen_inputs(attention_executions: Counter[str]) -> None:
    """Guidance or a reward through a DiT; and as in every real training, no input of the first block requires grad."""
    frozen = AttentionBlock().requires_grad_(False)
    assert_exact(lambda: copy.deepcopy(frozen), attention_executions, {CPU_ATTENTION: 4})
    inputs = {name: tensor.detach() for name, tensor in stack_inputs().items()}
    reference = train_step(stack(), inputs)
    attention_executions.clear()
    assert_same(train_step(stack(policy="attn_only"), inputs), reference)
    assert attention_executions == {CPU_ATTENTION: 4}


def test_two_forwards_before_one_backward(attention_executions: Counter[str]) -> None:
    first, second = stack_inputs(1), stack_inputs(2)

    def run(policy: str) -> support.Tensors:
        model = stack(policy=policy)
        found = train_step(lambda **_: (model(**first), model(**second)), {"first": first, "second": second})
        return found | support.gradients(support.leaves_of(model, {}))

    reference = run("none")
    attention_executions.clear()
    assert_same(run("attn_only"), reference)
    assert attention_executions == {CPU_ATTENTION: 8}


def test_block_called_twice(attention_executions: Counter[str]) -> None:
    torch.manual_seed(0)
    block = AttentionBlock()
    assert_exact(lambda: block, attention_executions, {CPU_ATTENTION: 4})


@pytest.mark.parametrize("min_kv", [0, 10, 1000])
@pytest.mark.filterwarnings("ignore")
def test_a_gradient_taken_inside_a_region(min_kv: int) -> None:
    """torch recomputes the region while its forward is still open: that must free nothing and record nothing."""

    class GradientInside(torch.nn.Module):
        """Differentiates its own attention, as gradient penalties do, and attends again afterwards."""

        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            query = video.unflatten(-1, (2, -1)).transpose(1, 2)
            leaf = query.detach().requires_grad_()
            key = text.unflatten(-1, (2, -1)).transpose(1, 2)
            inner = F.scaled_dot_product_attention(leaf, leaf, leaf) + F.scaled_dot_product_attention(leaf, key, key)
            (gradient,) = torch.autograd.grad(inner.square().sum(), leaf)
            output = F.scaled_dot_product_attention(query, key, key) * gradient.detach()
            return video + output.transpose(1, 2).flatten(2)

    inputs = stack_inputs()
    reference = train_step(GradientInside(), inputs)
    region = functools.partial(fastac.checkpoint, GradientInside(), policy=fastac.Policy("attn_only", min_kv=min_kv))
    assert_same(train_step(region, inputs), reference)


# What ops return, and raise


@pytest.mark.parametrize("returns", ["Tensor", "Tensor[]", "(Tensor, int, Tensor)", "(Tensor, Tensor)"])
def test_output_structure(returns: str, attention_executions: Counter[str]) -> None:
    """A replayed call returns what the kernel returned: one tensor, a list, a tuple with numbers in it, or a slice of
    a larger buffer (a kernel that pads the head dim)."""
    name = "returns_" + "".join(character if character.isalnum() else "_" for character in returns)
    library = torch.library.Library(support.NAMESPACE, "FRAGMENT")
    library.define(f"{name}(Tensor query, Tensor key, Tensor value) -> {returns}")

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        support.executions[name] += 1
        output, statistics = support.attention_math(query, key, value)
        kinds = {"Tensor": output, "Tensor[]": [output, statistics], "(Tensor, int, Tensor)": (output, 3, statistics)}
        return kinds.get(returns, (F.pad(output, (0, 8))[..., :-8], statistics))

    library.impl(name, kernel, "CPU")
    op = getattr(torch.ops.fastac_tests, name).default
    fastac.register(
        fastac.AttentionOp(backend="tests", namespace=support.NAMESPACE, name=name, layout="bhsd", dropout=None)
    )
    seen = []

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            found = op(query, key, value)
            output = found if returns == "Tensor" else found[0]
            parts = [] if returns == "Tensor" else [type(item) for item in found]
            seen.append([type(found), output.stride(), *parts])
            ctx.save_for_backward(query, key, value, output, support.attention_math(query, key, value)[1])
            return output.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return support.attention_math_backward(grad, *ctx.saved_tensors)

    assert_exact(lambda: OneAttention(Attention.apply), attention_executions, {name: 2})
    assert all(one == seen[0] for one in seen)
    library._destroy()


class FailsOnCall(OneAttention):
    """Raises after its attention, in the calls whose numbers are in `failing`."""

    def __init__(self) -> None:
        super().__init__(change=self.fail)
        self.calls, self.failing = 0, set()

    def fail(self, output: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls in self.failing:
            raise ZeroDivisionError("on purpose")
        return output


@pytest.mark.parametrize("failing", [1, 2], ids=["in forward", "in recompute"])
@pytest.mark.parametrize("known", [False, True], ids=["first region", "known region"])
def test_exception_leaves_nothing_open(failing: int, known: bool) -> None:
    """The fixture of every test looks for what is open; the next step is exact."""
    inputs = stack_inputs()
    reference = train_step(stack(layers=1, block=FailsOnCall), inputs)
    model = stack(layers=1, block=FailsOnCall, policy="attn_only")
    if known:
        train_step(model, inputs)
    model.blocks[0].failing = {model.blocks[0].calls + failing}
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        train_step(model, inputs)
    assert_same(train_step(model, inputs), reference)


def test_kernel_that_raises_and_is_caught(attention_executions: Counter[str]) -> None:
    """A fallback within the block is recorded like any other call."""
    library = torch.library.Library(support.NAMESPACE, "FRAGMENT")
    library.define("raises(Tensor query, Tensor key, Tensor value) -> Tensor")

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no kernel for this shape")

    library.impl("raises", kernel, "CPU")
    fastac.register(fastac.AttentionOp(backend="tests", namespace=support.NAMESPACE, name="raises", dropout=None))

    def with_fallback(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        try:
            return torch.ops.fastac_tests.raises(query.detach(), key.detach(), value.detach())
        except NotImplementedError:
            return F.scaled_dot_product_attention(query, key, value)

    assert_exact(lambda: OneAttention(with_fallback), attention_executions, {CPU_ATTENTION: 2})
    library._destroy()


# Memory


def held_bytes(block: torch.nn.Module, policy: Any, known: bool) -> tuple[int, int]:
    """Bytes that one region adds: after its forward, its output not counted, and after that was dropped.

    known: the region is not the first of its kind, which is watched.
    """
    inputs = stack_inputs()

    def forward() -> torch.Tensor:
        # The generator's state, which torch keeps for each region, is none of fastac's bytes.
        return fastac.checkpoint(block, **inputs, policy=policy, preserve_rng_state=False)

    def dropped() -> None:
        forward()

    dropped()
    held = []
    for run in (forward, dropped):
        if not known:
            kinds.reset()
            record_of(block).key = None
        held.append(allocated(run))
    return held[0] - inputs["video"].nbytes, held[1]


ROW_BYTES = support.VIDEO_TOKENS * 4  # of one float per query
CALL_BYTES = support.WIDTH * ROW_BYTES + 2 * ROW_BYTES  # the output, and statistics per query and head


@pytest.mark.parametrize(
    ("policy", "calls", "known"),
    [("attn_only", 2, True), ("attn_only", 2, False), (OWN_ALONE, 1, True), ("full", 0, True)],
    ids=str,
)
def test_held_bytes_are_those_of_outputs_and_statistics(policy: Any, calls: int, known: bool) -> None:
    """To the byte. Nothing else of the region lives on after its forward, and nothing after its output is dropped."""
    assert held_bytes(AttentionBlock(), policy, known) == (calls * CALL_BYTES, 0)


def test_held_bytes_of_outputs_that_nobody_guards() -> None:
    """A copy is kept in the place of the output, not beside it."""
    attend = custom_attention("held")
    dropout_mask_bytes = 2 * support.VIDEO_TOKENS * ROW_BYTES  # the third output of this op
    expected = CALL_BYTES + dropout_mask_bytes
    assert held_bytes(OneAttention(attend, change=torch.neg), "attn_only", True) == (expected, 0)


def test_outputs_are_freed_one_by_one_during_backward() -> None:
    """Peak memory: what a region holds goes with its graph, block by block."""
    model = stack(layers=3, policy="attn_only")
    inputs = stack_inputs()
    train_step(model, inputs)
    gc.disable()
    alive: list[int] = []
    try:
        with LiveBytes([*model.parameters(), *inputs.values()]) as meter:
            outputs = model(**inputs)
        for block in model.blocks:  # called when a block's backward has reached its first operation
            block.norms[0].weight.register_post_accumulate_grad_hook(lambda _: alive.append(meter.now))
        support.loss_of(outputs).backward()
        del outputs
    finally:
        gc.enable()
    assert len(alive) == 3
    assert all(before - after >= 2 * CALL_BYTES for before, after in itertools.pairwise(alive))
    assert meter.now == 0


def test_graph_of_a_recompute_goes_with_it() -> None:
    """An output that is kept for a second backward is handed out as a fresh alias: the graph that the recompute builds
    behind it would otherwise live on the tape, with everything that it saved."""
    graphs: list[weakref.ref[Counter[str]]] = []

    def mark(output: torch.Tensor) -> torch.Tensor:
        assert output.grad_fn is not None
        output.grad_fn.metadata["mark"] = alive = Counter()
        graphs.append(weakref.ref(alive))
        return output

    model = stack(layers=1, policy="attn_only", block=lambda: OneAttention(change=mark))
    loss = support.loss_of(model(**stack_inputs()))
    loss.backward(retain_graph=True)
    of_forward, of_recompute = graphs
    assert of_forward() is not None
    assert of_recompute() is None


def test_what_is_known_about_a_block_does_not_keep_it() -> None:
    model = stack(policy="attn_only")
    train_step(model, stack_inputs())
    blocks = [weakref.ref(block) for block in model.blocks]
    del model
    gc.collect()
    assert [block() for block in blocks] == [None, None]


class TakesItsOwnGradient(AttentionBlock):
    """A gradient in the middle of its forward, with attention before and after."""

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        own = self._attention(*self.qkv(video).chunk(3, dim=-1))
        (gradient,) = torch.autograd.grad(own.sum(), video, retain_graph=True)
        return super().forward(video + gradient, text)


class GradientInForward(torch.autograd.Function):
    """An inner graph over SDPA, differentiated in the forward already."""

    @staticmethod
    def forward(ctx: Any, *heads: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            leaves = [one.detach().requires_grad_() for one in heads]
            output = F.scaled_dot_product_attention(*leaves)
            ctx.save_for_backward(*torch.autograd.grad(output.sum(), leaves))
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return tuple(one * grad.mean() for one in ctx.saved_tensors)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize(
    "block", [TakesItsOwnGradient, functools.partial(AttentionBlock, attend=GradientInForward.apply)]
)
def test_a_gradient_in_the_middle_of_a_forward(
    block: Any, early_stop: bool, attention_executions: Counter[str]
) -> None:
    """It recomputes the region while its forward is not complete: what has no entry yet runs."""
    inputs, found = stack_inputs(), []
    for function in (torch_checkpoint, fastac.checkpoint):
        model = stack(layers=1, block=block).blocks[0]
        leaves = {name: value.detach().clone().requires_grad_() for name, value in inputs.items()}
        attention_executions.clear()
        output = function(model, *leaves.values(), use_reentrant=False, early_stop=early_stop)
        support.loss_of(output).backward()
        found.append({"output": output.detach()} | {name: leaf.grad for name, leaf in leaves.items()})
    assert_same(found[1], found[0])


def test_two_threads_that_recompute_one_region_at_once() -> None:
    """Each output of a block is backpropagated by a thread of its own: each recompute has a position of its own."""
    meet = threading.Barrier(2, timeout=60)

    class Two(AttentionBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> Any:
            if threading.current_thread() is not threading.main_thread():
                meet.wait()
            own = self._attention(*self.qkv(video).chunk(3, dim=-1))
            return own.sin(), self._attention(self.q(own), *self.kv(text).chunk(2, dim=-1)).sin()

    block = stack(layers=1, block=Two).blocks[0]
    losses = [output.sum() for output in fastac.checkpoint(block, *stack_inputs().values())]
    weight = block.qkv.weight
    expected = [torch.autograd.grad(loss, weight, retain_graph=True)[0] for loss in losses]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda loss: torch.autograd.grad(loss, weight, retain_graph=True)[0], losses))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)  # threads add up in another order


def test_entries_that_stay_cost_nothing_at_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry lives as long as its region's graph. In backward the recomputed graph holds the same memory, so that to
    free each entry at its first replay would gain no byte."""
    model, inputs = stack(layers=4, policy="attn_only"), stack_inputs()
    hand_out = Entry.hand_out

    def freeing(entry: Entry) -> Any:
        outputs = hand_out(entry)
        entry.kept, entry.versions = (), ()
        return outputs

    peaks = []
    for way in (hand_out, hand_out, freeing):
        monkeypatch.setattr(Entry, "hand_out", way)
        model.zero_grad(set_to_none=True)
        gc.collect()
        peaks.append(allocated_bytes(lambda: train_step(model, inputs)).peak)
    assert peaks[1] == peaks[2]
