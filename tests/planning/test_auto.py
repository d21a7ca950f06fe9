"""policy="auto": a first step is measured, and the next ones choose by it. On a simulated device that counts."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import fastac
from fastac import Auto, FastacError
from fastac.engine import device_memory, tape, torch_private
from fastac.engine.device_memory import DeviceMemory
from fastac.errors import NothingFitsError
from fastac.hook import enabled_on
from fastac.planning import auto
from tests import support
from tests.live_bytes import LiveBytes
from tests.planning import planned
from tests.planning.planned import WAN, stack_inputs, tiny
from tests.support import stack

LAYERS = 4
UNUSED = 0.06
"""The share of the memory that no plan uses."""


class Device:
    """A device whose allocator counts: what models hold when they are made, and what ops return while it is on."""

    def __init__(self, models: list[torch.nn.Module], usable: int) -> None:
        outside = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        self.weights = sum(tensor.nbytes for tensor in outside)
        # One counts what a step takes, the other what the allocator says: the most since the process began.
        self.meter, self.allocator = LiveBytes(outside), LiveBytes(outside)
        self.usable = usable
        # Workspaces of kernels.
        self.workspace = 0

    def memory(self, device: torch.device) -> DeviceMemory:
        now, peak = (self.weights + size for size in (self.allocator.now, self.allocator.peak))
        return DeviceMemory(now, peak + self.workspace)

    def begin_step(self) -> None:
        self.meter.peak = self.meter.now

    @property
    def peak(self) -> int:
        """Of the latest step."""
        return self.weights + self.meter.peak + self.workspace


@contextlib.contextmanager
def on_device(models: list[torch.nn.Module], usable: int) -> Iterator[Device]:
    """A device with so many bytes, whose clock says that a forward takes a second."""
    clock, device = itertools.count(), Device(models, usable)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "memory_of", device.memory)
        patch.setattr(device_memory, "usable_bytes", lambda _: device.usable)
        patch.setattr(device_memory, "now", lambda _: float(next(clock)))
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        gc.collect()
        with device.meter, device.allocator:
            yield device


@contextlib.contextmanager
def enabled(
    model: Any, inputs: Mapping[str, Any], share: float, states: str = "sgd", **options: Any
) -> Iterator[Device]:
    """A stack under "auto" on a device with the memory of full checkpointing and this share of all attention."""
    with planned.exact():
        plan = fastac.plan(model, inputs, blocks="blocks", optimizer=states)
        full, attention = (plan.policies[number].peak_bytes for number in (1, 3))
        usable = math.ceil((full + share * (attention - full)) / (1 - UNUSED))
        with on_device([model], usable) as device:
            fastac.enable(model, Auto(**{"host": 0, **options}), blocks="blocks")
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


def latest(model: Any) -> Any:
    return enabled_on(model).planner.latest


def settle(model: Any, inputs: Mapping[str, Any], device: Device) -> list[int]:
    """Take steps until the choice stays: what each saved. None takes more than the device has."""
    saved = []
    for _ in range(auto.TURNS + 2):
        device.begin_step()
        run(model, inputs)
        saved.append(saved_by(model))
        assert device.peak <= device.usable
    return saved


def test_the_first_step_saves_nothing_and_the_next_are_chosen() -> None:
    """Each signature has a choice, also with validation in between, or beside gradients of an earlier backward."""
    small, large = stack_inputs(64), stack_inputs(256)
    model = stack(layers=LAYERS)
    with enabled(model, large, 0.5) as device:
        assert settle(model, large, device)[0] == 0 < saved_by(model)
        of_large = chosen_for(model)
        settle(model, small, device)
        of_small = chosen_for(model)
        for inputs, expected in ((large, of_large), (small, of_small)) * 2:
            run(model, inputs)
            assert chosen_for(model) == expected
            with torch.no_grad():
                model(**large)
        assert of_small != of_large
        planned.step(model, large)
        device.begin_step()
        planned.step(model, large)  # its gradients are there: another choice, from the same measurement
        assert chosen_for(model) != of_large
        assert saved_by(model) > 0
        assert device.peak <= device.usable
    assert len(fastac.report(model).remarks) == 3  # one for each choice


def test_nothing_runs_that_would_not_run_without_it() -> None:
    """No hook gets tensors without data, and counters count steps."""
    model, inputs = stack(layers=LAYERS), stack_inputs(64)
    seen = []
    with enabled(model, inputs, 0.5):
        model.blocks[1].register_forward_hook(lambda block, args, output: seen.append(output.sum().item()))
        for _ in range(3):
            run(model, inputs)
    assert len(seen) == 3  # recompute ends before the block does


def test_steps_are_exact() -> None:
    """Also those of a copy and of an unpickled model: neither has an optimizer or a choice."""
    model, inputs = tiny(WAN)
    expected = support.train_step(copy.deepcopy(model), inputs)
    memory = fastac.plan(model, inputs, optimizer="sgd").policies[1].peak_bytes * 21 // 20
    optimizer = torch.optim.AdamW(model.parameters())
    fastac.enable(model, Auto(memory=int(memory / (1 - UNUSED)), optimizer=[optimizer]))
    for _ in range(4):
        support.assert_same(support.train_step(model, inputs), expected)
    assert saved_by(model) > 0
    for mine in (copy.deepcopy(model), support.pickled(model)):
        for _ in range(2):
            support.assert_same(support.train_step(mine, inputs), expected)
        assert saved_by(mine) > 0
    assert "attention over at least" in str(fastac.report(model))
    fastac.enable(model, Auto(memory=int(memory / (1 - UNUSED))))
    verified = fastac.verify(model, **inputs)
    assert verified.policy == "auto"
    assert verified.saved + verified.linear_saved > 0
    fastac.disable(model)
    support.assert_same(support.train_step(model, inputs), expected)


def fails_in_backward(model: Any, inputs: Mapping[str, Any]) -> None:
    def fail(gradient: torch.Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    outputs = model(**inputs)
    outputs.register_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        outputs.sum().backward()


def test_memory_that_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer catches the error, and runs the step again: with a tenth less, three times at most, for a while."""
    monkeypatch.setattr(auto, "FORGOTTEN", 8)
    model, other, inputs = stack(layers=LAYERS), stack(layers=1), stack_inputs(256)

    def fails(trained: Any, error: Exception, grad: bool = True) -> None:
        handle = trained.blocks[0].register_forward_pre_hook(Mock(side_effect=error))
        with pytest.raises(type(error)), torch.set_grad_enabled(grad):
            trained(**inputs)
        handle.remove()

    with enabled(model, inputs, 1) as device:
        before = settle(model, inputs, device)[-1]
        # Of another model, in validation, or about something else.
        runs_out = torch.OutOfMemoryError("CUDA out of memory")
        fails(other, runs_out)
        fails(model, torch.OutOfMemoryError("CUDA out of memory"), grad=False)
        fails(model, RuntimeError("the call was not allowed: pass allocation=None"))
        run(model, inputs)
        assert saved_by(model) == before
        fails_in_backward(model, inputs)
        for _ in range(3):
            run(model, inputs)
        after = saved_by(model)
        assert before > after > 0
        for _ in range(20):
            fails(model, torch.OutOfMemoryError("CUDA out of memory"))
        assert enabled_on(model).planner._shortages == auto.SHORTAGES
        for _ in range(auto.SHORTAGES * auto.FORGOTTEN + 10):
            run(model, inputs)
        assert enabled_on(model).planner._shortages == 0
        assert saved_by(model) > 0.9 * before


