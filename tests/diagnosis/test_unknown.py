"""What fastac does not know is named: ops and Functions that run again, rows that match nothing, and the way out."""

from __future__ import annotations

import functools
import logging
import re
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fastac
from fastac import FastacError, PolicyNotAppliedError
from fastac.backends import plugins
from tests import support
from tests.diagnosis.test_hidden_functions import Block, TwiceInside, hidden, inputs, sdpa, train
from tests.support import assert_same, train_step

pytestmark = pytest.mark.usefixtures("rows_as_before", "functions_as_before")

QKV = "Tensor query, Tensor key, Tensor value"


@pytest.fixture
def namespace() -> str:
    return support.new_name("fastac_unknown")


@pytest.fixture
def library(namespace: str) -> Iterator[torch.library.Library]:
    made = torch.library.Library(namespace, "FRAGMENT")
    yield made
    made._destroy()


def row(namespace: str, name: str = "attend", **options: Any) -> fastac.AttentionOp:
    return fastac.AttentionOp(
        **{"backend": "tests", "namespace": namespace, "name": name, "layout": "bhsd", "dropout": None, **options}
    )


def math_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return support.attention_math(query, key, value)[0]


def make_op(namespace: str, name: str) -> Any:
    """An op with a backward, whose executions are counted."""

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        support.executions[name] += 1
        return math_of(query, key, value)

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        saved = ctx.saved_tensors
        return support.attention_math_backward(grad, *saved, *support.attention_math(*saved))

    op = torch.library.custom_op(f"{namespace}::{name}", kernel, mutates_args=(), schema=f"({QKV}) -> Tensor")
    op.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    return op


def model_of(*attends: Any, policy: Any = "attn_only") -> Any:
    """Two blocks that call attentions."""
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList(Block(*attends) for _ in range(2))})
    model.forward = lambda **named: [block(**named) for block in model["blocks"]][-1]
    fastac.enable(model, policy, blocks="blocks")
    return model


def test_a_library_that_loads_in_a_region(namespace: str) -> None:
    fastac.register(row(namespace, "late"))
    made = functools.cache(make_op)
    model = model_of(lambda *heads: made(namespace, "late")(*heads))
    with pytest.raises(PolicyNotAppliedError, match=r"the library of .*late.* was loaded just now: import it before"):
        train_step(model, inputs())
    train_step(model, inputs())
    assert fastac.report(model).rows[0].saved == 2


@pytest.fixture(params=["op", "Function"])
def neutral(request: pytest.FixtureRequest, namespace: str) -> tuple[Any, str]:
    """An attention that nothing says is one, and its name."""
    if request.param == "op":
        return make_op(namespace, "run"), f"{namespace}::run"
    return hidden("Neutral"), "Neutral"


# What runs again


def test_what_is_not_known_is_named_once(namespace: str, caplog: pytest.LogCaptureFixture) -> None:
    """With the module that calls it; the report has their number.

    Not an op with a row, one that is declared to be no attention, a Function that recorded a call, and torch's own.
    """
    saved, other = make_op(namespace, "saved"), make_op(namespace, "attn_bias")
    fastac.register(row(namespace, "saved"), fastac.Row(namespace=namespace, name="attn_bias", kind="other"))
    op, function = make_op(namespace, "attn_gate"), hidden("Neutral")
    model = model_of(sdpa, saved, other, TwiceInside.apply, op, function)
    with caplog.at_level(logging.INFO, "fastac"):
        for _ in range(2):
            train_step(model, inputs())
    lines = [line for line in caplog.messages if "runs again" in line]
    assert len(lines) == 2
    assert f"{namespace}::attn_gate" in lines[0]
    assert "ModuleDict.blocks.0" in lines[0]
    assert "Neutral" in lines[1]
    assert "of tests.diagnosis.test_hidden_functions" in lines[1]
    report = fastac.report(model)
    assert report.rows[0].unknown == (f"{namespace}::attn_gate", "Neutral")
    assert "2: " in str(report)


def test_a_region_in_which_nothing_is_known(neutral: tuple[Any, str], caplog: pytest.LogCaptureFixture) -> None:
    """A warning, once for a function, if it saves nothing: its attention may have a neutral name."""
    run, name = neutral
    block = Block(run)

    def region(**named: torch.Tensor) -> torch.Tensor:
        return block.out(run(*named.values()))

    for keys in (12, 10):
        for policy in ("none", "full", "attn_only", "long_attn_only"):
            train_step(functools.partial(fastac.checkpoint, region, policy=policy), inputs(keys))
    (line,) = caplog.messages
    assert f"region: attn_only saves nothing in it: no attention was seen, and {name} run" in line
    for way_out in ("fastac.register(", "fastac.make_visible(", 'policy="full"'):
        assert way_out in line
    train(run)  # a block of no enabled model
    assert caplog.messages[1].startswith("Block: attn_only saves nothing")


