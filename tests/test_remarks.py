"""What of a model's attention is not as its reader would think: linear attention, and backends that are set in vain."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest

import fastac
from fastac import hook
from fastac.models import MODELS
from fastac.policy import Policy
from tests import support
from tests.model_state import state_of
from tests.support import CPU_ATTENTION, assert_same, train_step

SANA = "SanaVideoTransformer3DModel"


@pytest.fixture(autouse=True)
def _told_anew() -> Iterator[None]:
    """A remark is logged once per process."""
    hook._tell.cache_clear()
    yield
    hook._tell.cache_clear()


# Linear attention


def test_linear_attention_is_recomputed_and_told_of(
    attention_executions: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Sana-Video: what is saved is the cross-attention."""
    model, inputs = support.build(SANA)
    expected = train_step(model, inputs)
    with caplog.at_level(logging.WARNING, logger="fastac"):
        fastac.enable(model)
        fastac.enable(model)
    attention_executions.clear()
    assert_same(train_step(model, inputs), expected)
    assert attention_executions == {CPU_ATTENTION: 2}
    report = fastac.report(model)
    (row,) = report.rows
    assert (row.attention_calls, row.saved) == (2, 2)
    (remark,) = report.remarks
    assert remark == (
        "linear attention, which is recomputed: transformer_blocks.0.attn1 and 1 more (SanaLinearAttnProcessor3_0)"
    )
    assert remark in str(report)
    assert [record.getMessage() for record in caplog.records] == [f"{SANA}: {remark}"]


@pytest.mark.parametrize(
    "policy",
    ["long_attn_only", Policy("attn_only", min_kv=4096), {"*.0": "full", "*": "long_attn_only"}],
    ids=["long", "longer", "mapping"],
)
def test_a_policy_of_long_attention_that_would_save_nothing_is_refused(policy: Any) -> None:
    model, _ = support.build(SANA)
    before = state_of(model)
    with pytest.raises(fastac.FastacError, match=r"transformer_blocks\..\.attn1 is linear attention .*\"attn_only\""):
        fastac.enable(model, policy)
    with pytest.raises(fastac.FastacError, match="linear attention"):
        fastac.enable(model, policy, blocks="transformer_blocks")
    assert state_of(model) == before


def test_a_bound_below_the_text_is_taken(attention_executions: Counter[str]) -> None:
    """So is long attention beside blocks whose attention to the text is saved."""
    model, inputs = support.build(SANA)
    expected = train_step(model, inputs)
    mapping = {"*.0": "long_attn_only", "*": "attn_only"}
    for policy, again in ((Policy("attn_only", min_kv=12), 0), (mapping, 1), ("full", 2)):
        fastac.enable(model, policy)
        attention_executions.clear()
        assert_same(train_step(model, inputs), expected)
        assert attention_executions == {CPU_ATTENTION: 2 + again}


def test_long_attention_is_no_concern_where_linear_modules_are_saved(attention_executions: Counter[str]) -> None:
    """It saves something."""
    model, inputs = support.build(SANA)
    expected = train_step(model, inputs)
    fastac.enable(model, Policy("attn_only", min_kv=4096, linear=("attn2.to_q",)))
    for _ in range(2):
        assert_same(train_step(model, inputs), expected)
    assert fastac.report(model).rows[0].linear_saved == 2


def test_linear_attention_in_some_blocks_alone() -> None:
    """Sana-WM: every second block has softmax attention, which a policy of long attention saves."""
    model, _ = support.build("SanaWMTransformer3DModel")
    fastac.enable(model, "long_attn_only")
    (remark,) = fastac.report(model).remarks
    assert remark == "linear attention, which is recomputed: blocks.0.attn (BidirectionalGDNUCPESinglePathLiteLA)"


def test_linear_attention_of_a_model_without_a_row() -> None:
    """The image model: its processor says so by its name."""
    model = diffusers.SanaTransformer2DModel(
        in_channels=4, out_channels=4, num_layers=2, num_attention_heads=2, attention_head_dim=4, sample_size=8,
        num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=8,
    )  # fmt: skip
    fastac.enable(model)
    (remark,) = fastac.report(model).remarks
    assert "more (SanaLinearAttnProcessor2_0)" in remark
    with pytest.raises(fastac.FastacError, match="linear attention"):
        fastac.enable(model, "long_attn_only")


@pytest.mark.parametrize("name", [name for name, row in MODELS.items() if row.linear])
def test_the_classes_a_row_calls_linear_are_there(name: str) -> None:
    model, _ = support.build(name)
    assert {type(module).__name__ for module in model.modules()} >= set(MODELS[name].linear)


# Backends


def test_a_processor_that_ignores_the_backend_is_told_of(
    attention_executions: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """CogVideoX: set_attention_backend changes nothing for it, and scaled_dot_product_attention runs."""
    model, inputs = support.build("CogVideoXTransformer3DModel")
    expected = train_step(model, inputs)
    fastac.enable(model)
    assert fastac.report(model).remarks == ()
    model.set_attention_backend("_native_math")  # which could not be saved, if it were used
    with caplog.at_level(logging.WARNING, logger="fastac"):
        fastac.enable(model)
    attention_executions.clear()
    assert_same(train_step(model, inputs), expected)
    assert attention_executions == {CPU_ATTENTION: 2}
    (remark,) = fastac.report(model).remarks
    assert remark == (
        "backend '_native_math' is set, and is not looked at by 2 of the attention modules: CogVideoXAttnProcessor2_0 "
        "calls scaled_dot_product_attention itself"
    )
    assert remark in caplog.text
    assert remark in " ".join(str(fastac.report(model)).split()), "folded to the width of the table"
    assert fastac.report(model).rows[0].ops == ("aten._scaled_dot_product_flash_attention_for_cpu",)


def test_a_processor_that_heeds_the_backend_is_not() -> None:
    model, _ = support.build("WanTransformer3DModel")
    model.set_attention_backend("_native_flash")
    fastac.enable(model)
    assert fastac.report(model).remarks == ()
