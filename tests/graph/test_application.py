"""fastac.graph.apply: saved outputs are saved, recompute is exact, and an error says where neither is possible."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
import fastac.graph
from fastac import FastacError, Policy, PolicyNotAppliedError
from fastac.graph import application, nodes, passes
from tests import compiler, support
from tests.compiled.steps import small
from tests.engine.test_sparse import sparse_op
from tests.graph.steps import (
    ATTENTION,
    assert_exact,
    attention_nodes,
    noisy_attention,
    run,
    step_of,
    targets,
    traced_step,
)
from tests.live_bytes import allocated_at_most
from tests.support import AttentionBlock, assert_same, build, relative_error, stack, stack_inputs

# Exact


def noisy_block(dropout: float = 0.0) -> AttentionBlock:
    return AttentionBlock(attend=lambda q, k, v: noisy_attention(q, k, v, dropout))


class Gated(AttentionBlock):
    """Writes in place where a recompute, or a missing one, would do so twice or too late. And has a softmax over
    products with weights, which is no attention."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Parameter(torch.randn(1, 16, 4))

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        gate = torch.bmm(video, self.experts).softmax(-1)
        hidden = video + torch.bmm(gate, torch.ones(1, 4, 16))
        early = hidden + 1  # needs what hidden was
        part = hidden[..., ::2]  # and this what it will be
        hidden[..., 1::2] = video[..., ::2].cos()
        hidden.add_(early).mul_(0.5)
        return super().forward(hidden * early + torch.cat([part.cos(), part.sin()], -1), text)


EXACT: dict[str, tuple[Callable[[], torch.nn.Module], str | Policy, int]] = {
    "attn_only": (AttentionBlock, "attn_only", 4),
    "full": (AttentionBlock, "full", 8),
    "long attention": (AttentionBlock, Policy("attn_only", min_kv=10), 6),
    "a gate, in place": (Gated, "attn_only", 4),
    "a kernel that draws": (lambda: noisy_block(0.5), "full", 4),
    "a kernel that draws nothing here": (noisy_block, "full", 8),
}
"""Block, policy, and attention executions of a step of two blocks, each of which attends to 24 keys and to 6.

A call that draws is saved whatever the policy, by what its row says.
"""


@pytest.mark.usefixtures("rows_as_before")
@pytest.mark.parametrize("case", EXACT)
def test_a_stack_of_blocks(case: str, caplog: pytest.LogCaptureFixture) -> None:
    support.register_row("noisy_attention", "dropout_p")
    block, policy, executions = EXACT[case]
    found = traced_step(stack(policy="full", block=block), stack_inputs(), policy)
    assert not caplog.records, "no warning: regions are marked for this tracer"
    assert len(attention_nodes(found.graph_module)) == executions
    assert_exact(stack(block=block), found, stack_inputs(), executions)


def test_a_model_of_diffusers() -> None:
    """Its blocks' own checkpointing function marks the regions; Wan's rotary embedding writes in place."""
    plain, inputs = build("WanTransformer3DModel")
    model, _ = build("WanTransformer3DModel")
    fastac.enable(model)
    assert_exact(plain, traced_step(model, inputs), inputs, 4)


def test_policies_by_name_of_the_block() -> None:
    """Names are those in the model, also where nobody called enable; a block that is called twice has one name."""
    model, plain, inputs = stack(policy="full"), stack(), stack_inputs()
    for one in (model, plain):
        one.blocks.append(one.blocks[0])
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    assert_exact(plain, fastac.graph.apply(traced, {"blocks.0": "attn_only", "blocks.*": "full"}), inputs, 6 + 2)
    assert_exact(plain, fastac.graph.apply(traced, {"blocks.0": "full", "*": "none"}), inputs, 6 + 4)
    with pytest.raises(FastacError, match=r"blocks\.1"):
        fastac.graph.apply(traced, {"blocks.0": "attn_only"})
    with pytest.raises(FastacError, match=r"layers\.\*"):
        fastac.graph.apply(traced, {"layers.*": "attn_only", "*": "full"})
    assert not any(nodes.REPEATS in nodes.marks(node) for node in traced.graph_module.graph.nodes)


