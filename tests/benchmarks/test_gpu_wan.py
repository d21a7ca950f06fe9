"""What of the GPU benchmark a CPU can show: names of kernels, a profile, and all of it in miniature."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastac.engine import offload

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
def common(benchmark: Callable[[str], Any]) -> Any:
    return benchmark("common")


@pytest.fixture
def gpu_wan(benchmark: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(offload, "SMALLEST", 0)
    return benchmark("gpu_wan")


def test_kernels_are_known_by_their_names(common: Any) -> None:
    for group, names in KERNELS.items():
        assert {common.group_of(name) for name in names} == {group}


def event(name: str, us: float, on_gpu: bool = True, named: bool = False, start: float = 0) -> Any:
    kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
    time_range = SimpleNamespace(start=start, end=start + us, elapsed_us=lambda: us)
    return SimpleNamespace(name=name, device_type=kind, is_user_annotation=named, time_range=time_range)


OUT, BACK = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"
EVENTS = [
    event(OUT, 4e6, start=0),  # 2 s beside the first kernel, 1 s of them beside the second as well
    event("nvjet_tst", 3e6, start=2e6),
    event("flash_fwd_kernel", 2e6, start=3e6),
    event(BACK, 3e6, start=3e6),  # 2 s beside kernels
    event("Memcpy DtoD (Device -> Device)", 9e6, start=0),
    event("Memset (Device)", 9e6, start=0),
    event("Memcpy HtoD (Pageable -> Device)", 9e6, start=0),
    event("aten::mm", 9e6, on_gpu=False),
    event("a gemm of mine", 9e6, named=True),
]


def test_a_profile(common: Any) -> None:
    """Operators on the CPU and named ranges are no kernels.

    Copies count, in both directions and each once, for the time in which kernels run beside them. A copy from other
    memory is no computation.
    """
    assert common.hidden_seconds(EVENTS) == 4
    assert common.hidden_seconds([event(OUT, 1e6), event("nvjet_tst", 1e6, start=1e6)]) == 0
    assert {name: (one.count, one.seconds) for name, one in common.grouped(EVENTS).items()} == {
        "attention forward": (1, 2.0),
        "attention backward": (0, 0.0),
        "matrix products": (1, 3.0),
        "copies": (2, 7.0),
        "other": (3, 27.0),
    }


def test_how_long_a_gpu_ran_and_waited(common: Any) -> None:
    """Kernels that overlap leave no gap, copies fill none."""
    assert common.running_and_waiting(EVENTS) == (5, 0)
    last = [event("nvjet_tst", 1e6, start=7e6), event("nvjet_tst", 1e6, start=10e6)]
    assert common.running_and_waiting([*last[::-1], *EVENTS]) == (7, 4)
    assert common.running_and_waiting([event(OUT, 1e6)]) == (0, 0)


@pytest.mark.slow
def test_all_of_it_in_miniature(
    gpu_wan: Any, run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("peft")  # for LoRA
    some = {"short": ("torch full", "none"), "compiled": ("torch full", "attn_only", "attn_only, offload")}
    cases = (dataclasses.replace(case, ways=some.get(case.name, case.ways)) for case in gpu_wan.CASES)
    monkeypatch.setattr(gpu_wan, "CASES", tuple(cases))
    found = run("gpu_wan", "--device", "cpu", "--minutes", "60")
    assert found["complete"]

    assert found["minutes"] == 60
    assert "attn_only" in found["check"]["text"]
    assert [case["name"] for case in found["cases"]] == ["long", "lora_14b", "short", "compiled"]
    printed = capsys.readouterr().out
    for case in found["cases"]:
        assert case["tokens"] == 1024
        assert case["title"] in printed
        assert not [row["problem"] for row in case["rows"] if row["problem"]]
        assert [len(row["seconds"]) for row in case["rows"]] == [1] * len(case["rows"])
        assert all(0 < row["forward_seconds"][0] < row["seconds"][0] for row in case["rows"])
        assert case["rows"][0]["relative"] == 1
    long, lora, _, compiled = ({row["way"]: row for row in case["rows"]} for case in found["cases"])
    attention = {way: row["attention_kernels"] for way, row in long.items() if not way.startswith(("plan ", "auto "))}
    assert attention == {"torch full": 12, "full": 12, "none": 6} | {
        "torch SAC, FastVideo's list": 6,
        "torch SAC, by name": 6,
        "attn_only": 6,
        "long_attn_only": 9,  # attention over the text runs again
        "attn_only, offload": 6,
        "long_attn_only, offload": 9,
    }
    assert [row["attention_kernels"] for row in compiled.values()] == [12, 6, 6]
    for rows in (long, compiled):
        assert rows["attn_only, offload"]["held_bytes"] < rows["attn_only"]["held_bytes"]
        assert rows["attn_only, offload"]["host_bytes"] > 0 == rows["attn_only"]["host_bytes"]
    assert long["none"]["held_bytes"] > long["attn_only"]["held_bytes"] > long["full"]["held_bytes"]
    assert long["plan 1 MiB"]["held_bytes"] > long["plan 1 MiB, offload"]["held_bytes"]

    assert long["auto 1 GiB"]["held_bytes"] == long["none"]["held_bytes"]
    auto = long["auto 6 MiB, offload"]
    assert long["attn_only"]["held_bytes"] < auto["held_bytes"] < long["none"]["held_bytes"]
    assert long["attn_only"]["peak_bytes"] < auto["planned_peak_bytes"] < 6 * 2**20

    assert {way for way, row in long.items() if row["planned_peak_bytes"] is None} == {*gpu_wan.MORE_WAYS} - {"full"}
    assert all(row["planned_peak_bytes"] is None for row in compiled.values())
    autos = ("auto 1 GiB", "auto 6 MiB, offload")
    for way in ("torch full", "full", "attn_only", "long_attn_only", "plan 1 MiB", *autos, "none"):
        # Attention on a CPU has workspaces of its own, which is much beside so few tokens. The host is no other memory.
        planned = long[way]["planned_peak_bytes"] + long[way]["host_bytes"]
        assert 0.85 < planned / long[way]["peak_bytes"] < 1.005
    assert lora["torch full"]["planned_peak_bytes"] > 0 < lora["long_attn_only, offload"]["host_bytes"]


def test_the_script_without_time(run: Any) -> None:
    """It checks gradients, and says of each way that there was no time."""
    pytest.importorskip("peft")
    found = run("gpu_wan", "--device", "cpu", "--cases", "lora_14b", "--minutes", "0")
    assert found["check"]["different"] == 0 < found["check"]["compared"]
    (case,) = found["cases"]
    assert [row["problem"] for row in case["rows"]] == ["no time left"] * 2


def test_a_way_that_fails(gpu_wan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Out of memory is a row, also where it is not the first step: the others go on, over nothing."""
    enabled = itertools.count()

    def out_of_memory(model: Any) -> None:
        if next(enabled):
            raise torch.OutOfMemoryError("no more")
        model.enable_gradient_checkpointing()

    monkeypatch.setattr(gpu_wan, "OF_TORCH", {**gpu_wan.OF_TORCH, "torch full": out_of_memory})
    case = dataclasses.replace(gpu_wan.in_miniature(gpu_wan.CASES[0]), ways=("torch full", "full"), rounds=1)
    found = case.facts()
    gpu_wan.measure(case, torch.device("cpu"), gpu_wan.time.monotonic() + 600, found, lambda: None, lambda text: None)
    failed, other = found["rows"]
    assert failed == {"way": "torch full", "problem": "out of memory"}
    assert (other["relative"], len(other["seconds"])) == (None, 1)
    assert gpu_wan.table_of(found).row_count == 2


