"""make_visible: autograd.Functions over kernels that nobody sees, saved in place."""

from __future__ import annotations

import functools
import gc
import logging
import sys
import threading
import types
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.fx.experimental.proxy_tensor import make_fx

import fastac
from fastac import interception, opaque, registry
from fastac.policy import Policy
from fastac.rows import OpaqueFunction
from tests import support
from tests.support import assert_same, train_step

KERNEL = "the test's opaque kernel"


def kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, blocks: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention that reaches no dispatcher op of its own name. blocks: indices of the keys to attend to."""
    support.executions[KERNEL] += 1
    if blocks is not None:
        key, value = key[..., blocks, :], value[..., blocks, :]
    return support.attention_math(query, key, value)


def function(**options: Any) -> type[torch.autograd.Function]:
    """A new Function over the kernel: two outputs, and for backward inputs, an extra tensor, None and an output."""

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, q: Any, k: Any, v: Any, blocks: Any = None, settings: Any = None, dropout_p: Any = 0.0
        ) -> Any:
            with torch.no_grad():
                output, statistics = kernel(q, k, v, blocks)
                if dropout_p or options.get("draws"):
                    output = output * (torch.rand_like(output) > 0.3)
            statistics = statistics + q.new_zeros(())  # outside no_grad, so that marking it matters
            half = q * 0.5  # what a quantized kernel keeps besides: as large as the query
            ctx.save_for_backward(q, k, v, None, blocks, statistics, output, half)
            ctx.settings = settings
            ctx.mark_non_differentiable(statistics)
            ctx.set_materialize_grads(False)
            if options.get("view"):
                output = output.transpose(1, 2).contiguous().transpose(1, 2)
            return (output, None, statistics) if options.get("none") else (output, statistics)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Any:
            q, k, v, nothing, blocks, statistics, output, half = ctx.saved_tensors
            assert nothing is None
            assert ctx.settings in (None, "kept on the context", 10, 3)
            assert torch.equal(half, q * 0.5)
            chosen = slice(None) if blocks is None else blocks
            grads = support.attention_math_backward(grad, q, k[..., chosen, :], v[..., chosen, :], output, statistics)
            if blocks is None:
                return (*grads, None, None, None)
            whole = [torch.zeros_like(t).index_add(-2, blocks, g) for t, g in zip((k, v), grads[1:], strict=True)]
            return (grads[0], *whole, None, None, None)

    Attention.__qualname__ = f"Attention_{uuid.uuid4().hex[:8]}"
    return Attention


def block(attention: Callable[..., Any], *rest: Any, select: Callable[..., Any] | None = None) -> Callable[..., Any]:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        more = (select(key), *rest[1:]) if select is not None else rest
        output, *others = attention(torch.tanh(query), torch.tanh(key), value, *more)
        assert not any(isinstance(other, torch.Tensor) and other.requires_grad for other in others)
        output = torch.tanh(output)
        return torch.nn.functional.dropout(output, 0.2)

    return attend


def inputs(requires_grad: bool = True, keys: int = 10, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return support.attention_inputs(12, keys, dtype=dtype, requires_grad=requires_grad)


WAYS = {"plain": {}, "a view": {"view": True}, "None among the outputs": {"none": True}}


@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_executions_and_gradients(way: str, dtype: torch.dtype, engine: str, counted: Counter[str]) -> None:
    opaque_function = function(**WAYS[way])
    captured = opaque_function.apply  # before it is made visible, as libraries do
    attend = block(captured, None, "kept on the context")
    data = inputs(dtype=dtype)
    reference = train_step(attend, data)
    fastac.make_visible(opaque_function, key="k", layout="bhsd", dropout=None)
    for policy, executions in (("none", 1), ("torch", 2), ("full", 2), ("attn_only", 1), ("attn_only", 1)):
        counted.clear()
        assert_same(
            train_step(functools.partial(support.run_checkpointed, attend, policy=policy, engine=engine), data),
            reference,
        )
        assert counted == {KERNEL: executions}, policy


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_without_it_the_region_is_refused_and_told_what_to_write(engine: str) -> None:
    opaque_function = function()
    region = functools.partial(fastac.checkpoint, block(opaque_function.apply), engine=engine)
    for _ in range(2):
        with pytest.raises(fastac.PolicyNotAppliedError) as error:
            train_step(region, inputs())
    message = str(error.value)
    assert "(0 of 1 reached a registered op)" in message
    assert f"{opaque_function.__qualname__}, an autograd.Function, looks like an attention" in message
    assert f"fastac.make_visible({opaque_function.__qualname__}, layout=" in message
    fastac.make_visible(opaque_function, layout="bhsd", dropout=None)
    train_step(region, inputs())


@pytest.mark.parametrize("frozen", ["query", "key", "value"])
def test_inputs_that_do_not_require_grad(frozen: str, counted: Counter[str]) -> None:
    opaque_function = function()
    attend = block(opaque_function.apply)
    data = inputs()
    data[frozen].requires_grad_(False)
    reference = train_step(attend, data)
    fastac.make_visible(opaque_function, key="k", layout="bhsd", dropout=None)
    counted.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, attend), data), reference)
    assert counted == {KERNEL: 1}


def test_under_autocast(counted: Counter[str]) -> None:
    opaque_function = function()

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mixed = [tensor @ torch.ones(8, 8) for tensor in (query, key, value)]
        return opaque_function.apply(*mixed)[0].float().tanh()

    data = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        reference = train_step(attend, data)
        fastac.make_visible(opaque_function, key="k", layout="bhsd", dropout=None)
        counted.clear()
        assert_same(train_step(functools.partial(fastac.checkpoint, attend), data), reference)
    assert counted == {KERNEL: 1}


def test_two_backwards_through_one_graph(counted: Counter[str]) -> None:
    opaque_function = function()
    fastac.make_visible(opaque_function, key="k", layout="bhsd", dropout=None)
    data = inputs()
    output = fastac.checkpoint(block(opaque_function.apply), *data.values())
    first = torch.autograd.grad(output.sum(), list(data.values()), retain_graph=True)
    second = torch.autograd.grad(output.sum(), list(data.values()))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    assert counted == {KERNEL: 1}


def assert_made_visible_it_is_replayed(
    attention: type[torch.autograd.Function], region: Callable[..., Any], calls: int, counted: Counter[str]
) -> None:
    """Exact, its kernel run once per call, and nothing that was set on a context outlives the step."""
    data = inputs()
    reference = train_step(region, data)
    fastac.make_visible(attention, layout="bhsd", dropout=None)
    counted.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, region), data), reference)
    assert counted == {KERNEL: calls}
    gc.collect()
    assert not opaque._states


def test_a_backward_inside_the_region(counted: Counter[str]) -> None:
    """In recompute it meets a context that no forward ran with: what the forward set on its own is there."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            output, statistics = kernel(q, k, v)
            ctx.save_for_backward(q, k, v, output, statistics)
            ctx.factor = 2.0
            return output * 2.0

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return support.attention_math_backward(grad * ctx.factor, *ctx.saved_tensors)

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        tanh = torch.tanh(query)
        output = Scaled.apply(tanh, key, value)
        (inner,) = torch.autograd.grad(output.sum(), tanh, retain_graph=True)
        return torch.tanh(output) + inner.detach() * query

    assert_made_visible_it_is_replayed(Scaled, region, 1, counted)


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_a_choice_of_blocks_is_not_made_again(engine: str, counted: Counter[str]) -> None:
    """Saved for backward among the inputs: an input of whole numbers is kept, the recomputed one not used."""
    opaque_function = function()
    choices = [torch.tensor([0, 3, 5]), torch.tensor([1, 2, 9])]
    asked: list[int] = []

    def select(_: torch.Tensor) -> torch.Tensor:
        asked.append(1)
        return choices[len(asked) > 1]

    attend = block(opaque_function.apply, None, select=select)
    data = inputs()
    reference = train_step(attend, data)
    asked.clear()
    fastac.make_visible(opaque_function, key="k", layout="bhsd", dropout=None)
    assert_same(train_step(functools.partial(fastac.checkpoint, attend, engine=engine), data), reference)
    assert len(asked) == 2, "the region was recomputed, and chose otherwise"


