"""A copy of a model without its data, whose weights may be offloaded, cast for each layer or quantized.

The allocations of a step do not depend on that: hooks that load or cast weights are not copied, and a Linear module
whose weight is packed becomes one of plain numbers. Bytes of weights are those that are stored.
"""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Mapping
from typing import Any

import torch

from fastac.engine import torch_private
from fastac.engine.torch_private import tree_leaves
from fastac.planning.fake_values import KnownValues

BREAKS = (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError, copy.Error)
"""Errors of a model that cannot be copied, or does not run on some inputs, or without values."""

_DIFFUSERS, _ACCELERATE = "_diffusers_hook", "_hf_hook"  # attributes of a module with hooks
_OF_WEIGHTS = ("diffusers.hooks.group_offloading", "diffusers.hooks.layerwise_casting")
_STORED = "_fastac_stored"


class Unpacked(torch.nn.Linear):
    """A Linear module that replaces one whose weight is packed. Neither's output can be saved: `linear.attach`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product in the dtype of the weight, cast to that of the input."""
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a parameter or buffer as the model stores it; for a tensor that is not of a copy, its own."""
    return int(getattr(tensor, _STORED, tensor.nbytes))


def faked(model: torch.nn.Module, known: KnownValues, like: torch.Tensor) -> torch.nn.Module:
    """A deep copy of a model with fake tensors.

    like: an input. All weights are on its device, and packed ones without a dtype of their own have its dtype.
    """
    memo: dict[int, Any] = {}
    casts: dict[int, torch.dtype] = {}
    copied: torch.nn.Module
    hooks = {module: found for module in model.modules() if (found := _hooks(module))}
    for module, found in hooks.items():
        memo.update((id(hook), hook) for hook in found)  # they hold weights
        for dtype in [hook.compute_dtype for hook in found if hasattr(hook, "compute_dtype")]:
            casts.update((id(one), dtype) for one in module.parameters())
    for module in model.modules():
        own = [leaf for leaf in tree_leaves(vars(module)) if isinstance(leaf, torch.Tensor)]
        memo.update((id(one), fake(one, known, like.device, casts.get(id(one)))) for one in own)
        if _is_packed(module, own) and not casts.keys() & map(id, own):
            memo[id(module)] = _unpacked(module, known, like)
    copied, memo = _copy(model, memo)
    for module in hooks:
        mine = vars(memo[id(module)])
        for name in (_DIFFUSERS, _ACCELERATE, "forward"):
            mine.pop(name, None)
        if (forward := _before_hooks(module)) is not None and not isinstance(memo[id(module)], Unpacked):
            mine["forward"] = _copy(forward, memo)[0]
    return copied


def fake(one: torch.Tensor, known: KnownValues, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A tensor without data.

    device: of the result; "meta" becomes the CPU, which has a kernel for every operation. dtype: by default the same.
    """
    if _is_of_torch(one) and one.device == device and dtype is None and not torch_private.has_no_data(one):
        found: torch.Tensor = known.mode.from_tensor(one.detach())
    else:
        device = torch.device("cpu") if device.type == "meta" else device
        with known.mode:
            found = torch.empty_strided(one.shape, one.stride(), dtype=dtype or one.dtype, device=device)
    if isinstance(one, torch.nn.Parameter):
        found = torch.nn.Parameter(found, requires_grad=one.requires_grad)
    setattr(found, _STORED, one.nbytes if _is_of_torch(one) else _stored(one, type(one), set()))
    return found


def _hooks(module: torch.nn.Module) -> list[Any]:
    """The hooks of diffusers and accelerate on a module, and their registry; none if one changes the computation."""
    registry, hook = (vars(module).get(name) for name in (_DIFFUSERS, _ACCELERATE))
    found = [registry, *registry.hooks.values()] if registry is not None else []
    if not all(type(one).__module__ in _OF_WEIGHTS for one in found[1:]):
        return []
    return found + ([hook, *getattr(hook, "hooks", ())] if hook is not None else [])


