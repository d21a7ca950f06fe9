"""Which modules of a model are its transformer blocks: compared with those the model really checkpoints."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import torch

import fastac
from fastac.models import MODELS, containers, row_of
from tests import support
from tests.backends import flex_on_cpu


def read(model: torch.nn.Module) -> dict[str, list[str]]:
    return {container.name: list(container.blocks) for container in containers(model, row_of(model))}


@pytest.mark.parametrize("class_name", MODELS)
def test_a_row_names_what_the_model_checkpoints(class_name: str) -> None:
    model, inputs = support.build(class_name)
    with flex_on_cpu.registered():
        called = support.checkpointed(model, inputs)
    found = read(model)
    assert list(found) == list(MODELS[class_name].containers)
    assert sorted(name for names in found.values() for name in names) == sorted(set(called))


@pytest.mark.parametrize("name", MODELS)
def test_the_generic_reading_finds_the_same(name: str) -> None:
    """Where the model has more lists of attention, too: text refiners, face adapters."""
    model, _ = support.build(name)
    assert containers(model) == containers(model, row_of(model))


@pytest.mark.parametrize("name", MODELS)
def test_a_catalogue_row_names_a_class_of_diffusers(name: str) -> None:
    row = MODELS[name]
    assert name == row.name == row.class_name + (f":{row.variant}" if row.variant else "")
    assert getattr(diffusers, row.class_name)._supports_gradient_checkpointing


def test_a_class_whose_name_begins_alike_is_another_model() -> None:
    """The row of WanTransformer3DModel would miss the second list of blocks of WanVACETransformer3DModel."""
    for name, row in MODELS.items():
        model, _ = support.build(name)
        found = row_of(model)
        assert found is not None
        assert found.class_name == row.class_name


def test_a_model_without_a_row_is_served_by_the_generic_reading(attention_executions: Any) -> None:
    model, inputs = support.build("WanVACETransformer3DModel")
    expected = support.train_step(model, inputs)
    calls = attention_executions[support.CPU_ATTENTION]
    model.__class__ = type("MyTransformer", (type(model),), {})
    assert row_of(model) is None
    assert read(model) == {
        "blocks": ["blocks.0", "blocks.1", "blocks.2", "blocks.3"],
        "vace_blocks": ["vace_blocks.0", "vace_blocks.1"],
    }
    fastac.enable(model, "attn_only")
    attention_executions.clear()
    support.assert_same(support.train_step(model, inputs), expected)
    assert attention_executions == {support.CPU_ATTENTION: calls}
    assert [(row.container, row.blocks, row.blocks_seen) for row in fastac.report(model).rows] == [
        ("blocks", 4, 4),
        ("vace_blocks", 2, 2),
    ]


class Block(torch.nn.Module):
    """A block that holds lists of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.ModuleList([support.AttentionBlock()])
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(4)])


class Nested(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(4)])
        self.empty = torch.nn.ModuleList()
        self.stages = torch.nn.ModuleList([Block(), Block()])


def test_outermost_lists_with_attention_alone_are_containers() -> None:
    found = read(Nested())
    assert found == {"stages": ["stages.0", "stages.1"]}


def test_a_list_of_which_one_member_has_no_attention_is_no_container() -> None:
    model = Nested()
    model.stages.append(torch.nn.Linear(1, 1))
    assert list(read(model)) == ["stages.0.attention", "stages.1.attention"]


def test_a_model_without_blocks_has_no_containers() -> None:
    assert read(torch.nn.Sequential(torch.nn.Linear(2, 2))) == {}


def test_a_container_tells_the_classes_of_its_blocks() -> None:
    model = torch.nn.Module()
    model.blocks = torch.nn.ModuleList([support.AttentionBlock(), Block(), support.AttentionBlock()])
    (container,) = containers(model)
    assert container.block_class == "AttentionBlock|Block"


def test_blocks_keep_their_order_and_identity() -> None:
    model, _ = support.build("WanTransformer3DModel")
    (container,) = containers(model, row_of(model))
    assert list(container.blocks.items()) == [(f"blocks.{i}", block) for i, block in enumerate(model.blocks)]


class Loops(torch.nn.Module):
    """Checkpoints two of its lists, as models of diffusers do."""

    gradient_checkpointing = True

    def __init__(self) -> None:
        super().__init__()
        self.refiner = torch.nn.ModuleList([support.AttentionBlock()])
        self.embedders = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
        self.blocks = torch.nn.ModuleList([support.AttentionBlock(), torch.nn.Linear(1, 1)])
        self.streams = torch.nn.ModuleDict({"video": torch.nn.ModuleList([support.AttentionBlock()])})
        self.decoder = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.refiner:
            x = block(x)
        for _, block in enumerate(self.blocks[:1]):
            x = self._gradient_checkpointing_func(block, x)
        for block in self.streams["video"]:
            x = self._gradient_checkpointing_func(block, x) if self.training else block(x)
        if self.decoder is not None:
            for block in self.decoder:
                x = self._gradient_checkpointing_func(block, x)
        return x


class LoopsOverSomethingElse(Loops):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.children():
            x = self._gradient_checkpointing_func(block, x)
        return x


def test_lists_are_read_from_the_loops_that_checkpoint() -> None:
    """Whether all of their members hold attention, and which other lists there are, does not matter."""
    assert read(Loops()) == {"blocks": ["blocks.0", "blocks.1"], "streams.video": ["streams.video.0"]}
    outer = torch.nn.ModuleDict({"transformer": Loops()})
    assert list(read(outer)) == ["transformer.blocks", "transformer.streams.video"]


def test_loops_that_are_not_understood() -> None:
    assert list(read(LoopsOverSomethingElse())) == ["refiner", "streams.video"]


def test_a_class_without_source() -> None:
    """A class made at run time is read by those that it is made from; one that has none, by its structure."""
    assert list(read(type("Made", (Loops,), {})())) == ["blocks", "streams.video"]
    code = """
class Made(torch.nn.Module):
    gradient_checkpointing = True
    def forward(self, x):
        for block in self.blocks:
            x = self._gradient_checkpointing_func(block, x)
"""
    namespace: dict[str, Any] = {"torch": torch, "__name__": "made"}
    exec(code, namespace)
    model = namespace["Made"]()
    model.blocks = torch.nn.ModuleList([torch.nn.Linear(1, 1)])
    model.layers = torch.nn.ModuleList([support.AttentionBlock()])
    assert list(read(model)) == ["layers"]


class OtherLists(Loops):
    """Blocks that stand in a sequence, and in a dict; and a list that is not looped over."""

    def __init__(self) -> None:
        super().__init__()
        self.sequence = torch.nn.Sequential(support.AttentionBlock(), torch.nn.Linear(1, 1))
        self.named = torch.nn.ModuleDict({"a": support.AttentionBlock(), "b": support.AttentionBlock()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.sequence:
            x = self._gradient_checkpointing_func(block, x)
        for block in self.named.values():
            x = self._gradient_checkpointing_func(block, x)
        return x


def test_blocks_stand_in_sequences_and_dicts_as_well() -> None:
    assert read(OtherLists()) == {
        **read(Loops()),
        "sequence": ["sequence.0", "sequence.1"],
        "named": ["named.a", "named.b"],
    }
