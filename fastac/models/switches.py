"""A model's own gradient checkpointing: modules with its flag, and the function that they call for a block."""

from __future__ import annotations

from typing import Any

import torch

_FLAG, _FUNCTION = "gradient_checkpointing", "_gradient_checkpointing_func"
# This is a string because it is pickled with the model. An object() would not be the same one afterwards.
_ABSENT = "no function"


class Switch:
    """The flag and the function of one module. `restore` sets them as they were when this object was made."""

    def __init__(self, module: Any) -> None:
        self.module = module
        # None if only the class has the flag.
        self.flag = vars(module).get(_FLAG)
        self.before = self.function

    @property
    def is_on(self) -> bool:
        """Whether the module checkpoints."""
        return bool(self.module.gradient_checkpointing)

    @property
    def function(self) -> Any:
        """The gradient checkpointing function that the module calls at present."""
        return vars(self.module).get(_FUNCTION, _ABSENT)

    def set(self, flag: Any, function: Any) -> None:
        """Set the flag and the function. A value that the module itself did not have is deleted."""
        # A flag of the class is not copied to the module: after `disable` it has the attributes that it had before.
        for name, value, absent in ((_FLAG, flag, None), (_FUNCTION, function, _ABSENT)):
            if value == absent:
                vars(self.module).pop(name, None)
            else:
                setattr(self.module, name, value)

    def restore(self) -> None:
        """Set flag and function as they were."""
        self.set(self.flag, self.before)


def switches_of(model: torch.nn.Module) -> list[Switch]:
    """The switches of the modules of a model that have the flag, on or off."""
    # Not hasattr(module, name): a PeftModel forwards it to its inner model.
    return [Switch(module) for module in model.modules() if _FLAG in vars(module) or hasattr(type(module), _FLAG)]


def transformers_switches(model: torch.nn.Module, blocks: set[torch.nn.Module]) -> list[Switch]:
    """The switches of blocks of transformers' models, and of the modules around them.

    transformers and peft read the flag: with it, models keep no key-value cache, and peft handles its hooks otherwise.
    """
    theirs = [module for module in model.modules() if getattr(type(module), "supports_gradient_checkpointing", False)]
    parts = {part for module in theirs for part in module.modules()}
    around = {module for module in parts if not blocks.isdisjoint(module.modules())}
    return [switch for switch in switches_of(model) if switch.module in around]


def is_by_forward(model: torch.nn.Module, blocks: Any) -> bool:
    """Whether the blocks' own forward is the host: they are named, or the model takes no checkpointing function."""
    # Every diffusers model has the method. In a class that does not support checkpointing, it raises.
    supported = getattr(model, "_supports_gradient_checkpointing", False)
    return blocks is not None or not (supported and hasattr(model, "enable_gradient_checkpointing"))
