"""The report: what the latest forward saved and recomputed, to the byte, and what is wrong, if anything."""

from __future__ import annotations

import copy
from typing import Any

import diffusers
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import fastac
from fastac import Policy
from tests import compiler, support
from tests.engine.simulated import simulated
from tests.hook.hosts import ATTENDING, HOSTS, SIZES, UNET, diffuser
from tests.live_bytes import allocated
from tests.marks import NEEDS_COMPILED_MODELS
from tests.support import executions_of, train_step

WAN = "WanTransformer3DModel"
CPU_OP = "aten._scaled_dot_product_flash_attention_for_cpu"


def bytes_of(queries: int = 128, dim: int = 12) -> int:
    """Output and logsumexp of one attention call of two heads in float32; by default of Wan, over 128 video tokens."""
    return 4 * 2 * queries * (dim + 1)


def test_what_attn_only_saved() -> None:
    model, inputs = support.build(WAN)
    fastac.enable(model)
    train_step(model, inputs)
    report = fastac.report(model)
    assert (report.model_class, report.policy, report.active, report.problem) == (WAN, "attn_only", True, "")
    (row,) = report.rows
    assert (row.container, row.block_class, row.blocks, row.blocks_seen) == ("blocks", "WanTransformerBlock", 2, 2)
    assert (row.attention_calls, row.saved, row.recomputed) == (4, 4, 0)
    assert row.ops == (CPU_OP,)
    assert row.saved_bytes == 4 * bytes_of()
    text = str(report)
    for part in (WAN, "attn_only", "blocks x 2", "WanTransformerBlock", "52.0 KiB", CPU_OP):
        assert part in text
    assert max(map(len, text.splitlines())) <= 200
    assert "\x1b" not in text


def test_the_line_to_paste() -> None:
    model, inputs = support.build(WAN)
    with FlopCounterMode(display=False) as counter:
        model(**inputs)
    counts = counter.get_flop_counts()
    blocks = [counts[f"{WAN}.blocks.{number}"] for number in range(2)]
    total = sum(sum(one.values()) for one in blocks)
    attention = sum(one[torch.ops.aten._scaled_dot_product_flash_attention_for_cpu] for one in blocks)
    for policy, bound in (("attn_only", 4), (Policy(min_kv=100), 2)):
        fastac.enable(model, policy)
        assert fastac.report(model).summary == ""
        train_step(model, inputs)
        report = fastac.report(model)
        (row,) = report.rows
        assert row.flops == total
        assert (row.saved_flops == attention) == (bound == 4)
        assert str(report).splitlines()[-1] == (
            f"fastac {report.policy}: {bound} of 4 attention forwards are not run again, "
            f"{row.saved_flops / total:.0%} of the FLOPs that full recomputes in these blocks; "
            f"{13 * bound}.0 KiB held for them"
        )
    fastac.disable(model)
    assert fastac.report(model).summary == ""


