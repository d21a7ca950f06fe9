"""Every hazard of saving attention outputs, each with the test that fails when its guard is taken out.

The list of them, with those that are tested elsewhere: docs/how-it-works.md#hazards.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import textwrap
import threading
import uuid
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from fastac import FastacError
from fastac.engine import interception
from tests import support
from tests.engine import cases
from tests.engine.cases import OWN_ALONE, Attend, Change, OneAttention, add_one, assert_exact, twice
from tests.support import CPU_ATTENTION, AttentionBlock, assert_same, custom_attention, stack, stack_inputs, train_step

CHANGES = pytest.mark.parametrize("change", [add_one, cases.add_one_to_a_view, cases.add_one_without_grad])


def own(name: str) -> str:
    return f"{support.NAMESPACE}::{name}"


# The output is written to


@CHANGES
def test_output_changed_in_place(change: Change) -> None:
    """Not legal without checkpointing either. An alias with a version counter of its own would not notice."""
    model = stack(policy="attn_only", block=lambda: OneAttention(change=change))
    with pytest.raises(RuntimeError, match=r"in-?place|in place"):
        train_step(model, stack_inputs())


@CHANGES
def test_output_of_a_function_changed_in_place(change: Change, attention_executions: Counter[str]) -> None:
    """Inside an autograd.Function nobody guards the output, and outside it is the user's: a copy must be kept."""
    attend = custom_attention("written_after")
    assert_exact(lambda: OneAttention(attend, change), attention_executions, {own("written_after"): 2})


@pytest.mark.parametrize("how", ["frozen", "no_grad"])
def test_output_outside_the_graph_changed_in_place(how: str, attention_executions: Counter[str]) -> None:
    """No input of the attention requires grad, or gradients are off (a guide, a mask): writing is legal."""

    class Unguarded(OneAttention):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            if how == "frozen":
                output = self.attend(*(tensor.detach() for tensor in self.heads(video)))
            else:
                with torch.no_grad():
                    output = self.attend(*self.heads(video))
            output += self.out.bias.view(2, 1, -1)
            return self.out(output.transpose(1, 2).flatten(2))

    assert_exact(Unguarded, attention_executions, {CPU_ATTENTION: 2})


def test_buffer_reused_inside_a_function(attention_executions: Counter[str]) -> None:
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
                buffer.data.zero_()  # another tensor is here now
            return scaled

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return support.attention_math_backward(2 * grad, *ctx.saved_tensors)

    assert_exact(lambda: OneAttention(Reuses.apply), attention_executions, {own("buffer_reused"): 2})


# Random numbers


def dropout_attention(name: str, row_says: str | None) -> Attend:
    attend = custom_attention(name, "dropout", row_says)
    return lambda query, key, value: attend(query, key, value, 0.3)


@pytest.mark.parametrize(("policy", "executions"), [("attn_only", 4), (OWN_ALONE, 6)], ids=str)
@pytest.mark.parametrize("row_says", ["always", "dropout_p"])
def test_kernel_that_draws(row_says: str, policy: Any, executions: int, attention_executions: Counter[str]) -> None:
    """A saved kernel does not run in recompute; what comes after it must draw the numbers it drew in forward: a
    dropout, and a kernel that is recomputed."""
    attend = dropout_attention(f"draws_{row_says}", row_says)
    expected = {own(f"draws_{row_says}"): executions}
    assert_exact(lambda: AttentionBlock(attend=attend, dropout=0.2), attention_executions, expected, policy)


def test_row_that_says_nothing_is_taken_to_draw() -> None:
    assert fastac.AttentionOp(backend="tests", namespace="none", name="none").dropout == "always"


def test_row_that_denies_drawing() -> None:
    """What draws after the kernel would draw other numbers in recompute: noticed in the first region of a kind."""
    attend = dropout_attention("draws_in_secret", None)
    model = stack(policy="attn_only", block=functools.partial(AttentionBlock, attend=attend, dropout=0.2))
    with pytest.raises(FastacError, match=r"draws_in_secret.* drew .*dropout=None"):
        train_step(model, stack_inputs())