@pytest.mark.parametrize("dropout", ["dropout_p", "always"])
def test_dropout_in_the_kernel_and_after_it(dropout: str, counted: Counter[str]) -> None:
    opaque_function = function(draws=dropout == "always")
    attend = block(opaque_function.apply, None, None, 0.3)
    data = inputs()
    reference = train_step(attend, data)
    fastac.make_visible(opaque_function, key="k", layout="bhsd", dropout=dropout)
    counted.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, attend), data), reference)
    assert counted == {KERNEL: 1}


def test_dropout_that_is_on_by_default(counted: Counter[str]) -> None:
    class Drops(function()):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any, p: float = 0.3) -> Any:
            output, statistics = kernel(q, k, v)
            kept = (torch.rand_like(output) > p).to(output.dtype)
            ctx.save_for_backward(q, k, v, output, statistics, kept)
            return output * kept

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            *saved, kept = ctx.saved_tensors
            return support.attention_math_backward(grad * kept, *saved)

    attend = block(lambda *args: (Drops.apply(*args),))
    data = inputs()
    reference = train_step(attend, data)
    fastac.make_visible(Drops, layout="bhsd", dropout="p")
    counted.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, attend), data), reference)
    assert counted == {KERNEL: 1}


@pytest.mark.parametrize(
    "named",
    [{"key": "k", "layout": "bhsd"}, {"layout": "bhsd"}, {"max_kv": "settings"}],
    ids=["key", "second", "max_kv"],
)
def test_number_of_keys(named: dict[str, str], counted: Counter[str]) -> None:
    opaque_function = function()
    fastac.make_visible(opaque_function, dropout=None, **named)
    attend = block(opaque_function.apply, None, 10)
    for min_kv, executions in ((10, 1), (11, 2)):
        counted.clear()
        policy = Policy("attn_only", min_kv=min_kv)
        train_step(functools.partial(fastac.checkpoint, attend, policy=policy), inputs())
        assert counted == {KERNEL: executions}


