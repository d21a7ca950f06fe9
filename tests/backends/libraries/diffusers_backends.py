"""diffusers 0.42: Wan, trained on each attention backend that can run on a CPU, refused on those that do not train.

It finds the real flash-attn 2 and xFormers. What it would download from the hub is handed to it.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import fastac
from fastac.backends.diffusers import BACKENDS
from fastac.backends.verdicts import Verdict
from fastac.registry import find_op
from tests import support
from tests.backends import flash_4_on_cpu, flash_on_cpu, flex_on_cpu, packages, xformers_on_cpu
from tests.support import assert_model, train_step

packages.use("diffusers_backends")
flash_on_cpu.flash_attn_2()
xformers_on_cpu.xformers()

from diffusers import WanTransformer3DModel
from diffusers.models import attention_dispatch as dispatch

HUB = "_flash_attn2_588b404"
FLASH_4 = "flash_attn4_f1a5"  # as `kernels` names what it downloads

KERNELS = {
    "native": support.CPU_ATTENTION,
    "_native_flash": support.CPU_ATTENTION,
    "flash": "flash_attn::_flash_attn_forward",
    "flash_varlen": "flash_attn::_flash_attn_varlen_forward",
    "flash_hub": f"{HUB}::_flash_attn_forward",
    "flash_varlen_hub": f"{HUB}::_flash_attn_varlen_forward",
    "flash_4_hub": FLASH_4,
    "xformers": "xformers::efficient_attention_forward_ck",
    "flex": flex_on_cpu.OP,
}
"""Backend -> the kernel that is counted."""

ATTENTIONS = 4  # two blocks, in each one to the video and one to the text


@pytest.fixture(scope="module", autouse=True)
def _on_cpu() -> Iterator[None]:
    with xformers_on_cpu.registered(), flex_on_cpu.registered():
        yield


def flash_attn_4() -> ModuleType:
    package = flash_on_cpu.substitute(FLASH_4)
    module = flash_on_cpu.copy_of(flash_4_on_cpu.flash_attn_4(), f"{FLASH_4}.interface")
    vars(package).update(flash_attn_func=flash_4_on_cpu.with_kernels(module, FLASH_4).flash_attn_func, interface=module)
    return package


@functools.cache
def downloaded(repository: str) -> Any:
    if repository.endswith("flash-attn4"):
        return flash_attn_4()
    build = flash_on_cpu.hub_build(HUB)
    build.flash_attn_interface = build  # type: ignore[attr-defined]
    return build


@pytest.fixture(autouse=True)
def _hub(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ModuleType("kernels")
    kernels.get_kernel = lambda repository, **options: downloaded(repository)
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    monkeypatch.setattr(dispatch, "HF_HUB_OFFLINE", True)  # who published them is not asked
    for name in ("is_kernels_available", "is_kernels_version"):
        monkeypatch.setattr(dispatch, name, lambda *args: True)


@pytest.mark.parametrize("backend", KERNELS)
def test_wan(backend: str, attention_executions: Counter[str]) -> None:
    model, inputs = support.build(WanTransformer3DModel.__name__)
    model.set_attention_backend(backend)
    assert_model(model, inputs, attention_executions)
    assert attention_executions == {KERNELS[backend]: ATTENTIONS}


def test_flash_3_does_not_train() -> None:
    """Its op has no autograd formula."""
    tensors = {name: torch.randn(1, 8, 2, 8, requires_grad=True) for name in "qkv"}
    with pytest.raises(fastac.UnsupportedBackendError, match="diffusers' wrapper of flash-attn 3"):
        train_step(
            functools.partial(fastac.checkpoint, find_op("_diffusers_flash_attn_3::_flash_attn_forward")), tensors
        )


def test_each_that_can_be_saved_is_run_or_needs_what_is_not_here() -> None:
    """A backend that is added to the table has to be tried here, or to be named."""
    savable = {name for name, row in BACKENDS.items() if row.verdict in (Verdict.SAVABLE, Verdict.OPAQUE)}
    on_a_gpu = {"_native_cudnn", "_native_efficient"}  # the ops are run in test_sdpa.py
    newer_flash_attn_3 = {"_flash_varlen_3", "_flash_3_hub", "_flash_3_varlen_hub"}  # its op: in flash_attn_3.py
    assert savable == set(KERNELS) | on_a_gpu | newer_flash_attn_3
