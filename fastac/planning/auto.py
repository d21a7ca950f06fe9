"""policy="auto": the policies of all blocks, planned from the memory that is there at a model's first forward.

A forward that begins with inputs of new shapes is simulated once, and `places.choose` finds its policies. Later
forwards with inputs of these shapes look the policies up. In one of them the planner measures what the plan could not
know, the peak of the allocator and the speed of the device, and plans again if that would change much.

Ranks must not wait for a rank that does not come: one has other shapes, and another has no more data. So ranks compare
only twice: in their first forward with gradients their memory, and in their third what they measured. Shapes do not
matter there, since every rank that trains makes these forwards. Everything else follows from what they compared. They
use torch's store and no collective: a rank that has waited for `WAIT` goes on with its own figures, and never compares
again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fastac.engine import host_memory, kinds, torch_private
from fastac.engine.beginning import autocast_state
from fastac.engine.blocks import signature
from fastac.engine.process import process
from fastac.engine.torch_private import tree_leaves
from fastac.engine.transport import bus_rate
from fastac.errors import FastacError, class_name, rank, readable_bytes
from fastac.planning import places
from fastac.planning.device_memory import UNCOUNTED, DeviceMemory, memory_of
from fastac.planning.fake_model import Arguments, fake_model
from fastac.planning.fake_weights import gpus_of, stored_bytes
from fastac.planning.forecast import OPTIMIZERS, Forecast, PolicyFigures, States
from fastac.planning.places import Room
from fastac.planning.plans import TFLOPS, parse_bytes
from fastac.planning.timeline import EXCHANGED
from fastac.policy import Policy

logger = logging.getLogger("fastac")

RESERVE = 0.06
"""Share of the memory that no plan uses: for what the allocator rounds up, and for workspaces of kernels."""

MUCH = 0.1
"""A plan is made again if so large a share of the memory was left over."""

SIGNATURES = 32
"""So many signatures of inputs are planned. After that, inputs of other shapes have the policies of the next larger
inputs that were planned: a run whose lengths never repeat would plan in every step."""

FORECASTS = 4
"""So many simulated steps are remembered: each holds a model without data, and lists of tens of thousands of events."""

WAIT = timedelta(minutes=5)
"""How long a rank waits for the others, which may read data or compile meanwhile."""


@dataclasses.dataclass(frozen=True)
class Auto:
    """The policy "auto", with what it may use: the fastest training step that fits.

    Args:
        memory: bytes of the device for this process, with weights and everything else: "70GiB". By default everything
            that is free or that torch has reserved. A share of 6 % stays unused.
        host: bytes of host memory for this process: "64GiB". By default half of what is available for each process on
            this host; 0 if nothing is to wait there.
        optimizer: the optimizer, whose states may not be allocated yet; or "adamw", "adamw8bit" or "sgd". By default
            AdamW is expected until the weights were changed once.
        gbps: rate of copies to the host and back, in 10**9 bytes per second. By default it is measured.
        tflops: speed of the device. By default 400, until it is measured.

    Raises:
        FastacError: a value that is not a number of bytes, or not a positive number; an unknown optimizer.

    Example:
        >>> fastac.enable(transformer, policy=fastac.Auto(memory="70GiB", optimizer=optimizer))
    """

    memory: str | int | None = None
    host: str | int | None = None
    optimizer: Any = None
    gbps: float | None = None
    tflops: float | None = None

    def __post_init__(self) -> None:
        for size in (self.memory, self.host):
            if size is not None:
                parse_bytes(size)
        for name in ("gbps", "tflops"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, (int, float)) and value > 0):
                raise FastacError(f"Auto({name}={value!r}): a positive number was expected")
        is_optimizer = self.optimizer is None or hasattr(self.optimizer, "param_groups")
        if not is_optimizer and self.optimizer not in OPTIMIZERS:
            raise FastacError(
                f"Auto(optimizer={self.optimizer!r}): an optimizer was expected, or one of {', '.join(OPTIMIZERS)}"
            )

    def __str__(self) -> str:
        return "auto"

    # A model is copied and pickled with its policy, but not with the optimizer that trains it.

    def __deepcopy__(self, memo: Any) -> Auto:
        return self

    def __reduce__(self) -> Any:
        return Auto, (self.memory, self.host, optimizer_name(self.optimizer), self.gbps, self.tflops)


def optimizer_name(optimizer: Any) -> str | None:
    """The name in OPTIMIZERS of an optimizer, by its class; AdamW's if none is like it."""
    if optimizer is None or isinstance(optimizer, str):
        return optimizer
    inner = _inner(optimizer)
    name = type(inner).__name__.lower()
    if "8bit" in name:
        return "adamw8bit"
    has_momentum = any(group.get("momentum") for group in inner.param_groups)
    return "sgd" if name == "sgd" and not has_momentum else "adamw"


