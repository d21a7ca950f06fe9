"""Private names of torch for several processes: modules that FSDP2 has sharded, and the store of all ranks.

They are attributes of objects, so a torch that lacks one raises AttributeError. torch has no public way to ask for any
of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_ATTRIBUTES = ("__composable_api_", "_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""Prefixes of attributes that `fully_shard` and `replicate` set on modules."""


def sharded_parameters(module: Any) -> Iterator[tuple[torch.nn.Parameter, Any, torch.dtype]]:
    """The parameters of a unit of FSDP2: what the module has now, its DTensor, the dtype that it is computed with.

    While a unit is gathered, the module has other parameters than the DTensors.
    """
    state = module._get_fsdp_state()
    # A unit has one group of parameters, or none; or a list of them since pytorch#173509.
    groups = getattr(state, "_fsdp_param_groups", None)
    for group in [state._fsdp_param_group] if groups is None else groups:
        for parameter in getattr(group, "fsdp_params", ()):
            registered = getattr(parameter._module_info.module, parameter._module_info.param_name)
            sharded = parameter.sharded_param
            dtype = parameter.mp_policy.param_dtype if sharded.is_floating_point() else None
            yield registered, sharded, dtype or sharded.dtype


def sharded_casts(module: Any) -> tuple[torch.dtype | None, torch.dtype | None]:
    """The dtypes to which a unit of FSDP2 casts its inputs and its outputs. None: FSDP2 casts neither."""
    policy = module._get_fsdp_state()._mp_policy
    return policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype


def without_engine(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes of a module without those of `fully_shard` and `replicate`, nor their hooks."""
    kept = {name: value for name, value in attributes.items() if not name.startswith(_ATTRIBUTES)}
    for name, hooks in kept.items():
        if name.endswith("_hooks") and isinstance(hooks, dict):
            kept[name] = type(hooks)((key, hook) for key, hook in hooks.items() if not _is_of_engine(hook))
    return kept


def _is_of_engine(hook: Any) -> bool:
    # torch wraps some hooks of state dicts into an object with the attribute `hook`.
    module = getattr(getattr(hook, "hook", hook), "__module__", None) or ""
    return str(module).startswith(("torch.distributed.fsdp.", "torch.distributed._composable."))


def default_store() -> Any:
    """The store with which torch.distributed was initialized: all ranks see what one of them sets."""
    # The caller of init_process_group need not have a store of its own, and torch gives none out publicly.
    return torch.distributed.distributed_c10d._get_default_store()