@pytest.mark.parametrize("policy", ["attn_only", "long_attn_only"])
def test_a_model_in_which_nothing_is_known(neutral: tuple[Any, str], policy: str) -> None:
    """The error says what ran, not that attention was too short."""
    run, name = neutral
    with pytest.raises(PolicyNotAppliedError, match=f"{policy} saves nothing in it: .* {name} run again") as raised:
        train_step(model_of(run, policy=policy), inputs())
    assert "fastac.make_visible(" in str(raised.value)
    assert "min_kv" not in str(raised.value)


@pytest.mark.parametrize("run", [sdpa, lambda query, key, value: query * key * value], ids=["short", "none"])
def test_a_smaller_min_kv_is_advised_only_for_attention(run: Any) -> None:
    with pytest.raises(PolicyNotAppliedError, match="is saved in any block") as raised:
        train_step(model_of(run, policy="long_attn_only"), inputs())
    assert ("Use a smaller min_kv" in str(raised.value)) == (run is sdpa)


def test_a_region_without_attention(namespace: str, caplog: pytest.LogCaptureFixture) -> None:
    """No warning where everything is torch's, declared to be no attention, or beside something that is saved."""
    gate = make_op(namespace, "attn_gate")
    fastac.register(fastac.Row(namespace=namespace, name="attn_gate", kind="other"))
    for calls in ([math_of], [gate], [sdpa, hidden("Neutral")]):
        train_step(functools.partial(fastac.checkpoint, lambda one=calls, **named: Block(*one)(**named)), inputs())
    linear = fastac.Policy("linear_only", linear=("out",))
    train_step(functools.partial(fastac.checkpoint, Block(hidden("Neutral")), policy=linear), inputs())
    assert not caplog.messages


# Rows that match nothing


def test_a_row_whose_name_is_misspelt(namespace: str, caplog: pytest.LogCaptureFixture) -> None:
    """A warning, once, in the first region, that says which op was meant."""
    make_op(namespace, "run_forward")
    fastac.register(row(namespace, "run_forwrad"), row(namespace[:-1] + "_", "attend"))
    for _ in range(2):
        train(sdpa)
    first, second = caplog.messages
    assert re.match(rf"The row for {namespace}:.*'run_forward'", first)
    assert re.match(rf"The row for {namespace[:-1]}_:.*'{namespace}'", second)


