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
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

from fastac.diagnosis.autograd_graph import tensors_of
from fastac.engine import device_memory, host_memory, kinds, torch_private
from fastac.engine.beginning import autocast_state
from fastac.engine.blocks import signature
from fastac.engine.measurement import MeasuredStep
from fastac.engine.process import process, thread
from fastac.engine.ranks import Ranks
from fastac.engine.transport import bus_rate
from fastac.errors import FastacError, NothingFitsError, class_name, parse_bytes, rank, readable_bytes
from fastac.planning import places
from fastac.planning.fake_model import Arguments
from fastac.planning.forecast import OPTIMIZERS
from fastac.planning.measured import MeasuredForecast
from fastac.planning.plans import TFLOPS, summary
from fastac.policy import Policy

logger = logging.getLogger("fastac")

RESERVE = 0.06
"""Share of the memory that no plan uses: for what the allocator rounds up, and for workspaces of kernels."""

LITTLE = 0.01
"""A step may take so much more than the limit, by a share of it: that is a part of the reserve."""

TURNS = 4
"""So many choices at most follow the first one for inputs of one signature. Then one that was seen to fit stays."""

SIGNATURES = 32
"""So many signatures of inputs are measured. After that, inputs of other shapes have the policies of the next larger
inputs that were: a run whose lengths never repeat would measure every step."""

COMPARED = 3
"""In so many forwards, the first, ranks compare their memory."""

