"""Finds the block that a checkpointed function runs: the function may be a module, a method, or any other callable.

What is known of a block, its `BlockState`, is an attribute of the block, and is copied and pickled with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from fastac.engine.checkpoint_wrappers import CHECKPOINT, FSDP1
from fastac.engine.results import Communication, Kind, RegionResult, Transfers
from fastac.engine.torch_private import shape_of
from fastac.errors import class_name

MANY = 256
"""So many kinds are remembered for a block class. All others are one kind."""

_STATE = "_fastac_state"
_RUNS_ITS_BLOCK = ("__call__", "_wrapped_call_impl", "forward", "new_forward")
"""Names of functions that run the block that they belong to. Hooks of diffusers before 0.40 replace a forward by a
partial of `new_forward`."""


@dataclasses.dataclass
class BlockState:
    """What is known of one block. A copy of the block takes over its name and `offloading`, and nothing else."""

    WATCHED: ClassVar[int] = 8
    """So many regions are observed, at most, after one that made fewer attention calls than the first."""
    name: str = ""
    """Qualified, with the class of its model, if `enable` saw it."""
    offloading: int = 1
    """Number of blocks of its model that offload."""
    block: Callable[[], torch.nn.Module | None] = lambda: None
    """The block. A copy of the block has the state of its original until it is asked for its own."""
    key: object = None
    """Policy and input signature of its latest region. None makes the next region look for its kind again."""
    kind: Kind | None = None
    """The kind of its latest region."""
    attached: set[Sequence[str]] = dataclasses.field(default_factory=set)
    """Names of Linear modules, as policies have them, whose modules have hooks."""
    watched: dict[Kind, int] = dataclasses.field(default_factory=dict)
    """Kinds in which a region made fewer attention calls than the first: how many regions are still to be observed.
    They may call attention that no op shows. 0: fewer calls are normal (layer drop, a branch)."""
    latest: RegionResult | None = None
    """The result of its latest region, for reports."""
    communication: Communication | None = None
    """The collectives of its latest region; None without any."""
    transfers: Transfers | None = None
    """The copies of its latest region between device and host; None if it offloads nothing."""
    compilations_seen: int = -1
    """Number of compilations when its latest region ended."""
    step: int = 0
    """Number of steps that have ended."""
    recomputed: bool = False
    """A backward through the block ended without an error since the latest step began: the next region begins another
    step."""
    draws: bool = False
    """It draws from Python's generator or numpy's, as a step that compares values has shown."""
    writes: bool | None = None
    """It writes its own weights. None until a recompute has shown whether it does."""
    rewritten: set[str] = dataclasses.field(default_factory=set)
    """"weights" or "inputs", if somebody writes these before recompute and their values stay equal, as a compared step
    has shown."""
    is_auto: bool = False
    """Policy "auto" chooses for it."""
    lock: Any = dataclasses.field(default_factory=threading.RLock)
    """Held while a recompute runs on an earlier state of its modules."""
    submodules: Sequence[dict[str, Any]] | None = None
    """The attributes of the modules inside the block. None before its first region."""
    buffers: Sequence[dict[str, Any]] = ()
    """The dicts of the buffers of the block and of these modules."""
    modes: set[tuple[bool, ...]] = dataclasses.field(default_factory=set)
    """Training modes of these modules, as its regions had them."""

    def begin_region(self) -> bool:
        """Begin another step if the latest one has ended. Returns whether values are compared in this step.

        A step ends with a backward through the block that raises no error. Compared are steps 0, 1, 2, 4, 8, ...
        """
        if self.recomputed:
            self.step, self.recomputed = self.step + 1, False
        # True for 0 and the powers of two: a change that lasts is found soon, and a long run hardly pays for it.
        return self.step & (self.step - 1) == 0

    def __reduce__(self) -> Any:
        # A copied or unpickled block has run no region yet, and a lock cannot be pickled.
        return BlockState, (self.name, self.offloading)


def is_inside(name: str, block: str) -> bool:
    """Whether a qualified name is that of a block, or of a module in it. Every name is inside ""."""
    return not block or name == block or name.startswith(block + ".")


def module_of(function: Any) -> torch.nn.Module | None:
    """The module that a function is, or whose method it is, also if hooks of other libraries wrap the function."""
    while function is not None:
        # Hooks of diffusers and accelerate bind a forward as a partial, whose first argument is the module.
        is_bound = isinstance(function, functools.partial) and function.args and hasattr(function, "__wrapped__")
        owner = function.args[0] if is_bound else getattr(function, "__self__", function)
        if isinstance(owner, torch.nn.Module):
            return owner
        function = getattr(function, "__wrapped__", None)
    return None


def inside(module: Any) -> Any:
    """The module inside torch's activation wrappers (CheckpointWrapper, OffloadWrapper); itself if it has none."""
    # This runs at every call of a block, so it is a plain loop. An FSDP1 wrapper is looked through, but stays around
    # the module if there is no activation wrapper inside it: its forward gathers the weights.
    innermost = module
    while True:
        children: Any = getattr(module, "_modules", ())
        if CHECKPOINT in children:
            innermost = module = children[CHECKPOINT]
        elif FSDP1 in children:
            module = children[FSDP1]
        else:
            return innermost