def _inner(optimizer: Any) -> Any:
    """The optimizer inside accelerate's wrapper."""
    return getattr(optimizer, "optimizer", optimizer)


class Choice(NamedTuple):
    """What was chosen for inputs of some shapes."""

    # Block name -> policy. None without a plan: then the policy of every block is "attn_only".
    policies: Mapping[str, Policy] | None
    # In a line: what is saved where, or why fastac made no plan.
    why: str
    # The rest belongs to a plan: what the step takes, and the FLOPs of its forward.
    figures: PolicyFigures | None = None
    forward_flops: int = 0


_NOTHING_TRAINS = Choice(None, 'no plan, so policy "attn_only": no weight is trained')


class _ForwardPass(NamedTuple):
    """A forward that begins."""

    model: torch.nn.Module
    # Whether outputs of Linear modules can be saved.
    saves_linear: Callable[[], bool]
    call: Arguments
    # The signature of the inputs, with the modes that decide what a step does; and whether gradients are allocated.
    key: tuple[Any, bool]

    @property
    def device(self) -> torch.device:
        """The device that computes. Weights may wait elsewhere, but inputs do not."""
        tensors = [leaf for leaf in tree_leaves(self.call) if isinstance(leaf, torch.Tensor)]
        devices = [tensor.device for tensor in [*tensors, next(self.model.parameters())]]
        return next((device for device in devices if device.type != "cpu"), devices[0])

    def __str__(self) -> str:
        return f"{class_name(self.model)} on {self.call}"


class _Sizes(NamedTuple):
    """Bytes of a model, whatever its inputs."""

    states: States
    gradients: int
    # Gradients that a simulated step leaves out: `Forecast.wider`.
    wider: int
    # The largest block.
    block: int


@dataclasses.dataclass
class _Means:
    """What a step may use, the same on all ranks."""

    # Bytes of the device, without the reserve.
    limit: int
    # Those that a step may allocate if no gradients are allocated.
    memory: int
    # Bytes of the host.
    host: int
    # Bytes per second of the bus, and FLOP/s of the device.
    rate: float
    speed: float


@dataclasses.dataclass
class _MeasuredStep:
    """A step in which the planner measures."""

    key: tuple[Any, bool]
    choice: Choice
    # Whether plans may change after this step: it is the second step that is measured.
    is_second: bool
    before: DeviceMemory | None
    # When its forward began and ended.
    began: Any
    ended: Any = None
    # The most bytes that were allocated until backward ended, if that is known.
    peak: int | None = None


