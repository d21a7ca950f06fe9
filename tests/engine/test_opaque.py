"""make_visible: autograd.Functions over kernels that the dispatcher does not see, saved in place."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import sys
import types
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fastac
from fastac import FastacError, OpaqueFunction, Policy
from fastac.backends import opaque
from tests import support
from tests.engine.cases import OneAttention, twice
from tests.marks import needs_torch
from tests.support import assert_region, train_step

KERNEL = "the test's opaque kernel"
PLAIN: dict[str, Any] = {"layout": "bhsd", "dropout": None}


def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention that reaches no dispatcher op of its own name."""
    support.executions[KERNEL] += 1
    return support.attention_math(query, key, value)


def function(**options: Any) -> Any:
    """A new Function over the kernel: two outputs, and for backward inputs, an extra tensor, None and an output.

    options: draws, whether its kernel always drops out; view, whether its output is one; none, whether one is None.
    """

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, settings: Any = None, dropout_p: Any = 0.0) -> Any:
            with torch.no_grad():
                output, statistics = kernel(q, k, v)
                if dropout_p or options.get("draws"):
                    output = output * (torch.rand_like(output) > 0.3)
            statistics = statistics + q.new_zeros(())  # outside no_grad, so that marking it matters
            half = q * 0.5  # as a quantized kernel keeps for backward: as large as the query
            ctx.save_for_backward(q, k, v, None, statistics, output, half)
            ctx.settings = settings
            ctx.mark_non_differentiable(statistics)
            ctx.set_materialize_grads(False)
            if options.get("view"):
                output = output.transpose(1, 2).contiguous().transpose(1, 2)
            return (output, None, statistics) if options.get("none") else (output, statistics)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor, *others: Any) -> Any:
            q, k, v, nothing, statistics, output, half = ctx.saved_tensors
            assert nothing is None
            assert not any(isinstance(one, torch.Tensor) for one in others), "they are not materialized"
            assert ctx.settings in (None, "kept on the context", 10, 3)
            assert torch.equal(half, q * 0.5)
            return (*support.attention_math_backward(grad, q, k, v, output, statistics), None, None)

    Attention.__qualname__ = support.new_name("Attention")
    return Attention


class Simple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        output, statistics = kernel(q, k, v)
        ctx.save_for_backward(q, k, v, output, statistics)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return support.attention_math_backward(grad, *ctx.saved_tensors)


def block(attention: Callable[..., Any], *rest: Any) -> Callable[..., Any]:
    """A region around one call, and a dropout. rest: further arguments of it."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output, *others = attention(torch.tanh(query), torch.tanh(key), value, *rest)
        assert not any(isinstance(other, torch.Tensor) and other.requires_grad for other in others)
        return torch.nn.functional.dropout(torch.tanh(output), 0.2)

    return attend


def inputs() -> dict[str, torch.Tensor]:
    return support.attention_inputs(12, 10)


def assert_visible(
    made: Any, region: Callable[..., Any], counted: Counter[str], data: Any = None, **options: Any
) -> None:
    """Made visible, its gradients are those of before, in two backwards, and its kernel does not run again."""
    fastac.make_visible(made, **PLAIN | options)
    assert_region(region, data or inputs(), counted, backward=twice)


# Exact, and run once


@pytest.mark.parametrize("way", [{}, {"view": True}, {"none": True}], ids=["plain", "a view", "None among the outputs"])
def test_executions_and_gradients(way: Any, counted: Counter[str]) -> None:
    made = function(**way)
    region = block(made.apply, "kept on the context")  # captured before it is made visible, as libraries do
    assert_visible(made, region, counted, key="k")
    for policy in ("torch", "full"):
        assert_region(region, inputs(), counted, again=1, policy=policy)


@pytest.mark.parametrize("frozen", ["query", "value"])
def test_inputs_that_do_not_require_grad(frozen: str, counted: Counter[str]) -> None:
    made, data = function(), inputs()
    data[frozen].requires_grad_(False)
    assert_visible(made, block(made.apply), counted, data)


@pytest.mark.parametrize("dropout", ["dropout_p", "always"])
def test_dropout_in_the_kernel_and_after_it(dropout: str, counted: Counter[str]) -> None:
    made = function(draws=dropout == "always")
    assert_visible(made, block(made.apply, None, 0.3), counted, dropout=dropout)


class WithoutKernel(torch.autograd.Function):
    """Doubles a tensor."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any = None) -> Any:
        ctx.save_for_backward(q)
        return q * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad * 2, None


