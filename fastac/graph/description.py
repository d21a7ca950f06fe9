"""What of a model and of a call a trace takes for granted, and the words for a call that differs."""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fastac.engine import generators, torch_private
from fastac.errors import FastacError
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
    """All that a trace takes for granted. Traces and calls are compared by equality.

    same: for each tensor of state and leaves, the place of the first that is the same one: a graph has one input for a
    tensor in two places. shared: of the first that shares its memory; None for a step that writes to none of them.
    settings: plain attributes of modules, such as a rate of dropout, but for those of `changing`, which the step itself
    changes.
    """

    state: dict[str, Kind]
    structure: Any
    leaves: list[Any]
    same: list[int]
    shared: list[int] | None
    training: dict[str, bool]
    settings: dict[str, Any]
    autocast: dict[str, Any]
    changing: frozenset[str] = frozenset()


def state_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A model's parameters and buffers by name; a tied one once."""
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def describe(
    model: torch.nn.Module,
    state: Mapping[str, torch.Tensor],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    writes: bool = True,
) -> Description:
    """A model as it is, and a call. writes: whether the step writes to some of the tensors, as far as is known."""
    leaves, structure = internals.tree_flatten((args, dict(kwargs)))
    devices = generators.devices_of([*state.values(), *leaves])
    return Description(
        state={name: _kind(tensor) for name, tensor in state.items()},
        structure=structure,
        leaves=[_kind(leaf) for leaf in leaves],
        same=_first_places([*state.values(), *leaves], id),
        shared=_first_places([*state.values(), *leaves], torch_private.memory) if writes else None,
        training={name: module.training for name, module in model.named_modules()},
        settings={
            f"{name}.{key}": value
            for name, module in model.named_modules()
            for key, value in vars(module).items()
            if key != "training" and value is not None and _is_plain(value)
        },
        autocast={
            device.type: torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
            for device in devices
            if torch.amp.is_autocast_available(device.type)
        },
    )


def _is_plain(value: object) -> bool:
    if isinstance(value, slice):
        return _is_plain((value.start, value.stop, value.step))
    if isinstance(value, (tuple, frozenset)):
        return all(map(_is_plain, value))
    return isinstance(value, (*_KNOWN, range)) and not isinstance(value, (torch.Tensor, torch.Generator))


def steady(before: Description, after: Description) -> Description:
    """A description without those settings of modules that the step itself changes: counters of its own."""
    keys = before.settings.keys() | after.settings.keys()
    changing = frozenset(key for key in keys if before.settings.get(key, keys) != after.settings.get(key, keys))
    return _without(before, changing)


def is_as(now: Description, traced: Description) -> bool:
    """Whether a call is as the traced one, in all that the trace took for granted."""
    return _without(now, traced.changing) == traced


def _without(described: Description, changing: frozenset[str]) -> Description:
    settings = {key: value for key, value in described.settings.items() if key not in changing}
    return described._replace(settings=settings, changing=changing)


def refuse_strange(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise FastacError for an argument that may hold tensors which nobody sees: they would be constants."""
    leaves, _ = internals.tree_flatten((args, dict(kwargs)))
    for name, leaf in zip(argument_names(args, kwargs), leaves, strict=True):
        if not isinstance(leaf, _KNOWN) and not _is_plain(leaf) and not callable(leaf):
            raise FastacError(
                f"trace: {name} is a {type(leaf).__name__}, and what is inside would be the same in every call of the "
                f"graph. Pass tensors, numbers and texts, alone or in lists, tuples and dicts; or register the class "
                f"by torch.utils._pytree.register_dataclass."
            )


_KNOWN = (
    torch.Tensor,
    torch.Generator,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    type(None),
)


def _first_places(values: Sequence[Any], of: Callable[[torch.Tensor], object]) -> list[int]:
    first: dict[object, int] = {}
    return [first.setdefault(of(value), place) for place, value in enumerate(values) if isinstance(value, torch.Tensor)]


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
    for name in (before.settings | now.settings).keys() - before.changing:
        if before.settings.get(name, before) != now.settings.get(name, before):
            seen, found = (repr(one.settings[name]) if name in one.settings else "not set" for one in (before, now))
            return f"the model's {name} is {found} now, traced with {seen}. {AGAIN}"
    if before.same != now.same or before.shared != now.shared:
        return f"other arguments are one and the same tensor, or share their memory, than when it was traced. {AGAIN}"
    return f"autocast: {_autocast(now.autocast)} now, traced with {_autocast(before.autocast)}. {AGAIN}"


def _kind(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return Kind(tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad)
    if isinstance(value, float) and value != value:
        return float, "nan"  # which differs from itself
    return type(value), value


def _kinds(seen: Any, found: Any) -> str:
    if seen is None or found is None:
        return f"{'not there when traced' if seen is None else 'not there any more'}. {AGAIN}"
    if not isinstance(seen, Kind) or not isinstance(found, Kind):
        text = f"{_value(found)} now, traced with {_value(seen)}. {AGAIN}"
        if not isinstance(found, Kind) and isinstance(found[1], torch.nn.Module):
            return f"another {type(found[1]).__name__} than the one that was traced. {AGAIN}"
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
