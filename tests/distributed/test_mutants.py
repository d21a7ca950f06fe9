"""The checks of this folder fail when the rule is wrong: each mutant of it is met by a check that is there for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fastac.engine import collectives, tape
from fastac import registry, replay
from fastac.policy import Policy
from fastac.registry import CollectiveOp
from tests.distributed import ranks, test_collectives, test_tensor_parallel
from tests.marks import quick


def _save_gathers() -> None:
    """Everything in _c10d_functional is saved."""
    registry._rows[:] = [
        dataclasses.replace(row, kind="exchange") if isinstance(row, CollectiveOp) and row.kind == "gather" else row
        for row in registry._rows
    ]
    registry._decisions.clear()


def _save_all_by_name() -> None:
    """What has c10d in its name is saved: also what returns no tensor at all."""
    _save_by_name("alltoall_base_", "allreduce_")


def _save_by_name(*names: str) -> None:
    """The same of ops that return the tensors that they wrote, and more."""
    names = names or ("allreduce_",)
    registry._rows += [CollectiveOp(namespace="c10d", name=name) for name in names]
    registry._decisions.clear()
    keep, size = collectives.Communication.keep, collectives._bytes

    def keep_anything(self: Any, entry: Any, outputs: Any, guarded: bool) -> None:
        if _is_tensors(outputs):
            keep(self, entry, outputs, guarded)
        else:
            entry.single, entry.kept, entry.versions = True, (outputs,), []

    collectives.Communication.keep = keep_anything  # type: ignore[method-assign]
    collectives._bytes = lambda outputs: size(outputs) if _is_tensors(outputs) else 0
    for module in (tape, replay):
        module.inputs_of = lambda args: []  # type: ignore[attr-defined]


def _is_tensors(outputs: Any) -> bool:
    return isinstance(outputs, torch.Tensor) or (
        isinstance(outputs, (list, tuple)) and all(isinstance(one, torch.Tensor) for one in outputs)
    )


def _save_attention_alone() -> None:
    Policy.saves_collectives = False  # type: ignore[assignment, method-assign]


MUTANTS = {
    "gathers": _save_gathers,
    "all by name": _save_all_by_name,
    "by name": _save_by_name,
    "attention alone": _save_attention_alone,
}


def mutated(mutant: str, function: Callable[..., Any], *args: Any) -> Any:
    """What a rank runs: the rule is changed in its process."""
    MUTANTS[mutant]()
    return function(*args)


CHECKS: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "gathers are issued again": ("gathers", test_collectives.check_every_op, "^all_gather_into_tensor, tape"),
    "gathered parameters are not held": ("gathers", test_collectives.check_gathered_parameters, "^held: "),
    "buffers are written again": (
        "by name",
        test_collectives.check_what_writes_a_buffer,
        "^all_reduce, tape: .* differ",
    ),
    "what returns nothing is refused": (
        "all by name",
        test_collectives.check_what_writes_a_buffer,
        "FastacError: .*alltoall_base_.* returns no tensor",
    ),
    "exchanges are saved": ("attention alone", test_collectives.check_every_op, "^all_reduce, tape"),
    "sums of partial results are saved": (
        "attention alone",
        lambda folder: test_tensor_parallel.check_tensor_parallel(folder, "plain"),
        "^plain, tape",
    ),
}
"""What holds -> the mutant under which it does not, the check of it, and what that says."""


@pytest.mark.parametrize("name", quick(CHECKS, "gathers are issued again"))
def test_a_wrong_rule_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mutant, check, said = CHECKS[name]
    run = ranks.run
    monkeypatch.setattr(
        ranks,
        "run",
        lambda folder, function, *args, **options: run(folder, mutated, mutant, function, *args, **options),
    )
    with pytest.raises(AssertionError, match=said):
        check(tmp_path)
