"""fastac.graph.apply: what is saved is saved, what is recomputed is exact, what can be neither is refused.

Each guard of the passes has a test here that fails without it, among them every trap of traced graphs that went wrong
once: in-place operators, random numbers, getitem nodes, nodes of the backward.
"""

from __future__ import annotations

import dataclasses
import logging
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.traceback import preserve_node_meta
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
import fastac.graph
from fastac import FastacError, Policy, PolicyNotAppliedError, UnsupportedBackendError
from fastac.compile import tracing
from fastac.graph import application, functionalization, nodes, rematerialization, tagging
from tests import support
from tests.graph.steps import ATTENTION, assert_exact, attention_nodes, run, step_of, targets, traced_step
from tests.marks import quick
from tests.support import AttentionBlock, assert_same, stack, stack_inputs

POLICIES = {"attn_only": 4, "long_attn_only": 8, "full": 8, Policy("attn_only", min_kv=10): 6}
"""Policy -> attention executions of a step of the stack: two blocks, each over 24 keys and over 6."""


def test_importing_fastac_does_not_import_graph() -> None:
    code = "import sys, fastac; print([name for name in sys.modules if name.startswith('fastac.graph')])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


# Right


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_stack_of_blocks(policy: str | Policy) -> None:
    model, inputs = stack(policy="full"), stack_inputs()
    found = traced_step(model, inputs, policy)
    assert len(attention_nodes(found.graph_module)) == POLICIES[policy]
    assert_exact(stack(), found, inputs, POLICIES[policy])


@pytest.mark.parametrize("policy", quick(POLICIES, "attn_only"), ids=str)
def test_without_a_policy_that_of_the_regions_counts(policy: str | Policy) -> None:
    model, inputs = stack(policy=policy), stack_inputs()
    found = fastac.graph.apply(fastac.graph.trace(step_of(model), model, **inputs))
    assert_exact(stack(), found, inputs, POLICIES[policy])


def test_blocks_that_enable_was_told_of() -> None:
    model, inputs = stack(), stack_inputs()
    fastac.enable(model, blocks="blocks")
    found = traced_step(model, inputs, {"blocks.0": "full", "*": "attn_only"})
    assert_exact(stack(), found, inputs, 6)


def test_policies_by_name_of_the_block() -> None:
    """Names are those in the model, also where nobody called enable; a block that is called twice has one name."""
    model, inputs = stack(policy="full"), stack_inputs()
    model.blocks.append(model.blocks[0])
    plain = stack()
    plain.blocks.append(plain.blocks[0])
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    assert_exact(plain, fastac.graph.apply(traced, {"blocks.0": "attn_only", "blocks.*": "full"}), inputs, 6 + 2)
    with pytest.raises(FastacError, match=r"no pattern for block 'blocks\.1'"):
        fastac.graph.apply(traced, {"blocks.0": "attn_only"})
    with pytest.raises(FastacError, match=r'"layers\.\*" matches no block'):
        fastac.graph.apply(traced, {"layers.*": "attn_only", "*": "full"})
    assert not any(nodes.RECOMPUTED in nodes.marks(node) for node in traced.graph_module.graph.nodes)


def test_a_policy_for_a_policy_already_applied_is_refused() -> None:
    model, inputs = stack(policy="full"), stack_inputs()
    with pytest.raises(FastacError, match="a policy already"):
        fastac.graph.apply(traced_step(model, inputs, "full"), "attn_only")


def test_the_passes_one_by_one_on_a_graph_of_somebody_elses_trace() -> None:
    """make_fx with metadata kept, and a backward that is known by torch's own mark for it."""
    model, inputs = stack(policy="attn_only"), stack_inputs()
    parameters = list(model.parameters())

    def gradients(*values: torch.Tensor) -> Any:
        names = [name for name, _ in model.named_parameters()]
        state, arguments = dict(zip(names, values, strict=False)), values[len(names) :]
        loss = torch.func.functional_call(model, state, arguments).square().sum()
        return torch.autograd.grad(loss, values)

    values = (*parameters, *inputs.values())
    with preserve_node_meta(), torch.compiler._non_strict_tracing_context(), torch.compiler._patch_engine_backward():
        graph_module = make_fx(gradients, tracing_mode="fake")(*values)
    assert_of_region = {nodes.region_of(node) for node in graph_module.graph.nodes} - {None}
    assert len(assert_of_region) == 2
    functional = fastac.graph.functionalize(graph_module)
    after = fastac.graph.rematerialize(fastac.graph.tag(functional))
    whole = fastac.graph.apply(graph_module)
    assert targets(whole) == targets(after)
    assert targets(after)[ATTENTION] == 4
    assert targets(after)["aten.addmm.default"] > targets(graph_module)["aten.addmm.default"]
    with torch.no_grad():
        found = after(*values)
    assert all(map(torch.equal, found, gradients(*values)))


