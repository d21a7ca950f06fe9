"""What `fastac.plan` predicts against what is measured, on a CPU, for ten pairs of a model and a size of inputs.

The models are of the classes that people train, with few and narrow blocks, so that a step fits a CPU. Bytes are those
of the allocator, from the profiler's memory events: held after the forward, and the most of a step. FLOPs are those of
torch's FlopCounterMode, which counts calls; what a replayed call would have cost is taken off.

    python benchmarks/plan_accuracy.py [--check]
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import fastac
from common import allocated_bytes, finish, parser, positive
from fastac.engine.tape import Replay
from fastac.models import published as configurations
from fastac.planning import places
from fastac.planning.fake_model import fake_model
from fastac.planning.forecast import Forecast
from fastac.policy import NAMED, Policy
from fastac.verification.ways import build

HELD, PEAK = 0.01, 0.03
"""By how much a prediction of bytes may be off; one of FLOPs not at all."""

WIDE = {"num_attention_heads": 4, "attention_head_dim": 32}


@dataclass(frozen=True)
class Pair:
    """A model and a size of inputs. change: of the configuration. lora: rank of LoRA weights, trained alone."""

    name: str
    configuration: str
    change: dict[str, Any]
    frames: int
    height: int
    width: int
    batch: int = 1
    text_tokens: int = 64
    dtype: torch.dtype = torch.float32
    lora: int = 0


WAN = {**WIDE, "num_layers": 7, "ffn_dim": 512, "text_dim": 128, "freq_dim": 64}
LTX = {**WIDE, "num_layers": 7, "cross_attention_dim": 128, "caption_channels": 128}
HUNYUAN = {**WIDE, "num_layers": 6, "num_single_layers": 7, "num_refiner_layers": 1, "text_embed_dim": 128}
HUNYUAN |= {"pooled_projection_dim": 128, "rope_axes_dim": (8, 12, 12)}
COGVIDEOX = {**WIDE, "num_layers": 7, "text_embed_dim": 128, "time_embed_dim": 64, "max_text_seq_length": 64}
MOCHI = {**WIDE, "num_layers": 7, "pooled_projection_dim": 64, "text_embed_dim": 128, "time_embed_dim": 64}

PAIRS = (
    Pair("Wan", "wan2.1-t2v-1.3b", WAN, 9, 256, 256),
    Pair("Wan, longer, bf16", "wan2.1-t2v-1.3b", WAN, 21, 256, 256, dtype=torch.bfloat16),
    Pair("Wan, LoRA", "wan2.1-t2v-1.3b", WAN, 9, 256, 256, lora=8),
    Pair("Wan 2.2 5B, batch 2", "wan2.2-ti2v-5b", WAN, 9, 512, 512, batch=2),
    Pair("LTX", "ltx-video-2b", LTX, 25, 512, 512),
    Pair("LTX, bf16", "ltx-video-2b", LTX, 41, 512, 512, dtype=torch.bfloat16),
    Pair("HunyuanVideo", "hunyuanvideo", HUNYUAN, 9, 256, 256),
    Pair("HunyuanVideo, taller", "hunyuanvideo", HUNYUAN, 5, 512, 256),
    Pair("CogVideoX", "cogvideox-2b", COGVIDEOX, 9, 240, 352),
    Pair("Mochi", "mochi-1", MOCHI, 19, 256, 256),
)


@dataclass(frozen=True)
class Row:
    """Predicted and measured figures of one policy."""

    pair: str
    tokens: str
    policy: str
    held: int
    held_measured: int
    peak: int
    peak_measured: int
    flops: int
    flops_measured: int

    @property
    def off(self) -> tuple[float, float, int]:
        """By how much the predictions are off: of bytes relative to what was measured, of FLOPs absolute."""
        return self.held / self.held_measured - 1, self.peak / self.peak_measured - 1, self.flops - self.flops_measured

    @property
    def is_off(self) -> bool:
        held, peak, flops = self.off
        return abs(held) > HELD or abs(peak) > PEAK or flops != 0


def built(pair: Pair) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model with random weights, and the keyword arguments of one call."""
    found = configurations.load_configuration(pair.configuration)
    sizes = {name: getattr(pair, name) for name in ("frames", "height", "width", "batch", "text_tokens", "dtype")}
    found = dataclasses.replace(found, config={**found.config, **pair.change})
    model, inputs = build(found, dataclasses.replace(found.default, **sizes))
    if pair.lora:
        configurations.add_lora(model, pair.lora)
    return model, inputs


