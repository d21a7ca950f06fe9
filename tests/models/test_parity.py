"""Every model of the catalogue trains as without checkpointing, bit for bit, with the executions its policy says."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter

import pytest
import torch

import fastac
from fastac.models import MODELS
from tests import support
from tests.support import CPU_ATTENTION, Tensors, assert_same, train_step


@dataclasses.dataclass(frozen=True)
class Calls:
    """The attention calls of one forward, by the number of keys they attend to; outside: of no checkpointed block."""

    long: int
    short: int = 0
    outside: int = 0

    @property
    def total(self) -> int:
        return self.long + self.short + self.outside


MIN_KV = 17
"""In every row a video has more tokens than this, and a text, an image or a sound that is attended to alone fewer."""

CALLS = {
    "WanTransformer3DModel": Calls(2, 2),
    "LTXVideoTransformer3DModel": Calls(2, 2),
    "HunyuanVideoTransformer3DModel": Calls(4, outside=1),
    "HunyuanVideoTransformer3DModel:token_replace": Calls(4, outside=1),
    "HunyuanVideo15Transformer3DModel": Calls(2, outside=1),
    "HunyuanVideoFramepackTransformer3DModel": Calls(4, outside=1),
    "CogVideoXTransformer3DModel": Calls(2),
    "CogVideoXTransformer3DModel:1.5": Calls(2),
    "ConsisIDTransformer3DModel": Calls(2),
}
"""Measured without checkpointing. A row that is missing here fails every test of this file."""

THREE_STEPS = ("WanTransformer3DModel", "LTXVideoTransformer3DModel")
"""Elsewhere two: the first is watched by the census, the second is known."""

NO_GRADIENT = {
    # The text stream of the last block leads nowhere.
    "HunyuanVideo15Transformer3DModel": (
        r"transformer_blocks\.1\.ff_context",
        r"transformer_blocks\.1\.attn\.(to_add_out|add_q_proj|norm_added_q)",
    ),
}
"""Class -> parameters that have no gradient in training without checkpointing, or one of zeros."""

POLICIES: dict[str, str | fastac.Policy] = {
    "full": "full",
    "attn_only": "attn_only",
    "long": fastac.Policy("attn_only", min_kv=MIN_KV),
}

FP32, BF16 = torch.float32, torch.bfloat16
CASES = [
    pytest.param(name, dtype, policy, engine, id=f"{name}-{dtype_name}-{policy}-{engine}")
    for name in MODELS
    for dtype_name, dtype in (("fp32", FP32), ("bf16", BF16))
    for policy in POLICIES
    for engine in ("tape", "sac")
    if policy != "long" or CALLS[name].short
    if engine == "tape" or (policy == "attn_only" and dtype == FP32)
]


@functools.cache
def without_checkpointing(name: str, dtype: torch.dtype) -> Tensors:
    return train_step(*support.build(name, dtype))


@pytest.mark.parametrize(("name", "dtype", "policy", "engine"), CASES)
def test_parity(name: str, dtype: torch.dtype, policy: str, engine: str, attention_executions: Counter[str]) -> None:
    """Outputs, input and parameter gradients of each step, and how often the kernel ran in it."""
    expected, calls = without_checkpointing(name, dtype), CALLS[name]
    again = {"full": calls.long + calls.short, "attn_only": 0, "long": calls.short}[policy]
    model, inputs = support.build(name, dtype)
    fastac.enable(model, POLICIES[policy], engine=engine)
    for _ in range(3 if name in THREE_STEPS else 2):
        attention_executions.clear()
        assert_same(train_step(model, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: calls.total + again}


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_reference_is_sound(name: str, dtype: torch.dtype, attention_executions: Counter[str]) -> None:
    """What the other tests compare with: every parameter and input has a gradient, and none is all zeros."""
    model, inputs = support.build(name, dtype)
    tensors = train_step(model, inputs)
    assert attention_executions == {CPU_ATTENTION: CALLS[name].total}
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    without = {
        leaf
        for leaf in support.leaves_of(model, inputs)
        if f"gradient of {leaf}" not in tensors or not tensors[f"gradient of {leaf}"].any()
    }
    # A key bias adds the same to all scores of a query, which softmax does not see: its gradient is rounding noise.
    without = {leaf for leaf in without if not re.search(r"(to_k|add_k_proj)\.bias$", leaf)}
    patterns = NO_GRADIENT.get(MODELS[name].class_name, ())
    assert {leaf for leaf in without if not any(re.match(pattern, leaf) for pattern in patterns)} == set()
    assert [pattern for pattern in patterns if not any(re.match(pattern, leaf) for leaf in without)] == []
