"""policy="auto": the policies of all blocks, chosen from what the steps before have taken.

The first forward with inputs of new shapes runs under what holds least, and is measured (`fastac.engine.measurement`).
When the next one begins, `places.choose` finds the policies for the memory that is there. After each of the first steps
the allocator's peak shows how far the choice was from what was expected of it, and the next choice takes that into
account, until nothing changes. Nothing of the model runs that would not run without a plan.

Ranks must not wait for a rank that does not come: one has other shapes, and another has no more data. So they compare
their memory in their first forwards alone, since every rank that trains makes these forwards. Later several ranks
choose for the same inputs: the rank that is first decides for all of them. Ranks use torch's store and no collective.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from fastac.diagnosis.autograd_graph import tensors_of
from fastac.engine import host_memory, kinds, torch_private
from fastac.engine.beginning import autocast_state
from fastac.engine.blocks import signature
from fastac.engine.device_memory import (
    UNCOUNTED,
    counted,
    local,
    memory_of,
    now,
    usable_bytes,
    watch_optimizers,
)
from fastac.engine.measurement import MeasuredStep
from fastac.engine.process import process, thread
from fastac.engine.ranks import Ranks
from fastac.engine.transport import bus_rate
from fastac.errors import FastacError, NothingFitsError, class_name, rank, readable_bytes
from fastac.planning import places
from fastac.planning.fake_model import Arguments
from fastac.planning.forecast import OPTIMIZERS, PolicyFigures
from fastac.planning.measured import MeasuredForecast
from fastac.planning.places import Room
from fastac.planning.plans import AUTO, TFLOPS, parse_bytes, summary
from fastac.policy import Policy

logger = logging.getLogger("fastac")

RESERVE = 0.06
"""Share of the memory that no plan uses: for what the allocator rounds up, and for workspaces of kernels."""

LITTLE = 0.01
"""A step may take so much more than the limit, by a share of it: that is a part of the reserve."""

TURNS = 4
"""After the first choice for inputs of one signature, so many others at most: then one that was seen to fit stays."""

SIGNATURES = 32
"""So many signatures of inputs are measured. After that, inputs of other shapes have the policies of the next larger
inputs that were: a run whose lengths never repeat would measure every step."""

COMPARED = 3
"""In so many forwards, the first, ranks compare their memory."""

SHORTAGE, SHORTAGES, FORGOTTEN = 0.1, 3, 100
"""Each time that memory runs out in a step, the next choices for its inputs take this share less, for so many times at
most. After so many steps in which it did not, one of them is forgotten."""

MANY = 8
"""So many forwards without a backward are remembered."""


@dataclasses.dataclass(frozen=True)
class Auto:
    """The policy "auto", with what it may use: the fastest training step that fits.

    Args:
        memory: bytes of the device for this process, with weights and everything else: "70GiB". By default everything
            that is free or that torch has reserved. A share of 6 % stays unused.
        host: bytes of host memory for this process: "64GiB". By default half of what is available for each process on
            this host; 0 if nothing is to wait there.
        optimizer: the optimizer, or a list of them, or "adamw", "adamw8bit" or "sgd". It is only asked whether its
            states will fit: then a model that is too large is an error before the first step.
        gbps: rate of copies to the host and back, in 10**9 bytes per second. By default it is measured.
        tflops: speed of the device. By default it is measured.

    Raises:
        FastacError: a value that is not a number of bytes, or not a positive number; an unknown optimizer.

    Example:
        >>> fastac.enable(transformer, policy=fastac.Auto(memory="70GiB"))
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
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS:
            raise FastacError(
                f"Auto(optimizer={self.optimizer!r}): an optimizer was expected, or one of {', '.join(OPTIMIZERS)}"
            )
        for optimizer in self.optimizers:
            if not hasattr(optimizer, "param_groups"):
                raise FastacError(
                    f"Auto(optimizer=...): an optimizer or a list of them was expected, got {type(optimizer).__name__}"
                )

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers that were given, inside accelerate's wrappers."""
        given = self.optimizer if isinstance(self.optimizer, (list, tuple)) else [self.optimizer]
        return [getattr(each, "optimizer", each) for each in given if each is not None and not isinstance(each, str)]

    def states_to_come(self, trained: Mapping[torch.Tensor, int]) -> int:
        """Bytes of states that the optimizer has yet to allocate, as far as that is known.

        trained: parameter -> its bytes on this rank.
        """
        if isinstance(self.optimizer, str):
            return int(
                sum(
                    OPTIMIZERS[self.optimizer](weight.itemsize) / weight.itemsize * size
                    for weight, size in trained.items()
                )
            )
        copies = 0.0
        for optimizer in self.optimizers:
            # Other optimizers than torch's may have any number of states: only what they have allocated is known.
            is_torch = type(optimizer).__module__.startswith("torch.")
            for group in optimizer.param_groups if is_torch else ():
                states = 2 + group.get("amsgrad", False) if "betas" in group else bool(group.get("momentum"))
                copies += states * sum(
                    trained.get(weight, 0) for weight in group["params"] if weight not in optimizer.state
                )
        return int(copies)

    def __str__(self) -> str:
        return "auto"

    # A model is copied and pickled with its policy, but not with the optimizer that trains it.

    def __deepcopy__(self, memo: Any) -> Auto:
        return self

    def __reduce__(self) -> Any:
        optimizer = self.optimizer if isinstance(self.optimizer, str) else None
        return Auto, (self.memory, self.host, optimizer, self.gbps, self.tflops)


