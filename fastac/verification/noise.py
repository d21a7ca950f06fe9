"""Tells what a policy changes from noise: kernels that add up in any order give other numbers in every run.

If two runs of one step differ, the step is run with torch's deterministic kernels, if its ops have some. If not, the
noise is measured. A run is judged by its distance from one run of the reference: for each output and gradient, the norm
of the difference, relative to the norm of the tensor. A change that the policy makes is there in all of its runs, and
noise is not. So a result is wrong if all runs of the policy are further from that run than `FACTOR` times every other
run of the reference. While a result looks wrong, both run again, since a few runs may be equal by chance.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping

import torch

Tensors = Mapping[str, torch.Tensor | None]

FACTOR = 1.5
"""Correct runs pass with 1. The rest allows for noise of recompute itself, which a forward kernel may have."""

FEWEST, MOST = 4, 12
"""Runs of the reference that noise is measured in. With 12, none of 1,000 verifications is a false alarm
(`pytest -m soak tests/verification/test_noise.py`)."""

MOST_EQUAL = 8
"""Runs of the reference after which a difference is real if they are all equal."""


class Runs:
    """Distances of runs of a step from one run of the reference.

    Args:
        reference: outputs and gradients of that run, by name; None if a parameter has no gradient.
    """

    def __init__(self, reference: Tensors) -> None:
        self.reference = reference
        self.count = 1
        self.noise = dict.fromkeys(reference, 0.0)
        """The largest distance of another run of the reference."""
        self.nearest: dict[str, dict[str, float]] = {}
        """By the name of what was run ("first", "later"), the smallest distance of each result."""
        self.different: dict[str, float] = {}
        """The largest distance of each result that was not bitwise equal in some judged run."""
        self.factor, self.least = FACTOR, dict.fromkeys(reference, 0.0)
        """A result is wrong beyond `factor` times its noise, or times `least` if its noise is smaller."""

    def add_reference(self, tensors: Tensors) -> None:
        """Add another run of the reference."""
        self.count += 1
        for name, distance in distances(self.reference, tensors).items():
            self.noise[name] = max(self.noise[name], distance)

    def add(self, what: str, tensors: Tensors) -> dict[str, float]:
        """Add a run that is judged. Returns its distances."""
        measured = distances(self.reference, tensors)
        nearest = self.nearest.setdefault(what, dict(measured))
        for name, distance in measured.items():
            # The nearest run decides: a change that the policy makes is there in all of its runs, and noise is not.
            nearest[name] = min(nearest[name], distance)
            if distance:
                self.different[name] = max(self.different.get(name, 0.0), distance)
        return measured

    @property
    def is_noisy(self) -> bool:
        """Whether runs of the reference differ."""
        return any(self.noise.values())

    def broken(self, what: str | None = None) -> list[str]:
        """Names of results that are wrong in all runs of `what`; by default, of anything that was run."""
        # Only a first step is observed. A fault of first steps and a fault of later ones are both errors.
        judged = self.nearest.values() if what is None else [self.nearest[what]]
        return [name for name in self.reference if any(self._is_wrong(name, nearest[name]) for nearest in judged)]

    def _is_wrong(self, name: str, distance: float) -> bool:
        allowed = self.factor * max(self.noise[name], self.least[name])
        # An infinite noise means that the reference itself lacks the result at times: no run can be judged by it.
        return distance > allowed or math.inf in (distance, allowed)

    def may_change(self) -> bool:
        """Whether more runs may clear what is broken."""
        measured = [self.noise, *self.nearest.values()]
        # A result that is missing or NaN at times is not rounding noise: more runs must not clear it.
        is_finite = not any(math.inf in of_results.values() for of_results in measured)
        return is_finite and self.count < (MOST if self.is_noisy else MOST_EQUAL)

    def allow_compilation(self) -> None:
        """Allow every result the median change of compilation: runs of the reference were compiled, and one was not."""
        changed = sorted(filter(None, self.noise.values()))
        median = changed[len(changed) // 2] if changed else 0.0
        # The noise comes from a single run in another graph, which says little about how far other graphs are.
        self.factor = 2 * FACTOR
        for name, tensor in self.reference.items():
            dtype = torch.int64 if tensor is None else tensor.dtype
            # The median is 0 if compiling the reference changed nothing. The policy's graph may still round otherwise.
            self.least[name] = max(median, torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)


def distances(expected: Tensors, actual: Tensors) -> dict[str, float]:
    """Distance of each output and gradient: 0 if bitwise equal, infinite if only one of two is missing or NaN."""
    return {name: _distance(tensor, actual.get(name)) for name, tensor in expected.items()}


def _distance(expected: torch.Tensor | None, actual: torch.Tensor | None) -> float:
    if expected is None or actual is None:
        return 0.0 if expected is actual else math.inf
    # A gradient may be NaN without checkpointing, too. A NaN that is only on one side is a fault.
    if expected.shape != actual.shape or not torch.equal(expected.isnan(), actual.isnan()):
        return math.inf
    # torch.equal says that NaN differs from itself.
    expected, actual = expected.nan_to_num(), actual.nan_to_num()
    if torch.equal(expected, actual):
        return 0.0
    # In bf16 the difference would be rounded itself, and torch does not subtract booleans.
    expected, actual = expected.double(), actual.double()
    return _norm(expected - actual) / max(_norm(expected), _norm(actual))


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Run torch's deterministic algorithms inside: an op that has none raises. Afterwards the switch is as before.

    SDPA then takes flash attention instead of cuDNN's, whose backward is not deterministic. It does so only for
    "error", not for "warn" (pytorch/pytorch#182551 lists what each kernel does).
    """
    mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_deterministic_debug_mode("error")
    # torch fills new memory with NaN by default. That takes time, and nothing here reads it.
    _fill_memory(False)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        _fill_memory(fill)


def _fill_memory(fill: bool) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def two_runs(step: Callable[[], Tensors]) -> Runs:
    """Run a reference twice. step: runs it, and returns outputs and gradients."""
    runs = Runs(step())
    runs.add_reference(step())
    return runs


def deterministic_runs(step: Callable[[], Tensors]) -> tuple[Runs | None, str]:
    """Two equal runs of a reference with deterministic kernels; or None, and the error if a step raised.

    The step ran before, so the kernels are the reason: an op has no deterministic kernel, SDPA may use only cuDNN's, or
    the deterministic kernel needs more memory than there is.
    """
    try:
        with deterministic_kernels():
            runs = two_runs(step)
    except RuntimeError as error:
        # The rest of torch's message is about a switch that the user did not set.
        return None, str(error).partition(", but you set")[0].partition("\n")[0]
    return (None if runs.is_noisy else runs), ""
