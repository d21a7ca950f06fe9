"""policy="auto": what it chooses fits, and what happens afterwards changes it. On a simulated device that counts."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import itertools
import logging
import math
import pickle
import sys
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

import pytest
import torch

import fastac
from fastac import Auto, FastacError
from fastac.engine import offload
from fastac.engine.device_memory import DeviceMemory
from fastac.hook import enabled_on
from fastac.planning import auto
from fastac.planning.auto import RESERVE
from fastac.planning.forecast import ROWS, Forecast
from fastac.planning.places import Room, choose
from fastac.policy import Policy
from tests import support
from tests.engine.simulated import simulated
from tests.live_bytes import LiveBytes, peak_of
from tests.marks import soak
from tests.planning import planned
from tests.planning.planned import COGVIDEOX, HUNYUAN_VIDEO, LTX, WAN, tiny
from tests.support import TEXT_TOKENS, WIDTH, stack


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
    with pytest.MonkeyPatch.context() as patch, simulated(late=False):
        patch.setattr(auto, "memory_of", device.memory)
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        gc.collect()
        with device.meter:
            yield device


@pytest.fixture(autouse=True)
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans are exact to the byte: offload takes small storages, and torch holds no state of a generator."""
    monkeypatch.setattr("fastac.planning.simulation.GENERATOR_STATE", 0)


def run(model: Any, inputs: Mapping[str, Any]) -> None:
    planned.step(model, inputs)
    for parameter in model.parameters():
        parameter.grad = None


def policies_of(model: Any) -> dict[str, Policy]:
    enabled = enabled_on(model)
    assert enabled is not None
    return {name: enabled.policy_of(block) for name, block in enabled.blocks.items()}


def flops_of(forecast: Forecast, policies: Mapping[str, Policy]) -> int:
    return forecast.plan(policies, "").flops


# The choice


