"""torch.compile in one thread while another trains: whether something is being traced is a question per thread.

`torch.compiler.is_compiling()` and module hooks hold for the whole process; each test fails when fastac goes by them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from tests import support
from tests.compile.steps import EACH_WAY, WAYS
from tests.compiler import reset
from tests.support import assert_same, stack, stack_inputs, train_step


def gated_backend(inside: threading.Event, go_on: threading.Event) -> Callable[..., Any]:
    """aot_eager, which tells when it is in the middle of a compile and waits there."""
    from torch._dynamo.backends.debugging import aot_eager

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return aot_eager(graph, examples)

    return backend


@EACH_WAY
def test_eager_training_while_another_thread_compiles(way: str) -> None:
    """The eager steps run in the very middle of the compile, and both threads' gradients are exact."""
    expected = train_step(stack(layers=1), stack_inputs())
    inside, go_on = threading.Event(), threading.Event()
    backend = gated_backend(inside, go_on)
    compiled = WAYS[way](stack(layers=1, policy="attn_only"), backend)
    eager = stack(layers=1, policy="attn_only")

    with ThreadPoolExecutor(1) as other:
        steps = other.submit(lambda: [train_step(compiled, stack_inputs()) for _ in range(2)])
        try:
            assert inside.wait(60)
            support.count_cpu_attention()
            for _ in range(3):
                support.executions.clear()
                found = train_step(eager, stack_inputs())
                assert_same(found, expected)
                assert support.executions.total() == 2, "a region of the eager thread was not saved"
        finally:
            go_on.set()
        compiled_steps = steps.result(120)

    reset()
    compiled_expected = train_step(WAYS[way](stack(layers=1), "aot_eager"), stack_inputs())
    for found in compiled_steps:
        assert_same(found, compiled_expected)