def test_outside_regions_and_in_traces_the_forward_just_runs(counted: Counter[str]) -> None:
    opaque_function = function()
    op = fastac.make_visible(opaque_function, dropout=None)
    data = inputs()
    with torch.profiler.profile() as profile:
        block(opaque_function.apply)(*data.values()).sum().backward()
    names = {event.name for event in profile.events()}
    assert "aten::bmm" in names
    assert op._schema.name not in names
    graph = make_fx(lambda q, k, v: opaque_function.apply(q, k, v)[0])(*[t.detach() for t in data.values()])
    assert not any(node.target is op for node in graph.graph.nodes)
    assert not opaque._calls


def test_bytes_beyond_the_outputs_are_reported(counted: Counter[str]) -> None:
    opaque_function = function()
    fastac.make_visible(opaque_function, key="k", layout="bhsd", dropout=None)
    attend = opaque_function.apply

    class Block(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return attend(query, key, value)[0]

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList([Block()])

        def forward(self, **data: torch.Tensor) -> torch.Tensor:
            return fastac.checkpoint(self.blocks[0], *data.values())

    model = Model()
    with support.reported_blocks({"blocks.0": model.blocks[0]}):
        train_step(model, inputs())
        row = fastac.report(model).rows[0]
        text = str(fastac.report(model))
    output, statistics = 2 * 3 * 12 * 8 * 4, 2 * 3 * 12 * 4
    assert row.extra_bytes == output, "the halved query"
    layout = row.saved_bytes - row.extra_bytes - output - statistics
    assert 0 < layout <= 200, "the numbers that say which tensor is which"
    assert "2.2 KiB of it extra" in text


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_verify_counts_its_kernel_and_no_choices(engine: str, counted: Counter[str]) -> None:
    opaque_function = function()
    fastac.make_visible(opaque_function, key="k", layout="bhsd", dropout=None)

    class Block(torch.nn.Module):
        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            blocks = key.mean(dim=(0, 1, 3)).topk(4).indices
            return opaque_function.apply(query, key, value, blocks)[0].tanh()

    result = fastac.verify(Block(), **inputs(), engine=engine)
    assert (result.reference_executions, result.policy_executions) == ((1, 0), (1, 0))
    assert (result.saved, result.recomputed) == (1, 0)
    assert fastac.verify(Block(), **inputs(), policy="full").policy_executions == (1, 1)


# What can not be made visible


def test_setup_context_is_refused() -> None:
    class Apart(torch.autograd.Function):
        @staticmethod
        def forward(q: Any, k: Any, v: Any) -> Any:
            return kernel(q, k, v)[0]

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    forward = Apart.forward
    with pytest.raises(fastac.FastacError, match=r"Apart has a setup_context.*torch\.library\.custom_op"):
        fastac.make_visible(Apart)
    assert Apart.forward is forward


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_mark_dirty_is_refused_in_a_region_alone(engine: str) -> None:
    class Writes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            ctx.mark_dirty(q)
            return q.add_(kernel(q, k, v)[0])

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad, None, None

    fastac.make_visible(Writes, dropout=None)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return Writes.apply(query * 1.0, key, value)

    train_step(attend, inputs())
    with pytest.raises(fastac.FastacError, match=r"Writes.*mark_dirty.*policy=\"full\""):
        train_step(functools.partial(fastac.checkpoint, attend, engine=engine), inputs())
    assert not opaque._calls


def test_an_output_that_is_no_tensor_is_refused_in_a_region_alone() -> None:
    class Counts(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            return kernel(q, k, v)[0], k.shape[-2]

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
            return grad, None, None

    fastac.make_visible(Counts, dropout=None)
    attend = block(Counts.apply)
    train_step(attend, inputs())
    with pytest.raises(fastac.FastacError, match=r"Counts.* returns a int, which can not be saved"):
        train_step(functools.partial(fastac.checkpoint, attend), inputs())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"key": "nothing"}, "has no argument 'nothing'. It has q, k, v, blocks"),
        ({"max_kv": "nothing"}, "has no argument 'nothing'"),
        ({"dropout": "nothing"}, "has no argument 'nothing'"),
        ({"layout": "hsbd"}, "layout 'hsbd' is none of bshd"),
        ({"name": "not a name"}, "no name for an op"),
    ],
    ids=["key", "max_kv", "dropout", "layout", "name"],
)
def test_wrong_options_change_nothing(options: dict[str, str], message: str) -> None:
    opaque_function = function()
    forward = opaque_function.forward
    with pytest.raises(fastac.FastacError, match=message):
        fastac.make_visible(opaque_function, **options)
    assert opaque_function.forward is forward


