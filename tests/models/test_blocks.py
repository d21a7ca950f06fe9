"""Which modules of a model without a row are its transformer blocks; tests/models/test_parity.py compares the rows."""

from __future__ import annotations

from typing import Any

import torch

import fastac
from fastac.models import containers, row_of
from tests import support


def names_of(model: torch.nn.Module) -> dict[str, list[str]]:
    return {container.name: list(container.blocks) for container in containers(model, row_of(model))}


def test_a_model_without_a_row(attention_executions: Any) -> None:
    """Trains all the same; a class whose name only begins alike, or that is made from one with a row, has none."""
    model, inputs = support.build("WanVACETransformer3DModel")
    expected = support.train_step(model, inputs)
    calls = attention_executions[support.CPU_ATTENTION]
    model.__class__ = type("WanVACETransformer3DModelOfMine", (type(model),), {})
    assert row_of(model) is None
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
        self.stages = torch.nn.ModuleList([Block(), support.AttentionBlock()])
        self.streams = torch.nn.ModuleDict({"video": torch.nn.Sequential(support.AttentionBlock())})
        self.named = torch.nn.ModuleDict({"a": support.AttentionBlock()})


def test_outermost_lists_of_attention_are_containers() -> None:
    """Of any kind: lists, sequences, dicts, lists in dicts."""
    model = Nested()
    assert names_of(model) == {
        "stages": ["stages.0", "stages.1"],
        "streams.video": ["streams.video.0"],
        "named": ["named.a"],
    }
    assert containers(model)[0].block_class == "Block|AttentionBlock"


def test_a_list_of_which_one_member_has_no_attention_is_no_container() -> None:
    model = Nested()
    model.stages.append(torch.nn.Linear(1, 1))
    assert list(names_of(model)) == ["stages.0.attention", "streams.video", "named"]
    assert names_of(torch.nn.Sequential(torch.nn.Linear(2, 2))) == {}
