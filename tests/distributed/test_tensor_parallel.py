"""Tensor parallelism with DTensor: sums of partial results are saved, gathers of a sequence are issued again.

A redistribution that an op makes by itself, such as of a partial sum that is added to a replicated tensor, is seen
below DTensor and saved as well.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

import fastac
from tests import support
from tests.distributed import ranks, steps
from tests.distributed.models import TensorParallel
from tests.distributed.steps import Measured

WIDTH, TOKENS, LAYERS = 16, 12, 2


class Did(NamedTuple):
    """A step, and the collectives as reported: issued, saved, again."""

    step: Measured
    numbers: tuple[int, int, int] | None = None


def _train(kind: str) -> dict[str, Did]:
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    single = TensorParallel("single hidden" if kind == "hidden" else "single", "none")
    found = {"single": Did(steps.measured(single, {"x": x}))}
    for policy in ("none", "torch", "attn_only"):
        model = TensorParallel(kind, policy)
        step = steps.measured(model, {"x": x})
        rows = fastac.report(model).rows
        numbers = rows[0].communication if policy == "attn_only" else None
        found[policy] = Did(step, numbers and (numbers.issued, numbers.saved, numbers.again))
    return found


ISSUED = {"plain": (2, 0, (4, 4, 0)), "sequence": (6, 4, (8, 4, 4)), "hidden": (3, 0, (3, 3, 0))}
"""Kind -> collectives of the forward's that backward issues again under full and under attn_only; those reported.

Recompute ends with the last tensor that backward needs, which the last sum of a block is not. Of "hidden", the fourth
is outside the blocks.
"""


@pytest.mark.parametrize("kind", ISSUED)
def test_tensor_parallel(kind: str) -> None:
    full, saved, reported = ISSUED[kind]
    for found in ranks.run(_train, kind):
        plain = found["none"].step
        steps.assert_close(plain.tensors, found["single"].step.tensors, 1e-4)
        for policy, again in (("torch", full), ("attn_only", saved)):
            step = found[policy].step
            support.assert_same(step.tensors, plain.tensors)
            assert step.attention == (LAYERS, LAYERS if policy == "torch" else 0)
            forward, backward = plain.collectives
            assert step.collectives == (forward, backward + again), f"{policy}: {step.backward}"
        assert found["attn_only"].numbers == reported