def test_generator_where_torch_does_not_guard_it() -> None:
    """With preserve_rng_state=False torch restores nothing after a recompute: a state that replay sets would stay, and
    the next noise, the next timestep would be drawn a second time."""
    attend = dropout_attention("draws_unguarded", "dropout_p")
    output = fastac.checkpoint(OneAttention(attend), **stack_inputs(), preserve_rng_state=False)
    noise = torch.rand(8)
    support.loss_of(output).backward()
    assert not torch.equal(torch.rand(8), noise)


def test_generator_of_kernels_that_do_not_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading its state costs time in every call, and on CUDA it is illegal while a graph is captured."""
    attend = custom_attention("does_not_draw", "dropout", "dropout_p")
    get_rng_state = torch.get_rng_state
    reads = []
    for module in (torch, torch.random):
        monkeypatch.setattr(module, "get_rng_state", lambda: reads.append(1) or get_rng_state())

    def reads_of(policy: str) -> int:
        model = stack(policy=policy, block=lambda: OneAttention(attend))
        for _ in range(2):  # the first region of a kind is watched
            reads.clear()
            train_step(model, stack_inputs())
        return len(reads)

    assert reads_of("attn_only") == reads_of("torch") > 0  # torch reads it once per region


# Ops that write


def test_op_that_always_writes() -> None:
    """On replay the write would be missing, with wrong gradients: refused when its row is registered."""
    support.define_attention_op("always_writes", "always_writes")
    row = fastac.AttentionOp(backend="tests", namespace=support.NAMESPACE, name="always_writes")
    for _ in range(2):  # a row that was refused is not there afterwards
        with pytest.raises(FastacError, match=r"always_writes.* writes .*'out'"):
            fastac.register(row)


def test_op_that_writes_in_this_call(attention_executions: Counter[str]) -> None:
    """Saved where the argument is not given, refused where it is."""
    attend = custom_attention("may_write", "writes")
    assert_exact(lambda: OneAttention(attend), attention_executions, {own("may_write"): 2})

    def writing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        written = torch.empty_like(query)
        return attend(query, key, value, written) + written

    with pytest.raises(FastacError, match=r"may_write.*'out'.* writes"):
        train_step(stack(policy="attn_only", block=lambda: OneAttention(writing)), stack_inputs())


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

        def unseen() -> torch.Tensor:
            """Autograd saves nothing of it, and torch's own check counts nothing."""
            with torch.no_grad():
                return own() * 0

        if self.way == "one more at the end":
            return own() + self.self_out(cross()) + (unseen() if again else 0)
        if not again:
            return own() + self.self_out(cross())
        if self.way == "other order":
            return cross() + self.self_out(own())
        if self.way == "fewer calls":
            return own()
        return own() + unseen() + self.self_out(cross())


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("other order", "recompute called"),
        ("fewer calls", "recompute ended"),
        ("more calls", "recompute called"),
        ("one more at the end", "forward had ended"),
    ],
)
def test_recompute_on_another_path(way: str, message: str) -> None:
    block = TakesAnotherPath()
    block.way = way
    output = fastac.checkpoint(block, **stack_inputs(), early_stop=False)
    with pytest.raises(FastacError, match=message):
        support.loss_of(output).backward()