def test_the_policy_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    tracing._tell.cache_clear()
    model, inputs = stack(policy="full"), stack_inputs()
    with caplog.at_level(logging.INFO, "fastac"):
        traced_step(model, inputs)
        assert "2 regions (attn_only), 4 attention calls, 0 run again" in caplog.text
        assert not [record for record in caplog.records if record.levelno == logging.WARNING], "this trace is meant"
        for _ in range(2):
            with torch.compiler._non_strict_tracing_context():
                make_fx(lambda x: model(x, inputs["text"]), tracing_mode="fake", _allow_non_fake_inputs=True)(
                    inputs["video"]
                )
    (told,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "nothing is recomputed until fastac.graph.apply" in told


def test_a_step_says_in_a_line_what_it_is() -> None:
    model, inputs = stack(policy="full"), stack_inputs()
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    assert str(traced) == "traced step of AttentionStack: 2 regions, 4 attention calls, no policy"
    saved, full = (fastac.graph.apply(traced, policy) for policy in ("attn_only", "full"))
    assert re.fullmatch(
        r"traced step of AttentionStack: 2 regions \(attn_only\), 4 attention calls, 0 run again, \d+ nodes recomputed",
        repr(saved),
    )
    assert "2 regions (full), 4 attention calls, 4 run again" in repr(full)
    mixed = fastac.graph.apply(traced, {"blocks.0": "full", "*": "attn_only"})
    assert "2 regions (1 full, 1 attn_only), 4 attention calls, 2 run again" in repr(mixed)
    compiled = repr(fastac.graph.compile(saved))
    assert compiled == repr(saved).replace("traced", "compiled")


def test_what_is_no_traced_step_is_refused() -> None:
    model, inputs = stack(policy="full"), stack_inputs()
    with pytest.raises(FastacError, match=r"got function: fastac\.graph\.apply\(fastac\.graph\.trace"):
        fastac.graph.apply(step_of(model), "attn_only")  # type: ignore[type-var]
    with pytest.raises(FastacError, match="apply: this step is compiled"):
        fastac.graph.apply(fastac.graph.compile(traced_step(model, inputs)), "full")


def test_a_tensor_from_elsewhere_that_the_step_changes_is_refused() -> None:
    """A trace runs it, for it is the same tensor; a graph in which some operators run twice can not."""
    model, inputs = stack(policy="full"), stack_inputs()
    mean = torch.zeros(())

    def step(**inputs: Any) -> Any:
        loss = model(**inputs).square().mean()
        mean.view(1).mul_(0.9).add_(loss.detach())
        return torch.autograd.grad(loss, [*model.parameters()])

    traced = fastac.graph.trace(step, model, **inputs)
    traced(**inputs)
    assert mean > 0
    with pytest.raises(FastacError, match=r"aten\.mul_\.Tensor changes a tensor of shape \(\) in place"):
        fastac.graph.apply(traced)


# Several backwards, none


def test_two_micro_batches_in_a_step() -> None:
    """torch's own pass refuses a second backward that needs recomputation."""
    inputs, others = stack_inputs(), stack_inputs(seed=9)

    def step_of_two(model: torch.nn.Module) -> Callable[..., Any]:
        def step() -> Any:
            total = None
            for one in (inputs, others):
                gradients = torch.autograd.grad(model(**one).square().sum(), list(model.parameters()))
                total = gradients if total is None else [a + b for a, b in zip(total, gradients, strict=True)]
            return total

        return step

    model, plain = stack(policy="full"), stack()
    for tensor in (*inputs.values(), *others.values()):
        tensor.requires_grad_(False)
    for policy, executions in (("attn_only", 8), ("full", 16)):
        found = fastac.graph.apply(fastac.graph.trace(step_of_two(model), model), policy)
        assert len(attention_nodes(found.graph_module)) == executions
        assert all(map(torch.equal, found(), step_of_two(plain)()))


def test_two_losses_over_one_forward() -> None:
    model, plain, inputs = stack(policy="full"), stack(), stack_inputs()

    def step_of_two(model: torch.nn.Module) -> Callable[..., Any]:
        def step(**inputs: Any) -> Any:
            output = model(**inputs)
            parameters = list(model.parameters())
            first = torch.autograd.grad(output.square().sum(), parameters, retain_graph=True)
            second = torch.autograd.grad(output.sin().sum(), parameters)
            return first, second

        return step

    found = fastac.graph.apply(fastac.graph.trace(step_of_two(model), model, **inputs), "full")
    assert len(attention_nodes(found.graph_module)) == 4 + 8  # each backward recomputes
    for mine, theirs in zip(found(**inputs), step_of_two(plain)(**inputs), strict=True):
        assert all(map(torch.equal, mine, theirs))


def test_without_backward_or_regions_there_is_nothing_to_apply() -> None:
    model, inputs = stack(policy="full"), stack_inputs()
    with pytest.raises(PolicyNotAppliedError, match="no backward"):
        fastac.graph.apply(fastac.graph.trace(model, model, **inputs), "attn_only")
    plain = stack()
    with pytest.raises(PolicyNotAppliedError, match=r"no checkpointed region.*fastac\.enable"):
        fastac.graph.apply(fastac.graph.trace(step_of(plain), plain, **inputs), "attn_only")
    with pytest.raises(PolicyNotAppliedError, match="no checkpointed region"):  # its marks are lost
        fastac.graph.apply(make_fx(lambda: step_of(model)(**inputs)["loss"])())


def test_a_region_without_gradients_is_none() -> None:
    """A frozen half under no_grad: nothing of it is recomputed, nothing refused."""
    model = stack(policy="full")
    inputs = stack_inputs()
    blocks = model.blocks

    def step(video: torch.Tensor, text: torch.Tensor) -> Any:
        with torch.no_grad():
            video = fastac.checkpoint(blocks[0], video, text)
        loss = fastac.checkpoint(blocks[1], video, text).square().sum()
        return torch.autograd.grad(loss, list(blocks[1].parameters()))

    found = fastac.graph.apply(fastac.graph.trace(step, model, *inputs.values()), "full")
    assert len(nodes.regions(found.graph_module)) == 1
    assert len(attention_nodes(found.graph_module)) == 4 + 2
    assert all(map(torch.equal, found(*inputs.values()), step(*inputs.values())))


# Random numbers


@pytest.mark.parametrize("policy", ["attn_only", "full"])
def test_dropout_in_regions_is_that_of_a_step_without_checkpointing(policy: str) -> None:
    def block() -> AttentionBlock:
        return AttentionBlock(dropout=0.3)

    model, inputs = stack(policy="full", block=block), stack_inputs()
    found = traced_step(model, inputs, policy)
    for seed in (7, 8):
        assert_exact(stack(block=block), found, inputs, 4 if policy == "attn_only" else 8, seed)
    assert not torch.equal(*(run(found, inputs, seed)["step.loss"] for seed in (7, 8)))
    # So is that of the tape, as long as nothing draws in the backward.
    assert_same(run(found, inputs), run(step_of(stack(policy="attn_only", block=block)), inputs))


def test_dropout_that_would_be_recomputed_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tagging, "draws", lambda *_: False)
    model = stack(policy="full", block=lambda: AttentionBlock(dropout=0.3))
    with pytest.raises(FastacError, match="tagged for recomputation and draws random numbers"):
        traced_step(model, stack_inputs())


