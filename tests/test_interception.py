"""Interception: registered ops pass by the open scope, and by nothing else."""

from __future__ import annotations

import contextlib
import functools
import logging
import subprocess
import sys
import textwrap
import threading
import time
import types
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastac
from fastac.engine import blocks, torch_private, interception
from fastac import entries, registry
from fastac.policy import Policy
from fastac.scopes import Tape, thread
from fastac.engine.tape import Record
from tests import support


@pytest.fixture(autouse=True)
def _installed() -> None:
    interception.install()


def qkv(requires_grad: bool = True) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 6, 4, generator=generator).requires_grad_(requires_grad) for _ in range(3)]


def record() -> Record:
    return Record(Tape(), Policy("attn_only"))


def test_every_op_with_a_row_is_intercepted() -> None:
    assert {op.qualified_name for op in registry.present_ops()} <= set(interception.intercepted())
    assert support.CPU_ATTENTION in interception.intercepted()


def test_installing_again_changes_nothing() -> None:
    before = {name: (holder, holder.resolved) for name, holder in interception._holders.items()}
    interception.install()
    interception._known_op_names = 0  # as if a library had been loaded
    interception.install()
    assert {name: (holder, holder.resolved) for name, holder in interception._holders.items()} == before


def test_installing_from_many_threads_intercepts_each_op_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their libraries were loaded after their rows came in, so that nobody has looked yet."""
    names = [f"many_{uuid.uuid4().hex[:8]}" for _ in range(4)]
    for name in names:
        row = fastac.AttentionOp(backend="tests", namespace=support.NAMESPACE, name=name, layout="bhsd", dropout=None)
        fastac.register(row)
    attends = [support.attention_function(support.define_attention_op(name)) for name in names]
    before = entries.generation.current
    intercept = interception._intercept
    monkeypatch.setattr(interception, "_intercept", lambda resolved: time.sleep(0.01) or intercept(resolved))
    with ThreadPoolExecutor(4) as pool:
        for future in [pool.submit(interception.install) for _ in range(8)]:
            future.result()
    assert entries.generation.current == before + len(names)
    for attend in attends:
        with record() as scope:
            attend(*qkv())
        assert len(scope.calls) == 1


def test_a_row_that_comes_after_enable_is_intercepted_at_once() -> None:
    attend = support.custom_attention(f"row_{uuid.uuid4().hex[:8]}")
    with record() as scope:
        attend(*qkv())
    assert len(scope.calls) == 1


def test_installing_is_cheap_when_nothing_was_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "present_ops", lambda: pytest.fail("looked through every op again"))
    interception.install()


def test_an_open_scope_is_told_of_every_attention_call() -> None:
    with record() as scope:
        F.scaled_dot_product_attention(*qkv())
        F.scaled_dot_product_attention(*qkv())
    F.scaled_dot_product_attention(*qkv())
    assert [op.qualified_name for op in scope.calls] == [support.CPU_ATTENTION] * 2


def test_without_a_region_a_call_goes_to_the_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call more, nothing recorded, nothing counted, nothing looked up."""
    expected = F.scaled_dot_product_attention(*qkv())
    for name in ("keys", "draws", "argument", "check_writes"):
        monkeypatch.setattr(registry.ResolvedOp, name, lambda *_: pytest.fail("read a call that nobody asked about"))
    monkeypatch.setattr(registry, "classify", lambda *_: pytest.fail("classified an op"))
    kernels = []
    run_kernel = interception.run_kernel
    monkeypatch.setattr(interception, "run_kernel", lambda *call: kernels.append(1) or run_kernel(*call))
    assert torch.equal(F.scaled_dot_product_attention(*qkv()), expected)
    assert kernels == [1]


@pytest.mark.parametrize("decomposed", [False, True])
def test_a_watcher_that_leaves_hides_no_other(decomposed: bool) -> None:
    """It leaves in its own thread, while an attention call in this one is told to all."""
    told: list[str] = []

    def leaves(*_: Any) -> None:
        interception.watchers.remove(leaves)
        told.append("the one that leaves")

    def stays(*_: Any) -> None:
        told.append("the one behind it")

    interception.install()
    interception.watchers += [leaves, stays]
    try:
        with sdpa_kernel(SDPBackend.MATH if decomposed else SDPBackend.FLASH_ATTENTION):
            F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 8, 4))
    finally:
        interception.watchers.remove(stays)
    assert told == ["the one that leaves", "the one behind it"]