@pytest.mark.parametrize("through_data", [False, True])
def test_an_optimizer_that_appears_late(through_data: bool) -> None:
    """Its states are not allocated before its first step. From then on they are there."""

    class Prodigy(torch.optim.AdamW):
        """Has a state more, and writes weights where autograd does not notice."""

        def step(self, closure: Any = None) -> Any:
            weights = [weight for group in self.param_groups for weight in group["params"]]
            for weight in weights:
                self.state[weight].setdefault("p0", weight.detach().clone())
                weight.data.add_(weight.grad, alpha=-1e-3)
            return None

    model, inputs = stack(layers=LAYERS), stack_inputs(256)
    optimizer = Prodigy(model.parameters()) if through_data else torch.optim.AdamW(model.parameters(), foreach=False)
    with enabled(model, inputs, 2, "adamw") as device:
        for _ in range(6):
            for _ in range(2):  # of gradient accumulation
                device.begin_step()
                planned.step(model, inputs)
                assert device.peak <= device.usable
            optimizer.step()
            optimizer.zero_grad()
        assert saved_by(model) > 0


def test_a_step_that_takes_more_is_corrected() -> None:
    """By the allocator's peak, which workspaces of kernels are a part of; then the choice stays."""
    inputs, saved = stack_inputs(256), []
    for workspace in (0, 0.05):
        model = stack(layers=LAYERS)
        with enabled(model, inputs, 0.5) as device:
            run(model, inputs)
            device.workspace = int(workspace * device.usable)
            saved.append(settle(model, inputs, device))
    for steps in saved:
        assert steps[-1] == steps[-2]
    assert saved[0][-1] > saved[1][-1] > 0


