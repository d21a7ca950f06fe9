"""policy="auto": what happens while a model trains changes what it chooses. On a simulated device that counts."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import logging
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

import fastac
from fastac import Auto, FastacError
from fastac.engine.device_memory import DeviceMemory
from fastac.planning import auto
from tests import support
from tests.live_bytes import LiveBytes
from tests.planning import planned
from tests.planning.planned import WAN, stack_inputs, tiny
from tests.support import AttentionStack, stack

LAYERS = 4
UNUSED = 0.06
"""The share of the memory that no plan uses."""


class Device:
    """A device whose allocator counts: what models hold when it is made, and what ops return while it is on."""

    def __init__(self, *models: torch.nn.Module, usable: int) -> None:
        outside = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        self.weights = sum(tensor.nbytes for tensor in outside)
        self.meter = LiveBytes(outside)
        self.usable = usable
        # Workspaces, which no plan knows.
        self.workspace = 0

    def memory(self, device: torch.device) -> DeviceMemory:
        now, peak = (self.weights + size for size in (self.meter.now, self.meter.peak))
        return DeviceMemory(now, self.usable, peak + self.workspace)


@contextlib.contextmanager
def on(device: Device) -> Iterator[Device]:
    """Its clock says that a forward takes a second."""
    clock = itertools.count()
    with pytest.MonkeyPatch.context() as patch, planned.exact():
        patch.setattr(auto, "memory_of", device.memory)
        patch.setattr(auto, "_now", lambda _: float(next(clock)))
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        gc.collect()
        with device.meter:
            yield device


class Counted(AttentionStack):
    """A stack that counts copies of it that are simulated."""

    copies: set[int] = set()  # noqa: RUF012 the copies have it too

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        if planned.is_planned(video):
            Counted.copies.add(id(self))
        return super().forward(video, text)


def counted_stack() -> Any:
    Counted.copies.clear()
    torch.manual_seed(0)
    return Counted(layers=LAYERS)


def run(model: Any, inputs: Mapping[str, Any]) -> None:
    planned.step(model, inputs)
    for parameter in model.parameters():
        parameter.grad = None


def chosen_for(model: Any) -> list[tuple[int, ...]]:
    """How many outputs the latest forward of each list of blocks saved; or that it checkpointed nothing."""
    rows = fastac.report(model).rows
    return [(0, 0, row.blocks_none) if row.blocks_none else (row.saved, row.linear_saved, 0) for row in rows]


def saved_by(model: Any) -> int:
    """Bytes of the outputs that the latest forward saved."""
    return sum(row.saved_bytes + row.linear_bytes for row in fastac.report(model).rows)


def has_attn_only(model: Any) -> bool:
    return all((row.recomputed, row.linear_saved) == (0, 0) < (row.saved,) for row in fastac.report(model).rows)


def peaks_of(model: Any, inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Peaks of a step of a stack: of full checkpointing, and with all attention saved."""
    with planned.exact():
        plan = fastac.plan(model, inputs, blocks="blocks")
    full, attention = (plan.policies[number].peak_bytes - plan.states.total for number in (1, 3))
    return full, attention


def device_for(model: Any, room: int) -> Device:
    """A device on which a step may take so many bytes, besides weights and reserve."""
    device = Device(model, usable=0)
    device.usable = math.ceil((device.weights + room) / (1 - UNUSED))
    return device


def enabled(model: Any, **options: Any) -> Any:
    fastac.enable(model, Auto(**{"host": 0, "optimizer": "sgd", **options}), blocks="blocks")
    return model


