"""Image DiTs train under fastac, too, without a catalogue row: their blocks are read from their code."""

from __future__ import annotations

import functools
import re
from collections import Counter
from typing import Any

import pytest
import torch

import fastac
from fastac.models import ModelRow, containers, row_of, tiny_model
from tests import support
from tests.models.image_models import ROWS
from tests.support import CPU_ATTENTION, Tensors, assert_same, train_step

CALLS = {
    "FluxTransformer2DModel": (3, 3),
    "Flux2Transformer2DModel": (3, 3),
    "Flux3Transformer2DModel": (5, 5),
    "ChromaTransformer2DModel": (3, 3),
    "LongCatImageTransformer2DModel": (3, 3),
    "BriaFiboTransformer2DModel": (3, 3),
    "QwenImageTransformer2DModel": (2, 2),
    "Krea2Transformer2DModel": (4, 2),
    "SD3Transformer2DModel": (3, 3),
    "AuraFlowTransformer2DModel": (3, 3),
    "PixArtTransformer2DModel": (4, 4),
    "SanaTransformer2DModel": (2, 2),
    "CogView4Transformer2DModel": (2, 2),
    "HunyuanImageTransformer2DModel": (4, 3),
    "Lumina2Transformer2DModel": (4, 2),
    "ZImageTransformer2DModel": (4, 4),
    "HiDreamImageTransformer2DModel": (2, 2),
    "OmniGenTransformer2DModel": (2, 2),
    "PRXTransformer2DModel": (2, 2),
}
"""Class -> attention calls of a forward, and those that full checkpointing runs again. The others are in refiners."""

LOOKED_AT_AGAIN = {"SD3Transformer2DModel": 1}
"""Calls of blocks that attend less often than the first of their class: they are run once more, the first time."""

IMAGE_MODELS = pytest.mark.parametrize("row", ROWS, ids=lambda row: row.class_name)


def build(row: ModelRow) -> tuple[Any, dict[str, Any]]:
    model, inputs = tiny_model(row)
    return model, {**inputs, "return_dict": False}


@functools.cache
def without_checkpointing(class_name: str) -> Tensors:
    (row,) = (row for row in ROWS if row.class_name == class_name)
    return train_step(*build(row))


@IMAGE_MODELS
def test_the_blocks_are_those_that_are_checkpointed(row: ModelRow) -> None:
    model, inputs = build(row)
    called = support.checkpointed(model, inputs)
    assert row_of(model) is None
    found = containers(model)
    assert [container.name for container in found] == list(row.containers)
    assert sorted(called) == sorted(name for container in found for name in container.blocks)


@IMAGE_MODELS
@pytest.mark.parametrize("policy", ["full", "attn_only"])
def test_parity(row: ModelRow, policy: str, attention_executions: Counter[str]) -> None:
    expected = without_checkpointing(row.class_name)
    calls, in_blocks = CALLS[row.class_name]
    model, inputs = build(row)
    fastac.enable(model, policy)
    for look in (LOOKED_AT_AGAIN.get(row.class_name, 0), 0):
        attention_executions.clear()
        assert_same(train_step(model, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: calls + (in_blocks if policy == "full" else look)}
    assert sum(row.saved for row in fastac.report(model).rows) == (0 if policy == "full" else in_blocks)


@IMAGE_MODELS
def test_reference_is_sound(row: ModelRow, attention_executions: Counter[str]) -> None:
    """What is compared with: finite, and with gradients for all but what the last block makes of the text."""
    model, inputs = build(row)
    tensors = train_step(model, inputs)
    assert attention_executions == {CPU_ATTENTION: CALLS[row.class_name][0]}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    without = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or not torch.count_nonzero(parameter.grad)
    ]
    last_text = r"transformer_blocks\.1\.(attn\.(to_add_out|add_q_proj|norm_added_q)|txt_mlp)\."
    assert [name for name in without if not re.match(last_text, name)] == []
