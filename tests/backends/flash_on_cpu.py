"""flash-attn 2 and 3 on any machine: real Python layers and ops, with CPU kernels of `kernels_on_cpu`.

The packages must be on sys.path (tests/backends/packages.py). Import it before them and before diffusers.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from fastac.registry import find_op
from tests.backends.kernels_on_cpu import backward_kernel, forward_kernel

RETURNS = ("out", "logsumexp", "mask", "seed")


def substitute(name: str) -> ModuleType:
    """An empty module in the place of a compiled one. What would be called in it is an op with a CPU kernel here.

    For the import system it exists, and so does every module in it.
    """
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], last, module)
    return module


def package(name: str, **content: Any) -> ModuleType:
    """A package on sys.path, without what its `__init__` imports: its modules are the real ones."""
    module = substitute(name)
    module.__path__ = [str(Path(path, *name.split("."))) for path in sys.path]
    vars(module).update(content)
    return module


@functools.cache
def flash_attn_2() -> ModuleType:
    """Import flash_attn.flash_attn_interface, with CPU kernels for its ops."""
    substitute("flash_attn_2_cuda")
    from flash_attn import flash_attn_interface

    _register("flash_attn")
    return flash_attn_interface


def copy_of(module: ModuleType, name: str, *changes: tuple[str, str]) -> ModuleType:
    """A module once more, under another name. changes: of its source, a text and another for it."""
    source = Path(str(module.__file__)).read_text()
    for change in changes:
        source = source.replace(*change)
    copied = sys.modules[name] = ModuleType(name)  # torch asks for the module of a custom op
    exec(compile(source, name, "exec"), vars(copied))
    return copied


def hub_build(namespace: str) -> ModuleType:
    """The same Python layer with its ops in a namespace of its own, as every build on the hub has one."""
    names = ('"flash_attn::', f'"{namespace}::'), ("torch.ops.flash_attn.", f"torch.ops.{namespace}.")
    module = copy_of(flash_attn_2(), namespace, *names)
    _register(namespace)
    return module


def _register(namespace: str) -> None:
    for kind in ("", "varlen_"):
        forward, backward = (f"{namespace}::_flash_attn_{kind}{direction}" for direction in ("forward", "backward"))
        torch.library.register_kernel(forward, "cpu", forward_kernel(forward, find_op(forward), "bshd", RETURNS))
        torch.library.register_kernel(backward, "cpu", _in_place(backward_kernel(find_op(backward), "bshd")))


def _in_place(kernel: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    """A backward that leaves its gradients in the tensors it was given and returns something else, unused."""

    def backward(*args: Any, **kwargs: Any) -> torch.Tensor:
        kernel(*args, **kwargs)
        return torch.empty(0)

    return backward


FORWARD_3 = (
    "Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new = None, Tensor(v_new!)? v_new = None, Tensor? q_v = None, "
    "Tensor(out!)? out = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? cu_seqlens_k_new = None, Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, "
    "int? max_seqlen_k = None, Tensor? page_table = None, Tensor? kv_batch_idx = None, Tensor? leftpad_k = None, "
    "Tensor? rotary_cos = None, Tensor? rotary_sin = None, Tensor? seqlens_rotary = None, Tensor? q_descale = None, "
    "Tensor? k_descale = None, Tensor? v_descale = None, float? softmax_scale = None, bool is_causal = False, "
    "int window_size_left = -1, int window_size_right = -1, int attention_chunk = 0, float softcap = 0.0, "
    "bool is_rotary_interleaved = False, Tensor? scheduler_metadata = None, int num_splits = 0, "
    "bool? pack_gqa = None, int sm_margin = 0"
)
BACKWARD_3 = (
    "Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq = None, "
    "Tensor(dk!)? dk = None, Tensor(dv!)? dv = None, Tensor? cu_seqlens_q = None, Tensor? cu_seqlens_k = None, "
    "Tensor? seqused_q = None, Tensor? seqused_k = None, int? max_seqlen_q = None, int? max_seqlen_k = None, "
    "float? softmax_scale = None, bool is_causal = False, int window_size_left = -1, int window_size_right = -1, "
    "float softcap = 0.0, bool deterministic = False, int sm_margin = 0"
)
"""Arguments of `fwd` and `bwd`, as flash-attn 3 of 2.8.3 registers them in C++."""

_libraries: list[torch.library.Library] = []  # a Library takes its kernels along when it goes


@functools.cache
def flash_attn_3(namespace: str = "flash_attn_3") -> None:
    """Define what the compiled extension of flash-attn 3 registers, with CPU kernels."""
    for name in (namespace, f"{namespace}._C"):
        substitute(name)
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define(f"fwd({FORWARD_3}) -> (Tensor(out!), Tensor, Tensor, Tensor)")
    library.define(f"bwd({BACKWARD_3}) -> (Tensor(dq!), Tensor(dk!), Tensor(dv!), {', '.join(['Tensor'] * 5)})")
    forward = forward_kernel(f"{namespace}::fwd", find_op(f"{namespace}::fwd"), "bshd", ("out", "logsumexp", "", ""))
    backward = backward_kernel(find_op(f"{namespace}::bwd"), "bshd")

    def forward_into(*args: Any) -> Any:
        """The output goes into `out` where it is given. The last two are there only when the keys are split."""
        out, statistics, *_ = forward(*args)
        written = args[6] if len(args) > 6 else None
        return (out if written is None else written.copy_(out)), statistics, None, None

    def backward_into(*args: Any) -> Any:
        backward(*args)
        return (*args[6:9], *[torch.empty(0)] * 5)

    library.impl("fwd", forward_into, "CPU")
    library.impl("bwd", backward_into, "CPU")
    _libraries.append(library)