def test_a_profile_of_a_gpu(gpu_wan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step on the CPU, with the allocator and profiles of a GPU that answers what it is told."""
    case = dataclasses.replace(gpu_wan.in_miniature(gpu_wan.CASES[0]), blocks=1)
    training = gpu_wan.Training(case, torch.device("cpu"))
    profiles = iter([EVENTS, [event("flash_fwd_kernel", 1e6)]])
    allocated, calls = iter([100, 100, 130]), iter([3, 8])

    def profile(activities: Any) -> Any:
        assert activities == [torch.profiler.ProfilerActivity.CUDA]
        return contextlib.nullcontext(SimpleNamespace(events=lambda: next(profiles)))

    monkeypatch.setattr(torch.profiler, "profile", profile)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 180)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda: {"num_device_alloc": next(calls)})
    training.device = torch.device("cuda")
    row, timed = gpu_wan.profile_step(training)
    assert 0 < timed.forward < timed.seconds
    assert timed.allocations == 5
    assert row.pop("kernels")["attention forward"] == {"count": 2, "seconds": 3.0}
    figures = {"held_bytes": 30, "host_bytes": 0, "peak_bytes": 180, "hidden": 4 / 7, "attention_kernels": 2}
    assert row == figures | {"forward_kernel_seconds": 5, "forward_gap_seconds": 0}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_attention_kernels(gpu_wan: Any, device: str) -> None:
    case = dataclasses.replace(gpu_wan.in_miniature(gpu_wan.CASES[0]), blocks=2)
    if device == "cuda":  # numbers that its kernels take
        change = {**case.change, "attention_head_dim": 64}
        case = dataclasses.replace(case, change=change, dtype=torch.bfloat16)
    training = gpu_wan.Training(case, torch.device(device))
    found = {}
    for way in ("torch full", "attn_only", "attn_only, offload"):
        training.to(way)
        found[way], timed = gpu_wan.profile_step(training)
        assert 0 < timed.forward < timed.seconds
    assert [row["attention_kernels"] for row in found.values()] == [8, 4, 4]
    assert found["attn_only"]["held_bytes"] > found["torch full"]["held_bytes"]
    if device == "cuda":
        assert found["attn_only"]["forward_kernel_seconds"] > 0


def test_without_a_gpu(
    gpu_wan: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["gpu_wan.py", "--output", str(tmp_path / "gpu.json")])
    assert gpu_wan.main() == 0
    assert "nothing was measured" in capsys.readouterr().out
    assert not (tmp_path / "gpu.json").exists()
