"""What of a model and of a call a trace takes for granted, and the words for a call that differs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from fastac import preservation
from fastac.graph import internals

AGAIN = "Trace the step again for this one: fastac.graph.trace(step, model, ...)."


class Kind(NamedTuple):
    """What a graph knows of a tensor."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class Description(NamedTuple):
    """All that a trace takes for granted. Traces and calls are compared by equality."""

    state: dict[str, Kind]
    structure: Any
    leaves: list[Any]
    training: dict[str, bool]
    autocast: dict[str, Any]


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters and buffers by name; a tied one once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def describe(
    model: torch.nn.Module, state: Mapping[str, torch.Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Description:
    """A model as it is, and a call."""
    leaves, structure = internals.tree_flatten((args, dict(kwargs)))
    devices = preservation.devices_of([*state.values(), *leaves])
    return Description(
        state={name: _kind(tensor) for name, tensor in state.items()},
        structure=structure,
        leaves=[_kind(leaf) for leaf in leaves],
        training={name: module.training for name, module in model.named_modules()},
        autocast={
            device.type: torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
            for device in devices
            if torch.amp.is_autocast_available(device.type)
        },
    )


def argument_names(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[str]:
    """What each leaf of the arguments is called in messages: argument 0, argument scale, argument batch['x'][0]."""
    names = []
    for path in internals.leaf_paths((args, dict(kwargs))):
        place, first, *rest = path
        names.append(f"argument {first.idx if place.idx == 0 else first.key}{internals.path_text(rest)}")
    return names


def difference(before: Description, now: Description, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
    """Where a call differs from the traced one, and what to do."""
    if before.structure != now.structure:
        return f"called with {_call(now.structure)}, traced with {_call(before.structure)}. {AGAIN}"
    if before.training != now.training:
        return _training(before.training, now.training)
    if before.state != now.state:
        name = next(name for name in {**before.state, **now.state} if before.state.get(name) != now.state.get(name))
        return f"the model's parameters and buffers ({name}): {_kinds(before.state.get(name), now.state.get(name))}"
    if before.leaves != now.leaves:
        names = zip(argument_names(args, kwargs), before.leaves, now.leaves, strict=True)
        name, seen, found = next(each for each in names if each[1] != each[2])
        return f"{name}: {_kinds(seen, found)}"
    return f"autocast: {_autocast(now.autocast)} now, traced with {_autocast(before.autocast)}. {AGAIN}"


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Kind(tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)
    return type(value), value


def _kinds(seen: Any, found: Any) -> str:
    if seen is None or found is None:
        return f"{'not there when traced' if seen is None else 'not there any more'}. {AGAIN}"
    if not isinstance(seen, Kind) or not isinstance(found, Kind):
        text = f"{_value(found)} now, traced with {_value(seen)}. {AGAIN}"
        return text if isinstance(seen, Kind) or isinstance(found, Kind) else f"{text} Or pass it as a tensor."
    fields = [field for field in Kind._fields if getattr(seen, field) != getattr(found, field)]
    if "shape" in fields and "strides" in fields:
        fields.remove("strides")  # they follow
    parts = [f"{field} {getattr(found, field)} now, traced with {getattr(seen, field)}" for field in fields]
    return f"{'; '.join(parts)}. {AGAIN}"


def _value(kind: Any) -> str:
    return "a tensor" if isinstance(kind, Kind) else repr(kind[1])[:200]


class _Leaf:
    def __repr__(self) -> str:
        return "_"


def _call(structure: Any) -> str:
    args, kwargs = internals.tree_unflatten([_Leaf()] * structure.num_leaves, structure)
    texts = [*map(repr, args), *(f"{name}={value!r}" for name, value in kwargs.items())]
    return f"({', '.join(texts)})"[:200]


def _training(before: Mapping[str, bool], now: Mapping[str, bool]) -> str:
    if before.keys() != now.keys():
        name = next(iter(before.keys() ^ now.keys()))
        return f"the model has other modules than the traced one ({name}). {AGAIN}"
    name = next(name for name in before if before[name] != now[name])
    seen, found = ("train" if mode[name] else "eval" for mode in (before, now))
    which, call = (f"module {name}", f"model.get_submodule({name!r})") if name else ("the model", "model")
    mend = f"{call}.{'train' if before[name] else 'eval'}()"
    return f"{which} was traced in {seen} mode, and is in {found} mode now: call {mend}, or trace the step again."


def _autocast(found: Mapping[str, Any]) -> str:
    on = [f"{dtype} on {device}" for device, dtype in found.items() if dtype]
    return ", ".join(on) or "none"
