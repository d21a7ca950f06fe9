"""fastac.graph.compile: inductor leaves the recomputation in the backward, or says that it did not."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch.fx import Graph, GraphModule, Node

import fastac.graph
from fastac import FastacError, PolicyNotAppliedError
from fastac.graph import Traced, compilation, internals
from fastac.graph.liveness import peak_bytes
from tests import support
from tests.graph.steps import attention_nodes
from tests.live_bytes import allocated_peak
from tests.support import AttentionBlock, relative_error, stack

TOKENS = 512


@pytest.fixture(autouse=True)
def fresh_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled so far, no cache."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("KINETO_LOG_LEVEL", "99")  # the profiler tells of every start and stop
    inductor = torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, compile_threads=1)
    autograd = torch._functorch.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False)
    torch._dynamo.reset()
    with inductor, autograd:
        yield
    torch._dynamo.reset()


def inputs() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        "video": torch.randn(1, TOKENS, 16, generator=generator),
        "text": torch.randn(1, 6, 16, generator=generator),
    }


def step_with(policy: str, layers: int = 3) -> Traced:
    model = stack(policy="full", layers=layers)

    def step(**inputs: Any) -> Any:
        loss = model(**inputs).square().mean()
        return loss, torch.autograd.grad(loss, list(model.parameters()))

    return fastac.graph.apply(fastac.graph.trace(step, model, **inputs()), policy)


def merge_equal_nodes(graph: Graph) -> None:
    """Common subexpression elimination, as a user's own pass or one of torch's does it."""
    seen: dict[Any, Node] = {}
    for node in list(graph.nodes):
        key = (node.target, str(node.args), str(node.kwargs))
        if node.op == "call_function" and seen.setdefault(key, node) is not node:
            node.replace_all_uses_with(seen[key])
            graph.erase_node(node)


@pytest.mark.slow
def test_the_compiled_step_runs_attention_once_and_needs_no_more_memory() -> None:
    step = step_with("attn_only")
    compiled = fastac.graph.compile(step)
    support.count_cpu_attention()
    expected = step(**inputs())
    for _ in range(2):
        support.executions.clear()
        found = compiled(**inputs())
        assert support.executions.total() == len(attention_nodes(step.graph_module)) == 6
        assert relative_error(found[0], expected[0]) < 1e-5
        assert all(relative_error(*pair) < 1e-4 for pair in zip(found[1], expected[1], strict=True))
    given = inputs()
    peak, compiled_peak = (allocated_peak(functools.partial(one, **given)) for one in (step, compiled))
    assert compiled_peak < 1.25 * peak


def test_a_pass_that_merges_equal_nodes_is_noticed() -> None:
    with pytest.raises(PolicyNotAppliedError, match=r"moved or merged what is recomputed"):
        fastac.graph.compile(step_with("attn_only"), post_grad_custom_pre_pass=merge_equal_nodes)(**inputs())


def test_attention_that_is_merged_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under full, equal nodes are also the attention and its recomputation."""
    monkeypatch.setattr(compilation, "HIGHER", 99)
    with pytest.raises(PolicyNotAppliedError, match=r"runs attention 6 times .* it was 12 times"):
        fastac.graph.compile(step_with("full"), joint_custom_pre_pass=merge_equal_nodes)(**inputs())


def test_the_pass_that_inductor_reorders_with_is_noticed() -> None:
    """And is off by default, see the test above."""
    with pytest.raises(PolicyNotAppliedError, match="reorder_for_locality"):
        fastac.graph.compile(step_with("attn_only"), reorder_for_locality=True)(**inputs())


@pytest.mark.parametrize("name", compilation.UNSEEN)
def test_what_acts_after_the_last_look_is_refused(name: str) -> None:
    with pytest.raises(FastacError, match=rf"{name}=True: inductor's scheduler would move"):
        fastac.graph.compile(step_with("attn_only", layers=1), **{name: True})