@dataclasses.dataclass(eq=False)
class Choice:
    """What was chosen for a forward."""

    # One policy for all blocks, or block name -> policy.
    policies: Policy | Mapping[str, Policy]
    # In a line: what is saved where, or what the step is for.
    why: str
    # The step is measured: its regions store nothing.
    is_measured: bool = False
    # The rest belongs to a plan. What it takes:
    figures: PolicyFigures | None = None
    # Policies for these inputs were chosen so many times before, in the memory that there is now.
    turn: int = 0
    # A step under it has ended since, and took more than there was.
    was_seen: bool = False
    is_over: bool = False
    # Bytes that a step took besides what was expected of it.
    excess: int = 0
    # How often memory ran out lately, and the steps since then.
    shortages: int = 0
    steps: int = 0
    # The best of the earlier choices that were seen to fit.
    best: Choice | None = None

    def reopen(self) -> None:
        """The memory has changed: choose again."""
        self.turn, self.was_seen, self.is_over, self.best = 1, True, True, None


_NOTHING_TRAINS = Choice(Policy("attn_only"), "nothing: no weight is trained and no input requires grad", turn=TURNS)


class _Means(NamedTuple):
    """What a step may use, the same on all ranks."""

    # Bytes of the device, without the reserve.
    limit: int
    # Bytes of the host, and bytes per second of its bus.
    host: int
    rate: float


@dataclasses.dataclass(eq=False)
class _RunningStep:
    """A forward, and its backward."""

    model: torch.nn.Module
    blocks: Mapping[str, torch.nn.Module]
    saves_linear: Callable[[], bool]
    inputs: Arguments
    # The signature of the inputs, and whether gradients of parameters were allocated when it began.
    key: tuple[Any, bool]
    # What was allocated when it began.
    taken: int = 0
    # What is seen of it, if its choice may change.
    measurement: Any = None
    choice: Choice = _NOTHING_TRAINS
    has_ended: bool = False

    @functools.cached_property
    def device(self) -> torch.device:
        """The device that computes. Weights may wait elsewhere, but inputs do not."""
        devices = [tensor.device for tensor in (*tensors_of(self.inputs), next(self.model.parameters()))]
        return next((device for device in devices if device.type != "cpu"), devices[0])

    @property
    def trained(self) -> dict[torch.Tensor, int]:
        """The parameters that are trained where the model computes -> their bytes on this rank."""
        trained = [weight for weight in self.model.parameters() if weight.requires_grad]
        return {weight: local(weight).nbytes for weight in trained if weight.device.type == self.device.type}

    @property
    def gradients(self) -> int:
        """Bytes of the gradients that backward will allocate."""
        return sum(size for weight, size in self.trained.items() if weight.grad is None)

    def end(self) -> None:
        """Its backward has ended."""
        self.has_ended, self.measurement.after = True, self.measurement.read()


