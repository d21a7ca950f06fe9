"""transformers' own models: language models, and the text encoders that are trained beside a DiT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

import fastac
from tests.trainers.training import Training


class Transformers(Training):
    is_refused = True

    def switch_on(self, model: Any) -> None:
        model.activation_checkpointing_enable()


class TestLlama(Transformers):
    attention = 2

    def make(self) -> torch.nn.Module:
        sizes = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        config = LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1, use_cache=False)
        return LlamaForCausalLM(config)

    def inputs(self) -> dict[str, Any]:
        return {"input_ids": torch.randint(16, (1, 12)), "return_dict": False}

    def test_every_second_layer(self) -> None:
        """Its option `offload` needs an accelerator: its save_on_cpu pins memory."""
        model = self.model()
        model.activation_checkpointing_enable(every_n_layers=2)
        self.expect(model, again=1)
        with fastac.patch_checkpoint():
            model.activation_checkpointing_enable(every_n_layers=2)
            self.expect(model)


def biases(model: torch.nn.Module) -> torch.nn.ModuleList:
    """What T5 learns to add to the scores of attention: with a gradient torch writes it out in small ops."""
    return torch.nn.ModuleList(one for name, one in model.named_modules() if name.endswith("relative_attention_bias"))


class TestT5(Transformers):
    attention = 6
    blocks = ("encoder.block", "decoder.block")

    def make(self) -> torch.nn.Module:
        sizes = {"vocab_size": 16, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        config = T5Config(**sizes, dropout_rate=0.0, use_cache=False)
        model = T5ForConditionalGeneration(config)
        biases(model).requires_grad_(False)
        return model

    def inputs(self) -> dict[str, Any]:
        tokens = torch.randint(16, (1, 12))
        return {"input_ids": tokens, "decoder_input_ids": tokens, "return_dict": False}

    def test_its_own_checkpointing(self) -> None:
        """It lets the mask of cross-attention require grad, which torch then writes out in small ops."""
        _, kernels = self.step(self.switched_on())
        assert kernels == 2 * (self.attention - 2)

    def test_patch_checkpoint(self) -> None:
        with (
            fastac.patch_checkpoint(),
            pytest.raises(fastac.PolicyNotAppliedError, match=r"T5Block.*mask requires grad"),
        ):
            self.step(self.switched_on())

    def test_enable_alone_is_refused(self) -> None:
        """Two lists of blocks: which one is meant is the user's choice."""
        with pytest.raises(fastac.FastacError, match=r'blocks=\["encoder\.block", "decoder\.block"\]'):
            fastac.enable(self.model())
