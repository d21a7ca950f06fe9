"""Plans for a published model and a video, as `fastac plan` makes them: from a configuration, without weights."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping
from fractions import Fraction

import torch

from fastac.errors import FastacError
from fastac.models.published import Configuration, add_lora, build
from fastac.models.videos import Video
from fastac.planning.forecast import Forecast
from fastac.planning.plans import ROWS, WITHIN, Plan, make_plan
from fastac.planning.simulation import Split
from fastac.planning.subject import Subject, subject
from fastac.planning.timeline import Timeline
from fastac.planning.weights import BREAKS

logger = logging.getLogger("fastac")

Tell = Callable[[str], object]

FARTHEST = 8
"""How many times the steps of the longest video known so far a guess may be: a line may be flat."""


@dataclasses.dataclass(frozen=True)
class Training:
    """How a model is trained. lora: the rank of LoRA weights on attention, which are trained alone; 0 for all weights.

    optimizer: a name in forecast.OPTIMIZERS. gpus: among how many FSDP2 shards weights, gradients and the optimizer's.
    context_parallel: among how many of them the tokens of a video are split, by Ulysses.
    Raises FastacError for a number of GPUs that the context parallel degree does not divide.
    """

    lora: int = 0
    optimizer: str = "adamw"
    gpus: int = 1
    context_parallel: int = 1

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.context_parallel < 1 or self.gpus % self.context_parallel:
            raise FastacError(
                f"plan: a context parallel degree of {self.context_parallel} does not divide {self.gpus} GPUs. Both "
                f"are whole numbers from 1 on: --gpus 8 --context-parallel 4."
            )


def plan_video(
    configuration: Configuration,
    video: Video,
    training: Training = Training(),
    *,
    budget: int | None = None,
    memory: int | None = None,
    checkpointed: int | None = None,
    offload: bool = False,
    tell: Tell = lambda text: None,
) -> Plan:
    """Plan a step of a published model on a video.

    budget: bytes of saved outputs. memory: bytes of the device, for the longest video with which a step fits, and
    without a budget for the largest that fits. checkpointed: as in `plan`. offload: whether what blocks
    keep within the budget waits in host memory. tell: is given what is being done.
    Raises FastacError for a video that does not fit the model.
    """
    sizes = (
        f"{video.batch} x {video.frames} frames of {video.height} x {video.width}, {video.text_tokens} tokens of text"
    )
    how = f"LoRA of rank {training.lora}" if training.lora else "all weights"
    on = f", {training.gpus} GPUs (FSDP2)" if training.gpus > 1 else ""
    on += f", context parallel over {training.context_parallel}" if training.context_parallel > 1 else ""
    described = f"{sizes}, {str(video.dtype).removeprefix('torch.')}, {how}, {training.optimizer}{on}"
    try:
        search = _Search(configuration, video, training, offload, tell)
        forecast = search.forecast(video.frames)
        found = make_plan(forecast, configuration.name, described, budget, memory, checkpointed, offload)
    except FastacError:
        raise
    except BREAKS as error:
        # whatever a class of diffusers makes of figures that do not go together
        first = (str(error).splitlines() or [""])[0]
        raise FastacError(
            f"plan: {configuration.name} cannot be built as it is configured, or does not run on {described}: "
            f"{type(error).__name__}: {first}"
        ) from error
    if memory is None:
        return found
    largest = {
        one.policy: search.longest(one.policy, memory, budget)
        for one in found.policies
        if one.policy in ROWS or (one.policy.startswith(WITHIN) and budget is not None)
    }
    return dataclasses.replace(found, largest=largest)


def without_weights(configuration: Configuration, dtype: torch.dtype, lora: int = 0) -> torch.nn.Module:
    """The model of a configuration, on the meta device, in a dtype but for what its class keeps in float32.

    lora: the rank of LoRA weights, which are trained alone. Raises FastacError where peft is not installed.
    """
    with torch.device("meta"):
        model = build(configuration, dtype)
        if lora:
            add_lora(model, lora)
    return model


class _Search:
    """Plans of one model for videos of several lengths."""

    def __init__(
        self, configuration: Configuration, video: Video, training: Training, offload: bool, tell: Tell
    ) -> None:
        self.configuration, self.video, self.training, self.tell = configuration, video, training, tell
        self.offload = offload
        tell(f"building {configuration.name} without weights")
        self.model = without_weights(configuration, video.dtype, training.lora)
        self.forecasts: dict[int, Forecast] = {}
        self._subject: Subject | None = None

    def forecast(self, frames: int) -> Forecast:
        """For a video of so many frames. Raises FastacError where the model takes no such video."""
        if frames not in self.forecasts:
            part, split = self._part(frames)
            inputs = self.configuration.inputs(part)
            self.tell(f"simulating {self.configuration.name} on {frames} frames")
            self._subject = self._subject.given(inputs) if self._subject else subject(self.model, inputs)
            self.forecasts[frames] = Forecast(self._subject, self.training.optimizer, self.training.gpus, split)
        return self.forecasts[frames]

    def _part(self, frames: int) -> tuple[Video, Split]:
        """What one rank has of a video of so many frames."""
        video = dataclasses.replace(self.video, frames=frames)
        self.configuration.inputs(video)  # which says what does not fit
        ranks = self.training.context_parallel
        part = self.configuration.part(video, ranks) if ranks > 1 else video
        split = Split(ranks, part.tokens(self.configuration.patch))
        if ranks > 1 and split.tokens <= part.text_tokens:
            raise FastacError(
                f"plan: each of {ranks} context parallel ranks would have {split.tokens} tokens of {frames} frames, no "
                f"more than the {part.text_tokens} of the text, from which the plan tells them by their number. Plan "
                f"a larger video, or fewer ranks."
            )
        return part, split

    def _peak(self, frames: int, policy: str, limit: int | None) -> int | None:
        """The peak of a policy on so many frames; None where the model refuses them."""
        try:
            forecast = self.forecast(frames)
            return forecast.peak(ROWS[policy] if policy in ROWS else forecast.within(limit or 0, offload=self.offload))
        except (FastacError, *BREAKS) as error:
            logger.debug("%s refuses %d frames: %s", self.configuration.name, frames, error)
            return None

    def _simulated(self, policy: str) -> dict[int, Timeline]:
        """The steps that were simulated, which a policy's peak is read from, by the frames."""
        which = "plain" if policy == "none" else "full"
        return {frames: vars(found)[which] for frames, found in self.forecasts.items() if which in vars(found)}

    def _peak_on_line(self, frames: int, policy: str, limit: int | None) -> int | None:
        """The peak without another simulation, from two that did the same; simulated where there are none."""
        steps = self._simulated(policy)
        if len(steps) < 2 or frames > FARTHEST * max(steps) or policy.startswith(WITHIN):  # which FLOPs choose
            return self._peak(frames, policy, limit)
        near, far = sorted(steps, key=lambda at: abs(at - frames))[:2]
        step = steps[near].on_line(steps[far], Fraction(frames - near, far - near))
        if step is None:
            return self._peak(frames, policy, limit)
        try:
            self._part(frames)
        except FastacError:
            return None
        forecast = copy.copy(self.forecasts[near])
        vars(forecast)["plain" if policy == "none" else "full"] = step
        return forecast.peak(ROWS[policy])

    def _step(self) -> int:
        """By how many frames a video that the model takes may be longer."""
        compression = self.configuration.compression.frames
        for step in range(compression, 8 * compression + 1, compression):
            try:
                self._part(self.video.frames + step)
            except FastacError:
                continue
            return step
        raise FastacError(f"plan: found no video longer than {self.video.frames} frames for {self.configuration.name}")

    def longest(self, policy: str, memory: int, limit: int | None) -> int:
        """The most frames with which a step fits a memory, and which the model takes; 0 for none."""
        self.tell(f"longest video under {policy}")
        step = self._step()
        first = self.video.frames % step or step

        def longest_by(peak: Callable[[int, str, int | None], int | None]) -> int:
            start = (self.video.frames - first) // step
            steps = most_steps(lambda steps: peak(first + steps * step, policy, limit), memory, start)
            return 0 if steps < 0 else first + steps * step

        guess = longest_by(self._peak_on_line)
        if guess > max(self._simulated(policy)) and self._peak(guess, policy, limit) is None:
            return longest_by(self._peak)  # the model itself refuses it, which only a simulation tells
        return guess