def test_recompute_with_other_strides() -> None:
    """As a cache gives them, which the forward filled: the message says in what two calls differ."""
    calls: list[int] = []

    def attend(*heads: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return F.scaled_dot_product_attention(*(one.contiguous() if len(calls) > 1 else one for one in heads))

    output = fastac.checkpoint(OneAttention(attend), **stack_inputs())
    with pytest.raises(FastacError, match=r"with strides \(384, 192.* with strides \(1152, 8.*use_cache=True"):
        support.loss_of(output).backward()


# More than one backward


def test_second_backward(attention_executions: Counter[str]) -> None:
    """With retain_graph, through everything and after a part (adaptive loss weights); without it torch's own error."""
    assert_exact(AttentionBlock, attention_executions, {CPU_ATTENTION: 4}, backward=twice)

    def run(policy: str) -> support.Tensors:
        model, inputs = stack(policy=policy), stack_inputs()
        leaves = support.leaves_of(model, inputs)
        loss = support.loss_of(model(**inputs))
        (first,) = torch.autograd.grad(loss, [model.blocks[0].self_out.weight], retain_graph=True)
        found = {"first": first, **dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))}
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
        return found

    reference = run("none")
    attention_executions.clear()
    assert_same(run("attn_only"), reference)
    assert attention_executions == {CPU_ATTENTION: 4}


@pytest.mark.parametrize("change", [None, add_one])
def test_second_backward_through_outputs_that_nobody_guards(
    change: Change | None, attention_executions: Counter[str]
) -> None:
    """The first recompute writes into what it was given. The second must not be given the same memory."""
    attend = custom_attention("kept_for_two")
    expected = {own("kept_for_two"): 2}
    assert_exact(lambda: OneAttention(attend, change), attention_executions, expected, backward=twice)


