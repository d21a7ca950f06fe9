"""Which attention calls are saved: values of one frozen type, and pure functions of a call."""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from fastac.checkpoint_wrappers import inside
from fastac.errors import FastacError

logger = logging.getLogger("fastac")

LONG_MIN_KV = 1024
"""Attention over fewer keys than this is cheaper to run again than to keep (text cross-attention)."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """What checkpointing saves: "full" nothing, "attn_only" every attention forward over at least `min_kv` keys.

    FLOPs saved per byte kept grow with the number of keys alone, so that is what `min_kv` bounds.
    collectives: "save" keeps what functional collectives return, but for gathers, so that recompute does not issue them
    again; "recompute" issues them again and keeps nothing of them: fewer bytes, more communication.
    linear: Linear modules whose outputs are saved as well, by their names in a block, with wildcards:
    ("ffn.net.2", "attn1.*"). "linear_only" saves these alone.
    Raises FastacError for another name, a `min_kv` that is not a whole number of keys, other words for `collectives`,
    names that are no texts, and what has no meaning together.
    """

    name: str = "attn_only"
    min_kv: int = 0
    collectives: str = "save"
    linear: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.linear, list):  # as JSON has it
            object.__setattr__(self, "linear", tuple(self.linear))
        if self.name not in ("full", "attn_only", "linear_only"):
            raise FastacError(
                f"Policy({self.name!r}): no such policy. There are {_quoted(NAMED)}, "
                f'Policy("attn_only", min_kv=..., linear=(...)).'
            )
        if not isinstance(self.min_kv, int) or isinstance(self.min_kv, bool) or self.min_kv < 0:
            raise FastacError(f"Policy(min_kv={self.min_kv!r}): a number of keys, 0 or more, was expected")
        if self.collectives not in ("save", "recompute"):
            raise FastacError(f'Policy(collectives={self.collectives!r}): there are "save" and "recompute"')
        if self.name == "full" and (self.min_kv or self.collectives != "save" or self.linear):
            raise FastacError(
                'Policy("full", ...): full saves nothing, so min_kv, collectives and linear have no meaning'
            )
        if not isinstance(self.linear, tuple) or not all(isinstance(name, str) and name for name in self.linear):
            raise FastacError(f'Policy(linear={self.linear!r}): a tuple of names was expected, as ("ffn.net.2",)')
        if self.name == "linear_only" and (self.min_kv or not self.linear):
            raise FastacError(
                'Policy("linear_only"): it saves the outputs of the Linear modules named by linear=(...), which must '
                "be there, and no attention, so min_kv has no meaning"
            )

    @property
    def saves_nothing(self) -> bool:
        """Whether this is plain full checkpointing."""
        return self.name == "full"

    def saves(self, keys: int) -> bool:
        """Whether an attention call over so many keys is saved."""
        return self.name == "attn_only" and (self.min_kv == 0 or keys >= self.min_kv)

    @property
    def saves_collectives(self) -> bool:
        """Whether what functional collectives return is saved, but for gathers."""
        return not self.saves_nothing and self.collectives == "save"

    def __str__(self) -> str:
        for name, policy in NAMED.items():
            if policy == self:
                return name
        options = [f"min_kv={self.min_kv}"] * bool(self.min_kv)
        options += [f"collectives={self.collectives!r}"] * (self.collectives != "save")
        if self.linear:
            options.append(f"linear={'+'.join(self.linear)}")
        return f"{self.name}({', '.join(options)})"


class BlockPolicies(dict[Any, Policy]):
    """Block -> policy, for a model that mixes them. Copied and pickled together with the model's blocks."""

    def of(self, function: Any) -> Policy | None:
        """The policy of the block that is called: itself, by a bound method, or compiled. None for a strange block."""
        block = inside(getattr(function, "__self__", function))
        return self.get(getattr(block, "_orig_mod", block))

    def __str__(self) -> str:
        names = sorted({str(policy) for policy in self.values()})
        return names[0] if len(names) == 1 else f"mixed ({', '.join(names)})"


def policies_in(policy: Policy | BlockPolicies) -> Collection[Policy]:
    """The policies of all blocks."""
    return policy.values() if isinstance(policy, BlockPolicies) else [policy]


def policy_of(policies: Policy | BlockPolicies, block: Any) -> Policy:
    """The policy of one block; "full" for one that has none."""
    return policies if isinstance(policies, Policy) else policies.of(block) or Policy("full")


def saves_nothing(policy: Policy | BlockPolicies) -> bool:
    """Whether a policy is full checkpointing throughout."""
    return all(one.saves_nothing for one in policies_in(policy))


def is_inside(name: str, block: str) -> bool:
    """Whether a qualified name is that of a block, or of a module inside it. All are inside "", the model itself."""
    return not block or name == block or name.startswith(block + ".")


NAMED: dict[str, Policy] = {}
NAMED.update(full=Policy("full"), attn_only=Policy("attn_only"), long_attn_only=Policy("attn_only", LONG_MIN_KV))

DISABLED = os.environ.get("FASTAC_DISABLE", "").lower() in ("1", "true", "yes")
if DISABLED:
    logger.warning('FASTAC_DISABLE is set: every policy is "full", nothing is saved')


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def resolve(policy: str | Policy) -> Policy:
    """The Policy that a name or a value stands for; "full" under FASTAC_DISABLE=1. Raises FastacError."""
    if isinstance(policy, str):
        if policy not in NAMED:
            raise FastacError(
                f"policy={policy!r}: no such policy. There are {_quoted(NAMED)}, "
                f'Policy("attn_only", min_kv=...), and a mapping of block names to these.'
            )
        policy = NAMED[policy]
    elif not isinstance(policy, Policy):
        raise FastacError(
            f"policy: expected a name, a fastac.Policy or a mapping of block names to these, got "
            f"{type(policy).__name__}"
        )
    return NAMED["full"] if DISABLED else policy


def resolve_blocks(mapping: Mapping[str, str | Policy], blocks: Mapping[str, Any]) -> BlockPolicies:
    """Policies per block from name patterns; the first match counts: {"blocks.0": "full", "*": "attn_only"}.

    blocks: name -> module. Raises FastacError when a pattern matches no block, or those before it match all its blocks
    (but for "*"), or a block has no pattern.
    """
    policies = BlockPolicies()
    unused, shadowed = set(mapping), set(mapping) - {"*"}
    for name, block in blocks.items():
        matching = [pattern for pattern in mapping if fnmatch.fnmatchcase(name, pattern)]
        unused.difference_update(matching)
        if not matching:
            raise FastacError(f'policy mapping: no pattern for block {name!r}. Add one, such as "*": "attn_only".')
        shadowed.discard(matching[0])
        policies[getattr(block, "_orig_mod", block)] = resolve(mapping[matching[0]])
    if unused:
        raise FastacError(
            f"policy mapping: {_quoted(sorted(unused))} {'matches' if len(unused) == 1 else 'match'} no block. "
            f"The blocks are {_quoted(list(blocks)[:6])}{', ...' if len(blocks) > 6 else ''}."
        )
    if shadowed:
        raise FastacError(
            f"policy mapping: {_quoted(sorted(shadowed))} {'counts' if len(shadowed) == 1 else 'count'} for no block: "
            f'patterns before match the same ones. The first match counts: put the narrower first, "*" last.'
        )
    return policies
