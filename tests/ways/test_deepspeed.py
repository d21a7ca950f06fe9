"""DeepSpeed's engine around a model, and its configuration; DeepSpeed itself is not installed.

The Engine here stands for deepspeed.DeepSpeedEngine in what fastac reads of it: a module that holds the model as
`module`, calls it in its forward, and has the configuration in `config` as deepspeed.initialize was given it, a dict or
the path of a JSON file. `checkpoint` stands for deepspeed.checkpointing.checkpoint: reentrant, of positional arguments.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from fastac import FastacError
from tests.model_state import state_of
from tests.support import AttentionStack, stack
from tests.ways.recipes import EACH_MODEL, WAN, Run, adamw, assert_exact_and_saved, batches, build

OPTIONS = {
    "partition_activations": True,
    "contiguous_memory_optimization": True,
    "cpu_checkpointing": True,
    "number_checkpoints": 4,
    "synchronize_checkpoint_boundary": True,
    "profile": True,
}
OFF = dict.fromkeys(OPTIONS, False) | {"number_checkpoints": None}
EACH_OPTION = pytest.mark.parametrize("option", OPTIONS)


class Engine(torch.nn.Module):
    def __init__(self, module: torch.nn.Module, config: Any) -> None:
        super().__init__()
        self.module = module
        self.config = config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def zero(stage: int, **checkpointing: Any) -> dict[str, Any]:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    return config | ({"activation_checkpointing": checkpointing} if checkpointing else {})


def checkpoint(function: Any, *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=True)


@pytest.fixture
def accelerate_with() -> Iterator[Any]:
    """accelerate as it is while it prepares for DeepSpeed with a configuration, whose engine it would build."""

    def prepare(config: dict[str, Any]) -> None:
        plugin = DeepSpeedPlugin(hf_ds_config=config)
        Accelerator(cpu=True)
        PartialState().distributed_type = DistributedType.DEEPSPEED
        AcceleratorState().deepspeed_plugins = plugin

    yield prepare
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@EACH_MODEL
def test_an_engine(name: str) -> None:
    """Trains like the model; ZeRO's stages, and options that are off, are none of fastac's business."""

    def recipe(run: Run) -> None:
        model, batch = build(name)
        engine = Engine(model, zero(2, **OFF))
        run.enable(engine)
        for one in batches(batch, 2):
            run.step(engine, one, optimizer=adamw(engine))
        assert fastac.report(engine).active == (run.policy is not None)

    assert_exact_and_saved(recipe, name)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_configurations_that_pass(stage: int, accelerate_with: Any) -> None:
    model, _ = build(WAN)
    for config in (zero(stage), zero(stage, **OFF), zero(stage) | {"activation_checkpointing": None}, None, "auto"):
        fastac.enable(Engine(model, config))
    accelerate_with(zero(stage, **OFF))
    fastac.enable(model)


@EACH_OPTION
def test_options_of_an_engine_are_refused(option: str, tmp_path: Path) -> None:
    """Wherever the engine stands among the wrappers; the model is left as it was."""
    model, _ = build(WAN)
    config = zero(2, **OFF | {option: OPTIONS[option]})
    (tmp_path / "config.json").write_text(json.dumps(config))
    before = state_of(model)
    told = rf"has activation_checkpointing\.{option}\. .*Take it out of the configuration"
    for engine in (
        Engine(model, config),
        Engine(model, str(tmp_path / "config.json")),
        torch.compile(Engine(model, config), backend="eager"),
    ):
        with pytest.raises(FastacError, match=told):
            fastac.enable(engine)
        assert state_of(model) == before


@EACH_OPTION
def test_options_that_accelerate_was_given_are_refused(option: str, accelerate_with: Any) -> None:
    """Before and after its prepare: what it was given is its state's, whatever `enable` gets."""
    accelerate_with(zero(2, **{option: OPTIONS[option]}))
    model, _ = build(WAN)
    for given in (model, Engine(model, None)):
        with pytest.raises(FastacError, match=rf"activation_checkpointing\.{option}"):
            fastac.enable(given)


def test_blocks_by_name_inside_an_engine() -> None:
    model: AttentionStack = stack()
    with pytest.raises(FastacError, match=r"partition_activations, activation_checkpointing\.profile"):
        fastac.enable(Engine(model, zero(1, partition_activations=True, profile=True)), blocks="module.blocks")
    fastac.enable(Engine(model, zero(1)), blocks="module.blocks")


def test_its_checkpoint_is_replaced_and_given_back() -> None:
    model, batch = build(WAN)
    model.enable_gradient_checkpointing(gradient_checkpointing_func=checkpoint)
    engine = Engine(model, zero(3))
    fastac.enable(engine)
    engine(**batch)[0].sum().backward()
    assert [row.saved for row in fastac.report(engine).rows] == [4]
    fastac.disable(engine)
    assert model.gradient_checkpointing
    assert model._gradient_checkpointing_func is checkpoint
