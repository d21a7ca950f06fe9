"""Every model of the catalogue trains as without checkpointing, bit for bit, with the executions its policy says."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

import fastac
from fastac.models import MODELS
from tests import support
from tests.backends import flex_on_cpu
from tests.support import CPU_ATTENTION, Tensors, assert_same, train_step


@dataclasses.dataclass(frozen=True)
class Calls:
    """The attention calls of one forward.

    long, short: in checkpointed blocks, over at least MIN_KV keys and over fewer. flex: those by flex_attention, which
    are over many. outside: in no checkpointed block.
    """

    long: int = 0
    short: int = 0
    flex: int = 0
    outside: int = 0

    def executions(self, again: Calls) -> dict[str, int]:
        """How often each kernel runs in a step in which some calls run again."""
        ran = {
            CPU_ATTENTION: self.long + self.short + self.outside + again.long + again.short,
            flex_on_cpu.OP: self.flex + again.flex,
        }
        return {op: count for op, count in ran.items() if count}

    def run_again(self, policy: str) -> Calls:
        """Those that run again in backward."""
        return {"full": dataclasses.replace(self, outside=0), "attn_only": Calls(), "long": Calls(short=self.short)}[
            policy
        ]


MIN_KV = 17
"""Every video here has at least as many tokens; a text, image or sound that is attended to alone has fewer."""

CALLS = {
    "WanTransformer3DModel": Calls(2, 2),
    "WanTransformer3DModel:i2v": Calls(4, 2),  # its text always has 512 tokens
    "WanVACETransformer3DModel": Calls(6, 6),
    "ChronoEditTransformer3DModel": Calls(2, 2),
    "SkyReelsV2Transformer3DModel": Calls(2, 2),
    "SkyReelsV2Transformer3DModel:diffusion_forcing": Calls(2, 2),
    "WanAnimateTransformer3DModel": Calls(2, 2, outside=1),
    "WanAnimate2Transformer3DModel": Calls(2, 4),
    "AnyFlowTransformer3DModel": Calls(2, 2),
    "AnyFlowFARTransformer3DModel": Calls(0, 2, flex=2),
    "HeliosTransformer3DModel": Calls(2, 2),
    "LTXVideoTransformer3DModel": Calls(2, 2),
    "LTX2VideoTransformer3DModel": Calls(4, 8),
    "HunyuanVideoTransformer3DModel": Calls(4, outside=1),
    "HunyuanVideoTransformer3DModel:token_replace": Calls(4, outside=1),
    "HunyuanVideo15Transformer3DModel": Calls(2, outside=1),
    "HunyuanVideoFramepackTransformer3DModel": Calls(4, outside=1),
    "CogVideoXTransformer3DModel": Calls(2),
    "CogVideoXTransformer3DModel:1.5": Calls(2),
    "ConsisIDTransformer3DModel": Calls(2),
    "MochiTransformer3DModel": Calls(4, outside=1),  # two blocks, two samples
    "AllegroTransformer3DModel": Calls(2, 2),
    "LatteTransformer3DModel": Calls(2, 4),
    "EasyAnimateTransformer3DModel": Calls(2),
    "CosmosTransformer3DModel": Calls(2, 2),
    "CosmosTransformer3DModel:2.5": Calls(2, 4),
    "Cosmos3OmniTransformer": Calls(2, 2),
    "SanaVideoTransformer3DModel": Calls(0, 2),
    "SanaWMTransformer3DModel": Calls(2, 2),
    "Kandinsky5Transformer3DModel": Calls(2, 3),
    "Kandinsky6Transformer3DModel": Calls(4, 10),
    "Kandinsky6SRTransformer3DModel": Calls(flex=2),
    "MotifVideoTransformer3DModel": Calls(4, 3),
    "MiniMaxH3Transformer3DModel": Calls(2, 2),
}
"""Measured without checkpointing. A row that is missing here fails every test of this file."""

THREE_STEPS = ("WanTransformer3DModel", "LTXVideoTransformer3DModel")
"""Elsewhere two: the first is watched by the census, the second is known."""

NOT_IN_BF16 = {"SanaWMTransformer3DModel": "diffusers has its camera geometry in float32 or float64 alone on a CPU"}

NO_GRADIENT = {
    # What the last block makes of the text leads nowhere.
    "HunyuanVideo15Transformer3DModel": (
        r"transformer_blocks\.1\.ff_context",
        r"transformer_blocks\.1\.attn\.(to_add_out|add_q_proj|norm_added_q)",
    ),
    "MochiTransformer3DModel": (r"transformer_blocks\.1\.attn1\.(add_q_proj|norm_added_q)",),
    "Cosmos3OmniTransformer": (
        "lm_head",
        "norm.weight",
        r"layers\.1\.mlp\.",
        r"layers\.1\.self_attn\.(to_q|to_out|norm_q)",
        r"layers\.1\.post_attention_layernorm\.",
    ),
    # For checkpoints' sake: its softmax attention has the gates of the linear one, and two camera inputs are one.
    "SanaWMTransformer3DModel": (r"blocks\.1\.attn\.(A_log|beta_proj|dt_bias|gate_proj)", "raymap_embedder"),
}
"""Class -> parameters that have no gradient in training without checkpointing, or one of zeros."""

POLICIES: dict[str, str | fastac.Policy] = {
    "full": "full",
    "attn_only": "attn_only",
    "long": fastac.Policy("attn_only", min_kv=MIN_KV),
}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TRAINED = [(name, dtype) for name in MODELS for dtype in DTYPES if dtype == "fp32" or name not in NOT_IN_BF16]
CASES = [
    (name, dtype, policy, engine)
    for name, dtype in TRAINED
    for policy in POLICIES
    for engine in ("tape", "sac")
    if policy != "long" or (CALLS[name].short and (CALLS[name].long or CALLS[name].flex))
    if engine == "tape" or (policy == "attn_only" and dtype == "fp32")
]


@pytest.fixture(autouse=True)
def _flex_trains_on_cpu() -> Iterator[None]:
    with flex_on_cpu.registered():
        yield


@functools.cache
def without_checkpointing(name: str, dtype: str) -> Tensors:
    return train_step(*support.build(name, DTYPES[dtype]))


@pytest.mark.parametrize(("name", "dtype", "policy", "engine"), CASES)
def test_parity(name: str, dtype: str, policy: str, engine: str, attention_executions: Counter[str]) -> None:
    """Outputs, input and parameter gradients of each step, and how often the kernels ran in it."""
    expected, calls = without_checkpointing(name, dtype), CALLS[name]
    model, inputs = support.build(name, DTYPES[dtype])
    fastac.enable(model, POLICIES[policy], engine=engine)
    for _ in range(3 if name in THREE_STEPS else 2):
        attention_executions.clear()
        support.executed_keys.clear()
        assert_same(train_step(model, inputs), expected)
        assert attention_executions == calls.executions(again=calls.run_again(policy))
        if policy == "long":
            assert sum(n for keys, n in support.executed_keys.items() if keys >= MIN_KV) == calls.long


@pytest.mark.parametrize("name", MODELS)
def test_parity_with_every_linear_output_saved(name: str, attention_executions: Counter[str]) -> None:
    """Of every Linear module that a block runs, with a bias or without, trained on whatever inputs: none runs again."""
    expected, calls = without_checkpointing(name, "fp32"), CALLS[name]
    model, inputs = support.build(name)
    with support.counting("aten::addmm") as products:
        train_step(model, inputs)
        needed = products["addmm"]
        fastac.enable(model, fastac.Policy("attn_only", linear=("*",)))
        for _ in range(2):
            attention_executions.clear()
            products.clear()
            assert_same(train_step(model, inputs), expected)
            assert attention_executions == calls.executions(again=Calls())
            assert products["addmm"] == needed


@pytest.mark.slow
@pytest.mark.parametrize("limit", [1 << 40, 100_000, 10_000])
@pytest.mark.parametrize("name", MODELS)
def test_parity_under_a_budget(name: str, limit: int, attention_executions: Counter[str]) -> None:
    """The first step runs everything again, those after it what is not chosen: nothing at all of a large budget."""
    expected, calls = without_checkpointing(name, "fp32"), CALLS[name]
    model, inputs = support.build(name)
    fastac.enable(model, fastac.Policy.budget(limit))
    for again in (calls.run_again("full"), Calls(), Calls()):
        attention_executions.clear()
        assert_same(train_step(model, inputs), expected)
        if limit > 100_000 or again != Calls():
            assert attention_executions == calls.executions(again=again)
    held = sum(row.saved_bytes + row.linear_bytes + row.selection_bytes for row in fastac.report(model).rows)
    assert held <= limit


@pytest.mark.parametrize(("name", "dtype"), TRAINED)
def test_reference_is_sound(name: str, dtype: str, attention_executions: Counter[str]) -> None:
    """What the other tests compare with: every parameter and input has a gradient, and none is all zeros."""
    model, inputs = support.build(name, DTYPES[dtype])
    tensors = train_step(model, inputs)
    assert attention_executions == CALLS[name].executions(again=Calls())
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


@pytest.mark.parametrize("name", NOT_IN_BF16)
def test_what_is_not_tried_in_bf16_does_not_train_in_it(name: str) -> None:
    model, inputs = support.build(name, torch.bfloat16)
    with pytest.raises(RuntimeError, match="expected scalar type BFloat16 but found Float"):
        train_step(model, inputs)
