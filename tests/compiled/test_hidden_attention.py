"""Compiled code inside an eager block hides its attention: an error.

flex_attention compiled by inductor leaves no call to see. On a CPU it has no backward, so a compiler of the test hides
the op in the same way: it replaces it by a plain function in the compiled forward.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention.flex_attention import flex_attention

import fastac
from fastac import Policy, PolicyNotAppliedError
from tests import support
from tests.backends import flex_on_cpu
from tests.compiled.steps import SmallBlock, compile_blocks, frozen, frozen_inputs, hiding, small, small_inputs
from tests.support import train_step, written_out

HIDDEN = "attention inside compiled code"
REFUSED = pytest.raises(fastac.PolicyNotAppliedError, match="flex_attention")


def _hidden(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> tuple[torch.Tensor, ...]:
    support.executions[HIDDEN] += 1
    output, statistics = support.attention_math(query, key, value)
    return output, statistics / math.log(2), statistics


def compiled() -> Any:
    hide = functools.partial(hiding, op=torch.ops.higher_order.flex_attention, by=_hidden)
    return torch.compile(flex_attention, backend=aot_autograd(fw_compiler=hide, bw_compiler=lambda module, _: module))


@pytest.fixture(autouse=True)
def _flex_trains_here() -> Iterator[None]:
    support.executions.clear()
    with flex_on_cpu.registered():
        yield


def test_flex_attention_that_is_compiled_on_its_own_is_refused() -> None:
    """The eager look does not run it: that would hold all scores in memory."""
    model, inputs = small("attn_only", layers=1, attend=compiled()), small_inputs(128)
    # In the second the feed-forward alone trains: the autograd graph shows nothing of the compiled code.
    unlike = frozen(small("attn_only", layers=1, attend=compiled())), frozen_inputs(inputs)
    for refused, given in ((model, inputs), (model, inputs), unlike, unlike):  # compiled in the region, or before it
        with REFUSED:
            refused(**given)
    model.policy = "none"
    train_step(model, inputs)
    assert set(support.executions) == {HIDDEN}, "it did run compiled"


def test_eager_flex_attention_is_not_taken_for_compiled_code() -> None:
    """It compiles something itself. A look at every block would cost a forward."""
    model = small("attn_only", layers=1, attend=flex_attention)
    for _ in range(2):
        train_step(model, small_inputs(128))
    assert support.executions == {flex_on_cpu.OP: 2}


# The eager look: once for a block class and policy, compiled code is run again, eagerly


@pytest.mark.parametrize("sizes", [(24, 16, 12), (24, 24, 24)])
def test_fewer_calls_than_before(sizes: tuple[int, ...], caplog: pytest.LogCaptureFixture) -> None:
    """Attention that runs as small ops for some sizes, or in later steps, would be hidden in compiled code."""
    model = compile_blocks(small("attn_only"), "eager")
    for tokens in sizes:
        train_step(model, small_inputs(tokens))
        model.blocks[0].attend = model.blocks[1].attend = written_out
    assert caplog.text.count("fewer attention calls") == 1


def test_after_inputs_too_short_for_the_policy() -> None:
    """Images come before videos: what the policy saves of these was not judged with those."""
    model = compile_blocks(small(Policy(min_kv=20), attend=written_out), "eager")
    train_step(model, small_inputs(16))
    with pytest.raises(PolicyNotAppliedError, match="written out"):
        train_step(model, small_inputs(24))


def test_a_closure_that_runs_another_class() -> None:
    def run(kind: type, backend: Any) -> None:
        block = kind()
        block.compile(backend=backend)
        fastac.checkpoint(lambda *args: block(*args), *small_inputs().values())

    run(SmallBlock, "eager")
    with pytest.raises(PolicyNotAppliedError, match="eager mode"):
        run(type("Other", (SmallBlock,), {}), hiding)


def test_python_code_of_the_block_runs_again() -> None:
    """As docs/limits.md says: a counter of the block's own is moved once more. For another size it is not."""
    runs = []

    @torch.compiler.disable
    def attend(*heads: torch.Tensor) -> torch.Tensor:
        runs.append(heads)
        return F.scaled_dot_product_attention(*heads)

    block = SmallBlock(attend)
    block.compile(backend="eager")
    for tokens, expected in ((24, 2), (16, 1), (20, 1)):
        runs.clear()
        fastac.checkpoint(block, *small_inputs(tokens).values())
        assert len(runs) == expected
