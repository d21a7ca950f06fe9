"""What of a model `enable` may touch, as a value: a refused call leaves it equal, `disable` makes it equal again."""

from __future__ import annotations

from typing import Any

import torch

ABSENT = "absent"


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """Modules, checkpointing attributes, hooks, state-dict keys and training mode, by module name."""
    found: dict[str, Any] = {"state dict": list(model.state_dict()), "dict": sorted(vars(model))}
    for name, module in model.named_modules():
        found[name] = (
            id(module),
            module.training,
            module.__dict__.get("gradient_checkpointing", ABSENT),
            module.__dict__.get("_gradient_checkpointing_func", ABSENT),
            module.__dict__.get("forward", ABSENT),
            {
                key: list(hooks.values())
                for key, hooks in vars(module).items()
                if key.endswith("_hooks") and hooks and isinstance(hooks, dict)
            },
        )
    return found
