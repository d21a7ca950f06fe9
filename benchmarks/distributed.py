"""What each parallel engine makes of each policy: collectives, bytes, attention executions, on a rank of several.

Wan, and for tensor parallelism a stack of plain blocks, in a step after two others, on CPU ranks with gloo. Collectives
and attention kernels are those that torch's profiler saw executed; held is what the allocator still holds after the
forward, on this rank; sent is what the rank gave to its collectives. gloo has no reduce-scatter of its own: torch makes
an all-reduce of it.

    python benchmarks/distributed.py [--check]
"""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from rich.console import Console
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile

import fastac
from common import allocated_bytes, finish, parser
from fastac.engine.torch_private import profiled_events
from fastac.errors import readable_bytes
from held_bytes import BATCH, HEAD_DIM, TEXT_TOKENS, TOKENS, WIDTH, build_wan, wan_inputs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.distributed import ranks, steps
from tests.distributed.models import TensorParallel, sharded, sharded_inside

LAYERS = 4
SIZES = {"float": 4, "c10::BFloat16": 2, "long int": 8, "unsigned char": 1, "double": 8}
"""Bytes of a number, by the names that the profiler gives to types."""

POLICIES: dict[str, fastac.Policy | None] = {
    "none": None,
    "full": fastac.Policy("full"),
    "attn_only": fastac.Policy("attn_only"),
    'attn_only, collectives="recompute"': fastac.Policy("attn_only", collectives="recompute"),
}


def _alone(model: Any) -> Any:
    return model


def _in_parallel(model: Any) -> Any:
    return DistributedDataParallel(model)


def _split(model: Any) -> Any:
    with ranks.one_accelerator():
        model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=dist.get_world_size()))
    return model


def _split_and_sharded(model: Any) -> Any:
    return sharded(_split(model))


@dataclasses.dataclass(frozen=True)
class Engine:
    """One way to train on several ranks. communicates: inside the blocks, and not only for parameters.

    stack: of a model of plain blocks, self-attention and feed-forward, how it is tensor parallel; else it is Wan.
    """

    name: str
    world: int
    prepare: Callable[[Any], Any]
    communicates: bool = False
    stack: str = ""


GATHERS = "tensor and sequence parallel"
"""The engine that gathers activations inside blocks, which are gathered again."""

