"""A copy of a model without its data, whose weights may be offloaded, cast for each layer or quantized.

What a step allocates does not depend on that. So hooks that load or cast weights are not copied, and a Linear module
with a packed weight becomes a Linear module of plain numbers. Weights count with the bytes that the model stores.
"""

from __future__ import annotations

import copy
import functools
import traceback
from collections.abc import Mapping
from typing import Any

import torch

from fastac.diagnosis.autograd_graph import tensors_of
from fastac.engine import torch_private
from fastac.engine.torch_private import tree_leaves
from fastac.models.blocks import unwrapped
from fastac.planning.fake_values import KnownValues
from fastac.registry.torch_private import has_no_data

BREAKS = (RuntimeError, LookupError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError, copy.Error)
"""Errors of a model that cannot be copied, or does not run on some inputs, or without values."""

# Attributes of a module: the registry of its hooks from diffusers, and its hook from accelerate.
_DIFFUSERS, _ACCELERATE = "_diffusers_hook", "_hf_hook"
# Modules of diffusers whose hooks only load or cast weights.
_OF_WEIGHTS = ("diffusers.hooks.group_offloading", "diffusers.hooks.layerwise_casting")
# Attribute of a fake tensor: the bytes of the tensor that it stands for, as the model stores it.
_STORED = "_fastac_stored"


class Unpacked(torch.nn.Linear):
    """Replaces a Linear module whose weight is packed. The output of neither can be saved: see `linear.attach`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product in the dtype of the weight, cast to that of the input."""
        return super().forward(x.to(self.weight.dtype)).to(x.dtype)


def stored_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a parameter or buffer of a fake model, as the model stores it; of any other tensor its own bytes."""
    return int(getattr(tensor, _STORED, tensor.nbytes))


def faked(model: torch.nn.Module, known: KnownValues, like: torch.Tensor) -> torch.nn.Module:
    """A deep copy of the model inside wrappers, with fake tensors.

    like: an input. All weights are on its device, and packed ones without a dtype of their own have its dtype.
    """
    # `copy.deepcopy` returns what `memo` has for the id of an object: fake tensors stand there for all tensors, so that
    # no data is copied. (torch refuses to copy a real tensor under a fake mode: pytorch#165547.)
    memo: dict[int, Any] = {}
    # id of a parameter -> the dtype that a hook casts it to before it is used.
    casts: dict[int, torch.dtype] = {}
    inner = unwrapped(model)
    hooks_of = {module: hooks for module in inner.modules() if (hooks := _hooks(module))}
    for module, hooks in hooks_of.items():
        # The hooks hold weights, some of them in host memory. The copy shares them until they are removed below.
        memo.update((id(hook), hook) for hook in hooks)
        for dtype in [hook.compute_dtype for hook in hooks if hasattr(hook, "compute_dtype")]:
            casts.update((id(parameter), dtype) for parameter in module.parameters())
    for module in inner.modules():
        tensors = {id(leaf): leaf for leaf in tensors_of(vars(module))}
        memo.update((key, fake(tensor, known, like.device, casts.get(key))) for key, tensor in tensors.items())
        # Layerwise casting also stores few bits, but the hook unpacks them.
        if _is_packed(module, tensors) and not casts.keys() & tensors.keys():
            memo[id(module)] = _unpacked(module, known, like)
    copied: torch.nn.Module
    copied, memo = _copy(inner, memo)
    for module in hooks_of:
        attributes = vars(memo[id(module)])
        for name in (_DIFFUSERS, _ACCELERATE, "forward"):
            attributes.pop(name, None)
        if (forward := _before_hooks(module)) is not None and not isinstance(memo[id(module)], Unpacked):
            attributes["forward"] = _copy(forward, memo)[0]
    return copied


def fake(
    real: torch.Tensor, known: KnownValues, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A tensor without data, like a real one.

    device: of the result; "meta" becomes the CPU, which has a kernel for every operation. dtype: by default the same.
    """
    if _is_of_torch(real) and real.device == device and dtype is None and not has_no_data(real):
        result: torch.Tensor = known.mode.from_tensor(real.detach())  # views share a storage as the real ones do
    else:
        device = torch.device("cpu") if device.type == "meta" else device
        with known.mode:
            result = torch.empty_strided(real.shape, real.stride(), dtype=dtype or real.dtype, device=device)
    if isinstance(real, torch.nn.Parameter):
        result = torch.nn.Parameter(result, requires_grad=real.requires_grad)
    setattr(result, _STORED, real.nbytes if _is_of_torch(real) else _stored(real, type(real), {}))
    return result


