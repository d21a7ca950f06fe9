"""Functions that torch.compile was applied to, inside blocks that are not compiled themselves.

flex_attention compiled by inductor leaves no call to see. Its backward does not exist on the CPU, so a compiler of the
test's own hides the op in the same way: in the compiled forward a plain function stands in its place.
"""

from __future__ import annotations

import functools
import math
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._C._dynamo.eval_frame import set_guard_complete_hook
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.callback import callback_handler
from torch.nn.attention import flex_attention as flex

import fastac
from fastac import diagnosis
from fastac.diagnosis.autograd_graph import nodes_between, ran_compiled_code
from fastac.compile.torch_private import CompiledCalls
from fastac.diagnosis.observer import Observer
from fastac.policy import resolve
from tests import support
from tests.support import train_step

HIDDEN = "attention inside compiled code"


def _hidden(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    support.executions[HIDDEN] += 1
    output, statistics = support.attention_math(query, key, value)
    return output, statistics / math.log(2), statistics


def _hide(module: Any, _: Any) -> Any:
    for node in module.graph.nodes:
        if node.target is torch.ops.higher_order.flex_attention:
            node.target = _hidden
    module.recompile()
    return module


hiding = aot_autograd(fw_compiler=_hide, bw_compiler=lambda module, _: module)


@pytest.fixture(autouse=True)
def _flex_trains_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    torch._dynamo.reset()
    support.executions.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


class Block(torch.nn.Module):
    def __init__(self, attend: Callable[..., Any]) -> None:
        super().__init__()
        self.attend = attend
        self.out = torch.nn.Linear(8, 8)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.attend(torch.tanh(query), key, value)))


def block(attend: Callable[..., Any]) -> Block:
    torch.manual_seed(0)
    return Block(attend)


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, 2, 128, 8)
    return {n: torch.randn(shape, generator=generator).requires_grad_() for n in ("query", "key", "value")}


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_flex_attention_that_is_compiled_on_its_own_is_refused(engine: str) -> None:
    model = block(torch.compile(flex.flex_attention, backend=hiding))
    train_step(model, inputs())
    for _ in range(2):
        with pytest.raises(fastac.PolicyNotAppliedError) as error:
            train_step(functools.partial(fastac.checkpoint, model, engine=engine), inputs())
        message = str(error.value)
        assert "at Block was saved (0 of 1 reached a registered op)" in message
        assert "flex_attention is compiled into code of its own here" in message
    assert support.executions[HIDDEN], "it did run compiled"


def test_in_a_block_that_is_compiled_as_well() -> None:
    model = block(flex.flex_attention)
    model.compile(backend=hiding)
    with pytest.raises(fastac.PolicyNotAppliedError, match="flex_attention is compiled into code of its own"):
        train_step(functools.partial(fastac.checkpoint, model), inputs())


def test_the_second_look_does_not_run_it_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eagerly it has all scores in memory at once: what it was compiled to avoid."""
    executed: list[int] = []
    eager = torch.ops.higher_order.flex_attention.py_kernels[torch._C.DispatchKey.CompositeExplicitAutograd]

    def counted(*args: Any) -> Any:
        executed.append(1)
        return eager(*args)

    op = torch.ops.higher_order.flex_attention
    monkeypatch.setitem(op.py_kernels, torch._C.DispatchKey.CompositeExplicitAutograd, counted)
    op._dispatch_cache.clear()
    try:
        model = block(torch.compile(flex.flex_attention, backend=hiding))
        with pytest.raises(fastac.PolicyNotAppliedError):
            train_step(functools.partial(fastac.checkpoint, model), inputs())
    finally:
        op._dispatch_cache.clear()
    assert not executed


@pytest.mark.parametrize("where", ["eager", "aot_eager", "model"])
def test_where_its_call_is_left_it_is_saved(where: str) -> None:
    attend = torch.compile(flex.flex_attention, backend="aot_eager") if where == "aot_eager" else flex.flex_attention
    model = block(attend)
    reference = train_step(model, inputs())
    region: Any = functools.partial(fastac.checkpoint, model)
    if where == "model":
        region = torch.compile(region, backend="aot_eager")
    found = train_step(region, inputs())
    for name, tensor in found.items():
        assert support.relative_error(tensor, reference[name]) < 1e-6, name


def test_a_compiled_function_without_attention_is_no_matter(attention_executions: Any) -> None:
    norm = torch.compile(lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]), backend="aot_eager")

    class Normed(support.AttentionBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return super().forward(norm(video), text)

    model = support.stack(layers=2, block=Normed)
    reference = train_step(model, support.stack_inputs())
    model.policy = "attn_only"
    train_step(model, support.stack_inputs())
    attention_executions.clear()
    found = train_step(model, support.stack_inputs())
    assert attention_executions == {support.CPU_ATTENTION: 4}
    for name, tensor in found.items():
        assert support.relative_error(tensor, reference[name]) < 1e-6, name


def test_compiled_code_is_told_from_the_graph() -> None:
    """The name of torch's node for compiled code, which fastac.torch_internals holds."""
    tensor = torch.ones(3, requires_grad=True)
    compiled = torch.compile(lambda x: x.sin() * 2, backend="aot_eager")
    before = tensor * 2
    assert ran_compiled_code(nodes_between((compiled(before) + 1,), (before,)))
    assert not ran_compiled_code(nodes_between((before.sin(),), (tensor,)))
    behind = compiled(tensor) * 2
    assert not ran_compiled_code(nodes_between((behind + 1,), (behind,))), "it ran before the region"


