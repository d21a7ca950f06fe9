"""torch.compile in one thread while another trains: "is something traced?" is asked per thread.

`torch.compiler.is_compiling()` and module hooks answer for the whole process.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch._C._dynamo.eval_frame import set_guard_complete_hook

from fastac.engine.torch_private import CompiledCalls
from tests.compiled.steps import EACH_WAY, WAYS
from tests.compiler import reset
from tests.support import assert_same, executions_of, stack, stack_inputs, train_step


def gated_backend(inside: threading.Event, go_on: threading.Event) -> Callable[..., Any]:
    """aot_eager, which sets `inside` in the middle of a compile, and waits for `go_on`."""
    from torch._dynamo.backends.debugging import aot_eager

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return aot_eager(graph, examples)

    return backend


@EACH_WAY
def test_eager_training_while_another_thread_compiles(way: str) -> None:
    """The eager steps run in the middle of the compile. The gradients of both threads are exact."""
    expected = train_step(stack(layers=1), stack_inputs())
    inside, go_on = threading.Event(), threading.Event()
    backend = gated_backend(inside, go_on)
    compiled = WAYS[way](stack(layers=1, policy="attn_only"), backend)
    eager = stack(layers=1, policy="attn_only")

    with ThreadPoolExecutor(1) as other:
        steps = other.submit(lambda: [train_step(compiled, stack_inputs()) for _ in range(2)])
        try:
            assert inside.wait(60)
            for _ in range(3):
                assert executions_of(eager, stack_inputs(), expected) == 2
        finally:
            go_on.set()
        compiled_steps = steps.result(120)

    reset()
    compiled_expected = train_step(WAYS[way](stack(layers=1), "aot_eager"), stack_inputs())
    for found in compiled_steps:
        assert_same(found, compiled_expected)


def test_compiled_calls_are_counted_in_their_thread() -> None:
    """Whatever another thread compiles, and whoever else listens to dynamo."""
    compiled = torch.compile(lambda x: x.sin(), backend="eager")
    tensor, seen = torch.ones(3), []

    def theirs(hit: bool) -> bool:
        seen.append(hit)
        return hit

    before = set_guard_complete_hook(theirs)
    try:
        with CompiledCalls() as outer:
            compiled(tensor)
            with CompiledCalls() as inner:
                compiled(tensor)
                other = threading.Thread(target=compiled, args=(tensor,))
                other.start()
                other.join()
                tensor.sin()
            compiled(tensor)
        compiled(tensor)
        assert (outer.count, inner.count) == (3, 1)
        assert len(seen) == 4, "the first call finds nothing to look at"
        assert set_guard_complete_hook(theirs) is theirs
    finally:
        set_guard_complete_hook(before)
