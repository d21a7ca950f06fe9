"""Every hazard of saving attention outputs, each with the test that fails when its guard is taken out.

The list of them, with those that are tested elsewhere: docs/hazards.md.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_debug_enabled

import fastac
from fastac import FastacError
from tests import support
from tests.engine import cases
from tests.engine.cases import OWN_ALONE, Attend, Change, OneAttention, RegionInside, add_one, assert_exact, twice
from tests.support import CPU_ATTENTION, AttentionBlock, Tensors, custom_attention, stack, stack_inputs, train_step

sdpa = F.scaled_dot_product_attention

# The output is written to

CHANGES = pytest.mark.parametrize("change", cases.CHANGES)


@CHANGES
def test_output_changed_in_place(change: Change) -> None:
    """Not legal without checkpointing either. An alias with its own version counter would not notice."""
    model = stack(policy="attn_only", block=lambda: OneAttention(change=change))
    with pytest.raises(RuntimeError, match=r"in-?place|in place"):
        train_step(model, stack_inputs())


@CHANGES
def test_output_of_a_function_changed_in_place(change: Change, attention_executions: Counter[str]) -> None:
    """Autograd does not guard an output inside an autograd.Function, and outside the user may write it: keep a copy."""
    assert_exact(lambda: OneAttention(custom_attention("written_after"), change), attention_executions)


@pytest.mark.parametrize("how", ["frozen", "no_grad"])
def test_output_outside_the_graph_changed_in_place(how: str, attention_executions: Counter[str]) -> None:
    """No input of the attention requires grad, or gradients are off (a guide, a mask): writing is legal."""

    def attend(*heads: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(how == "frozen"):
            return sdpa(*(one.detach() if how == "frozen" else one for one in heads))

    assert_exact(lambda: OneAttention(attend, add_one), attention_executions)


def test_buffer_reused_inside_a_function(attention_executions: Counter[str]) -> None:
    """What compiled code does to a buffer that its backward does not need, without touching a version counter."""
    custom_attention("buffer_reused")

    class Reuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *heads: torch.Tensor) -> torch.Tensor:
            output, statistics, _ = torch.ops.fastac_tests.buffer_reused(*heads)
            ctx.save_for_backward(*heads, output.clone(), statistics.clone())
            scaled = output * 2
            for buffer in (output, statistics):
                buffer.data.zero_()  # another tensor is here now
            return scaled

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return support.attention_math_backward(2 * grad, *ctx.saved_tensors)

    assert_exact(lambda: OneAttention(Reuses.apply), attention_executions)


# Random numbers


def dropout_attention(name: str, row_says: str | None) -> Attend:
    attend = custom_attention(name, "dropout", row_says)
    return lambda query, key, value: attend(query, key, value, 0.3)


@pytest.mark.parametrize(("policy", "again"), [("attn_only", 0), (OWN_ALONE, 2)], ids=str)
@pytest.mark.parametrize("row_says", ["always", "dropout_p"])
def test_kernel_that_draws(row_says: str, policy: Any, again: int, attention_executions: Counter[str]) -> None:
    """A saved kernel does not run in recompute. Dropout after it, or a kernel that runs again, must draw as before."""
    attend = dropout_attention(f"draws_{row_says}", row_says)
    assert_exact(lambda: AttentionBlock(attend=attend, dropout=0.2), attention_executions, again, policy)


def test_row_that_says_nothing_is_taken_to_draw() -> None:
    assert fastac.AttentionOp(backend="tests", namespace="none", name="none").dropout == "always"


def test_row_that_denies_drawing() -> None:
    """Later draws differ in recompute. The comparison of values notices."""
    attend = dropout_attention("draws_in_secret", None)
    model = stack(policy="attn_only", block=functools.partial(AttentionBlock, attend=attend, dropout=0.2))
    with pytest.raises(FastacError, match="saved by dropout"):
        train_step(model, stack_inputs())


def test_generator_where_torch_does_not_guard_it() -> None:
    """With preserve_rng_state=False torch restores no generator after a recompute. If replay set its state, the next
    noise and timestep would repeat earlier draws."""
    attend = dropout_attention("draws_unguarded", "dropout_p")
    output = fastac.checkpoint(OneAttention(attend), **stack_inputs(), preserve_rng_state=False)
    noise = torch.rand(8)
    support.loss_of(output).backward()
    assert not torch.equal(torch.rand(8), noise)


def test_generator_of_kernels_that_do_not_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading its state takes time in every call, and is illegal while a CUDA graph is captured."""
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
    for _ in range(2):  # a row that was refused is not there afterwards
        with pytest.raises(FastacError, match=r"always_writes.* writes .*'out'"):
            support.register_row("always_writes")


