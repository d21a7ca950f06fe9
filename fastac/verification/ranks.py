"""The steps that `verify` compares. All ranks take the same steps, because they may communicate in them.

Each rank compares its own results, so ranks would differ in whether they need another step. They decide together: if
one rank needs a step, all take it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import torch

from fastac.engine.ranks import Group
from fastac.verification.noise import FEWEST, MOST_EQUAL, Runs, Tensors, deterministic_kernels, deterministic_runs
from fastac.verification.step import Step

RunStep = Callable[[bool], Step]
"""Runs a step. Its argument: whether attention kernels are counted."""


class ComparedSteps:
    """Runs of a reference and of a policy, compared when this is made.

    Args:
        group: the ranks.
        reference_step: runs a step of the reference.
        policy_step: runs a step of the policy.
        forget: makes the next region of each kind a first one, which is observed.
        with_buffers: whether written buffers are compared as well.
    """

    def __init__(
        self,
        group: Group,
        reference_step: RunStep,
        policy_step: RunStep,
        forget: Callable[[], None],
        with_buffers: bool,
    ) -> None:
        self.group, self.reference_step, self.policy_step, self.forget = group, reference_step, policy_step, forget
        self.expected = reference_step(True)
        """The run of the reference that all others are compared with."""
        if group.any(bool(self.expected.graphs)):
            # The first step compiled, and the profiler counted the calls that dynamo made while it traced.
            self.expected = reference_step(True)
        self.kernels, self.is_deterministic, self.remark = self.expected.kernels, False, ""
        # `expected` stays for its figures. With its tensors, two references would be held once `runs` is replaced.
        tensors = self.expected.take_tensors()
        self.runs = Runs({name: tensors[name] for name in tensors if with_buffers or not name.startswith("buffer ")})
        del tensors
        self.later = self._add_policy(True)
        """The step of the policy from which the figures are taken."""
        # Every rank takes part in both exchanges, whatever it found itself: the others would wait for it.
        differs = group.any(bool(self.runs.different))
        self.is_compiled = group.any(bool(self.runs.different) and self.later.in_graph)
        if self.is_compiled:
            self._repeat_compiled()
        elif differs:
            self._repeat()

    def _add_policy(self, is_counted: bool = False) -> Step:
        """Add two steps of the policy, and return the second one. Both must be exact.

        The first one is observed, and it compiles what is compiled. All later steps of training are like the second.
        """
        self.forget()
        # Only the second step is kept, for its figures. The memory of this one is free at once.
        self.runs.add("first", self.policy_step(is_counted).tensors)
        later = self.policy_step(is_counted)
        self.runs.add("later", later.take_tensors())
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
        steps: list[Step] = []

        def step() -> Tensors:
            steps.append(self.reference_step(True))
            return steps[-1].take_tensors()

        runs, refused = deterministic_runs(step)
        # SDPA may take flash attention for cuDNN's here. The result names the kernels that were compared.
        if runs is not None:
            self.kernels = steps[-1].kernels
        # torch refuses cuBLAS without this variable; pytorch/pytorch#161749 is about removing the check.
        if "CUBLAS_WORKSPACE_CONFIG" in refused:
            self.remark = "For a bitwise comparison start Python with CUBLAS_WORKSPACE_CONFIG=:4096:8"
        elif refused:
            self.remark = f"No deterministic kernels: {refused}"
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
