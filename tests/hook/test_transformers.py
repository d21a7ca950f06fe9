"""transformers' models under `enable`: transformers and peft take gradient checkpointing to be on."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments

import fastac
from fastac import FastacError, PolicyNotAppliedError
from tests import support
from tests.support import assert_same, executions_of, pickled, state_of, train_step

COUNTS = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}


def made(kind: str) -> Any:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=32, **COUNTS)).train()
    if kind == "activated LoRA":  # whose offsets are known to hooks that go when the model's forward ends
        config = peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=[3, 4], target_modules=["q_proj"])
        model = peft.get_peft_model(model, config)
        model.enable_input_require_grads()
    return model


def inputs() -> dict[str, Any]:
    return {"input_ids": torch.tensor([[1, 2, 5, 3, 4, 6, 7, 8]]), "return_dict": False}


@pytest.mark.parametrize("kind", ["llama", "activated LoRA"])
def test_what_is_derived_from_the_flag(kind: str, attention_executions: Counter[str]) -> None:
    """No cache in training, and hooks that recompute needs."""
    model = made(kind)
    expected = train_step(model, {**inputs(), "use_cache": False})
    before = state_of(model)
    for _ in range(2):
        fastac.enable(model)
        assert model.is_activation_checkpointing
        for _ in range(2):
            assert executions_of(model, inputs(), expected) == 2
    assert_same(train_step(copy.deepcopy(model), inputs()), expected)
    fastac.disable(model)
    assert state_of(model) == before


def test_a_transformer_without_embeddings() -> None:
    """A PreTrainedModel, as Open-Sora's."""

    class Video(PreTrainedModel):
        config_class = PretrainedConfig
        supports_gradient_checkpointing = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.blocks = support.stack().blocks

        forward = support.AttentionStack.forward
        policy = "none"

    model = Video(PretrainedConfig())
    expected = train_step(model, support.stack_inputs())
    fastac.enable(model, blocks="blocks")
    assert executions_of(model, support.stack_inputs(), expected) == 4
    lora = peft.get_peft_model(made("llama"), peft.LoraConfig(target_modules=["q_proj"]))
    fastac.enable(lora)
    assert_same(train_step(pickled(lora), inputs()), train_step(lora, inputs()))


def test_its_own_switch_after_enable() -> None:
    model = made("llama")
    fastac.enable(model)
    model.activation_checkpointing_enable()
    before = state_of(model)
    with pytest.raises(PolicyNotAppliedError, match=r"on after fastac\.enable.*activation_checkpointing_disable"):
        train_step(model, inputs())
    with pytest.raises(PolicyNotAppliedError, match="enabled again without fastac"):
        fastac.verify(model, **inputs())
    assert state_of(model) == before
    with pytest.raises(FastacError, match=r"on already.*activation_checkpointing_disable\(\)"):
        fastac.enable(model)
    model.activation_checkpointing_disable()
    fastac.enable(model)
    model.activation_checkpointing_disable()  # it does not switch off fastac
    train_step(model, {**inputs(), "use_cache": False})
    before = state_of(model)
    assert fastac.verify(model, **inputs(), use_cache=False).saved == 2
    assert state_of(model) == before
    found = fastac.report(model)
    assert (found.active, found.rows[0].saved) == (True, 2)


def test_its_own_switch_beside_a_policy_that_saves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """It is exact. Only a reentrant checkpoint costs another forward, which is said once."""
    model = made("llama")
    plain = {**inputs(), "use_cache": False}
    expected = train_step(model, plain)
    for use_reentrant, executions in ((False, 4), (True, 6)):
        fastac.enable(model, "full")
        model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        for _ in range(2):
            assert executions_of(model, plain, expected) == executions
        assert caplog.text.count("forward runs three times") == use_reentrant
        model.activation_checkpointing_disable()


def test_a_trainer_that_switches_it_on(tmp_path: Path) -> None:
    """Its options decide, and the error names that option. Without it the trainer trains."""
    data = [{"input_ids": inputs()["input_ids"][0], "labels": inputs()["input_ids"][0]}]
    options = {"max_steps": 1, "report_to": [], "save_strategy": "no", "use_cpu": True, "disable_tqdm": True}
    for switched_on in (True, False):
        model = made("llama")
        fastac.enable(model)
        arguments = TrainingArguments(str(tmp_path), gradient_checkpointing=switched_on, **options)
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        if switched_on:
            with pytest.raises(PolicyNotAppliedError, match=r"TrainingArguments\(gradient_checkpointing=False\)"):
                trainer.train()
        else:
            trainer.train()
            assert fastac.report(model).rows[0].saved == 2
