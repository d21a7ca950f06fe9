"""Tells what a policy changes from noise: kernels that add up in any order give other numbers in every run.

If two runs of one step differ, it is run with torch's deterministic kernels, where there are some. Else the noise is
measured. A run is judged by its distance from one run of the reference: for each output and gradient, the norm of the
difference, relative to the norm of the tensor. What a policy changes is there in all of its runs, and noise is not. So
a result is wrong if all runs of the policy are further from that run than `FACTOR` times every other run of the
reference. While a result looks wrong, both run again: tensors that are equal in a few runs by chance raise no alarm.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping

import torch

Tensors = Mapping[str, torch.Tensor | None]

FACTOR = 1.5
"""Healthy runs pass with 1: this allows for a recompute with a noise of its own, as a forward kernel may have."""

FEWEST, MOST = 4, 12
"""Runs of the reference that noise is measured in. With 12, none of 1,000 verifications is a false alarm
(`pytest -m soak tests/verification/test_noise.py`)."""

MOST_EQUAL = 8
"""Runs of the reference after which a difference is real if they are all equal."""


class Runs:
    """Distances of runs of a step from one run of the reference.

    Args:
        reference: outputs and gradients of that run, by name; None for a gradient that there is not.
    """

    def __init__(self, reference: Tensors) -> None:
        self.reference = reference
        self.count = 1
        self.noise = dict.fromkeys(reference, 0.0)
        """The largest distance of another run of the reference."""
        self.nearest: dict[str, dict[str, float]] = {}
        """By what was run: the smallest distance of its runs."""
        self.different: dict[str, float] = {}
        """The largest distance of what was not bitwise equal in some run that is judged."""
        self.factor, self.least = FACTOR, dict.fromkeys(reference, 0.0)
        """By how much more than the noise, or than the least that counts as noise, a wrong result differs."""

    def add_reference(self, tensors: Tensors) -> None:
        """Add another run of the reference."""
        self.count += 1
        for name, found in distances(self.reference, tensors).items():
            self.noise[name] = max(self.noise[name], found)

    def add(self, what: str, tensors: Tensors) -> dict[str, float]:
        """Add a run that is judged. Returns its distances."""
        found = distances(self.reference, tensors)
        nearest = self.nearest.setdefault(what, dict(found))
        for name, one in found.items():
            nearest[name] = min(nearest[name], one)
            if one:
                self.different[name] = max(self.different.get(name, 0.0), one)
        return found

    @property
    def is_noisy(self) -> bool:
        """Whether runs of the reference differ."""
        return any(self.noise.values())

    def broken(self, what: str | None = None) -> list[str]:
        """Names of results that are wrong in all runs of something, by default of anything that was run."""
        judged = self.nearest.values() if what is None else [self.nearest[what]]
        return [name for name in self.reference if any(self._is_wrong(name, one[name]) for one in judged)]

    def _is_wrong(self, name: str, distance: float) -> bool:
        allowed = self.factor * max(self.noise[name], self.least[name])
        return distance > allowed or math.inf in (distance, allowed)  # or the reference itself lacks a result at times

    def may_change(self) -> bool:
        """Whether more runs may clear what is broken."""
        found = [*self.noise.values(), *(one for nearest in self.nearest.values() for one in nearest.values())]
        return math.inf not in found and self.count < (MOST if self.is_noisy else MOST_EQUAL)

    def allow_compilation(self) -> None:
        """Some runs of the reference were compiled and some not: allow every result what that changes in the median."""
        changed = sorted(filter(None, self.noise.values()))
        median = changed[len(changed) // 2] if changed else 0.0
        self.factor = 2 * FACTOR  # one run in another graph shows little of how far others are
        for name, tensor in self.reference.items():
            dtype = torch.int64 if tensor is None else tensor.dtype
            self.least[name] = max(median, torch.finfo(dtype).eps if dtype.is_floating_point else 0.0)


def distances(expected: Tensors, found: Tensors) -> dict[str, float]:
    """Distance of each output and gradient: 0 if bitwise equal, infinite if one is missing or NaN elsewhere."""
    return {name: _distance(one, found.get(name)) for name, one in expected.items()}


def _distance(expected: torch.Tensor | None, found: torch.Tensor | None) -> float:
    if expected is None or found is None:
        return 0.0 if expected is found else math.inf
    if expected.shape != found.shape or not torch.equal(expected.isnan(), found.isnan()):
        return math.inf
    one, other = expected.nan_to_num(), found.nan_to_num()
    if torch.equal(one, other):
        return 0.0
    one, other = one.double(), other.double()
    return _norm(one - other) / max(_norm(one), _norm(other))


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))


@contextlib.contextmanager
def deterministic_kernels() -> Iterator[None]:
    """Run torch's deterministic algorithms inside: an op that has none raises. Afterwards the switch is as before.

    SDPA takes flash attention for cuDNN's, whose backward is not deterministic. Only "error" does that, not "warn".
    """
    mode = torch.get_deterministic_debug_mode()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.set_deterministic_debug_mode("error")
    _fill_memory(False)  # it takes time, and nothing here reads such memory
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        _fill_memory(fill)


def _fill_memory(fill: bool) -> None:
    torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def two_runs(step: Callable[[], Tensors]) -> Runs:
    """Two runs of a reference. step: returns the outputs and gradients of one."""
    runs = Runs(step())
    runs.add_reference(step())
    return runs


def deterministic_runs(step: Callable[[], Tensors]) -> tuple[Runs | None, str]:
    """Two runs of a reference with deterministic kernels, which are equal; else None, and why a step raised.

    The step ran before: an op without such a kernel raises, SDPA raises if it may use cuDNN's kernel only, and another
    kernel may need more memory than there is.
    """
    try:
        with deterministic_kernels():
            runs = two_runs(step)
    except RuntimeError as error:
        return None, str(error).partition(", but you set")[0].partition("\n")[0]
    return (None if runs.is_noisy else runs), ""
