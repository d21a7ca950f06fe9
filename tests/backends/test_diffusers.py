"""A verdict for every attention backend of diffusers, and the reading of which one a module uses."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
import torch
from diffusers import CogVideoXTransformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend

import fastac
from fastac import registry
from fastac.backends.diffusers import BACKENDS, backend_uses, default_backend
from fastac.registry import Verdict
from tests import support
from tests.model_state import state_of

EVERY = [backend.value for backend in AttentionBackendName]
SERVED = [name for name in EVERY if name in BACKENDS and BACKENDS[name].verdict in (Verdict.SAVABLE, Verdict.OPAQUE)]
REFUSED = [name for name in EVERY if name not in SERVED]
SAGE = [name for name in EVERY if "sage" in name]
NO_TRAINING = ["_flash_3", *SAGE]


def wan() -> tuple[torch.nn.Module, dict[str, Any]]:
    return support.build("WanTransformer3DModel")


def processors(model: torch.nn.Module) -> list[Any]:
    return [module.processor for module in model.modules() if hasattr(module, "processor")]


def set_backend(model: torch.nn.Module, name: str | None) -> None:
    """As `set_attention_backend` does, without its question whether the library is installed."""
    for processor in processors(model):
        processor._attention_backend = AttentionBackendName(name) if name is not None else None


# The table


def test_every_backend_of_diffusers_has_a_verdict() -> None:
    assert sorted(set(EVERY) - set(BACKENDS)) == []


def test_no_verdict_for_a_backend_that_diffusers_does_not_have() -> None:
    assert sorted(set(BACKENDS) - set(EVERY)) == []


@pytest.mark.parametrize("name", EVERY)
def test_a_verdict_says_which_rows_serve_it_or_why_none_can(name: str) -> None:
    found = BACKENDS[name]
    assert found.reason
    assert bool(found.family) == (name in SERVED)


def test_what_does_not_train_is_known() -> None:
    assert {name for name in EVERY if BACKENDS[name].verdict is Verdict.NOT_TRAINABLE} == set(NO_TRAINING)
    assert BACKENDS["_native_math"].verdict is Verdict.DECOMPOSED
    assert BACKENDS["flash_4_hub"].verdict is Verdict.OPAQUE


# enable


@pytest.mark.parametrize("name", REFUSED)
def test_a_backend_that_can_not_be_honoured_is_refused_and_the_model_left_as_it_was(name: str) -> None:
    model, _ = wan()
    set_backend(model, name)
    before = state_of(model)
    with pytest.raises(fastac.UnsupportedBackendError) as error:
        fastac.enable(model, "attn_only")
    message = str(error.value)
    assert message.startswith(f"attn_only: backend {name!r} at WanTransformer3DModel.blocks.0.attn1 is ")
    assert BACKENDS[name].reason in message
    assert 'set_attention_backend("native")' in message
    assert state_of(model) == before


@pytest.mark.parametrize("name", NO_TRAINING)
def test_a_backend_that_does_not_train_is_refused_under_full_as_well(name: str) -> None:
    model, _ = wan()
    set_backend(model, name)
    with pytest.raises(fastac.UnsupportedBackendError, match="not trainable") as error:
        fastac.enable(model, "full")
    assert 'policy="full"' not in str(error.value), "a way out that is none"


def test_one_module_among_many_is_found() -> None:
    model, _ = wan()
    model.blocks[1].attn2.processor._attention_backend = AttentionBackendName._NATIVE_MATH
    with pytest.raises(
        fastac.UnsupportedBackendError, match=r"'_native_math' at WanTransformer3DModel\.blocks\.1\.attn2"
    ):
        fastac.enable(model)


def test_full_saves_nothing_so_the_math_kernel_will_do() -> None:
    model, inputs = wan()
    model.set_attention_backend("_native_math")
    expected = support.train_step(model, inputs)
    fastac.enable(model, "full")
    support.assert_same(support.train_step(model, inputs), expected)


@pytest.mark.parametrize("name", ["native", "_native_flash"])
def test_a_backend_that_can_be_saved_is_accepted_and_saved(name: str, attention_executions: Any) -> None:
    model, inputs = wan()
    model.set_attention_backend(name)
    expected = support.train_step(model, inputs)
    fastac.enable(model, "attn_only")
    attention_executions.clear()
    support.assert_same(support.train_step(model, inputs), expected)
    assert attention_executions == {support.CPU_ATTENTION: 4}


def test_a_mapping_asks_only_where_something_is_saved() -> None:
    model, _ = wan()
    set_backend(model.blocks[0], "_native_math")
    fastac.enable(model, {"blocks.0": "full", "*": "attn_only"})
    fastac.disable(model)
    with pytest.raises(fastac.UnsupportedBackendError, match=r"blocks\.0\.attn1"):
        fastac.enable(model, {"blocks.1": "full", "*": "attn_only"})


def test_a_name_that_is_not_in_the_table_is_refused() -> None:
    model, _ = wan()
    for processor in processors(model):
        processor._attention_backend = "of_next_year"
    with pytest.raises(fastac.UnsupportedBackendError, match=r"'of_next_year' .* is unknown"):
        fastac.enable(model)
    fastac.enable(model, "full")


@pytest.mark.skipif(torch.cuda.is_available(), reason="not run: needs a machine without CUDA")
@pytest.mark.parametrize(
    "name", ["flash", "flash_varlen", "_flash_3_hub", "flash_4_hub", "xformers", "_native_cudnn", "_native_efficient"]
)
def test_a_gpu_library_on_a_cpu_only_machine_is_refused_clearly(name: str) -> None:
    model, _ = wan()
    set_backend(model, name)
    before = state_of(model)
    family = BACKENDS[name].family
    said = rf"no row for {family} yet|no op of {family} is loaded .* not installed|no kernel for the CPU"
    with pytest.raises(fastac.UnsupportedBackendError, match=said) as error:
        fastac.enable(model)
    message = str(error.value)
    assert message.startswith(f"attn_only: backend {name!r} at WanTransformer3DModel.blocks.0.attn1 ")
    assert " is savable:" not in message, "it is not, here"
    assert state_of(model) == before


def test_flash_with_a_kernel_for_cuda_alone_is_refused_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is installed and has rows; there is no GPU."""
    namespace = f"fastac_fa2_{uuid.uuid4().hex[:8]}"
    library = torch.library.Library(namespace, "FRAGMENT")
    library.define("_flash_attn_forward(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor)")
    library.impl("_flash_attn_forward", lambda q, k, v: (q, k), "CUDA")
    before = list(registry._rows)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    monkeypatch.setattr(registry, "_rows", [row for row in before if getattr(row, "backend", "") != "fa2"])
    row = fastac.AttentionOp(backend="fa2", namespace=namespace, name="_flash_attn_forward", key="k", dropout=None)
    model, _ = wan()
    set_backend(model, "flash")
    try:
        fastac.register(row)
        with pytest.raises(fastac.UnsupportedBackendError, match=r"'flash' .* no kernel for the CPU, which is all"):
            fastac.enable(model)
    finally:
        registry._decisions.clear()
        library._destroy()


