"""Everything that fastac remembers in this process, in one object with one reset.

All else stands on models, or lives as long as a region. Rows, and decisions about ops, are in `fastac.registry`.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fastac.engine.blocks import BlockState
from fastac.engine.results import Kind, RegionResult
from fastac.policy import Policy
from fastac.registry import BoundOp, OpaqueFunction

if TYPE_CHECKING:
    import torch

Listener = Callable[[BoundOp, Sequence[Any], Mapping[str, Any]], None]
"""Called with an attention op and its arguments."""


class Thread(threading.local):
    """What one thread remembers. A backward may run in other threads than its forward."""

    def __init__(self) -> None:
        # The innermost scope that is open (`fastac.engine.tape.Scope`).
        self.scope: Any = None
        # Choices among floats that the latest recompute made with no scope open: nothing had kept them.
        self.choices: set[str] = set()
        # The step that is measured (`fastac.engine.measurement.MeasuredStep`), while its forward runs.
        self.measurement: Any = None
        # The latest backward that recomputed a region, and its regions: first and last autograd node, policy.
        self.backward: int | None = None
        self.replayed: list[tuple[int, int, Policy]] = []
        # What follows are stashes of `fastac.engine.offload`, weakly: a region goes with its autograd graph.
        # Those that are not offloaded so far, in the order of their forwards.
        self.on_device: list[weakref.ref[Any]] = []
        # The one whose forward ended last.
        self.latest: weakref.ref[Any] | None = None
        # The one whose copies back were begun ahead of its recompute.
        self.prefetched: weakref.ref[Any] | None = None


class Process:
    """State of this process. `reset` forgets what belongs to models; the rest stays for good."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.thread = Thread()
        # Intercepted ops by qualified name. They stay: removing a kernel of the dispatcher crashes other threads.
        self.installed: dict[str, BoundOp] = {}
        # The modules that were loaded when ops were last looked for, and when known Functions were.
        self.modules: object = None
        self.modules_of_functions: object = None
        # autograd.Functions that are visible, by the name of their op.
        self.visible: dict[str, tuple[type[torch.autograd.Function], OpaqueFunction]] = {}
        # Functions of libraries that become visible once their library is loaded, and those for which that was decided,
        # with the module in which each was found.
        self.known_functions: list[OpaqueFunction] = []
        self.settled_functions: set[tuple[OpaqueFunction, str]] = set()
        # Calls of visible Functions in the dispatcher, by the op's last argument.
        self.opaque_calls: dict[int, Any] = {}
        # Readers of what contexts of libraries set, by how a sentence on it begins: fastac.engine.beginning.
        self.settings: dict[str, Callable[[], str]] = {}
        # The largest size of a rank that the host was seen to have memory for.
        self.host_bytes = 0
        # Models that trained under policy "auto". What they compared with other ranks stays in the ranks' store.
        self.planners = 0
        # Optimizers that have stepped since then, and how often memory was taken for good: an optimizer makes its first
        # step, or another of these models its first forward.
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.memory_changes = 0
        # Resets of dynamo that were seen. After one, it gives the same ids again.
        self.dynamo_resets = 0
        self.reset()

    def reset(self) -> None:
        """Forget models, and close what a test left open."""
        # Kinds of regions, by block class (or code), then by key.
        self.kinds: weakref.WeakKeyDictionary[Any, dict[object, Kind]] = weakref.WeakKeyDictionary()
        # Whether each block has kinds of its own, instead of sharing them with its class (fastac.verify).
        self.kinds_are_of_one_block = False
        # States of functions that are not blocks, by their code.
        self.functions: weakref.WeakKeyDictionary[Any, BlockState] = weakref.WeakKeyDictionary()
        # Warnings already logged, by block class (or code); and what is logged once in a process.
        self.warned: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
        self.said: set[str] = set()
        # Each of these counts attention calls that were replayed, so that no kernel ran (fastac.verify).
        self.replayed_calls: list[collections.Counter[str]] = []
        # Each of these gets the result of every region that succeeds (fastac.verify).
        self.collectors: list[list[RegionResult]] = []
        # Called with attention that runs while no region is open in its thread.
        self.listeners: list[Listener] = []
        # Buffers that regions were seen to write: `id` of the module's dict that holds them, and name.
        self.written_buffers: set[tuple[int, str]] = set()
        # State of modules as regions that are alive began (`fastac.engine.module_state.Snapshot`), by its number.
        self.snapshots: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # By backward: what its recomputes found, with numbers on an accelerator that are read when it ends.
        self.unread_comparisons: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        # Regions in graphs that torch.compile made, by the id of the compilation. Other threads add to them.
        self.traced: dict[str, Any] = {}
        # Modules whose regions were alive when memory ran out in a backward.
        self.ran_out: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.thread.__init__()  # type: ignore[misc]


process = Process()
thread = process.thread
