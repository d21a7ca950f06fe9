"""Plans for a published model and a video, as `fastac plan` makes them: from a configuration, without weights."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Collection, Mapping

import torch

from fastac.engine import torch_private
from fastac.engine.beginning import generators_preserved
from fastac.errors import FastacError, readable_bytes
from fastac.models.published import Configuration, add_lora, build
from fastac.models.videos import Video
from fastac.planning import places
from fastac.planning.fake_model import FakeModel, fake_model
from fastac.planning.fake_weights import BREAKS
from fastac.planning.forecast import ROWS, Forecast
from fastac.planning.plans import AUTO, WITHIN, Plan, explained, plan_of
from fastac.planning.simulation import Split
from fastac.policy import Policy

Tell = Callable[[str], object]

FARTHEST = 8
"""The longest video that is tried is about so many times as long as the one before: models refuse some lengths."""


@dataclasses.dataclass(frozen=True)
class Training:
    """How a model is trained. Raises FastacError for a context parallel degree that does not divide the GPUs."""

    # Rank of LoRA weights on attention. Then only these are trained. 0: all weights are trained.
    lora: int = 0
    # A name in forecast.OPTIMIZERS.
    optimizer: str = "adamw"
    # Number of GPUs over which FSDP2 shards weights, gradients and the optimizer's states.
    gpus: int = 1
    # Number of GPUs over which Ulysses splits the tokens of a video.
    context_parallel: int = 1
    # "cuda" or "cpu".
    device: str = "cuda"

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.context_parallel < 1 or self.gpus % self.context_parallel:
            raise FastacError(
                f"plan: a context parallel degree of {self.context_parallel} does not divide {self.gpus} GPUs. Both "
                f"are whole numbers from 1 on: --gpus 8 --context-parallel 4."
            )


@generators_preserved()
def plan_video(
    configuration: Configuration,
    video: Video,
    training: Training = Training(),
    *,
    budget: int | None = None,
    offload: bool = False,
    memory: int | None = None,
    host: int = Plan.host,
    gbps: float = Plan.gbps,
    tflops: float = Plan.tflops,
    checkpointed: int | None = None,
    tell: Tell = lambda text: None,
) -> Plan:
    """Plan a step of a published model on a video.

    Args:
        budget: bytes of saved outputs, for one more row.
        offload: whether the row of the budget offloads.
        memory: bytes of the device: adds the row of the best that fits, and the longest video with which a step fits.
        host: bytes of the host that the best may take.
        gbps: rate of the bus between them.
        tflops: speed of the device.
        checkpointed: as in `plan`.
        tell: called with the progress, in words.

    Raises:
        FastacError: the video does not fit the model, or this does not run.
    """
    how = f"LoRA of rank {training.lora}" if training.lora else "all weights"
    on = f", {training.gpus} GPUs (FSDP2)" if training.gpus > 1 else ""
    on += f", context parallel over {training.context_parallel}" if training.context_parallel > 1 else ""
    described = f"{video}, {str(video.dtype).removeprefix('torch.')}, {how}, {training.optimizer}{on}"
    with explained(f"{configuration.name} cannot be built as it is configured, or does not run on {described}"):
        tell(f"building {configuration.name} without weights")
        model = fake_model(without_weights(configuration, video.dtype, training.lora), (), device=training.device)
        search = _Search(configuration, video, training, budget, offload, tell, model)
        forecast = search.forecast(video.frames)
        planned = plan_of(forecast, configuration.name, described, checkpointed)
        planned = dataclasses.replace(planned, budget=budget, memory=memory, host=host, gbps=gbps, tflops=tflops)
        chosen: dict[str, Mapping[str, Policy]] = {}
        if budget is not None:
            name = WITHIN + readable_bytes(budget) + ", offload" * offload
            chosen[name] = places.within(forecast, budget, True, offload)
        names = [*ROWS, *chosen]
        room = planned.room(memory or 0)
        if memory is not None and (best := places.choose(forecast, room)) is not None:
            chosen[AUTO] = best
            places.warn_of_waiting(forecast, room, best)
        rows = planned.policies + tuple(forecast.figures(blocks, name) for name, blocks in chosen.items())
    largest = {} if memory is None else search.longest(names, memory)
    return dataclasses.replace(planned, policies=rows, blocks=[{}, *chosen.values()][-1], largest=largest)


def without_weights(configuration: Configuration, dtype: torch.dtype, lora: int = 0) -> torch.nn.Module:
    """The model of a configuration, on the meta device, in a dtype except for parameters its class wants in float32.

    lora: the rank of LoRA weights. Then only these are trained. Raises FastacError if peft is not installed.
    """
    with torch.device("meta"):
        model = build(configuration, dtype)
        if lora:
            add_lora(model, lora)
    return model


@dataclasses.dataclass(eq=False)
class _Search:
    """Plans of one model for videos of several lengths."""

    configuration: Configuration
    video: Video
    training: Training
    budget: int | None
    offload: bool
    tell: Tell
    # Without inputs.
    model: FakeModel
    # Number of frames -> the forecast for a video of so many.
    forecasts: dict[int, Forecast] = dataclasses.field(default_factory=dict)

    @property
    def step(self) -> int:
        """The number of frames between two lengths that the model takes."""
        return self.configuration.default.compression.frames * self.configuration.patch[0]

    def forecast(self, frames: int) -> Forecast:
        """The forecast for a video of so many frames. Raises FastacError if the model or its ranks refuse so many."""
        if frames not in self.forecasts:
            part = self._part(frames)
            split = Split(self.training.context_parallel, part.tokens(self.configuration.patch))
            with_inputs = self.model.with_inputs(self.configuration.inputs(part))
            self.tell(f"simulating {self.configuration.name} on {frames} frames")
            self.forecasts[frames] = Forecast(with_inputs, self.training.optimizer, self.training.gpus, split)
        return self.forecasts[frames]

    def _part(self, frames: int) -> Video:
        """What one rank has of a video of so many frames. Raises FastacError if the model or its ranks refuse it."""
        video, ranks = dataclasses.replace(self.video, frames=frames), self.training.context_parallel
        with torch_private.fake_mode():
            self.configuration.inputs(video)  # raises if the whole video does not fit the model
            part = self.configuration.part(video, ranks) if ranks > 1 else video
        tokens = part.tokens(self.configuration.patch)
        if ranks > 1 and tokens <= part.text_tokens:
            raise FastacError(
                f"plan: with {ranks} context parallel ranks each rank has {tokens} video tokens ({frames} "
                f"frames), and the text has {part.text_tokens}. The plan tells video from text attention by the number "
                f"of tokens, so a rank needs more video tokens than text tokens. Plan a larger video, or fewer ranks."
            )
        return part

    def longest(self, names: Collection[str], memory: int) -> dict[str, int]:
        """Policy -> the most frames with which a step fits a memory, and which the model takes; 0 for none."""
        self.tell("longest videos")
        lines: dict[str, int] = {}
        near = far = self.video.frames
        longest = 2 * far + self.step
        # The line has to end at the longest: offload leaves small storages where they are, which shorter videos have.
        while (most := self._most(min(longest, FARTHEST * far + self.step))) > far:
            far = most
            found = {name: self._on_line(policy, memory, near, far) for name, policy in ROWS.items()}
            lines = {name: frames for name, frames in found.items() if frames is not None}
            longest = max([far, *lines.values()])
            if not lines and self._fits(far, "full, offload", memory):
                near, longest = far, 2 * far + self.step  # a line may begin later
        # A budget chooses outputs by their FLOPs. Those of attention grow faster than tokens: they are on no line.
        others = {name: self._most(far, name, memory) for name in names if name not in lines}
        # A model that takes a video takes shorter ones.
        return {name: others[name] if name in others else self._split(min(lines[name], far)) for name in names}

    def _on_line(self, policy: Policy, memory: int, start: int, far: int) -> int | None:
        """The most frames with which a step fits, by the simulations of `start` and `far` frames.

        All that a step allocates grows linearly with the tokens of a video. None if the two do not do the same.
        """
        near = self.forecasts[start]
        policies, steps = near.policies(policy), (near.step(policy), self.forecasts[far].step(policy))
        outlines = [([event.candidate for event in step.events], step.saved(policies).keys()) for step in steps]
        if outlines[0] != outlines[1]:
            return None
        alive, longer = (step.alive(policies, near.gradient_shards) for step in steps)
        growth, room = longer - alive, memory - near.states.total - alive
        # A moment that does not grow counts if it does not fit.
        more = (room * (far - start) // growth.clip(1))[(growth > 0) | (room < 0)].min()
        return start + int(more) if more >= 0 or start == self.video.frames else None

    def _most(self, frames: int, name: str = "full", memory: int = sys.maxsize) -> int:
        """The most frames up to so many with which a policy fits, and which the model takes; 0 for none."""
        fits = functools.partial(self._fits, name=name, memory=memory)
        if not fits(frames):
            frames -= self.step * bisect.bisect_left(range(frames, 0, -self.step), True, 1, key=fits)
        return self._split(frames)

    def _fits(self, frames: int, name: str, memory: int) -> bool:
        """Whether a policy fits on so many frames, or as many as ranks can split."""
        frames = self._split(frames)
        try:
            forecast = self.forecast(frames)
            policy = ROWS.get(name) or places.within(forecast, self.budget or 0, offload=self.offload, warns=False)
            return forecast.peak(policy) <= memory
        except (FastacError, *BREAKS):
            return frames < self.video.frames  # it is too short, and else too long

    def _split(self, frames: int) -> int:
        """The most frames up to so many that the model's patches divide, and ranks; 0 for none."""
        for length in range(frames - (frames - self.video.frames) % self.step, 0, -self.step):
            with contextlib.suppress(FastacError, *BREAKS):
                self._part(length)
                return length
        return 0
