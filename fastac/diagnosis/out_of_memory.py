"""An out-of-memory error, explained: what regions hold, and the next policy that would hold less."""

from __future__ import annotations

import collections
import functools
import gc
import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from fastac.engine import torch_private
from fastac.engine.blocks import describe
from fastac.engine.offload import StashedStorage, StashedTensor
from fastac.engine.process import process
from fastac.engine.region import Region
from fastac.engine.tape import Packed
from fastac.errors import FastacError, is_out_of_memory, readable_bytes
from fastac.policy import LONG_MIN_KV, Policy

logger = logging.getLogger("fastac")

HOST, HOOKS = "the host", "saved_tensors_hooks"
_FULL, _OFFLOADED = Policy("full"), Policy("full", offload="inputs")


@functools.cache
def watch_backward() -> None:
    """Explain out-of-memory errors of every backward of this process from now on."""
    # Cached, so that the wrapper around torch's function is put on once.
    torch_private.on_backward_error(_explain_in_backward)


def _explain_in_backward(error: BaseException) -> None:
    if explain(error):
        process.ran_out.update(module for region in _regions() for module in region.beginning.modules)


def explain(error: BaseException) -> bool:
    """Add a note to an error if it says that memory ran out, and say whether it does.

    Below Python 3.11 the note is logged. An error that has the note is not counted a second time.
    """
    if not is_out_of_memory(error) or any("fastac" in note for note in getattr(error, "__notes__", ())):
        return False
    try:
        note = _note(error)
    except Exception as problem:  # noqa: BLE001 there is little memory left, and this must not hide the error
        note = (
            f"fastac could not list what its regions hold: {type(problem).__name__}: {problem}. "
            f"fastac.report(model) shows what the latest forward saved."
        )
    if hasattr(error, "add_note"):
        error.add_note(note)
    else:
        logger.error(note)
    return True


class _Held(NamedTuple):
    """Memory of one storage that a region holds."""

    container: str
    # attention, Linear, collectives, inputs; or buffers: copies of buffers that the block writes.
    contents: str
    # The type of the device, HOST or HOOKS.
    place: str
    # In bytes.
    size: int
    # Number of keys of the attention call.
    keys: int


def _note(error: BaseException) -> str:
    regions = _regions()
    if not regions:
        return "fastac holds nothing now, outside of compiled graphs: weights, the optimizer or a single block fill it."
    held = _held(regions)
    lines = ["fastac holds now:"]
    for container, count in collections.Counter(map(_container, regions)).items():
        sizes: collections.Counter[str] = collections.Counter()
        for storage in held:
            if storage.container == container:
                sizes[f"{storage.contents} on {storage.place}"] += storage.size
        parts = [f"{what} {readable_bytes(size)}" for what, size in sizes.items()]
        lines.append(f"- {container}, {count} region{'s' * (count > 1)}: {', '.join(parts) or 'nothing'}")
    if isinstance(error, FastacError):  # the host's memory ran out, and the error says what to do
        return "\n".join(lines)
    may_be_host = "error: out of memory" in str(error).lower()  # a full device: "CUDA out of memory"
    if may_be_host:
        lines.append("torch raises this also if the host has no more memory to pin: then offload and pin less there.")
    return "\n".join([*lines, _way_out(regions, held, may_be_host)])


def _regions() -> list[Region]:
    """The regions that are alive: by their autograd graphs. A list of them would keep these alive."""
    return [value for value in gc.get_objects() if type(value) is Region]


def _container(region: Region) -> str:
    """The qualified name of the list that a block is in, or of the block itself."""
    name = describe(region.function)
    container, _, last = name.rpartition(".")
    return container if last.isdigit() else name


def _held(regions: Sequence[Region]) -> list[_Held]:
    """The storages that regions hold, each once."""
    held: dict[object, _Held] = {}
    for region in regions:
        for contents, keys, value in _contents(region):
            if (found := _memory(value)) is not None:
                key, place, size = found
                held.setdefault(key, _Held(_container(region), contents, place, size, keys))
    return list(held.values())