class Chooses(torch.autograd.Function):
    """Reads the keys that it is told to."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, blocks: Any) -> Any:
        ctx.save_for_backward(k, blocks)
        return q * k[..., blocks, :].sum(-2, keepdim=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        k, blocks = ctx.saved_tensors
        return grad * k[..., blocks, :].sum(-2, keepdim=True), None, None, None


def test_a_choice_of_blocks_is_not_made_again() -> None:
    """An input of whole numbers that is saved for backward is kept, the recomputed one not used."""
    choices = itertools.cycle([torch.tensor([0, 3, 5]), torch.tensor([1, 2, 9])])
    region = block(lambda *heads: (Chooses.apply(*heads, next(choices)),))
    reference = train_step(region, inputs())
    next(choices)
    fastac.make_visible(Chooses, **PLAIN)
    support.assert_same(train_step(functools.partial(fastac.checkpoint, region), inputs()), reference)


@pytest.mark.parametrize("retain", [True, False])
def test_a_gradient_that_is_taken_inside_the_region(retain: bool, counted: Counter[str]) -> None:
    """In recompute it meets a context that no forward ran with, and its graph is gone: what the forward had set on the
    context is not, until the step is over."""
    made = type("KeepsInputsHere", (Parent,), {})
    held: list[weakref.ref[Any]] = []

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inner = query.detach().requires_grad_()
            output = made.apply(inner, key, value)
            held.append(weakref.ref(output))
            (step,) = torch.autograd.grad(output.square().sum(), inner, retain_graph=retain)
        return torch.tanh(made.apply(query - 0.1 * step, key, value))

    assert_visible(made, region, counted)
    gc.collect()
    assert not any(reference() is not None for reference in held)


# The number of keys


@pytest.mark.parametrize(
    ("named", "settings"),
    [
        ({"key": "k", "layout": "bhsd"}, 3),
        ({"layout": "bhsd"}, 3),
        ({"max_kv": "settings"}, 10),
        ({"key": "k", "layout": "bhsd", "max_kv": "settings"}, torch.tensor(3)),  # reading it would wait for the device
    ],
    ids=str,
)
def test_number_of_keys(named: dict[str, str], settings: Any, counted: Counter[str]) -> None:
    made = function()
    fastac.make_visible(made, dropout=None, **named)
    region = block(made.apply, settings)
    for min_kv, again in ((10, 0), (11, 1)):
        assert_region(region, inputs(), counted, again, Policy("attn_only", min_kv=min_kv))


# Outside regions, and by hand


def test_outside_regions_and_in_traces_the_forward_just_runs() -> None:
    made = function()
    op = fastac.make_visible(made, dropout=None)
    data = inputs()
    with torch.profiler.profile() as profile:
        block(made.apply)(*data.values()).sum().backward()
    names = {event.name for event in profile.events()}
    assert "aten::bmm" in names
    assert op._schema.name not in names
    graph = make_fx(lambda q, k, v: made.apply(q, k, v)[0])(*[t.detach() for t in data.values()])
    assert not any(node.target is op for node in graph.graph.nodes)


@pytest.mark.parametrize("how", ["keywords", "a context of its own"])
def test_a_forward_that_is_called_by_hand_just_runs(how: str) -> None:
    """Functions use one another's forward as a helper, in regions as well."""
    made = function()
    fastac.make_visible(made, dropout=None)
    q, k, v = (tensor.detach() for tensor in inputs().values())
    context = types.SimpleNamespace(
        save_for_backward=lambda *_: None, mark_non_differentiable=lambda *_: None, set_materialize_grads=lambda _: None
    )

    def helper() -> torch.Tensor:
        return (made.forward(context, q, k=k, v=v) if how == "keywords" else made.forward(context, q, k, v))[0]

    expected = kernel(q, k, v)[0]
    assert torch.equal(helper(), expected)
    weight = torch.ones(1, requires_grad=True)
    assert torch.equal(fastac.checkpoint(lambda w: helper() * w, weight), expected)


# The report


