"""Private names of dynamo by which an observation learns whether compiled code runs in a region.

Seen in torch 2.9 to 2.15. fastac does not import the compiler.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, ClassVar

import torch
import torch._C._dynamo.eval_frame as _eval_frame


class _Compilations:
    """Counts dynamo's compilations, in the process and in each thread.

    A reset of dynamo removes every callback, and dynamo numbers compilations from 0/0 again.
    """

    def __init__(self) -> None:
        self.count = 0  # of compilations and resets
        self.resets = 0
        self.here = threading.local()

    def look(self) -> int:
        """The count. Begins to count, if it does not yet. Cheap: called in every region."""
        if "torch._dynamo.callback" not in sys.modules:
            return 0
        callbacks: list[Any] = torch._dynamo.callback.callback_handler.start_callbacks
        if self._begin not in callbacks:
            callbacks.append(self._begin)
            self.count += 1
            self.resets += 1
        return self.count

    def _begin(self, _: Any) -> None:
        self.count += 1
        self.here.count = self.in_this_thread() + 1

    def in_this_thread(self) -> int:
        """Number of compilations that began in this thread."""
        return getattr(self.here, "count", 0)


compilations = _Compilations()


class CompiledCalls:
    """Counts, in the thread that opens it, how often compiled code runs or is compiled.

    The autograd graph does not show it if no input requires grad.
    """

    _open: ClassVar[list[CompiledCalls]] = []
    _lock: ClassVar[threading.Lock] = threading.Lock()
    _before: ClassVar[Any] = None

    def __enter__(self) -> CompiledCalls:
        self._thread = threading.get_ident()
        self._found_code = 0
        with self._lock:
            if not self._open:
                before: Any = _eval_frame.set_guard_complete_hook(self._found)
                # The hook before may be ours: somebody set one while ours was set, and put ours back after that.
                CompiledCalls._before = None if before is self._found else before
            self._open.append(self)
        compilations.look()
        self._begun_before = compilations.in_this_thread()
        return self

    def __exit__(self, *exception: object) -> None:
        self.count = self._found_code + compilations.in_this_thread() - self._begun_before
        with self._lock:
            self._open.remove(self)
            if not self._open:
                _eval_frame.set_guard_complete_hook(CompiledCalls._before)

    @staticmethod  # an object that lives: dynamo does not hold it while it calls it, and another thread may close
    def _found(cache_hit: bool) -> bool:
        """Called when dynamo has looked for compiled code. Returns whether it was found."""
        if cache_hit:
            thread = threading.get_ident()
            for calls in list(CompiledCalls._open):
                calls._found_code += calls._thread == thread
        before = CompiledCalls._before
        return cache_hit if before is None else before(cache_hit)
