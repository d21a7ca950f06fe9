"""Checkpointing around compiled blocks: `compile_repeated_blocks`, `block.compile()`, `torch.compile(block)`.

Step 0, with caches off, is where gradients went wrong: every step is compared, the first included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F

import fastac
from fastac import FastacError, PolicyNotAppliedError
from tests import support
from tests.compiled.steps import (
    WAYS,
    SmallBlock,
    assert_exact_and_saved,
    compile_blocks,
    frozen,
    frozen_inputs,
    small,
    small_inputs,
)
from tests.compiler import compiled_so_far, reset, unfused
from tests.marks import needs_torch
from tests.support import assert_same, stack, stack_inputs, train_step


@pytest.mark.parametrize(
    ("way", "backend", "dynamic"),
    [
        ("blocks", "aot_eager", None),
        ("whole", "aot_eager", True),
        pytest.param("blocks", "inductor", True, marks=pytest.mark.slow),
        pytest.param("whole", "inductor", True, marks=pytest.mark.slow),
    ],
)
def test_calls_by_dynamo_and_aot_while_a_region_is_open(way: str, backend: str, dynamic: bool | None) -> None:
    """They call the op with fake tensors. If these are recorded, the first step after a compile is wrong."""
    with unfused(backend):
        assert_exact_and_saved(
            lambda policy: WAYS[way](small(policy), backend, dynamic),
            small_inputs(tokens=24),
            small_inputs(tokens=40),
            calls=2,
            looks=int(way == "blocks"),
        )


def attend_and_scale(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A compiler may fuse what follows the attention, and write into its output."""
    return F.gelu(F.scaled_dot_product_attention(query, key, value)) + query


@pytest.mark.slow
@pytest.mark.parametrize(
    "part", ["block", "attention", "whole", pytest.param("wrapped block", marks=needs_torch("2.13"))]
)
def test_buffers_that_compiled_code_reuses(part: str) -> None:
    """Inductor writes into the attention output of block 0, which no backward needs: a copy is kept.

    part: what is compiled. An eager block may hold a compiled function. Wrapped, inductor's code is called through an
    operator that hides it from dispatch modes. In a whole model inductor itself knows that it is saved.
    """

    def build(policy: str) -> torch.nn.Module:
        if part == "attention":
            return frozen(small(policy, attend=torch.compile(attend_and_scale, dynamic=False)))
        return WAYS["whole" if part == "whole" else "blocks"](frozen(small(policy)), "inductor")

    with torch._inductor.config.patch({"wrap_inductor_compiled_regions": True} if part == "wrapped block" else {}):
        assert_exact_and_saved(build, frozen_inputs(small_inputs()), calls=2, looks=int(part != "whole"))


@pytest.mark.slow
def test_a_kernel_called_past_the_dispatcher() -> None:
    """Inductor's C++ wrapper calls the attention kernel without an operator: nothing can be kept."""
    with torch._inductor.config.patch(cpp_wrapper=True):
        model = compile_blocks(small("attn_only", layers=1), "inductor")
        for _ in range(2):
            with pytest.raises(PolicyNotAppliedError):
                model(**small_inputs())


@pytest.mark.parametrize("wrap", [torch.compile, lambda block, **options: torch.compile(block.forward, **options)])
def test_a_block_that_was_compiled_by_a_call(wrap: Callable[..., Any]) -> None:
    """torch.compile(block) is another module, torch.compile(block.forward) a function."""
    block, inputs = SmallBlock(), small_inputs()
    compiled = wrap(block, backend="aot_eager", dynamic=False)

    def step(policy: str) -> support.Tensors:
        block.zero_grad()
        found = train_step(lambda **kwargs: support.run_checkpointed(compiled, *kwargs.values(), policy=policy), inputs)
        return found | support.gradients(dict(block.named_parameters()))

    expected = step("none")
    reset()
    for _ in range(2):
        assert_same(step("attn_only"), expected)
    assert compiled_so_far() == (1, 0)


def test_compiled_blocks_stay_compiled() -> None:
    """The eager look must not make dynamo skip the block's code in later steps."""
    runs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        return lambda *args: runs.append(graph) or graph(*args)

    model = compile_blocks(stack(policy="attn_only"), backend)
    for _ in range(3):
        runs.clear()
        train_step(model, stack_inputs())
        assert len(runs) == 2 * len(model.blocks)  # forward and recompute
    assert compiled_so_far().graphs == 1


STANCES = [("default", "force_eager", "full"), ("eager_on_recompile", "default", "attn_only")]


@pytest.mark.parametrize(("forward", "recompute", "policy"), STANCES)
def test_a_stance_of_the_compiler_on_one_side(forward: str, recompute: str, policy: str) -> None:
    """Eager and compiled code save other tensors. The error names the stances, not the block's state alone."""
    model = compile_blocks(small(policy, layers=1), "aot_eager")
    with torch.compiler.set_stance(forward):
        loss = support.loss_of(model(**small_inputs()))
    said = f'"{forward}" in the forward and "{recompute}" in recompute'
    with torch.compiler.set_stance(recompute), pytest.raises(FastacError, match=said) as error:
        loss.backward()
    assert len(str(error.value).splitlines()) <= 5


def test_a_memory_budget_of_the_recompute_alone() -> None:
    model = compile_blocks(small("attn_only", layers=1), "aot_eager")
    loss = support.loss_of(model(**small_inputs()))
    torch._dynamo.reset()
    said = pytest.raises(FastacError, match="activation_memory_budget is 0")
    with torch._functorch.config.patch(activation_memory_budget=0), said:
        loss.backward()


def test_a_stance_that_compiles_later() -> None:
    model = compile_blocks(small("attn_only"), "aot_eager", None)

    def train() -> None:
        for tokens in (24, 25, 26):
            train_step(model, small_inputs(tokens))

    with torch.compiler.set_stance("eager_then_compile"), pytest.raises(FastacError, match='"eager_then_compile" in'):
        train()


def test_blocks_that_enable_was_given() -> None:
    """After `enable(model, blocks=...)` other calls know the blocks."""
    model, inputs = stack(), stack_inputs()
    model.others = torch.nn.ModuleList([support.AttentionBlock()])
    fastac.enable(model, blocks="blocks")
    model.blocks.append(support.AttentionBlock())
    fastac.enable(model, fastac.plan(model, inputs).within("1MiB", linear=False))
    assert fastac.compile(model, backend="aot_eager").blocks == {"AttentionBlock": 3}
    train_step(model, inputs)
    assert fastac.report(model).rows[0].saved == 6
    assert fastac.first_blocks(model, 1) == {"blocks.0": "attn_only", "blocks.1": "none", "blocks.2": "none"}


@pytest.mark.parametrize("first", ["compile", "enable"])
def test_a_block_that_is_compiled_around_its_checkpoint(first: str) -> None:
    """`blocks=` checkpoints inside the forward. torch would run a block.compile() around it eagerly, unnoticed."""
    model, inputs = small("none"), small_inputs()
    for step in ("compile", "enable") if first == "compile" else ("enable", "compile"):
        fastac.enable(model, blocks="blocks") if step == "enable" else compile_blocks(model, "aot_eager")
    with pytest.raises(FastacError, match=r"fastac\.compile\(model, blocks"):
        train_step(model, inputs)
    with torch.no_grad():
        model(**inputs)
