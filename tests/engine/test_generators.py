"""Generators: what a region that does not restore them may draw, and whose states a region keeps."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import fastac
from fastac.engine import generators
from tests import support
from tests.engine.cases import OneAttention
from tests.support import AttentionBlock, stack_inputs

of_policies = pytest.mark.parametrize("policy", ["attn_only", "full"])


@of_policies
@pytest.mark.parametrize("way", ["checkpoint", "patch_checkpoint"])
def test_dropout_whose_mask_is_not_drawn_again(way: str, policy: str) -> None:
    """With preserve_rng_state=False recompute draws another mask. The same block without dropout trains."""
    inputs = stack_inputs()

    def call(block: torch.nn.Module) -> torch.Tensor:
        if way == "checkpoint":
            return fastac.checkpoint(block, **inputs, policy=policy, preserve_rng_state=False)  # type: ignore[no-any-return]
        with fastac.patch_checkpoint(policy):
            call: Any = torch.utils.checkpoint.checkpoint
            return call(block, **inputs, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

    block = AttentionBlock(dropout=0.1)
    with pytest.raises(fastac.FastacError, match="draws random numbers") as caught:
        call(block)
    assert len(str(caught.value).splitlines()) <= 5
    support.assert_same({"output": call(block.eval())}, {"output": block(**inputs)})


def test_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator's state cannot be read then. Steps before a capture are compared."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    fastac.checkpoint(AttentionBlock(dropout=0.1), **stack_inputs(), policy="full", preserve_rng_state=False)


def test_without_the_check_it_draws() -> None:
    options: Any = {"preserve_rng_state": False, "determinism_check": "none"}
    support.loss_of(fastac.checkpoint(AttentionBlock(dropout=0.1), **stack_inputs(), **options)).backward()


def test_a_saved_attention_may_draw() -> None:
    """Its output is not computed again. What the block draws beside it is."""
    attend = support.custom_attention("draws_and_is_saved", "dropout", "dropout_p")
    attention = OneAttention(lambda query, key, value: attend(query, key, value, 0.1))
    fastac.checkpoint(attention, **stack_inputs(), preserve_rng_state=False)
    attention.out.register_forward_hook(lambda module, args, output: torch.nn.functional.dropout(output, 0.1))
    with pytest.raises(fastac.FastacError, match="draws random numbers"):
        fastac.checkpoint(attention, **stack_inputs(), preserve_rng_state=False)


@pytest.mark.parametrize(
    ("devices", "kept"),
    [
        ([], {"cpu", "cuda:0"}),
        (["cpu"], {"cpu", "cuda:0"}),
        (["cuda:1"], {"cpu", "cuda:1"}),
        (["cuda:0", "cuda:1"], {"cpu", "cuda:0", "cuda:1"}),
    ],
)
def test_only_generators_of_its_own_devices(
    devices: list[str], kept: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generator of another device may be drawn from by another thread. Without a GPU: with fake tensors."""
    with FakeTensorMode():
        args = [torch.empty(1, device=device) for device in devices]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(generators, "generator_state", lambda device: torch.zeros(0))
    assert {str(device) for device, _ in generators.current_states(args)} == kept
