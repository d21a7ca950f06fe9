"""What of the GPU benchmark a CPU can show: names of kernels, the loop on a tiny model; and on a GPU, in small."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from fastac.engine import offload

TINY = {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 16, "freq_dim": 256, "ffn_dim": 32}

KERNELS = {
    "attention forward": (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false>>",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<2> > >",
        "flash::FlashAttentionForwardSm100",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "_fwd_kernel",
    ),
    "attention backward": (
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<128, 64, 128, 8>>",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnBwdSm90<2> > >",
        "fmha_cutlassB_bf16_aligned_128x128_k128_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<cutlass>)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x128_1x1x1_kernel0_0",
        "_bwd_kernel_dk_dv",
    ),
    "matrix products": (
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>(cutlass_80)",
        "nvjet_tst_128x256_64x4_1x2_h_bz_coopA_NNT",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<cute::tuple<int, int, int, int>>>",
    ),
    "copies": ("Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"),
    "other": (
        "Memcpy HtoD (Pageable -> Device)",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16>>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, false>",
        "void pytorch_flash::flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>",
        "flash::FlashAttnFwdCombine",
    ),
}


@pytest.fixture
def gpu_wan(benchmark: Callable[[str], Any]) -> Any:
    return benchmark("gpu_wan")


def test_kernels_are_known_by_their_names(gpu_wan: Any) -> None:
    for group, names in KERNELS.items():
        assert {gpu_wan.group_of(name) for name in names} == {group}


def event(name: str, us: float, on_gpu: bool = True, named: bool = False, start: float = 0) -> Any:
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    time_range = SimpleNamespace(start=start, end=start + us, elapsed_us=lambda: us)
    return SimpleNamespace(name=name, device_type=kind, is_user_annotation=named, time_range=time_range)


def test_a_profile(gpu_wan: Any) -> None:
    """Operators on the CPU and named ranges are no kernels.

    Copies count, in both directions and each once, for the time in which kernels run beside them. A copy from other
    memory is no computation.
    """
    out, back = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"
    events = [
        event(out, 4e6, start=0),  # 2 s beside the first kernel, 1 s of them beside the second as well
        event("nvjet_tst", 3e6, start=2e6),
        event("flash_fwd_kernel", 2e6, start=3e6),
        event(back, 3e6, start=3e6),  # 2 s beside kernels
        event("Memcpy DtoD (Device -> Device)", 9e6, start=0),
        event("Memset (Device)", 9e6, start=0),
        event("Memcpy HtoD (Pageable -> Device)", 9e6, start=0),
        event("aten::mm", 9e6, on_gpu=False),
        event("a gemm of mine", 9e6, named=True),
    ]
    assert gpu_wan.hidden_seconds(events) == 4
    assert gpu_wan.hidden_seconds([event(out, 1e6), event("nvjet_tst", 1e6, start=1e6)]) == 0
    assert {name: (one.count, one.seconds) for name, one in gpu_wan.grouped(events).items()} == {
        "attention forward": (1, 2.0),
        "attention backward": (0, 0.0),
        "matrix products": (1, 3.0),
        "copies": (2, 7.0),
        "other": (3, 27.0),
    }


@pytest.mark.slow
def test_the_whole_loop_on_a_cpu(gpu_wan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "SMALLEST", 0)
    assert gpu_wan.Case().video.tokens((1, 2, 2)) == 72_000, "the case of the reported figures"
    case = gpu_wan.Case(5, 64, 64, 8, torch.float32, {**TINY, "num_layers": 3}, crop=(5, 32, 32))
    assert gpu_wan.fitting_budget(case, 1000) is None
    assert gpu_wan.fitting_budget(case, 10**9) > 0
    device = torch.device("cpu")
    checked = gpu_wan.check(case, device)
    result = gpu_wan.measured(case, device, 1, None, Console(quiet=True))
    rows = {row.variant: row for row in result.rows}
    (refused,) = (row for row in result.rows if row.problem)
    assert (refused.variant, refused.problem.partition(":")[0]) == ("long_attn_only", "refused"), "32 keys are not long"
    attention = {name: row.attention for name, row in rows.items() if row is not refused}
    assert attention.pop("planned") in range(6, 13)
    assert attention == {"none": 6, "full": 12, "attn_only": 6, "torch SAC, by name": 6} | {
        "full, offload": 12,
        "attn_only, offload": 6,
    }
    assert rows["attn_only, offload"].host_bytes > rows["full, offload"].host_bytes > 0 == rows["attn_only"].host_bytes
    assert rows["none"].held_bytes > rows["attn_only"].held_bytes > rows["full"].held_bytes
    weights = sum(one.nbytes for one in gpu_wan.Training(case.configuration, case.video, device).model.parameters())
    assert result.besides > 3 * weights, "with two states for each"
    assert gpu_wan.kernel_table(result, "a title").row_count == len(rows)
    gpu_wan.write_result(tmp_path / "gpu.json", gpu_wan.json_of(case, 1, checked, result))
    written = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["variant"] for row in written["results"]] == list(rows)
    assert written["results"][1]["ops"] == {"aten::_scaled_dot_product_flash_attention_for_cpu": 12}