def test_a_plugin_whose_rows_match_nothing(
    namespace: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning if its library is loaded; if not, nobody uses it."""
    make_op(namespace, "run")
    module = types.ModuleType(namespace)
    monkeypatch.setitem(sys.modules, namespace, module)
    rows = row(namespace, "rum"), row("never_loaded")
    known = functools.partial(fastac.OpaqueFunction, backend="tests", name="Attention")
    functions = known(module=namespace), known(module="never_loaded")
    plugin = plugins.Plugin("mine", "mine.rows", "mine", "1.0", rows, functions)
    monkeypatch.setattr(plugins, "_plugins", [plugin])
    fastac.register(*rows)
    train(sdpa)
    assert len(caplog.messages) == 2
    assert "'run'" in caplog.messages[0]
    assert f"{namespace} has no Attention" in caplog.messages[1]


@pytest.mark.parametrize("key", ["CompositeImplicitAutograd", "Autograd"])
def test_an_op_whose_calls_end_above(key: str, namespace: str, library: torch.library.Library) -> None:
    """They never arrive where they are intercepted: its row is refused."""
    library.define(f"attend({QKV}) -> Tensor")
    library.impl("attend", math_of, key)
    with pytest.raises(FastacError, match=f"{namespace}.attend.default has no kernel for a device, only one for {key}"):
        fastac.register(row(namespace))


def test_an_autograd_kernel_that_launches_the_kernel_itself(
    namespace: str, library: torch.library.Library, caplog: pytest.LogCaptureFixture
) -> None:
    """The op has a kernel for the device as well: only a region shows that its calls do not arrive."""
    library.define(f"attend({QKV}) -> Tensor")
    library.impl("attend", math_of, "CPU")
    library.impl("attend", hidden("Launch"), "Autograd")
    fastac.register(row(namespace))
    op = getattr(torch.ops, namespace).attend.default
    train(sdpa)
    assert not caplog.messages, "it was not called"
    train(sdpa, op, keys=10)
    (line,) = caplog.messages
    assert f"{namespace}.attend.default has a row, and none of its calls arrived, while" in line
    assert "Launch" in line


def test_an_op_without_an_autograd_kernel(namespace: str, library: torch.library.Library) -> None:
    """autograd differentiates what is inside: refused where it is to be saved, exact where it is not."""
    library.define(f"run({QKV}) -> Tensor")
    library.impl("run", lambda query, key, value: torch.tanh(query) * key + value, "CPU")
    op = getattr(torch.ops, namespace).run.default
    fastac.register(row(namespace, "run"))
    with pytest.raises(FastacError, match=f'register_autograd\\("{namespace}::run"'):
        train(sdpa, op)
    block = Block(sdpa, op)
    for policy in ("full", fastac.Policy("attn_only", min_kv=100), "none"):
        torch.manual_seed(0)
        support.assert_region(block, inputs(), policy=policy)
    frozen = {name: tensor.detach() for name, tensor in inputs().items()}
    fastac.checkpoint(lambda **named: op(*named.values()) * block.out.weight.sum(), **frozen).sum().backward()


# The way out


@pytest.mark.parametrize("is_threaded", [False, True])
@pytest.mark.parametrize("what", ["op", "Function"])
def test_a_name_that_says_attention_and_is_none(
    what: str, is_threaded: bool, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The message has the line that says so; once it is registered, the region trains."""
    call = make_op(namespace, "lightning_attention") if what == "op" else hidden("LightningAttention")
    with ThreadPoolExecutor(1) as pool:
        block = Block(sdpa, (lambda *tensors: pool.submit(call, *tensors).result()) if is_threaded else call)
        reference = train_step(functools.partial(block), inputs())
        with pytest.raises(PolicyNotAppliedError, match='kind="other"') as raised:
            train_step(functools.partial(fastac.checkpoint, block), inputs())
        exec(re.search(r"If (?:not|it is none): (.*\))", str(raised.value))[1], {"fastac": fastac})
        assert_same(train_step(functools.partial(fastac.checkpoint, block), inputs()), reference)
    assert not caplog.messages


def test_a_row_that_is_replaced_by_no_attention(namespace: str) -> None:
    """The op runs again, also where it was saved before."""
    op = make_op(namespace, "attend")
    fastac.register(row(namespace))
    support.assert_region(Block(op), inputs(), support.executions)
    fastac.register(fastac.Row(namespace=namespace, name="attend", kind="other"), replace=True)
    support.assert_region(Block(sdpa, op), inputs(10), support.executions, again=1)


def test_an_op_that_is_defined_again(namespace: str, caplog: pytest.LogCaptureFixture) -> None:
    """A notebook's cell, run twice: saved both times, and no word of it."""
    for keys in (12, 10):
        op = make_op(namespace, "attend")
        fastac.register(row(namespace))
        support.assert_region(Block(op), inputs(keys), support.executions)
    assert not caplog.messages


def test_a_functional_op_beside_its_out_overload(namespace: str, library: torch.library.Library) -> None:
    """As ATen has them. The row is for the functional one; a call of the other is an error in the region."""
    functional = make_op(namespace, "attend")
    library.define(f"attend.out({QKV}, *, Tensor(a!) out) -> Tensor(a!)")
    library.impl("attend.out", lambda query, key, value, out: out.copy_(math_of(query, key, value)), "CPU")
    fastac.register(row(namespace))
    support.assert_region(Block(functional), inputs(), support.executions)
    out = getattr(torch.ops, namespace).attend.out

    def into(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return out(query, key, value, out=torch.empty_like(query))

    with pytest.raises(FastacError, match=r"attend\.out writes its argument 'out'"):
        train(functional, into, keys=10)


# What a message suggests


def advice_of(attend: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> str:
    with pytest.raises(PolicyNotAppliedError) as raised:
        fastac.checkpoint(lambda *args: attend(*args), *tensors)
    return str(raised.value)


SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], str]] = {
    "bhsd": ((1, 2, 12, 8), (1, 2, 5, 8), "layout='bhsd'"),
    "bshd": ((1, 12, 2, 8), (1, 5, 2, 8), "layout='bshd'"),
    "equal": ((1, 12, 2, 8), (1, 12, 2, 8), "layout=..."),
    "fewer heads of keys, or fewer keys": ((1, 12, 8, 8), (1, 12, 2, 8), "layout=..."),
}


@pytest.mark.parametrize("shapes", SHAPES)
def test_the_layout_is_derived_or_asked_for(shapes: str, namespace: str) -> None:
    query, key, layout = SHAPES[shapes]
    q, k, v = (torch.randn(shape, requires_grad=True) for shape in (query, key, key))

    class FlashAttention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Any, query: Any, keys: Any) -> Any:
            return query * 1.0

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return None, grad, None

    message = advice_of(lambda q, k, v: FlashAttention.apply(q, q, k), q, k, v)
    assert f"key='keys', {layout}" in message
    assert ("where the keys" in message) == (layout == "layout=...")
    op = torch.library.custom_op(
        f"{namespace}::attention",
        lambda a, x, scale: a * 1.0,
        mutates_args=(),
        schema="(Tensor a, Tensor x, Tensor scale) -> Tensor",
    )
    op.register_autograd(lambda ctx, grad: (grad, None, None))
    message = advice_of(op, q, k, v)
    assert "key=..., layout=..." in message
    assert "key: which of a, x, scale holds the keys" in message
    with pytest.raises(FastacError, match=r"key is Ellipsis"):
        fastac.register(row(namespace, "attention", key=...))