def test_recomputed_dropout_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the guard is for."""
    monkeypatch.setattr(tagging, "draws", lambda *_: False)
    monkeypatch.setattr(rematerialization, "draws", lambda *_: False)
    model, inputs = stack(policy="full", block=lambda: AttentionBlock(dropout=0.3)), stack_inputs()
    found, expected = (run(step, inputs) for step in (traced_step(model, inputs), step_of(model)))
    name = "step.gradients.blocks.0.qkv.weight"
    assert support.relative_error(found[name], expected[name]) > 0.1


@torch.library.custom_op("fastac_graph_tests::noisy_attention", mutates_args=())
def noisy_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Linear attention that drops keys, and tells nobody but its row that it draws."""
    support.executions["noisy"] += 1
    kept = (torch.rand((*key.shape[:-1], 1)) >= dropout_p).to(key.dtype)
    return (query @ ((key * kept).mT @ value)).contiguous(), kept


@noisy_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float) -> Any:
    return query.new_empty(query.shape), key.new_empty((*key.shape[:-1], 1))


def _noisy_backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
    query, key, value, kept = ctx.saved_tensors
    inner = query.mT @ gradient
    return gradient @ ((key * kept).mT @ value).mT, (value @ inner.mT) * kept, (key * kept) @ inner, None