class Masked(support.AttentionBlock):
    """Attends to the text tokens that a mask leaves, as Mochi does: no shape says how many keys there are."""

    def forward(self, video: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(video, text[:, mask])


def test_lengths_that_depend_on_values() -> None:
    model = torch.nn.ModuleList([Masked()])
    model.forward = lambda **inputs: model[0](*inputs.values())
    fastac.enable(model, Policy("attn_only", min_kv=4), blocks="0")
    for valid, saved in ((5, 2), (3, 1), (5, 2), (4, 2)):
        inputs = support.stack_inputs() | {"mask": torch.arange(support.TEXT_TOKENS) < valid}
        assert executions_of(model, inputs) == 4 - saved
        (row,) = fastac.report(model).rows
        assert (row.attention_calls, row.saved) == (2, saved)
        assert row.saved_bytes == saved * bytes_of(queries=support.VIDEO_TOKENS, dim=8)


def test_bytes_are_those_of_the_latest_forward() -> None:
    """Of the latest with gradients: a validation in between changes nothing. "full" saves nothing."""
    model = diffuser()
    fastac.enable(model)
    sizes = []
    for batch in (1, 2, 1):
        train_step(model, support.stack_inputs(batch=batch))
        before = fastac.report(model)
        with torch.no_grad():
            model(**support.stack_inputs(batch=3))
        assert fastac.report(model) == before
        sizes.append(before.rows[0].saved_bytes)
    assert sizes == [sizes[0], 2 * sizes[0], sizes[0]]
    fastac.enable(model, "full")
    train_step(model, support.stack_inputs())
    report = fastac.report(model)
    assert (report.policy, report.active, report.rows[0].saved, report.rows[0].saved_bytes) == ("full", True, 0, 0)


def test_a_model_that_is_not_enabled() -> None:
    """And one without a forward since then."""
    model = diffuser()
    for _ in range(2):
        train_step(model, support.stack_inputs())
        report = fastac.report(model)
        assert (report.active, report.policy) == (False, "none")
        assert "fastac.enable" in report.problem
        assert "not enabled" in str(report)
        fastac.enable(model)
        report = fastac.report(model)
        assert report.active
        assert "no forward" in report.problem
        assert "none seen" in str(report)
        train_step(model, support.stack_inputs())
        fastac.disable(model)
    assert fastac.report(torch.nn.Linear(2, 2)).rows == ()


def test_models_that_call_fastac_for_other_modules_than_their_lists() -> None:
    """These are shown, where they hold blocks or are in one: inside of a UNet's lists, around an autoencoder's."""
    image, time = torch.randn(1, 4, 8, 8), torch.tensor([1])
    unet = diffusers.UNet2DConditionModel(**UNET)
    vae = diffusers.AutoencoderKL(norm_num_groups=4, block_out_channels=(8,), latent_channels=2)
    for model, inputs, found in (
        (unet, (image, time, torch.randn(1, 3, 8)), {"down_blocks.0.attentions.0.transformer_blocks": (1, 2)}),
        (vae, (torch.randn(1, 3, 8, 8),), {"encoder": (1, 1), "decoder": (1, 1)}),
    ):
        fastac.enable(model)
        assert fastac.report(model).problem == "no forward with gradients was seen yet"
        copy.deepcopy(model)(*inputs).sample.sum().backward()
        assert fastac.report(model).problem == "no forward with gradients was seen yet"
        for _ in range(2):
            model(*inputs).sample.sum().backward()
            report = fastac.report(model)
            assert report.problem == ""
            rows = {row.container: row for row in report.rows}
            for name, (blocks, saved) in found.items():
                row = rows[name]
                assert (row.blocks, row.blocks_seen, row.saved) == (blocks, blocks, saved)
        total = sum(row.saved for row in report.rows)
        assert total == {unet: 8, vae: 2}[model]
        assert f"{total} of {total} attention forwards are not run again" in str(report)
        assert all("Resnet" not in row.block_class for row in report.rows)
    other = diffusers.UNet2DModel(in_channels=4, out_channels=4, **SIZES, **ATTENDING)
    fastac.enable(other)
    other(image, time).sample.sum().backward()
    assert fastac.report(other).problem == "UNet2DModel checkpoints other modules than these: ResnetBlock2D"


def test_checkpointing_that_was_switched_off() -> None:
    """The table of the latest step stays, and says so."""
    model = diffuser()
    fastac.enable(model)
    function = model._gradient_checkpointing_func
    model.disable_gradient_checkpointing()
    off = "gradient checkpointing was switched off since fastac.enable"
    assert fastac.report(model).problem == off
    model.enable_gradient_checkpointing(function)
    train_step(model, support.stack_inputs())
    model.disable_gradient_checkpointing()
    train_step(model, support.stack_inputs())
    report = fastac.report(model)
    assert (report.active, report.rows[0].saved) == (False, 4)
    assert report.problem == off + ". The table is of the latest step under fastac."
    assert str(report).startswith("Diffuser: policy attn_only, not active\n")
    fastac.disable(model)
    assert str(fastac.report(model)).startswith("Diffuser: not enabled by fastac.enable\n")
    assert "The table is of the latest step under fastac" in fastac.report(model).problem


@pytest.mark.parametrize("host", ["diffusers", "blocks"])
def test_blocks_without_gradients_count_nowhere(host: str) -> None:
    """They hold nothing, and no backward runs them again. A model that is frozen as a whole is no error."""
    model = HOSTS[host].make()
    HOSTS[host].enable(model)
    inputs, sizes = {name: tensor.detach() for name, tensor in support.stack_inputs().items()}, []
    for frozen in (0, 1, 2, 1, 0):
        for i, block in enumerate(model.blocks):
            block.requires_grad_(i >= frozen)
        sizes.append(allocated(lambda: model(**inputs)))
        report = fastac.report(model)
        (row,) = report.rows
        trained = 2 - frozen
        assert (row.blocks_seen, row.attention_calls, row.saved, row.recomputed) == (trained, *[2 * trained] * 2, 0)
        assert row.saved_bytes == 2 * trained * bytes_of(queries=support.VIDEO_TOKENS, dim=8)
        assert (row.flops > 0, report.summary != "") == (trained > 0, trained > 0)
        assert f"{2 * trained} of {2 * trained} attention forwards" in report.summary or not trained
        assert report.problem == ("" if trained else "no forward with gradients was seen yet")
    assert sizes[0] == sizes[4] > sizes[1] == sizes[3] > sizes[2]
    HOSTS[host].enable(model.requires_grad_(False), Policy(offload=True, keep=1))
    with simulated():
        model(**inputs)
        (row,) = fastac.report(model).rows
    assert (row.offloaded.host_bytes, row.offloaded.device_bytes, row.offloaded.copies) == (0, 0, 0)


def test_a_model_that_calls_fastac_checkpoint_itself() -> None:
    model = support.stack(policy="attn_only", layers=3)
    train_step(model, support.stack_inputs())
    (row,) = fastac.report(model).rows
    assert (row.container, row.blocks_seen, row.attention_calls, row.saved) == ("blocks", 3, 6, 6)
    assert row.saved_bytes == 6 * bytes_of(queries=support.VIDEO_TOKENS, dim=8)


@NEEDS_COMPILED_MODELS
class TestCompiledModel:
    """Nothing is seen while a graph runs. The report says what was decided while it was traced."""

    def test_counts_and_bytes(self) -> None:
        compiler.reset()
        model = diffuser()
        fastac.enable(model, {"blocks.0": "full", "*": Policy("attn_only", min_kv=support.TEXT_TOKENS + 1)})
        model.compile(backend="aot_eager", dynamic=False)
        assert fastac.report(model).rows[0].blocks_seen == 0
        train_step(model, support.stack_inputs())
        report = fastac.report(model)
        (row,) = report.rows
        assert report.problem == ""
        assert (row.blocks_seen, row.blocks_full, row.blocks_compiled) == (1, 1, 1)
        assert (row.attention_calls, row.saved, row.recomputed, row.ops) == (2, 1, 1, (CPU_OP,))
        assert row.saved_bytes == bytes_of(queries=support.VIDEO_TOKENS, dim=8)
        assert "compiled" in str(report)

    def test_of_a_model_that_was_trained_eagerly_before(self) -> None:
        """The later run counts: the compiled model's, with the sizes of its trace, or the eager one's."""
        compiler.reset()
        model = diffuser()
        fastac.enable(model)
        train_step(model, support.stack_inputs())
        size = fastac.report(model).rows[0].saved_bytes
        model.compile(backend="aot_eager")
        train_step(model, support.stack_inputs(batch=2))
        (row,) = fastac.report(model).rows
        assert (row.saved_bytes, row.blocks_compiled) == (2 * size, 2)
        model._compiled_call_impl = None
        train_step(model, support.stack_inputs())
        (row,) = fastac.report(model).rows
        assert (row.saved_bytes, row.blocks_compiled) == (size, 0)

    def test_blocks_whose_names_end_alike(self) -> None:
        compiler.reset()
        blocks = torch.nn.ModuleList([support.AttentionBlock()])
        model: Any = torch.nn.ModuleDict({"encoder": support.stack(layers=1), "blocks": blocks})
        model.forward = lambda video, text: blocks[0](model["encoder"](video, text), text)
        fastac.enable(model, blocks=["encoder.blocks", "blocks"])
        model.compile(backend="aot_eager")
        train_step(model, support.stack_inputs())
        calls = {row.container: row.attention_calls for row in fastac.report(model).rows}
        assert calls == {"encoder.blocks": 2, "blocks": 2}
