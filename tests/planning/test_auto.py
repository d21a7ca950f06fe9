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
from unittest.mock import Mock

import pytest
import torch

import fastac
from fastac import Auto, FastacError
from fastac.hook import enabled_on
from fastac.planning import auto
from fastac.planning.device_memory import DeviceMemory
from tests import support
from tests.live_bytes import LiveBytes
from tests.planning import planned
from tests.planning.planned import WAN, stack_inputs, tiny
from tests.support import stack

LAYERS = 4
UNUSED = 0.06
"""The share of the memory that no plan uses."""


class Device:
    """A device whose allocator counts: what a model holds when it is made, and what ops return while it is on."""

    def __init__(self, model: torch.nn.Module, usable: int, attention: int) -> None:
        outside = [*model.parameters(), *model.buffers()]
        self.weights = sum(tensor.nbytes for tensor in outside)
        self.meter = LiveBytes(outside)
        self.usable = usable
        # Bytes that the outputs of all attention add to the peak of full checkpointing.
        self.attention = attention
        # Workspaces, which no plan knows.
        self.workspace = 0
        # Blocks that were simulated.
        self.simulated: set[int] = set()

    def memory(self, device: torch.device) -> DeviceMemory:
        now, peak = (self.weights + size for size in (self.meter.now, self.meter.peak))
        return DeviceMemory(now, self.usable, peak + self.workspace)


@contextlib.contextmanager
def enabled(model: Any, inputs: Mapping[str, Any], share: float, **options: Any) -> Iterator[Device]:
    """A stack under "auto" on a device with the memory of full checkpointing and this share of all attention.

    Its clock says that a forward takes a second.
    """
    options = {"host": 0, "optimizer": "sgd", **options}
    expected = options["optimizer"] if options["optimizer"] == "sgd" else "adamw"
    clock = itertools.count()

    def note(block: torch.nn.Module, args: Any) -> None:
        if planned.is_planned(args[0]):
            device.simulated.add(id(block))

    with pytest.MonkeyPatch.context() as patch, planned.exact():
        plan = fastac.plan(model, inputs, blocks="blocks", optimizer=expected)
        full, attention = (plan.policies[number].peak_bytes for number in (1, 3))
        usable = math.ceil((full + share * (attention - full)) / (1 - UNUSED))
        device = Device(model, usable, attention - full)
        model.blocks[0].register_forward_pre_hook(note)
        patch.setattr(auto, "memory_of", device.memory)
        patch.setattr(auto, "_now", lambda _: float(next(clock)))
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        fastac.enable(model, Auto(**options), blocks="blocks")
        gc.collect()
        with device.meter:
            yield device


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


def test_two_sizes_of_inputs_in_turns() -> None:
    """Each has a plan, from one simulation, also if there is validation in between, or gradients are there."""
    small, large = stack_inputs(64), stack_inputs(256)
    model = stack(layers=LAYERS)
    with enabled(model, large, 0.5) as device:
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
    assert len(device.simulated) == 2


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
    model, inputs = stack(layers=LAYERS), stack_inputs(256)
    with enabled(model, inputs, 1) as device:
        run(model, inputs)
        before = saved_by(model)
        runs_out = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))
        handle = model.blocks[2].register_forward_pre_hook(runs_out)
        with pytest.raises(torch.OutOfMemoryError):
            model(**inputs)
        handle.remove()
        run(model, inputs)
        after = saved_by(model)
        run(model, inputs)
        assert before > after == saved_by(model)
    assert len(device.simulated) == 1
    assert [text for text in caplog.messages if "a tenth less" in text]


@pytest.mark.parametrize("optimizer", [None, "given"])
def test_an_optimizer_that_appears_late(optimizer: str | None) -> None:
    """Its states are not allocated before its first step. Until then there is room for them, if there are any."""
    model, inputs = stack(layers=LAYERS), stack_inputs(256)
    adamw = torch.optim.AdamW(model.parameters(), foreach=False)
    with enabled(model, inputs, 0.5, optimizer=adamw if optimizer else None) as device:
        for _ in range(3):
            for _ in range(2):  # of gradient accumulation
                planned.step(model, inputs)
            adamw.step()
            adamw.zero_grad()
        assert device.meter.peak + device.weights <= device.usable
        assert saved_by(model) > 0


