"""What single models do unlike the others: how they call their blocks, and how often their blocks attend."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import fastac
from tests import support
from tests.support import executions_of, train_step


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        # Between video and sound, where there is sound.
        ("LTX2VideoTransformer3DModel", ({}, 12), ({"isolate_modalities": True}, 8)),
        ("Kandinsky6Transformer3DModel", ({"audio_hidden_states": None}, 6), ({}, 14)),
        # Temporal blocks can be switched off.
        ("LatteTransformer3DModel", ({}, 6), ({"enable_temporal_attentions": False}, 4)),
        # In every second block; without a camera that attends once less.
        ("SanaWMTransformer3DModel", ({}, 8), ({"camera_conditions": None}, 6)),
    ],
)
def test_blocks_that_attend_now_and_then(name: str, first: Any, second: Any) -> None:
    """In steps of one model: all that was to be saved is saved, and nothing is amiss.

    first, second: what is changed in the inputs, and attention calls of the forward.
    """
    changes = {"num_layers": 4} if name.startswith("Sana") else {}
    model, _ = support.build(name, **changes)
    fastac.enable(model)
    for changed, forward in (first, second, first):
        plain, inputs = support.build(name, **changes)
        inputs = {key: value for key, value in (inputs | changed).items() if value is not None}
        assert executions_of(model, inputs, train_step(plain, inputs)) == forward


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
