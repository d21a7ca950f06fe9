"""Of blocks that are alike five run: the step is that of a simulation that runs every block."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import fastac
from fastac.planning import simulation
from fastac.planning.fake_model import FakeModel, fake_model
from fastac.planning.repetition import without_order
from fastac.planning.simulation import Split, simulate
from fastac.planning.timeline import Timeline
from fastac.policy import Policy
from tests.marks import quick
from tests.planning.planned import COGVIDEOX, HUNYUAN_VIDEO, LTX, WAN, stack_inputs, tiny
from tests.support import AttentionStack

LAYERS = 7
FIELDS = ("flops", "candidates", "storages")


def check(faked: FakeModel, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """With repetition a step is the same as without. expected: how many blocks run in each simulation."""
    original = simulation._simulate
    ran: list[set[str]] = []

    def counted(*args: Any) -> Timeline:
        ran.append(set())
        return original(*args)

    def count(name: str, module: torch.nn.Module, args: Any) -> None:
        ran[-1].add(name)

    for name, block in faked.blocks.items():
        for module in block.children():
            module.register_forward_pre_hook(functools.partial(count, name))
    for checkpointed in (faked.blocks, ()):
        ran.clear()
        with monkeypatch.context() as patch:
            patch.setattr(simulation, "_simulate", counted)
            found = simulate(faked, frozenset(checkpointed), Split())
            patch.setattr(simulation, "series_of", lambda *args: {})
            every = simulate(faked, frozenset(checkpointed), Split())
        assert [name for name in FIELDS if getattr(found, name) != getattr(every, name)] == []
        if len(found.events) == len(every.events):
            assert without_order(found.events) == without_order(every.events)
            assert (found.forward_ends, found.begins) == (every.forward_ends, every.begins)
        for policy in (
            (Policy("full"), Policy("attn_only", offload=True, keep=1)) if checkpointed else (Policy("none"),)
        ):
            policies = dict.fromkeys(faked.blocks, policy)
            assert found.held(policies) == every.held(policies)
            assert found.peak(policies) == every.peak(policies)
        assert list(found.begins) == list(every.begins)
        assert list(map(len, ran)) == [*expected, len(faked.blocks)]


KINDS: dict[str, dict[str, int]] = {
    WAN: {},
    LTX: {},
    COGVIDEOX: {},
    HUNYUAN_VIDEO: {"num_single_layers": LAYERS},
    "LoRA": {},
}


@pytest.mark.parametrize("name", quick(KINDS, COGVIDEOX))
def test_five_blocks_of_a_kind_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny(WAN if name == "LoRA" else name, lora=4 * (name == "LoRA"), num_layers=LAYERS, **KINDS[name])
    fastac.enable(model)
    model(**inputs)  # its blocks have states now
    check(fake_model(model, inputs), [5 + 5 * len(KINDS[name])], monkeypatch)


class Changing(AttentionStack):
    """What is done with the output of a block, by its number, and with the outputs of all blocks in the end."""

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        outputs = []
        for number, block in enumerate(self.blocks):
            video = self.change(number, block(video, text))
            outputs.append(video)
        return self.end(outputs)

    def change(self, number: int, video: torch.Tensor) -> torch.Tensor:
        return video

    def end(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        return outputs[-1]


class Casts(Changing):
    """autocast holds the weights that it has cast until the forward ends."""

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(video, text)


class ChangesOne(Changing):
    def change(self, number: int, video: torch.Tensor) -> torch.Tensor:
        return video * 2 if number == 3 else video


class ChangesAside(Changing):
    """What it computes is used in no block."""

    def change(self, number: int, video: torch.Tensor) -> torch.Tensor:
        self.aside = video.detach() * 2
        return video


class AddsAll(Changing):
    """The output of each block has another use, so that its gradients have."""

    def end(self, outputs: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([output * output for output in outputs]).sum(0)


class AnotherAttribute(Changing):
    def __init__(self, layers: int) -> None:
        super().__init__(layers=layers)
        self.blocks[3].fraction = 0.5


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Changing, [5]),
        (Casts, [5]),
        (ChangesOne, [2, LAYERS]),
        (ChangesAside, [2, LAYERS]),
        (AddsAll, [5, LAYERS]),
        (AnotherAttribute, [7]),
    ],
)
def test_what_blocks_do_that_are_not_alike_is_not_repeated(
    kind: type[Changing], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every block runs, sometimes after a simulation in vain."""
    check(fake_model(kind(layers=LAYERS), stack_inputs(), "blocks"), expected, monkeypatch)