def test_op_that_writes_in_this_call(attention_executions: Counter[str]) -> None:
    """Saved where the argument is not given, refused where it is."""
    attend = custom_attention("may_write", "writes")
    assert_exact(lambda: OneAttention(attend), attention_executions)

    def writing(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return attend(query, key, value, torch.empty_like(query))

    with pytest.raises(FastacError, match=r"may_write.*'out'.* writes"):
        train_step(stack(policy="attn_only", block=lambda: OneAttention(writing)), stack_inputs())


# The recompute takes another path


class TakesAnotherPath(AttentionBlock):
    """Attends over the video and over the text, and goes another way the second time."""

    ways: tuple[str, ...] = ("own", "cross")

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        query, *own = self.qkv(video).chunk(3, dim=-1)
        keys = {"own": own, "cross": self.kv(text).chunk(2, dim=-1), "unseen": own}
        outputs = []
        for way in self.ways:
            with torch.set_grad_enabled(way != "unseen"):  # else autograd saves nothing, and torch's check sees nothing
                outputs.append(self._attention(query, *keys[way]))
        return sum(outputs, torch.zeros(()))


@pytest.mark.parametrize(
    ("ways", "message"),
    [
        (("cross", "own"), "recompute called"),
        (("own",), "recompute ended"),
        (("own", "unseen", "cross"), "recompute called"),
        (("own", "cross", "unseen"), "forward had ended"),
    ],
    ids=["other order", "fewer calls", "more calls", "one more at the end"],
)
def test_recompute_on_another_path(ways: tuple[str, ...], message: str) -> None:
    block = TakesAnotherPath()
    output = fastac.checkpoint(block, **stack_inputs(), early_stop=False)
    block.ways = ways
    with pytest.raises(FastacError, match=message):
        support.loss_of(output).backward()


def test_recompute_with_another_op() -> None:
    block = OneAttention(custom_attention("one_op"))
    other = custom_attention("another_op")
    output = fastac.checkpoint(block, **stack_inputs())
    block.attend = other
    with pytest.raises(FastacError, match=r"another_op.* forward called .*one_op"):
        support.loss_of(output).backward()


# More than one backward


def test_second_backward(attention_executions: Counter[str]) -> None:
    """With retain_graph; without it torch's own error. After a part: "some leaves" in tests/engine/test_outcomes.py."""
    assert_exact(AttentionBlock, attention_executions, backward=twice)
    loss = support.loss_of(fastac.checkpoint(AttentionBlock(), **stack_inputs()))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


@pytest.mark.parametrize("change", [None, add_one])
def test_second_backward_through_outputs_that_nobody_guards(
    change: Change | None, attention_executions: Counter[str]
) -> None:
    """The first recompute writes into what it was given. The second must not be given the same memory."""
    attend = custom_attention("kept_for_two")
    assert_exact(lambda: OneAttention(attend, change), attention_executions, backward=twice)


@pytest.mark.parametrize("retain", [True, False])
def test_outputs_backpropagated_one_by_one(retain: bool, attention_executions: Counter[str]) -> None:
    """Two losses through parts of one block, which share its inputs alone. Each backward recomputes the region."""

    def run(policy: str) -> Tensors:
        torch.manual_seed(0)
        blocks, inputs = torch.nn.ModuleList(OneAttention() for _ in range(2)), stack_inputs()
        left, right = support.run_checkpointed(
            lambda *args: [one(*args) for one in blocks], *inputs.values(), policy=policy
        )
        support.loss_of(left).backward(retain_graph=retain)
        support.loss_of(right).backward()
        return support.gradients(support.leaves_of(blocks, inputs))

    support.assert_alike(run, attention_executions)


# Regions inside regions, kernels inside kernels


@pytest.mark.parametrize(
    ("outer", "inner", "again"),
    [
        # Saved by the outer region, which gives its output to the inner one in recompute as well.
        ("attn_only", "attn_only", 0),
        (OWN_ALONE, OWN_ALONE, 2),
        ("attn_only", OWN_ALONE, 0),
        # The outer recompute runs what it has not saved, and the inner region then records it anew.
        (OWN_ALONE, "attn_only", 2),
    ],
    ids=str,
)
def test_nested_regions(outer: Any, inner: Any, again: int, attention_executions: Counter[str]) -> None:
    assert_exact(lambda: RegionInside(inner), attention_executions, again, outer)


@pytest.mark.parametrize(("policy", "again"), [("attn_only", 0), (OWN_ALONE, 4)], ids=str)
def test_kernel_that_calls_an_op_with_a_row(policy: Any, again: int, attention_executions: Counter[str]) -> None:
    """The op inside is part of the kernel, in forward and where both run again: no call of the region."""
    attend = custom_attention("calls_sdpa", "nested")
    assert_exact(lambda: AttentionBlock(attend=attend), attention_executions, again, policy)


# The dispatcher


def op_before_sdpa() -> tuple[str, Callable[[], torch.nn.Module]]:
    """An op without a row: its name, and a block that calls it in front of torch's attention."""
    name = support.new_name("unknown")
    attend = support.attention_function(support.define_attention_op(name))
    return name, lambda: OneAttention(lambda query, key, value: sdpa(attend(query, key, value), key, value))


def test_op_that_was_unknown_is_saved_once_it_is_registered(attention_executions: Counter[str]) -> None:
    """A decision "no row" is cached, and a block's class is known from before: registering must clear both."""
    name, block = op_before_sdpa()
    assert_exact(block, attention_executions, again=2)
    support.register_row(name)
    assert_exact(block, attention_executions)


def test_row_registered_between_forward_and_backward(attention_executions: Counter[str]) -> None:
    """The forward made no entry for its op, so the recompute must not look for one."""
    name, block = op_before_sdpa()
    expected = train_step(stack(block=block), stack_inputs())

    def register_first(loss: torch.Tensor) -> None:
        support.register_row(name)
        fastac.enable(stack(), blocks="blocks")
        loss.backward()

    attention_executions.clear()
    model = stack(block=block, policy="attn_only")
    support.assert_same(train_step(model, stack_inputs(), backward=register_first), expected)
    assert attention_executions == {f"{support.NAMESPACE}::{name}": 4, CPU_ATTENTION: 2}


def test_registrations_stay() -> None:
    """Removing one crashes another thread that is inside a call."""
    model = stack()
    fastac.enable(model, blocks="blocks")
    fastac.disable(model)
    assert torch._C._dispatch_has_kernel_for_dispatch_key(CPU_ATTENTION, "BackendSelect")


@pytest.mark.usefixtures("rows_as_before")
def test_another_package_at_backend_select() -> None:
    """The later registration replaces the earlier silently."""
    op = support.define_attention_op("taken")
    library = torch.library.Library(support.NAMESPACE, "IMPL")
    below = torch._C._dispatch_keyset_full_after(torch._C.DispatchKey.BackendSelect)
    somebody_else = lambda keyset, *args: op.redispatch(keyset & below, *args)  # noqa: E731
    library.impl("taken", somebody_else, "BackendSelect", with_keyset=True)
    support.register_row("taken")
    block = functools.partial(OneAttention(support.attention_function(op)), **stack_inputs())
    with pytest.raises(FastacError, match=r"fastac_tests::taken .* another package"):
        fastac.checkpoint(block)
    fastac.checkpoint(block, policy="full").sum().backward()
    library._destroy()


def test_views_in_the_forward_alone(attention_executions: Counter[str]) -> None:
    """Parameter wrappers do this. torch's selective checkpointing then returns wrong tensors on replay."""
    calls = []

    def change(output: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) % 2:
            torch.empty(3).as_strided((1,), (1,)).view(1)
        return output

    assert_exact(lambda: OneAttention(change=change), attention_executions)


def test_higher_order_op_inside_a_region(attention_executions: Counter[str]) -> None:
    """torch's selective checkpointing has no rule for this one."""
    torch._dynamo.reset()

    def change(output: torch.Tensor) -> torch.Tensor:
        return torch.cond(output.sum() > 1e9, torch.sin, torch.cos, (output,))

    block = functools.partial(OneAttention, change=change)
    train_step(stack(block=block, policy="attn_only"), stack_inputs())  # in which dynamo traces it
    assert_exact(block, attention_executions)


# No false alarm


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_alarm_without_gradients(mode: Any, attention_executions: Counter[str]) -> None:
    """No region opens, before the first step or after it. Such a forward must not count as the first region."""
    inputs = stack_inputs()
    model = stack(policy="attn_only")
    reference = train_step(stack(), inputs)
    for _ in range(2):
        with mode():
            attention_executions.clear()
            output = model(**inputs)
        assert attention_executions == {CPU_ATTENTION: 4}
        assert torch.equal(output, reference["output"])
        support.assert_same(train_step(model, inputs), reference)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_around_a_region_that_is_not_of_fastac(reentrant: bool) -> None:
    """It runs the region again in backward, attention included, so saving in the region has no effect: an error."""
    inner = stack(policy="attn_only")
    with pytest.raises(fastac.PolicyNotAppliedError, match="backward"):
        train_step(lambda **args: torch_checkpoint(inner, *args.values(), use_reentrant=reentrant), stack_inputs())


def test_checkpoint_of_the_block_s_own() -> None:
    """It would run a saved attention again in backward: an error, at any step."""
    attend = [sdpa]
    model = stack(policy="attn_only", block=lambda: AttentionBlock(attend=lambda *heads: attend[0](*heads)))
    train_step(model, stack_inputs())
    attend[0] = functools.partial(torch_checkpoint, sdpa, use_reentrant=False)
    with pytest.raises(fastac.PolicyNotAppliedError, match=r"scaled_dot.*own"):
        model(**stack_inputs())


def test_no_alarm_in_a_region_without_attention(caplog: pytest.LogCaptureFixture) -> None:
    """A feed-forward that the user checkpoints, as well as blocks that attend."""
    torch.manual_seed(0)
    block, feed_forward = AttentionBlock(), torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Softmax(-1))

    def run(policy: str) -> Tensors:
        region = functools.partial(support.run_checkpointed, policy=policy)
        return train_step(lambda video, text: region(feed_forward, region(block, video, text)), stack_inputs())

    support.assert_alike(run)
    assert not caplog.records


