"""Checkpointed blocks inside a model that is compiled as a whole; and what holds for compiled blocks, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import _cur_sdpa_kernel_backends

import fastac
from fastac import PolicyNotAppliedError
from tests import support
from tests.compiled.steps import (
    EACH_WAY,
    WAYS,
    assert_exact_and_saved,
    broken,
    compile_whole,
    small,
    small_inputs,
    train,
)
from tests.compiler import compiled_so_far, reset
from tests.engine.test_buffers import LAYERS, Stateful
from tests.hook.hosts import diffuser
from tests.marks import NEEDS_COMPILED_MODELS, needs_diffusers, slow
from tests.support import Tensors, assert_same, dropping_out, math_kernel, stack, stack_inputs, train_step, written_out


@pytest.mark.slow
@NEEDS_COMPILED_MODELS
def test_the_whole_model_is_one_graph() -> None:
    """With a policy for each block, one of them with a bound on the keys. `verify` takes it as it is."""
    expected = train(stack(), stack_inputs()).tensors
    model, long_only = stack(), fastac.Policy("attn_only", min_kv=support.TEXT_TOKENS + 1)
    policies = {"blocks.0": "full", "*": long_only}
    fastac.enable(model, policies, blocks="blocks")
    model.compile(backend="aot_eager", fullgraph=True)
    found = train(model, stack_inputs())
    for mine, theirs in zip(found.tensors, expected, strict=True):
        assert_same(mine, theirs)
    assert found.executions == [4 + 2 + 1] * 2
    assert compiled_so_far() == (1, 0)
    seen = fastac.verify(model, policy=policies, **stack_inputs())
    assert (seen.saved, seen.recomputed, seen.policy_executions) == (1, 1, (4, 3))  # "full" is left to torch
    assert seen.saved_bytes == sum(row.saved_bytes for row in fastac.report(model).rows) > 0


@needs_diffusers("0.34")  # compile_repeated_blocks
@pytest.mark.parametrize("way", ["blocks", *slow("whole")])
def test_wan(way: str) -> None:
    """Exact, in one graph, although its rotary embedding writes in place. The report is that of an eager model."""
    models = {}

    def build(policy: str) -> torch.nn.Module:
        model = models[policy] = support.build("WanTransformer3DModel")[0]
        if way == "blocks":
            model.compile_repeated_blocks(backend="aot_eager", dynamic=False)
        if policy != "none":
            fastac.enable(model, policy)
        return model if way == "blocks" else compile_whole(model, "aot_eager")

    _, inputs = support.build("WanTransformer3DModel")
    found = assert_exact_and_saved(build, inputs, calls=4, looks=int(way == "blocks"))
    assert found.compiled[-1].graphs > 0
    assert found.compiled[-1].graph_breaks == 0
    eager, _ = support.build("WanTransformer3DModel")
    fastac.enable(eager)
    train_step(eager, inputs)
    for mine, theirs in zip(fastac.report(models["attn_only"]).rows, fastac.report(eager).rows, strict=True):
        assert (mine.saved, mine.saved_bytes) == (theirs.saved, theirs.saved_bytes)
        assert mine.blocks_compiled == (mine.blocks if way == "whole" else 0)


class TestNothingSavable:
    """Attention that runs as small ops is an error on the first step and on every later one, never silence."""

    @pytest.mark.parametrize(
        ("attend", "way", "backend"),
        [
            (dropping_out, "blocks", "aot_eager"),
            (dropping_out, "whole", "aot_eager"),
            (math_kernel, "whole", "aot_eager"),
            (written_out, "whole", "aot_eager"),
            (broken(written_out), "whole", "aot_eager"),
            (F.scaled_dot_product_attention, "whole", "eager"),
        ],
    )
    def test_it_is_an_error_on_every_call(self, attend: Any, way: str, backend: str) -> None:
        model = WAYS[way](small("attn_only", attend=attend), backend)
        switches = _cur_sdpa_kernel_backends()
        for _ in range(2):
            with pytest.raises(PolicyNotAppliedError, match="attention"):
                model(**small_inputs())
        assert _cur_sdpa_kernel_backends() == switches  # `with sdpa_kernel(...)` is part of the graph that failed

    @EACH_WAY
    def test_what_the_policy_recomputes_may_decompose(self, way: str) -> None:
        for policy in ("full", fastac.Policy("attn_only", min_kv=support.VIDEO_TOKENS + 1)):
            reset()
            model = small("attn_only", attend=dropping_out)
            model.policy = policy
            train_step(WAYS[way](model, "aot_eager"), small_inputs())


def test_another_policy_on_a_compiled_model() -> None:
    """A policy is read while the model is traced: for another one it is compiled anew."""
    model, inputs = compile_whole(stack(layers=1), "aot_eager"), stack_inputs()
    expected = train(model, inputs, steps=1).tensors[0]
    long_only = fastac.Policy("attn_only", min_kv=support.TEXT_TOKENS + 1)
    for policy, executions in [("attn_only", 2), ("full", 4), (long_only, 3), ("attn_only", 2)]:
        model.policy = policy
        found = train(model, inputs)
        for tensors in found.tensors:
            assert_same(tensors, expected)
        assert found.executions[-1] == executions, policy
    model.policy = "none"
    found = train(model, inputs, steps=1)
    assert_same(found.tensors[0], expected)
    assert found.executions == [2]


@NEEDS_COMPILED_MODELS
def test_gradient_checkpointing_enabled_again_without_fastac() -> None:
    """Inside other compiled code, the hook of fastac on the model is traced."""
    model, inputs = diffuser(), stack_inputs()
    fastac.enable(model)
    called = torch.compile(lambda **inputs: model(**inputs)[0] * 2, backend="aot_eager")
    model.enable_gradient_checkpointing()
    for _ in range(2):
        with pytest.raises(PolicyNotAppliedError, match="called fastac for none"):
            called(**inputs)


# Buffers that a block writes: written once, inside a checkpoint and around one

STEPS = 5


def trained(layer: str, way: str, policy: str) -> Tensors:
    reset()
    torch.manual_seed(1)
    model = support.AttentionStack(layers=1, policy=policy, block=lambda: Stateful(LAYERS[layer]))
    compiled = WAYS[way](model, "aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found: Tensors = {}
    for step in range(STEPS):
        found |= {
            f"step {step}: {name}": one for name, one in train_step(compiled, stack_inputs(step, batch=2)).items()
        }
        optimizer.step()
    return found | dict(model.named_buffers())


@pytest.mark.parametrize(
    ("layer", "way"),
    [
        ("delayed scaling", "blocks"),
        ("delayed scaling", "whole"),
        pytest.param("router", "blocks", marks=pytest.mark.slow),
        pytest.param("batch norm", "whole", marks=pytest.mark.slow),
    ],
)
def test_they_are_written_once(layer: str, way: str) -> None:
    support.assert_same(trained(layer, way, "attn_only"), trained(layer, way, "none"))
