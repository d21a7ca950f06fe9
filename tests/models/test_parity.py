"""Every model of the catalogue trains as without checkpointing, bit for bit, and its attention runs once."""

from __future__ import annotations

import re
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import fastac
from fastac.engine import releases
from tests import support
from tests.models import figures
from tests.models.tiny import IMAGES, TINY

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").splitlines()

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


@pytest.mark.parametrize("name", TINY)
def test_parity(name: str) -> None:
    """In float32 under `attn_only`. The figures are those of docs/models.md: else run python docs/generate.py."""
    found = figures.measured(name)
    assert found.again == 0
    if releases.is_at_least("2.13") and version("diffusers") in TABLE[4]:  # the versions that it was written with
        assert f"| {' | '.join(found.cells())} |" in TABLE


def test_every_line_of_the_table_is_a_model() -> None:
    assert [line.split("`")[1] for line in TABLE if line.startswith("| `")] == list(TINY)


@pytest.mark.parametrize("name", IMAGES)
def test_parity_of_image_models(name: str) -> None:
    assert figures.measured(name).again == 0


@pytest.mark.parametrize("name", TINY)
def test_the_reference_is_sound(name: str) -> None:
    """What parity compares with: every parameter and input has a gradient, and none is all zeros."""
    tensors = figures.reference(name).tensors
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    leaves = support.leaves_of(*support.build(name))
    without = {
        leaf for leaf in leaves if f"gradient of {leaf}" not in tensors or not tensors[f"gradient of {leaf}"].any()
    }
    # A key bias adds the same to all scores of a query, which softmax does not see: its gradient is rounding noise.
    without = {leaf for leaf in without if not re.search(r"(to_k|add_k_proj)\.bias$", leaf)}
    patterns = NO_GRADIENT.get(name, ())
    assert {leaf for leaf in without if not any(re.match(pattern, leaf) for pattern in patterns)} == set()


LONG = fastac.Policy("attn_only", min_kv=17)
"""The tiny videos have at least as many tokens, their texts fewer."""


@pytest.mark.parametrize(
    ("policy", "again"),
    [("full", 4), ("attn_only", 0), (LONG, 2), (fastac.Policy("attn_only", linear=("*",)), 0)],
    ids=["full", "attn_only", "long", "linear"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["WanTransformer3DModel", "LTXVideoTransformer3DModel"])
def test_dtypes_and_policies(
    name: str, dtype: torch.dtype, policy: str | fastac.Policy, again: int, attention_executions: Counter[str]
) -> None:
    """again: how many of four attention calls run again."""
    support.assert_model(*support.build(name, dtype), attention_executions, again=again, policy=policy, steps=3)