def _noisy_context(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:3], output[1])


noisy_attention.register_autograd(_noisy_backward, setup_context=_noisy_context)


@pytest.mark.parametrize(
    ("policy", "dropout", "executions"),
    [("attn_only", 0.5, 4), ("full", 0.5, 4), pytest.param("full", 0.0, 8, marks=pytest.mark.slow)],
)
@pytest.mark.usefixtures("rows_as_before")
def test_dropout_inside_the_kernel(policy: str, dropout: float, executions: int) -> None:
    """A kernel that draws is saved whatever the policy, by what its row says; one that does not here runs again."""
    row = fastac.AttentionOp(
        backend="mine", namespace="fastac_graph_tests", name="noisy_attention", layout="bhsd", dropout="dropout_p"
    )
    fastac.register(row)

    def block() -> AttentionBlock:
        return AttentionBlock(attend=lambda q, k, v: noisy_attention(q, k, v, dropout)[0])

    model, inputs = stack(policy="full", block=block), stack_inputs()
    found = traced_step(model, inputs, policy)
    assert_exact(stack(block=block), found, inputs, executions)


# In-place operators, buffers


class InPlace(AttentionBlock):
    """Writes in place where a recompute, or a missing one, would do so twice or too late."""

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        hidden = video * 2
        early = hidden + 1  # needs what hidden was
        part = hidden[..., ::2]  # and this what it will be
        hidden[..., 1::2] = video[..., ::2].cos()
        hidden.add_(early).mul_(0.5)
        return super().forward(hidden * early + torch.cat([part.cos(), part.sin()], -1), text)


def test_in_place_operators_are_exact() -> None:
    model, inputs = stack(policy="full", block=InPlace), stack_inputs()
    for policy, executions in (("attn_only", 4), ("full", 8)):
        found = traced_step(model, inputs, policy)
        assert_exact(stack(block=InPlace), found, inputs, executions)


def test_in_place_operators_that_are_left_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "functionalize", lambda graph_module: graph_module)
    with pytest.raises(FastacError, match=r"writes its argument"):
        traced_step(stack(policy="full", block=InPlace), stack_inputs())


def test_in_place_operators_that_are_left_are_wrong() -> None:
    """What functionalize is for: recomputed without it, gradients are wrong and nothing says so."""
    model, inputs = stack(policy="full", block=InPlace), stack_inputs()
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    after = fastac.graph.rematerialize(fastac.graph.tag(traced.graph_module))
    mine = run(dataclasses.replace(traced, graph_module=after), inputs)
    theirs = run(step_of(stack(block=InPlace)), inputs)
    assert any(support.relative_error(mine[name], theirs[name]) > 0.1 for name in theirs)