@pytest.mark.parametrize("sizes", [4, *soak(20)])
@pytest.mark.parametrize("name", [WAN, LTX, COGVIDEOX, HUNYUAN_VIDEO])
def test_it_fits_and_is_no_worse_than_a_policy_by_name(name: str, sizes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within so many random sizes of the device's memory and the host's."""
    monkeypatch.setattr(offload, "SMALLEST", 0)
    model, inputs = tiny(name)
    forecast = Forecast(planned.fake_model(model, inputs))
    named = [forecast.policies(policy) for policy in ("none", *ROWS.values())]
    peaks = [forecast.step(policies).peak(policies) for policies in named]
    random = Random(0)
    for _ in range(sizes):
        memory, host = random.randint(min(peaks), max(peaks)), random.choice([0, random.randint(0, max(peaks))])
        policies = choose(forecast, Room(memory, host))
        assert policies is not None
        mine = planned.under(model, policies)
        with simulated(late=False) as device:
            assert peak_of(functools.partial(planned.step, mine, inputs), planned.clear(mine, inputs)) <= memory
            assert device.allocated <= host
        fitting = [
            flops_of(forecast, policies)
            for policies, peak in zip(named, peaks, strict=True)
            if peak <= memory and forecast.plan(policies, "").host_bytes <= host
        ]
        assert flops_of(forecast, policies) <= min(fitting)


def test_it_is_the_best_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every attention that each of three blocks could save, on the device or on the host."""
    monkeypatch.setattr(offload, "SMALLEST", 0)
    forecast = Forecast(planned.fake_model(*tiny(WAN, num_layers=3)))
    step, names = forecast.full, list(forecast.fake_model.blocks)
    places = [
        Policy(name, *least, offload=on_host, keep=1 + (not on_host))
        for on_host in (False, True)
        for name, *least in (("full",), ("attn_only", 13), ("attn_only",))
    ]
    every = []
    for mixed in itertools.product(places, repeat=3):
        policies = dict(zip(names, mixed, strict=True))
        host, rate = sum(copied.bytes for copied in step.host_copies(policies)), step.bytes_per_flop(policies)
        every.append((step.peak(policies), host, rate, step.recomputed(policies)))
    peaks, sizes, rates, _ = zip(*every, strict=True)
    random = Random(0)
    for _ in range(40):
        memory, host = random.randint(min(peaks), max(peaks)), random.choice([0, random.randint(0, max(sizes)), 10**9])
        room = Room(memory, host, random.choice([math.inf, random.choice(rates)]))
        least = [
            flops
            for peak, size, rate, flops in every
            if peak <= memory and size <= host and rate <= room.bytes_per_flop
        ]
        chosen = choose(forecast, room, linear=False)
        if least:
            assert chosen is not None
            assert step.recomputed(chosen) <= min(least)
            assert step.peak(chosen) <= memory
            assert sum(copied.bytes for copied in step.host_copies(chosen)) <= host
            assert step.bytes_per_flop(chosen) <= room.bytes_per_flop
        # Without a choice of hidden copies, copies may take longer.
        elif not any(peak <= memory and size <= host for peak, size, *_ in every):
            assert chosen is None


# While a model trains


@pytest.fixture
def simulations(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """One entry for each simulation of a step under full checkpointing."""
    seen: list[object] = []
    monkeypatch.setattr(auto, "fake_model", lambda *args: (seen.append(None), planned.fake_model(*args))[1])
    return seen


def peaks_of(model: Any, inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Peaks of a step of a stack: of full checkpointing, and with all attention saved."""
    forecast = Forecast(planned.fake_model(model, inputs, "blocks"))
    return forecast.full.peak(forecast.policies("full")), forecast.full.peak(forecast.policies("attn_only"))


def inputs_of(tokens: int) -> dict[str, Any]:
    torch.manual_seed(tokens)
    return {"video": torch.randn(1, tokens, WIDTH), "text": torch.randn(1, TEXT_TOKENS, WIDTH)}


LAYERS = 4


def device_for(model: Any, room: int) -> Device:
    """A device on which a step may take so many bytes, besides weights and reserve."""
    device = Device(model, usable=0)
    device.usable = math.ceil((device.weights + room) / (1 - RESERVE))
    return device


def enabled(model: Any, **options: Any) -> Any:
    fastac.enable(model, Auto(**{"host": 0, "optimizer": "sgd", **options}), blocks="blocks")
    return model


def saved_by(model: Any) -> int:
    """Bytes of the outputs that the latest forward saved."""
    return sum(row.saved_bytes + row.linear_bytes for row in fastac.report(model).rows)


def test_two_sizes_of_inputs_in_turns(simulations: list[object]) -> None:
    """Each has a plan, from one simulation, also if there is validation in between, or gradients are there."""
    small, large = inputs_of(64), inputs_of(256)
    model = stack(layers=LAYERS)
    full, most = peaks_of(model, large)
    forecast = Forecast(planned.fake_model(model, large, "blocks"))
    left = Room((full + most) // 2 - forecast.gradients)
    with_gradients = choose(forecast, left, gradient_shards=sys.maxsize)
    device = device_for(model, (full + most) // 2)
    with on(device):
        enabled(model)
        chosen = []
        for inputs in (small, large, small, large, small):
            run(model, inputs)
            chosen.append(policies_of(model))
            with torch.no_grad():
                model(**large)
        assert chosen[0] == chosen[2] == chosen[4] != chosen[1] == chosen[3]
        planned.step(model, large)
        planned.step(model, large)  # its gradients are there: another plan, from the same simulation
        assert policies_of(model) == with_gradients != chosen[1]
        assert device.meter.peak + device.weights <= device.usable
    assert len(simulations) == 2


def test_steps_are_exact() -> None:
    model, inputs = tiny(WAN)
    expected = support.train_step(copy.deepcopy(model), inputs)
    forecast = Forecast(planned.fake_model(model, inputs))
    memory = forecast.peak("full") * 21 // 20
    fastac.enable(model, Auto(memory=int(memory / (1 - RESERVE)), optimizer="adamw"))
    for _ in range(2):
        support.assert_same(support.train_step(model, inputs), expected)
    policies = policies_of(model)
    assert len(set(policies.values())) > 1
    # A copy is planned anew, and so is an unpickled model: neither has an optimizer or a plan.
    for mine in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        support.assert_same(support.train_step(mine, inputs), expected)
        assert policies_of(mine) == policies
    assert "attention outputs" in str(fastac.report(model))
    assert "auto" in str(fastac.verify(model, **inputs))
    fastac.disable(model)
    support.assert_same(support.train_step(model, inputs), expected)


def test_memory_that_runs_out_is_a_tenth_less(simulations: list[object], caplog: pytest.LogCaptureFixture) -> None:
    """A trainer catches the error, and runs the step again."""
    caplog.set_level(logging.INFO, "fastac")
    model, inputs = stack(layers=LAYERS), inputs_of(256)
    _, most = peaks_of(model, inputs)
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
    assert len(simulations) == 1
    assert [text for text in caplog.messages if "a tenth less" in text]


def _run_out(*args: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("optimizer", [None, "given"])
def test_an_optimizer_that_appears_late(optimizer: str | None) -> None:
    """Its states are not allocated before its first step. Until then there is room for them, if there are any."""
    model, inputs = stack(layers=LAYERS), inputs_of(256)
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
    model, inputs = stack(layers=LAYERS), inputs_of(256)
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
    model, inputs = stack(layers=LAYERS), inputs_of(256)
    full, _ = peaks_of(model, inputs)
    with on(device_for(model, full * 3 // 4)) as device:
        enabled(model)
        held = device.meter.now
        with pytest.raises(FastacError, match=r"a step takes .* at least.* About \d\d% of the tokens would fit"):
            model(**inputs)
        assert device.meter.peak == held


def test_what_is_given_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
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
    model, inputs = stack(layers=2), inputs_of(64)
    model.blocks[1].register_forward_pre_hook(lambda _, args: print(end=str(args[0].sum().item() > 0)[:0]))
    with on(Device(model, usable=10**9)):
        enabled(model)
        run(model, inputs)
    assert set(policies_of(model).values()) == {Policy()}
    assert [text for text in caplog.messages if 'no plan, so policy "attn_only"' in text]


def test_inputs_that_never_repeat(simulations: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """After some plans they have that of the next larger ones, if there is one."""
    monkeypatch.setattr(auto, "SIGNATURES", 2)
    model = stack(layers=LAYERS)
    full, most = peaks_of(model, inputs_of(200))
    with on(device_for(model, (full + most) // 2)):
        enabled(model)
        chosen = {}
        for tokens in (200, 100, 90, 150, 110, 80):
            run(model, inputs_of(tokens))
            chosen[tokens] = policies_of(model)
    assert len(simulations) == 2
    assert chosen[90] == chosen[80] == chosen[100] != chosen[200] == chosen[150] == chosen[110]


def test_the_speed_of_the_device_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of a device that is slower than expected are hidden: then the second plan takes more to the host."""
    monkeypatch.setattr(offload, "SMALLEST", 0)
    model, inputs = stack(layers=LAYERS), inputs_of(256)
    full, most = peaks_of(model, inputs)
    clock = itertools.count()
    monkeypatch.setattr(auto, "_now", lambda device: float(next(clock)))  # a forward takes a second
    with on(device_for(model, full + 1000)):
        enabled(model, host=10 * most, gbps=1.0)
        chosen = []
        for _ in range(4):
            run(model, inputs)
            chosen.append(policies_of(model))
    on_host = [sum(bool(policy.offload) for policy in policies.values()) for policies in chosen]
    assert on_host[0] == on_host[1] == 0 < on_host[2] == on_host[3]


def test_compiled_blocks_save_no_linear_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = stack(layers=2), inputs_of(64)
    monkeypatch.setattr(auto.places, "choose", _noted := Noted(auto.places.choose))
    fastac.compile(model, Auto(memory=10**9), blocks="blocks", backend="eager")
    run(model, inputs)
    assert _noted.options == {"linear": False, "gradient_shards": 1}


class Noted:
    """A function, and the options of its latest call."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.options = options
        return self.function(*args, **options)


def test_a_trainer_that_calls_the_blocks_itself(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = stack(layers=2), inputs_of(64)
    fastac.enable(model, Auto(memory=10**9), blocks="blocks")
    video = inputs["video"]
    for block in model.blocks:
        video = block(video, inputs["text"])
    video.sum().backward()
    assert [text for text in caplog.messages if "only its blocks are called" in text]
    assert set(policies_of(model).values()) == {Policy()}
