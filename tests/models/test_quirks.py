"""What single models do unlike the others: how they call their blocks, and how often their blocks attend."""

from __future__ import annotations

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import fastac
from fastac import cli
from fastac.models import MODELS
from tests import support
from tests.backends import flex_on_cpu
from tests.support import CPU_ATTENTION, assert_same, train_step

ENGINES = ["tape", "sac"]

Inputs = dict[str, Any]
Change = Callable[[Inputs], Inputs]


def in_turn(name: str, steps: list[tuple[Change, int, int]], executions: Counter[str], **options: Any) -> None:
    """Train one enabled model on changed inputs, one after the other, each compared with a model without checkpointing.

    steps: what is changed, attention calls of the forward, and those that run again.
    """
    model, _ = support.build(name)
    fastac.enable(model, **options)
    for change, forward, again in steps:
        plain, inputs = support.build(name)
        inputs = change(inputs)
        executions.clear()
        expected = train_step(plain, inputs)
        assert executions == {CPU_ATTENTION: forward}
        executions.clear()
        assert_same(train_step(model, inputs), expected)
        assert executions == {CPU_ATTENTION: forward + again}
        assert sum(row.recomputed for row in fastac.report(model).rows) == again


def same(inputs: Inputs) -> Inputs:
    return inputs


def changed(**changes: Any) -> Change:
    return lambda inputs: inputs | changes


def without(argument: str) -> Change:
    return lambda inputs: {name: value for name, value in inputs.items() if name != argument}


# How blocks are called


def test_keyword_arguments(attention_executions: Counter[str]) -> None:
    """Wan-Animate 2 passes them to the checkpointing function, which that of diffusers itself does not take."""
    model, inputs = support.build("WanAnimate2Transformer3DModel")
    expected = train_step(model, inputs)
    model.enable_gradient_checkpointing()
    with pytest.raises(TypeError, match="unexpected keyword argument 'kv_cache'"):
        model(**inputs)
    fastac.enable(model)
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(model, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: 6}


@pytest.mark.parametrize("engine", ENGINES)
def test_bound_methods(engine: str, attention_executions: Counter[str], caplog: pytest.LogCaptureFixture) -> None:
    """Cosmos 3 hands over `layer.__call__`: policies per block know the layer, and what is told names it."""
    model, inputs = support.build("Cosmos3OmniTransformer")
    expected = train_step(model, inputs)
    fastac.enable(model, {"layers.0": "full", "*": "attn_only"}, engine=engine)
    caplog.set_level(logging.INFO, logger="fastac")
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(model, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: 4 + 2}
    (row,) = fastac.report(model).rows
    assert (row.container, row.block_class) == ("layers", "Cosmos3VLTextMoTDecoderLayer")
    assert (row.blocks, row.blocks_seen, row.saved, row.recomputed) == (2, 1, 2, 0)
    told = [record.getMessage() for record in caplog.records if "attention calls" in record.getMessage()]
    assert [message.partition(":")[0] for message in told] == ["Cosmos3OmniTransformer.layers.1"]


def kind(value: Any) -> str:
    """What an argument of a block is; a `+` stands for a tensor that requires grad."""
    if isinstance(value, torch.Tensor):
        return "+" if value.requires_grad else "tensor"
    if isinstance(value, tuple):
        return f"({', '.join(map(kind, value))})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {kind(item)}' for name, item in value.items())}}}"
    return str(value) if value is None else type(value).__name__