def test_what_never_fits_is_an_error_before_the_first_block() -> None:
    """For those who halve the batch when memory runs out, too; and an optimizer's states count."""
    memory = pytest.importorskip("accelerate.utils.memory")
    model, inputs = stack(layers=LAYERS), stack_inputs(64)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    groups = [{"params": [*model.parameters()], "amsgrad": True}]
    for optimizer, takes in ((None, 2), ("adamw", 4), ([torch.optim.AdamW(groups)], 5)):
        with on_device([model], int(takes * weights / (1 - UNUSED)) - 100) as device:
            fastac.enable(model, Auto(host=0, optimizer=optimizer), blocks="blocks")
            with pytest.raises(NothingFitsError, match="Before any activation it takes") as raised:
                model(**inputs)
            assert device.meter.peak == 0
        assert memory.should_reduce_batch_size(raised.value)
        assert isinstance(raised.value, (FastacError, torch.OutOfMemoryError))


def test_a_step_that_fits_nowhere_runs_with_what_holds_least(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = stack(layers=LAYERS), stack_inputs(256)
    with enabled(model, inputs, -0.5):
        for _ in range(3):
            run(model, inputs)
        assert saved_by(model) == 0
    assert len([text for text in caplog.messages if "of the tokens would fit" in text]) == 1


def test_what_is_given_is_checked() -> None:
    with pytest.raises(FastacError, match=r'policy=fastac.Auto\(memory="16GiB"\)'):
        fastac.enable(stack(), "auto", blocks="blocks")
    options: list[dict[str, Any]] = [{"memory": "16"}, {"host": -1}, {"gbps": 0}, {"tflops": "fast"}]
    for given in (*options, {"optimizer": "lion"}, {"optimizer": [torch.nn.Linear(1, 1)]}):
        with pytest.raises(FastacError):
            Auto(**given)
    assert support.pickled(Auto("1GiB", optimizer=torch.optim.SGD([torch.zeros(1)]))) == Auto("1GiB")
    with pytest.raises(FastacError, match="plans a whole model"):
        fastac.checkpoint(torch.nn.Linear(2, 2), torch.ones(1, 2), policy="auto")


def test_a_model_that_cannot_be_simulated() -> None:
    """A block asks for a value of its features. Inputs have words among them, which change in every step."""
    model, inputs = stack(layers=2), stack_inputs(64)
    with enabled(model, inputs, 1):
        model.blocks[1].register_forward_pre_hook(lambda _, args: print(end=str(args[0].sum().item() > 0)[:0]))
        model.register_forward_pre_hook(
            lambda _, args, kwargs: (args, {"video": kwargs["video"], "text": kwargs["text"]}), with_kwargs=True
        )
        for number in range(6):
            run(model, inputs | {"captions": ["a cat" * number] * 2})
        assert saved_by(model) > 0
        assert len(enabled_on(model).planner._forecasts) == 1


def test_a_backward_that_nobody_saw_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled autograd drops what is to be called at its end. Memory is read when the next forward begins then."""
    monkeypatch.setattr(torch_private, "at_end_of_backward", lambda function: None)
    model, inputs = stack(layers=LAYERS), stack_inputs(256)
    with enabled(model, inputs, 0.5) as device:
        assert settle(model, inputs, device)[-1] > 0


def test_what_a_device_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the names that torch has for it: each exists, also where no device does."""
    bytes_of = {"memory_allocated": 3, "max_memory_allocated": 7, "memory_reserved": 5}
    for name, count in bytes_of.items():
        monkeypatch.setattr(torch.accelerator, name, lambda device, count=count: count)
    monkeypatch.setattr(torch.accelerator, "current_stream", Mock())
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 40))
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: 0.25)
    event = torch.Event
    monkeypatch.setattr(torch, "Event", Mock(side_effect=lambda *args, **kwargs: Mock(event)))
    device = torch.device("cuda", 0)
    assert device_memory.memory_of(device) == DeviceMemory(3, 7)
    assert device_memory.usable_bytes(device) == 10  # a quarter of 40, and not what is reserved and free
    began, ended = device_memory.now(device), device_memory.now(device)
    began.elapsed_time.return_value = 2000.0
    assert device_memory.seconds(began, ended) == 2
    began.record.assert_called_once()
    ended.synchronize.assert_called_once()


