"""What a checkpointed function is: a block, a method of one, or any other callable; and what is known of a block.

What belongs to a block stands on the block, as `BlockRecord`, and is copied and pickled with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import types
from typing import Any

import torch

from fastac.engine.calls import RegionResult, Transfers
from fastac.engine.collectives import Communication
from fastac.engine.wrappers import inside
from fastac.errors import class_name

MANY = 256
"""Input signatures of a block's class that are remembered; with more than that, all are learned anew."""

_RECORD = "_fastac_record"
_RUNS_ITS_BLOCK = ("__call__", "_wrapped_call_impl", "forward", "new_forward")
"""The last is what hooks of diffusers before 0.40 put in the place of a forward, bound by a partial."""


@dataclasses.dataclass
class BlockRecord:
    """What is known of one block.

    name: qualified, with its model's class, where `enable` saw it. offloading: how many blocks of its model offload.
    key, latest: of its latest region. communication: of that region's collectives, None where it had none; transfers:
    what it offloaded. looked: when the autograd graph of a region was last searched for compiled code, as compilations
    count. step: how many of its steps have ended; recomputed: a backward came through, so that the next region begins
    another. writes: whether it writes weights or buffers of its own, once a recompute has shown it. doubts: kinds of
    which a region made fewer calls than the first; whether one was watched that did.
    """

    name: str = ""
    offloading: int = 1
    key: object = None
    latest: RegionResult | None = None
    communication: Communication | None = None
    looked: int = -1
    step: int = 0
    recomputed: bool = False
    writes: bool | None = None
    transfers: Transfers | None = None
    doubts: dict[object, bool] = dataclasses.field(default_factory=dict)

    def begin_region(self) -> bool:
        """Whether the region that begins has its values compared: those of steps 0, 1, 2, 4, 8 and so on, all of them.

        A step ends with a backward through the block.
        """
        if self.recomputed:
            self.step, self.recomputed = self.step + 1, False
        return self.step & (self.step - 1) == 0

    def doubt(self, key: object) -> None:
        """A region of a kind made fewer calls than the first: the next ones are watched until one does so again."""
        if len(self.doubts) >= MANY:
            self.doubts.clear()
        self.doubts.setdefault(key, False)

    def is_doubted(self, key: object) -> bool:
        """Whether regions of a kind are watched."""
        return bool(self.doubts) and not self.doubts.get(key, True)

    def __deepcopy__(self, memo: Any) -> BlockRecord:
        return BlockRecord(self.name, self.offloading)

    def __reduce__(self) -> Any:
        return BlockRecord, (self.name, self.offloading)


def is_inside(name: str, block: str) -> bool:
    """Whether a qualified name is that of a block, or of a module inside it. All are inside ""."""
    return not block or name == block or name.startswith(block + ".")


def module_of(function: Any) -> torch.nn.Module | None:
    """The module that a function is, or is a method of, by itself or inside what hooks of others put around it."""
    while function is not None:
        is_bound = isinstance(function, functools.partial) and function.args and hasattr(function, "__wrapped__")
        owner = function.args[0] if is_bound else getattr(function, "__self__", function)
        if isinstance(owner, torch.nn.Module):
            return owner
        function = getattr(function, "__wrapped__", None)
    return None


def block_of(function: Any) -> torch.nn.Module | None:
    """The block that is run by a function: a module, or its forward. Another method may run any of several layers."""
    if isinstance(function, torch.nn.Module):
        return inside(function)  # type: ignore[no-any-return]
    return module_of(function) if getattr(function, "__name__", "") in _RUNS_ITS_BLOCK else None


def record_of(block: torch.nn.Module) -> BlockRecord:
    """What is known of a block; made where nothing is so far."""
    own = vars(block)
    record: BlockRecord | None = own.get(_RECORD)
    if record is None:
        record = own[_RECORD] = BlockRecord()
    return record


def known_record(block: torch.nn.Module) -> BlockRecord | None:
    """What is known of a block; None where no region of it was seen, and `enable` did not name it."""
    return vars(block).get(_RECORD)


def forget(block: torch.nn.Module) -> None:
    """Know nothing of a block."""
    vars(block).pop(_RECORD, None)


def kind_of(function: Any) -> Any:
    """What regions have in common that run the same code: the class of a block, or the code of a function."""
    while True:
        block = block_of(function)
        if block is not None:
            return type(getattr(block, "_orig_mod", block))
        if isinstance(function, types.MethodType):
            return function.__func__
        inner = getattr(function, "func", None) or getattr(function, "__wrapped__", None)  # partial, decorator
        if inner is None:
            return getattr(function, "__code__", type(function))
        function = inner


def modules_in(function: Any) -> list[torch.nn.Module]:
    """The modules that a function holds, in its closure or as what a partial passes to it."""
    held: list[Any] = []
    while function is not None:
        if isinstance(function, functools.partial):
            held += (*function.args, *function.keywords.values())
            function = function.func
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # it is empty
                held.append(cell.cell_contents)
        function = getattr(function, "__wrapped__", None)
    owners = [one.__self__ if isinstance(one, types.MethodType) else one for one in held]
    return [inside(one) for one in owners if isinstance(one, torch.nn.Module)]


def describe(function: Any) -> str:
    """A block's qualified name where `enable` saw it, else its class, or the name of a function, for messages."""
    while isinstance(function, functools.partial):
        function = function.func
    block = block_of(function)
    record = known_record(block) if block is not None else None
    if record is not None and record.name:
        return record.name
    return getattr(function, "__qualname__", None) or class_name(block if block is not None else function)


def is_compiled(function: Any) -> bool:
    """Whether torch.compile was applied to a function, a block, or a module inside it."""
    if hasattr(function, "_torchdynamo_orig_callable"):
        return True
    module = module_of(function)
    return module is not None and any(
        inner._compiled_call_impl is not None or hasattr(inner, "_orig_mod") for inner in module.modules()
    )


def signature(value: Any) -> Any:
    """What of a region's inputs decides which attention calls it makes: shapes, dtypes, flags, structure."""
    if isinstance(value, (tuple, list)):
        return tuple([(v.shape, v.dtype) if isinstance(v, torch.Tensor) else signature(v) for v in value])
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype
    if isinstance(value, dict):
        return tuple([(key, signature(item)) for key, item in value.items()])
    if value is None or isinstance(value, (bool, str)):
        return value
    return type(value)  # a number may change with every step
