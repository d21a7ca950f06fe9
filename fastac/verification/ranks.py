"""The steps of `verify`, of a reference and of a policy. All ranks take the same ones: they may communicate in them.

Whether another step is needed differs from rank to rank, since each compares its own results. So every decision is made
together: if one rank needs a step, all take it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from fastac.engine.ranks import Group
from fastac.verification.noise import FEWEST, MOST_EQUAL, Runs, Tensors, deterministic_kernels, deterministic_runs
from fastac.verification.step import Step


class Comparison:
    """Runs of a reference and of a policy.

    Args:
        group: the ranks.
        reference_step: runs a step of the reference. Its argument: whether attention kernels are counted.
        policy_step: runs a step of the policy.
        observe_anew: makes the next region of each kind the first.
        ignores_buffers: whether the buffers that the reference writes are not compared.
    """

    def __init__(
        self,
        group: Group,
        reference_step: Callable[[bool], Step],
        policy_step: Callable[[bool], Step],
        observe_anew: Callable[[], None],
        ignores_buffers: bool,
    ) -> None:
        self.group, self.reference_step, self.policy_step = group, reference_step, policy_step
        self.observe_anew = observe_anew
        self.expected = reference_step(True)
        """The reference that the others are compared with."""
        if group.any(bool(self.expected.graphs)):
            self.expected = reference_step(True)  # the first compiled, and what dynamo traced was counted
        self.kernels, self.is_deterministic, self.remark = self.expected.kernels, False, ""
        tensors = self.expected.take_tensors()
        if ignores_buffers:
            tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("buffer ")}
        self.runs = Runs(tensors)
        self.later = self._add_policy(True)
        """The step of the policy whose figures count."""
        differs = group.any(bool(self.runs.different))
        self.is_compiled = group.any(bool(self.runs.different) and self.later.in_graph)
        if self.is_compiled:
            self._repeat_compiled()
        elif differs:
            self._repeat()

    def _add_policy(self, is_counted: bool = False) -> Step:
        """Add a first step of the policy, in which regions are observed, and a later one. Returns the later one.

        Both must be exact: the first one is compiled and observed.
        """
        self.observe_anew()
        self.runs.add("first", self.policy_step(is_counted).tensors)
        later = self.policy_step(is_counted)
        self.runs.add("later", later.take_tensors())
        return later

    def _add_reference(self) -> None:
        self.runs.add_reference(self.reference_step(False).tensors)

    def _repeat(self) -> None:
        """Results differ: run all with deterministic kernels if there are some, else until nothing is wrong.

        The reference runs `FEWEST` times for that, and both until more runs cannot change the result.
        """
        equal = self._deterministic_runs()
        self.is_deterministic = equal is not None
        with deterministic_kernels() if self.is_deterministic else contextlib.nullcontext():
            if equal is not None:
                self.runs = equal
                self._add_policy()
            if not self.group.any(bool(self.runs.different)):
                return
            while self.group.any(self.runs.count < FEWEST or (bool(self.runs.broken()) and self.runs.may_change())):
                self._add_reference()
                if self.runs.count > FEWEST:
                    self._add_policy()

    def _deterministic_runs(self) -> Runs | None:
        """Equal runs of the reference with deterministic kernels; None if there are none, and `remark` says why."""
        if not self.group.is_one_process:
            return None  # an op that refuses in the middle of a backward would leave DDP and FSDP in it
        kernels: tuple[str, ...] = ()

        def step() -> Tensors:
            nonlocal kernels
            found = self.reference_step(True)
            kernels = found.kernels
            return found.take_tensors()

        runs, refused = deterministic_runs(step)
        if runs is not None:
            self.kernels = kernels
        if "CUBLAS_WORKSPACE_CONFIG" in refused:
            self.remark = "For a bitwise comparison start Python with CUBLAS_WORKSPACE_CONFIG=:4096:8"
        elif refused:
            self.remark = f"No deterministic kernels: {refused}"
        return runs

    def _repeat_compiled(self) -> None:
        """As `_repeat`, for a model that is compiled as a whole: compiling the reference is noise as well.

        The policy's graph may change other results than the reference's, by as much: all are allowed the median. To go
        back and forth would compile each time, so the reference runs first. All steps of the policy run one graph.
        """
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
            for what in ("first", "later"):
                self.runs.add(what, tensors)
