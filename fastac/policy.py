"""Policies: frozen values that say which outputs of a region are saved, as pure functions of a call."""

from __future__ import annotations

import dataclasses
import fnmatch
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fastac.errors import FastacError, did_you_mean

logger = logging.getLogger("fastac")

LONG_MIN_KV = 1024
"""Attention over fewer keys is cheaper to recompute than to keep (text cross-attention)."""


@dataclasses.dataclass(frozen=True)
class Policy:
    """What checkpointing saves in a block. Everything else is recomputed.

    Args:
        name: "attn_only" saves the outputs of attention, "linear_only" only those that `linear` names, "full" nothing.
            "none" does not checkpoint the block: autograd keeps what it needs. "long_attn_only" is "attn_only" with a
            `min_kv` of 1024 by default.
        min_kv: save only attention over at least this many keys. The FLOPs that a saved byte avoids grow with the
            number of keys, and with nothing else.
        collectives: "save" saves the outputs of functional collectives, except for gathers; "recompute" issues them
            again, which holds fewer bytes and communicates more.
        linear: Linear modules whose outputs are saved too, by their names in a block, with wildcards:
            ("ffn.net.2", "attn1.*").
        offload: tensors that wait in host memory between forward and backward: "attention" for the saved outputs,
            "inputs" for the inputs of the block, True for both.
        keep: with `offload`, the number of last blocks that stay on the device: backward needs them first.

    Raises:
        FastacError: an unknown name or word, a `min_kv` below 0, a `keep` below 1, or options that have no effect
            together.

    Example:
        >>> fastac.enable(transformer, policy=fastac.Policy("attn_only", min_kv=4096))
    """

    name: str = "attn_only"
    min_kv: int = 0
    collectives: str = "save"
    linear: Sequence[str] = ()
    offload: bool | str = False
    keep: int = 2

    def __post_init__(self) -> None:
        # JSON, in which plans are stored, has no tuples.
        if isinstance(self.linear, list):
            object.__setattr__(self, "linear", tuple(self.linear))
        # The name is a shorthand. It is stored in full, so that two spellings of one policy are equal.
        if self.name == "long_attn_only":
            object.__setattr__(self, "name", "attn_only")
            object.__setattr__(self, "min_kv", self.min_kv or LONG_MIN_KV)
        if self.name not in ("none", "full", "attn_only", "linear_only"):
            raise FastacError(
                f"policy={self.name!r}: unknown policy.{did_you_mean(str(self.name), NAMED)} There are "
                f'{_quoted(NAMED)}, Policy("attn_only", min_kv=..., linear=(...)), a mapping of block names to these, '
                f'and "auto" for a whole model.'
            )
        # isinstance would accept True, which is an int in Python.
        if type(self.min_kv) is not int or self.min_kv < 0:
            raise FastacError(f"Policy(min_kv={self.min_kv!r}): expected a number of keys, 0 or more")
        if self.collectives not in ("save", "recompute"):
            raise FastacError(f'Policy(collectives={self.collectives!r}): there are "save" and "recompute"')
        if not isinstance(self.linear, tuple) or not all(isinstance(name, str) and name for name in self.linear):
            raise FastacError(f'Policy(linear={self.linear!r}): expected a tuple of names, as ("ffn.net.2",)')
        if not self.is_selective and (self.min_kv or self.collectives != "save" or self.linear):
            raise FastacError(f'Policy("{self.name}", ...): it saves nothing, so other options have no effect')
        if self.offload not in (False, True, "attention", "inputs"):
            raise FastacError(f'Policy(offload={self.offload!r}): there are True, "attention" and "inputs"')
        if type(self.keep) is not int or self.keep < 1:
            raise FastacError(f"Policy(keep={self.keep!r}): expected a number of blocks, 1 or more")
        if self.offload and (self.name == "none" or (not self.is_selective and self.offload == "attention")):
            raise FastacError(f'Policy("{self.name}", offload={self.offload!r}): it has nothing of that to offload')
        if self.name == "linear_only" and (self.min_kv or not self.linear):
            raise FastacError('Policy("linear_only", linear=(...)): names are needed, and min_kv has no effect')

    @property
    def is_selective(self) -> bool:
        """Whether some outputs are saved: "full" recomputes all of them, and under "none" autograd keeps all."""
        return self.name in ("attn_only", "linear_only")

    @property
    def checkpoints(self) -> bool:
        """Whether the block is checkpointed."""
        return self.name != "none"

    @property
    def saves_collectives(self) -> bool:
        """Whether the outputs of functional collectives are saved, except for gathers."""
        return self.is_selective and self.collectives == "save"

    @property
    def offloads_inputs(self) -> bool:
        """Whether the block's inputs wait in host memory."""
        return self.offload in (True, "inputs")

    @property
    def offloads_outputs(self) -> bool:
        """Whether the saved outputs wait in host memory."""
        return self.is_selective and self.offload in (True, "attention")

    def saves(self, keys: int) -> bool:
        """Whether an attention call over this number of keys is saved."""
        # Do not compare if every call is saved: it would fix the number of keys in a trace with dynamic shapes.
        return self.name == "attn_only" and (self.min_kv == 0 or keys >= self.min_kv)

    def saves_linear(self, name: str) -> bool:
        """Whether the output of a Linear module is saved. name: in the block."""
        # fnmatch.fnmatch ignores case on Windows, and names of modules do not.
        return any(fnmatch.fnmatchcase(name, pattern) for pattern in self.linear)

    def as_code(self) -> str:
        """The policy as it is written in a call of `fastac.enable`."""
        if (name := str(self)) in NAMED:
            return f'"{name}"'
        chosen = [f"{name}={value!r}" for name, value in self._options().items()]
        return f"fastac.Policy({', '.join([repr(self.name), *chosen])})".replace("'", '"')

    def _options(self) -> dict[str, Any]:
        """Fields after the name that differ from their defaults."""
        options = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)[1:]}
        return {name: value for name, value in options.items() if value != getattr(Policy, name)}

    def __str__(self) -> str:
        for name, policy in NAMED.items():
            if policy == self:
                return name
        options = self._options().items()
        words = [f"{name}={'+'.join(value) if name == 'linear' else repr(value)}" for name, value in options]
        return f"{self.name}({', '.join(words)})"


