"""A training step of Wan2.1-T2V-1.3B on 72,000 tokens, on one CUDA GPU, under every way of checkpointing.

The measurement that fastac began with: 77 frames of 720 x 1280, batch 1, bf16, random weights; a step is forward, mean
squared error, backward and AdamW. Of every way: the time of a step, the most memory that is allocated, and how many
kernels of attention and of matrix products ran, by their names in a profile of one step. Without checkpointing a step
needs more memory than most GPUs have: that is a row that says so. The ways take turns, see fastac/cli/measuring.py.
With offload also: bytes in host memory, the copies that the GPU was idle for, and how much of the time of all copies in
the profiled step went by while the GPU computed.

Before that fastac.verify compares gradients of a model with two blocks on a small video. Nothing is downloaded, and
fastac need not be installed.

    python benchmarks/gpu_wan.py
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table

import fastac
from common import parser, positive, write_result
from fastac.cli.measuring import (
    PLANNED,
    Measurement,
    Switch,
    Workload,
    build,
    gpu,
    hidden_seconds,
    is_copy,
    measure,
    offload_columns,
    table_of,
)
from fastac.errors import readable_bytes
from fastac.models import published as configurations
from fastac.models.published import Configuration
from fastac.models.videos import Video
from fastac.planning.plans import parse_bytes
from fastac.planning.video import without_weights
from fastac.verify import executed_attention

MODEL = "wan2.1-t2v-1.3b"
SHARE = (
    0.85  # of the GPU's memory: what the step may take by the plan, which does not know what the allocator rounds up
)

ATTENTION_BACKWARD = (
    r"flash_bwd|FlashAttnBwd|FlashAttentionBackward|fmha_cutlassB|fmha.*bwd|sdpa.*bprop|attn_bwd|\b_bwd_kernel"
)
ATTENTION_FORWARD = (
    r"flash_fwd(_splitkv)?_kernel|FlashAttnFwd(?!Combine)|FlashAttentionForward(?!Combine)|fmha_cutlassF|fmha.*fwd|"
    r"sdpa.*fprop|attn_fwd|\b_fwd_kernel"
)
GROUPS = {
    "attention forward": re.compile(ATTENTION_FORWARD),
    "attention backward": re.compile(ATTENTION_BACKWARD),
    "matrix products": re.compile(r"gemm|nvjet|cutlass.*tensorop", re.IGNORECASE),
}
"""Kernels by their names; the first group counts. flash-attn's backward is several kernels for each call."""

COPIES, OTHER = "copies", "other"
"""Copies: between the GPU and pinned memory, which are those of offload."""