class Counting(AttentionBlock):
    """Keeps statistics in the region: by BatchNorm, whose operator does not say so, and by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(16)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.mean.lerp_(video.detach().mean((0, 1)), 0.1)
        video = super().forward(video + self.mean, text)
        return self.norm(video.mT).mT.sin()


@pytest.mark.parametrize("policy", ["attn_only", "full"])
def test_buffers_change_once(policy: str) -> None:
    found, expected = stack(policy="full", block=Counting), stack(block=Counting)
    inputs = stack_inputs()
    step = traced_step(found, inputs, policy)
    assert_same(dict(found.named_buffers()), dict(expected.named_buffers()))
    for _ in range(2):
        assert_exact(expected, step, inputs, 4 if policy == "attn_only" else 8)
    assert found.blocks[0].calls == 2
    assert_same(dict(found.named_buffers()), dict(expected.named_buffers()))


def test_batch_norm_that_would_run_twice_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tagging, "_WRITES_STATISTICS", ())
    found, expected = stack(policy="full", block=Counting), stack(block=Counting)
    inputs = stack_inputs()
    run(traced_step(found, inputs), inputs)
    run(step_of(expected), inputs)
    assert not torch.equal(found.blocks[0].norm.running_mean, expected.blocks[0].norm.running_mean)


def test_a_changed_input_that_shares_its_memory_is_refused() -> None:
    model, inputs = stack(policy="full", block=Counting), stack_inputs()
    model.register_buffer("alias", model.blocks[0].mean[:8])
    with pytest.raises(FastacError, match="shares its memory with"):
        traced_step(model, inputs)


# Tags


def test_one_of_several_outputs_is_tagged_as_its_operator() -> None:
    """What it was marked with may be lost; without a tag, an operator would be kept alive for its outputs."""
    model, inputs = stack(policy="full"), stack_inputs()
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    functional = fastac.graph.functionalize(traced.graph_module)
    for node in functional.graph.nodes:
        if nodes.is_getitem(node):
            node.meta.pop("custom", None)
    tagged = fastac.graph.tag(functional, dict.fromkeys(nodes.regions(functional), Policy()))
    tags = {}
    for node in tagged.graph.nodes:
        if nodes.is_getitem(node) and not nodes.is_backward(node.args[0]):
            tags.setdefault(str(node.args[0].target), set()).add(node.meta["recompute"])
    assert tags[ATTENTION] == {CheckpointPolicy.MUST_SAVE}
    assert tags["aten.native_layer_norm.default"] == {CheckpointPolicy.PREFER_RECOMPUTE}
    after = fastac.graph.rematerialize(tagged)
    assert targets(after)[ATTENTION] == 4
    assert targets(after)["aten.native_layer_norm.default"] == 2 * 6
    assert_exact(stack(), dataclasses.replace(traced, graph_module=after), inputs, 4)


def test_the_backward_has_no_tags() -> None:
    """Gradients are computed once; tagged, they would be computed again for every use of them."""
    model, inputs = stack(policy="full"), stack_inputs()
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    for node in traced.graph_module.graph.nodes:
        if nodes.is_backward(node):
            nodes.mark(node, **{tracing.REGION: 1, "fastac_policy": "full", "fastac_min_kv": 0})
            nodes.mark(node, fastac_collectives="save", fastac_block="")
    before = targets(traced.graph_module)
    tagged = fastac.graph.tag(fastac.graph.functionalize(traced.graph_module))
    assert not any("recompute" in node.meta for node in tagged.graph.nodes if nodes.is_backward(node))
    after = targets(fastac.graph.rematerialize(tagged))
    backward = "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    assert after[backward] == before[backward] == 4
    assert after["aten.native_layer_norm_backward.default"] == before["aten.native_layer_norm_backward.default"]


def test_a_backward_that_is_not_told_from_the_forward_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (application, nodes, rematerialization, tagging):
        monkeypatch.setattr(module, "is_backward", lambda node: False)
    with pytest.raises(PolicyNotAppliedError, match="no backward"):
        traced_step(stack(policy="full"), stack_inputs())


def test_what_leaves_a_region_is_saved() -> None:
    """A block's output is the next one's input: recomputed, each backward would begin at the first block."""
    model, inputs = stack(policy="full", layers=4), stack_inputs()
    found = traced_step(model, inputs, "full")
    again = [node for node in found.graph_module.graph.nodes if nodes.RECOMPUTED in nodes.marks(node)]
    assert len({nodes.marks(node)[nodes.RECOMPUTED] for node in again}) == len(again)
    assert targets(found.graph_module)["aten.addmm.default"] == 4 * 7 + 4 * 6  # but for each block's last
    assert_exact(stack(layers=4), found, inputs, 16)


# What can not be saved


def attend_by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return ((query @ key.mT) * query.shape[-1] ** -0.5).softmax(-1) @ value


def refused(block: Callable[[], torch.nn.Module], what: str, error: type[Exception] = PolicyNotAppliedError) -> None:
    """attn_only is refused; full is not, and exact."""
    model, inputs = stack(policy="full", block=block), stack_inputs()
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    with pytest.raises(error, match=what):
        fastac.graph.apply(traced, "attn_only")
    assert_same(run(fastac.graph.apply(traced, "full"), inputs), run(step_of(stack(block=block)), inputs))


def test_attention_as_small_ops_is_refused() -> None:
    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(*qkv)

    refused(lambda: AttentionBlock(attend=attend), "AttentionBlock.*scaled_dot_product_attention ran as small ops")


def test_attention_written_out_is_refused() -> None:
    refused(lambda: AttentionBlock(attend=attend_by_hand), "attention written out in small ops ran as small ops")


def test_short_attention_as_small_ops_is_recomputed_under_a_policy_of_long() -> None:
    def block() -> AttentionBlock:
        return AttentionBlock(attend=attend_by_hand)

    model, inputs = stack(policy="full", block=block), stack_inputs()
    assert_exact(stack(block=block), traced_step(model, inputs, "long_attn_only"), inputs, 0)


def test_softmax_over_weights_is_no_attention() -> None:
    """A gate of weights: products with a parameter give no scores."""

    class Gated(AttentionBlock):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.Parameter(torch.randn(1, 16, 4))

        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            gate = torch.bmm(video, self.experts).softmax(-1)
            return super().forward(torch.bmm(gate, torch.ones(1, 4, 16)) + video, text)

    model, inputs = stack(policy="full", block=Gated), stack_inputs()
    assert_exact(stack(block=Gated), traced_step(model, inputs), inputs, 4)


def test_an_attention_without_a_row_is_refused() -> None:
    refused(
        lambda: AttentionBlock(attend=lambda q, k, v: noisy_attention(q, k, v, 0.0)[0]),
        "fastac_graph_tests::noisy_attention looks like an attention forward and has no row",
    )


@pytest.mark.usefixtures("rows_as_before")
def test_a_kernel_that_does_not_train_is_refused() -> None:
    row = fastac.AttentionOp(
        backend="mine", namespace="fastac_graph_tests", name="noisy_attention", trains=False, note="its row says no"
    )
    fastac.register(row)
    block = lambda: AttentionBlock(attend=lambda q, k, v: noisy_attention(q, k, v, 0.0)[0])  # noqa: E731
    model = stack(policy="full", block=block)
    with pytest.raises(UnsupportedBackendError, match="does not train: its row says no"):
        traced_step(model, stack_inputs())


@torch.library.custom_op("fastac_graph_tests::writing_attention", mutates_args=("scratch",))
def writing_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scratch: torch.Tensor | None
) -> torch.Tensor:
    """Linear attention that may leave something in a tensor it is given."""
    if scratch is not None:
        scratch.fill_(1)
    return (query @ (key.mT @ value)).contiguous()


@writing_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scratch: torch.Tensor | None) -> Any:
    return query.new_empty(query.shape)


class Writing(torch.autograd.Function):
    """Calls it, and knows its gradient: torch takes no autograd formula for an operator that writes."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> torch.Tensor:
        ctx.save_for_backward(*inputs[:3])
        return writing_attention(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        query, key, value = ctx.saved_tensors
        inner = query.mT @ gradient
        return gradient @ (key.mT @ value).mT, value @ inner.mT, key @ inner, None


@pytest.mark.parametrize("policy", ["attn_only", "full"])
@pytest.mark.usefixtures("rows_as_before")
def test_a_kernel_that_writes_what_it_is_given_is_refused(policy: str) -> None:
    row = fastac.AttentionOp(
        backend="mine", namespace="fastac_graph_tests", name="writing_attention", layout="bhsd", dropout=None
    )
    fastac.register(row)

    def block(scratch: bool) -> AttentionBlock:
        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            return Writing.apply(*qkv, torch.zeros(1) if scratch else None)

        return AttentionBlock(attend=attend)

    inputs = stack_inputs()
    with pytest.raises(FastacError, match="write"):
        traced_step(stack(policy="full", block=lambda: block(True)), inputs, policy)


def test_a_checkpoint_of_torchs_around_a_region_is_noticed() -> None:
    """It runs the attention again that the policy saves."""
    model, inputs = stack(policy="full"), stack_inputs()
    traced = fastac.graph.trace(lambda **inputs: step_of(_wrapped(model))(**inputs), model, **inputs)
    with pytest.raises(PolicyNotAppliedError, match=r"torch\.utils\.checkpoint around the block"):
        fastac.graph.apply(traced, "attn_only")


def _wrapped(model: torch.nn.Module) -> Any:
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Any) -> Any:
            return torch_checkpoint(model, use_reentrant=False, **inputs)

    return Wrapped()