def test_a_region_whose_observer_can_not_begin_is_not_open() -> None:
    class Fails(contextlib.nullcontext[None]):
        def __enter__(self) -> None:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"), Record(Tape(), Policy("attn_only"), observer=Fails()):
        pass
    assert thread.scope is None


def test_outputs_and_gradients_are_those_of_the_kernel() -> None:
    """Compared with a process in which nothing is intercepted."""
    code = """
    import sys, torch, torch.nn.functional as F
    if sys.argv[1] == "intercepted":
        import fastac
        from fastac.engine import interception
        interception.install()
        assert interception.intercepted()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(1, 2, 6, 4, generator=generator).requires_grad_() for _ in range(3)]
    out = F.scaled_dot_product_attention(*tensors)
    out.square().sum().backward()
    print([t.flatten().tolist() for t in (out, *[t.grad for t in tensors])])
    """
    run = [sys.executable, "-c", textwrap.dedent(code)]
    outputs = [subprocess.check_output([*run, how], text=True) for how in ("intercepted", "plain")]
    assert outputs[0] == outputs[1]


def test_a_scope_is_told_of_its_own_thread_alone() -> None:
    inside, done = threading.Event(), threading.Event()

    def other_thread() -> None:
        assert inside.wait(30)
        F.scaled_dot_product_attention(*qkv())
        done.set()

    thread = threading.Thread(target=other_thread)
    thread.start()
    with record() as scope:
        inside.set()
        assert done.wait(30)
    thread.join()
    assert not scope.calls


def test_every_thread_has_a_scope_of_its_own() -> None:
    barrier = threading.Barrier(4)

    def count(calls: int) -> int:
        barrier.wait(30)
        with record() as scope:
            for _ in range(calls):
                F.scaled_dot_product_attention(*qkv())
        return len(scope.calls)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(count, [1, 7, 13, 20])) == [1, 7, 13, 20]


def test_watchers_are_told_where_no_region_is_open() -> None:
    seen = []

    def watcher(op: Any, args: Any, kwargs: Any) -> None:
        seen.append(op.qualified_name)

    interception.watchers.append(watcher)
    try:
        F.scaled_dot_product_attention(*qkv())
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            F.scaled_dot_product_attention(*qkv())
        with record():
            F.scaled_dot_product_attention(*qkv())
    finally:
        interception.watchers.remove(watcher)
    assert seen == [support.CPU_ATTENTION, "aten::_safe_softmax"]


def test_decomposed_attention_is_told_too() -> None:
    with record() as scope, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        F.scaled_dot_product_attention(*qkv())
    assert [(found.attention, found.keys) for found in scope.missed] == [("scaled_dot_product_attention", 6)]


def test_a_region_that_was_open_before_an_op_was_intercepted_goes_on_without_it() -> None:
    with record() as scope:
        attend = support.custom_attention(f"late_{uuid.uuid4().hex[:8]}")
        interception.install()
        expected = attend(*qkv())
    assert not scope.calls
    with record() as scope:
        assert torch.equal(attend(*qkv()), expected)
    assert len(scope.calls) == 1


@pytest.mark.parametrize("first", ["row", "library"])
def test_somebody_else_at_the_dispatch_key_is_refused(first: str) -> None:
    name = f"taken_{uuid.uuid4().hex[:8]}"
    row = fastac.AttentionOp(backend="tests", namespace=support.NAMESPACE, name=name, layout="bhsd")
    library = torch.library.Library(support.NAMESPACE, "IMPL")

    def load() -> None:
        support.define_attention_op(name)
        library.impl(name, lambda keyset, *args: args, "BackendSelect", with_keyset=True)

    steps = [lambda: fastac.register(row), load, interception.install]
    if first == "library":
        steps = [load, lambda: fastac.register(row)]
    before = list(registry._rows)
    try:
        for step in steps[:-1]:
            step()
        with pytest.raises(fastac.FastacError, match=f"{name} can not be saved: another package .* BackendSelect"):
            steps[-1]()
    finally:
        registry._rows[:] = before
        registry._decisions.clear()
    interception.install()
    assert f"{support.NAMESPACE}::{name}" not in interception.intercepted()