def _hooks(module: torch.nn.Module) -> list[Any]:
    """The hooks of diffusers and accelerate on a module, and their registry; none if one changes the computation."""
    registry, accelerate_hook = (vars(module).get(name) for name in (_DIFFUSERS, _ACCELERATE))
    hooks = [registry, *registry.hooks.values()] if registry is not None else []
    if not all(type(hook).__module__ in _OF_WEIGHTS for hook in hooks[1:]):
        return []
    # accelerate's hook may be a SequentialHook, which has others.
    return hooks + ([accelerate_hook, *getattr(accelerate_hook, "hooks", ())] if accelerate_hook is not None else [])


def runs_on(model: torch.nn.Module) -> set[str]:
    """Types of the devices on which a model runs: those of its weights, or the device accelerate moves them to."""
    hooks = [hook for module in model.modules() for hook in _hooks(module)]
    devices: set[Any] = {getattr(hook, "execution_device", None) for hook in hooks} - {None}
    return {torch.device(device).type for device in devices or {weight.device for weight in model.parameters()}}


def _before_hooks(module: torch.nn.Module) -> Any:
    """The forward that a module with hooks had before them; None for that of its class."""
    refs = getattr(vars(module).get(_DIFFUSERS), "_fn_refs", ())
    forward = (refs[0].original_forward or refs[0].forward) if refs else vars(module).get("forward")
    # accelerate wraps the forward in a partial, with the one before as its __wrapped__ (its pull request 1971).
    while isinstance(forward, functools.partial) and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    return forward


def _is_packed(module: torch.nn.Module, tensors: Mapping[int, torch.Tensor]) -> bool:
    """Whether a module is a Linear whose weight has fewer than 16 bits, or a library's own form.

    tensors: its own, by id.
    """
    # By its attributes, not its class: libraries have Linear classes of their own, some with the weight in buffers.
    is_linear = hasattr(module, "in_features") and hasattr(module, "out_features") and not module._modules
    weight = tensors.get(id(getattr(module, "weight", None)))
    return is_linear and not all(map(_is_plain, tensors.values() if weight is None else [weight]))


def _is_plain(tensor: torch.Tensor) -> bool:
    return _is_of_torch(tensor) and _is_computed_with(tensor.dtype)


def _is_computed_with(dtype: torch.dtype) -> bool:
    """Whether products run in a dtype: floating, of 16 bits or more."""
    return dtype.is_floating_point and dtype.itemsize > 1


def _is_of_torch(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) or torch_private.is_fake(tensor)


def _unpacked(module: Any, known: KnownValues, like: torch.Tensor) -> torch.nn.Module:
    """A Linear module of plain numbers with the sizes of a packed one."""
    # Libraries compute in `compute_dtype`, or in the dtype of the weight if products run in it, or of the input.
    weight, bias = getattr(module, "weight", like.detach()), getattr(module, "bias", None)
    numbers = weight if _is_computed_with(weight.dtype) else like
    dtype = getattr(module, "compute_dtype", None) or torch.result_type(numbers, 1.0)
    plain = Unpacked(module.in_features, module.out_features, bias is not None, device="meta", dtype=dtype)
    copied: Any = faked(plain.requires_grad_(weight.requires_grad), known, like)
    setattr(copied.weight, _STORED, _stored(vars(module), type(module), {}))
    if bias is not None:
        setattr(copied.bias.requires_grad_(bias.requires_grad), _STORED, 0)  # the bytes are counted in the weight's
    return copied  # type: ignore[no-any-return]


def _stored(value: Any, owner: type, seen: dict[int, int]) -> int:
    """Bytes of all tensors in a value, and in attributes of objects of its owner's library, such as scales.

    seen: id of an object, or address of a storage -> the bytes that count for it.
    """
    library = owner.__module__.partition(".")[0]
    for leaf in tree_leaves(value):
        is_tensor, is_of_library = isinstance(leaf, torch.Tensor), type(leaf).__module__.partition(".")[0] == library
        if id(leaf) in seen or isinstance(leaf, torch.nn.Module) or not (is_tensor or is_of_library):
            continue
        seen[id(leaf)] = 0
        # A tensor subclass with __tensor_flatten__ has no bytes itself: its attributes are the tensors that it is of.
        if is_tensor and not hasattr(leaf, "__tensor_flatten__"):
            seen.setdefault(leaf.untyped_storage()._cdata, leaf.nbytes)
        _stored(getattr(leaf, "__dict__", None), owner, seen)
    return sum(seen.values())


def _copy(value: Any, memo: Mapping[int, Any]) -> tuple[Any, dict[int, Any]]:
    """A deep copy, and its memo. Objects that cannot be copied are shared: a lock, a Python module, a generator."""
    filled = dict(memo)
    try:
        return copy.deepcopy(value, filled), filled
    except BREAKS as error:
        # Nothing else names the object: it is the argument `x` of the innermost call of deepcopy in the traceback.
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        culprit = [frame.f_locals["x"] for frame in frames if frame.f_code is copy.deepcopy.__code__][-1]
        if isinstance(culprit, torch.nn.Module):
            raise
    return _copy(value, {**memo, id(culprit): culprit})