class Planner:
    """Chooses for one model. A copy of the model has the planner without what it knows."""

    def __init__(self, auto: Auto) -> None:
        self.auto = auto
        self.latest: Choice | None = None
        """The choice of the latest forward."""
        # By signature. And by key: the latest choice.
        self._forecasts: dict[Any, MeasuredForecast] = {}
        self._choices: dict[tuple[Any, bool], Choice] = {}
        self._words: dict[Any, str] = {}
        self._means: _Means | None = None
        # Forwards whose backward has not ended, as far as is known; and how many may belong to one backward.
        self._running: list[_RunningStep] = []
        self._together: Counter[Any] = Counter()
        # How many forwards there were, and choices.
        self._forwards = self._decisions = 0
        # What all ranks may allocate beyond what is there when a step begins, as compared last.
        self._headroom = 0
        self._ranks = Ranks("")
        # A trained weight: its module and its name.
        self._weight: tuple[torch.nn.Module, str] | None = None
        self._changes = process.memory_changes

    def __reduce__(self) -> Any:
        return Planner, (self.auto,)

    def before_forward(
        self,
        model: torch.nn.Module,
        blocks: Mapping[str, torch.nn.Module],
        args: Any,
        kwargs: dict[str, Any],
        saves_linear: Callable[[], bool],
    ) -> Choice | None:
        """The choice for a forward that begins with gradients on; None if it is still the latest one.

        saves_linear: says whether outputs of Linear modules can be saved. Raises NothingFitsError.
        """
        choice, weight = _NOTHING_TRAINS, self._trained(model, blocks.values())
        # A frozen model trains what its inputs come from, such as a generator.
        requiring = tuple([t.requires_grad for t in tensors_of((args, kwargs))]) if weight is None else ()
        if weight is not None or any(requiring):
            shapes = *signature(args, kwargs), model.training, tuple(autocast_state()), requiring
            key = shapes, weight is not None and weight.grad is not None
            choice = self._choice(_RunningStep(model, blocks, saves_linear, Arguments(args, kwargs), key))
        if choice is self.latest:
            return None
        if self.latest is None or choice.policies != self.latest.policies:
            logger.info('policy "auto", %s on %s: %s', class_name(model), Arguments(args, kwargs), choice.why)
        self.latest = choice
        return choice

    def _trained(self, model: torch.nn.Module, blocks: Iterable[torch.nn.Module]) -> torch.Tensor | None:
        """A weight that is trained; None if there is none."""
        weight: torch.Tensor | None = None if self._weight is None else getattr(*self._weight, None)
        if weight is not None and weight.requires_grad:
            return weight
        # In the blocks first: FSDP2 has gathered weights of the model itself by now, and these have no gradients.
        for module in (module for outer in (*blocks, model) for module in outer.modules()):
            for name, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad:
                    self._weight = module, name
                    return parameter
        return None

    def _choice(self, forward: _RunningStep) -> Choice:
        """The choice for a forward in which something is trained."""
        self._forwards += 1
        means = self._means = self._means or self._look(forward)
        self._learn(forward)
        if forward.key[0] not in self._words:
            self._words[forward.key[0]] = f"{class_name(forward.model)} on {forward.inputs}"
        key = forward.key = self._of_larger(forward.key)
        latest, forecast = self._choices.get(key), self._forecasts.get(key[0])
        if latest is not None:
            latest.steps += 1
            if latest.shortages and latest.steps > FORGOTTEN:
                latest.shortages, latest.steps = latest.shortages - 1, 0
                latest.reopen()
        compares = bool(rank()) and self._forwards <= COMPARED
        if latest is not None and latest.turn >= TURNS and not compares:
            return latest
        memory = memory_of(forward.device)
        forward.taken = memory.allocated if memory is not None else counted(forward.model)
        headroom = means.limit - forward.taken - (latest.excess if latest is not None else 0)
        if compares:
            self._headroom = min(self._ranks.of_all(f"headroom {self._forwards}", headroom))
        headroom = min(headroom, self._headroom) if rank() else headroom
        choice = latest
        if forecast is None:
            choice = latest or self._least(forward, means)
        elif latest is None or (latest.was_seen and latest.turn < TURNS and not self._running):
            choice = self._choices[key] = self._chosen(forward, forecast, latest, forecast.base + headroom)
        assert choice is not None
        if choice.turn < TURNS and (choice.is_measured or not process.collectors):
            self._begin(forward, choice)  # fastac.verify holds results of other steps meanwhile
        return choice

    def _least(self, forward: _RunningStep, means: _Means) -> Choice:
        """What holds least, in a step that is measured."""
        # No choice has a min_kv of 1: regions of this step are of kinds of their own.
        policy = Policy("attn_only", min_kv=1, linear=("*",) if forward.saves_linear() else ())
        if means.host:
            policy = dataclasses.replace(policy, offload="inputs", keep=1)
        return Choice(policy, "this first step saves nothing, and is measured", is_measured=True)

    def _chosen(self, forward: _RunningStep, forecast: MeasuredForecast, latest: Choice | None, memory: int) -> Choice:
        """The choice for a memory, as a timeline counts it."""
        assert self._means is not None
        (signature_, has_gradients), (limit, host, rate) = forward.key, self._means
        # Gradients that are allocated already are not allocated by the step.
        shards, full = sys.maxsize if has_gradients else 1, forecast.policies("full")
        known = latest or Choice(full, "")
        memory -= int(limit * SHORTAGE * known.shortages)
        # Each of several forwards before one backward may take a part of what is left.
        least, together = forecast.full.peak(full, shards), max(1, self._together[signature_])
        memory -= max(0, memory - least) * (together - 1) // together
        speed = self.auto.tflops * 1e12 if self.auto.tflops else forecast.speed or TFLOPS * 1e12
        room = Room(memory, host, rate / speed)
        careful = forecast.careful() if latest is None else forecast
        found = places.choose(careful, room, linear=forward.saves_linear(), gradient_shards=shards)
        if found is None:
            missing = places.missing(forecast, room, gradient_shards=shards)
            kinds.warn_once(
                forward.model, f"auto {forward.key}", f'policy "auto", {self._words[signature_]}: {missing}'
            )
        policies: Policy | Mapping[str, Policy] = found or places.least(forecast, room, shards)
        turn = 0 if latest is None else latest.turn + 1
        # What was seen to fit stays, unless the new choice is better, and there is time to see whether that fits.
        fitting = [each for each in (latest, known.best) if each is not None and each.was_seen and not each.is_over]
        best = min(fitting, key=_flops, default=None)
        if best is not None and turn > 1 and (turn >= TURNS or forecast.figures(policies).flops >= _flops(best)):
            turn, policies = TURNS, best.policies
        turn, policies = self._agreed(forward.key, turn, policies)
        if best is not None and policies == best.policies:
            return dataclasses.replace(best, turn=turn)
        peak = forecast.step(policies).peak(policies, shards)
        figures = dataclasses.replace(forecast.figures(policies, AUTO), peak_bytes=peak)
        planned = f"{readable_bytes(limit - memory + peak)} of {readable_bytes(limit)} planned"
        why = f"{summary(policies.values())}; {figures.relative:.3f} of the FLOPs of full; {planned}"
        return dataclasses.replace(
            known, policies=policies, why=why, figures=figures, turn=turn, was_seen=False, is_over=False, best=best
        )

    def _begin(self, forward: _RunningStep, choice: Choice) -> None:
        """A step begins: look at what it takes, until its choice is known to be right."""
        assert self._means is not None
        forward.choice, device = choice, forward.device
        forward.measurement = MeasuredStep(
            functools.partial(memory_of, device),
            functools.partial(now, device),
            times_kernels=device.type not in UNCOUNTED,
            need=forward.gradients,
            limit=self._means.limit,
            blocks=len(forward.blocks),
        )
        forward.inputs = Arguments((), {})  # whoever made them decides how long they live
        if choice.is_measured:
            thread.measurement = forward.measurement
        self._running = [*self._running[-MANY:], forward]

    def after_forward(self, outputs: Any) -> None:
        """The forward has ended. Its step ends with its backward."""
        measurement, thread.measurement = thread.measurement, None
        if measurement is not None:
            measurement.end_forward()
        for output in tensors_of(outputs) if self._running else ():
            if output.requires_grad:
                output.register_hook(functools.partial(_in_backward, self._running[-1]))

    def ran_out(self) -> None:
        """Memory ran out in the forward of the latest step, or in its backward."""
        self._running, choice = [], self.latest
        if choice is None or choice.figures is None:
            return
        if rank():
            logger.warning(
                'policy "auto": memory ran out on this rank. Its plans stay, because all ranks need the same ones. '
                "Pass fastac.Auto(memory=...) with less memory on all ranks."
            )
            return
        choice.shortages, choice.steps = min(SHORTAGES, choice.shortages + 1), 0
        choice.reopen()
        logger.info('policy "auto": memory ran out, so the next choice for these inputs takes a tenth less')

    def _learn(self, forward: _RunningStep) -> None:
        """Take into account what happened since the latest forward."""
        if process.ran_out and (own := process.ran_out.intersection(forward.model.modules())):
            process.ran_out.difference_update(own)
            self.ran_out()
        # Compiled autograd drops what is to be called at the end of a backward.
        ended = [each for each in self._running if each.has_ended or each.measurement.recomputed]
        counts = Counter(shapes for shapes, _ in (each.key for each in ended))
        # Of forwards that share a backward, the first has seen all that the others take.
        for shapes, first in {each.key[0]: each for each in reversed(ended)}.items():
            self._together[shapes] = max(self._together[shapes], counts[shapes])
            if not first.choice.is_measured:
                self._note_peak(first, self._forecasts[shapes].base)
            elif shapes not in self._forecasts:
                self._note_measured(first)
        if ended:  # a forward before the last of them has ended, too, or has no backward
            self._running.clear()
        changes, self._changes = self._changes, process.memory_changes
        if changes != self._changes:
            for choice in self._choices.values():
                choice.reopen()

    def _note_measured(self, forward: _RunningStep) -> None:
        measurement = forward.measurement
        names: dict[Any, str] = {module: name for name, module in forward.model.named_modules()}
        names |= {block: name for name, block in forward.blocks.items()}
        if all(region.block in names for region in measurement.regions) and measurement.recomputed:
            self._forecasts[forward.key[0]] = MeasuredForecast(measurement, names, forward.taken, forward.key[1])
        elif measurement.recomputed:
            why = 'no plan, so policy "attn_only": the model checkpoints functions that are no modules'
            for has_gradients in (False, True):
                self._choices[forward.key[0], has_gradients] = Choice(Policy("attn_only"), why, turn=TURNS)

    def _note_peak(self, forward: _RunningStep, base: int) -> None:
        """Note how far a step was from what was expected. base: what the forecast expects at its beginning."""
        choice, step = forward.choice, forward.measurement
        assert choice.figures is not None
        assert self._means is not None
        choice.was_seen = True
        if not step.is_counted:
            return
        excess = step.after.peak - forward.taken - (choice.figures.peak_bytes - base)
        # A peak from before the step, of a text encoder for example, only says that this one's was not higher.
        is_its_own = step.after.peak > step.began.peak
        choice.excess = excess if is_its_own else min(excess, choice.excess)
        choice.is_over = is_its_own and step.after.peak > self._means.limit * (1 + LITTLE)

    def _of_larger(self, key: tuple[Any, bool]) -> tuple[Any, bool]:
        """The key of the next larger inputs that were measured, if many were, and these were not."""
        shapes, has_gradients = key
        if len(self._forecasts) < SIGNATURES or shapes in self._forecasts:
            return key
        alike = [known for known in self._forecasts if kinds.without_shapes(known) == kinds.without_shapes(shapes)]
        larger = [known for known in alike if kinds.elements_in(known) >= kinds.elements_in(shapes)]
        return min(larger, key=kinds.elements_in, default=shapes), has_gradients

    def _look(self, forward: _RunningStep) -> _Means:
        """What a step may use: the least of all ranks. Raises NothingFitsError if some rank cannot train the model."""
        auto, memory = self.auto, memory_of(forward.device)
        if memory is None and auto.memory is None:
            raise no_memory()
        watch_optimizers()
        process.planners += 1
        process.memory_changes += 1
        # Models are numbered in the order of their first forwards, which is the same on all ranks.
        self._ranks = Ranks(f"auto {process.planners}")
        usable = [usable_bytes(forward.device)] if memory is not None else []
        usable += [parse_bytes(auto.memory)] if auto.memory is not None else []
        limit, host = int(min(usable) * (1 - RESERVE)), 0
        if auto.host is not None:
            host = parse_bytes(auto.host)
        elif memory is not None:
            host = (host_memory.available() or 0) // 2 // host_memory.ranks_on_host()
        if torch_private.user_hooks() is not None:
            host = 0  # hooks of the user's would move what offload moves, so blocks refuse to offload
        rate = auto.gbps * 1e9 if auto.gbps else bus_rate(forward.device) if host else 0.0
        sizes = {
            "allocated": memory.allocated if memory is not None else counted(forward.model),
            "gradients": forward.gradients,
            "states of the optimizer": auto.states_to_come(forward.trained),
        }
        problem = ""
        if sum(sizes.values()) > limit:
            parts = ", ".join(f"{what} {readable_bytes(size)}" for what, size in sizes.items())
            problem = (
                f'policy "auto", {rank() or class_name(forward.model)}: the first step would run out of memory. Before '
                f"any activation it takes {parts};\n{readable_bytes(limit)} are there, without a reserve of "
                f"{RESERVE:.0%}. Train with LoRA, an 8-bit optimizer, or more GPUs that share the weights (FSDP)."
            )
        limits, hosts, rates, problems = zip(*self._ranks.of_all("memory", [limit, host, rate, problem]), strict=True)
        if problem := next(filter(None, problems), ""):
            raise NothingFitsError(problem)
        return _Means(min(limits), min(hosts), min(rates))

    def _agreed(self, key: Any, turn: int, policies: Any) -> tuple[int, Mapping[str, Policy]]:
        """The decision of the rank that was the first to choose for these inputs, in as many decisions as this one.

        Blocks may communicate in recompute: then ranks that do not recompute the same wait for ever.
        """
        self._decisions += 1
        own = [turn, {block: dataclasses.asdict(policy) for block, policy in policies.items()}]
        turn, agreed = self._ranks.first(repr((key, self._decisions)), own)
        return turn, {block: Policy(**fields) for block, fields in agreed.items()}

    def in_words(self) -> list[str]:
        """What was chosen, in a line for inputs of each signature."""
        lines = []
        for (shapes, has_gradients), choice in self._choices.items():
            beside = " (beside gradients of an earlier backward)" * has_gradients
            lines.append(f"{self._words[shapes]}{beside}: {choice.why}")
        return lines or ["nothing was planned yet" if self.latest is None else self.latest.why]


def _flops(choice: Choice) -> int:
    return choice.figures.flops if choice.figures is not None else 0


def no_memory() -> FastacError:
    """The error for a device that does not say how much memory it has."""
    return FastacError(
        'policy "auto" asks the device how much memory it has, and this one does not say (a CPU?). Write what a step '
        'may use, with weights and optimizer: fastac.enable(model, policy=fastac.Auto(memory="16GiB")).'
    )


def _in_backward(forward: _RunningStep, gradient: torch.Tensor) -> None:
    torch_private.at_end_of_backward(forward.end)
