"""What people save memory by beside checkpointing: weights stored in float8, weights that come and go by group."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from diffusers.hooks.group_offloading import ModuleGroup

from fastac.models.published import LORA_TARGETS
from tests.ways.recipes import Run, adamw, adapt, assert_exact_and_saved, batches, build

CPU = torch.device("cpu")
GROUPS: dict[str, dict[str, Any]] = {
    "blocks": {"offload_type": "block_level", "num_blocks_per_group": 1},
    "leaves": {"offload_type": "leaf_level"},
}


@pytest.mark.parametrize(("order", "adapter"), [("before", "first"), ("after", "last")])
def test_layerwise_casting(order: str, adapter: str) -> None:
    """A frozen base in float8, whose layers are cast to bfloat16 each for its own forward, under adapters.

    order: of enable_layerwise_casting, against fastac.enable. adapter: whether it comes before both or after.
    """

    def recipe(run: Run) -> None:
        model, batch = build(dtype=torch.bfloat16)
        if adapter == "first":
            # diffusers then switches off that peft casts its inputs
            adapt(model, LORA_TARGETS, dtype=torch.bfloat16)
        if order == "after":
            run.enable(model)
        model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.bfloat16)
        if order == "before":
            run.enable(model)
        if adapter == "last":
            adapt(model, LORA_TARGETS)
        stored = {key for key, parameter in model.named_parameters() if parameter.dtype == torch.float8_e4m3fn}
        assert any("to_k.base_layer.weight" in key for key in stored)
        optimizer = adamw(model)
        for one in batches(batch, 3):
            run.step(model, one, optimizer=optimizer)

    assert_exact_and_saved(recipe)


@pytest.mark.parametrize(
    ("trained", "groups", "order"),
    [("all", "blocks", "before"), ("adapter", "leaves", "before"), ("all", "leaves", "after")],
)
def test_group_offloading(trained: str, groups: str, order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are brought for the forward of a group, and once more for its recompute.

    order: of enable_group_offload, against fastac.enable.
    """
    brought = Counter[str]()
    onload = ModuleGroup.onload_

    def counted(group: ModuleGroup) -> None:
        brought[policy] += 1
        onload(group)

    monkeypatch.setattr(ModuleGroup, "onload_", counted)

    def recipe(run: Run) -> None:
        nonlocal policy
        policy = str(run.policy)
        model, batch = build()
        if trained == "adapter":
            adapt(model, LORA_TARGETS)
        if order == "after":
            run.enable(model)
        model.enable_group_offload(onload_device=CPU, offload_device=CPU, **GROUPS[groups])
        if order == "before":
            run.enable(model)
        optimizer = adamw(model)
        for one in batches(batch, 3):
            run.step(model, one, optimizer=optimizer)

    policy = ""
    assert_exact_and_saved(recipe)
    assert 0 < brought["None"] < brought["attn_only"] <= brought["full"]