def test_attention_ops_leave_the_dispatch_key_to_us() -> None:
    """Looked up in a process of its own: here it is taken, by fastac."""
    code = """
    import fastac
    from fastac import registry
    from fastac.engine.torch_private import has_kernel
    print([op.name for op in registry.present_ops() if has_kernel(op.qualified_name, "BackendSelect")])
    """
    assert subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True).strip() == "[]"
    assert torch_private.has_kernel(support.CPU_ATTENTION, "BackendSelect")


def test_an_op_that_is_defined_again_is_read_by_its_new_schema() -> None:
    """As a notebook cell does that runs again, here with one argument more in front of the dropout."""
    name = f"again_{uuid.uuid4().hex[:8]}"
    row = fastac.AttentionOp(
        backend="tests", namespace="fastac_tests", name=name, key="k", layout="bhsd", dropout="dropout_p"
    )

    def define(extra: str) -> Any:
        def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> torch.Tensor:
            return torch.nn.functional.dropout(support.attention_math(q, k, v)[0], rest[-1])

        schema = f"(Tensor q, Tensor k, Tensor v{extra}, float dropout_p) -> Tensor"
        op = torch.library.custom_op(f"fastac_tests::{name}", forward, mutates_args=(), schema=schema)

        def setup(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
            ctx.save_for_backward(output)
            ctx.more = len(inputs) - 3

        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return *[grad * ctx.saved_tensors[0]] * 3, *[None] * ctx.more

        op.register_autograd(backward, setup_context=setup)
        return op

    inputs = {n: torch.randn(1, 2, 8, 4).requires_grad_() for n in ("query", "key", "value")}
    fastac.register(row)
    for extra, more in (("", ()), (", bool causal", (False,))):
        op = define(extra)

        def region(query: Any, key: Any, value: Any, op: Any = op, more: Any = more) -> Any:
            return torch.nn.functional.dropout(torch.tanh(op(torch.tanh(query), key, value, *more, 0.3)), 0.3)

        reference = support.train_step(region, inputs)
        blocks._kinds.clear()
        support.assert_same(support.train_step(functools.partial(fastac.checkpoint, region), inputs), reference)


def test_a_module_that_was_imported_since_is_looked_into(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also by a region that has been known for long: its op is saved from the first call on."""
    name = f"imported_{uuid.uuid4().hex[:8]}"
    fastac.register(
        fastac.AttentionOp(backend="tests", namespace="fastac_tests", name=name, layout="bhsd", dropout=None)
    )
    inputs = {n: torch.randn(1, 2, 8, 4).requires_grad_() for n in ("query", "key", "value")}
    attend: list[Any] = [torch.nn.functional.scaled_dot_product_attention]

    def region(query: Any, key: Any, value: Any) -> Any:
        return torch.tanh(attend[0](torch.tanh(query), key, value))

    support.train_step(functools.partial(fastac.checkpoint, region), inputs)
    attend[0] = support.attention_function(support.define_attention_op(name))
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    reference = support.train_step(region, inputs)
    support.executions.clear()
    support.assert_same(support.train_step(functools.partial(fastac.checkpoint, region), inputs), reference)
    assert support.executions == {f"fastac_tests::{name}": 1}


@pytest.mark.usefixtures("rows_as_before")
def test_a_row_whose_op_turns_out_not_to_be_savable_is_left_out_until_it_is_called(
    caplog: pytest.LogCaptureFixture,
) -> None:
    name = f"late_{uuid.uuid4().hex[:8]}"
    fastac.register(fastac.AttentionOp(backend="tests", namespace="fastac_tests", name=name, layout="bhsd"))
    op = support.define_attention_op(name, "always_writes")
    with caplog.at_level(logging.ERROR, logger="fastac"):
        interception.install()
    assert "writes its argument 'out'" in caplog.text
    inputs = {n: torch.randn(1, 2, 8, 4) for n in ("query", "key", "value")}
    inputs["query"].requires_grad_()
    attend = support.attention_function(op)
    with pytest.raises(fastac.FastacError, match="writes its argument 'out'"):
        fastac.checkpoint(attend, *inputs.values(), torch.empty(1, 2, 8, 4))