def block_of(function: Any) -> torch.nn.Module | None:
    """The block that a function runs, if it is a module or its forward. Other methods may run any of several layers."""
    if isinstance(function, torch.nn.Module):
        return inside(function)  # type: ignore[no-any-return]
    return module_of(function) if getattr(function, "__name__", "") in _RUNS_ITS_BLOCK else None


def state_of(block: torch.nn.Module) -> BlockState:
    """The state of a block. It is made if the block has none."""
    return known_state(block) or vars(block).setdefault(_STATE, BlockState(block=weakref.ref(block)))


def known_state(block: torch.nn.Module) -> BlockState | None:
    """The state of a block; None if no region of it was seen and `enable` did not name it."""
    state: BlockState | None = vars(block).get(_STATE)
    if state is not None and state.block() is not block:
        state = vars(block)[_STATE] = BlockState(state.name, state.offloading, weakref.ref(block))
    return state


def set_state(block: torch.nn.Module, state: BlockState | None) -> None:
    """Give a block a state, or none."""
    vars(block).pop(_STATE, None)
    if state is not None:
        vars(block)[_STATE] = state


def code_of(function: Any) -> Any:
    """A key for the code that a region runs: the class of a block, or the code of a function."""
    while True:
        block = block_of(function)
        if block is not None:
            # FSDP1 and torch.compile put a block into a class of theirs, which is the same for all blocks.
            for name in ("_fsdp_wrapped_module", "_orig_mod"):
                block = getattr(block, name, block)
            # `fully_shard` derives a class. It may come after `enable`, which forgot the kinds of the original class.
            return next(cls for cls in type(block).__mro__ if cls.__name__ == class_name(block))
        if isinstance(function, types.MethodType):
            return function.__func__
        # The function inside a partial, or inside a decorator.
        inner = getattr(function, "func", None) or getattr(function, "__wrapped__", None)
        if inner is None:
            return getattr(function, "__code__", type(function))
        function = inner


def modules_run_by(function: Any, args: Iterable[Any], kwargs: Mapping[str, Any]) -> list[torch.nn.Module]:
    """The module that a function runs. If that is not known: the modules in its arguments and in what it refers to."""
    module = module_of(function)
    if module is not None:
        return [inside(module)]
    values = [function, *args, *kwargs.values(), *globals_of(function)]
    found: dict[torch.nn.Module, None] = {}
    levels = _DEPTH
    while values:
        values = values[:_WIDTH]
        # Not isinstance: that reads __class__ of an object that is not a module, and a proxy may raise there.
        found |= {inside(value): None for value in values if issubclass(type(value), torch.nn.Module)}
        # Look one level beyond that of the first module.
        levels = min(levels - 1, 1) if found else levels - 1
        others = (
            [value for value in values if not issubclass(type(value), (torch.nn.Module, torch.Tensor, *_PLAIN))]
            if levels
            else []
        )
        values = []
        for value in others:
            with contextlib.suppress(Exception):  # an object may raise whatever it likes when its parts are read
                values += _parts_of(value)
    return list(found)


