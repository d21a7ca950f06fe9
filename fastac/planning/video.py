"""Plans for a published model and a video, as `fastac plan` makes them: from a configuration, without weights."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable

import torch

from fastac.engine import torch_private
from fastac.engine.beginning import generators_preserved
from fastac.errors import FastacError, readable_bytes
from fastac.models.published import Configuration, add_lora, build
from fastac.models.videos import Video
from fastac.planning.fake_model import FakeModel, fake_model
from fastac.planning.fake_weights import BREAKS
from fastac.planning.forecast import ROWS, Forecast
from fastac.planning.plans import (
    AUTO,
    GBPS,
    HOST,
    TFLOPS,
    WITHIN,
    Plan,
    explained,
    plan_of,
    policies_in_room,
    policies_within,
)
from fastac.planning.simulation import Split

logger = logging.getLogger("fastac")

Tell = Callable[[str], object]


FARTHEST = 8
"""A guess may be so many times as long as the longest simulated video: models refuse some lengths."""


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
        planned = dataclasses.replace(
            plan_of(forecast, configuration.name, described, checkpointed),
            budget=budget,
            memory=memory,
            host=host,
            gbps=gbps,
            tflops=tflops,
        )
        rows, blocks = list(planned.policies), planned.blocks
        if budget is not None:
            blocks = policies_within(forecast, budget, True, offload)
            rows.append(forecast.figures(blocks, WITHIN + readable_bytes(budget) + ", offload" * offload))
        if memory is not None and (best := policies_in_room(forecast, planned.room(memory))) is not None:
            blocks = best
            rows.append(forecast.figures(blocks, AUTO))
    names = [row.policy for row in rows if row.policy in ROWS or row.policy.startswith(WITHIN)]
    largest = {} if memory is None else {name: search.longest(name, memory) for name in names}
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
        return fake_model(
            without_weights(self.configuration, self.video.dtype, self.training.lora), (), device=self.training.device
        )

    def forecast(self, frames: int) -> Forecast:
        """The forecast for a video of so many frames. Raises FastacError if the model refuses so many."""
        if frames not in self.forecasts:
            part, split = self._part(frames)
            fake_model = self.fake_model
            self.tell(f"simulating {self.configuration.name} on {frames} frames")
            with_inputs = fake_model.with_inputs(self.configuration.inputs(part))
            self.forecasts[frames] = Forecast(with_inputs, self.training.optimizer, self.training.gpus, split)
        return self.forecasts[frames]

    def _part(self, frames: int) -> tuple[Video, Split]:
        """The part of a video of so many frames that one rank has. Raises FastacError."""
        video = dataclasses.replace(self.video, frames=frames)
        ranks = self.training.context_parallel
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
        return part, split

    @property
    def step(self) -> int:
        """The number of frames between two lengths that the model takes."""
        return self.configuration.default.compression.frames * self.configuration.patch[0]

    @functools.cached_property
    def far(self) -> int | None:
        """The frames of a video about twice as long; None if the model refuses it."""
        frames = self.video.frames + ((self.video.frames - 1) // self.step + 1) * self.step
        return None if self._peak(frames, "full") is None else frames

    def _peak(self, frames: int, policy: str) -> int | None:
        """The peak of a policy on so many frames; None if the model refuses them."""
        try:
            forecast = self.forecast(frames)
            return forecast.peak(ROWS.get(policy) or forecast.within(self.budget or 0, offload=self.offload))
        except (FastacError, *BREAKS) as error:
            logger.debug("%s refuses %d frames: %s", self.configuration.name, frames, error)
            return None

    def longest(self, policy: str, memory: int) -> int:
        """The most frames with which a step fits a memory, and which the model takes; 0 for none."""
        self.tell(f"longest video under {policy}")
        longest = self._longest_on_line(policy, memory)
        if longest == 0 or (longest is not None and self._peak(longest, "full") is not None):
            return longest
        # There is no line, or the model may refuse a video on it. Only simulations show where that begins.
        start = (self.video.frames - 1) // self.step
        first = self.video.frames - start * self.step
        steps = most_steps(lambda steps: self._peak(first + steps * self.step, policy), memory, start)
        return 0 if steps < 0 else first + steps * self.step

    def _longest_on_line(self, policy: str, memory: int) -> int | None:
        """The most frames with which a step fits, by two simulations; None if there is no line so far."""
        # A budget chooses outputs by their FLOPs. Those of attention grow faster than tokens: they are on no line.
        if policy not in ROWS or self.far is None:
            return None
        near, far = self.forecasts[self.video.frames], self.forecasts[self.far]
        policies, room = near.policies(ROWS[policy]), memory - near.states.total - near.wider
        steps = (self.far - self.video.frames) // self.step
        more = near.step(ROWS[policy]).spare_steps(far.step(ROWS[policy]), steps, policies, room, near.gpus)
        longest = None if more is None else max(0, self.video.frames + more * self.step)
        return None if longest is None or longest > FARTHEST * self.far else longest


def most_steps(peak: Callable[[int], int | None], memory: int, start: int) -> int:
    """The most steps whose peak fits a memory; -1 for none.

    Bytes are nearly proportional to steps: most guesses are on the line through two known peaks.

    peak: bytes of so many steps; None if they are refused, because they are too few or too many. start: a number of
    steps that is not refused.
    """
    peaks: dict[int, int | None] = {}
    low, high, guess = -1, None, start
    while True:
        size = peaks[guess] = peak(guess)
        # A refused guess below start is too short, and above start too long.
        if guess < start if size is None else size <= memory:
            low = guess
        else:
            high = guess
        accepted = {steps: size for steps, size in peaks.items() if size is not None}
        end = FARTHEST * (max(accepted) + 1) if high is None else high
        if end - low <= 1:
            return low if low in accepted else -1
        guess = 2 * low + 1 if high is None else (low + end) // 2  # twice as long is `far`, which is simulated
        # There is no line if a guess was refused, or if the peak moves to another moment: every third guess halves.
        if 1 < len(accepted) == len(peaks) and len(peaks) % 3:
            nearest, second = sorted(accepted, key=lambda steps: abs(accepted[steps] - memory))[:2]
            slope = max(1, (accepted[second] - accepted[nearest]) / (second - nearest))
            guess = min(max(int(nearest + (memory - accepted[nearest]) / slope), low + 1), end - 1)
