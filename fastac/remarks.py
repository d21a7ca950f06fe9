"""What of a model's attention is not as its reader would think: a backend that is set in vain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch

from fastac import registry
from fastac.models import BlockContainer
from fastac.policy import is_inside


def remarks(model: torch.nn.Module, containers: Iterable[BlockContainer]) -> tuple[str, ...]:
    """A sentence for each backend that is set, and ignored by attention modules in a model's blocks."""
    blocks = [name for container in containers for name in container.blocks]
    ignored = Counter(
        (use.ignores, use.processor)
        for use in registry.backend_uses(model)
        if use.ignores not in ("", use.backend) and any(is_inside(use.module, block) for block in blocks)
    )
    return tuple(
        f"backend {backend!r} is set, and {count} of the attention modules ignore it: {processor} calls "
        f"scaled_dot_product_attention itself"
        for (backend, processor), count in ignored.items()
    )
