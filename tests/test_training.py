"""Ways of training: what users do around a model whose attention is saved changes nothing about the gradients."""

from __future__ import annotations

import copy
import functools
import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastac
from fastac.models import MODELS
from tests import support
from tests.support import CPU_ATTENTION, AttentionBlock, assert_same, stack_inputs, train_step

WAN = "WanTransformer3DModel"
CALLS = 4
"""Attention calls in one forward of the tiny Wan model, as of a stack of two AttentionBlocks."""


def wan(policy: str | fastac.Policy = "none") -> tuple[torch.nn.Module, dict[str, Any]]:
    model, inputs = support.build(WAN)
    if policy != "none":
        fastac.enable(model, policy)
    return model, inputs


# Copies and files


def test_copy_for_ema_trains_and_is_independent(attention_executions: Counter[str]) -> None:
    """copy.deepcopy of an enabled model: both train alike, and what is done to one leaves the other alone."""
    model, inputs = wan("attn_only")
    reference = train_step(*wan())
    train_step(model, inputs)
    ema = copy.deepcopy(model)
    for trained in (model, ema, model):
        attention_executions.clear()
        assert_same(train_step(trained, inputs), reference)
        assert attention_executions == {CPU_ATTENTION: CALLS}
    fastac.disable(model)
    assert fastac.report(ema).active
    assert not fastac.report(model).active
    attention_executions.clear()
    assert_same(train_step(ema, inputs), reference)
    assert attention_executions == {CPU_ATTENTION: CALLS}


