"""Steps of Wan 2.1 1.3B on one GPU under several ways of checkpointing: the script of the first run on a GPU.

It is kept so that the figures in results/gpu_wan_nvidia_h100_80gb_hbm3.json can be reproduced, until `make gpu`
replaces them. A step is forward, mean of squares, backward and, but for `small`, fused AdamW; batch 1, bf16, random
weights. The ways run one after another, each warmed first, and the timed steps compare no values. `720` and `30`:
72,000 tokens, 10 and 30 blocks; `small`: 1,170 tokens, 30 blocks. torch_remat is needed for one way. Without a GPU all
runs in miniature, where "long_attn_only" saves nothing and is refused.

    python benchmarks/gpu_first_run.py 720 30 small
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
import types
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch
from diffusers import WanTransformer3DModel

import fastac
from fastac.engine.blocks import known_state
from fastac.verification.ways import enable_torch_sac
from peers import remat

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
CONFIG: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 12 if ON_GPU else 2,
    "attention_head_dim": 128 if ON_GPU else 16,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096 if ON_GPU else 32,
    "freq_dim": 256,
    "ffn_dim": 8960 if ON_GPU else 64,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "eps": 1e-6,
    "rope_max_seq_len": 1024,
}


def build(layers: int) -> Any:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model = WanTransformer3DModel(**CONFIG, num_layers=layers if ON_GPU else 2).to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.detach().float().abs().max() == 0:
            torch.nn.init.normal_(parameter, std=0.02)
    return model.train()


def inputs_of(frames: int, height: int, width: int) -> dict[str, Any]:
    if not ON_GPU:
        frames, height, width = 5, 64, 64
    generator = torch.Generator(device=DEVICE).manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(torch.bfloat16)

    return {
        "hidden_states": random(1, 16, (frames - 1) // 4 + 1, height // 8, width // 8),
        "encoder_hidden_states": random(1, 512, CONFIG["text_dim"]),
        "timestep": torch.full((1,), 500, device=DEVICE),
        "return_dict": False,
    }


WAYS = {
    "none": lambda model, inputs: None,
    "torch full": lambda model, inputs: model.enable_gradient_checkpointing(),
    "torch SAC, by name": lambda model, inputs: enable_torch_sac(model),
    "torch_remat": lambda model, inputs: remat(types.SimpleNamespace(model=model)),
    "full": lambda model, inputs: fastac.enable(model, policy="full"),
    "attn_only": lambda model, inputs: fastac.enable(model, policy="attn_only"),
    "long_attn_only": lambda model, inputs: fastac.enable(model, policy="long_attn_only"),
    "attn_only, offload": lambda model, inputs: fastac.enable(model, fastac.Policy("attn_only", offload=True)),
    "plan 20 GiB": lambda model, inputs: fastac.enable(model, fastac.plan(model, inputs).within("20GiB")),
}
AGAIN = ", again"
"""Ends the name of a way that is timed once more, as the last."""

LONG = ("torch full", "attn_only", "long_attn_only", "attn_only, offload", "plan 20 GiB")
SMALL = ("none", "torch full", "full", "attn_only", "long_attn_only", "torch SAC, by name", "torch_remat")
SMALL += ("attn_only, offload", "torch full" + AGAIN, "attn_only" + AGAIN)


def synchronize() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def allocated() -> int:
    return torch.cuda.memory_allocated() if ON_GPU else 0


def release(model: Any) -> None:
    fastac.disable(model)
    model.disable_gradient_checkpointing()
    model.zero_grad(set_to_none=True)
    gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def measure(
    model: Any, inputs: dict[str, Any], way: str, rounds: int, optimizer: torch.optim.Optimizer | None, warm: int
) -> dict[str, Any]:
    """Switch a way on, run warm steps, and measure the steps after them."""
    release(model)
    WAYS[way.removesuffix(AGAIN)](model, inputs)
    for _ in range(warm):
        (output,) = model(**inputs)
        output.float().square().mean().backward()
        del output
        if optimizer is not None:
            optimizer.step()
        model.zero_grad(set_to_none=True)
    for block in model.blocks:  # like most steps: none of those that follow compares values
        if (state := known_state(block)) is not None:
            state.step = 2**20 + 1
    synchronize()
    gc.collect()
    before = allocated()
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    seconds, forward_seconds, held = [], [], 0
    for _ in range(rounds if ON_GPU else 1):
        synchronize()
        started = time.perf_counter()
        (output,) = model(**inputs)
        loss = output.float().square().mean()
        del output
        synchronize()
        forward = time.perf_counter()
        held = allocated() - before
        loss.backward()
        del loss
        if optimizer is not None:
            optimizer.step()
        synchronize()
        ended = time.perf_counter()
        seconds.append(round(ended - started, 4))
        forward_seconds.append(round(forward - started, 4))
        model.zero_grad(set_to_none=True)
    peak = torch.cuda.max_memory_allocated() if ON_GPU else 0
    row = {"seconds": seconds, "forward_seconds": statistics.median(forward_seconds)}
    return {**row, "held_bytes": held, "peak_bytes": peak}


def show(model: Any, inputs: dict[str, Any], ways: tuple[str, ...], *options: Any) -> None:
    """A line for each way. One that cannot run leaves its error."""
    for way in ways:
        try:
            row = measure(model, inputs, way, *options)
        except (ImportError, RuntimeError) as error:
            row = {"problem": f"{type(error).__name__}: {error}"}
        print(way, row, flush=True)
    release(model)


def long_video(layers: int, ways: tuple[str, ...], rounds: int) -> None:
    model, inputs = build(layers), inputs_of(77, 720, 1280)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    if ways == LONG:
        print(fastac.plan(model, inputs), flush=True)
    show(model, inputs, ways, rounds, optimizer, 1)


SECTIONS = {
    "720": lambda: long_video(10, LONG, 2),
    "30": lambda: long_video(30, LONG[:2], 1),
    "small": lambda: show(build(30), inputs_of(9, 240, 416), SMALL, 20, None, 3),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="+", choices=SECTIONS)
    for name in parser.parse_args().sections:
        SECTIONS[name]()
        gc.collect()
        if ON_GPU:
            torch.cuda.empty_cache()
    return 0


if __name__ == "__main__":
    sys.exit(main())
