"""What of a model's attention is not as its reader would think: linear attention, and backends that are set in vain."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fastac import models, registry
from fastac.errors import FastacError
from fastac.models import BlockContainer
from fastac.policy import LONG_MIN_KV, BlockPolicies, Policy, is_inside, policy_of
from fastac.errors import class_name


def linear_attention(model: torch.nn.Module, containers: Iterable[BlockContainer]) -> dict[str, str]:
    """Qualified name -> class, of the modules in a model's blocks that are linear attention: no kernel to save."""
    row = models.row_of(model)
    names = {use.module: use.processor for use in registry.backend_uses(model) if use.linear}
    found = {}
    for container in containers:
        for name, block in container.blocks.items():
            for inner, module in block.named_modules(prefix=name):
                if inner in names or (row is not None and class_name(module) in row.linear):
                    found[inner] = names.get(inner, class_name(module))
    return found


def remarks(model: torch.nn.Module, containers: Iterable[BlockContainer]) -> tuple[str, ...]:
    """Sentences for people, one for each thing that holds for some attention of a model's blocks."""
    containers = list(containers)
    linear = linear_attention(model, containers)
    found = []
    if linear:
        kinds = ", ".join(dict.fromkeys(linear.values()))
        more = f" and {len(linear) - 1} more" if len(linear) > 1 else ""
        found.append(f"linear attention, which is recomputed: {next(iter(linear))}{more} ({kinds})")
    names = [name for container in containers for name in container.blocks]
    ignored: dict[tuple[str, str], int] = {}
    for use in registry.backend_uses(model):
        inside = any(is_inside(use.module, name) for name in names)
        if inside and use.ignores not in ("", use.backend):
            ignored[use.ignores, use.processor] = ignored.get((use.ignores, use.processor), 0) + 1
    for (backend, processor), count in ignored.items():
        found.append(
            f"backend {backend!r} is set, and is not looked at by {count} of the attention modules: {processor} calls "
            f"scaled_dot_product_attention itself"
        )
    return tuple(found)


def refuse_only_linear(
    model: torch.nn.Module, containers: Iterable[BlockContainer], policy: Policy | BlockPolicies
) -> None:
    """Raise FastacError for a policy of long attention on blocks of linear self-attention and cross-attention alone.

    What attends otherwise, or is not known, may be long.
    """
    containers = list(containers)
    blocks = {name: block for container in containers for name, block in container.blocks.items()}
    linear = linear_attention(model, containers)
    long = {
        name
        for name, block in blocks.items()
        if (one := policy_of(policy, block)).min_kv >= LONG_MIN_KV and not one.linear
    }
    saving = {name for name, block in blocks.items() if not policy_of(policy, block).saves_nothing}
    crossing = [use.module for use in registry.backend_uses(model) if use.cross]
    other = [use.module for use in registry.backend_uses(model) if not (use.linear or use.cross)]

    def only_short(name: str) -> bool:
        has_linear, has_cross, has_other = (
            any(is_inside(module, name) for module in modules) for modules in (linear, crossing, other)
        )
        return has_linear and has_cross and not has_other

    if long and saving == long and all(map(only_short, long)):
        first = next(iter(linear))
        raise FastacError(
            f"{policy}: the self-attention of {class_name(model)}.{first} is linear attention "
            f"({linear[first]}), which has no kernel to save, and what is left attends to the text: nothing would be "
            f'saved. Use policy="attn_only", or a min_kv below the length of the text.'
        )
