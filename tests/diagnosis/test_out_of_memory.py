"""An out-of-memory error of an enabled model says what fastac holds, and which policy would hold less."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch

import fastac
from fastac.engine.region import Region
from fastac.errors import readable_bytes
from fastac.policy import Policy
from tests import support
from tests.engine.simulated import simulated

HAS_NOTES = pytest.mark.skipif(sys.version_info < (3, 11), reason="below Python 3.11 an error has no notes")


class Failing(support.AttentionStack):
    """Allocates more than there are addresses: itself, or in the backward, which has zeros for what was selected."""

    def forward(self, video: torch.Tensor, text: torch.Tensor, in_forward: bool) -> torch.Tensor:
        many = super().forward(video, text).expand(2**46, *video.shape)
        return many.contiguous() if in_forward else many[0]


@pytest.mark.parametrize("in_forward", [True, False])
def test_an_allocation_that_fails(in_forward: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Really: in the model's own forward, and in a kernel of autograd's."""
    model = Failing()
    fastac.enable(model, blocks="blocks")
    with pytest.raises(RuntimeError, match="can't allocate memory") as raised:
        model(**support.stack_inputs(), in_forward=in_forward).sum().backward()
    (note,) = getattr(raised.value, "__notes__", caplog.messages)
    first, held, way_out = note.splitlines()
    assert first == "fastac holds now:"
    assert held.startswith("- Failing.blocks, 2 regions: attention on cpu ")
    assert "inputs on cpu " in held
    assert way_out == 'full would hold 3.4 KiB of it: fastac.enable(model, policy="full")'


class Masked(support.AttentionBlock):
    """Is called with more than tensors."""

    def __call__(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return super().__call__(video, text, None)

    def forward(self, video: torch.Tensor, text: torch.Tensor, mask: None) -> torch.Tensor:
        return super().forward(video, text)


@pytest.fixture(autouse=True)
def no_other_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions that the graphs of other tests still hold are not listed."""
    gc.collect()
    others = {id(one): one for one in gc.get_objects() if type(one) is Region}
    everything = gc.get_objects
    monkeypatch.setattr(gc, "get_objects", lambda: [one for one in everything() if id(one) not in others])


class Raising(support.AttentionStack):
    def forward(self, error: BaseException) -> None:
        raise error


def notes_of(error: BaseException) -> str:
    """Those that an error gets which passes through models."""
    model = Raising()
    fastac.enable(model, blocks="blocks")
    for _ in range(2):
        with pytest.raises(type(error)):
            model(error)
    return "\n".join(getattr(error, "__notes__", ()))


@HAS_NOTES
@pytest.mark.parametrize(
    ("policy", "way_out"),
    [
        (Policy(linear=("ffn.2",)), 'attn_only would hold {attention}: fastac.enable(model, policy="attn_only")'),
        (Policy(min_kv=7), 'full would hold {inputs}: fastac.enable(model, policy="full")'),
        ({"blocks.0": "full", "*": "attn_only"}, 'full would hold {inputs}: fastac.enable(model, policy="full")'),
        ("full", "No policy of fastac's holds less: take fewer frames, a smaller batch, or shard the model."),
    ],
)
def test_the_next_policy_that_holds_less(policy: Any, way_out: str) -> None:
    model, inputs = support.stack(block=Masked), support.stack_inputs()
    fastac.enable(model, policy, blocks="blocks")
    graph = model(**inputs)
    (_, held, line) = notes_of(RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.")).splitlines()
    (row,) = fastac.report(model).rows
    of_inputs = 2 * inputs["video"].nbytes + inputs["text"].nbytes
    sizes = {"inputs on cpu": of_inputs, "attention on cpu": row.saved_bytes, "Linear on cpu": row.linear_bytes}
    for kind, size in sizes.items():
        assert (f"{kind} {readable_bytes(size)}" in held) == bool(size)
    less = [f"{readable_bytes(size)} of it" for size in (of_inputs, of_inputs + row.saved_bytes)]
    assert line == way_out.format(inputs=less[0], attention=less[1])
    del graph
    assert "fastac holds nothing now" in notes_of(MemoryError())
    assert not notes_of(RuntimeError("another"))


@HAS_NOTES
def test_frozen_blocks_hold_nothing() -> None:
    model = support.stack(layers=3).requires_grad_(False)
    fastac.enable(model, blocks="blocks")
    inputs = {name: tensor.detach() for name, tensor in support.stack_inputs().items()}
    for is_trained, note in ((False, "fastac holds nothing now"), (True, "- AttentionStack.blocks, 1 region: ")):
        model.blocks[2].requires_grad_(is_trained)
        graph = model(**inputs)
        gc.collect()
        assert note in notes_of(MemoryError())
    del graph


@HAS_NOTES
def test_memory_that_may_be_the_hosts() -> None:
    """torch words it so where pinning fails, of the trainer's offload too: to offload more is no way out."""
    model = support.stack(layers=5).to("meta")  # as any device that is no CPU
    fastac.enable(model, "full", blocks="blocks")
    graph = model(**{name: tensor.to("meta") for name, tensor in support.stack_inputs().items()})
    device = notes_of(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    assert device.endswith('policy=fastac.Policy("full", offload="inputs"))')
    assert "pin" not in device
    either = notes_of(RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported later"))
    assert "the host has no more memory to pin" in either
    assert "offload=" not in either
    del graph


@HAS_NOTES
def test_a_note_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_objects", lambda: 1 // 0)
    note = notes_of(MemoryError())
    assert note.startswith("fastac could not list what its regions hold: ZeroDivisionError")
    assert "fastac.report" in note


@HAS_NOTES
@pytest.mark.parametrize("outer", ["full", "attn_only", "torch"])
def test_regions_in_a_checkpoint(outer: str) -> None:
    """Hold no inputs: the checkpoint around them would recompute itself for each of theirs."""
    model, inputs = support.stack(layers=4, policy="attn_only"), support.stack_inputs()
    graph = support.run_checkpointed(model, *inputs.values(), policy=outer)
    recomputes: list[Any] = []
    model.register_forward_pre_hook(lambda *given: recomputes.append(given))
    note = notes_of(MemoryError())
    assert not recomputes
    assert "- AttentionBlock, 4 regions: " in note
    assert note.count("inputs on cpu") == (outer != "torch")  # those of the outer region
    del graph


@HAS_NOTES
def test_what_is_on_the_host_stays_there() -> None:
    model = support.stack(layers=5)
    fastac.enable(model, Policy(offload=True), blocks="blocks")
    with simulated() as device:
        graph = model(**support.stack_inputs())
        (_, held, line) = notes_of(MemoryError()).splitlines()
        for kind in ("attention on the host", "attention on cpu", "inputs on the host", "inputs on cpu"):
            assert kind in held
        assert line.endswith('fastac.enable(model, policy=fastac.Policy("full", offload="inputs"))')
        (row,) = fastac.report(model).rows
        assert row.offloaded.copies == 3  # to the host, and none back
        del graph
    assert not device.faults


@HAS_NOTES
def test_under_auto_the_note_says_how_to_give_it_less() -> None:
    model, inputs = support.stack(block=Masked), support.stack_inputs()
    fastac.enable(model, fastac.Auto(memory="1GiB"), blocks="blocks")
    graph = model(**inputs)
    *_, way_out = notes_of(torch.OutOfMemoryError("CUDA out of memory.")).splitlines()
    assert way_out.startswith('Policy "auto" chose what is saved. Give it less memory, fastac.Auto(memory=...)')
    del graph
