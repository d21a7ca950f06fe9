"""fastac.verify finds what is not as promised, and leaves the model as it was."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastac
from fastac.comparison import Step, differences
from fastac.compile import graphs
from fastac.verification import Verification
from tests import support
from tests.marks import slow
from tests.model_state import state_of

WAN, LTX = "WanTransformer3DModel", "LTXVideoTransformer3DModel"


def verified(class_name: str, **options: Any) -> Verification:
    model, inputs = support.build(class_name)
    return fastac.verify(model, **inputs, **options)


@pytest.mark.parametrize("class_name", [WAN, LTX])
@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_what_is_as_promised(class_name: str, engine: str) -> None:
    result = verified(class_name, engine=engine)
    assert (result.reference_executions, result.policy_executions) == ((4, 0), (4, 0))
    assert (result.saved, result.recomputed, result.largest_difference, result.noise) == (4, 0, 0.0, 0.0)
    parameters = len(list(support.build(class_name)[0].parameters()))
    assert result.compared > parameters  # outputs and inputs as well
    table = str(result)
    assert "4 of 4" in table
    assert "no" not in [cell.strip() for line in table.splitlines() for cell in line.split("│")]


@pytest.mark.parametrize(
    ("policy", "backward", "saved", "recomputed"),
    [
        ("full", 4, 0, 0),
        ("long_attn_only", 4, 0, 4),
        (fastac.Policy("attn_only", min_kv=100), 2, 2, 2),
        ({"blocks.0": "full", "*": "attn_only"}, 2, 2, 0),
    ],
    ids=str,
)
@pytest.mark.parametrize("per_block", [False, True])
def test_each_policy(policy: Any, backward: int, saved: int, recomputed: int, per_block: bool) -> None:
    result = verified(WAN, policy=policy, per_block=per_block)
    assert result.policy_executions == (4, backward)
    assert (result.saved, result.recomputed) == (saved, recomputed)


@pytest.mark.parametrize("per_block", [False, True])
def test_against_full_checkpointing(per_block: bool) -> None:
    """For models that do not fit without."""
    result = verified(WAN, reference="full", per_block=per_block)
    assert (result.reference_executions, result.policy_executions) == ((4, 4), (4, 0))


def test_a_module_without_the_hook_is_one_block() -> None:
    block, inputs = support.AttentionBlock(), support.stack_inputs()
    result = fastac.verify(block, **inputs)
    assert (result.reference_executions, result.policy_executions, result.saved) == ((2, 0), (2, 0), 2)


def test_executions_are_those_of_the_kernel(attention_executions: Counter[str]) -> None:
    """The figures in the report are what the kernel itself counts: reference, two runs of the policy."""
    result = verified(WAN, reference="full")
    ran = attention_executions[support.CPU_ATTENTION]
    assert ran == sum(result.reference_executions) + 2 * sum(result.policy_executions)


class DropoutAfter(torch.nn.Module):
    """Attention whose kernel draws random numbers, then dropout."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.block = support.AttentionBlock(attend=lambda q, k, v: attend(q, k, v, 0.5), dropout=0.5)

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.block(video, text)


def test_wrong_gradients_are_found() -> None:
    """A row that says, wrongly, that its kernel never draws: dropout after it differs in recompute."""
    attend = support.custom_attention("verify_lies", kind="dropout", dropout=None)
    with pytest.raises(fastac.FastacError, match=r"outputs and gradients .* differ from none"):
        fastac.verify(DropoutAfter(attend), **support.stack_inputs())
    honest = support.custom_attention("verify_honest", kind="dropout", dropout="dropout_p")
    assert fastac.verify(DropoutAfter(honest), **support.stack_inputs()).largest_difference == 0


class CheckpointsItself(torch.nn.Module):
    """A block that checkpoints its attention once more, inside: saved, and run again all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.block = support.AttentionBlock()

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return support.run_checkpointed(self.block, video, text, policy="torch")


def test_policy_and_engine_are_those_of_a_model_that_is_enabled() -> None:
    model, inputs = support.build("WanTransformer3DModel")
    assert fastac.verify(model, **inputs).policy == "attn_only"
    fastac.enable(model, "full")
    found = fastac.verify(model, **inputs)
    assert (found.policy, found.policy_executions, found.saved) == ("full", (4, 4), 0)
    fastac.enable(model, {"blocks.0": "full", "*": "attn_only"}, engine="sac")
    found = fastac.verify(model, **inputs)
    assert (found.policy, found.policy_executions) == ("mixed (attn_only, full)", (4, 2))
    assert fastac.report(model).engine == "sac"
    assert fastac.verify(model, policy="attn_only", **inputs).policy_executions == (4, 0)


@pytest.mark.parametrize("partly_compiled", [True, *slow(False)])
def test_what_was_decided_in_the_graph_of_another_model_is_no_proof(partly_compiled: bool) -> None:
    """Of a model of the same class, while this one runs without its checkpoints."""
    torch._dynamo.reset()
    bypassing, inputs = support.build("WanTransformer3DModel")
    if partly_compiled:
        bypassing.condition_embedder.compile(backend="aot_eager")

    def forward(**inputs: Any) -> Any:
        before, bypassing.gradient_checkpointing = bypassing.gradient_checkpointing, False
        try:
            return type(bypassing).forward(bypassing, **inputs)
        finally:
            bypassing.gradient_checkpointing = before

    bypassing.forward = forward
    other, _ = support.build("WanTransformer3DModel")
    fastac.enable(other)
    support.train_step(torch.compile(other, backend="aot_eager"), inputs)
    assert graphs._state.traced
    with pytest.raises(fastac.PolicyNotAppliedError, match="none of them inside a checkpointed block"):
        fastac.verify(bypassing, **inputs)


def test_attention_that_runs_again_is_found() -> None:
    """The tape would refuse it at once; engine sac does not notice."""
    with pytest.raises(fastac.PolicyNotAppliedError, match="ran 2 attention kernels in backward"):
        fastac.verify(CheckpointsItself(), **support.stack_inputs(), reference="full", engine="sac")


def test_a_decomposed_attention_is_found() -> None:
    block = support.AttentionBlock(attend=lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.1))
    with pytest.raises(fastac.PolicyNotAppliedError, match="drops out"):
        fastac.verify(block, **support.stack_inputs())


class Unsteady(torch.autograd.Function):
    """A backward that is never the same twice, as kernels with atomic additions have."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        Unsteady.calls += 1
        return grad * (1 + 1e-6 * (-1) ** Unsteady.calls)