def test_what_is_no_function_is_refused() -> None:
    with pytest.raises(fastac.FastacError, match=r"expected a subclass of torch\.autograd\.Function, got <built-in"):
        fastac.make_visible(print)  # type: ignore[arg-type]


def test_a_name_is_given_once_and_a_function_made_visible_once() -> None:
    name = f"attention_{uuid.uuid4().hex[:8]}"
    first, second = function(), function()
    op = fastac.make_visible(first, name=name, dropout=None)
    forward = first.forward
    assert fastac.make_visible(first, name=name, dropout=None) is op
    assert first.forward is forward
    with pytest.raises(fastac.FastacError, match=f"{name!r} is taken by {first.__qualname__}"):
        fastac.make_visible(second, name=name)
    with pytest.raises(fastac.FastacError, match=f"{first.__qualname__} is visible already, as {name!r}"):
        fastac.make_visible(first, name=name + "_again")
    assert first.forward is forward


# Known Functions


@pytest.fixture
def library(functions_as_before: None) -> Iterator[types.ModuleType]:
    """A module that is not imported yet, with a Function that fastac knows."""
    module = types.ModuleType(f"opaque_library_{uuid.uuid4().hex[:8]}")
    module.Attention = function()
    opaque.know(
        OpaqueFunction(backend="tests", module=module.__name__, name="Attention", layout="bhsd", dropout=None),
    )
    yield module
    sys.modules.pop(module.__name__, None)


