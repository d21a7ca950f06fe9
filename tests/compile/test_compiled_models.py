"""Checkpointed blocks inside a model that is compiled as a whole, and what is so in either way of compiling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import _cur_sdpa_kernel_backends

import fastac
from fastac import PolicyNotAppliedError
from tests import support
from tests.compile.steps import (
    EACH_WAY,
    WAYS,
    assert_exact_and_saved,
    broken,
    compile_blocks,
    compile_whole,
    frozen,
    frozen_inputs,
    small,
    small_inputs,
    train,
)
from tests.compiler import compiled_so_far, reset
from tests.marks import NEEDS_COMPILED_MODELS, needs_diffusers, slow
from tests.support import assert_same, dropping_out, math_kernel, stack, stack_inputs, train_step, written_out


@pytest.mark.parametrize(
    ("backend", "dynamic"),
    [("aot_eager", True), pytest.param("inductor", True, marks=pytest.mark.slow)],
)
def test_the_first_step_is_exact(backend: str, dynamic: bool) -> None:
    assert_exact_and_saved(
        lambda policy: compile_whole(small(policy), backend, dynamic),
        small_inputs(tokens=24),
        small_inputs(tokens=40),
        calls=2,
        same_graphs=dynamic,
    )


@pytest.mark.parametrize("backend", ["aot_eager", *slow("inductor")])
def test_frozen_inputs(backend: str) -> None:
    assert_exact_and_saved(
        lambda policy: compile_whole(frozen(small(policy)), backend), frozen_inputs(small_inputs()), calls=2
    )


@NEEDS_COMPILED_MODELS
def test_the_whole_model_is_one_graph() -> None:
    """With the policy that it was traced with, per block, for a bound on the keys as well."""
    expected = train(stack(layers=3), stack_inputs()).tensors
    model = stack(layers=3)
    long_only = fastac.Policy("attn_only", min_kv=support.TEXT_TOKENS + 1)
    fastac.enable(model, {"blocks.0": "full", "blocks.1": long_only, "*": "attn_only"}, blocks="blocks")
    model.compile(backend="aot_eager", fullgraph=True)
    found = train(model, stack_inputs())
    for mine, theirs in zip(found.tensors, expected, strict=True):
        assert_same(mine, theirs)
    assert found.executions == [6 + 2 + 1] * 2
    assert compiled_so_far()[:2] == (1, 0)


@needs_diffusers("0.34")  # compile_repeated_blocks
@EACH_WAY
def test_wan(way: str) -> None:
    """Its rotary embedding writes in place inside regions, of which torch warns: exact all the same, in one graph."""
    models = {}

    def build(policy: str) -> torch.nn.Module:
        model = models[policy] = support.build("WanTransformer3DModel")[0]
        if policy != "none":
            fastac.enable(model, policy)
        if way == "blocks":
            model.compile_repeated_blocks(backend="aot_eager", dynamic=False)
        else:
            compile_whole(model, "aot_eager")
        return model

    _, inputs = support.build("WanTransformer3DModel")
    found = assert_exact_and_saved(build, inputs, calls=4, looks=1 if way == "blocks" else 0, same_graphs=True)
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

    @EACH_WAY
    @pytest.mark.parametrize(
        ("cause", "backend"),
        [("dropout", "aot_eager"), ("math", "aot_eager"), ("written out", "eager")],
    )
    def test_it_is_an_error_on_every_call(self, cause: str, way: str, backend: str) -> None:
        attend = {"dropout": dropping_out, "written out": written_out, "math": math_kernel}[cause]
        model = WAYS[way](small("attn_only", attend=attend), backend)
        switches = _cur_sdpa_kernel_backends()
        for _ in range(2):
            with pytest.raises(PolicyNotAppliedError, match="attention"):
                model(**small_inputs())
        assert _cur_sdpa_kernel_backends() == switches  # `with sdpa_kernel(...)` is part of the graph that failed

    @NEEDS_COMPILED_MODELS
    def test_one_attention_among_others(self) -> None:
        """The second attention of the second block."""

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            to_text = key.shape[-2] == support.TEXT_TOKENS
            return (written_out if to_text else F.scaled_dot_product_attention)(query, key, value)

        model = stack(policy="attn_only")
        model.blocks[1].attend = attend
        compile_whole(model, "aot_eager")
        for _ in range(2):
            with pytest.raises(PolicyNotAppliedError, match="attention"):
                model(**stack_inputs())

    def test_a_graph_break_does_not_hide_it(self) -> None:
        model = compile_whole(small("attn_only", attend=broken(written_out)), "aot_eager")
        for _ in range(2):
            with pytest.raises(PolicyNotAppliedError, match="attention"):
                model(**small_inputs())

    @EACH_WAY
    def test_what_the_policy_recomputes_may_decompose(self, way: str) -> None:
        for policy in ("full", fastac.Policy("attn_only", min_kv=support.VIDEO_TOKENS + 1)):
            reset()
            model = small("attn_only", attend=dropping_out)
            model.policy = policy
            train_step(WAYS[way](model, "aot_eager"), small_inputs())


@EACH_WAY
def test_another_policy_on_a_compiled_model(way: str) -> None:
    """A policy is read while the model is traced: with another one, what was compiled before must not serve."""
    model, inputs = stack(layers=1), stack_inputs()
    WAYS[way](model, "aot_eager")
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


class Around(torch.nn.Module):
    """A module that holds a model, as training scripts have for their loss."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.inner(**inputs)[0] * 2


@pytest.mark.parametrize("way", ["blocks", "inside another module"])
def test_gradient_checkpointing_enabled_again_without_fastac(way: str) -> None:
    """Inside another module the model's own hook is a part of what is traced."""
    model, inputs = support.build("WanTransformer3DModel")
    fastac.enable(model)
    called = compile_blocks(model, "aot_eager") if way == "blocks" else compile_whole(Around(model), "aot_eager")
    model.enable_gradient_checkpointing()
    for _ in range(2):
        with pytest.raises(PolicyNotAppliedError, match="called fastac for none"):
            called(**inputs)