def test_copy_with_a_policy_per_block(attention_executions: Counter[str]) -> None:
    """The policies stand by block: the copy's are those of its own blocks."""
    model, inputs = wan()
    reference = train_step(model, inputs)
    fastac.enable(model, {"blocks.0": "full", "*": "attn_only"})
    ema = copy.deepcopy(model)
    del model
    attention_executions.clear()
    assert_same(train_step(ema, inputs), reference)
    assert attention_executions == {CPU_ATTENTION: CALLS + CALLS // 2}


@pytest.mark.parametrize("policy", ["attn_only", {"blocks.0": "full", "*": "attn_only"}], ids=["name", "mapping"])
def test_whole_model_through_torch_save(policy: Any, attention_executions: Counter[str]) -> None:
    """A function in the model that can not be pickled would break this."""
    model, inputs = wan(policy)
    reference = train_step(*wan())
    train_step(model, inputs)
    attention_executions.clear()
    train_step(model, inputs)
    before = dict(attention_executions)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    attention_executions.clear()
    assert_same(train_step(loaded, inputs), reference)
    assert attention_executions == before
    assert fastac.report(loaded).active


def test_save_pretrained_is_untouched(tmp_path: Path, attention_executions: Counter[str]) -> None:
    """State-dict keys and config are those of the model without fastac, and what is loaded can be enabled again."""
    plain, inputs = wan()
    plain.save_pretrained(tmp_path / "plain")
    model, _ = wan("attn_only")
    train_step(model, inputs)
    assert list(model.state_dict()) == list(plain.state_dict())
    model.save_pretrained(tmp_path / "enabled")
    names = [path.name for path in (tmp_path / "plain").iterdir()]
    assert sorted(path.name for path in (tmp_path / "enabled").iterdir()) == sorted(names)
    for name in names:
        assert (tmp_path / "enabled" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()

    loaded = type(model).from_pretrained(tmp_path / "enabled").train()
    assert not fastac.report(loaded).active
    reference = train_step(
        loaded, inputs
    )  # its own: mapped from a file, weights lie unaligned, and sums round otherwise
    fastac.enable(loaded)
    attention_executions.clear()
    assert_same(train_step(loaded, inputs), reference)
    assert attention_executions == {CPU_ATTENTION: CALLS}


def test_state_dict_of_an_enabled_model_loads_into_a_plain_one() -> None:
    model, _ = wan("attn_only")
    plain, inputs = support.build(WAN, seed=5)
    plain.load_state_dict(model.state_dict())
    assert_same(train_step(plain, inputs), train_step(model, inputs))


# Modes


def test_autocast(attention_executions: Counter[str]) -> None:
    """The forward and its recompute see the same casts; attention runs in bfloat16, and is kept in it."""

    def step(model: torch.nn.Module, inputs: dict[str, Any]) -> support.Tensors:
        def run(**inputs: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return model(**inputs)

        return train_step(run, inputs) | support.gradients(support.leaves_of(model, {}))

    reference = step(*wan())
    model, inputs = wan("attn_only")
    for _ in range(2):
        model.zero_grad()
        attention_executions.clear()
        assert_same(step(model, inputs), reference)
        assert attention_executions == {CPU_ATTENTION: CALLS}


def test_eval_mode_still_checkpoints(attention_executions: Counter[str]) -> None:
    """Gradients in eval mode (a frozen dropout, guidance) are those without checkpointing, too."""
    model, inputs = wan()
    reference = train_step(model.eval(), inputs)
    fastac.enable(model)
    attention_executions.clear()
    assert_same(train_step(model, inputs), reference)
    assert attention_executions == {CPU_ATTENTION: CALLS}
    assert fastac.report(model).rows[0].saved == CALLS


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_sampling_between_steps(mode: Any, attention_executions: Counter[str]) -> None:
    """A validation sample runs every attention once, keeps nothing, and leaves the next step as it was."""
    model, inputs = wan("attn_only")
    reference = train_step(*wan())
    for _ in range(2):
        with mode():
            attention_executions.clear()
            (sample,) = model(**inputs)
        assert attention_executions == {CPU_ATTENTION: CALLS}
        assert torch.equal(sample, reference["output.0"])
        assert_same(train_step(model, inputs), reference)


def test_gradient_accumulation(attention_executions: Counter[str]) -> None:
    def accumulated(policy: str) -> support.Tensors:
        model, inputs = wan(policy)
        for step in range(3):
            torch.manual_seed(step)
            inputs["hidden_states"] = torch.randn_like(inputs["hidden_states"])
            support.loss_of(model(**inputs)).backward()
        return support.gradients(support.leaves_of(model, inputs))

    reference = accumulated("none")
    attention_executions.clear()
    assert_same(accumulated("attn_only"), reference)
    assert attention_executions == {CPU_ATTENTION: 3 * CALLS}


def test_optimizer_steps_stay_equal() -> None:
    """Ten AdamW steps, in which a single differing bit would grow."""

    def trained(policy: str) -> support.Tensors:
        model, inputs = wan(policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(10):
            optimizer.zero_grad()
            support.loss_of(model(**inputs)).backward()
            optimizer.step()
        return {name: p.detach() for name, p in model.named_parameters()}

    assert_same(trained("attn_only"), trained("none"))


def test_batches_of_changing_shape(attention_executions: Counter[str]) -> None:
    """Aspect-ratio buckets: each shape has a census of its own, and coming back to one is no surprise."""
    plain, _ = wan()
    model, inputs = wan("attn_only")
    for width in (16, 8, 16, 24, 8):
        torch.manual_seed(width)
        inputs["hidden_states"] = torch.randn(1, 4, 2, 16, width, requires_grad=True)
        reference = train_step(plain, inputs)
        attention_executions.clear()
        assert_same(train_step(model, inputs), reference)
        assert attention_executions == {CPU_ATTENTION: CALLS}


# Fine-tuning


def test_lora_with_dropout(attention_executions: Counter[str]) -> None:
    """Only adapters train, and they drop out inside the recomputed part."""

    def with_adapter(policy: str) -> tuple[torch.nn.Module, dict[str, Any]]:
        model, inputs = wan()
        model.requires_grad_(False)
        inputs = {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        torch.manual_seed(3)
        targets = ["to_q", "to_k", "to_v", "to_out.0"]
        model.add_adapter(peft.LoraConfig(r=4, lora_alpha=4, lora_dropout=0.3, target_modules=targets))
        support.fill_zeros(model)  # LoRA's second factor, behind which the first has no gradient
        if policy != "none":
            fastac.enable(model, policy)
        return model, inputs

    reference = train_step(*with_adapter("none"))
    assert sum("lora_A" in name for name in reference) == 4 * CALLS
    model, inputs = with_adapter("attn_only")
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(model, inputs), reference)
        assert attention_executions == {CPU_ATTENTION: CALLS}


def test_adapter_added_after_enable(attention_executions: Counter[str]) -> None:
    """The usual order in scripts is the other one, but nothing forbids this."""

    def adapted(policy: str) -> tuple[torch.nn.Module, dict[str, Any]]:
        model, inputs = wan(policy)
        model.requires_grad_(False)
        torch.manual_seed(3)
        model.add_adapter(peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=["to_q", "to_v"]))
        support.fill_zeros(model)
        return model, inputs

    reference = train_step(*adapted("none"))
    model, inputs = adapted("attn_only")
    attention_executions.clear()
    assert_same(train_step(model, inputs), reference)
    assert attention_executions == {CPU_ATTENTION: CALLS}


@pytest.mark.parametrize("trained", ["ffn", "attn2", "blocks.1", "proj_out"])
def test_partly_frozen_model(trained: str, attention_executions: Counter[str]) -> None:
    """Which parameters train decides what autograd keeps, and whether it guards the output of the first attention."""

    def partly(policy: str) -> tuple[torch.nn.Module, dict[str, Any]]:
        model, inputs = wan(policy)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trained in name)
        return model, {k: v.detach() if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}

    reference = train_step(*partly("none"))
    model, inputs = partly("attn_only")
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(model, inputs), reference)
        assert attention_executions == {CPU_ATTENTION: CALLS}


# Without the diffusers hook


def test_drop_in_for_torch_checkpoint(attention_executions: Counter[str]) -> None:
    """fastac.checkpoint takes the arguments of torch.utils.checkpoint.checkpoint and hands the function the rest."""
    inputs = stack_inputs()
    block = AttentionBlock()
    reference = train_step(block, inputs)
    options = {"use_reentrant": False, "preserve_rng_state": True, "determinism_check": "default", "early_stop": True}
    leaves = support.leaves_of(block, inputs)
    for tensor in leaves.values():
        tensor.grad = None
    attention_executions.clear()
    output = fastac.checkpoint(block, inputs["video"], text=inputs["text"], **options)
    support.loss_of(output).backward()
    assert_same(support.gradients(leaves) | {"output": output.detach()}, reference)
    assert attention_executions == {CPU_ATTENTION: 2}


class ScaledBlock(AttentionBlock):
    """Called in other ways than block(video, text)."""

    def scaled(self, video: torch.Tensor, text: torch.Tensor, *, scale: float = 1.0, extra: Any = None) -> torch.Tensor:
        return self.forward(video, text) * scale + (extra["shift"] if extra else 0)


CALLABLES: dict[str, Callable[[ScaledBlock], Callable[..., torch.Tensor]]] = {
    "module": lambda block: block,
    "bound __call__": lambda block: block.__call__,  # Cosmos3 and PRX in diffusers
    "bound forward": lambda block: block.forward,
    "bound method": lambda block: block.scaled,
    "partial of a method": lambda block: functools.partial(block.scaled, scale=0.5),
    "partial of a module": lambda block: functools.partial(block),
    "closure": lambda block: lambda video, text: block(video, text),
    "wrapped function": lambda block: functools.wraps(block.forward)(lambda *args: block(*args)),
}


@pytest.mark.parametrize("kind", CALLABLES)
def test_callables(kind: str, attention_executions: Counter[str]) -> None:
    inputs = stack_inputs()
    torch.manual_seed(0)
    block = ScaledBlock()
    function = CALLABLES[kind](block)
    leaves = support.leaves_of(block, inputs)

    def step(call: Callable[..., torch.Tensor]) -> support.Tensors:
        for tensor in leaves.values():
            tensor.grad = None
        output = call(inputs["video"], inputs["text"])
        support.loss_of(output).backward()
        return {"output": output.detach()} | support.gradients(leaves)

    reference = step(function)
    for _ in range(2):
        attention_executions.clear()
        assert_same(step(functools.partial(fastac.checkpoint, function)), reference)
        assert attention_executions == {CPU_ATTENTION: 2}


def test_keyword_arguments_reach_the_block(attention_executions: Counter[str]) -> None:
    """WanAnimate2 passes them, where diffusers' own function raises. Tensors may sit in a dict."""
    inputs = stack_inputs()
    shift = torch.randn(support.WIDTH, requires_grad=True)
    torch.manual_seed(0)
    block = ScaledBlock()
    nested = {**inputs, "scale": 0.25, "extra": {"shift": shift}}
    reference = train_step(block.scaled, nested) | support.gradients(support.leaves_of(block, {}))
    block.zero_grad()
    attention_executions.clear()
    found = train_step(functools.partial(fastac.checkpoint, block.scaled), nested)
    assert_same(found | support.gradients(support.leaves_of(block, {})), reference)
    assert attention_executions == {CPU_ATTENTION: 2}


def test_outputs_of_any_structure(attention_executions: Counter[str]) -> None:
    class Structured(AttentionBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> Any:
            output = super().forward(video, text)
            return {"video": output, "both": (output[:, :3], None, [output.mean()]), "count": 3}

    inputs = stack_inputs()
    torch.manual_seed(0)
    block = Structured()
    reference = train_step(block, inputs) | support.gradients(support.leaves_of(block, {}))
    block.zero_grad()
    attention_executions.clear()
    found = train_step(functools.partial(fastac.checkpoint, block), inputs)
    assert_same(found | support.gradients(support.leaves_of(block, {})), reference)
    assert attention_executions == {CPU_ATTENTION: 2}


# What one model reports


def test_report_tells_the_bytes_that_are_held() -> None:
    """Outputs and statistics of every attention call, to the byte; tests/test_tape.py measures that they are held."""
    model, inputs = wan("attn_only")
    train_step(model, inputs)
    config = MODELS[WAN].config
    heads, head_dim = config["num_attention_heads"], config["attention_head_dim"]
    _, _, frames, height, width = inputs["hidden_states"].shape
    tokens = frames * height * width // 4  # patches of 1 x 2 x 2
    (row,) = fastac.report(model).rows
    assert (row.attention_calls, row.saved, row.recomputed) == (CALLS, CALLS, 0)
    assert row.saved_bytes == CALLS * tokens * heads * (head_dim + 1) * 4


def test_math_kernel_is_never_silent() -> None:
    """The check of this file: if attention could not be saved, a test that only compares gradients would not see it."""
    model, inputs = wan("attn_only")
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(fastac.PolicyNotAppliedError):
        train_step(model, inputs)
