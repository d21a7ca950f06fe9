"""Plans of models that are no video transformers of diffusers: causal LLMs of transformers, and UNets."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel, UNetMotionModel, UNetSpatioTemporalConditionModel
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import fastac
from tests.marks import quick
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


def unet(cls: Any, kind: str, sizes: tuple[int, ...], text: tuple[int, ...], *more: str, **options: Any) -> Model:
    """more: inputs of three numbers."""
    blocks = {"down_block_types": (f"CrossAttnDownBlock{kind}",), "up_block_types": (f"CrossAttnUpBlock{kind}",)}
    model = cls(block_out_channels=(32,), layers_per_block=1, cross_attention_dim=16, **blocks, **options)
    inputs = {"sample": torch.randn(1, *sizes), "encoder_hidden_states": torch.randn(*text, 16)}
    return model, {**inputs, "timestep": torch.tensor([3]), **{name: torch.randn(1, 3) for name in more}}


UNETS: dict[str, Callable[[], Model]] = {
    "Stable Diffusion": partial(unet, UNet2DConditionModel, "2D", (4, 8, 8), (1, 7), attention_head_dim=8),
    "AnimateDiff": partial(unet, UNetMotionModel, "Motion", (4, 2, 8, 8), (2, 7), num_attention_heads=2),
    "Stable Video Diffusion": partial(
        unet,
        UNetSpatioTemporalConditionModel,
        "SpatioTemporal",
        (2, 8, 8, 8),
        (1, 1),
        "added_time_ids",
        num_attention_heads=(2,),
        addition_time_embed_dim=16,
        projection_class_embeddings_input_dim=48,
    ),
}
CASES = {
    "llama": partial(llama, 512),
    "masked llama": partial(masked_llama, 64),
    "mixtral": partial(mixtral, 64),
    **UNETS,
}


@pytest.mark.parametrize("name", quick(CASES, "llama", "masked llama", "mixtral", "Stable Diffusion"))
def test_prediction_is_measurement(name: str) -> None:
    """Held bytes and peak are those of the tensors that operators return."""
    model, inputs = CASES[name]()
    with planned.exact() as device:
        plan = fastac.plan(model, inputs)
        for row in (plan.policies[0], plan.policies[3]):
            trained = planned.under(model, row.policy)
            planned.step(trained, inputs)
            held, _, peak = planned.live(trained, inputs, device)
            assert row.held_bytes == pytest.approx(held, rel=0.02), row.policy
            assert row.peak_bytes - plan.states.total == pytest.approx(peak, rel=0.02), row.policy


@pytest.mark.parametrize("name", quick(UNETS, "Stable Diffusion"))
def test_what_is_within_can_be_enabled(name: str) -> None:
    """A UNet checkpoints modules beside those in its lists: a plan names them, and `enable` knows the names."""
    model, inputs = UNETS[name]()
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
