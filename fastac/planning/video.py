"""Plans for a published model and a video, as `fastac plan` makes them: from a configuration, without weights."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterable

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
from fastac.planning.plans import AUTO, GBPS, HOST, TFLOPS, WITHIN, Plan, explained, plan_of
from fastac.planning.simulation import Split

logger = logging.getLogger("fastac")

Tell = Callable[[str], object]

FARTHEST = 8
"""A video is tried that is about so many times longer than the longest simulated one: models refuse some lengths."""


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
    host: int = HOST,
    gbps: float = GBPS,
    tflops: float = TFLOPS,
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
        search = _Search(configuration, video, training, budget, offload, tell)
        forecast = search.forecast(video.frames)
        planned = plan_of(forecast, configuration.name, described, checkpointed)
        planned = dataclasses.replace(planned, budget=budget, memory=memory, host=host, gbps=gbps, tflops=tflops)
        rows, blocks = list(planned.policies), planned.blocks
        if budget is not None:
            blocks = places.within(forecast, budget, True, offload)
            rows.append(forecast.figures(blocks, WITHIN + readable_bytes(budget) + ", offload" * offload))
        if memory is not None and (best := places.choose(forecast, planned.room(memory))) is not None:
            blocks = best
            rows.append(forecast.figures(blocks, AUTO))
    names = [row.policy for row in rows if row.policy in ROWS or row.policy.startswith(WITHIN)]
    largest = {} if memory is None else search.longest(names, memory)
    return dataclasses.replace(planned, policies=tuple(rows), blocks=blocks, largest=largest)


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
    # Number of frames -> the forecast for a video of so many.
    forecasts: dict[int, Forecast] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def fake_model(self) -> FakeModel:
        """The model, without inputs."""
        self.tell(f"building {self.configuration.name} without weights")
        model = without_weights(self.configuration, self.video.dtype, self.training.lora)
        return fake_model(model, (), device=self.training.device)

    def forecast(self, frames: int) -> Forecast:
        """The forecast for a video of so many frames. Raises FastacError if the model or its ranks refuse so many."""
        if frames in self.forecasts:
            return self.forecasts[frames]
        video, ranks = dataclasses.replace(self.video, frames=frames), self.training.context_parallel
        with torch_private.fake_mode():
            self.configuration.inputs(video)  # raises if the whole video does not fit the model
            part = self.configuration.part(video, ranks) if ranks > 1 else video
        split = Split(ranks, part.tokens(self.configuration.patch))
        if ranks > 1 and split.tokens <= part.text_tokens:
            raise FastacError(
                f"plan: with {ranks} context parallel ranks each rank has {split.tokens} video tokens ({frames} "
                f"frames), and the text has {part.text_tokens}. The plan tells video from text attention by the number "
                f"of tokens, so a rank needs more video tokens than text tokens. Plan a larger video, or fewer ranks."
            )
        with_inputs = self.fake_model.with_inputs(self.configuration.inputs(part))
        self.tell(f"simulating {self.configuration.name} on {frames} frames")
        self.forecasts[frames] = Forecast(with_inputs, self.training.optimizer, self.training.gpus, split)
        return self.forecasts[frames]

    @property
    def step(self) -> int:
        """The number of frames between two lengths that the model takes."""
        return self.configuration.default.compression.frames * self.configuration.patch[0]

    def longest(self, names: Iterable[str], memory: int) -> dict[str, int]:
        """Policy -> the most frames with which a step fits a memory, and which the model takes; 0 for none."""
        self.tell("longest videos")
        lines: dict[str, int | None] = dict.fromkeys(names)
        near = far = self.video.frames
        most = self._most(self._longer(far), "full")
        # The line has to end at the longest: offload leaves small storages where they are, which shorter videos have.
        while most > far:
            far = most
            lines = {name: self._on_line(name, memory, near, far) for name in lines}
            if set(lines.values()) == {None} and self._fits(far, "full, offload", memory):
                near, longest = far, self._longer(far)  # a line may begin later
            else:
                longest = max(filter(None, lines.values()), default=far)
            most = self._most(max(near, min(longest, self._longer(far, FARTHEST))), "full")
        # A model that takes a video takes shorter ones.
        found = {
            name: self._most(most, name, memory) if frames is None else min(frames, most)
            for name, frames in lines.items()
        }
        if self.training.context_parallel > 1:  # but ranks cannot split each of them
            return {name: self._most(frames, "full") for name, frames in found.items()}
        return found

    def _longer(self, frames: int, times: int = 1) -> int:
        """A number of frames that is about so many times more."""
        return frames + times * ((frames - 1) // self.step + 1) * self.step

    def _on_line(self, policy: str, memory: int, start: int, far: int) -> int | None:
        """The most frames with which a step fits, by the simulations of `start` and `far` frames.

        All that a step allocates grows linearly with the tokens of a video. None if the two do not do the same.
        """
        # A budget chooses outputs by their FLOPs. Those of attention grow faster than tokens: they are on no line.
        if policy not in ROWS:
            return None
        near, row = self.forecasts[start], ROWS[policy]
        policies, steps = near.policies(row), (near.step(row), self.forecasts[far].step(row))
        outlines = [([event.candidate for event in step.events], step.saved(policies).keys()) for step in steps]
        if outlines[0] != outlines[1]:
            return None
        alive, longer = (step.alive(policies, near.gradient_shards) for step in steps)
        growth, room = longer - alive, memory - near.states.total - alive
        # A moment that does not grow counts if it does not fit.
        more = (room * (far - start) // growth.clip(1))[(growth > 0) | (room < 0)].min()
        longest = max(0, start + int(more) // self.step * self.step)
        return longest if longest >= start or start == self.video.frames else None

    def _most(self, frames: int, policy: str, memory: float = math.inf) -> int:
        """The most frames up to so many with which a policy fits, and which the model takes; 0 for none."""
        fits = functools.partial(self._fits, policy=policy, memory=memory)
        lengths = range(frames, 0, -self.step)
        for length in lengths[: self.training.context_parallel]:  # ranks can split one of so many
            if fits(length) and length in self.forecasts:
                return length
        frames -= self.step * bisect.bisect_left(lengths, True, key=fits)
        return frames if frames in self.forecasts else 0

    def _fits(self, frames: int, policy: str, memory: float) -> bool:
        """Whether a policy fits on so many frames."""
        try:
            forecast = self.forecast(frames)
            return (
                forecast.peak(ROWS.get(policy) or places.within(forecast, self.budget or 0, offload=self.offload))
                <= memory
            )
        except (FastacError, *BREAKS) as error:
            logger.debug("%s refuses %d frames: %s", self.configuration.name, frames, error)
            return frames < self.video.frames  # it is too short, and else too long
