"""Every model of the catalogue trains as without checkpointing, bit for bit, with the executions its policy says."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch

import fastac
from fastac.models import MODELS
from tests import support
from tests.support import CPU_ATTENTION, Tensors, assert_same, train_step

DTYPES = [torch.float32, torch.bfloat16]


class Expected:
    """What training without checkpointing gives. calls: the number of keys of every attention call, in order."""

    def __init__(self, class_name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[int] = []
        attention = torch.nn.functional.scaled_dot_product_attention

        def watched(query: torch.Tensor, key: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self.calls.append(key.shape[-2])
            return attention(query, key, *args, **kwargs)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
        self.tensors: Tensors = train_step(*support.build(class_name, dtype))
        monkeypatch.undo()


@functools.cache
def expected(class_name: str, dtype: torch.dtype) -> Expected:
    return Expected(class_name, dtype, pytest.MonkeyPatch())


POLICIES = ["full", "attn_only", "long"]


@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("class_name", MODELS)
def test_parity(
    class_name: str, dtype: torch.dtype, policy: str, engine: str, attention_executions: Counter[str]
) -> None:
    """Outputs, input and parameter gradients of three steps: watched by the census, known, and known again."""
    reference = expected(class_name, dtype)
    count = len(reference.calls)
    shortest = min(reference.calls)  # attention over the text, which "long" runs again
    again = {"full": count, "attn_only": 0, "long": reference.calls.count(shortest)}[policy]
    model, inputs = support.build(class_name, dtype)
    fastac.enable(model, fastac.Policy("attn_only", min_kv=shortest + 1) if policy == "long" else policy, engine=engine)
    for _ in range(3):
        attention_executions.clear()
        assert_same(train_step(model, inputs), reference.tensors)
        assert attention_executions == {CPU_ATTENTION: count + again}


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
@pytest.mark.parametrize("class_name", MODELS)
def test_reference_is_sound(class_name: str, dtype: torch.dtype, attention_executions: Counter[str]) -> None:
    """What the other tests compare with: every parameter and input has a gradient, and none is all zeros."""
    model, inputs = support.build(class_name, dtype)
    tensors = train_step(model, inputs)
    calls = expected(class_name, dtype).calls
    assert attention_executions == {CPU_ATTENTION: len(calls)}
    assert {f"gradient of {name}" for name in support.leaves_of(model, inputs)} <= tensors.keys()
    zero = [name for name, tensor in tensors.items() if not tensor.any()]
    # A key bias adds the same to all scores of a query, which softmax does not see: its gradient is rounding noise.
    assert not [name for name in zero if "to_k.bias" not in name]