ENGINES = (
    Engine("one process", 1, _alone),
    Engine("DDP", 2, _in_parallel),
    Engine("FSDP2, blocks", 2, sharded),
    Engine("FSDP2, every Linear", 2, sharded_inside),
    Engine("Ulysses", 2, _split, communicates=True),
    Engine("Ulysses in FSDP2, blocks", 2, _split_and_sharded, communicates=True),
    Engine("tensor parallel", 2, _alone, communicates=True, stack="plain"),
    Engine(GATHERS, 2, _alone, communicates=True, stack="sequence"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One engine under one policy, on rank 0. attention, collectives, sent: in forward and in backward."""

    engine: str
    ranks: int
    policy: str
    attention: tuple[int, int]
    collectives: tuple[int, int]
    held: int
    sent: tuple[int, int]
    exact: bool
    communicates: bool


def measure(name: str, world: int) -> list[dict[str, Any]]:
    """All policies of one engine, on this rank."""
    (engine,) = (engine for engine in ENGINES if (engine.name, engine.world) == (name, world))
    rows: list[dict[str, Any]] = []
    expected: dict[str, torch.Tensor] = {}
    for policy_name, policy in POLICIES.items():
        if not engine.communicates and policy is not None and policy.collectives != "save":
            continue
        torch.manual_seed(0)
        if engine.stack:
            model: Any = TensorParallel(engine.stack, policy or "none", width=WIDTH, head=HEAD_DIM, layers=LAYERS)
            batch: dict[str, Any] = {"x": torch.randn(BATCH, TOKENS, WIDTH)}
        else:
            model = build_wan(LAYERS, torch.float32)
            if policy is not None:
                fastac.enable(model, policy)
            torch.manual_seed(0 if engine.communicates else dist.get_rank())
            batch = wan_inputs(torch.float32) | {"return_dict": False}
        wrapped = engine.prepare(model)
        for _ in range(3):  # the first ones warm up
            found = steps.measured(wrapped, batch)
        expected = expected or found.tensors
        # What gloo's own threads free, the profiler may miss: the least of some forwards is what is held.
        held = min(allocated_bytes(functools.partial(_forward, wrapped, batch)).held for _ in range(24))
        sent = _sent(wrapped, batch)
        exact = all(torch.equal(found.tensors[key], tensor) for key, tensor in expected.items())
        rows.append(
            dataclasses.asdict(
                Row(
                    engine.name,
                    world,
                    policy_name,
                    found.attention,
                    found.collectives,
                    held,
                    sent,
                    exact,
                    engine.communicates,
                )
            )
        )
    return rows


def _forward(model: Any, batch: dict[str, Any]) -> Any:
    outputs = model(**batch)
    dist.barrier()
    time.sleep(0.1)  # gloo's threads let go of what was sent a moment after it arrived
    return outputs


def _sent(model: Any, batch: dict[str, Any]) -> tuple[int, int]:
    activities = [ProfilerActivity.CPU]
    with profile(activities=activities, record_shapes=True) as forward:
        output = model(**batch)
    with profile(activities=activities, record_shapes=True) as backward:
        (output if isinstance(output, torch.Tensor) else output[0]).sum().backward()
    return _bytes(forward), _bytes(backward)


def _bytes(profiled: Any) -> int:
    found = 0
    for event in profiled_events(profiled):
        if event.name().startswith("gloo:"):
            for shape, kind in zip(event.shapes(), event.dtypes(), strict=True):
                found += functools.reduce(lambda a, b: a * b, shape, SIZES[kind])
    return found


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """What is not as fastac promises."""
    plain = {(row["engine"], row["ranks"]): row for row in rows if row["policy"] == "none"}
    found = []
    for row in rows:
        before = plain[row["engine"], row["ranks"]]
        where = f"{row['engine']} on {row['ranks']}, {row['policy']}"
        if not row["exact"]:
            found.append(f"{where}: losses or gradients differ from those without checkpointing")
        if row["policy"].startswith("attn_only") and row["attention"] != before["attention"]:
            found.append(f"{where}: attention {row['attention']}, {before['attention']} without checkpointing")
        exchanged = row["policy"] == "attn_only" and row["engine"] != GATHERS
        if exchanged and row["collectives"] != before["collectives"]:
            found.append(f"{where}: collectives {row['collectives']}, {before['collectives']} without checkpointing")
    return found


def main() -> int:
    options = parser(__doc__, "distributed_cpu.json", check="attention or collectives run again").parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for engine in ENGINES:  # each in new processes: what one left behind would be held in the next
        found = ranks.outcomes(measure, engine.name, engine.world, world=engine.world, patience=600)
        rows += ranks.results(found)[0]
    table = Table(title=f"Wan, {LAYERS} blocks, {TOKENS} video tokens, rank 0", title_justify="left")
    for heading in ("engine", "ranks", "policy", "attention", "collectives", "held", "sent"):
        table.add_column(heading)
    for row in rows:
        numbers = [f"{row[name][0]} + {row[name][1]}" for name in ("attention", "collectives")]
        sent = " + ".join(map(readable_bytes, row["sent"]))
        table.add_row(row["engine"], str(row["ranks"]), row["policy"], *numbers, readable_bytes(row["held"]), sent)
    Console(width=160).print(table)
    shapes = {"layers": LAYERS, "batch": BATCH, "tokens": TOKENS, "text_tokens": TEXT_TOKENS, "width": WIDTH}
    return finish(options, {**shapes, "dtype": "float32", "results": rows}, failures(rows))


if __name__ == "__main__":
    sys.exit(main())