def test_report_and_verify(counted: Counter[str]) -> None:
    """Bytes beyond the outputs are reported; its kernel is counted."""
    made = function()
    fastac.make_visible(made, key="k", **PLAIN)

    model = support.stack(layers=1, block=lambda: OneAttention(lambda *heads: made.apply(*heads)[0]))
    fastac.enable(model, blocks="blocks")
    train_step(model, support.stack_inputs())
    (row,) = fastac.report(model).rows
    output, statistics = support.VIDEO_TOKENS * support.WIDTH * 4, support.VIDEO_TOKENS * 2 * 4
    assert row.extra_bytes == output, "the halved query"
    assert 0 <= row.saved_bytes - row.extra_bytes - output - statistics <= 200
    assert fastac.verify(model, **support.stack_inputs(), policy="full").policy_executions == (1, 1)


# What is refused


REFUSED = {
    "mark_dirty": "Strange calls mark_dirty",
    "number": "Strange returns a int",
    "writes": "Strange writes into the tensor number 3",
    "graph": "saved",
}


@pytest.mark.parametrize("way", REFUSED)
def test_what_a_saved_call_cannot_repeat(way: str) -> None:
    """Exact where the policy does not save it."""

    class Strange(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, state: Any) -> Any:
            output = kernel(q, k, v)[0]
            if way == "mark_dirty":
                ctx.mark_dirty(q)
                return q.add_(output), 0
            if way == "writes":
                state += 1
            elif way == "graph":
                with torch.enable_grad():
                    ctx.inside = q.detach().requires_grad_().sin()
            return output, k.shape[-2] if way == "number" else None

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
            return grad, None, None, None

    fastac.make_visible(Strange, dropout=None)

    def region(query: Any, key: Any, value: Any) -> Any:
        return Strange.apply(query * 1.0, key, value, torch.zeros(1))[0].tanh()

    with pytest.raises(FastacError, match=REFUSED[way]):
        train_step(functools.partial(fastac.checkpoint, region), inputs())
    support.assert_region(region, inputs(), policy="full")


def test_a_function_inside_the_forward(counted: Counter[str]) -> None:
    """It makes a node without a graph."""

    class Attend(Simple):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            return Simple.forward(ctx, WithoutKernel.apply(q), k, v)

    fastac.make_visible(Attend, dropout=None)
    support.assert_region(lambda query, key, value: Attend.apply(query.sin(), key, value).tanh(), inputs(), counted)


@pytest.mark.parametrize(
    ("options", "given"), [({"key": "k"}, 7), ({"key": "k"}, [torch.ones(2)]), ({"max_kv": "k"}, [3])]
)
def test_arguments_that_are_not_what_was_said(options: dict[str, str], given: Any) -> None:
    made = type("Attend", (WithoutKernel,), {})
    fastac.make_visible(made, **options)
    with pytest.raises(FastacError, match=r"Attend: its row says .*'k'.* was called with"):
        fastac.checkpoint(lambda q: made.apply(q, given), torch.ones(1, 2, 3, 4).requires_grad_())


@pytest.mark.parametrize(
    ("made", "options", "message"),
    [
        (function(), {"key": "nothing"}, "no argument 'nothing'"),
        (function(), {"dropout": "nothing"}, "no argument 'nothing'"),
        (function(), {"layout": "hsbd"}, "layout 'hsbd'"),
        (function(), {"name": "not a name"}, "name"),
        (type("Apart", (Simple,), {"setup_context": staticmethod(print)}), {}, r"Apart.*setup_context"),
    ],
)
def test_what_is_refused_changes_nothing(made: Any, options: dict[str, str], message: str) -> None:
    forward = made.forward
    with pytest.raises(FastacError, match=message):
        fastac.make_visible(made, **options)
    assert made.forward is forward
    with pytest.raises(FastacError, match=r"autograd\.Function"):
        fastac.make_visible(print)  # type: ignore[arg-type]


def test_a_function_is_made_visible_once_and_a_name_given_once() -> None:
    name = support.new_name("attention")
    first, second = function(), function()
    op = fastac.make_visible(first, name=name, **PLAIN)
    forward = first.forward
    assert fastac.make_visible(first, name=name, **PLAIN) is op
    assert first.forward is forward
    with pytest.raises(FastacError, match=f"has the name {name!r}"):
        fastac.make_visible(second, name=name)
    for other in ({"name": name + "_again"}, {"name": name, "layout": "bhsd", "dropout": "dropout_p"}):
        with pytest.raises(FastacError, match="visible already"):
            fastac.make_visible(first, **other)