def globals_of(function: Any) -> list[Any]:
    """The globals that a function uses, or that a function which it wraps uses, without other functions."""
    found: list[Any] = []
    while function is not None:
        function = function.func if isinstance(function, functools.partial) else function
        codes = [getattr(function, "__code__", None)]
        # A lambda or comprehension inside the function has a code object of its own.
        codes += [value for value in getattr(codes[0], "co_consts", ()) if isinstance(value, types.CodeType)]
        names = dict.fromkeys(name for code in codes for name in getattr(code, "co_names", ()))
        globals_ = getattr(function, "__globals__", {})
        found += [globals_[name] for name in names if name in globals_]
        function = getattr(function, "__wrapped__", None)
    # Functions among them would lead on, through globals of their own, to modules that this call does not run.
    return [value for value in found if not isinstance(value, types.FunctionType)]


def _parts_of(value: Any) -> Iterable[Any]:
    """The values that a container, a function or an object refers to. A large container is data: none of its values."""
    if issubclass(type(value), _CONTAINERS):
        items = value.values() if isinstance(value, dict) else value
        return items if len(value) <= MANY else ()
    if isinstance(value, types.MethodType):
        return (value.__self__,)
    if isinstance(value, (functools.partial, types.FunctionType)):
        return held_by(value)
    slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    return [*getattr(value, "__dict__", {}).values(), *slots]


_CONTAINERS = (list, tuple, dict)
_PLAIN = (str, bytes, int, float, type(None), type, types.ModuleType, types.BuiltinFunctionType)
_DEPTH, _WIDTH = 5, 100
"""How many levels are searched (a closure over an object whose list holds a block is found), and values per level."""


def modules_in(function: Any) -> list[torch.nn.Module]:
    """The modules that a function holds: in its closure, its defaults, or in a partial."""
    owners = [value.__self__ if isinstance(value, types.MethodType) else value for value in held_by(function)]
    return [inside(owner) for owner in owners if isinstance(owner, torch.nn.Module)]


def held_by(function: Any) -> list[Any]:
    """The values that a function holds: in its closure, its defaults, or in a partial."""
    held: list[Any] = []
    while function is not None:
        if isinstance(function, functools.partial):
            held += (*function.args, *function.keywords.values())
            function = function.func
            held.append(function)
        held += getattr(function, "__defaults__", None) or ()
        held += (getattr(function, "__kwdefaults__", None) or {}).values()
        for cell in getattr(function, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # the cell is empty
                held.append(cell.cell_contents)
        function = getattr(function, "__wrapped__", None)
    return held


def describe(function: Any) -> str:
    """A block or function in words: its qualified name if `enable` saw it, or its class, or the function's name."""
    while isinstance(function, functools.partial):
        function = function.func
    block = block_of(function)
    state = known_state(block) if block is not None else None
    if state is not None and state.name:
        return state.name
    return getattr(function, "__qualname__", None) or class_name(block if block is not None else function)


def is_compiled(function: Any) -> bool:
    """Whether torch.compile was applied to a function, a block, or a module inside it."""
    # torch.compile marks a function by this attribute. A module that it compiled has one of the two below.
    if hasattr(function, "_torchdynamo_orig_callable"):
        return True
    module = module_of(function)
    return module is not None and any(
        inner._compiled_call_impl is not None or hasattr(inner, "_orig_mod") for inner in module.modules()
    )


Signature = tuple[Any, Any]


def signature(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Signature:
    """A key for inputs: shapes, dtypes, flags, structure. Regions with the same key make the same attention calls.

    Strings, numbers and keys of dicts are not part of it: they may be new in each step (a prompt, a sample's id).
    """
    return _signature(args), tuple([(name, _signature(value)) for name, value in kwargs.items()]) if kwargs else None


def _signature(value: Any) -> Any:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return tuple([(shape_of(v), v.dtype) if isinstance(v, torch.Tensor) else _signature(v) for v in value])
    if isinstance(value, torch.Tensor):
        return shape_of(value), value.dtype
    return value if value is None or isinstance(value, bool) else type(value)