def test_inference_tensors_inside_a_region(attention_executions: Counter[str]) -> None:
    """Attention under inference_mode inside a training region: such tensors have no version to compare."""

    def attend(*heads: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            guide = sdpa(*heads)
        return sdpa(*heads) * guide.clone()

    assert_exact(lambda: OneAttention(attend), attention_executions)


def test_checkpoint_debug_mode() -> None:
    """It would replace the contexts, and nothing would be saved."""
    inputs = stack_inputs()
    with pytest.raises(ValueError, match="debug=True"):
        fastac.checkpoint(AttentionBlock(), **inputs, debug=True)
    with set_checkpoint_debug_enabled(True):
        with pytest.raises(ValueError, match="debug=True"):
            fastac.checkpoint(AttentionBlock(), **inputs)
        support.loss_of(fastac.checkpoint(AttentionBlock(), **inputs, policy="full")).backward()


# Autocast


def test_autocast_below_the_observer() -> None:
    """Under a dispatch mode torch switches autocast off, so a kernel in Python would compute in another dtype."""
    states: list[bool] = []

    @torch.library.custom_op(support.new_name("fastac_tests::mixing"), mutates_args=())
    def mix(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        states.append(torch.is_autocast_enabled("cpu"))
        return x @ weight

    weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(1))

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = sdpa(torch.tanh(query), key, value)
        mixed = mix(output.detach(), weight.sin())
        with torch.autocast("cpu", enabled=False):
            mixed = mix(mixed.float(), weight)
        return torch.tanh(output * mixed)

    def run(policy: str) -> Tensors:
        states.clear()
        with torch.autocast("cpu", torch.bfloat16):
            found = train_step(
                functools.partial(support.run_checkpointed, region, policy=policy), support.attention_inputs(7, 12)
            )
        assert states == [True, False] * (1 if policy == "none" else 2), "in the forward and in the recompute"
        return found

    support.assert_alike(run)


# Threads


def test_attention_of_another_thread(attention_executions: Counter[str]) -> None:
    """A second thread runs attention of its own (validation, a data loader's encoder) while a region is open."""

    def meanwhile(output: torch.Tensor) -> torch.Tensor:
        query = torch.randn(1, 2, 5, 8)
        thread = threading.Thread(target=sdpa, args=(query, query, query))
        thread.start()
        thread.join()
        return output

    assert_exact(lambda: OneAttention(change=meanwhile), attention_executions, again=2)  # those of the other thread


# Ops that come late


def test_an_op_that_is_defined_anew_with_other_arguments(attention_executions: Counter[str]) -> None:
    """A notebook cell that runs again. Calls must be read by the new schema, or random draws are missed."""
    support.register_row("anew", "dropout_p")

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *options: Any) -> Any:
        support.executions["anew"] += 1
        return *support.attention_math(query, key, value), torch.rand(3)[:0].clone()

    for arguments, *options in (("float dropout_p", 0.3), ("bool causal, float dropout_p", False, 0.3)):
        schema = f"anew(Tensor query, Tensor key, Tensor value, {arguments}) -> (Tensor, Tensor, Tensor)"
        library = support.define_op(schema, kernel)
        fastac.enable(stack(), blocks="blocks")
        attend = support.attention_function(lambda *heads: torch.ops.fastac_tests.anew(*heads))
        block = functools.partial(AttentionBlock, dropout=0.2)
        assert_exact(lambda: block(attend=lambda *heads: attend(*heads, *options)), attention_executions)  # noqa: B023
        library._destroy()