class Planner:
    """Plans for one model. A copy of the model has the planner without its plans."""

    def __init__(self, auto: Auto) -> None:
        self.auto = auto
        self.latest: Choice | None = None
        """The choice of the latest forward."""
        # By key: choices, how many forwards had them, and bytes that a step takes besides its plan.
        self._choices: dict[tuple[Any, bool], Choice] = {}
        self._uses: Counter[tuple[Any, bool]] = Counter()
        self._excess: Counter[tuple[Any, bool]] = Counter()
        # The same, as far as it was measured. Plans change only after the second step.
        self._seen: dict[tuple[Any, bool], int] = {}
        # By signature, the latest few.
        self._forecasts: dict[Any, Forecast] = {}
        self._means: _Means | None = None
        self._sizes: _Sizes | None = None
        # The share of the memory that plans use, after it ran out.
        self._share = 1.0
        self._forwards = 0
        # Another rank did not come: this one compares no more.
        self._is_alone = False
        # Models that compare are numbered in the order of their first forwards, which is the same on all ranks.
        self._number = 0
        self._measurement: _MeasuredStep | None = None
        # A trained weight: its module, its name, and its version when it was first seen. An optimizer changes it.
        self._weight: tuple[torch.nn.Module, str, int] | None = None
        self._out_of_memory = process.out_of_memory

    def __reduce__(self) -> Any:
        return Planner, (self.auto,)

    def before_forward(
        self,
        model: torch.nn.Module,
        blocks: Iterable[torch.nn.Module],
        args: Any,
        kwargs: dict[str, Any],
        saves_linear: Callable[[], bool],
    ) -> Choice | None:
        """The choice for a forward that begins with gradients on; None if it is still the latest one.

        saves_linear: says whether outputs of Linear modules can be saved. Raises FastacError if no policies fit.
        """
        trained = self._trained(model, blocks)
        if trained is None:
            self.latest, before = _NOTHING_TRAINS, self.latest
            return None if before is self.latest else self.latest
        shapes = *signature(args, kwargs), model.training, tuple(autocast_state())
        forward = _ForwardPass(model, saves_linear, Arguments(args, kwargs), (shapes, trained.grad is not None))
        key = forward.key
        self._forwards += 1
        if self._out_of_memory != process.out_of_memory:
            self._take_less()
        # Of several ranks, each takes part in the third forward, also if it measured nothing.
        if self._measurement is not None or (self._forwards == 3 and rank()):
            self._judge(forward)
        choice = self._choices.get(key) or self._of_larger(key)
        if choice is None:
            choice = self._choices[key] = self._choose(forward)
        if not process.collectors:  # fastac.verify holds results of other steps meanwhile
            self._measure(forward, choice)
        if choice is self.latest:
            return None
        self.latest = choice
        return choice

    def _trained(self, model: torch.nn.Module, blocks: Iterable[torch.nn.Module]) -> torch.Tensor | None:
        """A weight that is trained; None if there is none."""
        weight: torch.Tensor | None = None if self._weight is None else getattr(self._weight[0], self._weight[1], None)
        if weight is not None and weight.requires_grad:
            return weight
        # In the blocks first: FSDP2 has gathered weights of the model itself by now, and these have no gradients.
        for module in (module for outer in (*blocks, model) for module in outer.modules()):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    self._weight = module, name, parameter._version
                    return parameter
        return None

    def _of_larger(self, key: tuple[Any, bool]) -> Choice | None:
        """The choice for the next larger inputs, if enough signatures were planned."""
        if len(self._choices) < SIGNATURES:
            return None
        shapeless = kinds.without_shapes(key[0]), key[1]
        alike = [known for known in self._choices if (kinds.without_shapes(known[0]), known[1]) == shapeless]
        larger = [known for known in alike if kinds.elements_in(known) >= kinds.elements_in(key)]
        return self._choices[min(larger, key=kinds.elements_in)] if larger else None

    def _choose(self, forward: _ForwardPass) -> Choice:
        """Plan for the inputs of a forward. Raises FastacError if nothing fits."""
        timer = threading.Timer(2, logger.warning, (f'policy "auto": planning {forward}',))
        timer.daemon = True
        timer.start()
        try:
            forecast = self._forecast(forward)
            self._means = self._means or self._look(forward)
            if isinstance(forecast, Forecast) and self._means is not None:
                # A mode of the user's, such as a counter of FLOPs, would see simulated steps.
                with torch_private.no_modes():
                    choice = self._plan(forward, forecast, self._means)
            else:
                choice = Choice(None, f'no plan, so policy "attn_only": {forecast}')
        finally:
            timer.cancel()
        beside = ", beside gradients of an earlier backward" if forward.key[1] else ""
        logger.info('policy "auto", %s%s: %s', forward, beside, choice.why)
        return choice

    def _forecast(self, forward: _ForwardPass) -> Forecast | str:
        """The forecast for the inputs of a forward, or why they cannot be simulated."""
        shapes, _ = forward.key
        if shapes in self._forecasts:
            return self._forecasts[shapes]
        try:
            with torch_private.no_modes():
                fake = fake_model(forward.model, forward.call)
                gpus = gpus_of(forward.model)
                forecast = Forecast(fake, optimizer_name(self.auto.optimizer) or "adamw", gpus)
                forecast.step("full")
        except Exception as error:  # noqa: BLE001 whatever a model does without data, it can be trained
            return f"{type(error).__name__}: {error}".partition("\n")[0]
        if len(self._forecasts) == FORECASTS:
            del self._forecasts[next(iter(self._forecasts))]
        self._forecasts[shapes] = forecast
        if self._sizes is None:
            blocks = [sum(map(stored_bytes, block.parameters())) for block in fake.blocks.values()]
            self._sizes = _Sizes(forecast.states, forecast.gradients, forecast.wider, max(blocks))
        return forecast

    def _plan(self, forward: _ForwardPass, forecast: Forecast, means: _Means) -> Choice:
        _, has_gradients = forward.key
        memory = int(means.memory * self._share) - self._excess[forward.key] - forecast.gradients * has_gradients
        room = Room(memory, means.host, means.rate / means.speed)
        # Gradients that are allocated already are not allocated by the step.
        shards = sys.maxsize if has_gradients else forecast.gpus
        policies = places.choose(forecast, room, linear=forward.saves_linear(), gradient_shards=shards)
        if policies is None and self._uses[forward.key]:  # it ran, with another plan
            policies = places.least(forecast, room, shards)
        if policies is None:
            is_guess = self.auto.optimizer is None and not self._has_states()
            missing = places.missing(forecast, room, gradient_shards=shards)
            advice = "\nStates of AdamW are counted beside that. If yours has them already, or is not AdamW: "
            advice += "policy=fastac.Auto(optimizer=optimizer)."
            others = f"{readable_bytes(means.limit - memory)} are taken already (weights, optimizer, other models)"
            raise FastacError(
                f'policy "auto", {forward}: {missing}\nOf {readable_bytes(means.limit)}, without a reserve of '
                f"{RESERVE:.0%}, {others}.{advice * is_guess}"
            )
        peak = forecast.step(policies).peak(policies, shards)
        figures = dataclasses.replace(forecast.figures(policies, "auto"), peak_bytes=peak)
        planned = f"{readable_bytes(means.limit - memory + peak)} of {readable_bytes(means.limit)} planned"
        words = f"{_in_words(policies, forecast, figures)}; {planned}"
        return Choice(policies, words, figures, forecast.full.flops["forward"])

    def _look(self, forward: _ForwardPass) -> _Means | None:
        """What a step may use: the least of all ranks. None if no rank can plan."""
        auto, memory = self.auto, memory_of(forward.device)
        own = [math.inf] * 4  # the values of a rank that cannot plan
        if self._sizes is not None:
            if memory is None and auto.memory is None:
                raise no_memory()
            usable = [memory.usable] if memory is not None else []
            usable += [parse_bytes(auto.memory)] if auto.memory is not None else []
            limit = int(min(usable) * (1 - RESERVE))
            host = 0
            if auto.host is not None:
                host = parse_bytes(auto.host)
            elif memory is not None:
                host = (host_memory.available() or 0) // 2 // host_memory.ranks_on_host()
            if torch_private.user_hooks() is not None:
                host = 0  # hooks of the user's would move what offload moves, so blocks refuse to offload
            rate = auto.gbps * 1e9 if auto.gbps else bus_rate(forward.device) if host else 0.0
            own = [limit, limit - self._others(forward, self._sizes, memory), host, rate]
        if self._forwards == 1:  # the others come in no other forward
            process.compared += 1
            self._number = process.compared
            own = self._compare("memory", forward, own)
        *sizes, rate = own
        if math.inf in sizes:
            return None
        limit, for_step, host = map(int, sizes)
        return _Means(limit, for_step, host, rate, (auto.tflops or TFLOPS) * 1e12)

    def _others(self, forward: _ForwardPass, sizes: _Sizes, memory: DeviceMemory | None) -> int:
        """Bytes of the device that are not a step's: weights, states of the optimizer, other models; no gradients."""
        states = sizes.states
        if memory is None:
            return states.total + sizes.wider
        _, has_gradients = forward.key
        others = memory.allocated - sizes.gradients * has_gradients + states.gathered + sizes.wider
        if any(parameter.device.type != forward.device.type for parameter in forward.model.parameters()):
            # Weights that wait on the host come to the device block by block: one computes, and the next one comes.
            others += 2 * sizes.block
        return others if self._has_states() else others + states.optimizer

    def _has_states(self) -> bool:
        """Whether the states of the optimizer are allocated."""
        inner = _inner(self.auto.optimizer)
        if hasattr(inner, "state"):
            return bool(inner.state)
        if self._weight is None:
            return False
        module, name, version = self._weight
        return bool(getattr(module, name)._version != version)

    def _compare(self, what: str, forward: _ForwardPass, values: list[float]) -> list[float]:
        """The least of each value on all ranks; this rank's own if not all of them come."""
        if self._is_alone:
            return values
        try:
            return _least_of_ranks(f"{class_name(forward.model)} {self._number} {what}", values)
        except (RuntimeError, ValueError) as error:
            self._is_alone = True
            problem = str(error).partition("\n")[0]
            logger.warning('policy "auto": not all ranks came to compare their %s: %s', what, problem)
            return values

    def _take_less(self) -> None:
        """Memory ran out since the latest forward: plan again, with a tenth less."""
        self._out_of_memory = process.out_of_memory
        self._measurement = None
        if self._means is None:
            return
        if rank():
            logger.warning(
                'policy "auto": memory ran out on this rank. Its plans stay, because all ranks need the same ones. '
                "Pass fastac.Auto(memory=...) with less memory on all ranks."
            )
            return
        self._share *= 0.9
        self._choices.clear()
        logger.info('policy "auto": memory ran out, so the next plans take a tenth less')

    def _measure(self, forward: _ForwardPass, choice: Choice) -> None:
        """Measure the step that begins, if it is one of the first two with these inputs; with several ranks, of all."""
        if forward.key not in self._choices:  # it has the choice of larger inputs
            return
        self._uses[forward.key] += 1
        number = self._forwards if rank() else self._uses[forward.key]
        if number <= 2 and choice.figures is not None:
            memory = memory_of(forward.device)
            self._measurement = _MeasuredStep(forward.key, choice, number == 2, memory, _now(forward.device))

    def after_forward(self, outputs: Any) -> None:
        """The forward has ended. In a step that is measured, note the time, and the peak when backward ends."""
        measurement = self._measurement
        if measurement is None or measurement.ended is not None:
            return
        for leaf in tree_leaves(outputs):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                measurement.ended = _now(leaf.device)
                leaf.register_hook(functools.partial(_in_backward, measurement, leaf.device))
                return

    def _judge(self, forward: _ForwardPass) -> None:
        """Plan again if the measured step shows much less memory than was planned with, or much more."""
        measurement, means = self._measurement, self._means
        self._measurement = None
        if means is None or self._sizes is None:
            if rank():
                self._compare("measurements", forward, [math.inf] * 3)  # other ranks may have some
            return
        memory, speed = means.memory, means.speed  # if this rank measured nothing
        key = forward.key if measurement is None else measurement.key
        if measurement is not None and measurement.ended is not None and measurement.choice.figures is not None:
            before, now = measurement.before, memory_of(forward.device)
            if measurement.peak is not None and before is not None:
                seen = measurement.peak - before.allocated - measurement.choice.figures.peak_bytes
                self._seen[key] = max(seen, self._seen.get(key, seen))
            if not measurement.is_second:
                return
            if self.auto.tflops is None and measurement.choice.forward_flops:
                speed = measurement.choice.forward_flops / _seconds(measurement.began, measurement.ended)
            if now is not None:
                memory = means.limit - self._others(forward, self._sizes, now)
        excess = self._seen.get(key, 0)
        if rank():
            values = self._compare("measurements", forward, [memory, -excess, -speed])
            memory, excess, speed = int(values[0] + values[1]), 0, -values[2]
        change = memory - excess - (means.memory - self._excess[key])
        is_other_speed = means.host > 0 and not 0.8 < speed / means.speed < 1.25
        if -RESERVE / 2 * means.limit <= change <= MUCH * means.limit and not is_other_speed:
            return
        means.memory, means.speed, self._excess[key] = memory, speed, excess
        if rank():
            self._choices.clear()
        else:
            self._choices.pop(key, None)
        sign, size = "less" if change < 0 else "more", readable_bytes(abs(change))
        logger.info(
            'policy "auto" plans again: there are %s %s than planned with, at %.0f TFLOP/s', size, sign, speed / 1e12
        )