def test_a_frozen_model_whose_input_requires_grad() -> None:
    """A reward model, the teacher of a distillation. Without such an input, nothing is held."""
    model, inputs = stack(layers=LAYERS).requires_grad_(False), stack_inputs(256)
    with enabled(stack(layers=LAYERS), inputs, 0.5) as device:
        fastac.enable(model, Auto(host=0), blocks="blocks")
        model(**inputs)
        assert "no input requires grad" in str(fastac.report(model))
        trained = inputs | {"video": inputs["video"].clone().requires_grad_()}
        for _ in range(4):
            device.begin_step()
            planned.step(model, trained)
            assert device.peak <= device.usable
        assert saved_by(model) > 0


def test_two_models_share_the_device() -> None:
    """The second one reads the outputs of the first; later they train in turns."""
    first, second, inputs = stack(layers=LAYERS), stack(layers=LAYERS), stack_inputs(256)
    with planned.exact():
        plan = fastac.plan(first, inputs, blocks="blocks", optimizer="sgd")
        full, attention = (plan.policies[number].peak_bytes for number in (1, 3))
        with on_device([first, second], int((2 * full + (attention - full) / 2) / (1 - UNUSED))) as device:
            for model in (first, second):
                fastac.enable(model, Auto(host=0), blocks="blocks")
            for number in range(12):
                device.begin_step()
                if number < 8:
                    second(video=first(**inputs), text=inputs["text"]).square().mean().backward()
                else:
                    planned.step((first, second)[number % 2], inputs)
                assert device.peak <= device.usable
                for model in (first, second):
                    model.zero_grad()
            assert saved_by(first) > 0


def test_forwards_that_share_a_backward() -> None:
    """As of two prompts, or of a pair of videos: none takes what the other one needs."""
    model, inputs = stack(layers=LAYERS), stack_inputs(256)
    with enabled(model, inputs, 4) as device:
        for _ in range(6):
            device.begin_step()
            torch.stack([model(**inputs).square().mean() for _ in range(2)]).sum().backward()
            assert device.peak <= device.usable
            model.zero_grad()
        assert saved_by(model) > 0