@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("when", ["before enable", "between two steps"])
def test_a_known_function_is_made_visible_when_its_library_is_loaded(
    when: str, engine: str, library: types.ModuleType, counted: Counter[str]
) -> None:
    if when == "before enable":
        sys.modules[library.__name__] = library
    interception.install()
    data = inputs()
    attend = block(library.Attention.apply)
    reference = train_step(attend, data)

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        if library.__name__ not in sys.modules:  # the first step is done by another library
            return torch.nn.functional.scaled_dot_product_attention(query, key, value)
        return attend(query, key, value)

    if when == "between two steps":
        train_step(functools.partial(fastac.checkpoint, region, engine=engine), data)
        sys.modules[library.__name__] = library
    for _ in range(2):
        counted.clear()
        assert_same(train_step(functools.partial(fastac.checkpoint, region, engine=engine), data), reference)
        assert counted == {KERNEL: 1}


@pytest.mark.parametrize("ops_before", [0, 2])
@pytest.mark.parametrize("calls", [1, 2])
def test_a_library_that_a_region_loads_itself(
    calls: int, ops_before: int, library: types.ModuleType, counted: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It may have called its Function before that could be made visible: this region is recomputed, the next saved."""
    interception.install()

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        sys.modules[library.__name__] = library
        for _ in range(ops_before):
            query = torch.tanh(query)
        for _ in range(calls):
            query = torch.tanh(library.Attention.apply(query, key, value)[0])
        return query

    data = inputs()
    with caplog.at_level(logging.INFO, logger="fastac"):
        first = train_step(functools.partial(fastac.checkpoint, region), data)
    assert "was loaded just now; saved from the next region on" in caplog.text
    for _ in range(2):
        counted.clear()
        assert_same(train_step(functools.partial(fastac.checkpoint, region), data), first)
        assert counted == {KERNEL: calls}


def test_a_library_that_a_region_known_for_long_loads(
    library: types.ModuleType, counted: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody watches it any more: it made another attention call until now, and makes none that is recorded."""
    attends: list[Callable[..., torch.Tensor]] = [torch.nn.functional.scaled_dot_product_attention]

    def loads(*args: torch.Tensor) -> torch.Tensor:
        sys.modules[library.__name__] = library
        return library.Attention.apply(*args)[0]

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(attends[0](torch.tanh(query), key, value))

    data = inputs()
    train_step(functools.partial(fastac.checkpoint, region), data)
    attends[0] = loads
    with caplog.at_level(logging.INFO, logger="fastac"):
        first = train_step(functools.partial(fastac.checkpoint, region), data)
    assert "was loaded just now; saved from the next region on" in caplog.text
    counted.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, region), data), first)
    assert counted == {KERNEL: 1}


