"""Tensor parallelism with DTensor: sums of partial results are saved, gathers of a sequence are issued again.

A redistribution that an op makes by itself, such as of a partial sum that is added to a replicated tensor, is seen by
the tape. Torch's selective checkpointing sees the op alone, and issues what is hidden in it again.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch

import fastac
from tests import support
from tests.distributed import ranks, steps
from tests.distributed.steps import Measured
from tests.distributed.tensor_parallel import TensorParallel

WIDTH, TOKENS, LAYERS = 16, 12, 2


class Did(NamedTuple):
    """A step, and the collectives as reported: issued, saved, again."""

    step: Measured
    numbers: tuple[int, int, int] | None


WAYS = {"none": ("none", ""), "full": ("torch", ""), "tape": ("attn_only", "tape"), "sac": ("attn_only", "sac")}


def _train(kind: str) -> dict[str, Did]:
    found = {}
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    single = TensorParallel("single hidden" if kind == "hidden" else "single", "none", "")
    found["single"] = Did(steps.measured(single, {"x": x}), None)
    for way, (policy, engine) in WAYS.items():
        model = TensorParallel(kind, policy, engine)
        step = steps.measured(model, {"x": x})
        with support.reported_blocks({f"blocks.{i}": block for i, block in enumerate(model.blocks)}):
            row = fastac.report(model).rows[0]
        assert not row.writing
        numbers = row.communication
        found[way] = Did(step, numbers and (numbers.issued, numbers.saved, numbers.again))
    return found


ISSUED = {
    "plain": ({"full": 2, "tape": 0, "sac": 0}, {"tape": (4, 4, 0), "sac": (4, 4, 0)}),
    "sequence": ({"full": 6, "tape": 4, "sac": 4}, {"tape": (8, 4, 4), "sac": (8, 4, 4)}),
    "hidden": ({"full": 3, "tape": 0, "sac": 3}, {"tape": (3, 3, 0), "sac": None}),
}
"""Kind -> collectives of the forward's that backward issues again, and what is reported: issued, saved, again.

Recompute ends with the last tensor that backward needs, which the last sum of a block is not. Of "hidden", the fourth
is outside the blocks.
"""


def check_tensor_parallel(folder: Path, kind: str) -> None:
    """Gradients are those of one process; what is saved is not issued again."""
    again, reported = ISSUED[kind]
    for found in ranks.run(folder, _train, kind):
        expected = found["single"].step.tensors
        for name, tensor in found["none"].step.tensors.items():
            largest = float(expected[name].abs().max())
            assert torch.allclose(tensor, expected[name], rtol=0, atol=1e-5 * largest + 1e-6), name
        assert found["none"].step.tensors.keys() == expected.keys()
        plain = found["none"].step.collectives
        for way, (step, numbers) in found.items():
            if way == "single":
                continue
            support.assert_same(step.tensors, found["none"].step.tensors)
            assert step.attention == ((LAYERS, LAYERS) if way == "full" else (LAYERS, 0)), way
            assert step.collectives == (plain[0], plain[1] + again.get(way, 0)), f"{kind}, {way}: {step.backward}"
            assert numbers == reported.get(way), f"{way}: {numbers}"


@pytest.mark.parametrize("kind", ISSUED)
def test_tensor_parallel(tmp_path: Path, kind: str) -> None:
    check_tensor_parallel(tmp_path, kind)
