"""torch.compile in one thread while another trains: whether something is being traced is a question per thread.

`torch.compiler.is_compiling()` and module hooks hold for the whole process; each test fails when fastac goes by them.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch._dynamo.utils import get_compilation_metrics
from torch._subclasses.fake_tensor import FakeTensorMode

from fastac import PolicyNotAppliedError, regions, selective
from tests import support
from tests.support import AttentionBlock, assert_same, stack, stack_inputs, train_step


@pytest.fixture(autouse=True)
def fresh_compiler() -> Any:
    """Nothing compiled so far; aot_eager has no cache of its own but AOT's."""
    with torch._functorch.config.patch(enable_autograd_cache=False):
        reset()
        yield
        reset()


def reset() -> None:
    """Forget everything that was compiled, and what fake tensors learned."""
    torch._dynamo.reset()
    FakeTensorMode.cache_clear()


def gated_backend(inside: threading.Event, go_on: threading.Event) -> Callable[..., Any]:
    """aot_eager, which tells when it is in the middle of a compile and waits there."""
    from torch._dynamo.backends.debugging import aot_eager

    def backend(graph: torch.fx.GraphModule, examples: Any) -> Any:
        inside.set()
        assert go_on.wait(60)
        return aot_eager(graph, examples)

    return backend


@pytest.fixture
def selective_threads(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """How often each thread was given torch's selective checkpointing in the place of the tape."""
    given: Counter[int] = Counter()

    def counting(*args: Any) -> Any:
        given[threading.get_ident()] += 1
        return selective.traced_contexts(*args)

    monkeypatch.setattr(regions, "traced_contexts", counting)
    return given


@pytest.mark.parametrize("way", ["blocks", "whole"])
def test_eager_training_while_another_thread_compiles(way: str, selective_threads: Counter[int]) -> None:
    """The eager steps run in the very middle of the compile, and both threads' gradients are exact."""
    expected = train_step(stack(), stack_inputs())
    inside, go_on = threading.Event(), threading.Event()
    backend = gated_backend(inside, go_on)
    compiled = stack(policy="attn_only")
    for module in compiled.blocks if way == "blocks" else [compiled]:
        module.compile(backend=backend, dynamic=False)
    eager = stack(policy="attn_only")

    with ThreadPoolExecutor(1) as other:
        steps = other.submit(lambda: [train_step(compiled, stack_inputs()) for _ in range(2)])
        try:
            assert inside.wait(60)
            support.count_cpu_attention()
            for _ in range(3):
                support.executions.clear()
                found = train_step(eager, stack_inputs())
                assert_same(found, expected)
                assert support.executions.total() == 4, "a region of the eager thread was not saved"
        finally:
            go_on.set()
        compiled_steps = steps.result(120)

    assert selective_threads[threading.get_ident()] == 0, "regions of the eager thread that were not on the tape"
    reference = stack()
    for module in reference.blocks if way == "blocks" else [reference]:
        module.compile(backend="aot_eager", dynamic=False)
    compiled_expected = train_step(reference, stack_inputs())
    for found in compiled_steps:
        assert_same(found, compiled_expected)


@pytest.mark.slow
def test_both_at_full_speed(selective_threads: Counter[int]) -> None:
    """Many compiles in one thread, many eager steps in the other, wherever they happen to meet."""
    expected = step_without_seed(stack(), stack_inputs())
    eager, compiled, plain = stack(policy="attn_only"), stack(policy="attn_only", layers=1), stack(layers=1)
    inputs = stack_inputs()
    stop = threading.Event()

    def train_eagerly() -> tuple[int, int]:
        steps = 0
        while not stop.is_set():
            assert_same(step_without_seed(eager, inputs), expected)
            steps += 1
        return steps, threading.get_ident()

    with ThreadPoolExecutor(1) as other:
        running = other.submit(train_eagerly)
        try:
            for tokens in range(8, 11):
                generator = torch.Generator().manual_seed(tokens)
                video = torch.randn(1, tokens, support.WIDTH, generator=generator).requires_grad_()
                found = []
                for model in (compiled, plain):
                    reset()
                    model.blocks[0].compile(backend="aot_eager", dynamic=False)
                    found.append(step_without_seed(model, {**stack_inputs(), "video": video}))
                assert_same(*found)
        finally:
            stop.set()
        steps, thread = running.result(120)
    assert steps > 1
    assert selective_threads[thread] == 0


def step_without_seed(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> support.Tensors:
    """As `support.train_step`, without seeding the generator that all threads share."""
    leaves = support.leaves_of(model, inputs)
    for leaf in leaves.values():
        leaf.grad = None
    output = model(**inputs)
    support.loss_of(output).backward()
    return {"output": output.detach()} | support.gradients(leaves)


@pytest.mark.parametrize("way", ["blocks", "whole"])
def test_backward_of_compiled_code_in_another_thread(way: str) -> None:
    def backward(loss: torch.Tensor) -> None:
        with ThreadPoolExecutor(1) as other:
            other.submit(loss.backward).result(60)

    models = []
    for policy in ("none", "attn_only"):
        reset()
        model = stack(policy=policy)
        for module in model.blocks if way == "blocks" else [model]:
            module.compile(backend="aot_eager", dynamic=False)
        models.append([train_step(model, stack_inputs(), backward=backward) for _ in range(2)])
    for found, expected in zip(models[1], models[0], strict=True):
        assert_same(found, expected)


def test_a_second_look_leaves_compiled_code_of_other_threads_alone() -> None:
    """The look sets module hooks, which hold for every thread, and on which dynamo guards."""
    compiled = stack(policy="attn_only", layers=1)
    compiled.compile(backend="aot_eager", dynamic=False)
    expected = train_step(compiled, stack_inputs())
    before = len(get_compilation_metrics())
    attempts = []

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        # Called by the region, and once more by the look at it: meanwhile the other thread trains.
        with ThreadPoolExecutor(1) as other:
            attempts.append(other.submit(train_step, compiled, stack_inputs()).result(60))
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.5)

    with pytest.raises(PolicyNotAppliedError):
        stack(policy="attn_only", layers=1, block=lambda: AttentionBlock(attend=attend))(**stack_inputs())
    assert len(attempts) > 2, "there was no second look"
    for found in attempts:
        assert_same(found, expected)
    assert len(get_compilation_metrics()) == before, "the other thread compiled again"