def test_a_known_function_that_can_not_be_made_visible_is_named(
    library: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    class Apart(torch.autograd.Function):
        @staticmethod
        def forward(q: Any, k: Any, v: Any) -> Any: ...

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None: ...

    library.Attention = Apart
    sys.modules[library.__name__] = library
    with caplog.at_level(logging.WARNING, logger="fastac"):
        interception.install()
        opaque._looked_at = 0  # as if another module had been imported
        interception.install()
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert said[0].startswith(f"{library.__name__}.Attention can not be saved: make_visible: ")


def test_a_known_function_that_its_module_does_not_have_is_named(
    library: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """Misspelled in a plugin, or renamed by its library."""
    del library.Attention
    sys.modules[library.__name__] = library
    with caplog.at_level(logging.WARNING, logger="fastac"):
        interception.install()
        opaque._looked_at = 0  # as if another module had been imported
        interception.install()
    (said,) = [record.getMessage() for record in caplog.records]
    assert said == f"{library.__name__} has no Attention, which fastac was told to make visible"


def test_every_known_function_has_the_arguments_its_row_names() -> None:
    """What the catalogue says of layouts and the like is checked without the libraries; the rest by their own tests."""
    from fastac.rows import KEYS_DIMENSION

    assert {known.backend for known in opaque._known} >= {"fa4", "sla", "attn_qat", "bsa", "vsa"}
    assert all(known.layout in KEYS_DIMENSION for known in opaque._known)


# Under torch.compile


class Layer(torch.nn.Module):
    def __init__(self, attention: Callable[..., Any]) -> None:
        super().__init__()
        self.attention = attention
        self.out = torch.nn.Linear(8, 8)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.out(self.attention(torch.tanh(query), key, value)[0])


class Traceable(torch.autograd.Function):
    """A Function that dynamo traces through, as it does through Triton kernels."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        output, statistics = support.attention_math(q, k, v)
        ctx.save_for_backward(q, k, v, output, statistics)
        return output, statistics

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        return support.attention_math_backward(grad, *ctx.saved_tensors)


@pytest.mark.parametrize("compiled", ["block", "model"])
def test_compiled_it_is_recomputed_and_told(compiled: str, caplog: pytest.LogCaptureFixture) -> None:
    name = f"traceable_{uuid.uuid4().hex[:8]}"
    fresh = type("Fresh", (Traceable,), {})
    op = fastac.make_visible(fresh, name=name, key="k", layout="bhsd", dropout=None)
    torch.manual_seed(0)
    layer = Layer(fresh.apply)
    data = inputs()
    reference = train_step(layer, data)
    region: Any = functools.partial(fastac.checkpoint, layer)
    if compiled == "block":
        layer.compile(backend="aot_eager")
    else:
        region = torch.compile(region, backend="aot_eager")
    with caplog.at_level(logging.WARNING, logger="fastac"):
        found = train_step(region, data)
    for key, tensor in reference.items():
        if key in found:
            assert support.relative_error(found[key], tensor) < 1e-5, key
    assert layer.out.weight.grad is not None
    said = [record.getMessage() for record in caplog.records]
    assert any(op._schema.name in message and "recompute" in message for message in said), said


def test_a_known_function_in_a_model_that_is_compiled_before_anything_ran(
    library: types.ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody called enable: what fastac knows of is looked up before AOT decides."""
    library.Attention = type("Known", (Traceable,), {})
    sys.modules[library.__name__] = library
    region = torch.compile(functools.partial(fastac.checkpoint, Layer(library.Attention.apply)), backend="aot_eager")
    with caplog.at_level(logging.WARNING, logger="fastac"):
        train_step(region, inputs())
    assert any("Known" in record.getMessage() and "recompute" in record.getMessage() for record in caplog.records)


def test_a_call_in_another_thread_is_an_error(counted: Counter[str]) -> None:
    opaque_function = function()
    fastac.make_visible(opaque_function, key="k", layout="bhsd", dropout=None)

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(lambda: opaque_function.apply(torch.tanh(query), key, value)[0]).result()

    with pytest.raises(fastac.PolicyNotAppliedError, match="was called in another thread"):
        train_step(functools.partial(fastac.checkpoint, region), inputs())


def test_shapes_can_be_asked_without_data() -> None:
    """Under FakeTensorMode the forward just runs, and no call is left on its way."""
    fresh = type("Planned", (Traceable,), {})
    fastac.make_visible(fresh, layout="bhsd", dropout=None)
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 3, n, 8, requires_grad=True) for n in (12, 10, 10))
        output = fastac.checkpoint(lambda *qkv: fresh.apply(*qkv)[0], q, k, v, policy="full")
        assert output.shape == (2, 3, 12, 8)
    assert not opaque._calls