def test_a_step_that_takes_more_is_planned_again_once(caplog: pytest.LogCaptureFixture) -> None:
    """By the allocator's peak in the second step; and with the states of AdamW that never came. It asks no rank."""
    caplog.set_level(logging.INFO, "fastac")
    model, inputs = stack(layers=LAYERS), stack_inputs(256)
    with enabled(model, inputs, 0.5) as device:
        saved = []
        device.workspace = device.attention // 4
        for _ in range(4):
            run(model, inputs)
            saved.append(saved_by(model))
    assert saved[0] == saved[1] > saved[2] == saved[3]
    assert sum("plans again" in text or "rank" in text for text in caplog.messages) == 1
    model = stack(layers=LAYERS)
    with enabled(model, inputs, 0.1, optimizer="adamw") as device:
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
    with enabled(model, inputs, -0.5) as device:
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
    for like, momentum, name in (("AdamW8bit", 0, "adamw8bit"), ("SGD", 0, "sgd"), ("SGD", 0.9, "adamw")):
        optimizer = type(like, (torch.optim.SGD,), {})([torch.zeros(1)], momentum=momentum)
        assert support.pickled(Auto(optimizer=optimizer)).optimizer == name
    with pytest.raises(FastacError, match="plans a whole model"):
        fastac.checkpoint(torch.nn.Linear(2, 2), torch.ones(1, 2), policy="auto")


def test_a_model_that_cannot_be_planned_has_attn_only(caplog: pytest.LogCaptureFixture) -> None:
    """A block asks for a value of its features."""
    caplog.set_level(logging.INFO, "fastac")
    model, inputs = stack(layers=2), stack_inputs(64)
    with enabled(model, inputs, 1):
        model.blocks[1].register_forward_pre_hook(lambda _, args: print(end=str(args[0].sum().item() > 0)[:0]))
        run(model, inputs)
    assert has_attn_only(model)
    assert [text for text in caplog.messages if 'no plan, so policy "attn_only"' in text]


def test_inputs_that_never_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some plans they have that of the next larger ones, if there is one."""
    monkeypatch.setattr(auto, "SIGNATURES", 2)
    model, chosen = stack(layers=LAYERS), {}
    with enabled(model, stack_inputs(200), 0.5) as device:
        for tokens in (200, 100, 90, 150, 110, 80):
            run(model, stack_inputs(tokens))
            chosen[tokens] = list(map(enabled_on(model).policy_of, model.blocks))
    assert len(device.simulated) == 2
    assert chosen[90] == chosen[80] == chosen[100] != chosen[200] == chosen[150] == chosen[110]


def test_the_speed_of_the_device_is_measured() -> None:
    """Copies of a device that is slower than expected are hidden: then the second plan takes more to the host."""
    model, inputs = stack(layers=LAYERS), stack_inputs(256)
    with enabled(model, inputs, 0.01, host="1GiB", gbps=1.0):
        on_host = []
        for _ in range(4):
            run(model, inputs)
            on_host.append(sum(row.offloaded.copies for row in fastac.report(model).rows if row.offloaded))
    assert on_host[0] == on_host[1] == 0 < on_host[2] == on_host[3]


def test_a_model_without_flops() -> None:
    """Whatever is recomputed, a step takes as long as another, and its device has no speed."""

    class Norm(torch.nn.LayerNorm):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return super().forward(video)

    model, inputs = stack(layers=2, block=lambda: Norm(16)), stack_inputs(64)
    assert {row.relative for row in fastac.plan(model, inputs, blocks="blocks").policies} == {1.0}
    with enabled(model, inputs, 1, host="1GiB", gbps=1.0):
        for _ in range(4):
            run(model, inputs)


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
