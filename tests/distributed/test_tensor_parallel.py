"""Tensor parallelism with DTensor: sums of partial results are saved, gathers of a sequence are issued again.

A redistribution inside an op of DTensor, as of a partial sum added to a replicated tensor, is saved as well.
"""

from __future__ import annotations

import pytest
import torch

import fastac
from tests import support
from tests.distributed import ranks, steps
from tests.distributed.models import TensorParallel
from tests.distributed.steps import Measured

WIDTH, TOKENS, LAYERS = 16, 12, 2


def _train(kind: str) -> tuple[dict[str, Measured], tuple[int, int, int]]:
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    found = {}
    for policy in ("none", "torch", "attn_only"):
        model = TensorParallel(kind, policy)
        found[policy] = steps.measured(model, {"x": x})
    return found, steps.numbers(fastac.report(model).rows[0].communication)


ISSUED = {"plain": (2, 0, (4, 4, 0)), "sequence": (6, 4, (8, 4, 4)), "hidden": (3, 0, (3, 3, 0))}
"""Kind -> collectives that backward issues again under full and under attn_only, and what is reported.

A recompute ends before the last sum of a block, which backward does not need. The fourth of "hidden" is outside the
blocks.
"""


@pytest.mark.parametrize("kind", ISSUED)
def test_tensor_parallel(kind: str) -> None:
    full, saved, reported = ISSUED[kind]
    for found, numbers in ranks.run(_train, kind):
        plain = found["none"]
        for policy, again in (("torch", full), ("attn_only", saved)):
            step = found[policy]
            support.assert_same(step.tensors, plain.tensors)
            assert step.attention == (LAYERS, LAYERS if policy == "torch" else 0)
            forward, backward = plain.collectives
            assert step.collectives == (forward, backward + again), f"{policy}: {step.backward}"
        assert numbers == reported