def test_passes_of_others_are_called_as_well() -> None:
    """One or several, among the options or in inductor's configuration."""
    called = []

    def noted(name: str, fails: bool = False) -> Callable[[Any], Any]:
        def one(given: Any) -> Any:
            called.append(name)
            if fails:
                raise NotImplementedError("that is enough")
            return given

        return one

    configured = {
        "joint_custom_pre_pass": noted("joint"),
        "post_grad_custom_post_pass": noted("overridden"),
        internals.POST_FUSION: noted("after fusion", fails=True),
    }
    with torch._inductor.config.patch(configured):
        compiled = fastac.graph.compile(
            step_with("attn_only", layers=1), post_grad_custom_post_pass=[noted("one"), noted("another")]
        )
    with pytest.raises(Exception, match="that is enough"):
        compiled(**inputs())
    assert called == ["joint", "one", "another", "after fusion"]


def test_an_error_of_the_step_is_not_taken_for_one_of_before() -> None:
    look = compilation._Look(0)

    def fails() -> None:
        raise ValueError("of the step")

    look.failure = PolicyNotAppliedError("of before")
    with pytest.raises(ValueError, match="of the step"):
        compilation._Compiled(fails, look)()


@pytest.mark.slow
def test_a_compile_without_a_look_is_noticed() -> None:
    compiled = fastac.graph.compile(step_with("attn_only", layers=1), use_joint_graph_passes=False)
    with pytest.raises(PolicyNotAppliedError, match="did not show what it compiled"):
        compiled(**inputs())


def test_a_compiled_step_is_not_compiled_again() -> None:
    with pytest.raises(FastacError, match=r"compiled already\. Pass the one that fastac\.graph\.apply returned"):
        fastac.graph.compile(fastac.graph.compile(step_with("attn_only", layers=1)))


def test_a_step_without_a_policy_is_not_compiled() -> None:
    """One that went through the passes one by one has one."""
    model = stack(policy="full", layers=1)

    def step(**inputs: Any) -> Any:
        return torch.autograd.grad(model(**inputs).square().mean(), [*model.parameters()])

    traced = fastac.graph.trace(step, model, **inputs())
    with pytest.raises(PolicyNotAppliedError, match=r"no policy.*compile\(fastac\.graph\.apply\(traced, \.\.\.\)\)"):
        fastac.graph.compile(traced)
    tagged = fastac.graph.tag(fastac.graph.functionalize(traced.graph_module))
    fastac.graph.compile(dataclasses.replace(traced, graph_module=fastac.graph.rematerialize(tagged)))


def test_what_is_compiled_elsewhere_is_refused() -> None:
    step = step_with("attn_only", layers=1)
    with pytest.raises(FastacError, match=r"got function\..*fastac\.graph\.compile_step\(step\)"):
        fastac.graph.compile(plain_step("attn_only"))  # type: ignore[arg-type]
    with pytest.raises(FastacError, match=r"got Traced\..*compiled by fastac\.graph\.compile\."):
        fastac.graph.compile_step(step)


@pytest.mark.parametrize("options", [{"mode": "max-autotune"}, {"max_autotun": True}, {"max_autotune": 3}])
def test_what_is_no_option_of_inductor_is_refused(options: dict[str, Any]) -> None:
    (name,) = options
    for compile_it in (
        lambda: fastac.graph.compile(step_with("attn_only", layers=1), **options),
        lambda: fastac.graph.compile_step(plain_step("attn_only"), **options),
    ):
        with pytest.raises(FastacError, match=rf"takes inductor's options only, .* e\.g\. max_autotune=True.*{name}"):
            compile_it()


def test_a_pass_that_holds_something_else_for_longer_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """Such as inductor's own, that adds up gradients of a shared weight at the end: that undoes no recomputation."""
    graph_module = step_with("attn_only", layers=2).graph_module
    assert isinstance(graph_module, GraphModule)
    graph = graph_module.graph
    look = compilation._Look(len(attention_nodes(graph_module)))
    look.before(graph)
    look.after(graph)
    assert caplog.text == ""
    first = next(node for node in graph.nodes if node.op == "call_function")
    (output,) = graph.find_nodes(op="output")
    with graph.inserting_before(first):
        held = graph.call_function(torch.ops.aten.zeros.default, ([peak_bytes(graph)],))
    held.meta["val"] = torch.empty(peak_bytes(graph), device="meta")
    with graph.inserting_before(output):
        graph.call_function(torch.ops.aten.neg.default, (held,))
    look.after(graph)
    assert "It is not the checkpointed regions that need more" in caplog.text


