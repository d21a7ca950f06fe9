"""finetrainers 0.2.0: CheckpointWrappers around the blocks of a diffusers model."""

from __future__ import annotations

from typing import Any

import pytest

import fastac
from tests.backends import packages
from tests.trainers.training import OfDiffusers

packages.use("finetrainers")

from finetrainers.utils.activation_checkpoint import apply_activation_checkpointing


class TestLTX(OfDiffusers):
    name, attention = "LTXVideoTransformer3DModel", 4

    def switch_on(self, model: Any, kind: str = "full", every: int = 1) -> None:
        apply_activation_checkpointing(model, kind, every)

    def test_every_second_block(self) -> None:
        """Its wrappers say nothing then: fastac's mapping does."""
        model = self.model()
        self.switch_on(model, "block_skip", 2)
        self.expect(model, again=2)
        fastac.enable(model, {"*.0": "attn_only", "*": "none"})
        self.expect(model)
        (row,) = fastac.report(model).rows
        assert (row.blocks_none, row.saved, row.recomputed) == (1, 2, 0)

    def test_ops_of_its_own_are_refused(self) -> None:
        """They are a context_fn, which would do the saving, of a CheckpointWrapper around the whole model."""
        model = apply_activation_checkpointing(self.model(), "ops")
        fastac.enable(model)
        with pytest.raises(fastac.PolicyNotAppliedError, match="Leave that checkpoint out"):
            self.step(model)
        with fastac.patch_checkpoint(), pytest.raises(fastac.FastacError, match="context_fn"):
            self.step(apply_activation_checkpointing(self.model(), "ops"))
