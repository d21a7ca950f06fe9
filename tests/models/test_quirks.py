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
    context: Callable[[int], Any] = nullcontext,
    **changes: Any,
) -> None:
    """Train one enabled model on changed inputs, one after the other, each compared with a model without checkpointing.

    steps: what is changed, attention calls of the forward, and those that run again. context: of a step, by its number.
    """
    model, _ = support.build(name, **changes)
    fastac.enable(model, policy)
    for number, (change, forward, again) in enumerate(steps):
        plain, inputs = support.build(name, **changes)
        inputs = change(inputs)
        with context(number):
            expected = train_step(plain, inputs)
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
        for valid in [(12,), (12, 8, 4), (4, 12), (4, 4), (12, 8, 4)]
    ]
    policy = fastac.Policy("attn_only", min_kv=40)
    in_turn("MochiTransformer3DModel", steps, attention_executions, policy=policy)


def text(tokens: int) -> Change:
    generator = torch.Generator().manual_seed(tokens)
    states = torch.randn(1, tokens, 16, generator=generator).requires_grad_()
    return changed(encoder_hidden_states=states, encoder_attention_mask=(torch.arange(tokens) < tokens - 2)[None])


def test_autocast_and_text_of_any_length(attention_executions: Counter[str]) -> None:
    """One model, whose steps alternate between autocast and float32, and between lengths, seen before or not."""
    steps = [(text(tokens), 5, 0) for tokens in (12, 12, 7, 20, 7)]
    name = "HunyuanVideoTransformer3DModel"
    in_turn(name, steps, attention_executions, context=lambda step: torch.autocast("cpu", torch.bfloat16, step % 2 > 0))


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        # Between video and sound, where there is sound.
        ("LTX2VideoTransformer3DModel", (same, 12), (changed(isolate_modalities=True), 8)),
        ("Kandinsky6Transformer3DModel", (without("audio_hidden_states"), 6), (same, 14)),
        # Temporal blocks can be switched off.
        ("LatteTransformer3DModel", (same, 6), (changed(enable_temporal_attentions=False), 4)),
        # In every second block; without a camera that attends once less.
        ("SanaWMTransformer3DModel", (same, 8), (without("camera_conditions"), 6)),
    ],
)
def test_blocks_that_attend_now_and_then(
    name: str, first: tuple[Change, int], second: tuple[Change, int], attention_executions: Counter[str]
) -> None:
    """In steps of the same model: all that was to be saved is saved, and nothing is amiss."""
    changes = {"num_layers": 4} if name.startswith("Sana") else {}
    steps = [(change, forward, 0) for change, forward in (first, second, first)]
    in_turn(name, steps, attention_executions, **changes)


def test_a_backend_that_is_set_and_ignored(attention_executions: Counter[str]) -> None:
    """CogVideoX: set_attention_backend changes nothing for it, and scaled_dot_product_attention runs, and is saved."""
    model, inputs = support.build("CogVideoXTransformer3DModel")
    fastac.enable(model)
    assert fastac.report(model).remarks == ()
    fastac.disable(model)
    model.set_attention_backend("_native_math")  # which could not be saved, if it were used
    support.assert_model(model, inputs, attention_executions)
    (remark,) = fastac.report(model).remarks
    assert "_native_math" in remark
    assert "CogVideoXAttnProcessor2_0" in remark
    model, _ = support.build("WanTransformer3DModel")
    model.set_attention_backend("_native_flash")
    fastac.enable(model)
    assert fastac.report(model).remarks == ()
