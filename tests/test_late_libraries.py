"""Kernels whose library, row or visibility comes while a region runs, or between its forward and its recompute.

None of them is silently recomputed: it is saved from its first call on, or a log line says that it is from the next
region on; and no call is taken for another.
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
import types
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastac
from fastac import interception, opaque, registry
from fastac.rows import OpaqueFunction
from tests import support
from tests.support import assert_same, train_step

ENGINES = pytest.mark.parametrize("engine", ["tape", "sac"])

KERNEL = "the test's opaque kernel"
LATE = "was loaded just now; saved from the next region on"

Attend = Callable[..., torch.Tensor]


def inputs() -> dict[str, torch.Tensor]:
    return support.attention_inputs(12, 12)


def function(name: str = "Kernel") -> Any:
    """A new autograd.Function over a kernel that nobody sees. By default its name says nothing of attention."""

    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        support.executions[KERNEL] += 1
        output, statistics = support.attention_math(q, k, v)
        ctx.save_for_backward(q, k, v, output, statistics)
        return output

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return support.attention_math_backward(grad, *ctx.saved_tensors)

    members = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    made = type(torch.autograd.Function)(name, (torch.autograd.Function,), members)
    made.__qualname__ = f"{name}_{uuid.uuid4().hex[:8]}"
    return made


@pytest.fixture
def module(functions_as_before: None) -> Iterator[types.ModuleType]:
    """A module that is not imported yet. What fastac learns of its Functions is forgotten again."""
    made = types.ModuleType(f"late_library_{uuid.uuid4().hex[:8]}")
    yield made
    sys.modules.pop(made.__name__, None)


@pytest.fixture
def row(rows_as_before: None) -> str:
    """Name of an op that does not exist yet. Its row, and those that a test adds, are taken out again."""
    name = f"late_{uuid.uuid4().hex[:8]}"
    fastac.register(
        fastac.AttentionOp(backend="tests", namespace=support.NAMESPACE, name=name, layout="bhsd", dropout=None)
    )
    return name


def know(module: types.ModuleType, made: Any) -> None:
    module.Kernel = made
    opaque.know(OpaqueFunction(backend="tests", module=module.__name__, name="Kernel", layout="bhsd", dropout=None))


def backward_once_visible(made: Any, loss: torch.Tensor) -> None:
    fastac.make_visible(made, key="k", layout="bhsd", dropout=None)
    loss.backward()


# Ops


@ENGINES
@pytest.mark.parametrize("brings", ["the op", "a known Function, too", "its own row", "an inner region"])
def test_an_op_that_a_region_loads_is_saved_from_its_first_call_on(
    brings: str, engine: str, row: str, module: types.ModuleType, counted: Counter[str]
) -> None:
    loaded: list[Attend] = []
    if brings == "a known Function, too":
        know(module, function())

    def load() -> Attend:
        if not loaded:
            op = support.define_attention_op(row)
            sys.modules[module.__name__] = module
            if brings == "its own row":
                name = f"other_{row}"
                support.define_attention_op(name)
                fastac.register(fastac.AttentionOp(backend="tests", namespace=support.NAMESPACE, name=name))
            loaded.append(support.attention_function(op))
        return loaded[0]

    def inner(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(loaded[0](torch.tanh(query), key, value))

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        load()
        if brings == "an inner region":
            return torch.tanh(fastac.checkpoint(inner, query, key, value, engine=engine))
        return inner(query, key, value)

    data, name = inputs(), f"{support.NAMESPACE}::{row}"
    interception.install()
    first = train_step(functools.partial(fastac.checkpoint, region, engine=engine), data)
    assert counted[name] == 1
    for _ in range(2):
        counted.clear()
        assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), first)
        assert counted == {name: 1}


def test_an_op_that_is_loaded_inside_the_kernel_of_another(row: str, counted: Counter[str], caplog: Any) -> None:
    """No mode sees it, and nothing was imported; the tape sees it from the next region on."""
    name, made = f"{support.NAMESPACE}::{row}", []

    def load() -> Attend:
        if not made:
            attend = support.define_attention_op(row)
            library = torch.library.Library(support.NAMESPACE, "FRAGMENT")
            outer = f"outer_{row}"
            library.define(f"{outer}(Tensor query, Tensor key, Tensor value) -> (Tensor, Tensor, Tensor)")
            library.impl(outer, lambda q, k, v: tuple(output.clone() for output in attend(q, k, v)), "CPU")
            made.extend((support.attention_function(getattr(getattr(torch.ops, support.NAMESPACE), outer)), library))
        return made[0]  # type: ignore[no-any-return]

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(load()(torch.tanh(query), key, value))

    interception.install()
    data = inputs()
    with caplog.at_level(logging.INFO, logger="fastac"):
        first = train_step(functools.partial(fastac.checkpoint, region), data)
    assert LATE in caplog.text
    counted.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, region), data), first)
    assert counted == {name: 1}


@pytest.mark.usefixtures("rows_as_before")
@ENGINES
def test_an_op_that_gets_its_row_after_its_first_call(engine: str, counted: Counter[str], caplog: Any) -> None:
    """Two calls, the row comes between them: the second must not come to the first in recompute."""
    name = f"middle_{uuid.uuid4().hex[:8]}"
    attend = support.attention_function(support.define_attention_op(name))
    before = len(registry._rows)
    registering = False

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query = torch.tanh(attend(torch.tanh(query), key, value))
        if registering and len(registry._rows) == before:
            fastac.register(
                fastac.AttentionOp(backend="tests", namespace=support.NAMESPACE, name=name, layout="bhsd", dropout=None)
            )
        return torch.tanh(attend(query, key, value))

    interception.install()
    data = inputs()
    reference = train_step(region, data)
    registering = True
    with caplog.at_level(logging.INFO, logger="fastac"):
        assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), reference)
    assert LATE in caplog.text
    counted.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), reference)
    assert counted == {f"{support.NAMESPACE}::{name}": 2}


def test_attention_in_the_kernel_of_an_op_without_a_row(attention_executions: Counter[str]) -> None:
    """The tape sees it; torch's selective checkpointing can not, which is an error and no silent recompute."""
    name = f"fastac_tests::mixer_{uuid.uuid4().hex[:8]}"

    @torch.library.custom_op(name, mutates_args=())
    def mixer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value).clone()

    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with torch.enable_grad():
            leaves = [saved.detach().requires_grad_() for saved in ctx.saved_tensors]
            probabilities = (leaves[0] @ leaves[1].mT * 8**-0.5).softmax(-1)
            return torch.autograd.grad(probabilities @ leaves[2], leaves, grad)

    mixer.register_autograd(backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(mixer(torch.tanh(query), key, value))

    data = inputs()
    reference = train_step(region, data)
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(functools.partial(fastac.checkpoint, region), data), reference)
        assert attention_executions == {support.CPU_ATTENTION: 1}
        with pytest.raises(fastac.PolicyNotAppliedError, match=rf"called by the kernel of {name.replace('::', '.')}"):
            train_step(functools.partial(fastac.checkpoint, region, engine="sac"), data)


