"""After a trace the process is as before: torch.compile works, whatever was in the trace and however it ended.

torch's selective checkpointing, under make_fx, leaves tags in what new nodes are marked with; a later compile of
something else reads them and dies.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.fx.traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
import fastac.graph
from tests.graph.steps import ATTENTION, run, step_of, targets
from tests.support import AttentionBlock, AttentionStack, assert_same, relative_error, stack, stack_inputs


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    before = dict(torch.fx.traceback.current_meta)
    yield
    torch.fx.traceback.current_meta = before
    torch._dynamo.reset()


def prefer_recompute(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE


class OwnSelective(AttentionStack):
    """fastac's regions, and one of torch's own selective checkpointing. stops: the trace raises inside of it."""

    stops = False

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        video = super().forward(video, text)
        contexts = functools.partial(create_selective_checkpoint_contexts, prefer_recompute)
        return torch_checkpoint(self.last, video, use_reentrant=False, context_fn=contexts)

    def last(self, video: torch.Tensor) -> torch.Tensor:
        video = video.sin()
        if self.stops:
            raise ZeroDivisionError
        return video.cos()


def compile_something_else() -> None:
    """A model whose blocks torch checkpoints, so that AOT looks for tags."""
    inputs = stack_inputs()
    expected = run(step_of(stack()), inputs)
    model = torch.compile(stack(policy="torch"), backend="aot_eager", fullgraph=True)
    output = model(**inputs)
    assert relative_error(output, expected["step.outputs"]) < 1e-6
    output.square().sum().backward()
    graph_module = make_fx(lambda x: x.sin())(torch.ones(2))
    assert not any("recompute" in node.meta for node in graph_module.graph.nodes)


@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_a_compile_after_a_trace(own: bool, stops: bool) -> None:
    torch.manual_seed(0)
    model = OwnSelective(policy="attn_only") if own else stack(policy="attn_only")
    inputs = stack_inputs()
    before = dict(torch.fx.traceback.current_meta)
    if stops:
        step = step_of(model)
        model.stops = True
        with pytest.raises(ZeroDivisionError):
            fastac.graph.trace(lambda **inputs: step(**inputs) if own else 1 // 0, model, **inputs)
    else:
        found = run(fastac.graph.apply(fastac.graph.trace(step_of(model), model, **inputs)), inputs)
        plain = run(step_of(model), inputs)
        assert_same(found, plain)
    assert torch.fx.traceback.current_meta == before
    compile_something_else()


class Sines(TorchDispatchMode):
    """Counts sines that are really computed."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.sin.default
        return func(*args, **(kwargs or {}))


def test_torchs_own_selective_checkpointing_recomputes_in_a_trace_what_it_does_in_eager_mode() -> None:
    model, inputs = OwnSelective(), stack_inputs()
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    with Sines() as eager:
        run(step_of(model), inputs)
    assert targets(traced.graph_module)["aten.sin.default"] == eager.count == 3  # one for the gradient of cosine
    assert_same(run(traced, inputs), run(step_of(model), inputs))


def test_torchs_own_selective_checkpointing_spoils_what_comes_later() -> None:
    """What the above is for, under plain make_fx; should torch mend it, `tracing` in internals.py can be simpler."""
    model, x = OwnSelective(), torch.randn(1, 24, 16, requires_grad=True)

    def gradient(x: torch.Tensor) -> Any:
        contexts = functools.partial(create_selective_checkpoint_contexts, prefer_recompute)
        return torch.autograd.grad(torch_checkpoint(model.last, x, use_reentrant=False, context_fn=contexts).sum(), x)

    make_fx(gradient)(x)
    assert torch.fx.traceback.current_meta.get("recompute") is CheckpointPolicy.PREFER_RECOMPUTE


def test_a_trace_that_begins_with_such_tags_is_not_misled() -> None:
    """What somebody else's trace left is neither in the graph nor taken away."""
    torch.fx.traceback.current_meta = {"recompute": CheckpointPolicy.MUST_SAVE, "ac_graph_id": 5}
    model, inputs = stack(policy="full"), stack_inputs()
    done = fastac.graph.apply(fastac.graph.trace(step_of(model), model, **inputs), "attn_only")
    assert targets(done.graph_module)[ATTENTION] == 4
    assert_same(run(done, inputs), run(step_of(stack()), inputs))


def _summed(block: Any) -> Any:
    return lambda video, text: fastac.checkpoint(block, video, text).sum()


def test_regions_under_a_users_own_trace_leave_nothing() -> None:
    for block in (AttentionBlock(), lambda video, text: 1 // 0):
        inputs = stack_inputs()

        traced = make_fx(_summed(block))
        if isinstance(block, AttentionBlock):
            traced(*inputs.values())
        else:
            with pytest.raises(ZeroDivisionError):
                traced(*inputs.values())
        assert torch.fx.traceback.current_meta == {}
    compile_something_else()


def test_a_trace_of_non_strict_tracing_with_a_context_is_no_compile() -> None:
    """Tracers built around make_fx set a TracingContext, by which alone they look like AOT."""
    model, inputs = stack(policy="attn_only"), stack_inputs()
    mode = fastac.graph.internals.fake_mode()
    fakes = [fastac.graph.internals.fake_of(value, mode) for value in inputs.values()]
    context = torch._guards.tracing(torch._guards.TracingContext(mode))
    with mode, context, torch.compiler._non_strict_tracing_context(), torch.fx.traceback.preserve_node_meta():
        graph_module = make_fx(lambda *values: model(*values).sum())(*fakes)
    assert len(fastac.graph.nodes.regions(graph_module)) == 2