SHORTAGE, SHORTAGES, FORGOTTEN = 0.1, 3, 100
"""Each time that memory runs out in a step, the next choices take this share less, for so many times at most. After so
many forwards in which it did not, one of them is forgotten."""

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
        are_optimizers = all(hasattr(optimizer, "param_groups") for optimizer in self.optimizers)
        if not (self.optimizer in OPTIMIZERS if isinstance(self.optimizer, str) else are_optimizers):
            raise FastacError(
                f"Auto(optimizer={self.optimizer!r:.60}): an optimizer was expected, a list of them, or one of "
                f"{', '.join(OPTIMIZERS)}"
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
            per_number = OPTIMIZERS[self.optimizer]
            return int(sum(per_number(weight.itemsize) / weight.itemsize * trained[weight] for weight in trained))
        return sum(
            _states_of(group) * trained.get(weight, 0)
            for optimizer in self.optimizers
            # Other optimizers than torch's may have any number of states: only what they have allocated is known.
            if type(optimizer).__module__.startswith("torch.")
            for group in optimizer.param_groups
            for weight in group["params"]
            if weight not in optimizer.state
        )

    def __str__(self) -> str:
        return "auto"

    # A model is copied and pickled with its policy, but not with the optimizer that trains it.

    def __deepcopy__(self, memo: Any) -> Auto:
        return self

    def __reduce__(self) -> Any:
        optimizer = self.optimizer if isinstance(self.optimizer, str) else None
        return Auto, (self.memory, self.host, optimizer, self.gbps, self.tflops)


def _states_of(group: Mapping[str, Any]) -> int:
    """Tensors of states that an optimizer of torch has for each parameter of a group."""
    return 2 + bool(group.get("amsgrad")) if "betas" in group else int(bool(group.get("momentum")))


@dataclasses.dataclass(eq=False)
class Choice:
    """What was chosen for a forward."""

    # One policy for all blocks, or block name -> policy.
    policies: Policy | Mapping[str, Policy]
    # In a line: what is saved where, or what the step is for.
    why: str
    # The model and its inputs, in words.
    subject: str = ""
    # The step is measured: its regions store nothing.
    is_measured: bool = False
    # Policies for these inputs were chosen so many times before, in the memory that there is now.
    turn: int = 0
    # Bytes and FLOPs that a step under them is expected to take. They are 0 if nothing was planned.
    peak: int = 0
    flops: int = 0
    # Bytes that a step took besides what was expected of it.
    excess: int = 0
    # A step has ended since, and took more than there was.
    was_seen: bool = False
    is_over: bool = False
    # The best of the earlier choices that were seen to fit.
    best: Choice | None = None


_NOTHING_TRAINS = Choice(Policy("attn_only"), "nothing: no weight is trained and no input requires grad", turn=TURNS)


@dataclasses.dataclass(eq=False)
class _OpenForward:
    """A forward whose backward has not ended."""

    # The model and its blocks.
    enabled: Any
    inputs: Arguments
    # The signature of the inputs, and whether gradients of parameters were allocated when it began.
    key: tuple[Any, bool]
    # What was allocated when it began.
    taken: int = 0
    # What is seen of it, if its choice may change.
    measurement: Any = None
    choice: Choice = _NOTHING_TRAINS

    @functools.cached_property
    def device(self) -> torch.device:
        """The device that computes. Weights may wait elsewhere, but inputs do not."""
        tensors: list[torch.Tensor] = [*tensors_of(self.inputs), next(self.enabled.model.parameters())]
        devices = [tensor.device for tensor in tensors]
        return next((device for device in devices if device.type != "cpu"), devices[0])

    @property
    def trained(self) -> dict[torch.Tensor, int]:
        """The parameters that are trained where the model computes -> their bytes on this rank."""
        trained = [weight for weight in self.enabled.model.parameters() if weight.requires_grad]
        return {w: device_memory.local(w).nbytes for w in trained if w.device.type == self.device.type}

    @property
    def gradients(self) -> int:
        """Bytes of the gradients that backward will allocate."""
        return sum(size for weight, size in self.trained.items() if weight.grad is None)

    @property
    def subject(self) -> str:
        """The model and the inputs, in words."""
        beside = " (beside gradients of an earlier backward)" * self.key[1]
        return f"{class_name(self.enabled.model)} on {self.inputs}{beside}"


class Planner:
    """Chooses for one model. A copy of the model has the planner without what it knows."""

    def __init__(self, auto: Auto) -> None:
        self.auto = auto
        self.latest: Choice | None = None
        """The choice of the latest forward."""
        # By signature. And by key: the latest choice.
        self._forecasts: dict[Any, MeasuredForecast] = {}
        self._choices: dict[tuple[Any, bool], Choice] = {}
        self._words: dict[tuple[Any, bool], str] = {}
        # What a step may use, the same on all ranks: bytes of the device without the reserve, 0 before the first
        # forward; bytes of the host, and bytes per second of its bus.
        self._limit, self._host, self._rate = 0, 0, 0.0
        # Forwards whose backward has not ended, as far as is known; and how many may belong to one backward.
        self._running: list[_OpenForward] = []
        self._together: Counter[Any] = Counter()
        # How many forwards there were, and choices.
        self._forwards = self._decisions = 0
        # How often memory ran out lately, and the number of the forward since which it did not.
        self._shortages = self._enough_since = 0
        # What all ranks may allocate beyond what is there when a step begins, as compared last.
        self._headroom = 0
        self._ranks = Ranks("")
        self._changes = process.memory_changes

    def __reduce__(self) -> Any:
        return Planner, (self.auto,)

    def before_forward(self, enabled: Any, args: Any, kwargs: dict[str, Any]) -> Choice | None:
        """The choice for a forward that begins with gradients on; None if it is still the latest one.

        enabled: the model and its blocks (`fastac.hook.Enabled`). Raises NothingFitsError.
        """
        model = enabled.model
        # In the blocks first: FSDP2 has gathered weights of the model itself by now, and these have no gradients.
        weights = (weight for module in (*enabled.blocks.values(), model) for weight in module.parameters())
        weight, choice = next((weight for weight in weights if weight.requires_grad), None), _NOTHING_TRAINS
        # A frozen model trains what its inputs come from, such as a generator.
        requiring = tuple([t.requires_grad for t in tensors_of((args, kwargs))]) if weight is None else ()
        if weight is not None or any(requiring):
            shapes = *signature(args, kwargs), model.training, tuple(autocast_state()), requiring
            key = shapes, weight is not None and weight.grad is not None
            choice = self._choice(_OpenForward(enabled, Arguments(args, kwargs), key))
        if choice is self.latest:
            return None
        if self.latest is None or choice.policies != self.latest.policies:
            logger.info('policy "auto", %s on %s: %s', class_name(model), Arguments(args, kwargs), choice.why)
        self.latest = choice
        return choice

    def _choice(self, forward: _OpenForward) -> Choice:
        """The choice for a forward in which something is trained."""
        self._forwards += 1
        if not self._limit:
            self._look(forward)
        self._learn(forward)
        key = forward.key = self._of_larger(forward.key)
        choice, forecast = self._choices.get(key), self._forecasts.get(key[0])
        compares = bool(rank()) and self._forwards <= COMPARED
        if choice is not None and choice.turn >= TURNS and not compares:
            return choice
        self._words.setdefault(key, forward.subject)
        memory = device_memory.memory_of(forward.device)
        forward.taken = device_memory.counted(forward.enabled.model) if memory is None else memory.allocated
        headroom = self._limit - forward.taken - (0 if choice is None else choice.excess)
        if compares:
            self._headroom = min(self._ranks.of_all(f"headroom {self._forwards}", headroom))
        headroom = min(headroom, self._headroom) if rank() else headroom
        if forecast is None:
            choice = choice or self._least(forward)
        elif choice is None or (choice.was_seen and choice.turn < TURNS and not self._running):
            choice = self._choices[key] = self._chosen(forward, forecast, choice, forecast.base + headroom)
        assert choice is not None
        if choice.turn < TURNS and (choice.is_measured or not process.collectors):
            self._begin(forward, choice)  # fastac.verify holds results of other steps meanwhile
        return choice

    def _least(self, forward: _OpenForward) -> Choice:
        """What holds least, in a step that is measured."""
        # No choice has a min_kv of 1: regions of this step are of kinds of their own.
        policy = Policy("attn_only", min_kv=1, linear=("*",) if forward.enabled.saves_linear() else ())
        if self._host:
            policy = dataclasses.replace(policy, offload="inputs", keep=1)
        return Choice(policy, "this first step saves nothing, and is measured", is_measured=True)

    def _chosen(self, forward: _OpenForward, measured: MeasuredForecast, latest: Choice | None, memory: int) -> Choice:
        """The choice for a memory, as a timeline counts it."""
        forecast = measured.of_step(has_gradients=forward.key[1])
        memory -= int(self._limit * SHORTAGE * self._shortages)
        # Each of several forwards before one backward may take a part of what is left.
        together = max(1, self._together[forward.key[0]])
        memory -= max(0, memory - forecast.peak("full")) * (together - 1) // together
        speed = self.auto.tflops * 1e12 if self.auto.tflops else forecast.speed or TFLOPS * 1e12
        room = places.Room(memory, self._host, self._rate / speed)
        careful = forecast if latest else measured.of_step(has_gradients=forward.key[1], is_first=True)
        found = places.choose(careful, room, linear=forward.enabled.saves_linear())
        if found is None:
            said = f'policy "auto", {self._words[forward.key]}: {places.missing(forecast, room)}'
            kinds.warn_once(forward.enabled.model, f"auto {forward.key}", said)
        policies: Any = found or places.least(forecast, room)
        turn = 0 if latest is None else latest.turn + 1
        # What was seen to fit stays, unless the new choice is better, and there is time to see whether that fits.
        earlier = (latest, latest and latest.best)
        fitting = [each for each in earlier if each is not None and each.was_seen and not each.is_over]
        best = min(fitting, key=lambda each: each.flops, default=None)
        if best is not None and turn > 1 and (turn >= TURNS or forecast.figures(policies).flops >= best.flops):
            turn, policies = TURNS, best.policies
        turn, policies = self._agreed(forward.key, turn, policies)
        if best is not None and policies == best.policies:
            return dataclasses.replace(best, turn=turn)
        figures = forecast.figures(policies)
        planned = f"{readable_bytes(self._limit - memory + figures.peak_bytes)} of {readable_bytes(self._limit)}"
        return Choice(
            policies,
            f"{summary(policies.values())}; {figures.relative:.3f} of the FLOPs of full; {planned} planned",
            self._words[forward.key],
            turn=turn,
            peak=figures.peak_bytes,
            flops=figures.flops,
            excess=0 if latest is None else latest.excess,
            best=best,
        )

    def _begin(self, forward: _OpenForward, choice: Choice) -> None:
        """A step begins: look at what it takes, until its choice is known to be right."""
        forward.choice = choice
        forward.measurement = MeasuredStep(forward.device, forward.gradients, self._limit, len(forward.enabled.blocks))
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
                output.register_hook(functools.partial(_in_backward, self._running[-1].measurement))

    def ran_out(self) -> None:
        """Memory ran out in the forward of the latest step, or in its backward."""
        self._running = []
        if self.latest is None or not self.latest.peak:
            return
        if rank():
            logger.warning(
                'policy "auto": memory ran out on this rank. Its plans stay, because all ranks need the same ones. '
                "Pass fastac.Auto(memory=...) with less memory on all ranks."
            )
            return
        self._shortages, self._enough_since = min(SHORTAGES, self._shortages + 1), self._forwards
        self._changes = -1
        logger.info('policy "auto": memory ran out, so the next choices take a tenth less')

    def _learn(self, forward: _OpenForward) -> None:
        """Take into account what happened since the latest forward."""
        if process.ran_out and (own := process.ran_out.intersection(forward.enabled.model.modules())):
            process.ran_out.difference_update(own)
            self.ran_out()
        ended = [each for each in self._running if each.measurement.has_ended or each.measurement.recomputed]
        for each in ended:
            if not each.measurement.has_ended:  # compiled autograd drops what is to be called at the end of a backward
                each.measurement.end_backward()
        counts = Counter(each.key[0] for each in ended)
        # Of forwards that share a backward, the first has seen all that the others take.
        for shapes, first in {each.key[0]: each for each in reversed(ended)}.items():
            self._together[shapes] = max(self._together[shapes], counts[shapes])
            if not first.choice.is_measured:
                self._note_peak(first)
            elif shapes not in self._forecasts and first.measurement.recomputed:
                self._note_measured(first)
        if ended:  # a forward before the last of them has ended, too, or has no backward
            self._running.clear()
        if self._shortages and self._forwards > self._enough_since + FORGOTTEN:
            self._shortages, self._enough_since, self._changes = self._shortages - 1, self._forwards, -1
        changes, self._changes = self._changes, process.memory_changes
        if changes != self._changes:
            for choice in filter(lambda choice: choice.peak, self._choices.values()):  # the others are no plans
                choice.turn, choice.was_seen, choice.is_over, choice.best = 1, True, True, None

    def _note_measured(self, forward: _OpenForward) -> None:
        measurement = forward.measurement
        names: dict[Any, str] = {module: name for name, module in forward.enabled.model.named_modules()}
        names |= {block: name for name, block in forward.enabled.blocks.items()}
        if all(region.block in names for region in measurement.regions):
            self._forecasts[forward.key[0]] = MeasuredForecast(measurement, names, forward.taken, forward.key[1])
        else:
            why = 'no plan, so policy "attn_only": the model checkpoints functions that are no modules'
            for key in ((forward.key[0], False), (forward.key[0], True)):
                self._choices[key] = Choice(Policy("attn_only"), why, self._words[forward.key], turn=TURNS)

    def _note_peak(self, forward: _OpenForward) -> None:
        """Note how far a step was from what was expected."""
        choice, step = forward.choice, forward.measurement
        choice.was_seen = True
        if not step.is_counted:
            return
        excess = step.after.peak - forward.taken - (choice.peak - self._forecasts[forward.key[0]].base)
        # A peak from before the step, of a text encoder for example, only says that this one's was not higher.
        is_its_own = step.after.peak > step.began.peak
        choice.excess = excess if is_its_own else min(excess, choice.excess)
        choice.is_over = is_its_own and step.after.peak > self._limit * (1 + LITTLE)

    def _of_larger(self, key: tuple[Any, bool]) -> tuple[Any, bool]:
        """The key of the next larger inputs that were measured, if many were, and these were not."""
        shapes, has_gradients = key
        if len(self._forecasts) < SIGNATURES or shapes in self._forecasts:
            return key
        alike = [known for known in self._forecasts if kinds.without_shapes(known) == kinds.without_shapes(shapes)]
        larger = [known for known in alike if kinds.elements_in(known) >= kinds.elements_in(shapes)]
        return min(larger, key=kinds.elements_in, default=shapes), has_gradients

    def _look(self, forward: _OpenForward) -> None:
        """Find what a step may use: the least of all ranks. Raises NothingFitsError if one cannot train the model."""
        auto, memory = self.auto, device_memory.memory_of(forward.device)
        if memory is None and auto.memory is None:
            raise no_memory()
        device_memory.watch_optimizers()
        process.planners += 1
        process.memory_changes += 1
        # Models are numbered in the order of their first forwards, which is the same on all ranks.
        self._ranks = Ranks(f"auto {process.planners}")
        usable = [device_memory.usable_bytes(forward.device)] if memory is not None else []
        usable += [parse_bytes(auto.memory)] if auto.memory is not None else []
        limit, host = int(min(usable) * (1 - RESERVE)), 0
        # Hooks of the user's would move what offload moves, so blocks refuse to offload then.
        if torch_private.user_hooks() is None and (auto.host is not None or memory is not None):
            half = (host_memory.available() or 0) // 2 // host_memory.ranks_on_host()
            host = half if auto.host is None else parse_bytes(auto.host)
        rate = auto.gbps * 1e9 if auto.gbps else bus_rate(forward.device) if host else 0.0
        sizes = {
            "allocated": memory.allocated if memory is not None else device_memory.counted(forward.enabled.model),
            "gradients": forward.gradients,
            "states of the optimizer": auto.states_to_come(forward.trained),
        }
        problem = ""
        if sum(sizes.values()) > limit:
            parts = ", ".join(f"{what} {readable_bytes(size)}" for what, size in sizes.items())
            whose = rank() or class_name(forward.enabled.model)
            problem = (
                f'policy "auto", {whose}: the first step would run out of memory. Before any activation it takes '
                f"{parts};\n{readable_bytes(limit)} are there, without a reserve of "
                f"{RESERVE:.0%}. Train with LoRA, an 8-bit optimizer, or more GPUs that share the weights (FSDP)."
            )
        limits, hosts, rates, problems = zip(*self._ranks.of_all("memory", [limit, host, rate, problem]), strict=True)
        if problem := next(filter(None, problems), ""):
            raise NothingFitsError(problem)
        self._limit, self._host, self._rate = min(limits), min(hosts), min(rates)

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
        lines = [f"{choice.subject}: {choice.why}" for choice in self._choices.values()]
        return lines or ["nothing was planned yet" if self.latest is None else self.latest.why]


def no_memory() -> FastacError:
    """The error for a device that does not say how much memory it has."""
    return FastacError(
        'policy "auto" asks the device how much memory it has, and this one does not say (a CPU?). Write what a step '
        'may use, with weights and optimizer: fastac.enable(model, policy=fastac.Auto(memory="16GiB")).'
    )


def _in_backward(step: MeasuredStep, gradient: torch.Tensor) -> None:
    torch_private.at_end_of_backward(step.end_backward)