ARGUMENTS = {
    "CogVideoXTransformer3DModel": ("transformer_blocks.0", 1, "None"),
    "CogVideoXTransformer3DModel:1.5": ("transformer_blocks.0", 1, "(tensor, tensor)"),
    "MochiTransformer3DModel": ("transformer_blocks.0", 2, "(+, +)"),
    "CosmosTransformer3DModel:2.5": ("transformer_blocks.0", 3, "(+, +)"),
    "Kandinsky6Transformer3DModel": ("visual_transformer_blocks.0", 6, "(+, +)"),
    "LatteTransformer3DModel": ("temporal_transformer_blocks.0", 1, "None"),
    "SanaWMTransformer3DModel": ("blocks.1", 3, "(tensor, tensor, tensor, tensor)"),
    "AnyFlowTransformer3DModel": ("blocks.0", 2, "{query: tensor, key: tensor}"),
    "AnyFlowFARTransformer3DModel": ("blocks.0", 2, "BlockMask"),
    "Kandinsky6SRTransformer3DModel": ("visual_transformer_blocks.0", 1, "{sta_mask: tensor, threshold: float}"),
}
"""Model -> one of its blocks, the attention calls of that block, and what it is called with beside tensors."""


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_are_no_tensors(name: str, attention_executions: Counter[str]) -> None:
    block, in_block, argument = ARGUMENTS[name]
    with flex_on_cpu.registered():
        model, inputs = support.build(name)
        names = {module: module_name for module_name, module in model.named_modules()}
        passed: dict[str, list[str]] = {}

        def plain(block: torch.nn.Module, *args: Any) -> Any:
            passed[names[block]] = [kind(value) for value in args]
            return block(*args)

        model.enable_gradient_checkpointing(gradient_checkpointing_func=plain)
        expected = train_step(model, inputs)
        assert argument in passed[block]

        calls = Counter(attention_executions)
        fastac.enable(model, {block: "full", "*": "attn_only"})
        for _ in range(2):
            attention_executions.clear()
            assert_same(train_step(model, inputs), expected)
            assert (attention_executions - calls).total() == in_block
    rows = {row.container: row for row in fastac.report(model).rows}
    assert rows[block.rpartition(".")[0]].blocks_seen == rows[block.rpartition(".")[0]].blocks - 1
    outside = 1 if name == "MochiTransformer3DModel" else 0
    assert sum(row.saved for row in rows.values()) == calls.total() - in_block - outside


# How often blocks attend


def samples(*valid: int) -> Change:
    """A batch for Mochi, of which each sample has so many valid text tokens."""
    generator = torch.Generator().manual_seed(sum(valid))

    def change(inputs: Inputs) -> Inputs:
        shapes = {"hidden_states": (4, 2, 8, 8), "encoder_hidden_states": (16, 16)}
        made = {name: torch.randn(len(valid), *shape, generator=generator) for name, shape in shapes.items()}
        return inputs | {
            **{name: tensor.requires_grad_() for name, tensor in made.items()},
            "timestep": torch.full((len(valid),), 500),
            "encoder_attention_mask": torch.arange(16) < torch.tensor(valid)[:, None],
        }

    return change


MOCHI_STEPS = [(12,), (12, 8), (12, 8, 4), (4, 12), (8, 8), (4, 4), (4,), (12, 8, 4), (16,)]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("min_kv", [0, 40])
def test_one_attention_per_sample(min_kv: int, engine: str, attention_executions: Counter[str]) -> None:
    """Mochi: two blocks attend once per sample, to its 32 video tokens and its valid text; one call is outside.

    How many keys these are is in the values of the mask: batches of one shape are on either side of min_kv.
    """
    steps = [
        (samples(*valid), 2 * len(valid) + 1, 2 * sum(32 + tokens < min_kv for tokens in valid))
        for valid in MOCHI_STEPS
    ]
    in_turn(
        "MochiTransformer3DModel",
        steps,
        attention_executions,
        policy=fastac.Policy("attn_only", min_kv=min_kv),
        engine=engine,
    )


def test_verify_takes_lengths_as_they_are_now() -> None:
    """Mochi: none of these samples' attention is saved, all of an earlier batch of their shape was."""
    model, inputs = support.build("MochiTransformer3DModel")
    policy = fastac.Policy("attn_only", min_kv=40)
    for valid, saved in (((12, 12), 4), ((4, 4), 0)):
        verified = fastac.verify(model, **samples(*valid)(inputs), policy=policy)
        assert (verified.saved, verified.recomputed) == (saved, 4 - saved)
        assert verified.policy_executions == (5, 4 - saved)


@pytest.mark.parametrize(("policy", "again", "saved"), [("attn_only", 0, 4), ("full", 4, 0)])
def test_token_refiners_are_outside(policy: str, again: int, saved: int, attention_executions: Counter[str]) -> None:
    """HunyuanVideo: its text refiner attends once, is not checkpointed, and so neither run again nor reported."""
    model, inputs = support.build("HunyuanVideoTransformer3DModel")
    expected = train_step(model, inputs)
    fastac.enable(model, policy)
    attention_executions.clear()
    assert_same(train_step(model, inputs), expected)
    assert attention_executions == {CPU_ATTENTION: 5 + again}
    rows = fastac.report(model).rows
    assert [row.container for row in rows] == ["transformer_blocks", "single_transformer_blocks"]
    assert sum(row.saved for row in rows) == saved


