"""Buffers that a block writes, in compiled code: written once, inside a checkpoint and around one."""

from __future__ import annotations

import pytest
import torch

from tests import support
from tests.compiled.steps import WAYS
from tests.compiler import reset
from tests.engine.test_buffers import LAYERS, Stateful
from tests.support import Tensors, stack_inputs, train_step

STEPS = 5


def train(layer: str, way: str, policy: str) -> Tensors:
    reset()
    torch.manual_seed(1)
    model = support.AttentionStack(layers=1, policy=policy, block=lambda: Stateful(LAYERS[layer]))
    compiled = WAYS[way](model, "aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found: Tensors = {}
    for step in range(STEPS):
        found |= {
            f"step {step}: {name}": one for name, one in train_step(compiled, stack_inputs(step, batch=2)).items()
        }
        optimizer.step()
    return found | dict(model.named_buffers())


@pytest.mark.parametrize(
    ("layer", "way"),
    [
        ("delayed scaling", "blocks"),
        ("delayed scaling", "whole"),
        pytest.param("router", "blocks", marks=pytest.mark.slow),
        pytest.param("batch norm", "whole", marks=pytest.mark.slow),
    ],
)
def test_they_are_written_once(layer: str, way: str) -> None:
    support.assert_same(train(layer, way, "attn_only"), train(layer, way, "none"))