def test_two_sizes_of_inputs_in_turns() -> None:
    """Each has a plan, from one simulation, also if there is validation in between, or gradients are there."""
    small, large = stack_inputs(64), stack_inputs(256)
    model = counted_stack()
    full, most = peaks_of(model, large)
    device = device_for(model, (full + most) // 2)
    Counted.copies.clear()
    with on(device):
        enabled(model)
        chosen = []
        for inputs in (small, large, small, large, small):
            run(model, inputs)
            chosen.append(chosen_for(model))
            with torch.no_grad():
                model(**large)
        assert chosen[0] == chosen[2] == chosen[4] != chosen[1] == chosen[3]
        planned.step(model, large)
        planned.step(model, large)  # its gradients are there: another plan, from the same simulation
        assert chosen_for(model) != chosen[1]
        assert saved_by(model) > 0
        assert device.meter.peak + device.weights <= device.usable
    assert len(Counted.copies) == 2


def test_steps_are_exact() -> None:
    """Also those of a copy and of an unpickled model: neither has an optimizer or a plan."""
    model, inputs = tiny(WAN)
    expected = support.train_step(copy.deepcopy(model), inputs)
    memory = fastac.plan(model, inputs).policies[1].peak_bytes * 21 // 20
    fastac.enable(model, Auto(memory=int(memory / (1 - UNUSED)), optimizer="adamw"))
    for _ in range(2):
        support.assert_same(support.train_step(model, inputs), expected)
    chosen = chosen_for(model)
    assert saved_by(model) > 0
    for mine in (copy.deepcopy(model), support.pickled(model)):
        support.assert_same(support.train_step(mine, inputs), expected)
        assert chosen_for(mine) == chosen
    assert "attention outputs" in str(fastac.report(model))
    assert "auto" in str(fastac.verify(model, **inputs))
    fastac.disable(model)
    support.assert_same(support.train_step(model, inputs), expected)


def test_memory_that_runs_out_is_a_tenth_less(caplog: pytest.LogCaptureFixture) -> None:
    """A trainer catches the error, and runs the step again."""
    caplog.set_level(logging.INFO, "fastac")
    model, inputs = counted_stack(), stack_inputs(256)
    _, most = peaks_of(model, inputs)
    Counted.copies.clear()
    with on(device_for(model, most)):
        enabled(model)
        run(model, inputs)
        before = saved_by(model)
        handle = model.blocks[2].register_forward_pre_hook(_run_out)
        with pytest.raises(torch.OutOfMemoryError):
            model(**inputs)
        handle.remove()
        run(model, inputs)
        after = saved_by(model)
        run(model, inputs)
        assert before > after == saved_by(model)
    assert len(Counted.copies) == 1
    assert [text for text in caplog.messages if "a tenth less" in text]


def _run_out(*args: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("optimizer", [None, "given"])
def test_an_optimizer_that_appears_late(optimizer: str | None) -> None:
    """Its states are not allocated before its first step. Until then there is room for them, if there are any."""
    model, inputs = stack(layers=LAYERS), stack_inputs(256)
    full, most = peaks_of(model, inputs)
    adamw = torch.optim.AdamW(model.parameters(), foreach=False)
    device = device_for(model, (full + most) // 2 + 2 * Device(model, usable=0).weights)
    with on(device):
        enabled(model, optimizer=adamw if optimizer else None)
        for _ in range(3):
            for _ in range(2):  # of gradient accumulation
                planned.step(model, inputs)
            adamw.step()
            adamw.zero_grad()
        assert device.meter.peak + device.weights <= device.usable
        assert saved_by(model) > 0


def test_a_step_that_takes_more_is_planned_again_once(caplog: pytest.LogCaptureFixture) -> None:
    """By the allocator's peak in the second step; and with the states of AdamW that never came."""
    caplog.set_level(logging.INFO, "fastac")
    model, inputs = stack(layers=LAYERS), stack_inputs(256)
    full, most = peaks_of(model, inputs)
    device = device_for(model, (full + most) // 2)
    with on(device):
        enabled(model)
        saved = []
        device.workspace = (most - full) // 4
        for _ in range(4):
            run(model, inputs)
            saved.append(saved_by(model))
    assert saved[0] == saved[1] > saved[2] == saved[3]
    assert sum("plans again" in text for text in caplog.messages) == 1
    model = stack(layers=LAYERS)
    device = device_for(model, full * 21 // 20 + 2 * device.weights)
    with on(device):
        enabled(model, optimizer="adamw")
        optimizer = torch.optim.SGD(model.parameters(), foreach=False)
        saved = []
        for _ in range(4):
            planned.step(model, inputs)
            optimizer.step()
            optimizer.zero_grad()
            saved.append(saved_by(model))
        assert device.meter.peak + device.weights <= device.usable
    assert saved[0] == saved[1] < saved[2] == saved[3]


def test_nothing_fits() -> None:
    """Before the first block runs."""
    model, inputs = stack(layers=LAYERS), stack_inputs(256)
    full, _ = peaks_of(model, inputs)
    with on(device_for(model, full * 3 // 4)) as device:
        enabled(model)
        held = device.meter.now
        with pytest.raises(FastacError, match=r"a step takes .* at least.* About \d\d% of the tokens would fit"):
            model(**inputs)
        assert device.meter.peak == held


def test_what_is_given_is_checked() -> None:
    with pytest.raises(FastacError, match=r'policy=fastac.Auto\(memory="16GiB"\)'):
        fastac.enable(stack(), "auto", blocks="blocks")
    for options in ({"memory": "16"}, {"host": -1}, {"gbps": 0}, {"tflops": "fast"}, {"optimizer": "lion"}):
        with pytest.raises(FastacError):
            Auto(**options)
    with pytest.raises(FastacError, match="plans a whole model"):
        fastac.checkpoint(torch.nn.Linear(2, 2), torch.ones(1, 2), policy="auto")


def test_a_model_that_cannot_be_planned_has_attn_only(caplog: pytest.LogCaptureFixture) -> None:
    """A block asks for a value of its features."""
    caplog.set_level(logging.INFO, "fastac")
    model, inputs = stack(layers=2), stack_inputs(64)
    model.blocks[1].register_forward_pre_hook(lambda _, args: print(end=str(args[0].sum().item() > 0)[:0]))
    with on(Device(model, usable=10**9)):
        enabled(model)
        run(model, inputs)
    assert has_attn_only(model)
    assert [text for text in caplog.messages if 'no plan, so policy "attn_only"' in text]


def test_inputs_that_never_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some plans they have that of the next larger ones, if there is one."""
    monkeypatch.setattr(auto, "SIGNATURES", 2)
    model = counted_stack()
    full, most = peaks_of(model, stack_inputs(200))
    Counted.copies.clear()
    with on(device_for(model, (full + most) // 2)):
        enabled(model)
        chosen = {}
        for tokens in (200, 100, 90, 150, 110, 80):
            run(model, stack_inputs(tokens))
            chosen[tokens] = chosen_for(model)
    assert len(Counted.copies) == 2
    assert chosen[90] == chosen[80] == chosen[100] != chosen[200] == chosen[150] == chosen[110]


def test_the_speed_of_the_device_is_measured() -> None:
    """Copies of a device that is slower than expected are hidden: then the second plan takes more to the host."""
    model, inputs = stack(layers=LAYERS), stack_inputs(256)
    full, most = peaks_of(model, inputs)
    with on(device_for(model, full + 1000)):
        enabled(model, host=10 * most, gbps=1.0)
        on_host = []
        for _ in range(4):
            run(model, inputs)
            on_host.append(sum(row.offloaded.copies for row in fastac.report(model).rows if row.offloaded))
    assert on_host[0] == on_host[1] == 0 < on_host[2] == on_host[3]


def test_compiled_blocks_save_no_linear_outputs() -> None:
    """In a memory in which others would."""
    inputs = stack_inputs(64)
    plan = fastac.plan(stack(layers=2), inputs, blocks="blocks", optimizer="sgd")
    between = (plan.policies[3].peak_bytes + planned.row_of(plan, fastac.Policy(linear=("*",))).peak_bytes) // 2
    with_memory = Auto(memory=int(between / (1 - UNUSED)), host=0, optimizer="sgd")
    found = []
    for enable in (fastac.enable, fastac.compile):
        model = stack(layers=2)
        enable(model, with_memory, blocks="blocks", **{"backend": "eager"} if enable is fastac.compile else {})
        run(model, inputs)
        found.append(sum(row.linear_saved for row in fastac.report(model).rows))
        assert saved_by(model) > 0
    assert found[0] > 0 == found[1]


def test_a_trainer_that_calls_the_blocks_itself(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = stack(layers=2), stack_inputs(64)
    fastac.enable(model, Auto(memory=10**9), blocks="blocks")
    video = inputs["video"]
    for block in model.blocks:
        video = block(video, inputs["text"])
    video.sum().backward()
    assert [text for text in caplog.messages if "only its blocks are called" in text]
    assert has_attn_only(model)