def test_the_passes_one_by_one_on_a_graph_of_another_tracer() -> None:
    """make_fx with metadata kept, and a backward that is known by torch's own mark for it."""
    model, inputs = stack(policy="attn_only"), stack_inputs()

    def gradients(*values: torch.Tensor) -> Any:
        names = [name for name, _ in model.named_parameters()]
        state, arguments = dict(zip(names, values, strict=False)), values[len(names) :]
        loss = torch.func.functional_call(model, state, arguments).square().sum()
        return torch.autograd.grad(loss, values)

    values = (*model.parameters(), *inputs.values())
    with preserve_node_meta(), torch.compiler._non_strict_tracing_context(), torch.compiler._patch_engine_backward():
        graph_module = make_fx(gradients, tracing_mode="fake")(*values)
    after = fastac.graph.rematerialize(fastac.graph.tag(fastac.graph.functionalize(graph_module)))
    assert targets(fastac.graph.apply(graph_module)) == targets(after)
    assert targets(after)[ATTENTION] == 4
    assert targets(after)["aten.addmm.default"] > targets(graph_module)["aten.addmm.default"]
    with torch.no_grad():
        found = after(*values)
    assert all(map(torch.equal, found, gradients(*values)))


# Through inductor


@pytest.mark.slow
def test_the_compiled_step_runs_attention_once_and_needs_no_more_memory(tmp_path: Path) -> None:
    model = small("attn_only")
    inputs = {name: torch.randn(1, 512 if name == "video" else 6, 16) for name in ("video", "text")}
    step = traced_step(model, inputs)
    compiled = fastac.graph.compile(step, fallback_by_default=True)
    support.count_cpu_attention()
    expected = step(**inputs)
    with compiler.fresh(tmp_path):
        for _ in range(2):
            support.executions.clear()
            found = compiled(**inputs)
            assert support.executions.total() == 2
            assert relative_error(found["outputs"], expected["outputs"]) < 1e-5
            for name, gradient in expected["gradients"].items():
                assert relative_error(found["gradients"][name], gradient) < 1e-4
        assert allocated_at_most(lambda: compiled(**inputs)) < 1.1 * allocated_at_most(lambda: step(**inputs))


# Several backwards, none


@pytest.mark.parametrize("over", ["two micro-batches", "one forward"])
def test_two_backwards_in_a_step(over: str) -> None:
    """torch's own pass refuses a second backward that needs recomputation."""
    inputs, others = (stack_inputs(seed) for seed in (1, 9))

    def step_of_two(model: torch.nn.Module) -> Callable[..., Any]:
        def step(**inputs: Any) -> Any:
            parameters = list(model.parameters())
            first = model(**inputs)
            one = torch.autograd.grad(first.square().sum(), parameters, retain_graph=True)
            second = first if over == "one forward" else model(**others)
            other = torch.autograd.grad(second.sin().sum(), parameters)
            return [a + b for a, b in zip(one, other, strict=True)]

        return step

    model = stack(policy="full")
    for tensor in others.values():
        tensor.requires_grad_(False)
    traced = fastac.graph.trace(step_of_two(model), model, **inputs)
    forwards = 4 if over == "one forward" else 8
    for policy, calls in (("attn_only", forwards), ("full", forwards + 8)):
        found = fastac.graph.apply(traced, policy)
        assert len(attention_nodes(found.graph_module)) == calls
        assert all(map(torch.equal, found(**inputs), step_of_two(stack())(**inputs)))


def test_without_backward_or_regions_there_is_nothing_to_apply() -> None:
    model, plain, inputs = stack(policy="full"), stack(), stack_inputs()
    with pytest.raises(PolicyNotAppliedError, match="no backward"):
        fastac.graph.apply(fastac.graph.trace(model, model, **inputs), "attn_only")
    with pytest.raises(PolicyNotAppliedError, match=r"no checkpointed region.*fastac\.enable"):
        traced_step(plain, inputs)
    with pytest.raises(PolicyNotAppliedError, match="no checkpointed region"):  # its marks are lost
        fastac.graph.apply(make_fx(lambda: step_of(model)(**inputs)["loss"])())
    with pytest.raises(FastacError, match="a policy already"):
        fastac.graph.apply(traced_step(model, inputs, "full"), "attn_only")


# Random numbers


def test_dropout_in_regions_is_that_of_a_step_without_checkpointing() -> None:
    def block() -> AttentionBlock:
        return AttentionBlock(dropout=0.3)

    model, inputs = stack(policy="full", block=block), stack_inputs()
    found = traced_step(model, inputs, "full")
    for seed in (7, 8):
        assert_exact(stack(block=block), found, inputs, 8, seed)
    assert not torch.equal(*(run(found, inputs, seed)["step.loss"] for seed in (7, 8)))