def most_steps(peak: Callable[[int], int | None], memory: int, start: int) -> int:
    """The most steps whose peak fits a memory; -1 for none.

    Bytes are nearly proportional to steps: most guesses are on the line through two known peaks. peak: of so many
    steps, None where they are refused, few of them or many. start: steps that are not refused.
    """
    peaks: dict[int, int] = {}
    refused: set[int] = set()
    guess = start
    while True:
        size = peak(guess)
        if size is None:
            refused.add(guess)
        else:
            peaks[guess] = size
        fitting = [steps for steps, size in peaks.items() if size <= memory]
        low = max([-1, *fitting, *(steps for steps in refused if steps < start)])
        too_many = peaks.keys() - set(fitting) | {steps for steps in refused if steps > start}
        high = min(too_many, default=FARTHEST * (max(peaks) + 1) + 1)
        if high - low <= 1:
            return max(fitting, default=-1)
        # Where the peak moves to another moment, or steps are refused, there is no line.
        on_line = (len(peaks) + len(refused)) % 3 and not (too_many and refused)
        guess = _on_line(peaks, memory) if on_line else (low + high) // 2
        guess = min(max(guess, low + 1), high - 1)


def _on_line(peaks: Mapping[int, int], memory: int) -> int:
    """Where the line through the two known peaks that are nearest to the memory meets it."""
    if len(peaks) == 1:
        ((at, peak),) = peaks.items()
        return 2 * at + 1 if peak <= memory else at // 2
    (a, at_a), (b, at_b) = sorted(peaks.items(), key=lambda one: abs(one[1] - memory))[:2]
    slope = max(1, (at_b - at_a) / (b - a))
    return int(a + (memory - at_a) / slope)
