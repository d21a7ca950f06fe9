"""torch.compile in one thread while another trains: "is something traced?" is asked per thread.

`torch.compiler.is_compiling()` and module hooks answer for the whole process.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._C._dynamo.eval_frame import set_guard_complete_hook
from torch._dynamo.backends.debugging import aot_eager

import fastac
from tests.compiled.steps import EACH_WAY, WAYS, small, small_inputs
from tests.compiler import reset
from tests.support import assert_same, executions_of, stack, stack_inputs, train_step


@EACH_WAY
def test_eager_training_while_another_thread_compiles(way: str) -> None:
    """The eager steps run in the middle of the compile. The gradients of both threads are exact."""
    expected = train_step(stack(layers=1), stack_inputs())
    inside, go_on = Event(), Event()

    def gated(graph: torch.fx.GraphModule, examples: Any) -> Any:
        inside.set()
        assert go_on.wait(300)
        return aot_eager(graph, examples)

    compiled = WAYS[way](stack(layers=1, policy="attn_only"), gated)
    eager = stack(layers=1, policy="attn_only")
    with ThreadPoolExecutor(1) as other:
        steps = other.submit(lambda: [train_step(compiled, stack_inputs()) for _ in range(2)])
        try:
            assert inside.wait(300)
            for _ in range(3):
                assert executions_of(eager, stack_inputs(), expected) == 2
        finally:
            go_on.set()
        compiled_steps = steps.result()

    reset()
    compiled_expected = train_step(WAYS[way](stack(layers=1), "aot_eager"), stack_inputs())
    for found in compiled_steps:
        assert_same(found, compiled_expected)


@pytest.mark.parametrize("elsewhere", [False, True])
def test_compiled_calls_are_those_of_their_thread(elsewhere: bool, attention_executions: Counter[str]) -> None:
    """A region that calls compiled code is run once more, eagerly. Whoever else listens to dynamo goes on, too."""
    compiled, seen = torch.compile(torch.sin, backend="eager"), []
    compiled(torch.ones(3))

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        fastac.checkpoint(torch.cos, query)  # which listens, too, and ends first
        with ThreadPoolExecutor(1) as other:
            _ = other.submit(compiled, torch.ones(3)).result() if elsewhere else compiled(torch.ones(3))
        return F.scaled_dot_product_attention(query, key, value)

    def theirs(hit: bool) -> bool:
        seen.append(hit)
        return hit

    before = set_guard_complete_hook(theirs)
    try:
        train_step(small("attn_only", layers=1, attend=attend), small_inputs())
        assert attention_executions.total() == (1 if elsewhere else 2)
        assert seen == [True] * 2
        assert set_guard_complete_hook(theirs) is theirs
    finally:
        set_guard_complete_hook(before)
