"""A verdict for every attention backend of diffusers, and the reading of which one a module uses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName, _AttentionBackendRegistry, attention_backend

import fastac
from fastac import registry
from fastac.backends.diffusers import BACKENDS
from fastac.backends.verdicts import Verdict
from fastac.engine.process import process
from tests import support
from tests.support import state_of

EVERY = [backend.value for backend in AttentionBackendName]
SERVED = [name for name in EVERY if name in BACKENDS and BACKENDS[name].verdict in (Verdict.SAVABLE, Verdict.OPAQUE)]
REFUSED = {name: BACKENDS[name].reason for name in EVERY if name in BACKENDS and name not in SERVED}
NO_TRAINING = ["_flash_3", *(name for name in EVERY if "sage" in name)]


def wan(backend: str | None = None) -> tuple[torch.nn.Module, dict[str, Any]]:
    """backend: set as `set_attention_backend` does, without its question whether the library is installed."""
    model, inputs = support.build("WanTransformer3DModel")
    if backend is not None:
        for processor in processors(model):
            processor._attention_backend = AttentionBackendName(backend)
    return model, inputs


def processors(model: torch.nn.Module) -> list[Any]:
    return [module.processor for module in model.modules() if hasattr(module, "processor")]


# The table


def test_every_backend_of_diffusers_has_a_verdict() -> None:
    """And says which rows serve it, or why none can."""
    assert set(EVERY) == set(BACKENDS)
    families = {getattr(row, "backend", "") for row in registry.rows()} | {
        known.backend for known in process.known_functions
    }
    assert {found.family for found in BACKENDS.values() if found.family} <= families
    for name, found in BACKENDS.items():
        assert found.reason
        assert bool(found.family) == (name in SERVED)


# enable


@pytest.mark.parametrize("name", REFUSED)
def test_a_backend_that_cannot_be_honoured_is_refused_and_the_model_left_as_it_was(name: str) -> None:
    model, _ = wan(name)
    before = state_of(model)
    with pytest.raises(fastac.UnsupportedBackendError, match=rf"'{name}' at .*blocks\.0\.attn1") as error:
        fastac.enable(model, "attn_only")
    assert REFUSED[name] in str(error.value)
    assert 'set_attention_backend("native")' in str(error.value)
    assert state_of(model) == before
    if name in NO_TRAINING:
        with pytest.raises(fastac.UnsupportedBackendError, match="not trainable"):
            fastac.enable(model, "full")
    else:
        fastac.enable(model, "full")


def test_a_mapping_asks_only_where_something_is_saved() -> None:
    model, _ = wan()
    for processor in processors(model.blocks[1]):  # type: ignore[operator]
        processor._attention_backend = AttentionBackendName._NATIVE_MATH
    fastac.enable(model, {"blocks.1": "full", "*": "attn_only"})
    fastac.disable(model)
    with pytest.raises(fastac.UnsupportedBackendError, match=r"'_native_math' at .*blocks\.1\.attn1"):
        fastac.enable(model, {"blocks.0": "full", "*": "attn_only"})


def test_a_name_that_is_not_in_the_table_is_refused() -> None:
    model, _ = wan()
    for processor in processors(model):
        processor._attention_backend = "of_next_year"
    with pytest.raises(fastac.UnsupportedBackendError, match=r"'of_next_year' .* is unknown"):
        fastac.enable(model)
    fastac.enable(model, "full")


@pytest.mark.skipif(torch.cuda.is_available(), reason="not run: needs a machine without CUDA")
@pytest.mark.parametrize("name", ["flash", "_flash_3_hub", "flash_4_hub", "xformers", "_native_cudnn"])
def test_a_gpu_library_on_a_cpu_only_machine_is_refused_clearly(name: str) -> None:
    model, _ = wan(name)
    before = state_of(model)
    said = r"no op of \w+ is loaded .* not installed|no kernel for the CPU"
    with pytest.raises(fastac.UnsupportedBackendError, match=said):
        fastac.enable(model)
    assert state_of(model) == before


def test_a_processor_without_a_backend_uses_the_process_wide_default() -> None:
    """Which `attention_backend` changes for a while, and `set_attention_backend` of another model for good."""
    model, _ = wan()
    refused = pytest.raises(fastac.UnsupportedBackendError, match=r"'_native_math' at .*blocks\.0\.attn1")
    with attention_backend("_native_math"), refused:
        fastac.enable(model)
    wan()[0].set_attention_backend("_native_math")  # type: ignore[operator]
    with refused:
        fastac.enable(model)
    _AttentionBackendRegistry.set_active_backend(AttentionBackendName.NATIVE)
    fastac.enable(model)