def test_behind_a_graph_break_it_is_saved(counted: Counter[str]) -> None:
    """A kernel that dynamo can not trace runs eagerly between two graphs, where it is saved as ever."""
    opaque_function = function()
    fastac.make_visible(opaque_function, key="k", layout="bhsd", dropout=None)
    torch.manual_seed(0)
    layer = Layer(torch.compiler.disable(opaque_function.apply))
    data = inputs()
    reference = train_step(layer, data)
    layer.compile(backend="aot_eager")
    for _ in range(2):
        counted.clear()
        found = train_step(functools.partial(fastac.checkpoint, layer), data)
        for key in found:
            assert support.relative_error(found[key], reference[key]) < 1e-6, key
    assert counted == {KERNEL: 1}


def test_it_is_a_row_like_any_other() -> None:
    op = fastac.make_visible(function(), backend="tests", key="k", layout="bhsd")
    resolved = registry.classify(op)
    assert resolved is not None
    assert opaque.is_opaque(resolved)
    assert resolved.row.backend == "tests"  # type: ignore[union-attr]
    assert resolved.qualified_name in interception.intercepted()


def test_a_list_of_outputs_is_refused_as_autograd_takes_it_for_no_tensor() -> None:
    class Lists(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            return [kernel(q, k, v)[0]]

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> Any:
            return None, None, None

    fastac.make_visible(Lists, dropout=None)
    with pytest.raises(fastac.FastacError, match=r"Lists.* returns a list, which can not be saved"):
        fastac.checkpoint(lambda *qkv: Lists.apply(*qkv)[0], *inputs().values())


def test_a_key_that_does_not_fit_its_layout_is_named() -> None:
    opaque_function = function()
    fastac.make_visible(opaque_function, key="q", layout="t3hd", dropout=None)
    flat = [torch.randn(12, 8, requires_grad=True) for _ in range(3)]
    with pytest.raises(fastac.FastacError, match=r"layout='t3hd', and its key tensor has the shape \(12, 8\)"):
        fastac.checkpoint(lambda *qkv: opaque_function.apply(*qkv)[0], *flat)


def test_the_key_is_the_second_tensor_that_may_be_one(counted: Counter[str]) -> None:
    """Not the lengths of packed sequences, which some kernels take before it."""

    class Packed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, ends: Any, k: Any, v: Any) -> Any:
            output, statistics = kernel(q, k, v)
            ctx.save_for_backward(q, k, v, output, statistics)
            return output

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            q, k, v = support.attention_math_backward(grad, *ctx.saved_tensors)
            return q, None, k, v

    fastac.make_visible(Packed, layout="bhsd", dropout=None)
    attend = block(lambda q, k, v: (Packed.apply(q, torch.tensor([0, 12]), k, v),))
    for min_kv, executions in ((10, 1), (11, 2)):
        counted.clear()
        policy = Policy("attn_only", min_kv=min_kv)
        train_step(functools.partial(fastac.checkpoint, attend, policy=policy), inputs())
        assert counted == {KERNEL: executions}


@pytest.mark.parametrize("how", ["keywords", "a context of its own"])
def test_a_forward_that_is_called_by_hand_just_runs(how: str) -> None:
    """Functions use one another's forward as a helper, in regions as well."""
    opaque_function = function()
    fastac.make_visible(opaque_function, dropout=None)
    q, k, v = (tensor.detach() for tensor in inputs().values())
    context = types.SimpleNamespace(
        save_for_backward=lambda *_: None, mark_non_differentiable=lambda *_: None, set_materialize_grads=lambda _: None
    )
    expected = kernel(q, k, v)[0]

    def helper() -> torch.Tensor:
        if how == "keywords":
            return opaque_function.forward(context, q, k=k, v=v)[0]
        return opaque_function.forward(context, q, k, v)[0]

    assert torch.equal(helper(), expected)
    weight = torch.ones(1, requires_grad=True)
    assert torch.equal(fastac.checkpoint(lambda w: helper() * w, weight), expected)
    assert not opaque._calls


