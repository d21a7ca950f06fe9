"""Everything private of torch's compiler (dynamo, AOT, inductor) that fastac uses, in one place.

Seen in torch 2.13. The compiler's modules are imported when they are first needed, not with fastac;
`tests/test_compiler_internals.py` fails when one goes. What fastac uses of the dispatcher and of autograd stands in
`torch_internals`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from fastac import probing
from fastac.torch_internals import COMPILED_NODE, function_of, proxy_mode

_REQUIRED = (
    "_C._current_autograd_node",
    "_dynamo.callback.callback_handler.end_callbacks",
    "_dynamo.callback.callback_handler.start_callbacks",
    "_functorch.config.activation_memory_budget",
    "_functorch.partitioners.get_default_op_list",
    "_guards.CompileContext.current_compile_id",
    "fx.traceback.MEMORY_BUDGET_ANNOTATION_KEY",
    "fx.traceback.current_meta",
)


def _of(name: str) -> Any:
    """What a name of _REQUIRED stands for. Raises ImportError, which says what to do, where torch has it no more."""
    try:
        return probing.find(name)
    except AttributeError:
        probing.require([name])
        raise


def is_loaded() -> bool:
    """Whether torch's compiler was imported by somebody."""
    return "torch._functorch.partitioners" in sys.modules


def extend_compute_intensive_ops(more: Callable[[], Iterable[Any]]) -> None:
    """Let AOT's partitioner count what `more` returns among the operators that it does not recompute for nothing.

    more: called whenever a graph is partitioned. A second call with the same function changes nothing.
    """
    known = _of("_functorch.partitioners.get_default_op_list")
    if getattr(known, "more", None) is more:
        return

    @functools.wraps(known)
    def get_default_op_list() -> Any:
        lists = known()
        lists.compute_intensive_ops.update(more())
        return lists

    get_default_op_list.more = more  # type: ignore[attr-defined]
    sys.modules["torch._functorch.partitioners"].get_default_op_list = get_default_op_list  # type: ignore[attr-defined]


class Budget(NamedTuple):
    """How much of its activations a graph may keep, and where that was said."""

    value: float
    source: str


def memory_budget() -> Budget:
    """What AOT's partitioner will hold the graph to that is being traced: a region's annotation, or the setting."""
    annotation = (
        _of("fx.traceback.current_meta").get("custom", {}).get(_of("fx.traceback.MEMORY_BUDGET_ANNOTATION_KEY"))
    )
    if annotation is not None:
        return Budget(annotation, "torch.autograd.graph.region_activation_memory_budget")
    setting = "torch._functorch.config.activation_memory_budget"
    return Budget(_of("_functorch.config.activation_memory_budget"), setting)


def compile_id() -> str | None:
    """The id, such as "0/1", of what dynamo is compiling in this thread; None where nothing is."""
    current = _of("_guards.CompileContext.current_compile_id")()
    return None if current is None else str(current)


def running_node() -> Any:
    """The autograd node whose backward is running in this thread; None where none is."""
    return _of("_C._current_autograd_node")()


def compiled_function() -> type | None:
    """The autograd.Function, made for one compiled graph, whose backward is running in this thread."""
    node = running_node()
    return function_of(node) if node is not None and node.name() == COMPILED_NODE else None


def compile_id_of(function: type) -> str | None:
    """The id that a graph, of which this is the autograd.Function, was compiled under."""
    return getattr(getattr(function, "metadata", None), "compile_id_str", None)


class Compilations:
    """Counts what dynamo compiles. ended: called whenever a compilation is done."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self.count = 0
        self.resets = 0
        self._ended = ended
        self._callbacks: list[Any] | None = None

    def look(self) -> int:
        """How many compilations, or resets of dynamo, there were so far. Cheap: asked in every region.

        A reset takes every callback away, and lets dynamo number compilations from 0/0 again.
        """
        callbacks = self._callbacks
        if callbacks is None:
            if "torch._dynamo.callback" not in sys.modules:
                return 0
            callbacks = self._callbacks = _of("_dynamo.callback.callback_handler.start_callbacks")
        if self._begin not in callbacks:
            callbacks.append(self._begin)
            _of("_dynamo.callback.callback_handler.end_callbacks").append(self._end)
            self.count += 1
            self.resets += 1
        return self.count

    def _begin(self, _: Any) -> None:
        self.count += 1

    def _end(self, _: Any) -> None:
        self._ended()


def graph_being_traced() -> torch.fx.Graph | None:
    """The graph that operators of this thread are being recorded in; None where none is."""
    return getattr(getattr(proxy_mode(), "tracer", None), "graph", None)


def is_of_backward(node: torch.fx.Node) -> bool:
    """Whether a node of AOT's joint graph was recorded while autograd ran, rather than in the forward."""
    return node.meta.get("partitioner_tag") != "is_forward"


def module_stack() -> list[tuple[str, Any]]:
    """Path and class of the modules, outer first, that dynamo saw the operator called in that AOT is tracing."""
    return list(_of("fx.traceback.current_meta").get("nn_module_stack", {}).values())
