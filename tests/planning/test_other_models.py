"""Plans of models that are no video transformers of diffusers: causal LLMs of transformers, and UNets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel, UNetMotionModel
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import fastac
from tests.planning import planned

Model = tuple[torch.nn.Module, dict[str, Any]]

LLM: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def llama(tokens: int) -> Model:
    return LlamaForCausalLM(LlamaConfig(**LLM)), {"input_ids": torch.randint(0, 64, (2, tokens))}


def masked_llama(tokens: int) -> Model:
    """Nothing is left out: transformers reads the values, and skips the mask."""
    model, inputs = llama(tokens)
    return model, inputs | {"attention_mask": torch.ones_like(inputs["input_ids"])}


def mixtral(tokens: int) -> Model:
    """In fp32, which the fake kernel of its grouped matmul refuses."""
    model = MixtralForCausalLM(MixtralConfig(**LLM, num_local_experts=4))
    return model, {"input_ids": torch.randint(0, 64, (2, tokens))}


SMALL: dict[str, Any] = {"block_out_channels": (32,), "layers_per_block": 1, "cross_attention_dim": 16}


def unet(size: int) -> Model:
    """Stable Diffusion's."""
    model = UNet2DConditionModel(
        **SMALL,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
    )
    return model, {**latents(1, 4, size, size), "encoder_hidden_states": torch.randn(1, 7, 16)}


def animate_diff(size: int) -> Model:
    model = UNetMotionModel(
        **SMALL,
        num_attention_heads=2,
        down_block_types=("CrossAttnDownBlockMotion",),
        up_block_types=("CrossAttnUpBlockMotion",),
    )
    return model, {**latents(1, 4, 2, size, size), "encoder_hidden_states": torch.randn(2, 7, 16)}


def latents(*shape: int) -> dict[str, Any]:
    return {"sample": torch.randn(*shape), "timestep": torch.tensor([3])}


CASES = [(llama, 512), (masked_llama, 64), (mixtral, 64), (unet, 8), (animate_diff, 8)]


@pytest.mark.parametrize(("make", "length"), CASES)
def test_prediction_is_measurement(make: Callable[[int], Model], length: int) -> None:
    """Held bytes and peak are those of the tensors that operators return."""
    model, inputs = make(length)
    with planned.exact() as device:
        plan = fastac.plan(model, inputs)
        for row in (plan.policies[0], plan.policies[3]):
            trained = planned.under(model, row.policy)
            planned.step(trained, inputs)
            held, _, peak = planned.live(trained, inputs, device)
            assert row.held_bytes == pytest.approx(held, rel=0.02), row.policy
            assert row.peak_bytes - plan.states.total == pytest.approx(peak, rel=0.02), row.policy


@pytest.mark.parametrize("make", [unet, animate_diff])
def test_what_is_within_can_be_enabled(make: Callable[[int], Model]) -> None:
    """A UNet checkpoints modules beside those in its lists: a plan names them, and `enable` knows the names."""
    model, inputs = make(8)
    plan = fastac.plan(model, inputs, checkpointed=3)
    assert plan.policies[-1].recomputed_flops > 0  # of the first three that it calls
    saved = plan.policies[3].saved_bytes
    chosen = plan.within(saved // 2)
    fastac.enable(model, chosen)
    planned.step(model, inputs)
    report = fastac.report(model)
    assert 0 < sum(row.saved_bytes for row in report.rows) <= saved // 2


def test_wrappers_around_blocks() -> None:
    """fastac takes the place of torch's CheckpointWrapper, as accelerate's FSDP puts it there. So does the plan."""
    model, inputs = planned.tiny(planned.WAN)
    plain = fastac.plan(model, inputs).policies
    apply_activation_checkpointing(model, check_fn=lambda module: module in {*model.blocks})
    before = [block.checkpoint_fn for block in model.blocks]
    assert fastac.plan(model, inputs).policies == plain
    assert [block.checkpoint_fn for block in model.blocks] == before