# autograd.Functions


@ENGINES
@pytest.mark.parametrize("ops_before", [0, 1])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_known_function_whose_name_says_nothing(
    calls: int, ops_before: int, engine: str, module: types.ModuleType, counted: Counter[str], caplog: Any
) -> None:
    made = function()
    know(module, made)

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        sys.modules[module.__name__] = module
        for _ in range(ops_before):
            query = torch.tanh(query)
        for _ in range(calls):
            query = torch.tanh(made.apply(query, key, value))
        return query

    interception.install()
    data = inputs()
    reference = train_step(region, data)
    del sys.modules[module.__name__]
    with caplog.at_level(logging.INFO, logger="fastac"):
        assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), reference)
    assert LATE in caplog.text
    assert "compiled" not in caplog.text
    for _ in range(2):
        counted.clear()
        assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), reference)
        assert counted == {KERNEL: calls}


@ENGINES
def test_a_function_that_is_made_visible_between_forward_and_backward(engine: str, counted: Counter[str]) -> None:
    made = function()

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query = made.apply(torch.tanh(query), key, value)
        return torch.tanh(made.apply(torch.tanh(query), key, value))

    data = inputs()
    reference = train_step(region, data)
    run = functools.partial(fastac.checkpoint, region, engine=engine)
    assert_same(train_step(run, data, backward=functools.partial(backward_once_visible, made)), reference)
    counted.clear()
    assert_same(train_step(run, data), reference)
    assert counted == {KERNEL: 2}


