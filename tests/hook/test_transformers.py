"""transformers' models under `enable`: what transformers and peft derive from "gradient checkpointing is on" holds."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

import fastac
from fastac import FastacError
from tests.model_state import state_of
from tests.support import CPU_ATTENTION, assert_same, train_step

SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def made(kind: str) -> Any:
    torch.manual_seed(0)
    if kind == "mistral":  # its cache holds the window alone, and is written by every forward
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4)).train()
    model = LlamaForCausalLM(LlamaConfig(**SIZES)).train()
    if kind.startswith("activated LoRA"):  # whose offsets are known to hooks that go when the model's forward ends
        config = peft.LoraConfig(
            task_type="CAUSAL_LM", r=2, alora_invocation_tokens=[3, 4], target_modules=["q_proj", "v_proj"]
        )
        model = peft.get_peft_model(model, config)
        if kind.endswith("inputs"):
            model.enable_input_require_grads()
    return model


def inputs() -> dict[str, Any]:
    return {"input_ids": torch.tensor([[1, 2, 5, 3, 4, 6, 7, 8]]), "return_dict": False}


@pytest.mark.parametrize("kind", ["llama", "mistral", "activated LoRA", "activated LoRA, its inputs"])
def test_what_is_derived_from_the_flag(kind: str, attention_executions: Counter[str]) -> None:
    """No cache in training, and hooks that recompute needs."""
    model = made(kind)
    expected = train_step(model, {**inputs(), "use_cache": False})
    before = state_of(model)
    for _ in range(2):
        fastac.enable(model)
        assert model.is_activation_checkpointing
        for _ in range(2):
            attention_executions.clear()
            assert_same(train_step(model, inputs()), expected)
            assert attention_executions == {CPU_ATTENTION: 2}
    assert_same(train_step(copy.deepcopy(model), inputs()), expected)
    fastac.disable(model)
    assert state_of(model) == before


def test_its_own_switch_after_enable() -> None:
    """Blocks would be checkpointed twice."""
    model = made("llama")
    fastac.enable(model)
    model.activation_checkpointing_enable()
    with pytest.raises(FastacError, match="checkpoint of the block's own"):
        train_step(model, inputs())
    with pytest.raises(FastacError, match=r"on already.*activation_checkpointing_disable\(\)"):
        fastac.enable(model)
    model.activation_checkpointing_disable()
    fastac.enable(model)
    model.activation_checkpointing_disable()  # not of what fastac does
    train_step(model, {**inputs(), "use_cache": False})
    found = fastac.report(model)
    assert (found.active, found.rows[0].saved) == (True, 2)
