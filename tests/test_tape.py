"""The tape against every hazard that gave wrong gradients, a false alarm or a leak while it was built.

Each test fails when its guard in fastac/tape.py, interception.py or checkpointing.py is taken out. A model is trained
without checkpointing and under a policy, twice:
the first region of its kind is watched by a census, later ones are not.
"""

from __future__ import annotations

import copy
import gc
import subprocess
import sys
import textwrap
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from fastac import interception, registry, scopes
from fastac.errors import FastacError
from tests import support
from tests.marks import slow
from tests.support import CPU_ATTENTION, AttentionBlock, assert_same, custom_attention, stack, stack_inputs, train_step

Attend = Callable[..., torch.Tensor]
Change = Callable[[torch.Tensor], torch.Tensor]


class OneAttention(torch.nn.Module):
    """Projections, one attention, what a test does to its output, a projection. Text is not looked at."""

    def __init__(self, attend: Attend = F.scaled_dot_product_attention, change: Change | None = None) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(support.WIDTH, 3 * support.WIDTH)
        self.out = torch.nn.Linear(support.WIDTH, support.WIDTH)
        self.attend = attend
        self.change = change

    def heads(self, video: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.qkv(video).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        output = self.attend(*self.heads(video))
        if self.change is not None:
            output = self.change(output)
        return self.out(output.transpose(1, 2).flatten(2))


def assert_exact(
    block: Callable[[], torch.nn.Module],
    executions: Counter[str],
    expected: dict[str, int],
    policy: str | fastac.Policy = "attn_only",
    backward: Callable[..., Any] | None = None,
) -> None:
    """Two layers of a block train as without checkpointing, bit for bit, with so many kernel executions per step."""
    inputs = stack_inputs()
    reference = train_step(stack(block=block), inputs, backward=backward)
    model = stack(block=block, policy=policy)
    for _ in range(2):
        executions.clear()
        assert_same(train_step(model, inputs, backward=backward), reference)
        assert executions == expected


# The output is changed in place


def add_one(output: torch.Tensor) -> torch.Tensor:
    output += 1
    return output


def add_one_to_a_view(output: torch.Tensor) -> torch.Tensor:
    output.transpose(1, 2)[:, :3].add_(1)
    return output


def add_one_without_grad(output: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output.add_(1)
    return output


@pytest.mark.parametrize("policy", ["none", "attn_only"])
@pytest.mark.parametrize("change", [add_one, add_one_to_a_view, add_one_without_grad])
def test_in_place_change_of_an_output_that_autograd_needs_is_noticed(change: Change, policy: str) -> None:
    """Not legal without checkpointing either. An alias with a version counter of its own would not notice."""
    model = stack(policy=policy, block=lambda: OneAttention(change=change))
    with pytest.raises(RuntimeError, match=r"in-?place|in place"):
        train_step(model, stack_inputs())


@pytest.mark.parametrize("change", [add_one, add_one_to_a_view, add_one_without_grad])
def test_in_place_change_of_an_autograd_functions_output_is_legal(
    change: Change, attention_executions: Counter[str]
) -> None:
    """Inside an autograd.Function nobody guards the output, and outside it is the user's: a copy must be kept."""
    attend = custom_attention("written_after")
    assert_exact(lambda: OneAttention(attend, change), attention_executions, {f"{support.NAMESPACE}::written_after": 2})


def test_in_place_change_of_an_output_outside_the_graph_is_legal(attention_executions: Counter[str]) -> None:
    """No input of the attention requires grad, so writing a trained value into its output is fine."""

    class Frozen(OneAttention):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            output = self.attend(*self.heads(video.detach()))
            output += self.out.bias.view(2, 1, -1)
            return self.out(output.transpose(1, 2).flatten(2))

    def block() -> torch.nn.Module:
        frozen = Frozen()
        frozen.qkv.requires_grad_(False)
        return frozen

    assert_exact(block, attention_executions, {CPU_ATTENTION: 2})


def test_in_place_change_of_an_output_made_without_grad_is_legal(attention_executions: Counter[str]) -> None:
    """Attention under no_grad inside a training region (a guide, a mask), whose output the user goes on writing to."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            guide = F.scaled_dot_product_attention(query, key, value).mul_(2)
        return F.scaled_dot_product_attention(query, key, value) * guide

    assert_exact(lambda: OneAttention(attend), attention_executions, {CPU_ATTENTION: 4})


def test_buffer_reused_inside_an_autograd_function(attention_executions: Counter[str]) -> None:
    """What compiled code does to a buffer that its backward does not need, without touching a version counter."""
    custom_attention("buffer_reused")
    op = torch.ops.fastac_tests.buffer_reused.default

    class Reuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            output, statistics, _ = op(query, key, value)
            ctx.save_for_backward(query, key, value, output.clone(), statistics.clone())
            scaled = output * 2
            for buffer in (output, statistics):
                buffer.data.zero_()  # another tensor lives here now
            return scaled

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return support.attention_math_backward(2 * grad, *ctx.saved_tensors)

    assert_exact(lambda: OneAttention(Reuses.apply), attention_executions, {f"{support.NAMESPACE}::buffer_reused": 2})


# Random numbers


def dropout_attention(name: str, row_says: str | None) -> Attend:
    attend = custom_attention(name, "dropout", row_says)
    return lambda query, key, value: attend(query, key, value, 0.3)


def test_generator_is_not_turned_back_where_torch_does_not_guard_it() -> None:
    """With preserve_rng_state=False torch restores nothing after a recompute: a state that replay sets would stay, and
    what is drawn after the step (the next noise, the next timestep) would be drawn a second time."""
    attend = dropout_attention("draws_unguarded", "dropout_p")
    output = fastac.checkpoint(OneAttention(attend), **stack_inputs(), preserve_rng_state=False)
    noise = torch.rand(8)
    support.loss_of(output).backward()
    assert not torch.equal(torch.rand(8), noise)


@pytest.mark.parametrize("row_says", ["always", "dropout_p"])
def test_dropout_after_a_kernel_that_draws(row_says: str, attention_executions: Counter[str]) -> None:
    """The kernel does not run in recompute; what comes after it must draw the numbers it drew in forward."""
    name = f"draws_{row_says}"
    attend = dropout_attention(name, row_says)
    assert_exact(
        lambda: AttentionBlock(attend=attend, dropout=0.2),
        attention_executions,
        {f"{support.NAMESPACE}::{name}": 4},
    )


def test_dropout_after_a_kernel_that_draws_and_is_recomputed(attention_executions: Counter[str]) -> None:
    """One call of two is saved: the other draws by itself, from the state that the saved one left."""
    attend = dropout_attention("draws_mixed", "dropout_p")
    assert_exact(
        lambda: AttentionBlock(attend=attend, dropout=0.2),
        attention_executions,
        {f"{support.NAMESPACE}::draws_mixed": 6},
        policy=fastac.Policy("attn_only", min_kv=support.TEXT_TOKENS + 1),
    )


def test_row_that_denies_drawing_gives_other_gradients() -> None:
    """Why a row that says nothing means "always": this is what a wrong one costs, and nothing can notice."""
    attend = dropout_attention("draws_in_secret", None)
    inputs = stack_inputs()

    def block() -> torch.nn.Module:
        return AttentionBlock(attend=attend, dropout=0.2)

    reference = train_step(stack(block=block), inputs)
    found = train_step(stack(block=block, policy="attn_only"), inputs)
    assert_same({"output": found["output"]}, {"output": reference["output"]})
    name = "gradient of blocks.0.qkv.weight"
    assert support.relative_error(found[name], reference[name]) > 0.01


def test_row_that_says_nothing_is_taken_to_draw() -> None:
    assert fastac.AttentionOp(backend="tests", namespace="none", name="none").dropout == "always"


def test_generator_is_left_alone_by_kernels_that_do_not_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading its state costs time in every call, and on CUDA it is illegal while a graph is captured."""
    attend = custom_attention("does_not_draw", "dropout", "dropout_p")
    get_rng_state = torch.get_rng_state
    reads = []

    def counted() -> torch.Tensor:
        reads.append(1)
        return get_rng_state()

    for module in (torch, torch.random):
        monkeypatch.setattr(module, "get_rng_state", counted)

    def reads_of(policy: str) -> int:
        reads.clear()
        train_step(stack(policy=policy, block=lambda: OneAttention(attend)), stack_inputs())
        return len(reads)

    assert reads_of("attn_only") == reads_of("torch") > 0  # torch reads it once per region


def test_sac_engine_refuses_a_kernel_that_draws() -> None:
    """torch's selective checkpointing does not restore the generator: silently wrong without this error."""
    attend = dropout_attention("draws_under_sac", "dropout_p")
    model = stack(block=lambda: AttentionBlock(attend=attend, dropout=0.2), policy="attn_only", engine="sac")
    with pytest.raises(FastacError, match=r'engine="sac".*draws_under_sac'):
        train_step(model, stack_inputs())


# More than one backward


def twice(loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("policy", ["none", "torch", "attn_only"])
def test_second_backward_without_retain_graph_raises(policy: str) -> None:
    inputs = stack_inputs()
    loss = support.loss_of(stack(policy=policy)(**inputs))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_second_backward_with_retain_graph(attention_executions: Counter[str]) -> None:
    assert_exact(AttentionBlock, attention_executions, {CPU_ATTENTION: 4}, backward=twice)


@pytest.mark.parametrize("change", [None, add_one])
def test_second_backward_through_outputs_that_nobody_guards(
    change: Change | None, attention_executions: Counter[str]
) -> None:
    """The first recompute writes into what it was given. The second must not be given the same memory."""
    name = "kept_for_two"
    attend = custom_attention(name)
    assert_exact(
        lambda: OneAttention(attend, change),
        attention_executions,
        {f"{support.NAMESPACE}::{name}": 2},
        backward=twice,
    )


def test_graph_of_a_recompute_goes_with_it() -> None:
    """An output that is kept for a second backward is handed out as a fresh alias: the graph that the recompute builds
    behind it would otherwise hang on the tape, with everything that it saved."""
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


def test_gradients_asked_for_twice(attention_executions: Counter[str]) -> None:
    """Adaptive loss weights take the gradient at one layer first, then that of everything."""
    inputs = stack_inputs()

    def run(policy: str) -> support.Tensors:
        model = stack(policy=policy)
        leaves = support.leaves_of(model, inputs)
        loss = support.loss_of(model(**inputs))
        (first,) = torch.autograd.grad(loss, [model.blocks[0].self_out.weight], retain_graph=True)
        return {"first": first, **dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))}

    reference = run("none")
    attention_executions.clear()
    assert_same(run("attn_only"), reference)
    assert attention_executions[CPU_ATTENTION] == 4


class TwoOutputs(torch.nn.Module):
    """A region whose two outputs share nothing but its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = OneAttention(), OneAttention()

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(video, text), self.right(video, text)


def test_outputs_backpropagated_one_by_one(attention_executions: Counter[str]) -> None:
    """Each backward recomputes the whole region. With retain_graph on the first, the second finds its outputs."""
    inputs = stack_inputs()

    def run(policy: str) -> support.Tensors:
        torch.manual_seed(0)
        block = TwoOutputs()
        left, right = support.run_checkpointed(block, **inputs, policy=policy)
        leaves = support.leaves_of(block, inputs)
        for tensor in leaves.values():
            tensor.grad = None
        support.loss_of(left).backward(retain_graph=True)
        support.loss_of(right).backward()
        return support.gradients(leaves)

    reference = run("none")
    attention_executions.clear()
    assert_same(run("attn_only"), reference)
    assert attention_executions[CPU_ATTENTION] == 2


def test_outputs_freed_by_the_first_backward_are_missed_by_name() -> None:
    """A first backward without retain_graph frees what was saved; a second one through the region is told so."""
    inputs = stack_inputs()
    left, right = fastac.checkpoint(TwoOutputs(), **inputs)
    support.loss_of(left).backward()
    with pytest.raises(FastacError, match="retain_graph=True"):
        support.loss_of(right).backward()


def test_two_forwards_before_one_backward(attention_executions: Counter[str]) -> None:
    first, second = stack_inputs(1), stack_inputs(2)

    def both(model: torch.nn.Module) -> Callable[..., Any]:
        return lambda **_: (model(**first), model(**second))

    def run(policy: str) -> support.Tensors:
        model = stack(policy=policy)
        found = train_step(both(model), {"first": first, "second": second})
        return found | support.gradients(support.leaves_of(model, {}))

    reference = run("none")
    attention_executions.clear()
    assert_same(run("attn_only"), reference)
    assert attention_executions[CPU_ATTENTION] == 8


def test_block_called_twice(attention_executions: Counter[str]) -> None:
    inputs = stack_inputs()

    def shared(policy: str) -> torch.nn.Module:
        torch.manual_seed(0)
        block = AttentionBlock()
        return stack(policy=policy, block=lambda: block)

    reference = train_step(shared("none"), inputs)
    attention_executions.clear()
    assert_same(train_step(shared("attn_only"), inputs), reference)
    assert attention_executions[CPU_ATTENTION] == 4


# Regions inside regions, kernels inside kernels

BETWEEN = fastac.Policy("attn_only", min_kv=support.TEXT_TOKENS + 1)
"""Saves the self-attention of an AttentionBlock and recomputes its cross-attention."""


class RegionInside(torch.nn.Module):
    """A block that checkpoints a part of itself; it is checkpointed as a whole, too."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.inner = AttentionBlock()
        self.out = torch.nn.Linear(support.WIDTH, support.WIDTH)
        self.policy = policy

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        video = support.run_checkpointed(self.inner, torch.tanh(video), text, policy=self.policy)
        return self.out(torch.tanh(video))


@pytest.mark.parametrize(
    ("outer", "inner", "executions"),
    [
        # Saved by the outer region, which gives its output to the inner one in recompute as well.
        ("attn_only", "attn_only", 4),
        (BETWEEN, BETWEEN, 8),
        ("attn_only", BETWEEN, 6),
        # The outer recompute runs what it has not saved, and the inner region then records it anew.
        (BETWEEN, "attn_only", 6),
        ("torch", "attn_only", 8),
        # torch's own region inside recomputes everything once more, after the outer one is closed.
        ("torch", "torch", 12),
    ],
    ids=str,
)
def test_nested_regions(outer: Any, inner: Any, executions: int, attention_executions: Counter[str]) -> None:
    assert_exact(lambda: RegionInside(inner), attention_executions, {CPU_ATTENTION: executions}, policy=outer)


def test_attention_in_a_region_of_torch_s_own_inside_is_refused() -> None:
    """That recomputes everything once more, after the outer region is closed."""
    with pytest.raises(fastac.PolicyNotAppliedError, match=r"inside a torch\.utils\.checkpoint of the block's own"):
        fastac.checkpoint(RegionInside("torch"), *support.stack_inputs().values(), policy="attn_only")


@pytest.mark.parametrize(("policy", "executions"), [("attn_only", 4), (BETWEEN, 6)], ids=str)
def test_kernel_that_calls_a_registered_op(policy: Any, executions: int, attention_executions: Counter[str]) -> None:
    """The op inside is part of the kernel, in forward and where the kernel is run again: no call of the region."""
    attend = custom_attention("calls_sdpa", "nested")
    assert_exact(
        lambda: AttentionBlock(attend=attend),
        attention_executions,
        {f"{support.NAMESPACE}::calls_sdpa": executions, CPU_ATTENTION: executions},
        policy=policy,
    )


# What an op returns


@pytest.mark.parametrize("returns", ["Tensor", "Tensor[]", "(Tensor, int, Tensor)"])
def test_output_structure(returns: str, attention_executions: Counter[str]) -> None:
    """A replayed call returns what the kernel returned: one tensor, a list, or a tuple with numbers in it."""
    name = {"Tensor": "returns_tensor", "Tensor[]": "returns_list"}.get(returns, "returns_tuple")
    library = torch.library.Library(support.NAMESPACE, "FRAGMENT")
    library.define(f"{name}(Tensor query, Tensor key, Tensor value) -> {returns}")

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        support.executions[name] += 1
        output, statistics = support.attention_math(query, key, value)
        return {"Tensor": output, "Tensor[]": [output, statistics]}.get(returns, (output, 3, statistics))

    library.impl(name, kernel, "CPU")
    op = getattr(torch.ops.fastac_tests, name).default
    fastac.register(
        fastac.AttentionOp(backend="tests", namespace=support.NAMESPACE, name=name, layout="bhsd", dropout=None)
    )
    shapes_seen = []

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            found = op(query, key, value)
            shapes_seen.append([type(found), *([type(item) for item in found] if returns != "Tensor" else [])])
            output = found if returns == "Tensor" else found[0]
            statistics = support.attention_math(query, key, value)[1]
            ctx.save_for_backward(query, key, value, output, statistics)
            return output.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return support.attention_math_backward(grad, *ctx.saved_tensors)

    assert_exact(lambda: OneAttention(Attention.apply), attention_executions, {name: 2})
    assert all(seen == shapes_seen[0] for seen in shapes_seen)
    library._destroy()


def test_output_that_is_part_of_a_larger_buffer(attention_executions: Counter[str]) -> None:
    """A kernel may pad the head dim and return a slice; a replayed output must have the same strides."""
    name = "returns_slice"
    library = torch.library.Library(support.NAMESPACE, "FRAGMENT")
    library.define(f"{name}(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor)")

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        support.executions[name] += 1
        output, statistics = support.attention_math(query, key, value)
        return F.pad(output, (0, 8))[..., :-8], statistics

    library.impl(name, kernel, "CPU")
    fastac.register(
        fastac.AttentionOp(backend="tests", namespace=support.NAMESPACE, name=name, layout="bhsd", dropout=None)
    )
    strides = []

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            output, statistics = torch.ops.fastac_tests.returns_slice(query, key, value)
            strides.append(output.stride())
            ctx.save_for_backward(query, key, value, output, statistics)
            return output

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return support.attention_math_backward(grad, *ctx.saved_tensors)

    assert_exact(lambda: OneAttention(Attention.apply), attention_executions, {name: 2})
    assert len(set(strides)) == 1
    library._destroy()


# Ops that write


def test_op_that_always_writes_an_argument_is_refused_at_register() -> None:
    """On replay the write would be missing, with wrong gradients."""
    op = support.define_attention_op("always_writes", "always_writes")
    with pytest.raises(FastacError, match=r"always_writes\.default writes its argument 'out'"):
        fastac.register(fastac.AttentionOp(backend="tests", namespace=support.NAMESPACE, name="always_writes"))
    assert registry.classify(op) is None, "a row that was refused is not registered"


def test_op_that_may_write_is_saved_when_it_does_not(attention_executions: Counter[str]) -> None:
    attend = custom_attention("may_write", "writes")
    assert_exact(lambda: OneAttention(attend), attention_executions, {f"{support.NAMESPACE}::may_write": 2})


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_op_that_writes_in_this_call_is_refused(engine: str) -> None:
    attend = custom_attention("writes_now", "writes")

    def writing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        written = torch.empty_like(query)
        return attend(query, key, value, written) + written

    model = stack(policy="attn_only", engine=engine, block=lambda: OneAttention(writing))
    with pytest.raises(FastacError, match=r"writes_now\.default was called with 'out', which it writes"):
        train_step(model, stack_inputs())


# Exceptions


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


@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("failing", [1, 2], ids=["in forward", "in recompute"])
@pytest.mark.parametrize("known", [False, True], ids=["first region", "known region"])
def test_exception_leaves_nothing_open(failing: int, known: bool, engine: str) -> None:
    inputs = stack_inputs()
    reference = train_step(stack(layers=1, block=FailsOnCall), inputs)
    model = stack(layers=1, block=FailsOnCall, policy="attn_only", engine=engine)
    if known:
        train_step(model, inputs)
    model.blocks[0].failing = {model.blocks[0].calls + failing}
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        train_step(model, inputs)
    assert scopes.thread.scope is None
    assert not interception.watchers
    assert_same(train_step(model, inputs), reference)


def test_kernel_that_raises_and_is_caught_leaves_the_region_open(attention_executions: Counter[str]) -> None:
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


def _tensors_of_python() -> list[torch.Tensor]:
    """Those with memory of their own: what vmap of another test left behind has none."""
    tensors = [value for value in gc.get_objects() if issubclass(type(value), torch.Tensor)]
    return [tensor for tensor in tensors if not torch._C._functorch.is_functorch_wrapped_tensor(tensor)]


class NewStorages(TorchDispatchMode):
    """Weak references to the storages that were not there when this was made."""

    def __init__(self) -> None:
        super().__init__()
        self.before = {tensor.untyped_storage()._cdata: tensor for tensor in _tensors_of_python()}
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for tensor in support.flat_tensors(outputs, "").values():
            self.add(tensor)
        return outputs

    def add(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self.before:
            self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()

    def sizes(self) -> list[int]:
        """Of the new storages that live. Python's tensors count: a copy made below the mode was not seen by it."""
        for tensor in _tensors_of_python():
            self.add(tensor)
        return [nbytes for reference, nbytes in self.seen.values() if not reference.expired()]


def held_bytes(block: torch.nn.Module, policy: Any, known: bool = True) -> tuple[int, int]:
    """Bytes that one region adds: after its forward, and after its output was dropped without a backward.

    Without the garbage collector, which in training comes when it likes. The output itself is not counted.
    known: the region is not the first of its kind, which a census watches.
    """
    inputs = stack_inputs()

    def forward() -> torch.Tensor:
        # The generator's state, which torch keeps for each region, is none of fastac's bytes.
        return fastac.checkpoint(block, **inputs, policy=policy, preserve_rng_state=False)

    if known:
        forward()
    gc.collect()
    gc.disable()
    try:
        with NewStorages() as storages:
            output = forward()
        held = sum(storages.sizes()) - output.untyped_storage().nbytes()
        del output
        left = sum(storages.sizes())
    finally:
        gc.enable()
    return held, left


ROW_BYTES = support.VIDEO_TOKENS * 4  # of one float per query
OUTPUT_BYTES = support.WIDTH * ROW_BYTES
STATISTICS_BYTES = 2 * ROW_BYTES  # one per query and head


@pytest.mark.parametrize("known", [True, *slow(False)], ids=["known region", "first region"])
@pytest.mark.parametrize(("policy", "calls"), [("attn_only", 2), (BETWEEN, 1), ("full", 0)], ids=str)
def test_held_bytes_are_those_of_outputs_and_statistics(policy: Any, calls: int, known: bool) -> None:
    """To the byte. Nothing else of the region lives on after its forward, and nothing after its output is dropped."""
    held, left = held_bytes(AttentionBlock(), policy, known)
    assert held == calls * (OUTPUT_BYTES + STATISTICS_BYTES)
    assert left == 0


def test_held_bytes_of_outputs_that_nobody_guards() -> None:
    """A copy is kept in the place of the output, not beside it."""
    attend = custom_attention("held")
    dropout_mask_bytes = 2 * support.VIDEO_TOKENS * ROW_BYTES  # the third output of this op
    held, left = held_bytes(OneAttention(attend, change=torch.neg), "attn_only")
    assert held == OUTPUT_BYTES + STATISTICS_BYTES + dropout_mask_bytes
    assert left == 0


def test_outputs_are_freed_one_by_one_during_backward() -> None:
    """Peak memory: an output that was replayed for the last time lives as long as its recomputed block, no longer."""
    model = stack(layers=3, policy="attn_only")
    inputs = stack_inputs()
    train_step(model, inputs)
    gc.disable()
    alive: list[int] = []
    try:
        with NewStorages() as storages:
            outputs = model(**inputs)
        references = [ref for ref, size in storages.seen.values() if size == STATISTICS_BYTES and not ref.expired()]
        for block in model.blocks:  # called when a block's backward has reached its first operation
            block.norms[0].weight.register_post_accumulate_grad_hook(
                lambda _: alive.append(sum(not ref.expired() for ref in references))
            )
        support.loss_of(outputs).backward()
    finally:
        gc.enable()
    assert len(references) == 6
    assert alive == sorted(alive, reverse=True)
    assert alive[-1] <= 2
    assert not any(not ref.expired() for ref in references)


# Threads


def test_backward_in_another_thread(attention_executions: Counter[str]) -> None:
    def elsewhere(loss: torch.Tensor) -> None:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    assert_exact(AttentionBlock, attention_executions, {CPU_ATTENTION: 4}, backward=elsewhere)


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_attention_of_another_thread_is_not_recorded(engine: str, attention_executions: Counter[str]) -> None:
    """A second thread runs attention of its own (validation, a data loader's encoder) while a region is open."""

    def meanwhile(output: torch.Tensor) -> torch.Tensor:
        query = torch.randn(1, 2, 5, 8)
        thread = threading.Thread(target=F.scaled_dot_product_attention, args=(query, query, query))
        thread.start()
        thread.join()
        return output

    inputs = stack_inputs()
    reference = train_step(stack(block=lambda: OneAttention(change=meanwhile)), inputs)
    model = stack(block=lambda: OneAttention(change=meanwhile), policy="attn_only", engine=engine)
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(model, inputs), reference)
        # Two of the model and four of the other thread: it runs in recompute, too.
        assert attention_executions == {CPU_ATTENTION: 2 + 4}


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_four_threads_train_at_once(engine: str) -> None:
    """Each thread has its own scope, tape and generator draws; the census of their common block class is shared."""
    inputs = [stack_inputs(seed) for seed in range(4)]
    references = [train_step(stack(seed), inputs[seed]) for seed in range(4)]
    models = [stack(seed, policy="attn_only", engine=engine) for seed in range(4)]
    found: list[list[support.Tensors]] = [[] for _ in range(4)]
    barrier = threading.Barrier(4)

    def work(seed: int) -> None:
        barrier.wait()
        for _ in range(5):
            found[seed].append(train_step(models[seed], inputs[seed]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        assert len(found[seed]) == 5
        for step in found[seed]:
            assert_same(step, references[seed])


# The recompute takes another path


class TakesAnotherPath(AttentionBlock):
    """Attends over the video and over the text, and goes another way the second time."""

    way = ""

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        again, self.called = getattr(self, "called", False), True
        query, key, value = self.qkv(video).chunk(3, dim=-1)

        def own() -> torch.Tensor:
            return self._attention(query, key, value)

        def cross() -> torch.Tensor:
            return self._attention(query, *self.kv(text).chunk(2, dim=-1))

        if not again:
            return own() + self.self_out(cross())
        if self.way == "other order":
            return cross() + self.self_out(own())
        if self.way == "fewer calls":
            return own()
        return own() + own().detach() + cross() + self.self_out(cross())


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("other order", r"attention call 0 of recompute is not the one of the forward: .* \(1, 2, 6, 8\)"),
        ("fewer calls", r"recompute made 1 attention calls where the forward made 2"),
        ("more calls", r"attention call 1 of recompute is not the one of the forward"),
    ],
)
def test_recompute_on_another_path_raises(way: str, message: str) -> None:
    block = TakesAnotherPath()
    block.way = way
    output = fastac.checkpoint(block, **stack_inputs())
    with pytest.raises(FastacError, match=message):
        support.loss_of(output).backward()


def test_recompute_with_calls_after_the_last_one_raises() -> None:
    class Repeats(OneAttention):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():  # so that nothing is saved by autograd, and torch's own check counts nothing
                for _ in range(getattr(self, "times", 1)):
                    self.attend(*self.heads(video))
            self.times = 2
            return self.out(video)

    output = fastac.checkpoint(Repeats(), **stack_inputs())
    with pytest.raises(FastacError, match="after the 1 attention calls the forward made"):
        support.loss_of(output).backward()


def test_backend_that_changes_before_recompute_raises() -> None:
    """As when attention_backend("...") stood around the forward alone."""
    first, second = custom_attention("backend_of_the_forward"), custom_attention("backend_of_the_recompute")
    block = OneAttention(first)
    output = fastac.checkpoint(block, **stack_inputs())
    block.attend = second
    with pytest.raises(FastacError, match=r"backend_of_the_forward.*the attention backend changed in between"):
        support.loss_of(output).backward()


@pytest.mark.parametrize("difference", ["dtype", "stride"])
def test_other_inputs_in_recompute_raise(difference: str) -> None:
    """An output recorded for other inputs would have another dtype or layout than what comes next expects."""
    again = False

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        nonlocal again
        first, again = not again, True
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        if first:
            return F.scaled_dot_product_attention(query, key, value)
        if difference == "dtype":
            return F.scaled_dot_product_attention(query.double(), key.double(), value.double()).float()
        return F.scaled_dot_product_attention(query.transpose(1, 2).contiguous().transpose(1, 2), key, value)

    output = fastac.checkpoint(OneAttention(attend), **stack_inputs())
    with pytest.raises(FastacError, match="attention call 0 of recompute is not the one of the forward"):
        support.loss_of(output).backward()


# Rows that come later


def late_op(name: str) -> tuple[Attend, Callable[[], None]]:
    """An attention op that does not look like one by its name, without a row; and what registers the row."""
    op = support.define_attention_op(name)

    def register() -> None:
        fastac.register(
            fastac.AttentionOp(backend="tests", namespace=support.NAMESPACE, name=name, layout="bhsd", dropout=None)
        )

    return support.attention_function(op), register


def meet_rows() -> None:
    """Any new kind of region makes fastac look for ops that it does not intercept yet."""
    with torch.no_grad():
        fastac.checkpoint(torch.nn.Linear(2, 2), torch.randn(1, 2))


def test_row_registered_between_forward_and_recompute(attention_executions: Counter[str]) -> None:
    """The region was recorded without this op: recompute must run it, not ask the tape for it."""
    late, register = late_op("mixes_late")

    def both(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value) + late(query, key, value)

    inputs = stack_inputs()
    reference = train_step(stack(block=lambda: OneAttention(both)), inputs)
    model = stack(block=lambda: OneAttention(both), policy="attn_only")

    def register_first(loss: torch.Tensor) -> None:
        register()
        meet_rows()
        assert f"{support.NAMESPACE}::mixes_late" in interception.intercepted()
        loss.backward()

    attention_executions.clear()
    assert_same(train_step(model, inputs, backward=register_first), reference)
    assert attention_executions == {CPU_ATTENTION: 2, f"{support.NAMESPACE}::mixes_late": 4}


def test_row_registered_while_a_region_is_open(attention_executions: Counter[str]) -> None:
    """The region calls the op before and after it is intercepted. It began without it and goes on without it."""
    late, register = late_op("mixes_midway")
    registered = False

    def both(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        nonlocal registered
        output = F.scaled_dot_product_attention(query, key, value) + late(query, key, value)
        if not registered and training_with_fastac:
            registered = True
            register()
            meet_rows()
        return output + late(value, key, query)

    inputs = stack_inputs()
    training_with_fastac = False
    reference = train_step(stack(layers=1, block=lambda: OneAttention(both)), inputs)
    training_with_fastac = True
    model = stack(layers=1, block=lambda: OneAttention(both), policy="attn_only")
    for late_calls in (4, 2, 2):  # recomputed in the first step, saved from the second on
        attention_executions.clear()
        assert_same(train_step(model, inputs), reference)
        assert attention_executions == {CPU_ATTENTION: 1, f"{support.NAMESPACE}::mixes_midway": late_calls}


def test_op_that_was_unknown_is_saved_once_it_is_registered(attention_executions: Counter[str]) -> None:
    """A decision "no row" is cached: register must clear it."""
    attend, register = late_op("mixes_first_unknown")
    name = f"{support.NAMESPACE}::mixes_first_unknown"
    assert registry.classify(torch.ops.fastac_tests.mixes_first_unknown.default) is None
    assert_exact(lambda: OneAttention(attend), attention_executions, {name: 4})  # recomputed: nothing knows it
    register()
    assert registry.classify(torch.ops.fastac_tests.mixes_first_unknown.default) is not None
    # The block's class has a census from before, which this is not held against.
    assert_exact(lambda: OneAttention(attend), attention_executions, {name: 2})


# Somebody else at the same place


def in_a_process_of_its_own(program: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False, timeout=120
    )
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def test_another_package_at_backend_select_is_refused_by_op_name() -> None:
    """The later registration shadows the earlier without a word. In a process of its own: it can not be undone."""
    found = in_a_process_of_its_own(
        """
        import torch, fastac
        library = torch.library.Library("aten", "IMPL")
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
        def somebody_else(keyset, *args, **kwargs):
            return op.redispatch(keyset & below, *args, **kwargs)
        library.impl("_scaled_dot_product_flash_attention_for_cpu", somebody_else, "BackendSelect", with_keyset=True)
        q = torch.randn(1, 2, 8, 8, requires_grad=True)
        sdpa = torch.nn.functional.scaled_dot_product_attention
        try:
            fastac.checkpoint(sdpa, q, q, q)
        except fastac.FastacError as error:
            print("refused:", error)
        fastac.checkpoint(sdpa, q, q, q, policy="full").sum().backward()
        print("full works")
        """
    )
    assert "refused: aten::_scaled_dot_product_flash_attention_for_cpu can not be saved: another package" in found
    assert 'policy="full"' in found
    assert "full works" in found


# No false alarm


def frozen(block: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(block).requires_grad_(False)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_no_alarm_without_gradients(mode: Any, engine: str, attention_executions: Counter[str]) -> None:
    """torch opens no region then, so nothing is recorded and nothing is missing: before the first step, and after."""
    inputs = stack_inputs()
    model = stack(policy="attn_only", engine=engine)
    reference = train_step(stack(), inputs)
    for _ in range(2):
        with mode():
            attention_executions.clear()
            output = model(**inputs)
        assert attention_executions == {CPU_ATTENTION: 4}
        assert_same({"output": output}, {"output": reference["output"]})
        assert_same(train_step(model, inputs), reference)


def test_no_alarm_inside_a_reentrant_checkpoint(attention_executions: Counter[str]) -> None:
    """Its forward runs without gradients, its recompute with them: there the region records and replays."""

    class Reentrant(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = support.AttentionStack(layers=1, policy="attn_only")

        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return torch_checkpoint(self.inner, video, text, use_reentrant=True)

    inputs = stack_inputs()
    reference = train_step(stack(block=lambda: support.AttentionStack(layers=1)), inputs)
    found = train_step(stack(block=Reentrant), inputs)
    assert_same(found, {name.replace(".blocks.", ".inner.blocks."): t for name, t in reference.items()})


def test_no_alarm_in_a_region_without_attention() -> None:
    inputs = {"input": torch.randn(3, 8, requires_grad=True)}

    def feed_forward() -> torch.nn.Module:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Softmax(-1), torch.nn.Linear(16, 8))

    class Checkpointed(torch.nn.Sequential):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return fastac.checkpoint(super().forward, input)

    assert_same(train_step(Checkpointed(*feed_forward()), inputs), train_step(feed_forward(), inputs))


def test_inference_tensors_inside_a_region(attention_executions: Counter[str]) -> None:
    """Attention under inference_mode inside a training region: such tensors have no version to compare."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            guide = F.scaled_dot_product_attention(query, key, value)
        return F.scaled_dot_product_attention(query, key, value) * guide.clone()

    assert_exact(lambda: OneAttention(attend), attention_executions, {CPU_ATTENTION: 4})


# Wrong options


def test_checkpoint_debug_mode_has_its_own_error() -> None:
    """torch replaces the contexts then, and nothing would be saved."""
    inputs = stack_inputs()
    with torch.utils.checkpoint.set_checkpoint_debug_enabled(True), pytest.raises(FastacError, match="debug mode"):
        fastac.checkpoint(AttentionBlock(), **inputs)
    with pytest.raises(FastacError, match="debug mode"):
        fastac.checkpoint(AttentionBlock(), **inputs, debug=True)


def test_checkpoint_debug_mode_works_with_full(capfd: pytest.CaptureFixture[str]) -> None:
    with torch.utils.checkpoint.set_checkpoint_debug_enabled(True):
        output = fastac.checkpoint(AttentionBlock(), **stack_inputs(), policy="full")
        support.loss_of(output).backward()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"use_reentrant": True}, "use_reentrant=True"),
        ({"context_fn": lambda: None}, "context_fn"),
        ({"engine": "fast"}, r"engine='fast'.*tape, sac"),
        ({"debug": True}, "debug mode"),
        ({"policy": "attention"}, r"'attention': no such policy.*attn_only"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("compiled", [False, True])
def test_options_that_can_not_be_honoured(options: dict[str, Any], message: str, compiled: bool) -> None:
    """In a graph of dynamo's as well, which would have no use for them."""

    def run(video: torch.Tensor, text: torch.Tensor) -> Any:
        return fastac.checkpoint(block, video, text, **options)

    block = AttentionBlock()
    torch._dynamo.reset()
    with pytest.raises(FastacError, match=message):
        (torch.compile(run, backend="aot_eager") if compiled else run)(**stack_inputs())


# What torch lets users do around a checkpointed region


def test_early_stop_switched_off(attention_executions: Counter[str]) -> None:
    """The recompute then runs to its end, past the last attention call."""
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        assert_exact(AttentionBlock, attention_executions, {CPU_ATTENTION: 4})


def test_saved_tensors_on_cpu(attention_executions: Counter[str]) -> None:
    with torch.autograd.graph.save_on_cpu():
        assert_exact(AttentionBlock, attention_executions, {CPU_ATTENTION: 4})


def test_deterministic_mode(attention_executions: Counter[str]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert_exact(AttentionBlock, attention_executions, {CPU_ATTENTION: 4})
    finally:
        torch.use_deterministic_algorithms(False)


def test_anomaly_detection(attention_executions: Counter[str]) -> None:
    with torch.autograd.set_detect_anomaly(True):
        assert_exact(AttentionBlock, attention_executions, {CPU_ATTENTION: 4})


def test_tensor_hook_on_the_attention_output(attention_executions: Counter[str]) -> None:
    """A hook in the graph of the forward fires once, with the same gradient. (In recompute it is set again, on a
    graph that nobody walks.)"""
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


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # this op has no batching rule: one call per sample
def test_vmap_inside_a_region(attention_executions: Counter[str]) -> None:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.vmap(F.scaled_dot_product_attention)(query[None], key[None], value[None])[0]

    assert_exact(lambda: OneAttention(attend), attention_executions, {CPU_ATTENTION: 2})


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
    assert attention_executions[CPU_ATTENTION] == 4


def test_gradients_of_inputs_alone(attention_executions: Counter[str]) -> None:
    """A frozen model (guidance, reward through a DiT) still has its attention saved."""
    assert_exact(lambda: frozen(AttentionBlock()), attention_executions, {CPU_ATTENTION: 4})


def test_gradients_of_parameters_alone(attention_executions: Counter[str]) -> None:
    """No input of the first block requires grad, as in every real training."""
    inputs = {name: tensor.detach() for name, tensor in stack_inputs().items()}
    reference = train_step(stack(), inputs)
    attention_executions.clear()
    assert_same(train_step(stack(policy="attn_only"), inputs), reference)
    assert attention_executions == {CPU_ATTENTION: 4}


# Gradients inside the region


class GradientInside(torch.nn.Module):
    """A block that differentiates its own attention, as gradient penalties do, and attends again afterwards."""

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        query = video.unflatten(-1, (2, -1)).transpose(1, 2)
        leaf = query.detach().requires_grad_()
        key = text.unflatten(-1, (2, -1)).transpose(1, 2)
        inner = F.scaled_dot_product_attention(leaf, leaf, leaf) + F.scaled_dot_product_attention(leaf, key, key)
        (gradient,) = torch.autograd.grad(inner.square().sum(), leaf)
        output = F.scaled_dot_product_attention(query, key, key) * gradient.detach()
        return video + output.transpose(1, 2).flatten(2)


@pytest.mark.parametrize("min_kv", [0, 10, 1000])
def test_a_gradient_taken_inside_a_region(min_kv: int) -> None:
    """torch recomputes the region while its forward is still open: that must free nothing and record nothing."""
    inputs = stack_inputs()
    reference = train_step(GradientInside(), inputs)

    def checkpointed(**named: torch.Tensor) -> torch.Tensor:
        return fastac.checkpoint(GradientInside(), *named.values(), policy=fastac.Policy("attn_only", min_kv))

    assert_same(train_step(checkpointed, inputs), reference)
