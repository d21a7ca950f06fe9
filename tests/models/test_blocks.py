"""Which modules of a model without a row are its transformer blocks; tests/models/test_parity.py compares the rows."""

from __future__ import annotations

import torch

import fastac
from tests import support
from tests.hook.hosts import Diffuser


def found(model: torch.nn.Module) -> dict[str, tuple[str, int]]:
    """Container -> class of its blocks, and how many they are."""
    fastac.enable(model)
    return {row.container: (row.block_class, row.blocks) for row in fastac.report(model).rows}


def test_a_model_without_a_row() -> None:
    """Trains all the same; a class that is made from one with a row has none, even if its name begins alike."""
    model, inputs = support.build("HunyuanVideo15Transformer3DModel")
    expected = support.train_step(model, inputs)
    blocks = {"transformer_blocks": ("HunyuanVideo15TransformerBlock", 2)}
    assert found(model) == blocks
    calls = support.executions_of(model, inputs, expected)
    model.__class__ = type("HunyuanVideo15Transformer3DModelOfMine", (type(model),), {})
    refiner = {"context_embedder.token_refiner.refiner_blocks": ("HunyuanVideo15IndividualTokenRefinerBlock", 1)}
    assert found(model) == refiner | blocks
    assert support.executions_of(model, inputs, expected) == calls


class Block(torch.nn.Module):
    """A block that holds lists of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.ModuleList([support.AttentionBlock()])
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(4)])


class Nested(Diffuser):
    """Beside an empty list of blocks."""

    def __init__(self) -> None:
        super().__init__(layers=0)
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(4)])
        self.stages = torch.nn.ModuleList([Block(), support.AttentionBlock()])
        self.streams = torch.nn.ModuleDict({"video": torch.nn.Sequential(support.AttentionBlock())})
        self.named = torch.nn.ModuleDict({"a": support.AttentionBlock()})


def test_outermost_lists_of_attention_are_containers() -> None:
    """Of any kind: lists, sequences, dicts, lists in dicts. One member without attention: the lists inside it."""
    model, other = Nested(), Nested()
    same = {"streams.video": ("AttentionBlock", 1), "named": ("AttentionBlock", 1)}
    assert found(model) == {"stages": ("Block|AttentionBlock", 2), **same}
    other.stages.append(torch.nn.Linear(1, 1))
    assert found(other) == {"stages.0.attention": ("AttentionBlock", 1), **same}
