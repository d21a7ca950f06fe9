"""What a verification found: two steps compared, as a value, as a table, and as an error where a promise is broken."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from rich.table import Table

from fastac.comparison import Step, differences
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.policy import BlockPolicies, Policy
from fastac.ranks import Group
from fastac.reporting import render
from fastac.sizes import readable_bytes


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` measured. Executions are of attention kernels, in one step; largest differences are absolute.

    noise: the largest difference between two runs of the reference, above 0 where kernels are not deterministic.
    broken: what differs by more than four times its own noise.
    """

    subject: str
    policy: str
    reference: str
    compared: int
    different: tuple[str, ...]
    largest_difference: float
    noise: float
    broken: tuple[str, ...]
    reference_executions: tuple[int, int]
    policy_executions: tuple[int, int]
    saved: int
    recomputed: int
    saved_bytes: int
    allowed_again: int
    linear_saved: int = 0

    def __str__(self) -> str:
        table = Table(title=f"{self.subject}: {self.policy} against {self.reference}", title_justify="left")
        for heading in ("promise", self.reference, self.policy, "kept"):
            table.add_column(heading)
        equal = f"{self.compared - len(self.different)} of {self.compared} bitwise equal"
        forward, backward = zip(self.reference_executions, self.policy_executions, strict=True)
        table.add_row("outputs and gradients", "", equal, _yes(not self.broken))
        table.add_row("attention runs in forward", str(forward[0]), str(forward[1]), _yes(forward[0] == forward[1]))
        once = self.policy_executions[1] <= self.allowed_again
        table.add_row("attention runs in backward", str(backward[0]), str(backward[1]), _yes(once))
        table.add_row("attention calls saved", "", f"{self.saved} of {self.saved + self.recomputed}", "")
        if self.linear_saved:
            table.add_row("outputs of Linear modules saved", "", str(self.linear_saved), "")
        table.add_row("bytes saved", "", readable_bytes(self.saved_bytes), "")
        return render(table)


def _yes(kept: bool) -> str:
    return "yes" if kept else "no"


def _allowed_again(expected: Step, step: Step, saved: int, policy: Policy | BlockPolicies, reference: str) -> int:
    """How many attention kernels may run in backward: those the policy recomputes, and those of the model's own doing.

    Regions under "full" are plain checkpointing and are not seen: what was not saved may run again.
    """
    own = expected.executions[1] if reference == "none" else 0
    if isinstance(policy, BlockPolicies) or policy.saves_nothing:
        return own + step.executions[0] - saved
    return own + len(step.calls) - saved


def compare(
    group: Group,
    reference_step: Callable[[], Step],
    policy_step: Callable[[], Step],
    policy: Any,
    reference: str,
    eager_reference_step: Callable[[], Step] | None = None,
) -> Verification:
    """The policy runs twice: the first step, which may compile and takes the census, must be as exact as any other."""
    expected, first, later = reference_step(), policy_step(), policy_step()
    different = differences(expected, first)
    for name, difference in differences(expected, later).items():
        different[name] = max(difference, different.get(name, 0.0))
    # Every rank takes the same steps: they may communicate.
    noise = differences(expected, reference_step()) if group.any(bool(different)) else {}
    allowed = {name: 4 * size for name, size in noise.items()}
    if eager_reference_step is not None and group.any(bool(different) and later.in_graph):
        compiling = differences(expected, eager_reference_step())
        allowed = {
            name: max(allowed.get(name, 0.0), 4 * compiling.get(name, 0.0) + expected.rounding(name))
            for name in different
        }
    broken = [name for name, size in different.items() if math.isinf(size) or size > allowed.get(name, 0.0)]
    saved = [call for call in later.calls if call.saved]
    return Verification(
        subject="",
        policy=str(policy),
        reference=reference,
        compared=len(expected.tensors),
        different=tuple(different),
        largest_difference=max(different.values(), default=0.0),
        noise=max(noise.values(), default=0.0),
        broken=tuple(broken),
        reference_executions=expected.executions,
        policy_executions=later.executions,
        saved=len(saved),
        recomputed=len(later.calls) - len(saved),
        saved_bytes=sum(call.saved_bytes for call in saved) + sum(product.saved_bytes for product in later.products),
        allowed_again=_allowed_again(expected, later, len(saved), policy, reference),
        linear_saved=sum(product.saved_bytes > 0 for product in later.products),
    )


def raise_if_broken(result: Verification) -> None:
    """Raise FastacError where a result differs, PolicyNotAppliedError where attention ran again or none was saved."""
    if result.broken:
        listed = ", ".join(result.broken[:5]) + (", ..." if len(result.broken) > 5 else "")
        raise FastacError(
            f"verify: {len(result.broken)} of {result.compared} outputs and gradients of {result.subject} under "
            f"{result.policy} differ from {result.reference} checkpointing, by up to {result.largest_difference:.3g} "
            f"({listed}); two runs of the reference differ by {result.noise:.3g}.\n{result}"
        )
    again = result.policy_executions[1] - result.allowed_again
    if again > 0 or result.policy_executions[0] != result.reference_executions[0]:
        raise PolicyNotAppliedError(
            f"verify: {result.subject} under {result.policy} ran {max(again, 0)} attention kernels in backward that "
            f"were to be saved.\n{result}"
        )
    everything = result.policy.startswith("attn_only") and "min_kv" not in result.policy
    if everything and result.saved == 0 and result.reference_executions[0] > 0:
        raise PolicyNotAppliedError(
            f"verify: {result.subject} runs {result.reference_executions[0]} attention kernels, none of them inside a "
            f"checkpointed block, so {result.policy} saved nothing.\n{result}"
        )