# Under torch.compile


class Layer(torch.nn.Module):
    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        self.attention = attention
        self.out = torch.nn.Linear(8, 8)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.out(self.attention(torch.tanh(query), key, value)[0])


@needs_torch("2.12")  # dynamo does not trace through it before, and then it is saved
def test_traced_it_is_recomputed_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Traceable(Simple):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            output, statistics = support.attention_math(q, k, v)
            ctx.save_for_backward(q, k, v, output, statistics)
            return output

    torch._dynamo.reset()
    name = support.new_name("traceable")
    fastac.make_visible(Traceable, name=name, key="k", **PLAIN)
    torch.manual_seed(0)
    layer, data = Layer(lambda *heads: (Traceable.apply(*heads),)), inputs()
    reference = train_step(layer, data)
    layer.compile(backend="aot_eager")
    with caplog.at_level(logging.WARNING, logger="fastac"):
        found = train_step(functools.partial(fastac.checkpoint, layer), data)
    assert max(support.relative_error(found[key], reference[key]) for key in found) < 1e-5
    assert any(name in message and "recompute" in message for message in caplog.messages)


def test_behind_a_graph_break_it_is_saved(counted: Counter[str]) -> None:
    torch._dynamo.reset()
    opaque = function()
    fastac.make_visible(opaque, key="k", **PLAIN)
    layer = Layer(torch.compiler.disable(opaque.apply))
    layer.compile(backend="aot_eager")
    for _ in range(2):
        counted.clear()
        train_step(functools.partial(fastac.checkpoint, layer), inputs())
    assert counted == {KERNEL: 1}


# Other Functions, and the context


class Parent(torch.autograd.Function):
    """Keeps differentiable inputs as attributes of its context, in a tuple as well."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        output, statistics = kernel(q, k, v)
        ctx.q, ctx.others, ctx.view = q, (k, v), q.transpose(1, 2)
        ctx.save_for_backward(output, statistics)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return support.attention_math_backward(grad, ctx.q, *ctx.others, *ctx.saved_tensors)


def test_a_function_and_its_subclass(counted: Counter[str]) -> None:
    """Both are visible, and the forward of one calls that of the other."""

    class Child(Parent):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            return Parent.forward(ctx, q, k, v)

    fastac.make_visible(Parent, **PLAIN)

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(Parent.apply(Child.apply(query, key, value), key, value))

    assert_visible(Child, region, counted)


def test_inputs_on_the_context_leak_no_graph() -> None:
    """A forward without backward, over and over: what is kept of the context must not hold the graph that holds it."""
    made = type("KeepsInputs", (Parent,), {})
    fastac.make_visible(made, **PLAIN)
    held = []
    for _ in range(3):
        query, key, value = (one.detach().requires_grad_() * 1 for one in inputs().values())
        output = fastac.checkpoint(lambda *heads: made.apply(*map(torch.sin, heads)).tanh(), query, key, value)
        held.append(weakref.ref(query))
        del query, key, value, output
    gc.collect()
    assert not any(reference() is not None for reference in held)


@pytest.mark.usefixtures("functions_as_before")
def test_a_pattern_that_fits_other_modules(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """No module is asked for a name that it would have to load. One whose import is not complete may get it later.

    One that is visible already keeps the options that the user gave.
    """

    class Lazy(types.ModuleType):
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"loading {name}")

    holds: Any = types.ModuleType("tests_holds_it")
    held = type("HeldThere", (Parent,), {})
    opaque.know(OpaqueFunction(backend="tests", module="tests_.*", name="HeldThere"))
    fastac.make_visible(Parent, **PLAIN)
    for one in (holds, Lazy("tests_lazy"), types.SimpleNamespace(__name__="tests_visible", HeldThere=Parent), object()):
        monkeypatch.setitem(sys.modules, getattr(one, "__name__", "tests_no_module"), one)
        opaque.make_known_visible()
        holds.HeldThere = held
    assert opaque.is_visible(held)
    assert not caplog.records
