"""What single models do unlike the others: how they call their blocks, and how often their blocks attend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

import fastac
from tests import support
from tests.support import CPU_ATTENTION, assert_same, train_step

Inputs = dict[str, Any]
Change = Callable[[Inputs], Inputs]


def in_turn(
    name: str,
    steps: list[tuple[Change, int]],
    executions: Counter[str],
    **changes: Any,
) -> None:
    """Train one enabled model on changed inputs, one after the other, each compared with a model without checkpointing.

    steps: what is changed, and attention calls of the forward.
    """
    model, _ = support.build(name, **changes)
    fastac.enable(model)
    for change, forward in steps:
        plain, inputs = support.build(name, **changes)
        inputs = change(inputs)
        expected = train_step(plain, inputs)
        executions.clear()
        assert_same(train_step(model, inputs), expected)
        assert executions == {CPU_ATTENTION: forward}


def same(inputs: Inputs) -> Inputs:
    return inputs


def changed(**changes: Any) -> Change:
    return lambda inputs: inputs | changes


def without(argument: str) -> Change:
    return lambda inputs: {name: value for name, value in inputs.items() if name != argument}


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
    in_turn(name, [first, second, first], attention_executions, **changes)


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