AnyPolicy = str | Policy | Mapping[str, str | Policy]
"""A policy or its name, for all blocks; or by block name, or by a pattern of block names."""


class BlockPolicies(dict[Any, Policy]):
    """Block -> policy, for a model that mixes them. Copied and pickled together with the blocks.

    The keys are the blocks inside torch.compile's OptimizedModule, which may be put around them at any time.
    """

    @property
    def is_selective(self) -> bool:
        """Whether the policy of some block is."""
        return any(policy.is_selective for policy in self.values())

    def of(self, block: Any) -> Policy | None:
        """The policy of a block, which may be inside torch.compile's OptimizedModule by now."""
        return self.get(getattr(block, "_orig_mod", block))

    def __str__(self) -> str:
        names = sorted({str(policy) for policy in self.values()})
        return names[0] if len(names) == 1 else f"mixed ({', '.join(names)})"


NAMED = {
    "none": Policy("none"),
    "full": Policy("full"),
    "attn_only": Policy("attn_only"),
    "long_attn_only": Policy("attn_only", LONG_MIN_KV),
}

DISABLED = os.environ.get("FASTAC_DISABLE", "").lower() in ("1", "true", "yes")
if DISABLED:
    logger.warning('FASTAC_DISABLE is set: every policy but "none" is torch\'s own checkpoint, nothing is saved')


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def resolve(policy: str | Policy) -> Policy:
    """The Policy of a name, or the value itself. Under FASTAC_DISABLE=1 "full", unless "none". Raises FastacError."""
    if policy == "auto" or type(policy).__name__ == "Auto":
        raise FastacError('policy "auto" plans a whole model: fastac.enable(model, policy="auto")')
    if isinstance(policy, str):
        policy = NAMED[policy] if policy in NAMED else Policy(policy)  # an unknown name raises
    elif not isinstance(policy, Policy):
        raise FastacError(
            # A model that was passed by mistake would fill the screen: only its class is named.
            f"policy: expected a name or a fastac.Policy, or in enable, verify and compile a mapping of block names to "
            f"these, got {type(policy).__name__}"
        )
    return NAMED["full"] if DISABLED and policy.checkpoints else policy


def patterns_of(names: Iterable[str]) -> list[str]:
    """One pattern for the qualified names of each parent: "blocks.*" for "blocks.0" and "blocks.1"."""
    return list(dict.fromkeys(f"{name.rpartition('.')[0]}.*" for name in names if "." in name))


def of_first(names: Sequence[str], count: int, policy: str | Policy) -> dict[str, str | Policy]:
    """A mapping for `enable`: a policy for the first `count` blocks, "none" for the rest. Raises FastacError."""
    # A wrong policy is an error here, where it was written, and not when the mapping is used.
    resolve(policy)
    if not isinstance(count, int) or not 0 <= count <= len(names):
        raise FastacError(f"the first {count!r} blocks: there are {len(names)}. Name the blocks if you mean more.")
    return {name: policy if number < count else "none" for number, name in enumerate(names)}


def resolve_blocks(mapping: Mapping[str, str | Policy], blocks: Mapping[str, Any]) -> BlockPolicies:
    """Policies per block from name patterns; the first match counts: {"blocks.0": "full", "*": "attn_only"}.

    Args:
        mapping: block-name pattern -> policy.
        blocks: qualified name -> module.

    Raises:
        FastacError: a block without a pattern, or a pattern (except for "*") that has no effect.
    """
    policies = BlockPolicies()
    if not all(isinstance(pattern, str) for pattern in mapping):
        raise FastacError(f'policy mapping: expected patterns of block names, as "blocks.0": got {list(mapping)[:6]!r}')
    # A last "*" often means the rest, if there is any: it may have no effect.
    unused = set(mapping) - {"*"}
    for name, block in blocks.items():
        first = next((pattern for pattern in mapping if fnmatch.fnmatchcase(name, pattern)), None)
        if first is None:
            raise FastacError(f'policy mapping: no pattern for block {name!r}. Add one, such as "*": "attn_only".')
        unused.discard(first)
        # By the block inside torch.compile's OptimizedModule: that is what `policy_of` is asked for.
        policies[getattr(block, "_orig_mod", block)] = resolve(mapping[first])
    if unused:
        unmatched = [pattern for pattern in sorted(unused) if not fnmatch.filter(blocks, pattern)]
        meant = ""
        # A pattern that ends in a number meant a block. Any other one is offered patterns.
        if unmatched:
            meant = did_you_mean(unmatched[0], blocks if unmatched[0][-1:].isdigit() else patterns_of(blocks))
        raise FastacError(
            f"policy mapping: {_quoted(sorted(unused))} has no effect: it matches no block, or an earlier pattern "
            f"matches the same blocks. The first match counts.{meant} "
            f"The blocks are {_quoted(list(blocks)[:6])}{', ...' if len(blocks) > 6 else ''}."
        )
    return policies
