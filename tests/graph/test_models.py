"""fastac.graph on the models of diffusers: their blocks' own checkpointing function marks the regions."""

from __future__ import annotations

import pytest

import fastac
import fastac.graph
from fastac import FastacError
from tests.graph.steps import assert_exact, step_of
from tests.support import build


@pytest.mark.parametrize(
    ("name", "calls", "again"),
    [
        ("WanTransformer3DModel", 4, 4),
        pytest.param("WanTransformer3DModel:i2v", 6, 6, marks=pytest.mark.slow),
        ("LTXVideoTransformer3DModel", 4, 4),
        pytest.param("HunyuanVideoTransformer3DModel", 5, 4, marks=pytest.mark.slow),
        ("CogVideoXTransformer3DModel", 2, 2),
        pytest.param("AllegroTransformer3DModel", 4, 4, marks=pytest.mark.slow),
        pytest.param("CosmosTransformer3DModel", 4, 4, marks=pytest.mark.slow),
        pytest.param("LatteTransformer3DModel", 6, 6, marks=pytest.mark.slow),
    ],
)
def test_models_of_diffusers(name: str, calls: int, again: int) -> None:
    """With Wan's rotary embedding, which writes in place, and token refiners outside of the blocks."""
    plain, inputs = build(name)
    model, _ = build(name)
    fastac.enable(model)
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    assert_exact(plain, fastac.graph.apply(traced), inputs, calls)
    assert_exact(plain, fastac.graph.apply(traced, "full"), inputs, calls + again)


def test_a_model_that_looks_at_its_mask_is_refused() -> None:
    """Mochi picks the valid tokens of each prompt by a boolean mask."""
    model, inputs = build("MochiTransformer3DModel")
    fastac.enable(model)
    with pytest.raises(FastacError, match="looks at the values of a tensor"):
        fastac.graph.trace(step_of(model), model, **inputs)
