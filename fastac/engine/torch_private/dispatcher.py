"""Private names of torch's dispatcher: keys, keysets, and kernels of ops."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.overrides import enable_reentrant_dispatch

from fastac.registry.torch_private import DEVICES, handles, is_of_torch, qualified_name
from fastac.registry.torch_private import has_kernel as has_kernel

# Library.impl(with_keyset=True) and OpOverload.redispatch (pytorch#124089) pass a keyset on. No public function makes
# one: this is the set that torch's own generated kernels use for a redispatch.
_BACKEND_SELECT = torch._C.DispatchKey.BackendSelect
BELOW_BACKEND_SELECT = torch._C._dispatch_keyset_full_after(_BACKEND_SELECT)
"""Keys for redispatching a call to the kernel below BackendSelect, which runs with the GIL released."""


def at_backend_select(op: Any, function: Callable[..., Any]) -> None:
    """Make calls of a higher-order op call function(keyset, *args, **kwargs), as Library.impl does for other ops."""

    # Higher-order ops live in Python: torch.library takes none, and a kernel of py_impl is not given the keyset.
    def called(*args: Any, **kwargs: Any) -> Any:
        keyset = torch._ops._compute_keyset(args, kwargs, op.non_fallthrough_keys)
        with torch.profiler.record_function(qualified_name(op)):  # as the dispatcher does for an op
            return function(keyset, *args, **kwargs)

    op.py_impl(_BACKEND_SELECT)(called)


def is_composite(qualified_name: str) -> bool:
    """Whether an op only calls other ops, which are dispatched in turn. Modes see it only under inference mode."""
    return has_kernel(qualified_name, "CompositeImplicitAutograd")


def is_custom_op(name: str) -> bool:
    """Whether torch.library.custom_op made an op. name: namespace::name."""
    return name in torch._library.custom_ops.OPDEFS


def call_under_mode(op: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Call an op from a dispatch mode, so that its kernels see the dispatch keys that they see without the mode.

    Under a mode torch leaves out all keys above it: autograd, autocast, conjugation, counting in-place changes. Kernels
    are made of ops that may need these keys. So the keys are put back, except for those that a kernel of the op, above
    the mode, leaves out itself. If the op has no autograd kernel, autograd differentiates the ops inside.
    """
    # Since torch 1.12 a mode has to ask for the keys (pytorch#75130). enable_reentrant_dispatch gives all of them back,
    # and would call the op's own autograd and autocast kernels a second time.
    if not isinstance(op, torch._ops.OpOverload):
        return op(*args, **kwargs)
    name, is_torchs = qualified_name(op), is_of_torch(op)
    with enable_reentrant_dispatch():  # the keys as they were when the op was called
        excluded = torch._C._dispatch_tls_local_exclude_set()
    # Computed here, where the keys above the mode are left out.
    keyset = None if is_torchs else torch._ops._compute_keyset(args, kwargs, _ALL_KEYS)
    with contextlib.ExitStack() as below:
        below.enter_context(torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), excluded))
        if is_torchs or handles(name, "Autocast"):
            below.enter_context(torch._C._ExcludeDispatchKeyGuard(_AUTOCAST))
        # The kernel that torch.library.custom_op registers at ADInplaceOrView excludes no key: it only redispatches.
        if is_torchs or (has_kernel(name, "ADInplaceOrView") and not is_custom_op(name)):
            below.enter_context(torch._C._AutoDispatchBelowADInplaceOrView())
        elif handles(name, "Autograd"):
            below.enter_context(torch._C._AutoDispatchBelowAutograd())
        if keyset is None:
            return op(*args, **kwargs)  # redispatch would not take Python numbers in the place of tensors
        if not has_kernel(name, "BackendSelect"):
            keyset = keyset.remove(_BACKEND_SELECT)
        return op.redispatch(keyset, *args, **kwargs)


_ALL_KEYS = torch._C._dispatch_keyset_full()
_AUTOCAST = functools.reduce(
    operator.or_, [torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}")) for device in DEVICES]
)
