"""AOT's partitioner, told of attention: under a memory budget it then weighs attention as what it is.

With `torch._functorch.config.activation_memory_budget` below 1 AOT recomputes what is not on its list of
compute-intensive operators, as if it cost nothing. Of attention that list has four operators; a kernel of any other
library, or torch's own for CPUs, runs again in backward.
"""

from __future__ import annotations

from typing import Any

from fastac import compiler_internals, flops, registry


def inform_partitioner() -> None:
    """Make every registered attention op known to AOT's partitioner: as compute-intensive, beside its FLOPs.

    For `torch.compile` with `torch._functorch.config.activation_memory_budget`, with fastac's checkpointing or without.
    `enable` and `checkpoint` call it where the compiler is loaded. Ops that come later are known, too. Code that was
    compiled before, or comes from a cache that another process filled, stays as it is.
    """
    flops.register_formulas()
    compiler_internals.extend_compute_intensive_ops(_attention_ops)


def inform_if_loaded() -> None:
    """The same, where the compiler is loaded: importing it takes longer than fastac does."""
    if compiler_internals.is_loaded():
        inform_partitioner()


def _attention_ops() -> list[Any]:
    flops.register_formulas()
    return [
        getattr(resolved.op, "overloadpacket", resolved.op)
        for resolved in registry.present_ops()
        if resolved.is_attention
    ]