def runs_on(model: torch.nn.Module) -> set[str]:
    """Types of the devices on which a model runs: those of its weights, or the one to which accelerate moves them."""
    hooks = [hook for module in model.modules() for hook in _hooks(module)]
    moved = {getattr(hook, "execution_device", None) for hook in hooks} - {None}
    return {torch.device(one).type for one in moved or {weight.device for weight in model.parameters()}}  # type: ignore[arg-type]


def _before_hooks(module: torch.nn.Module) -> Any:
    """The forward that a module with hooks had before them; None for that of its class."""
    refs = getattr(vars(module).get(_DIFFUSERS), "_fn_refs", ())
    forward = (refs[0].original_forward or refs[0].forward) if refs else vars(module).get("forward")
    while isinstance(forward, functools.partial) and hasattr(forward, "__wrapped__"):  # accelerate's
        forward = forward.__wrapped__
    return forward


def _is_packed(module: torch.nn.Module, own: list[torch.Tensor]) -> bool:
    """Whether a module is a Linear whose weight has fewer than 16 bits, or a library's own form. own: its tensors."""
    is_linear = hasattr(module, "in_features") and hasattr(module, "out_features") and not module._modules
    weight = getattr(module, "weight", None)
    return is_linear and not any(one is weight and _is_plain(one) for one in own) and not all(map(_is_plain, own))


def _is_plain(tensor: torch.Tensor) -> bool:
    return _is_of_torch(tensor) and _is_computed_with(tensor.dtype)


def _is_computed_with(dtype: torch.dtype) -> bool:
    """Whether products run in a dtype: floating, of 16 bits or more."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _is_of_torch(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) or torch_private.is_fake(tensor)


def _unpacked(module: Any, known: KnownValues, like: torch.Tensor) -> torch.nn.Module:
    weight, bias = getattr(module, "weight", like.detach()), getattr(module, "bias", None)
    numbers = weight if _is_computed_with(weight.dtype) else like
    dtype = getattr(module, "compute_dtype", None) or torch.result_type(numbers, 1.0)
    plain = Unpacked(module.in_features, module.out_features, bias is not None, device="meta", dtype=dtype)
    found: Any = faked(plain.requires_grad_(weight.requires_grad), known, like)
    setattr(found.weight, _STORED, _stored(vars(module), type(module), set()))
    if bias is not None:
        setattr(found.bias.requires_grad_(bias.requires_grad), _STORED, 0)  # the bytes are counted in the weight's
    return found  # type: ignore[no-any-return]


def _stored(value: Any, owner: type, seen: set[int]) -> int:
    """Bytes of all tensors in a value, and in attributes of objects of its owner's library, such as scales."""
    size = 0
    for one in tree_leaves(value):
        ours = type(one).__module__.partition(".")[0] == owner.__module__.partition(".")[0]
        if id(one) in seen or isinstance(one, torch.nn.Module) or not (isinstance(one, torch.Tensor) or ours):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor) and not hasattr(one, "__tensor_flatten__"):  # those are made of others
            memory = one.untyped_storage()._cdata
            size += 0 if memory in seen else one.nbytes
            seen.add(memory)
        size += _stored(getattr(one, "__dict__", None), owner, seen)
    return size


def _copy(value: Any, memo: Mapping[int, Any]) -> tuple[Any, dict[int, Any]]:
    """A deep copy, and its memo. Objects that cannot be copied are shared: a lock, a Python module, a generator."""
    mine = dict(memo)
    try:
        return copy.deepcopy(value, mine), mine
    except BREAKS as error:
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        one = [frame.f_locals["x"] for frame in frames if frame.f_code is copy.deepcopy.__code__][-1]  # its argument
        if isinstance(one, torch.nn.Module):
            raise
    return _copy(value, {**memo, id(one): one})