def _in_words(policies: Mapping[str, Policy], forecast: Forecast, figures: PolicyFigures) -> str:
    """What is saved where."""
    if not any(policy.checkpoints for policy in policies.values()):
        return f"no checkpointing; {figures.relative:.3f} of the FLOPs of full"
    saved = forecast.full.saved(policies).values()
    attention = sum(out.keys > 0 for outputs in forecast.outputs().values() for out in outputs)
    waiting = sum(bool(policy.offload) for policy in policies.values())
    on_host = f"; {waiting} of {len(policies)} blocks wait on the host ({readable_bytes(figures.host_bytes)})"
    return (
        f"saves {sum(out.keys > 0 for out in saved)} of {attention} attention outputs, and "
        f"{sum(not out.keys and out.name != EXCHANGED for out in saved)} of Linear modules{on_host * bool(waiting)}; "
        f"{figures.relative:.3f} of the FLOPs of full"
    )


def no_memory() -> FastacError:
    """The error for a device that does not say how much memory it has."""
    return FastacError(
        'policy "auto" asks the device how much memory it has, and this one does not say (a CPU?). Write what a step '
        'may use, with weights and optimizer: fastac.enable(model, policy=fastac.Auto(memory="16GiB")).'
    )


def _least_of_ranks(name: str, values: list[float]) -> list[float]:
    """The least of each value on all ranks, which use the same name. This rank's own values if there is one process.

    Unlike a collective, this leaves nothing behind if a rank does not come. Raises RuntimeError after `WAIT` then.
    """
    if not rank() or dist.get_backend() == "fake":
        return values
    store = torch_private.default_store()
    keys = [f"fastac/{name}/{number}" for number in range(dist.get_world_size())]
    store.set(keys[dist.get_rank()], json.dumps(values))
    store.wait(keys, WAIT)
    return [min(of_ranks) for of_ranks in zip(*(json.loads(store.get(key)) for key in keys), strict=True)]


def _now(device: torch.device) -> Any:
    """This moment: an event of the device, or on a CPU the seconds of a clock."""
    if device.type in UNCOUNTED:
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record(torch.accelerator.current_stream(device))
    return event


def _seconds(began: Any, ended: Any) -> float:
    """The seconds between two moments. Waits for the device."""
    if isinstance(began, float):
        return max(float(ended) - began, 1e-9)
    ended.synchronize()
    return float(began.elapsed_time(ended)) / 1000


def _in_backward(measurement: _MeasuredStep, device: torch.device, gradient: torch.Tensor) -> None:
    torch_private.at_end_of_backward(functools.partial(_note_peak, measurement, device))


def _note_peak(measurement: _MeasuredStep, device: torch.device) -> None:
    now, before = memory_of(device), measurement.before
    # A peak from before the step, of a text encoder for example, says nothing about the step.
    if now is not None and before is not None and now.peak > before.peak:
        measurement.peak = now.peak
