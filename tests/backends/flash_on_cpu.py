"""flash-attn 2 on any machine: its real Python layer and its real ops, with CPU kernels of `kernels_on_cpu`.

The package must be on sys.path (tests/backends/packages.py) and must not have been imported. `import diffusers` comes
later: it looks at its import whether flash-attn works.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from tests.backends.kernels_on_cpu import backward_kernel, forward_kernel
from tests.backends.parity import op_of

RETURNS = ("out", "logsumexp", "mask", "seed")


def stand_in(name: str) -> ModuleType:
    """An empty module in the place of a compiled one. What would be called in it is an op with a CPU kernel here.

    Those who ask the import system whether there is such a module, or a module in it, are told yes.
    """
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)
    return module


def flash_attn_2() -> ModuleType:
    """Import flash_attn.flash_attn_interface, with CPU kernels for its ops."""
    stand_in("flash_attn_2_cuda")
    from flash_attn import flash_attn_interface

    _register("flash_attn")
    return flash_attn_interface


def hub_build(namespace: str) -> ModuleType:
    """The same Python layer with its ops in a namespace of its own, as every build on the hub has one."""
    from flash_attn import flash_attn_interface

    source = Path(flash_attn_interface.__file__).read_text()
    source = source.replace('"flash_attn::', f'"{namespace}::').replace(
        "torch.ops.flash_attn.", f"torch.ops.{namespace}."
    )
    module = ModuleType(namespace)
    sys.modules[namespace] = module  # torch asks for the module of a custom op
    exec(compile(source, namespace, "exec"), module.__dict__)
    _register(namespace)
    return module


def _register(namespace: str) -> None:
    for kind in ("", "varlen_"):
        forward, backward = (f"{namespace}::_flash_attn_{kind}{direction}" for direction in ("forward", "backward"))
        torch.library.register_kernel(forward, "cpu", forward_kernel(forward, op_of(forward), "bshd", RETURNS))
        torch.library.register_kernel(backward, "cpu", _in_place(backward_kernel(op_of(backward), "bshd")))


def _in_place(kernel: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A backward that leaves its gradients in the tensors it was given and returns something else, unused."""

    def backward(*args: Any, **kwargs: Any) -> torch.Tensor:
        kernel(*args, **kwargs)
        return torch.empty(0)

    return backward
