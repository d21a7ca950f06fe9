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
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import torch

from fastac.engine.fingerprints import tolerance
from fastac.errors import FastacError
from fastac.verification.ranks import Group
from fastac.verification.step import Step

Tensors = Mapping[str, torch.Tensor | None]

RunStep = Callable[[bool], Step]
"""Runs a step. Its argument: whether attention kernels are counted."""

FACTOR = 1.5
"""Correct runs pass with 1. The rest allows for noise of recompute itself, which a forward kernel may have."""

FEWEST, MOST = 4, 12
"""Runs of the reference that noise is measured in. With 12, at most 3 of 1,000 right steps are false alarms
(`pytest -m soak tests/verification/test_noise.py`)."""

ROUNDING = tolerance(torch.bfloat16)
"""The most that rounding changes, relative to the norm. Kernels may round to bf16 whatever the dtype of a result is."""

MOST_EQUAL = 8
"""Runs of the reference after which a difference is real if they are all equal."""


@dataclasses.dataclass(eq=False)
class ComparedSteps:
    """Runs of a reference and of a policy, compared when this is made.

    Each rank compares its own results, so ranks would differ in whether they need another step. If one rank needs a
    step, all take it, because they may communicate in it.

    Args:
        group: the ranks.
        reference_step: runs a step of the reference.
        policy_step: runs a step of the policy.
        forget: makes the next region of each kind a first one, which is observed.
        with_buffers: whether written buffers are compared as well.
    """

    group: Group
    reference_step: RunStep
    policy_step: RunStep
    forget: Callable[[], None] = lambda: None
    with_buffers: bool = True

    def __post_init__(self) -> None:
        self.expected = self.reference_step(True)
        """The run of the reference that all others are compared with."""
        if self.group.any(bool(self.expected.graphs)):
            # The first step compiled, and the profiler counted the calls that dynamo made while it traced.
            self.expected = self.reference_step(True)
        self.kernels, self.is_deterministic, self.remark = self.expected.kernels, False, ""
        self.runs = self._runs_of(self.expected)
        self.later = self._add_policy(True)
        """The step of the policy from which the figures are taken."""
        # Every rank takes part in both exchanges, whatever it found itself: the others would wait for it.
        differs = self.group.any(bool(self.runs.different))
        self.is_compiled = self.group.any(bool(self.runs.different) and self.later.in_graph)
        if self.is_compiled:
            self._repeat_compiled()
        elif differs:
            self._repeat()

    def _runs_of(self, expected: Step) -> Runs:
        """Runs that are compared with a step, which stays for its figures and no longer holds its tensors."""
        tensors, expected.tensors = expected.tensors, {}
        return Runs({name: tensors[name] for name in tensors if self.with_buffers or not name.startswith("buffer ")})

    def _add_policy(self, is_counted: bool = False) -> Step:
        """Add two steps of the policy, and return the second one. Both must be exact.

        The first one is observed, and it compiles what is compiled. All later steps of training are like the second.
        """
        self.forget()
        # Only the second step is kept, for its figures. The memory of this one is free at once.
        self.runs.add("first", self.policy_step(is_counted).tensors)
        later = self.policy_step(is_counted)
        self.runs.add("later", later.tensors)
        later.tensors = {}
        return later

    def _add_reference(self) -> None:
        self.runs.add_reference(self.reference_step(False).tensors)

    def _repeat(self) -> None:
        """Results differ: tell what the policy changed from noise.

        If deterministic kernels make the reference equal itself, compare with those. If results still differ, run the
        reference `FEWEST` times, then both until nothing looks wrong or more runs cannot change that.
        """
        # Deterministic kernels are others than those of training. What is more than rounding may be a fault of these.
        if self.group.any(bool(self.runs.gross())):
            self._measure_noise()
            if self.group.any(bool(self.runs.broken())):
                self.remark = "The differences are larger than rounding, so training's own kernels were compared."
                return
        equal = self._deterministic_runs()
        self.is_deterministic = equal is not None
        with deterministic_kernels() if self.is_deterministic else contextlib.nullcontext():
            if equal is not None:
                self.runs = equal
                self._add_policy()
            if self.group.any(bool(self.runs.different)):
                self._measure_noise()

    def _measure_noise(self) -> None:
        """Run the reference until its noise is known, then both until nothing looks wrong or that cannot change."""
        while self.group.any(self.runs.count < FEWEST or (bool(self.runs.broken()) and self.runs.may_change())):
            self._add_reference()
            if self.runs.count > FEWEST:
                self._add_policy()

    def _deterministic_runs(self) -> Runs | None:
        """Two equal runs of the reference with deterministic kernels; or None, and `remark` says why."""
        if not self.group.is_one_process:
            # An op without a deterministic kernel raises in the middle of a backward. DDP and FSDP would stay in it.
            return None
        try:
            with deterministic_kernels():
                runs = self._runs_of(self.reference_step(False))
                again = self.reference_step(True)
        except FastacError:
            raise
        except RuntimeError as error:
            # The step ran before, so the kernels are the reason: an op has no deterministic kernel, SDPA may use only
            # cuDNN's, or the deterministic kernel needs more memory than there is.
            self.remark = f"No deterministic kernels: {error}".partition("\n")[0]
            # The rest of torch's message is about a switch that the user did not set.
            self.remark = self.remark.partition(", but you set")[0]
            # torch refuses cuBLAS without this variable; pytorch/pytorch#161749 is about removing the check.
            if "CUBLAS_WORKSPACE_CONFIG" in self.remark:
                self.remark = "For a bitwise comparison start Python with CUBLAS_WORKSPACE_CONFIG=:4096:8"
            return None
        runs.add_reference(again.tensors)
        if runs.is_noisy:
            return None
        # SDPA may take flash attention for cuDNN's here. The result names the kernels that were compared.
        self.kernels = again.kernels
        return runs

    def _repeat_compiled(self) -> None:
        """`_repeat` for a model that is compiled as a whole: what compiling the reference changes is noise as well.

        The policy's graph may change other results than the reference's graph did, by as much. So every result is
        allowed the median change. All runs of the reference come first, since going back and forth would compile each
        time. All steps of the policy run one graph.
        """
        # An eager run shows by how much compilation changes the reference.
        with torch.compiler.set_stance("force_eager"):
            self._add_reference()
        while self.group.any(self.runs.count < FEWEST):
            self._add_reference()
        self.runs.allow_compilation()
        while self.group.any(bool(self.runs.broken()) and self.runs.may_change()):
            self._add_reference()
        for _ in range(MOST_EQUAL):
            if not self.group.any(bool(self.runs.broken())):
                break
            tensors = self.policy_step(False).tensors
            # An observed step and a later one run the same graph, so each run counts for both.
            for what in ("first", "later"):
                self.runs.add(what, tensors)


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

    def add(self, what: str, tensors: Tensors) -> None:
        """Add a run that is judged."""
        measured = distances(self.reference, tensors)
        # The nearest run decides: a change that the policy makes is there in all of its runs, and noise is not.
        nearest = self.nearest.setdefault(what, measured)
        self.nearest[what] = {name: min(nearest[name], distance) for name, distance in measured.items()}
        for name, distance in measured.items():
            if distance:
                self.different[name] = max(distance, self.different.get(name, 0.0))

    @property
    def is_noisy(self) -> bool:
        """Whether runs of the reference differ."""
        return any(self.noise.values())

    def broken(self) -> list[str]:
        """Names of results that are wrong in all first or in all later runs.

        If all runs of the reference are equal, a result is also wrong if a single run has it in `gross`.
        """
        # Only a first step is observed. A fault of first steps and a fault of later ones are both errors.
        sporadic = set() if self.is_noisy else self.gross()
        return [
            name
            for name in self.reference
            if name in sporadic or any(self._is_wrong(name, nearest[name]) for nearest in self.nearest.values())
        ]

    def gross(self) -> set[str]:
        """Names of results that a run has wrong by more than any rounding, if all that differs does so together."""
        # A gradient that cancels, as that of a bias of keys, is nothing but rounding. Its norm is small among others.
        norms = {name: _norm_of(self.reference[name]) for name in self.different}
        together = math.hypot(*(distance * norms[name] for name, distance in self.different.items()))
        if not together > ROUNDING * math.hypot(*norms.values()):
            return set()
        return {name for name, distance in self.different.items() if distance > ROUNDING}

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