def outputs_of(model: torch.nn.Module, inputs: dict[str, Any]) -> Any:
    (output,) = model(**inputs)
    return output


def step(model: torch.nn.Module, inputs: dict[str, Any]) -> None:
    outputs_of(model, inputs).float().square().mean().backward()


@contextmanager
def replayed_flops() -> Iterator[list[int]]:
    """FLOPs of the calls that are replayed and not run."""
    found: list[int] = []
    handle = Replay.handle

    def counted(self: Replay, op: Any, keyset: Any, args: Any, kwargs: Any, product: str) -> Any:
        position = self.position
        outputs = handle(self, op, keyset, args, kwargs, product)
        if self.position > position and self.tape.entries[position].stored is not None:
            found.append(flop_registry[op.op.overloadpacket](*args, **kwargs, out_val=outputs))
        return outputs

    Replay.handle = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Replay.handle = handle  # type: ignore[method-assign]


def measure(model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes held after the forward and at the worst moment of a step, and FLOPs of a step."""

    def clear() -> None:
        model.zero_grad(set_to_none=True)
        gc.collect()

    step(model, inputs)  # what is built once is built now
    clear()
    with FlopCounterMode(display=False) as counter, replayed_flops() as replayed:
        step(model, inputs)
    clear()
    held = allocated_bytes(lambda: outputs_of(model, inputs)).held
    clear()
    peak = allocated_bytes(lambda: step(model, inputs)).peak
    return held, peak, counter.get_total_flops() - sum(replayed)


def compare(pair: Pair) -> Iterator[Row]:
    """Every policy on one pair."""
    model, inputs = built(pair)
    forecast = Forecast(fake_model(model, inputs))
    tokens = f"{pair.frames}x{pair.height}x{pair.width}"
    policies: dict[str, Any] = {
        "none": "none",
        "full": NAMED["full"],
        "long_attn_only": Policy("attn_only", min_kv=pair.text_tokens + 1),
        "attn_only": Policy(),
        "within": places.within(forecast, int(1.5 * forecast.figures("attn_only").saved_bytes)),
    }
    for name, policy in policies.items():
        mine = copy.deepcopy(model)
        plan = forecast.figures(policy)
        if policy != "none":
            fastac.enable(mine, policy)
        held, peak, flops = measure(mine, inputs)
        yield Row(
            pair.name,
            tokens,
            name,
            plan.held_bytes,
            held,
            plan.peak_bytes - forecast.states.total,
            peak,
            plan.flops,
            flops,
        )


def main() -> int:
    arguments = parser(__doc__, "plan_accuracy_cpu.json", check="a prediction is off by more than it may be")
    arguments.add_argument("--pairs", type=positive, default=len(PAIRS), help="only the first so many")
    options = arguments.parse_args()
    rows = [row for pair in PAIRS[: options.pairs] for row in compare(pair)]
    table = Table(title="predicted against measured")
    for heading in ("model", "policy", "held, MiB", "off", "peak, MiB", "off", "GFLOPs", "off"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in ("model", "policy") else "right")
    for row in rows:
        held, peak, flops = row.off
        table.add_row(
            row.pair,
            row.policy,
            f"{row.held_measured / 2**20:.2f}",
            f"{held:+.2%}",
            f"{row.peak_measured / 2**20:.2f}",
            f"{peak:+.2%}",
            f"{row.flops_measured / 1e9:.2f}",
            str(flops),
        )
    Console(width=120).print(table)
    missed = [f"{row.pair} {row.policy}: off by more than it may be" for row in rows if row.is_off]
    result = {"held_tolerance": HELD, "peak_tolerance": PEAK, "results": [asdict(row) for row in rows]}
    return finish(options, result, missed)


if __name__ == "__main__":
    sys.exit(main())
