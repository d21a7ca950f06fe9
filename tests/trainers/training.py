"""Tests of a trainer's model: under the trainer's own checkpointing, and under fastac in its place.

A file here, or in hunts/trainers/trainers, puts the package on sys.path (`packages.use`), imports the real model and
the real switch of its checkpointing, and subclasses `Training`. Attention is counted by torch's kernel, not by fastac.
"""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

import fastac
from tests import support
from tests.models.tiny import TINY
from tests.support import CPU_ATTENTION, Tensors, assert_same, train_step


class Training:
    """Tests of one model as its trainer trains it."""

    attention: int  # calls in the checkpointed blocks of one forward
    beside = 0  # calls of a forward outside them
    blocks: Any = None  # as `fastac.enable` takes them; None if it finds them
    is_refused = False  # `fastac.enable`, while the trainer's own checkpointing is on

    def make(self) -> torch.nn.Module:
        raise NotImplementedError

    def inputs(self) -> dict[str, Any]:
        raise NotImplementedError

    def switch_on(self, model: Any) -> None:
        raise NotImplementedError

    def host(self, model: Any) -> Any:
        return model

    def model(self) -> Any:
        """The same at every call. Some parameters begin as zeros, and every gradient behind them, or as nothing."""
        torch.manual_seed(0)
        model = self.make().train()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        return model

    def switched_on(self) -> Any:
        model = self.model()
        self.switch_on(model)
        return model

    def step(self, model: Any) -> tuple[Tensors, int]:
        """Outputs and gradients of one training step, and how many attention kernels ran in it."""
        support.count_cpu_attention()
        support.executions.clear()
        torch.manual_seed(1)
        found = train_step(model, self.inputs())
        whole = {name: one.full_tensor() if isinstance(one, DTensor) else one for name, one in found.items()}
        plain = {name.replace("_checkpoint_wrapped_module.", ""): one for name, one in whole.items()}
        return plain, support.executions[CPU_ATTENTION]

    def expect(self, model: Any, again: int = 0) -> None:
        """So many attention calls run again in each step, and everything is what it is without checkpointing."""
        expected, once = self.step(self.model())
        assert once == self.attention + self.beside, f"{once} attention kernels without checkpointing"
        for _ in range(2):
            found, kernels = self.step(model)
            assert kernels == once + again, f"{kernels} attention kernels, {once} without checkpointing"
            assert_same(found, expected)

    def expect_report(self, model: Any) -> None:
        report = fastac.report(self.host(model))
        assert (report.active, report.problem) == (True, "")
        assert sum(row.saved for row in report.rows) == self.attention, report
        assert all(row.saved_bytes > 0 and row.recomputed == 0 for row in report.rows), report

    def test_its_own_checkpointing(self) -> None:
        self.expect(self.switched_on(), again=self.attention)

    def test_enable(self) -> None:
        model = self.model()
        fastac.enable(self.host(model), blocks=self.blocks)
        self.expect(model)
        self.expect_report(model)

    def test_patch_checkpoint(self) -> None:
        """Under the trainer's own checkpointing; afterwards that is torch's again."""
        with fastac.patch_checkpoint("attn_only"):
            self.expect(self.switched_on())
        self.expect(self.switched_on(), again=self.attention)

    def test_enable_and_its_own_checkpointing(self) -> None:
        """Attention never runs twice unsaid.

        Blocks under diffusers' or transformers' flag are refused until it is off, as the error says how, and
        CheckpointWrappers are taken over. A checkpoint of torch's around a block stops early in the recompute, before
        it would run the block again.
        """
        model = self.switched_on()
        if self.is_refused:
            with pytest.raises(fastac.FastacError, match="twice") as error:
                fastac.enable(model, blocks=self.blocks)
            (switch_off,) = re.findall(r"Switch it off first: model\.(\w+)\(\)", str(error.value))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                getattr(model, switch_off)()
        fastac.enable(self.host(model), blocks=self.blocks)
        self.expect(model)
        self.expect_report(model)


class OfDiffusers(Training):
    """A class of diffusers, or of that name, with the configuration and the inputs of tests/models/tiny.py."""

    name: str

    def make(self) -> torch.nn.Module:
        return support.build(self.name)[0]

    def inputs(self) -> dict[str, Any]:
        return TINY[self.name].inputs() | {"return_dict": False}
