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
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention.flex_attention import flex_attention

import fastac
from tests import support
from tests.backends import flex_on_cpu
from tests.compiled.steps import frozen, frozen_inputs, hiding, small, small_inputs
from tests.support import train_step

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