def test_attention_that_runs_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The look at the result does not rely on the tags."""
    monkeypatch.setattr(tagging, "decide", lambda *_: set())
    with pytest.raises(PolicyNotAppliedError, match=r"saves 2 attention calls of this region.* runs 2 again"):
        traced_step(stack(policy="full"), stack_inputs())


def test_marks_that_are_lost_in_a_pass_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def losing(graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        functional = functionalization.functionalize(graph_module)
        for node in nodes.regions(functional)[max(nodes.regions(functional))]:
            node.meta["custom"] = {}
        return functional

    monkeypatch.setattr(application, "functionalize", losing)
    with pytest.raises(PolicyNotAppliedError, match="1 of 2 regions lost the marks"):
        traced_step(stack(policy="full"), stack_inputs())


# Sparse attention


@torch.library.custom_op("fastac_graph_tests::sparse_attention", mutates_args=())
def sparse_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Linear attention to the chosen keys."""
    support.executions["sparse"] += 1
    index = chosen.unsqueeze(-1).expand(-1, -1, -1, key.shape[-1])
    return (query @ (key.gather(2, index).mT @ value.gather(2, index))).contiguous()


@sparse_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, chosen: torch.Tensor) -> Any:
    return query.new_empty(query.shape)


def _sparse_backward(ctx: Any, gradient: torch.Tensor) -> Any:
    query, key, value, chosen = ctx.saved_tensors
    index = chosen.unsqueeze(-1).expand(-1, -1, -1, key.shape[-1])
    picked, values = key.gather(2, index), value.gather(2, index)
    inner = query.mT @ gradient
    to_key = torch.zeros_like(key).scatter_add(2, index, values @ inner.mT)
    to_value = torch.zeros_like(value).scatter_add(2, index, picked @ inner)
    return gradient @ (picked.mT @ values).mT, to_key, to_value, None