def test_dropout_that_would_be_recomputed_is_noticed() -> None:
    model, inputs = stack(policy="full", block=lambda: AttentionBlock(dropout=0.3)), stack_inputs()
    tagged = fastac.graph.tag(
        fastac.graph.functionalize(fastac.graph.trace(step_of(model), model, **inputs).graph_module)
    )
    for node in tagged.graph.nodes:
        if "recompute" in node.meta:
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
    with pytest.raises(FastacError, match="tagged for recomputation and draws random numbers"):
        fastac.graph.rematerialize(tagged)


# In-place operators, buffers


class Counting(AttentionBlock):
    """Keeps statistics in the region: by BatchNorm, whose operator does not say so, and by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(16)
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        self.mean.lerp_(video.detach().mean((0, 1)), 0.1)
        video = super().forward(video + self.mean, text)
        return self.norm(video.mT).mT.sin()


def test_buffers_change_once() -> None:
    found, expected = stack(policy="full", block=Counting), stack(block=Counting)
    inputs = stack_inputs()
    step = traced_step(found, inputs, "full")
    for _ in range(2):
        assert_exact(expected, step, inputs, 8)
    assert_same(dict(found.named_buffers()), dict(expected.named_buffers()))


def test_what_is_changed_and_not_an_input_alone_is_refused() -> None:
    """A view of a changed buffer; a tensor from elsewhere, which a trace may change but no recompute."""
    model, inputs = stack(policy="full", block=Counting, layers=1), stack_inputs()
    model.register_buffer("alias", model.blocks[0].mean[:8])
    with pytest.raises(FastacError, match="shares its memory with"):
        traced_step(model, inputs)
    mean, other = torch.zeros(()), stack(policy="full", layers=1)

    def step(**inputs: Any) -> Any:
        mean.mul_(0.9)
        return torch.autograd.grad(other(**inputs).square().mean(), [*other.parameters()])

    traced = fastac.graph.trace(step, other, **inputs)
    with pytest.raises(FastacError, match=r"aten\.mul_\.Tensor writes its argument"):
        fastac.graph.apply(traced)


# Tags


def test_one_of_several_outputs_is_tagged_as_its_operator() -> None:
    """Its own marks may be lost; without a tag, an operator would be kept alive for its outputs."""
    model, inputs = stack(policy="full"), stack_inputs()
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    functional = fastac.graph.functionalize(traced.graph_module)
    for node in functional.graph.nodes:
        if nodes.is_getitem(node):
            node.meta.pop("custom", None)
    tagged = fastac.graph.tag(functional, dict.fromkeys(nodes.regions(functional), Policy()))
    after = fastac.graph.rematerialize(tagged)
    assert targets(after)[ATTENTION] == 4
    assert targets(after)["aten.native_layer_norm.default"] == 2 * 6
    assert_exact(stack(), dataclasses.replace(traced, graph_module=after), inputs, 4)


def test_the_backward_has_no_tags() -> None:
    """Gradients are computed once; tagged, they would be computed again for every use of them."""
    model, inputs = stack(policy="full"), stack_inputs()
    graph_module = fastac.graph.trace(step_of(model), model, **inputs).graph_module
    region = next(iter(nodes.regions(graph_module).values()))[0]
    for node in graph_module.graph.nodes:
        if nodes.is_backward(node):  # as AOT does, which copies what a forward node carries
            node.meta["custom"] = {**nodes.marks(region), **nodes.marks(node)}
    before = targets(graph_module)
    tagged = fastac.graph.tag(fastac.graph.functionalize(graph_module))
    assert not any("recompute" in node.meta for node in tagged.graph.nodes if nodes.is_backward(node))
    after = targets(fastac.graph.rematerialize(tagged))
    for backward in (ATTENTION.replace("cpu", "cpu_backward"), "aten.native_layer_norm_backward.default"):
        assert after[backward] == before[backward] > 0


def test_what_leaves_a_region_is_saved() -> None:
    """A block's output is the next one's input: recomputed, each backward would begin at the first block."""
    model, inputs = stack(policy="full", layers=4), stack_inputs()
    found = traced_step(model, inputs, "full")
    assert targets(found.graph_module)["aten.addmm.default"] == 4 * 7 + 4 * 6  # all but each block's last
    assert_exact(stack(layers=4), found, inputs, 16)


# What cannot be saved


@pytest.mark.parametrize(
    ("block", "what"),
    [
        (lambda: AttentionBlock(attend=support.math_kernel), r"(?s)AttentionStack\.blocks\.0: .*small ops"),
        (noisy_block, "noisy_attention .*no row"),
    ],
    ids=["small ops", "no row"],
)
def test_attention_that_cannot_be_saved_is_refused(block: Callable[[], torch.nn.Module], what: str) -> None:
    """attn_only is refused; full is not, and exact."""
    model, inputs = stack(policy="full", block=block), stack_inputs()
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    with pytest.raises(PolicyNotAppliedError, match=what):
        fastac.graph.apply(traced, "attn_only")
    assert_same(run(fastac.graph.apply(traced, "full"), inputs), run(step_of(stack(block=block)), inputs))


def test_a_checkpoint_of_torchs_around_a_region_is_noticed() -> None:
    """It runs the attention again that the policy saves."""
    model, inputs = stack(policy="full"), stack_inputs()

    def step(**inputs: Any) -> Any:
        loss = torch_checkpoint(model, use_reentrant=False, **inputs).square().sum()
        return torch.autograd.grad(loss, [*model.parameters()])

    traced = fastac.graph.trace(step, model, **inputs)
    with pytest.raises(PolicyNotAppliedError, match=r"runs 4 in the backward.*torch\.utils\.checkpoint around a block"):
        fastac.graph.apply(traced, "attn_only")


def test_attention_that_runs_again_or_lost_its_marks_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of the result does not rely on the tags."""

    def losing(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        functional = fastac.graph.functionalize(graph_module)
        for node in nodes.regions(functional)[max(nodes.regions(functional))]:
            node.meta["custom"] = {}
        return functional

    with monkeypatch.context() as patch:
        patch.setattr(application, "functionalize", losing)
        with pytest.raises(PolicyNotAppliedError, match="4 attention calls were to be saved; the graph has 2"):
            traced_step(stack(policy="full"), stack_inputs())
    monkeypatch.setattr(passes, "decide", lambda *_: set())
    with pytest.raises(PolicyNotAppliedError, match="runs 4 in the backward"):
        traced_step(stack(policy="full"), stack_inputs())


# Sparse attention


@pytest.mark.usefixtures("rows_as_before")
def test_what_sparse_attention_chose_is_saved_with_it() -> None:
    """A recompute that chose otherwise, as kernels that sum in no fixed order may, would meet outputs of other keys."""
    op = sparse_op("chosen_in_a_graph")
    op.register_fake(lambda q, *_: (q.new_empty(q.shape), q.new_empty(q.shape[:-1])))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        chosen = key.detach().sum((0, 1, 3)).topk(3).indices
        told = chosen.clamp(max=key.shape[2] - 1)  # by the row, an argument that says which; the choice is top-k
        return op(query, key, value, told, torch.ones(3))[0] + value[:, :, chosen].mean(2, keepdim=True)

    def block() -> AttentionBlock:
        return AttentionBlock(attend=attend)

    model, inputs = stack(policy="full", block=block, layers=1), stack_inputs()
    found = traced_step(model, inputs, "attn_only")
    assert_same(run(found, inputs), run(step_of(stack(block=block, layers=1)), inputs))
    assert support.executions["fastac_tests::chosen_in_a_graph"] == 2 + 2
    again = {nodes.marks(node).get(nodes.REPEATS, "").partition("_")[0] for node in found.graph_module.graph.nodes}
    assert "addmm" in again
    assert not again & {"topk", "clamp", "chosen"}


# docs/graph.md

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "graph.md"


@pytest.mark.slow
def test_the_code_of_the_guide_runs_and_does_what_it_says() -> None:
    blocks = support.code_blocks(GUIDE, "python")
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    support.count_cpu_attention()
    support.executions.clear()
    for block in blocks:
        exec(compile(block, str(GUIDE), "exec"), names)  # what it compiles is compiled at the first call
    assert support.executions.total() == 2 * 4, "two steps of four attention calls"
    assert len(attention_nodes(names["mixed"].graph_module)) == 4 + 2
    assert len(attention_nodes(names["graph_module"])) == len(attention_nodes(names["as_enabled"].graph_module)) == 4
    expected, found = names["step"](**names["inputs"]), names["train"](**names["inputs"])
    assert torch.equal(found[0], expected[0])
    assert all(map(torch.equal, found[1], expected[1]))


def test_every_public_name_is_explained() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (GUIDE, GUIDE.with_name("round_trip.md")))
    assert not [name for name in fastac.graph.__all__ if name not in text]
    assert PolicyNotAppliedError.__name__ in text