class UnsteadyBlock(support.AttentionBlock):
    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return super().forward(Unsteady.apply(video), text)


def test_kernels_that_are_not_deterministic_are_held_against_themselves() -> None:
    result = fastac.verify(UnsteadyBlock(), **support.stack_inputs())
    assert 0 < result.largest_difference <= 4 * result.noise


@pytest.mark.parametrize("options", [{}, {"per_block": True}, {"reference": "full"}], ids=str)
@pytest.mark.parametrize("before", ["nothing", "torch", "fastac"])
def test_the_model_is_left_as_it_was(options: dict[str, Any], before: str) -> None:
    model, inputs = support.build(WAN)
    model.register_buffer("counter", torch.zeros(2), persistent=False)

    def count(*_: Any) -> None:
        model.counter.add_(1)

    model.blocks[0].register_forward_hook(count)
    if before == "torch":
        model.enable_gradient_checkpointing()
    if before == "fastac":
        fastac.enable(model, "long_attn_only")
    support.train_step(model, inputs)
    report = str(fastac.report(model))
    gradients = {name: p.grad for name, p in model.named_parameters()}
    values = {name: g.clone() for name, g in gradients.items() if g is not None}
    state, counter, generator = state_of(model), model.counter.clone(), torch.get_rng_state()
    fastac.verify(model, **inputs, **options)
    assert state_of(model) == state
    assert torch.equal(model.counter, counter)
    assert torch.equal(torch.get_rng_state(), generator)
    assert all(p.grad is gradients[name] for name, p in model.named_parameters())
    assert all(torch.equal(gradients[name], value) for name, value in values.items())
    assert str(fastac.report(model)) == report
    fastac.disable(model)
    assert model.gradient_checkpointing == (before == "torch")


def test_the_model_is_left_as_it_was_after_an_error() -> None:
    model, inputs = support.build(WAN)
    model.blocks[1].attn1.processor._attention_backend = "_native_math"
    state = state_of(model)
    with pytest.raises(fastac.UnsupportedBackendError, match="_native_math"):
        fastac.verify(model, **inputs)
    assert state_of(model) == state


def test_inputs_are_not_touched() -> None:
    model, inputs = support.build(WAN)
    copies = {name: v.detach().clone() for name, v in inputs.items() if isinstance(v, torch.Tensor)}
    fastac.verify(model, **inputs)
    assert all(torch.equal(inputs[name], value) for name, value in copies.items())
    assert all(inputs[name].grad is None for name in copies)


def test_wrong_calls() -> None:
    model, inputs = support.build(WAN)
    with pytest.raises(fastac.FastacError, match="reference='half'"):
        fastac.verify(model, **inputs, reference="half")
    with pytest.raises(fastac.FastacError, match="no such policy"):
        fastac.verify(model, **inputs, policy="attention")
    frozen = support.AttentionBlock().requires_grad_(False)
    with pytest.raises(fastac.FastacError, match="requires grad"):
        fastac.verify(frozen, **{name: v.detach() for name, v in support.stack_inputs().items()})


def test_attention_outside_of_the_blocks_alone() -> None:
    """Saving nothing where there is attention is not what was asked for."""

    class Outside(support.AttentionBlock):
        def __init__(self) -> None:
            super().__init__()
            self._supports_gradient_checkpointing = True
            self.gradient_checkpointing = False
            self._gradient_checkpointing_func = None
            self.blocks = torch.nn.ModuleList([torch.nn.MultiheadAttention(16, 2)])

        def enable_gradient_checkpointing(self, gradient_checkpointing_func: Any) -> None:
            self.gradient_checkpointing, self._gradient_checkpointing_func = True, gradient_checkpointing_func

        def disable_gradient_checkpointing(self) -> None:
            self.gradient_checkpointing = False

    policies = ("attn_only", fastac.Policy("attn_only", collectives="recompute"))
    for policy in policies:
        with pytest.raises(fastac.PolicyNotAppliedError, match="none of them inside"):
            fastac.verify(Outside(), **support.stack_inputs(), policy=policy)


def test_nan_is_equal_to_nan_and_to_nothing_else() -> None:
    block = support.AttentionBlock()
    with torch.no_grad():
        block.ffn[0].bias[0] = float("nan")
    assert fastac.verify(block, **support.stack_inputs()).different == ()
    found = differences(
        Step({"a": torch.tensor([1.0, 2.0])}, (0, 0), [], set()),
        Step({"a": torch.tensor([1.0, float("nan")])}, (0, 0), [], set()),
    )
    assert found == {"a": float("inf")}