sparse_attention.register_autograd(
    _sparse_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


@pytest.mark.parametrize("selection", [("chosen",), ()], ids=["told by the row", "told by top-k alone"])
@pytest.mark.usefixtures("rows_as_before")
def test_what_sparse_attention_chose_is_saved_with_it(selection: tuple[str, ...]) -> None:
    """A recompute that chose otherwise, as kernels that sum in no fixed order may, would meet outputs of other keys."""
    row = fastac.AttentionOp(
        backend="mine",
        namespace="fastac_graph_tests",
        name="sparse_attention",
        layout="bhsd",
        dropout=None,
        selection=selection,
    )
    fastac.register(row)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        chosen = key.detach().sum(-1).topk(3).indices
        return sparse_attention(query, key, value, chosen.clamp(max=key.shape[2] - 1))

    def block() -> AttentionBlock:
        return AttentionBlock(attend=attend)

    model, inputs = stack(policy="full", block=block), stack_inputs()
    found = traced_step(model, inputs, "attn_only")
    assert_exact(stack(block=block), found, inputs, 4)
    again = {nodes.marks(node).get(nodes.RECOMPUTED, "").partition("_")[0] for node in found.graph_module.graph.nodes}
    assert "addmm" in again
    assert not again & {"topk", "sparse"}
    assert ("clamp" in again) is not bool(selection)
    full = traced_step(model, inputs, "full")
    assert_exact(stack(block=block), full, inputs, 8)
    assert targets(full.graph_module)["aten.topk.default"] == 8
