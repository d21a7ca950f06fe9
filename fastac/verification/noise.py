"""Tells what a policy changes from noise: kernels that add up in any order give other numbers in every run.

If two runs of one step differ, the step is run with torch's deterministic kernels, if its ops have some. If not, the
noise is measured. A run is judged by its distance from one run of the reference: for each output and gradient, the norm
of the difference, relative to the norm of the tensor. A change that the policy makes is there in all of its runs, and
noise is not. So a result is wrong if all runs of the policy are further from that run than `FACTOR` times every other
run of the reference. While a result looks wrong, both run again, since a few runs may be equal by chance.

A race, for example, is a fault of some runs only. If all runs of the reference are equal, a single run of the policy
proves a fault if it differs by more than rounding.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch

from fastac.engine.fingerprints import tolerance
from fastac.errors import FastacError

Tensors = Mapping[str, torch.Tensor | None]

FACTOR = 1.5
"""Correct runs pass with 1. The rest allows for noise of recompute itself, which a forward kernel may have."""

FEWEST, MOST = 4, 12
"""Runs of the reference that noise is measured in. With 12, at most 3 of 1,000 right steps are false alarms
(`pytest -m soak tests/verification/test_noise.py`)."""

ROUNDING = tolerance(torch.bfloat16)
"""The most that rounding changes, relative to the norm. Kernels may round to bf16 whatever the dtype of a result is."""

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
        self.farthest: dict[str, dict[str, float]] = {}
        """The same, the largest distance."""
        self._norms: dict[str, float] = {}  # of results of the reference, as far as they were needed
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
        nearest, farthest = (found.setdefault(what, dict(measured)) for found in (self.nearest, self.farthest))
        for name, distance in measured.items():
            # The nearest run decides: a change that the policy makes is there in all of its runs, and noise is not.
            nearest[name], farthest[name] = min(nearest[name], distance), max(farthest[name], distance)
        return measured

    @property
    def different(self) -> dict[str, float]:
        """The largest distance of each result that was not bitwise equal in some judged run."""
        return _largest(self.farthest.values())

    @property
    def is_noisy(self) -> bool:
        """Whether runs of the reference differ."""
        return any(self.noise.values())

    def broken(self, what: str | None = None) -> list[str]:
        """Names of results that are wrong in all runs of `what`; by default, of anything that was run.

        If all runs of the reference are equal, a result is also wrong if a single run has it in `gross`.
        """
        # Only a first step is observed. A fault of first steps and a fault of later ones are both errors.
        judged = self.nearest.values() if what is None else [self.nearest[what]]
        sporadic = set() if self.is_noisy else self.gross(what)
        return [
            name
            for name in self.reference
            if name in sporadic or any(self._is_wrong(name, nearest[name]) for nearest in judged)
        ]

    def gross(self, what: str | None = None) -> set[str]:
        """Names of results that a run has wrong by more than any rounding, if all that differs does so together."""
        judged = self.farthest.values() if what is None else [self.farthest[what]]
        different = _largest(judged)
        # A gradient that cancels, as that of a bias of keys, is nothing but rounding. Its norm is small among others.
        self._norms |= {name: _norm_of(self.reference[name]) for name in different if name not in self._norms}
        norms = {name: self._norms[name] for name in different}
        together = math.hypot(*(distance * norms[name] for name, distance in different.items()))
        if not together > ROUNDING * math.hypot(*norms.values()):
            return set()
        return {name for name, distance in different.items() if distance > ROUNDING}

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


def _largest(found: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """The largest distance of each result that has one above 0."""
    largest: dict[str, float] = {}
    for distances_of_run in found:
        for name, distance in distances_of_run.items():
            if distance:
                largest[name] = max(distance, largest.get(name, 0.0))
    return largest


def _norm_of(tensor: torch.Tensor | None) -> float:
    return 1.0 if tensor is None else _norm(_plain(tensor).nan_to_num(0, 0, 0).double())


def distances(expected: Tensors, actual: Tensors) -> dict[str, float]:
    """Distance of each output and gradient: 0 if bitwise equal, infinite if only one is missing, NaN or infinite."""
    return {name: _distance(tensor, actual.get(name)) for name, tensor in expected.items()}


def _distance(expected: torch.Tensor | None, actual: torch.Tensor | None) -> float:
    if expected is None or actual is None:
        return 0.0 if expected is actual else math.inf
    expected, actual = _plain(expected), _plain(actual)
    if torch.equal(expected, actual):
        return 0.0
    # A gradient may be NaN without checkpointing, too. A NaN that is only on one side is a fault. So with infinity,
    # and with another shape.
    if not torch.equal(_special(expected), _special(actual)):
        return math.inf
    expected, actual = expected.nan_to_num(0, 0, 0), actual.nan_to_num(0, 0, 0)
    if torch.equal(expected, actual):
        return 0.0
    # In bf16 the difference would be rounded itself, and torch does not subtract booleans.
    expected, actual = expected.double(), actual.double()
    # Large whole numbers that differ may be equal as doubles.
    return max(_norm(expected - actual) / max(_norm(expected), _norm(actual)), torch.finfo(torch.float64).eps)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor as dense real numbers."""
    dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
    return torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense


def _special(tensor: torch.Tensor) -> torch.Tensor:
    """Where a tensor is infinite, with its sign, or NaN."""
    return torch.stack([tensor.isnan(), tensor.isinf(), tensor.isinf() & (tensor < 0)])


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
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
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
    except FastacError:
        raise
    except RuntimeError as error:
        # The rest of torch's message is about a switch that the user did not set.
        return None, str(error).partition(", but you set")[0].partition("\n")[0]
    return (None if runs.is_noisy else runs), ""