def test_in_a_first_block_whose_attention_needs_no_gradient() -> None:
    """Training the feed-forward alone: in the first block the compiled code leaves no trace in the graph."""

    class FeedForwardAlone(torch.nn.Module):
        def __init__(self, attend: Callable[..., Any]) -> None:
            super().__init__()
            self.attend = attend
            self.qkv = torch.nn.Linear(8, 24).requires_grad_(False)
            self.ffn = torch.nn.Linear(8, 8)

        def forward(self, video: torch.Tensor) -> torch.Tensor:
            return video + self.ffn(self.attend(*self.qkv(video).chunk(3, -1)))

    block, video = FeedForwardAlone(torch.compile(flex.flex_attention, backend=hiding)), torch.randn(1, 2, 128, 8)
    for _ in range(2):  # compiled in the region, or before it
        with pytest.raises(fastac.PolicyNotAppliedError, match="flex_attention is compiled into code of its own"):
            fastac.checkpoint(block, video)


def test_compiled_calls_are_counted_in_their_thread() -> None:
    """Whatever else is compiled meanwhile, and whoever else listens to dynamo."""
    compiled = torch.compile(lambda x: x.sin(), backend="eager")
    tensor, seen = torch.ones(3), []

    def theirs(hit: bool) -> bool:
        seen.append(hit)
        return hit

    before = set_guard_complete_hook(theirs)
    try:
        with CompiledCalls() as outer:
            compiled(tensor)
            with CompiledCalls() as inner:
                compiled(tensor)
                other = threading.Thread(target=compiled, args=(tensor,))
                other.start()
                other.join()
                tensor.sin()
            compiled(tensor)
        compiled(tensor)
        assert (outer.count, inner.count) == (3, 1)
        assert len(seen) == 4, "the first call finds nothing to look at"
        assert set_guard_complete_hook(theirs) is theirs
    finally:
        set_guard_complete_hook(before)


def test_compiled_calls_among_hooks_that_close_out_of_turn() -> None:
    compiled = torch.compile(lambda x: x.sin(), backend="eager")
    tensor = torch.ones(3)
    compiled(tensor)
    with CompiledCalls():
        theirs = set_guard_complete_hook(lambda hit: hit)
    try:
        set_guard_complete_hook(theirs)
        with CompiledCalls() as counted:
            compiled(tensor)
        assert counted.count == 1
    finally:
        set_guard_complete_hook(None)


def test_compiled_calls_are_counted_over_a_reset() -> None:
    """A reset of dynamo, perhaps in another thread, takes callbacks away."""

    def step(video: torch.Tensor, reset: Callable[[], None]) -> torch.Tensor:
        reset()
        return video * torch.compile(lambda x: x.sin(), backend="eager")(video.detach() + 1)

    for reset in (torch._dynamo.reset, lambda: None):
        observer = Observer(step, (), resolve("attn_only"))
        with observer:
            step(torch.ones(3, requires_grad=True), reset)
        assert observer.compiled_calls.count == 1
    assert CompiledCalls._begun not in callback_handler.start_callbacks


def test_training_goes_on_over_a_reset() -> None:
    """In the middle of a block that is seen for the first time."""

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        torch._dynamo.reset()
        return torch.nn.functional.scaled_dot_product_attention(*qkv)

    expected = train_step(functools.partial(torch.nn.Module.__call__, block(attend)), inputs())
    support.count_cpu_attention()
    support.executions.clear()
    found = train_step(functools.partial(fastac.checkpoint, block(attend)), inputs())
    support.assert_same(found, expected)
    assert support.executions.total() == 1
    assert torch._C._len_torch_dispatch_stack() == 0


def test_eager_flex_attention_is_not_taken_for_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """It compiles itself for its own ends: a second look at every block would cost a forward for nothing."""
    looks: list[Any] = []
    monkeypatch.setattr(diagnosis, "look_again", lambda *given: looks.append(given))
    train_step(functools.partial(fastac.checkpoint, block(flex.flex_attention)), inputs())
    train_step(functools.partial(fastac.checkpoint, block(flex.flex_attention)), inputs())
    assert not looks
