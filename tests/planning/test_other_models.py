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
from fastac.engine.checkpoint_wrappers import call_plainly
from fastac.planning.fake_model import fake_model
from fastac.planning.forecast import Forecast
from tests.marks import soak
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


def llama(tokens: int, masked: bool = False) -> Model:
    return LlamaForCausalLM(LlamaConfig(**LLM)), text(tokens, masked)


def mixtral(tokens: int) -> Model:
    """In fp32, which the fake kernel of its grouped matmul refuses."""
    return MixtralForCausalLM(MixtralConfig(**LLM, num_local_experts=4)), text(tokens)


def text(tokens: int, masked: bool = False) -> dict[str, Any]:
    inputs = {"input_ids": torch.randint(0, 64, (2, tokens))}
    if masked:  # nothing is left out: transformers reads the values, and skips the mask
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    return inputs


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


def stable_video_diffusion(size: int) -> Model:
    model = UNetSpatioTemporalConditionModel(
        **SMALL,
        down_block_types=("CrossAttnDownBlockSpatioTemporal",),
        up_block_types=("CrossAttnUpBlockSpatioTemporal",),
        num_attention_heads=(2,),
        addition_time_embed_dim=16,
        projection_class_embeddings_input_dim=48,
    )
    inputs = {"encoder_hidden_states": torch.randn(1, 1, 16), "added_time_ids": torch.randn(1, 3)}
    return model, {**latents(1, 2, 8, size, size), **inputs}


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


UNETS = (unet, stable_video_diffusion, animate_diff)
CASES = {
    **{f"{make.__name__} of {length}": partial(make, length) for make in (llama, mixtral) for length in (64, 512)},
    **{f"{make.__name__} of {length}": partial(make, length) for make in UNETS for length in (8, 16)},
    "llama with a mask": partial(llama, 64, masked=True),
}


SIMILAR = ("stable_video_diffusion of 16", "animate_diff of 16")  # what is longer is seen in Stable Diffusion's


@pytest.mark.parametrize("name", [*(name for name in CASES if name not in SIMILAR), *soak(*SIMILAR)])
def test_prediction_is_measurement(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held bytes and peak are those of the tensors that operators return."""
    monkeypatch.setattr("fastac.planning.simulation.GENERATOR_STATE", 0)
    model, inputs = CASES[name]()
    plan = fastac.plan(model, inputs)
    for row in plan.policies:
        if row.policy in ("none", "attn_only"):
            trained = planned.under(model, row.policy)
            planned.step(trained, inputs)
            held, peak = planned.live(trained, inputs)
            assert row.held_bytes == pytest.approx(held, rel=0.02), row.policy
            assert row.peak_bytes - plan.states.total == pytest.approx(peak, rel=0.02), row.policy


def test_a_recompute_that_ends_inside_a_linear_module() -> None:
    """The next recompute calls a product of no Linear module that has a name yet: none of the first one's."""
    assert Forecast(fake_model(*unet(8))).step("full").flops["recompute"] > 0


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
    assert fastac.plan(model, inputs).policies == plain
    assert all(block.checkpoint_fn is not call_plainly for block in model.blocks)