def test_a_forward_that_another_function_calls_as_a_helper() -> None:
    opaque_function = function()
    fastac.make_visible(opaque_function, layout="bhsd", dropout=None)

    class Outer(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            return opaque_function.forward(ctx, q, k, v=v)[0]

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return opaque_function.backward(ctx, grad)[:3]

    data = inputs()
    reference = train_step(lambda query, key, value: Outer.apply(query, key, value), data)
    region = functools.partial(fastac.checkpoint, lambda query, key, value: Outer.apply(query, key, value))
    assert_same(train_step(region, data), reference)


def test_a_length_that_is_a_tensor_is_not_read(counted: Counter[str]) -> None:
    """Reading it would wait for the device: the key's own length counts."""
    opaque_function = function()
    fastac.make_visible(opaque_function, key="k", layout="bhsd", max_kv="settings", dropout=None)
    attend = block(opaque_function.apply, None, torch.tensor(3))
    for min_kv, executions in ((10, 1), (11, 2)):
        counted.clear()
        policy = Policy("attn_only", min_kv=min_kv)
        train_step(functools.partial(fastac.checkpoint, attend, policy=policy), inputs())
        assert counted == {KERNEL: executions}


def test_another_set_of_options_is_refused() -> None:
    opaque_function = function()
    op = fastac.make_visible(opaque_function, layout="bhsd", dropout=None)
    assert fastac.make_visible(opaque_function, layout="bhsd", dropout=None) is op
    with pytest.raises(fastac.FastacError, match=r"is visible already.*'bhsd', None, None.*make it visible before"):
        fastac.make_visible(opaque_function, layout="bhsd", dropout="dropout_p")


def test_a_subclass_of_tensor_that_its_op_can_not_take_is_told() -> None:
    opaque_function = function()
    fastac.make_visible(opaque_function, layout="bhsd", dropout=None)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        sharded = [distribute_tensor(t.detach(), mesh, [Replicate()]).requires_grad_() for t in inputs().values()]
        with pytest.raises(fastac.PolicyNotAppliedError, match=r"made visible, was called where its op could not be"):
            fastac.checkpoint(lambda *qkv: opaque_function.apply(*qkv)[0], *sharded)
    finally:
        torch.distributed.destroy_process_group()


def test_a_name_can_be_used_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise fastac.FastacError("another package stands there")

    name = f"tried_again_{uuid.uuid4().hex[:8]}"
    opaque_function = function()
    monkeypatch.setattr(registry, "after_registration", [refuse])
    with pytest.raises(fastac.FastacError, match="another package"):
        fastac.make_visible(opaque_function, name=name, dropout=None)
    monkeypatch.undo()
    assert fastac.make_visible(opaque_function, name=name, dropout=None)._schema.name == f"fastac_opaque::{name}"


def test_two_threads_at_once(library: types.ModuleType, counted: Counter[str]) -> None:
    """The second waits until the first has made the Function visible."""
    begun, data = threading.Barrier(2), [inputs(), inputs()]
    sys.modules[library.__name__] = library

    def train(mine: dict[str, torch.Tensor]) -> Any:
        begun.wait()
        return train_step(functools.partial(fastac.checkpoint, block(library.Attention.apply)), mine, seed=0)

    opaque._looked_at = 0
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(train, data))
    assert counted == {KERNEL: 2}


@pytest.mark.parametrize("retain", [True, False])
def test_a_gradient_that_is_taken_inside_the_region(retain: bool, counted: Counter[str]) -> None:
    """Its graph is gone when recompute comes, and with it the context. What the forward had set there is not."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
            output, statistics = kernel(q, k, v)
            ctx.save_for_backward(q, k, v, output, statistics)
            ctx.factor = 2.0
            ctx.set_materialize_grads(False)
            return output * 2.0, statistics + 1

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor, unused: torch.Tensor | None) -> Any:
            assert unused is None, "it has no formula for that, and would raise"
            return support.attention_math_backward(grad * ctx.factor, *ctx.saved_tensors)

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inner = query.detach().requires_grad_()
            loss = Scaled.apply(inner, key, value)[0].square().sum()
            (step,) = torch.autograd.grad(loss, inner, retain_graph=retain)
        return torch.tanh(Scaled.apply(query - 0.1 * step, key, value)[0])

    assert_made_visible_it_is_replayed(Scaled, region, 2, counted)