def test_inputs_that_never_repeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """After some measurements they have the choice of the next larger ones, if there are any."""
    monkeypatch.setattr(auto, "SIGNATURES", 2)
    model, chosen = stack(layers=LAYERS), {}
    with enabled(model, stack_inputs(200), 0.5) as device:
        for tokens in (200, 100):
            settle(model, stack_inputs(tokens), device)
        for tokens in (90, 150, 110, 80):
            run(model, stack_inputs(tokens))
            chosen[tokens] = list(map(enabled_on(model).policy_of, model.blocks))
        assert len(enabled_on(model).planner._forecasts) == 2
    assert chosen[90] == chosen[80]
    assert chosen[150] == chosen[110] != chosen[90]


def test_the_speed_of_the_device_is_measured() -> None:
    """Copies are hidden only on a device that is slow enough."""
    on_host = []
    for tflops in (1000.0, None):
        model, inputs = stack(layers=LAYERS), stack_inputs(256)
        with enabled(model, inputs, 0.3, host="1GiB", gbps=1.0, tflops=tflops):
            for _ in range(3):
                run(model, inputs)
            on_host.append(sum(row.offloaded.copies for row in fastac.report(model).rows if row.offloaded))
    assert on_host[0] == 0 < on_host[1]


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
    with_memory = Auto(memory=int(between / (1 - UNUSED)), host=0)
    found = []
    for enable in (fastac.enable, fastac.compile):
        model = stack(layers=2)
        with on_device([model], 10**9):
            enable(model, with_memory, blocks="blocks", **{"backend": "eager"} if enable is fastac.compile else {})
            for _ in range(3):
                run(model, inputs)
        found.append(sum(row.linear_saved for row in fastac.report(model).rows))
        assert saved_by(model) > 0
    assert found[0] > 0 == found[1]


def test_many_blocks_are_chosen_for_quickly() -> None:
    """200, with a host."""
    model, inputs = stack(layers=200), stack_inputs(64)
    with enabled(model, inputs, 0.1, host="1GiB", gbps=1e6):
        run(model, inputs)
        before, chooses = time.process_time(), Mock(side_effect=auto.places.choose)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(auto.places, "choose", chooses)
            enabled_on(model).before_forward(model, (), inputs)
        assert time.process_time() - before < 2
        assert chooses.call_count == 1


def test_a_trainer_that_calls_the_blocks_itself(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = stack(layers=2), stack_inputs(64)
    fastac.enable(model, Auto(memory=10**9), blocks="blocks")
    video = inputs["video"]
    for block in model.blocks:
        video = block(video, inputs["text"])
    video.sum().backward()
    assert [text for text in caplog.messages if "only its blocks are called" in text]
    assert all((row.recomputed, row.linear_saved) == (0, 0) < (row.saved,) for row in fastac.report(model).rows)


def test_time_counts_and_not_flops(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that times its kernels, what takes long is saved first."""
    run_kernel, clock, saved = tape.run_kernel, [0.0], {}

    def timed(op: Any, *args: Any, **kwargs: Any) -> Any:
        clock[0] += 1000 if op.kind == slow else 1
        return run_kernel(op, *args, **kwargs)

    inputs = stack_inputs(256)
    for slow in ("attention", "linear"):
        model = stack(layers=LAYERS)
        with enabled(model, inputs, 0.5):
            monkeypatch.setattr(device_memory, "UNCOUNTED", ())
            monkeypatch.setattr(device_memory, "now", lambda _: clock[0])
            monkeypatch.setattr(tape, "run_kernel", timed)
            for _ in range(3):
                run(model, inputs)
        saved[slow] = chosen_for(model)[0][:2]
        (forecast,) = enabled_on(model).planner._forecasts.values()
        assert latest(model).flops < 0.95 * forecast.full.flops.total()
    assert saved["attention"][0] > saved["linear"][0]
    assert saved["attention"][1] < saved["linear"][1]
