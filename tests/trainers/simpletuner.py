"""SimpleTuner 4.10.1: its own classes, whose forward calls torch's checkpoint whatever function they are given."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

import fastac
from tests.backends import packages
from tests.models.tiny import TINY
from tests.support import relative_error
from tests.trainers.training import OfDiffusers

packages.use("simpletuner")

from simpletuner.helpers.models.hunyuanvideo.transformer import HunyuanVideo15Transformer3DModel
from simpletuner.helpers.models.kandinsky5_video.transformer_kandinsky5 import Kandinsky5Transformer3DModel
from simpletuner.helpers.models.ltxvideo2.transformer import LTX2VideoTransformer3DModel
from simpletuner.helpers.models.wan.transformer import WanTransformer3DModel


class SimpleTuner(OfDiffusers):
    kind: type
    changes: ClassVar[dict[str, Any]] = {}
    is_refused = True

    def make(self) -> torch.nn.Module:
        return self.kind(**{**TINY[self.name].config, **self.changes})

    @property
    def name(self) -> str:
        return self.kind.__name__

    def switch_on(self, model: Any) -> None:
        model.enable_gradient_checkpointing()

    def test_enable_alone_is_refused(self) -> None:
        """It gives the model a function to call, which the forward ignores; the error says what to write."""
        model = self.model()
        fastac.enable(model)
        with pytest.raises(fastac.PolicyNotAppliedError) as error:
            self.step(model)
        assert f"fastac.enable(model, blocks={self.blocks!r})".replace("'", '"') in str(error.value)
        fastac.enable(model, blocks=self.blocks)
        self.expect(model)


class TestWan(SimpleTuner):
    kind, attention, blocks = WanTransformer3DModel, 6, "blocks"
    changes: ClassVar = {"num_layers": 3}

    @pytest.mark.parametrize(
        ("options", "again"),
        [
            ({"interval": 2}, 6),
            ({"interval": 2, "segment_stride": 3}, 4),
            ({"offload_attention": True}, 6),
            ({"backend": "unsloth"}, 6),  # not reentrant here: torch's checkpoint under saved_tensors_hooks
            ({"backend": "torch-ffn"}, 0),
        ],
        ids=str,
    )
    def test_options(self, options: dict[str, Any], again: int) -> None:
        """Segments of two blocks, with a block between them that is not checkpointed; hooks around it; a part of it."""

        def switched_on() -> Any:
            model = self.switched_on()
            for name, value in options.items():
                getattr(model, f"set_gradient_checkpointing_{name}")(value)
            return model

        self.expect(switched_on(), again)
        with fastac.patch_checkpoint():
            self.expect(switched_on())


class TestHunyuanVideo15(SimpleTuner):
    kind, attention, blocks = HunyuanVideo15Transformer3DModel, 2, "transformer_blocks"
    beside = 1  # refines the text


class TestKandinsky5(SimpleTuner):
    kind, attention, blocks = Kandinsky5Transformer3DModel, 5, ["text_transformer_blocks", "visual_transformer_blocks"]


class TestLTX2(SimpleTuner):
    """Its own checkpointing runs each block again as the last one, which is what its closure holds by then."""

    kind, attention, blocks = LTX2VideoTransformer3DModel, 12, "transformer_blocks"

    def test_its_own_checkpointing(self) -> None:
        expected, _ = self.step(self.model())
        found, kernels = self.step(self.switched_on())
        assert kernels == 2 * self.attention
        gradient = "gradient of transformer_blocks.0.attn1.to_q.weight"
        assert relative_error(found[gradient], expected[gradient]) > 0.1

    def test_patch_checkpoint(self) -> None:
        """Gets the same closure, and says so. Its segments have none, and `enable(blocks=)` does not either."""
        with fastac.patch_checkpoint():
            model = self.switched_on()
            with pytest.raises(fastac.FastacError, match="does not compute what the forward did"):
                self.step(model)
            model.set_gradient_checkpointing_interval(2)
            self.expect(model)