def group_of(kernel: str) -> str:
    if is_copy(kernel):
        return COPIES
    return next((group for group, names in GROUPS.items() if names.search(kernel)), OTHER)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained. change: of the configuration. crop: frames, height and width of the video for the check."""

    frames: int = 77
    height: int = 720
    width: int = 1280
    text_tokens: int = 512
    dtype: torch.dtype = torch.bfloat16
    change: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    crop: tuple[int, int, int] = (9, 240, 416)

    @property
    def configuration(self) -> Configuration:
        found = configurations.load(MODEL)
        return dataclasses.replace(found, config={**found.config, **self.change})

    @property
    def video(self) -> Video:
        return dataclasses.replace(
            self.configuration.default,
            frames=self.frames,
            height=self.height,
            width=self.width,
            text_tokens=self.text_tokens,
            dtype=self.dtype,
        )


class Training(Workload):
    """A step with an optimizer. The gradients are gone with the next step, weights and the optimizer's states stay."""

    def __init__(self, configuration: Configuration, video: Video, device: torch.device) -> None:
        model, inputs = build(configuration, video, device)
        super().__init__(model, inputs, device)
        self.target = torch.randn(inputs["hidden_states"].shape, device=device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def forward(self) -> torch.Tensor:
        torch.manual_seed(0)
        (output,) = self.model(**self.inputs)
        return torch.nn.functional.mse_loss(output.float(), self.target)

    def finish(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.step()

    @property
    def besides(self) -> int:
        """Bytes of weights, the optimizer's states and inputs."""
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        found = [*states, self.target, *self.inputs.values()]
        return self.weights + sum(tensor.nbytes for tensor in found if isinstance(tensor, torch.Tensor))


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Of one group, in one step."""

    count: int = 0
    seconds: float = 0.0


def profiled(workload: Workload) -> tuple[dict[str, Kernels], dict[str, int], float]:
    """Kernels of a step by group, attention ops that ran in it by name, and seconds of copies beside computation."""
    kinds = torch.profiler.ProfilerActivity
    with executed_attention(*[kinds.CUDA] * (workload.device.type == "cuda")) as (ran, profile):
        workload.step()
    events = profile.events() or ()
    return grouped(events), dict(ran), hidden_seconds(events)


def grouped(events: Iterable[Any]) -> dict[str, Kernels]:
    """What ran on the GPU among the events of a profile."""
    found = dict.fromkeys((*GROUPS, COPIES, OTHER), Kernels())
    for event in events:
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            before = found[group := group_of(event.name)]
            found[group] = Kernels(before.count + 1, before.seconds + event.time_range.elapsed_us() / 1e6)
    return found


def fitting_budget(case: Case, memory: int) -> int | None:
    """Bytes of saved outputs with which a step fits a share of a memory, by the plan."""
    inputs = case.configuration.inputs(case.video)
    return fastac.plan(without_weights(case.configuration, case.dtype), inputs).largest_budget(int(SHARE * memory))


def check(case: Case, device: torch.device) -> fastac.Verification:
    """Gradients under attn_only against none: two blocks, a small video. Raises FastacError where they differ."""
    frames, height, width = case.crop
    config = configurations.with_layers(case.configuration.config, 2)
    small = dataclasses.replace(case.configuration, config=config)
    video = dataclasses.replace(case.video, frames=frames, height=height, width=width)
    training = Training(small, video, device)
    return fastac.verify(training.model, **training.inputs, policy="attn_only")


@dataclasses.dataclass(frozen=True)
class Result:
    """kernels, ops, hidden: by the name of the way, hidden as seconds. besides: bytes of what the step begins with."""

    rows: list[Measurement]
    kernels: dict[str, dict[str, Kernels]]
    ops: dict[str, dict[str, int]]
    hidden: dict[str, float]
    besides: int
    budget: int | None


def measured(case: Case, device: torch.device, rounds: int, budget: int | None, console: Console) -> Result:
    """Every way of checkpointing on one model."""
    training = Training(case.configuration, case.video, device)
    switch = Switch(training, budget, offload=True)
    kernels, ops, hidden = {}, {}, {}

    def look(name: str) -> dict[str, Any]:
        kernels[name], ops[name], hidden[name] = profiled(training)
        return {"attention": sum(ops[name].values())}

    rows = measure(switch, look, rounds=rounds, tell=console.print)
    planned = any(row.variant == PLANNED and not row.problem for row in rows)
    return Result(rows, kernels, ops, hidden, training.besides, switch.budget if planned else budget)


def kernel_table(result: Result, title: str) -> Table:
    """What every way took, and its kernels."""

    def kernels(group: str, row: Measurement) -> str:
        one = result.kernels[row.variant][group]
        return f"{one.count} ({one.seconds:.3f} s)"

    def copies(row: Measurement) -> str:
        one = result.kernels[row.variant][COPIES]
        return f"{one.seconds:.3f} s, {result.hidden[row.variant] / one.seconds:.0%}" if one.seconds else ""

    captions = [f"bytes besides {readable_bytes(result.besides)} of weights, the optimizer's states and inputs"]
    captions += ["kernels of one step, by name; of the time of its copies, how much went by while the GPU computed"]
    captions += [f"budget: {readable_bytes(result.budget)}"] if result.budget is not None else []
    columns = {group: functools.partial(kernels, group) for group in GROUPS}
    return table_of(
        result.rows, title, captions, {**columns, **offload_columns(result.rows, "cuda"), "copies, hidden": copies}
    )


def json_of(case: Case, rounds: int, checked: fastac.Verification, result: Result) -> dict[str, Any]:
    return {
        "model": MODEL,
        "change": dict(case.change),
        "video": {name: getattr(case, name) for name in ("frames", "height", "width", "text_tokens")},
        "tokens": case.video.tokens((1, 2, 2)),
        "dtype": str(case.dtype).removeprefix("torch."),
        "rounds": rounds,
        "budget": result.budget,
        "besides_bytes": result.besides,
        "check": {"policy": checked.policy, "compared": checked.compared, "different": len(checked.different)}
        | {"largest_difference": checked.largest_difference, "noise": checked.noise},
        "results": [
            {
                **dataclasses.asdict(row),
                "ops": result.ops.get(row.variant, {}),
                "hidden_seconds": result.hidden.get(row.variant, 0.0),
                "kernels": {name: dataclasses.asdict(one) for name, one in result.kernels.get(row.variant, {}).items()},
            }
            for row in result.rows
        ],
    }


def main() -> int:
    arguments = parser(__doc__, "gpu_wan_<GPU>.json")
    arguments.add_argument("--rounds", type=positive, default=5, help="timed steps of each way (default: %(default)s)")
    arguments.add_argument("--budget", metavar="BYTES", help="of saved outputs; default: what fits the GPU by the plan")
    options = arguments.parse_args()
    try:
        budget = None if options.budget is None else parse_bytes(options.budget)
    except fastac.FastacError as error:
        arguments.error(f"--budget {error}")

    console = Console(width=200)
    if not torch.cuda.is_available():
        console.print("gpu_wan.py measures on a CUDA GPU, and torch finds none here: nothing was measured.")
        return 0
    case, device = Case(), torch.device("cuda")
    found = gpu()
    if budget is None:
        budget = fitting_budget(case, found["memory_bytes"])
    checked = check(case, device)
    console.print(str(checked), markup=False)
    result = measured(case, device, options.rounds, budget, console)
    console.print(kernel_table(result, f"{MODEL}, {case.video.tokens((1, 2, 2)):,} tokens, {found['name']}"))
    name = re.sub(r"[^a-z0-9]+", "_", found["name"].lower()).strip("_")
    output = options.output.with_name(options.output.name.replace("<GPU>", name))
    write_result(output, json_of(case, options.rounds, checked, result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