# Which backend a module uses


def uses(model: torch.nn.Module) -> dict[str, str]:
    return {use.module: use.backend for use in backend_uses(model)}


def test_every_attention_module_is_read() -> None:
    model, _ = wan()
    assert uses(model) == dict.fromkeys(
        ["blocks.0.attn1", "blocks.0.attn2", "blocks.1.attn1", "blocks.1.attn2"], "native"
    )
    assert uses(model.blocks[0].attn1) == {"": "native"}


def test_a_processor_s_own_backend_counts() -> None:
    model, _ = wan()
    model.blocks[1].attn1.processor._attention_backend = AttentionBackendName._NATIVE_FLASH
    assert uses(model)["blocks.1.attn1"] == "_native_flash"
    assert uses(model)["blocks.0.attn1"] == "native"


def test_a_processor_s_own_backend_may_be_a_string() -> None:
    model, _ = wan()
    model.blocks[1].attn1.processor._attention_backend = "_native_math"
    assert {use.module for use in backend_uses(model) if use.verdict is Verdict.DECOMPOSED} == {"blocks.1.attn1"}


def test_a_processor_without_one_uses_the_process_wide_default() -> None:
    model, _ = wan()
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName._NATIVE_EFFICIENT)
    assert default_backend() == "_native_efficient"
    assert set(uses(model).values()) == {"_native_efficient"}


def test_the_default_may_be_set_for_a_while() -> None:
    model, _ = wan()
    with attention_backend("_native_math"):
        assert set(uses(model).values()) == {"_native_math"}
        with pytest.raises(fastac.UnsupportedBackendError):
            fastac.enable(model)
    assert set(uses(model).values()) == {"native"}
    fastac.enable(model)


def test_another_model_s_setting_is_the_default_of_this_one() -> None:
    """diffusers: `set_attention_backend` changes the process-wide default as well."""
    model, _ = wan()
    other, _ = wan()
    other.set_attention_backend("_native_math")
    with pytest.raises(fastac.UnsupportedBackendError):
        fastac.enable(model)
    model.set_attention_backend("native")
    fastac.enable(model)


def test_a_backend_that_was_reset_is_the_default_again() -> None:
    model, _ = wan()
    model.set_attention_backend("_native_flash")
    model.reset_attention_backend()
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
    assert set(uses(model).values()) == {"native"}


@pytest.fixture
def cogvideox() -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model whose processors know no backends and call scaled_dot_product_attention whatever is set."""
    torch.manual_seed(0)
    model = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=4,
        time_embed_dim=2,
        text_embed_dim=8,
        num_layers=2,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        patch_size=2,
        temporal_compression_ratio=4,
        max_text_seq_length=8,
    ).train()
    support.fill_zeros(model)
    inputs = {
        "hidden_states": torch.randn(1, 2, 4, 8, 8).requires_grad_(),
        "encoder_hidden_states": torch.randn(1, 8, 8).requires_grad_(),
        "timestep": torch.tensor([5]),
        "return_dict": False,
    }
    return model, inputs


def test_a_legacy_processor_ignores_what_is_set(
    cogvideox: tuple[torch.nn.Module, dict[str, Any]], attention_executions: Any
) -> None:
    model, inputs = cogvideox
    assert not any(hasattr(processor, "_attention_backend") for processor in processors(model))
    model.set_attention_backend("_native_math")
    assert set(uses(model).values()) == {"native"}
    expected = support.train_step(model, inputs)
    fastac.enable(model)
    attention_executions.clear()
    support.assert_same(support.train_step(model, inputs), expected)
    assert attention_executions == {support.CPU_ATTENTION: 2}


def test_modules_without_a_processor_have_no_backend() -> None:
    assert uses(support.stack()) == {}
