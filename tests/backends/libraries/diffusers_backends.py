"""diffusers 0.42: Wan, trained on each attention backend that can run on a CPU, refused on those that do not train.

diffusers looks for libraries when it is imported, and finds the real flash-attn 2 and xFormers. What it would download
from the hub is handed to it: a build of flash-attn 2 with its ops in a namespace of its own, and flash-attn 4.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import fastac
from fastac.backends.diffusers import BACKENDS
from fastac.registry import Verdict
from tests import support
from tests.backends import flash_on_cpu, flex_on_cpu, packages, xformers_on_cpu
from tests.backends.kernels_on_cpu import Attention, forward_kernel
from tests.backends.parity import op_of
from tests.support import assert_same, train_step

packages.use("diffusers_backends")
flash_on_cpu.flash_attn_2()
xformers_on_cpu.xformers()

from diffusers import WanTransformer3DModel
from diffusers.models import attention_dispatch as dispatch

HUB = "_flash_attn2_588b404"
FLASH_4 = "flash_attn4_f1a5"  # as `kernels` names what it downloads
FLASH_3 = "_diffusers_flash_attn_3::_flash_attn_forward"

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

every_backend = pytest.mark.parametrize("backend", KERNELS)


@pytest.fixture(scope="module", autouse=True)
def _on_cpu() -> Iterator[None]:
    with xformers_on_cpu.registered(), flex_on_cpu.registered():
        yield


def flash_attn_4() -> ModuleType:
    """A package whose submodule `interface` calls a kernel from an autograd.Function, past the dispatcher."""
    package, interface = flash_on_cpu.stand_in(FLASH_4), flash_on_cpu.stand_in(f"{FLASH_4}.interface")

    class FlashAttnFunc(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float | None, causal: bool
        ) -> tuple[torch.Tensor, torch.Tensor]:
            support.executions[FLASH_4] += 1
            ctx.attention = Attention(scale=softmax_scale, window=(-1, 0 if causal else -1))
            out, statistics = ctx.attention.forward(*(t.transpose(1, 2) for t in (q, k, v)))
            out = out.transpose(1, 2).contiguous()
            ctx.save_for_backward(q, k, v, out, statistics)
            ctx.mark_non_differentiable(statistics)
            return out, statistics

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:
            *tensors, statistics = ctx.saved_tensors
            swapped = [tensor.transpose(1, 2) for tensor in (grad, *tensors)]
            found = ctx.attention.backward(*swapped, statistics)
            return (*(tensor.transpose(1, 2) for tensor in found), None, None)

    def flash_attn_func(q: Any, k: Any, v: Any, softmax_scale: float | None = None, causal: bool = False) -> Any:
        return interface.FlashAttnFunc.apply(q, k, v, softmax_scale, causal)

    FlashAttnFunc.__module__ = interface.__name__
    vars(interface).update(FlashAttnFunc=FlashAttnFunc)
    vars(package).update(flash_attn_func=flash_attn_func)
    return package


def flash_attn_2(namespace: str) -> SimpleNamespace:
    """A build that registers its ops when it is first called."""
    build = functools.cache(flash_on_cpu.hub_build)

    def lazily(name: str) -> Callable[..., Any]:
        return lambda *args, **kwargs: getattr(build(namespace), name)(*args, **kwargs)

    names = ("_flash_attn_forward", "_flash_attn_backward", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward")
    interface = SimpleNamespace(**{name: lazily(name) for name in names})
    public = {name: lazily(name) for name in ("flash_attn_func", "flash_attn_varlen_func")}
    return SimpleNamespace(__name__=namespace, flash_attn_interface=interface, **public)


@functools.cache
def downloaded(repository: str) -> Any:
    return flash_attn_4() if repository.endswith("flash-attn4") else flash_attn_2(HUB)


@pytest.fixture(autouse=True)
def _hub(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = ModuleType("kernels")
    kernels.get_kernel = lambda repository, **options: downloaded(repository)
    monkeypatch.setitem(sys.modules, "kernels", kernels)
    monkeypatch.setattr(dispatch, "HF_HUB_OFFLINE", True)  # who published them is not asked
    for name in ("is_kernels_available", "is_kernels_version"):
        monkeypatch.setattr(dispatch, name, lambda *args: True)


def wan(backend: str, dtype: torch.dtype = torch.float32) -> tuple[torch.nn.Module, dict[str, Any]]:
    model, inputs = support.build(WanTransformer3DModel.__name__, dtype)
    model.set_attention_backend(backend)
    return model, inputs


def test_the_real_libraries_are_found() -> None:
    assert dispatch._CAN_USE_FLASH_ATTN
    assert dispatch._CAN_USE_XFORMERS_ATTN
    assert dispatch.flash_attn_func.__module__ == "flash_attn.flash_attn_interface"
    assert dispatch.xops.__name__ == "xformers.ops"


@every_backend
@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_wan(backend: str, dtype: torch.dtype, engine: str, attention_executions: Counter[str]) -> None:
    """Executions N without checkpointing, 2 N under full, N under attn_only, and always the same gradients."""
    model, inputs = wan(backend, dtype)
    kernel = KERNELS[backend]
    reference = train_step(model, inputs)
    assert attention_executions == {kernel: ATTENTIONS}
    for policy, times in (("full", 2), ("attn_only", 1), ("long_attn_only", 2)):
        fastac.enable(model, policy, engine=engine)
        for _ in range(2):
            attention_executions.clear()
            assert_same(train_step(model, inputs), reference)
            assert attention_executions == {kernel: times * ATTENTIONS}, policy
        fastac.disable(model)


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_a_hub_kernel_that_registers_its_ops_at_the_first_forward(
    engine: str, monkeypatch: pytest.MonkeyPatch, attention_executions: Counter[str]
) -> None:
    """In the region itself; they are saved from the first step on."""
    model, inputs = wan("flash_hub")
    expected = train_step(model, inputs)
    namespace = f"_flash_attn2_{engine}"
    late = flash_attn_2(namespace)
    config = dispatch._HUB_KERNELS_REGISTRY[dispatch.AttentionBackendName.FLASH_HUB]
    monkeypatch.setattr(config, "kernel_fn", late.flash_attn_func)
    fastac.enable(model, "attn_only", engine=engine)
    assert not hasattr(getattr(torch.ops, namespace), "_flash_attn_forward")
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(model, inputs), expected)
        assert attention_executions == {f"{namespace}::_flash_attn_forward": ATTENTIONS}


def test_xformers_as_built_for_cuda(monkeypatch: pytest.MonkeyPatch, attention_executions: Counter[str]) -> None:
    """With heads of 12 its dispatcher ends in torch's op."""
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    model, inputs = wan("xformers")
    reference = train_step(model, inputs)
    kernel = "aten::_efficient_attention_forward"
    assert attention_executions == {kernel: ATTENTIONS}
    fastac.enable(model, fastac.Policy("attn_only", min_kv=1))
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(model, inputs), reference)
        assert attention_executions == {kernel: ATTENTIONS}