class TwoOutputs(torch.nn.Module):
    """A region whose two outputs share nothing but its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = OneAttention(), OneAttention()

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(video, text), self.right(video, text)


@pytest.mark.parametrize("retain", [True, False])
def test_outputs_backpropagated_one_by_one(retain: bool, attention_executions: Counter[str]) -> None:
    """Two losses through parts of one block. Each backward recomputes the region, and finds both outputs."""
    inputs = stack_inputs()

    def run(policy: str) -> support.Tensors:
        torch.manual_seed(0)
        block = TwoOutputs()
        left, right = support.run_checkpointed(block, **inputs, policy=policy)
        leaves = support.leaves_of(block, inputs)
        for tensor in leaves.values():
            tensor.grad = None
        support.loss_of(left).backward(retain_graph=retain)
        support.loss_of(right).backward()
        return support.gradients(leaves)

    reference = run("none")
    attention_executions.clear()
    assert_same(run("attn_only"), reference)
    assert attention_executions == {CPU_ATTENTION: 2}


# Regions inside regions, kernels inside kernels


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
        (OWN_ALONE, OWN_ALONE, 8),
        ("attn_only", OWN_ALONE, 6),
        # The outer recompute runs what it has not saved, and the inner region then records it anew.
        (OWN_ALONE, "attn_only", 6),
    ],
    ids=str,
)
def test_nested_regions(outer: Any, inner: Any, executions: int, attention_executions: Counter[str]) -> None:
    assert_exact(lambda: RegionInside(inner), attention_executions, {CPU_ATTENTION: executions}, policy=outer)


@pytest.mark.parametrize(("policy", "executions"), [("attn_only", 4), (OWN_ALONE, 6)], ids=str)
def test_kernel_that_calls_an_op_with_a_row(policy: Any, executions: int, attention_executions: Counter[str]) -> None:
    """The op inside is part of the kernel, in forward and where the kernel is run again: no call of the region."""
    attend = custom_attention("calls_sdpa", "nested")
    expected = {own("calls_sdpa"): executions, CPU_ATTENTION: executions}
    assert_exact(lambda: AttentionBlock(attend=attend), attention_executions, expected, policy=policy)


# The dispatcher


def test_op_that_was_unknown_is_saved_once_it_is_registered(attention_executions: Counter[str]) -> None:
    """A decision "no row" is cached, and a block's class is known from before: registering must clear both."""
    name = f"mixer_{uuid.uuid4().hex[:8]}"
    attend = support.attention_function(support.define_attention_op(name))

    def both(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(attend(query, key, value), key, value)

    assert_exact(lambda: OneAttention(both), attention_executions, {own(name): 4, CPU_ATTENTION: 2})
    fastac.register(
        fastac.AttentionOp(backend="tests", namespace=support.NAMESPACE, name=name, layout="bhsd", dropout=None)
    )
    assert_exact(lambda: OneAttention(both), attention_executions, {own(name): 2, CPU_ATTENTION: 2})


def test_row_registered_between_forward_and_backward(attention_executions: Counter[str]) -> None:
    """The forward made no entry for its op, so that the recompute must not ask for one."""
    name = f"between_{uuid.uuid4().hex[:8]}"
    attend = support.attention_function(support.define_attention_op(name))

    def both(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(attend(query, key, value), key, value)

    def register_first(loss: torch.Tensor) -> None:
        fastac.register(
            fastac.AttentionOp(backend="tests", namespace=support.NAMESPACE, name=name, layout="bhsd", dropout=None)
        )
        interception.install()
        loss.backward()

    inputs = stack_inputs()
    expected = train_step(stack(block=lambda: OneAttention(both)), inputs)
    attention_executions.clear()
    model = stack(block=lambda: OneAttention(both), policy="attn_only")
    assert_same(train_step(model, inputs, backward=register_first), expected)
    assert attention_executions == {own(name): 4, CPU_ATTENTION: 2}


def test_registrations_stay() -> None:
    """Taking them off is an internal assertion of the dispatcher in another thread."""
    model = stack()
    fastac.enable(model, blocks="blocks")
    fastac.disable(model)
    op = f"aten::{CPU_ATTENTION.rpartition('::')[2]}"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(op, "BackendSelect")


def test_another_package_at_backend_select() -> None:
    """The later registration shadows the earlier without a word. In a process of its own: it cannot be undone."""
    program = """
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
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False, timeout=240
    )
    assert "refused: aten::_scaled_dot_product_flash_attention_for_cpu" in run.stdout, run.stderr
    assert "another package" in run.stdout
    assert "full works" in run.stdout


def test_views_in_the_forward_alone(attention_executions: Counter[str]) -> None:
    """What wrappers of parameters do: torch's selective checkpointing hands out wrong tensors on replay."""
    calls = []

    def change(output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) % 2:
            torch.empty(3).as_strided((1,), (1,)).view(1)
        return output

    assert_exact(lambda: OneAttention(change=change), attention_executions, {CPU_ATTENTION: 2})


def test_higher_order_op_inside_a_region(attention_executions: Counter[str]) -> None:
    """One without a rule of torch's selective checkpointing. dynamo traces it in the first step."""
    torch._dynamo.reset()

    def change(output: torch.Tensor) -> torch.Tensor:
        return torch.cond(output.sum() > 1e9, torch.sin, torch.cos, (output,))

    inputs, block = stack_inputs(), functools.partial(OneAttention, change=change)
    reference = train_step(stack(block=block), inputs)
    model = stack(block=block, policy="attn_only")
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(model, inputs), reference)
    assert attention_executions == {CPU_ATTENTION: 2}


# No false alarm


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_alarm_without_gradients(mode: Any, attention_executions: Counter[str]) -> None:
    """torch opens no region then. Before the first step, and after; it must not count as the first region either."""
    inputs = stack_inputs()
    model = stack(policy="attn_only")
    reference = train_step(stack(), inputs)
    for _ in range(2):
        with mode():
            attention_executions.clear()
            output = model(**inputs)
        assert attention_executions == {CPU_ATTENTION: 4}
        assert_same({"output": output}, {"output": reference["output"]})
        assert_same(train_step(model, inputs), reference)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around_a_region_that_is_not_of_fastac(reentrant: bool) -> None:
    """It runs the region again in backward, attention too: the region alone cannot keep what it was to save."""

    class Around(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = support.AttentionStack(layers=2, policy="attn_only")

        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return torch_checkpoint(self.inner, video, text, use_reentrant=reentrant)

    with pytest.raises(fastac.PolicyNotAppliedError, match="backward"):
        train_step(stack(block=Around), stack_inputs())


def test_checkpoint_of_the_block_s_own() -> None:
    """Around a saved attention: torch would run that again in backward, and nobody would be told. At any step."""
    attend = [F.scaled_dot_product_attention]
    model = stack(policy="attn_only", block=lambda: AttentionBlock(attend=lambda *qkv: attend[0](*qkv)))
    train_step(model, stack_inputs())
    attend[0] = functools.partial(torch_checkpoint, attend[0], use_reentrant=False)
    with pytest.raises(fastac.PolicyNotAppliedError, match=r"scaled_dot.*own"):
        model(**stack_inputs())


def test_no_alarm_in_a_region_without_attention(caplog: pytest.LogCaptureFixture) -> None:
    """A feed-forward of the user's own, given to fastac.checkpoint beside blocks that attend."""
    torch.manual_seed(0)
    block, feed_forward = AttentionBlock(), torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Softmax(-1))

    def step(video: torch.Tensor, text: torch.Tensor, run: Any = fastac.checkpoint) -> torch.Tensor:
        return run(feed_forward, run(block, video, text))

    expected = train_step(functools.partial(step, run=lambda function, *args: function(*args)), stack_inputs())
    for _ in range(2):
        assert_same(train_step(step, stack_inputs()), expected)
    assert not caplog.records


def test_inference_tensors_inside_a_region(attention_executions: Counter[str]) -> None:
    """Attention under inference_mode inside a training region: such tensors have no version to compare."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            guide = F.scaled_dot_product_attention(query, key, value)
        return F.scaled_dot_product_attention(query, key, value) * guide.clone()

    assert_exact(lambda: OneAttention(attend), attention_executions, {CPU_ATTENTION: 4})


def test_checkpoint_debug_mode(capfd: pytest.CaptureFixture[str]) -> None:
    """torch replaces the contexts then, and nothing would be saved."""
    inputs = stack_inputs()
    with torch.utils.checkpoint.set_checkpoint_debug_enabled(True), pytest.raises(ValueError, match="debug=True"):
        fastac.checkpoint(AttentionBlock(), **inputs)
    with pytest.raises(ValueError, match="debug=True"):
        fastac.checkpoint(AttentionBlock(), **inputs, debug=True)
    with torch.utils.checkpoint.set_checkpoint_debug_enabled(True):
        support.loss_of(fastac.checkpoint(AttentionBlock(), **inputs, policy="full")).backward()


# Autocast


def test_autocast_below_the_observer() -> None:
    """Below a dispatch mode torch leaves autocast out: a kernel in Python would compute in another dtype there."""
    states: list[bool] = []

    @torch.library.custom_op(f"fastac_tests::mixing_{uuid.uuid4().hex[:8]}", mutates_args=())
    def mix(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        states.append(torch.is_autocast_enabled("cpu"))
        return x @ weight

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        grad = grad.float()
        of_weight = x.float().flatten(0, -2).T @ grad.flatten(0, -2)
        return (grad @ weight.float().T).to(x.dtype), of_weight.to(weight.dtype)

    mix.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = mix(F.scaled_dot_product_attention(torch.tanh(query), key, value), weight.sin())
        with torch.autocast("cpu", enabled=False):
            output = mix(output.float(), weight)
        return torch.tanh(output)

    def step(function: Any) -> support.Tensors:
        states.clear()
        with torch.autocast("cpu", torch.bfloat16):
            return train_step(function, support.attention_inputs(7, 12))

    reference = step(region)
    for _ in range(2):
        assert_same(step(functools.partial(fastac.checkpoint, region)), reference)
        assert states == [True, False, True, False], "in the forward and in the recompute"


# Threads


def test_attention_of_another_thread(attention_executions: Counter[str]) -> None:
    """A second thread runs attention of its own (validation, a data loader's encoder) while a region is open."""

    def meanwhile(output: torch.Tensor) -> torch.Tensor:
        query = torch.randn(1, 2, 5, 8)
        thread = threading.Thread(target=F.scaled_dot_product_attention, args=(query, query, query))
        thread.start()
        thread.join()
        return output

    # Two of the model and four of the other thread: it runs in recompute, too.
    assert_exact(lambda: OneAttention(change=meanwhile), attention_executions, {CPU_ATTENTION: 2 + 4})


def test_threads_that_train_at_once() -> None:
    """Each thread has its own tape and generator draws; what is known about their block class is shared."""
    inputs = [stack_inputs(seed) for seed in range(3)]
    references = [train_step(stack(seed), inputs[seed]) for seed in range(3)]
    models = [stack(seed, policy="attn_only") for seed in range(3)]
    found: list[list[support.Tensors]] = [[] for _ in range(3)]
    barrier = threading.Barrier(3)

    def work(seed: int) -> None:
        barrier.wait()
        for _ in range(4):
            found[seed].append(train_step(models[seed], inputs[seed]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(3):
        assert len(found[seed]) == 4
        for step in found[seed]:
            assert_same(step, references[seed])


def _define(name: str, arguments: str, runs: list[bool]) -> torch.library.Library:
    """An attention op that draws one random number when it runs."""
    library = torch.library.Library(support.NAMESPACE, "FRAGMENT")
    library.define(f"{name}(Tensor query, Tensor key, Tensor value{arguments}) -> Tensor")

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any) -> torch.Tensor:
        runs.append(True)
        return support.attention_math(query, key, value)[0] * (torch.rand(()) + 1)

    library.impl(name, kernel, "CPU")
    return library


def _function(name: str, *options: Any) -> Any:
    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return getattr(torch.ops.fastac_tests, name)(query, key, value, *options).clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad, grad, grad

    return Attention.apply


def test_an_op_that_is_defined_anew_with_other_arguments() -> None:
    """A cell of a notebook that runs again: its calls are read by the new schema, else generators go unnoticed."""
    fastac.register(
        fastac.AttentionOp(
            backend="tests", namespace=support.NAMESPACE, name="anew", layout="bhsd", dropout="dropout_p"
        )
    )

    def compare(arguments: str, *options: Any, function: Callable[..., torch.Tensor]) -> None:
        runs: list[bool] = []
        library = _define("anew", arguments, runs)
        attention = _function("anew", *options)
        gradients = []
        for checkpoint in (lambda call, *args: call(*args), fastac.checkpoint):
            torch.manual_seed(0)
            query = torch.randn(1, 2, 8, 4, requires_grad=True)
            checkpoint(function, query, attention).sum().backward()
            gradients.append(query.grad)
        assert torch.equal(*gradients)
        assert len(runs) == 2
        library._destroy()

    def before(query: torch.Tensor, attention: Any) -> torch.Tensor:
        return F.dropout(attention(torch.tanh(query), query, query), 0.3)

    def after(query: torch.Tensor, attention: Any) -> torch.Tensor:
        return F.dropout(attention(torch.tanh(query), query, query), 0.4)

    compare(", float dropout_p", 0.3, function=before)
    compare(", bool causal, float dropout_p", False, 0.3, function=after)


def test_an_op_that_is_defined_without_an_import() -> None:
    """Between two steps. The first region misses it; the next one, which is watched for that, saves it."""
    fastac.register(
        fastac.AttentionOp(backend="tests", namespace=support.NAMESPACE, name="late", layout="bhsd", dropout="always")
    )
    attend = [F.scaled_dot_product_attention]

    def function(query: torch.Tensor) -> torch.Tensor:
        return torch.tanh(attend[0](torch.tanh(query), query, query))

    def step() -> None:
        fastac.checkpoint(function, torch.randn(1, 2, 8, 4, requires_grad=True)).sum().backward()

    step()
    runs: list[bool] = []
    library = _define("late", "", runs)
    attend[0] = _function("late")
    found = []
    for _ in range(3):
        runs.clear()
        step()
        found.append(len(runs))
    assert found == [2, 1, 1]
    library._destroy()