@pytest.mark.slow
def test_the_estimate_is_what_is_measured() -> None:
    """But for what kernels need by themselves, which grows with threads, not with layers."""
    for policy in ("attn_only", "full"):
        few, many = step_with(policy, layers=2), step_with(policy, layers=6)
        given = inputs()
        measured = [allocated_peak(functools.partial(step, **given)) for step in (few, many)]
        estimated = [peak_bytes(step.graph_module.graph) for step in (few, many)]
        assert estimated[1] - estimated[0] == pytest.approx(measured[1] - measured[0], rel=0.02)
        assert estimated[0] <= measured[0] < 1.6 * estimated[0]


# A step that torch.compile traces itself


def test_a_step_without_regions_or_that_is_not_one_graph_is_refused() -> None:
    with pytest.raises(PolicyNotAppliedError, match=r"no checkpointed region .* Call fastac\.enable\(model\) first"):
        fastac.graph.compile_step(plain_step("none"))(**inputs())
    torch._dynamo.reset()
    model = stack(policy="attn_only", layers=1)

    def step(detached: bool, breaks: bool, **inputs: Any) -> Any:
        loss = model(**inputs).square().mean()
        if breaks:
            torch._dynamo.graph_break()
        return loss.detach() if detached else loss, torch.autograd.grad(loss, [*model.parameters()])

    compiled = fastac.graph.compile_step(step)
    with pytest.raises(FastacError, match=r"Return it detached: return loss\.detach\(\)") as refused:
        compiled(False, False, **inputs())
    assert isinstance(refused.value.__cause__, internals.Unsupported)
    with pytest.raises(FastacError, match=r"must be one graph.*graph_break") as refused:
        compiled(True, True, **inputs())
    assert isinstance(refused.value.__cause__, internals.Unsupported)


def plain_step(policy: str, dropout: float = 0.0) -> Callable[..., Any]:
    model = stack(policy=policy, layers=3, block=lambda: AttentionBlock(dropout=dropout))
    parameters = list(model.parameters())

    def step(**inputs: Any) -> Any:
        loss = model(**inputs).square().mean()
        return loss.detach(), torch.autograd.grad(loss, parameters)

    return step


def test_a_step_that_dynamo_traces_is_exact_and_runs_attention_once() -> None:
    """What compile_step is made of, with a backend that changes nothing else."""
    support.count_cpu_attention()
    given = inputs()
    compiled = torch.compile(plain_step("attn_only"), backend="aot_eager", fullgraph=True)
    expected = plain_step("none")(**given)
    for _ in range(2):
        support.executions.clear()
        with internals.tracing_autograd_calls():
            found = compiled(**given)
        assert support.executions.total() == 6
        assert torch.equal(found[0], expected[0])
        assert all(map(torch.equal, found[1], expected[1]))
    with internals.tracing_autograd_calls():
        peak = allocated_peak(lambda: compiled(**given))
    assert peak < 1.02 * allocated_peak(lambda: plain_step("attn_only")(**given))


@pytest.mark.slow
def test_a_step_through_torch_compile_alone() -> None:
    support.count_cpu_attention()
    given = inputs()
    compiled = fastac.graph.compile_step(plain_step("attn_only"))
    expected = plain_step("none")(**given)
    for _ in range(2):
        support.executions.clear()
        found = compiled(**given)
        assert support.executions.total() == 6
        assert all(relative_error(*pair) < 1e-4 for pair in zip(found[1], expected[1], strict=True))
    assert allocated_peak(lambda: compiled(**given)) < 1.25 * allocated_peak(lambda: plain_step("attn_only")(**given))


def test_what_a_step_through_torch_compile_alone_can_not_do_is_refused() -> None:
    with pytest.raises(PolicyNotAppliedError, match="reorder_for_locality"):
        fastac.graph.compile_step(plain_step("attn_only"), reorder_for_locality=True)(**inputs())
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="does not support RNG ops"):  # torch's own refusal
        fastac.graph.compile_step(plain_step("attn_only", dropout=0.5))(**inputs())
