"""What single models do unlike the others: how they call their blocks, and how often their blocks attend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import fastac
from tests import support
from tests.support import CPU_ATTENTION, assert_same, train_step

Inputs = dict[str, Any]
Change = Callable[[Inputs], Inputs]


def in_turn(
    name: str,
    steps: list[tuple[Change, int, int]],
    executions: Counter[str],
    policy: Any = "attn_only",
    **changes: Any,
) -> None:
    """Train one enabled model on changed inputs, one after the other, each compared with a model without checkpointing.

    steps: what is changed, attention calls of the forward, and those that run again.
    """
    model, _ = support.build(name, **changes)
    fastac.enable(model, policy)
    for change, forward, again in steps:
        plain, inputs = support.build(name, **changes)
        inputs = change(inputs)
        executions.clear()
        expected = train_step(plain, inputs)
        assert executions == {CPU_ATTENTION: forward}
        executions.clear()
        assert_same(train_step(model, inputs), expected)
        assert executions == {CPU_ATTENTION: forward + again}


def same(inputs: Inputs) -> Inputs:
    return inputs


def changed(**changes: Any) -> Change:
    return lambda inputs: inputs | changes


def without(argument: str) -> Change:
    return lambda inputs: {name: value for name, value in inputs.items() if name != argument}


def samples(*valid: int) -> Change:
    """A batch for Mochi, of which each sample has so many valid text tokens."""
    generator = torch.Generator().manual_seed(sum(valid))

    def change(inputs: Inputs) -> Inputs:
        shapes = {"hidden_states": (4, 2, 8, 8), "encoder_hidden_states": (16, 16)}
        made = {name: torch.randn(len(valid), *shape, generator=generator) for name, shape in shapes.items()}
        return inputs | {
            **{name: tensor.requires_grad_() for name, tensor in made.items()},
            "timestep": torch.full((len(valid),), 500),
            "encoder_attention_mask": torch.arange(16) < torch.tensor(valid)[:, None],
        }

    return change


def test_one_attention_per_sample(attention_executions: Counter[str]) -> None:
    """Mochi: two blocks attend once per sample, to its 32 video tokens and its valid text; one call is outside.

    How many keys these are is in the values of the mask: batches of one shape are on either side of min_kv.
    """
    steps = [
        (samples(*valid), 2 * len(valid) + 1, 2 * sum(32 + tokens < 40 for tokens in valid))
        for valid in [(12,), (12, 8), (12, 8, 4), (4, 12), (8, 8), (4, 4), (4,), (12, 8, 4), (16,)]
    ]
    policy = fastac.Policy("attn_only", min_kv=40)
    in_turn("MochiTransformer3DModel", steps, attention_executions, policy=policy)


def text(tokens: int) -> Change:
    generator = torch.Generator().manual_seed(tokens)
    states = torch.randn(1, tokens, 16, generator=generator).requires_grad_()
    return changed(encoder_hidden_states=states, encoder_attention_mask=(torch.arange(tokens) < tokens - 2)[None])


def test_autocast_and_text_of_any_length(attention_executions: Counter[str]) -> None:
    """One model, whose steps alternate between autocast and float32, and between lengths, seen before or not."""
    name = "HunyuanVideoTransformer3DModel"
    model, _ = support.build(name)
    fastac.enable(model)
    for step, tokens in enumerate((12, 12, 7, 7, 12, 20, 7)):
        plain, inputs = support.build(name)
        inputs = text(tokens)(inputs)
        with torch.autocast("cpu", torch.bfloat16) if step % 2 else nullcontext():
            expected = train_step(plain, inputs)
            attention_executions.clear()
            assert_same(train_step(model, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: 5}


def test_video_with_and_without_sound(attention_executions: Counter[str]) -> None:
    """Blocks that attend between video and sound attend less often without it, in steps of the same model."""
    isolated = changed(isolate_modalities=True)
    steps = [(same, 12, 0), (isolated, 8, 0), (same, 12, 0), (isolated, 8, 0)]
    in_turn("LTX2VideoTransformer3DModel", steps, attention_executions)
    silent = without("audio_hidden_states")
    steps = [(silent, 6, 0), (same, 14, 0), (silent, 6, 0), (same, 14, 0)]
    in_turn("Kandinsky6Transformer3DModel", steps, attention_executions)


def test_blocks_that_are_left_out(attention_executions: Counter[str]) -> None:
    """Latte: its temporal blocks can be switched off for a step."""
    spatial = changed(enable_temporal_attentions=False)
    in_turn("LatteTransformer3DModel", [(same, 6, 0), (spatial, 4, 0), (same, 6, 0)], attention_executions)


def test_blocks_of_one_class_that_attend_differently(attention_executions: Counter[str]) -> None:
    """Sana-WM: linear and softmax attention take turns, and without a camera the latter attends once less."""
    steps = [(same, 8, 0), (without("camera_conditions"), 6, 0), (same, 8, 0)]
    in_turn("SanaWMTransformer3DModel", steps, attention_executions, num_layers=4)


class OneOutput(torch.nn.Module):
    """A model of which one output is trained."""

    def __init__(self, model: torch.nn.Module, index: int) -> None:
        super().__init__()
        self.model = model
        self.index = index

    def forward(self, **inputs: Any) -> torch.Tensor:
        outputs: tuple[torch.Tensor, ...] = self.model(**inputs)
        return outputs[self.index]


@pytest.mark.parametrize(
    ("name", "index", "calls"),
    [
        ("LTX2VideoTransformer3DModel", 0, 12),
        ("LTX2VideoTransformer3DModel", 1, 12),
        ("MiniMaxH3Transformer3DModel", 0, 4),
    ],
)
def test_loss_on_one_stream(name: str, index: int, calls: int, attention_executions: Counter[str]) -> None:
    """A part of the last block has no gradient then; it is not run again for that."""
    model, inputs = support.build(name)
    trained = OneOutput(model, index)
    expected = train_step(trained, inputs)
    fastac.enable(model)
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(trained, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: calls}


def test_a_backend_that_is_set_and_ignored(attention_executions: Counter[str]) -> None:
    """CogVideoX: set_attention_backend changes nothing for it, and scaled_dot_product_attention runs, and is saved."""
    model, inputs = support.build("CogVideoXTransformer3DModel")
    expected = train_step(model, inputs)
    fastac.enable(model)
    assert fastac.report(model).remarks == ()
    model.set_attention_backend("_native_math")  # which could not be saved, if it were used
    fastac.enable(model)
    attention_executions.clear()
    assert_same(train_step(model, inputs), expected)
    assert attention_executions == {CPU_ATTENTION: 2}
    (remark,) = fastac.report(model).remarks
    assert "_native_math" in remark
    assert "CogVideoXAttnProcessor2_0" in remark
    model, _ = support.build("WanTransformer3DModel")
    model.set_attention_backend("_native_flash")
    fastac.enable(model)
    assert fastac.report(model).remarks == ()