def text(tokens: int) -> Change:
    generator = torch.Generator().manual_seed(tokens)
    states = torch.randn(1, tokens, 16, generator=generator).requires_grad_()
    return changed(encoder_hidden_states=states, encoder_attention_mask=(torch.arange(tokens) < tokens - 2)[None])


@pytest.mark.parametrize("engine", ENGINES)
def test_autocast_and_text_of_any_length(engine: str, attention_executions: Counter[str]) -> None:
    """One model, whose steps alternate between autocast and float32, and between lengths, seen before or not."""
    name = "HunyuanVideoTransformer3DModel"
    model, _ = support.build(name)
    fastac.enable(model, engine=engine)
    for step, tokens in enumerate((12, 12, 7, 7, 12, 20, 7)):
        plain, inputs = support.build(name)
        inputs = text(tokens)(inputs)
        with torch.autocast("cpu", torch.bfloat16) if step % 2 else nullcontext():
            expected = train_step(plain, inputs)
            attention_executions.clear()
            assert_same(train_step(model, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: 5}


@pytest.mark.parametrize("engine", ENGINES)
def test_video_with_and_without_sound(engine: str, attention_executions: Counter[str]) -> None:
    """Blocks that attend between video and sound attend less often without it, in steps of the same model."""
    isolated = changed(isolate_modalities=True)
    steps = [(same, 12, 0), (isolated, 8, 0), (same, 12, 0), (isolated, 8, 0)]
    in_turn("LTX2VideoTransformer3DModel", steps, attention_executions, engine=engine)
    silent = without("audio_hidden_states")
    steps = [(silent, 6, 0), (same, 14, 0), (silent, 6, 0), (same, 14, 0)]
    in_turn("Kandinsky6Transformer3DModel", steps, attention_executions, engine=engine)


def test_blocks_that_are_left_out(attention_executions: Counter[str]) -> None:
    """Latte: its temporal blocks can be switched off for a step."""
    spatial = changed(enable_temporal_attentions=False)
    in_turn("LatteTransformer3DModel", [(same, 6, 0), (spatial, 4, 0), (same, 6, 0)], attention_executions)


@pytest.mark.parametrize("engine", ENGINES)
def test_blocks_of_one_class_that_attend_unlike(
    engine: str, attention_executions: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sana-WM: linear and softmax attention take turns, and without a camera the latter attends once less."""
    name = "SanaWMTransformer3DModel"
    config = {**MODELS[name].config, "num_layers": 4}
    monkeypatch.setitem(MODELS, name, dataclasses.replace(MODELS[name], config=config))
    steps = [(same, 8, 0), (without("camera_conditions"), 6, 0), (same, 8, 0)]
    in_turn(name, steps, attention_executions, engine=engine)


class OneOutput(torch.nn.Module):
    """A model of which one output is trained."""

    def __init__(self, model: torch.nn.Module, index: int) -> None:
        super().__init__()
        self.model = model
        self.index = index

    def forward(self, **inputs: Any) -> torch.Tensor:
        outputs: tuple[torch.Tensor, ...] = self.model(**inputs)
        return outputs[self.index]


@pytest.mark.parametrize("index", [0, 1], ids=["video", "audio"])
@pytest.mark.parametrize(
    ("name", "calls"),
    [("LTX2VideoTransformer3DModel", 12), ("MiniMaxH3Transformer3DModel", 4), ("Kandinsky6Transformer3DModel", 14)],
)
def test_loss_on_one_stream(name: str, calls: int, index: int, attention_executions: Counter[str]) -> None:
    """A part of the last block has no gradient then; it is not run again for that."""
    model, inputs = support.build(name)
    trained = OneOutput(model, index)
    expected = train_step(trained, inputs)
    fastac.enable(model)
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(trained, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: calls}


# What can not be trained on a CPU


@pytest.mark.parametrize("name", [name for name, row in MODELS.items() if row.flex])
def test_flex_attention_ends_before_anything_is_trained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It has no backward on a CPU, and says so in the forward: no parameter has a gradient that a step could use."""
    model, inputs = support.build(name)
    fastac.enable(model)
    with pytest.raises(NotImplementedError, match="does not support backward on CPU"):
        train_step(model, inputs)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert cli.main(["check", name]) == 1
    assert f"fastac: check {name}: it can not be trained here" in capsys.readouterr().err