# Backends that are refused


def refused(model: torch.nn.Module, backend: str, policy: str) -> None:
    with pytest.raises(fastac.UnsupportedBackendError) as error:
        fastac.enable(model, policy)
    assert str(error.value).startswith(f"{policy}: backend {backend!r} at WanTransformer3DModel.blocks.0.attn1 is ")
    assert BACKENDS[backend].reason in str(error.value)


def test_the_math_kernel_is_refused_unless_nothing_is_to_be_saved() -> None:
    model, inputs = wan("_native_math")
    refused(model, "_native_math", "attn_only")
    expected = train_step(model, inputs)
    fastac.enable(model, "full")
    assert_same(train_step(model, inputs), expected)


def test_flash_3_does_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is refused for what it does without fastac: it raises in backward, as nobody told autograd how."""
    monkeypatch.setattr(dispatch, "_CAN_USE_FLASH_ATTN_3", True)
    dispatch._wrapped_flash_attn_3.register_kernel("cpu")(
        forward_kernel("", op_of(FLASH_3), "bshd", ("out", "logsumexp"))
    )
    model, inputs = wan("_flash_3")
    with pytest.raises(RuntimeError, match="autograd"):
        train_step(model, inputs)
    refused(model, "_flash_3", "attn_only")
    refused(model, "_flash_3", "full")


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_flash_3_in_a_region_that_nobody_looked_at_before(engine: str) -> None:
    tensors = {name: torch.randn(1, 8, 2, 8, requires_grad=True) for name in "qkv"}
    region = functools.partial(fastac.checkpoint, op_of(FLASH_3), engine=engine)
    with pytest.raises(fastac.UnsupportedBackendError, match="diffusers' wrapper of flash-attn 3"):
        train_step(region, tensors)


def test_sage_does_not_train(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without fastac nobody says so: what comes before the attention gets no gradient from it."""
    monkeypatch.setattr(dispatch, "_CAN_USE_SAGE_ATTN", True)
    monkeypatch.setattr(dispatch, "sageattn", lambda q, k, v, **options: (q + v.mean(1, keepdim=True)).detach())
    model, inputs = wan("sage")
    found = train_step(model, inputs)
    without = {name for name, parameter in model.named_parameters() if f"gradient of {name}" not in found}
    assert any("to_q" in name for name in without)
    refused(model, "sage", "attn_only")
    refused(model, "sage", "full")


def test_each_that_can_be_saved_is_run_or_needs_what_is_not_here() -> None:
    """A backend that is added to the table has to be tried here, or to be named."""
    savable = {name for name, row in BACKENDS.items() if row.verdict in (Verdict.SAVABLE, Verdict.OPAQUE)}
    on_a_gpu = {"_native_cudnn", "_native_efficient"}  # the ops are run in test_sdpa.py
    newer_flash_attn_3 = {"_flash_varlen_3", "_flash_3_hub", "_flash_3_varlen_hub"}  # its ops in flash_attn_3.py
    assert savable - set(KERNELS) == on_a_gpu | newer_flash_attn_3
    assert set(KERNELS) <= savable
