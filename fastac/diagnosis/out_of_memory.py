"""An out-of-memory error, explained: what regions hold, and the next policy that would hold less."""

from __future__ import annotations

import collections
import functools
import gc
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fastac.engine import torch_private
from fastac.engine.blocks import describe
from fastac.engine.offload import KeptStorage, KeptTensor
from fastac.engine.region import Region
from fastac.engine.tape import Entry, Packed
from fastac.errors import is_out_of_memory, readable_bytes
from fastac.policy import LONG_MIN_KV, Policy

logger = logging.getLogger("fastac")

HOST, HOOKS = "the host", "saved_tensors_hooks"
_FULL, _OFFLOADED = Policy("full"), Policy("full", offload="inputs")


@functools.cache
def watch_backward() -> None:
    """Explain out-of-memory errors of every backward of this process from now on."""
    torch_private.on_backward_error(explain)


def explain(error: BaseException) -> None:
    """Add a note to an error if it says that memory ran out; below Python 3.11, log the note."""
    if not is_out_of_memory(error) or any("fastac" in note for note in getattr(error, "__notes__", ())):
        return
    try:
        note = _note()
    except Exception as problem:  # noqa: BLE001 there is little memory left, and this must not hide the error
        note = (
            f"fastac could not list what its regions hold: {type(problem).__name__}: {problem}. "
            f"fastac.report(model) shows what the latest forward saved."
        )
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        logger.error(note)


@dataclass
class _Held:
    """Memory of one storage that a region holds."""

    container: str
    kind: str
    place: str
    size: int  # bytes
    entry: Entry | None
    """The call on the region's tape that it belongs to; None for an input."""


def _note() -> str:
    regions = [one for one in gc.get_objects() if type(one) is Region]  # nobody else lists them: their graphs hold them
    if not regions:
        return "fastac holds nothing now, outside of compiled graphs: weights, the optimizer or a single block fill it."
    held = _held(regions)
    counts = collections.Counter(map(_container, regions))
    lines = ["fastac holds now:"]
    for container, count in counts.items():
        sizes: collections.Counter[str] = collections.Counter()
        for one in held:
            sizes[f"{one.kind} on {one.place}"] += one.size if one.container == container else 0
        parts = [f"{what} {readable_bytes(size)}" for what, size in sizes.items() if size]
        lines.append(f"- {container}, {count} regions: {', '.join(parts) or 'nothing'}")
    return "\n".join([*lines, _way_out(regions, held)])


def _container(region: Region) -> str:
    """The qualified name of the list that a block stands in, or of the block itself."""
    name = describe(region.function)
    container, _, last = name.rpartition(".")
    return container if last.isdigit() else name


def _held(regions: Sequence[Region]) -> list[_Held]:
    """The storages that regions hold, each once."""
    found: dict[object, _Held] = {}
    for region in regions:
        container = _container(region)
        values: list[tuple[str, Entry | None, Any]] = []
        for entry in region.tape.entries if region.tape is not None else ():
            kind = "Linear" if entry.product else "attention" if entry.op.kind != "exchange" else "collectives"
            values += [(kind, entry, one) for one in entry.held]
        values += [("inputs", None, one) for one in _inputs(region)]
        for kind, call, value in values:
            key: object
            storage = value.storage if isinstance(value, KeptTensor) else value
            tensor = storage.device if isinstance(storage, KeptStorage) else value
            if isinstance(value, Packed):  # the hooks decide where it is
                key, place, size = id(value), HOOKS, value.nbytes
            elif isinstance(storage, KeptStorage) and tensor is None:
                key, place, size = id(storage), HOST, storage.size
            elif isinstance(tensor, torch.Tensor) and torch_private.has_storage(tensor):
                key, place = torch_private.memory(tensor), tensor.device.type
                size = tensor.untyped_storage().nbytes()
            else:
                continue
            found.setdefault(key, _Held(container, kind, place, size, call))
    return list(found.values())


def _inputs(region: Region) -> Iterable[Any]:
    if region.stash is not None and region.stash.takes_inputs:  # to unpack them would copy them back
        return [one for one in region.stash.storages if one.input_of is not None]
    return torch_private.tree_leaves((torch_private.unpack(region.args), region.kwargs))


def _way_out(regions: Sequence[Region], held: Sequence[_Held]) -> str:
    """The next policy that holds less on the device, and the line to write for it."""
    policies = {one.tape.policy if one.tape is not None else _FULL for one in regions}
    now = policies.pop() if len(policies) == 1 else _FULL  # of a mixture: "full" throughout
    on_device = [one for one in held if one.place not in (HOST, HOOKS)]
    inputs = sum(one.size for one in on_device if one.entry is None)
    full = _OFFLOADED if now.offloads_inputs else _FULL
    steps = [(full, inputs)]
    if now.name == "attn_only":
        attention_only = replace(now, linear=())
        long_only = replace(attention_only, min_kv=max(now.min_kv, LONG_MIN_KV))
        kept = [(one, inputs + sum(_kept(one, each) for each in on_device)) for one in (attention_only, long_only)]
        steps = kept + steps
    if any(one.entry is None and one.place != "cpu" for one in on_device):
        steps += [(_OFFLOADED, inputs * min(_OFFLOADED.keep, len(regions)) // len(regions))]
    total = sum(one.size for one in on_device)
    for size, policy in {size: policy for policy, size in steps}.items():  # of two that hold as much, the plainer
        if size < total:
            return f"{policy} would hold {readable_bytes(size)} of it: fastac.enable(model, policy={policy.as_code()})"
    return "No policy of fastac's holds less: take fewer frames, a smaller batch, or shard the model."


def _kept(policy: Policy, held: _Held) -> int:
    """Bytes that are held under a policy of attention, too."""
    if held.entry is None or held.kind == "Linear":
        return 0
    return held.size if held.kind == "collectives" or policy.saves(int(held.entry.keys)) else 0