@pytest.mark.parametrize("same_shapes", [True, False])
def test_a_function_around_an_op_that_is_made_visible_between_forward_and_backward(
    same_shapes: bool, attention_executions: Counter[str]
) -> None:
    """Its op was seen in the forward, where the Function was not. In recompute it must not go to the next call."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            output, statistics = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
            ctx.save_for_backward(q, k, v, output, statistics)
            return output  # type: ignore[no-any-return]

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return support.attention_math_backward(grad, *ctx.saved_tensors)

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query = torch.tanh(Kernel.apply(torch.tanh(query), key, value))
        keys = slice(None) if same_shapes else slice(5)
        return torch.tanh(F.scaled_dot_product_attention(query, key[:, :, keys], value[:, :, keys]))

    Kernel.__qualname__ = f"Kernel_{uuid.uuid4().hex[:8]}"
    data = inputs()
    reference = train_step(region, data)
    attention_executions.clear()
    backward = functools.partial(backward_once_visible, Kernel)
    assert_same(train_step(functools.partial(fastac.checkpoint, region), data, backward=backward), reference)
    assert attention_executions == {support.CPU_ATTENTION: 2}


def test_an_outer_region_that_is_known_and_loads_what_an_inner_one_calls(
    row: str, module: types.ModuleType, attention_executions: Counter[str], caplog: Any
) -> None:
    """Nobody watches the outer one any more: it recomputes the call in that step, and says so."""
    attends: list[Attend] = [F.scaled_dot_product_attention]

    def inner(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(attends[-1](torch.tanh(query), key, value))

    def outer(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        query = F.scaled_dot_product_attention(torch.tanh(query), key, value)
        if loading and len(attends) == 1:
            sys.modules[module.__name__] = module
            attends.append(support.attention_function(support.define_attention_op(row)))
        if loading:
            query = fastac.checkpoint(inner, query, key, value)
        return torch.tanh(query)

    loading, data = False, inputs()
    train_step(functools.partial(fastac.checkpoint, outer), data)
    loading = True
    with caplog.at_level(logging.INFO, logger="fastac"):
        train_step(functools.partial(fastac.checkpoint, outer), data)
    assert f"outer: the library of {support.NAMESPACE}.{row}.default {LATE}" in caplog.text


def test_a_library_that_takes_the_place_of_another(module: types.ModuleType, counted: Counter[str]) -> None:
    """As many modules as before, and another one among them."""
    other = f"goes_{module.__name__}"
    sys.modules[other] = types.ModuleType(other)
    made = function()
    know(module, made)

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(made.apply(torch.tanh(query), key, value))

    fastac.checkpoint(torch.sin, torch.ones(2, requires_grad=True))
    before = len(sys.modules)
    del sys.modules[other]
    sys.modules[module.__name__] = module
    assert len(sys.modules) == before
    train_step(functools.partial(fastac.checkpoint, region), inputs())
    assert counted == {KERNEL: 1}


def test_a_library_that_may_not_be_imported(module: types.ModuleType, counted: Counter[str]) -> None:
    """`sys.modules[name] = None` is Python's way to forbid an import. It may be allowed later."""
    made = function()
    know(module, made)
    sys.modules[module.__name__] = None  # type: ignore[assignment]

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if sys.modules[module.__name__] is None:
            return torch.tanh(query)
        return torch.tanh(made.apply(torch.tanh(query), key, value))

    train_step(functools.partial(fastac.checkpoint, region), inputs())
    del sys.modules[module.__name__]
    sys.modules[module.__name__] = module
    sys.modules[f"more_{module.__name__}"] = module
    try:
        fastac.checkpoint(lambda x: x.cos(), torch.ones(2, requires_grad=True))
        train_step(functools.partial(fastac.checkpoint, region), inputs())
    finally:
        del sys.modules[f"more_{module.__name__}"]
    assert counted == {KERNEL: 1}


def test_modules_that_other_threads_import_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before Python 3.12 the garbage collector, and so any other thread, may run between two items of a list."""
    monkeypatch.setattr(sys, "modules", sys.modules.copy())
    monkeypatch.setattr(opaque, "_looked_at", None)

    def another_is_imported(*_: Any) -> None:
        sys.modules[f"imported_{len(sys.modules)}"] = sys

    thresholds = gc.get_threshold()
    gc.callbacks.append(another_is_imported)
    gc.set_threshold(1)
    try:
        opaque.make_known_visible()
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(another_is_imported)
    assert any(name.startswith("imported_") for name in sys.modules)