def _contents(region: Region) -> Iterator[tuple[str, int, Any]]:
    """What a region holds: contents, number of keys, and value, as in `_Held`."""
    for entry in region.tape.entries if region.tape is not None else ():
        contents = "Linear" if entry.product else "attention" if entry.op.kind != "exchange" else "collectives"
        for value in entry.held:
            yield contents, int(entry.keys), value
    # To unpack offloaded inputs would copy them back, and there is no memory.
    if region.stash is not None and region.stash.takes_inputs:
        inputs = [storage for storage in region.stash.storages if storage.input_of is not None]
    else:
        # Slots of a checkpoint around the region hold nothing. To unpack them would run that checkpoint's recompute.
        args = () if region.in_checkpoint else torch_private.unpack(region.beginning.saved_args)
        inputs = torch_private.tree_leaves((args, region.beginning.kwargs))
    for value in inputs:
        yield "inputs", 0, value
    for value in region.beginning.snapshot.copies.values() if region.beginning.snapshot is not None else ():
        yield "buffers", 0, value


def _memory(value: Any) -> tuple[object, str, int] | None:
    """A key for the memory of a value, its place and its size in bytes; None for a value without memory."""
    if isinstance(value, Packed):  # the user's hooks decide where it is: to ask them would bring it back
        return id(value), HOOKS, value.nbytes
    storage = value.storage if isinstance(value, StashedTensor) else value
    if isinstance(storage, StashedStorage):
        if storage.device is None:
            return id(storage), HOST, storage.size
        value = storage.device
    if isinstance(value, torch.Tensor) and torch_private.has_storage(value):
        return torch_private.memory(value), value.device.type, value.untyped_storage().nbytes()
    return None


def _way_out(regions: Sequence[Region], held: Sequence[_Held], may_be_host: bool) -> str:
    """The next policy that holds less on the device, and the line to write for it.

    may_be_host: do not move more to the host.
    """
    if any(region.beginning.state.is_auto for region in regions):
        return (
            'Policy "auto" chose what is saved. Give it less memory, fastac.Auto(memory=...), or a host, '
            "fastac.Auto(host=...); if it saves nothing: fewer frames, a smaller batch, LoRA, or more GPUs."
        )
    policies = {region.tape.policy if region.tape is not None else _FULL for region in regions}
    # If blocks have different policies, the advice is "full" for all.
    current = policies.pop() if len(policies) == 1 else _FULL
    on_device = [storage for storage in held if storage.place not in (HOST, HOOKS)]
    steps = [_OFFLOADED if current.offloads_inputs else _FULL]
    if current.name == "attn_only":
        attention_only = replace(current, linear=())
        steps = [attention_only, replace(attention_only, min_kv=max(current.min_kv, LONG_MIN_KV)), *steps]
    if not may_be_host and any(storage.contents == "inputs" and storage.place != "cpu" for storage in on_device):
        steps.append(_OFFLOADED)

    def size_under(policy: Policy) -> int:
        inputs = sum(storage.size for storage in on_device if storage.contents == "inputs")
        if policy.offloads_inputs and not current.offloads_inputs:
            inputs = inputs * min(policy.keep, len(regions)) // len(regions)  # the rest leaves the device
        return inputs + sum(storage.size for storage in on_device if _is_saved(policy, storage))

    total = sum(storage.size for storage in on_device)
    # If two policies hold the same number of bytes, the dict has the later one, which is the plainer.
    for size, policy in {size_under(policy): policy for policy in steps}.items():
        if size < total:
            return f"{policy} would hold {readable_bytes(size)} of it: fastac.enable(model, policy={policy.as_code()})"
    return "No policy of fastac's holds less: take fewer frames, a smaller batch, or shard the model."


def _is_saved(policy: Policy, held: _Held) -> bool:
    is_attention = held.contents == "attention" and policy.saves(held.keys)
    return is_attention or (held.contents == "collectives" and policy.saves_collectives)
