"""Training steps of Wan 2.1 on one CUDA GPU, under every way of checkpointing: time, memory, kernels.

Random weights in bf16, batch 1. A step is forward, mean squared error, backward and fused AdamW. The cases:

- long: 1.3B on 72,000 tokens (77 frames of 720 x 1280), 10 of its 30 blocks: on an H100 a step of these takes 3 s;
- lora_14b: 14B with LoRA on 75,600 tokens, for 80 GB: one step of each way. To run out of memory is a result;
- short: 1.3B on 2,340 tokens, all blocks, which the GPU runs faster than the host can launch;
- compiled: as long, with 5 blocks, each compiled, by fastac.compile or, without fastac, block.compile().

The ways take turns: in each round every way is switched on, warmed up and timed for one step, in an order drawn anew.
There are as many rounds as fit the time. The forward is timed alone in the same step. Before the rounds one step of
each way is profiled: bytes, kernels by their names, how long the GPU ran and waited in the forward, and how much of the
time of copies to the host and back went by while it computed. The JSON is written after every row and step.

Ways by "auto" have the memory of the GPU, or as much of it as they name. They measure one step and choose in the next
ones, all of them before the profiled one.

First fastac.verify compares gradients of a model with two blocks. Nothing is downloaded, fastac need not be installed.

    python benchmarks/gpu_wan.py --minutes 6
    python benchmarks/gpu_wan.py --device cpu --minutes 1   # in miniature: times mean nothing, nothing is written
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # else matrix products may differ between runs, in verify
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of every start and stop
sys.path.insert(1, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table

import fastac
from common import COPIES, RESULTS, grouped, hidden_seconds, parser, running_and_waiting, write_result
from fastac.cli.machine import gpu
from fastac.diagnosis.tables import table_of_figures
from fastac.engine import offload
from fastac.engine.blocks import state_of
from fastac.engine.transport import transport_of
from fastac.errors import parse_bytes, readable_bytes
from fastac.models import published as configurations
from fastac.models.published import Configuration
from fastac.models.videos import Video
from fastac.planning import places
from fastac.planning.auto import TURNS, Auto, Planner
from fastac.planning.fake_model import fake_model
from fastac.planning.forecast import ROWS, AnyPolicy, Forecast
from fastac.verification import ways
from fastac.verification.measuring import FAILURES, allocated_bytes, failure, relative, take_turns
from fastac.verification.report import offloaded_by
from fastac.verification.step import executed_attention
from fastac.verification.ways import build, enable_torch_sac

Tell = Callable[[str], object]

# What is trained

FULL = "torch full"
WAYS = (FULL, "attn_only", "long_attn_only")
OFFLOADED = ("attn_only, offload", "long_attn_only, offload")
PLANS = ("plan 20 GiB", "plan 20 GiB, offload")
AUTOS = ("auto", "auto 15 GiB, offload", "auto 18 GiB")
"""The second has little more memory than full checkpointing takes in the case "long"."""
MORE_WAYS = ("torch SAC, FastVideo's list", "full", "torch SAC, by name")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, a video, and the ways in which they are trained."""

    name: str
    model: str
    label: str  # of the model
    blocks: int  # the first of the model's
    video: Mapping[str, int]
    ways: tuple[str, ...]  # those that matter most come first: time may not suffice for all
    rounds: int  # at most; with 0 the profiled step is the one that counts
    share: float  # of the time that is left, over the sum of its own and those of the cases after it
    warm_up: str = "forward"  # before each step that is profiled or timed; or a whole "step", or "nothing"
    lora: int = 0  # its rank
    compiled: Mapping[str, Any] | None = None  # options of torch.compile
    change: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # of the configuration
    dtype: torch.dtype = torch.bfloat16

    @property
    def published(self) -> Configuration:
        return configurations.load_configuration(self.model)

    @property
    def sizes(self) -> Video:
        return dataclasses.replace(self.published.default, **self.video, dtype=self.dtype)

    def facts(self) -> dict[str, Any]:
        """The case as it is written."""
        tokens = self.sizes.tokens((1, 2, 2))
        blocks = f"{self.blocks} of {self.published.config['num_layers']} blocks"
        blocks += ", compiled" if self.compiled is not None else ""
        trained = f"LoRA of rank {self.lora}, AdamW" if self.lora else "AdamW"
        title = f"{self.label}, {blocks}, {tokens:,} tokens, {trained}"
        facts = {"name": self.name, "title": title, "model": self.model, "blocks": self.blocks, "tokens": tokens}
        rounds = max(1, self.rounds)
        return facts | {"video": self.video, "dtype": str(self.dtype).removeprefix("torch."), "rounds": rounds}

    def build(self, device: torch.device) -> tuple[Any, dict[str, Any]]:
        """The model, made on the device in its dtype, and the arguments of a call."""
        config = configurations.with_layers({**self.published.config, **self.change}, self.blocks)
        torch.set_default_dtype(self.dtype)
        try:
            model, inputs = build(dataclasses.replace(self.published, config=config), self.sizes, device)
        finally:
            torch.set_default_dtype(torch.float32)
        if self.lora:
            configurations.add_lora(model, self.lora)
        return model, inputs


def video_of(frames: int, height: int, width: int, text_tokens: int = 512) -> dict[str, int]:
    return {"frames": frames, "height": height, "width": width, "text_tokens": text_tokens}


SMALL, LARGE = ("wan2.1-t2v-1.3b", "Wan 2.1 1.3B"), ("wan2.1-t2v-14b", "Wan 2.1 14B")
HD, SHORT, HD_14B = video_of(77, 720, 1280), video_of(21, 240, 416), video_of(81, 720, 1280)
WAYS_OF_LONG = (*WAYS, *OFFLOADED, *PLANS, AUTOS[0], "none", MORE_WAYS[0], AUTOS[1], *MORE_WAYS[1:], AUTOS[2])
WAYS_OF_COMPILED = (FULL, "attn_only", *OFFLOADED, "long_attn_only", *PLANS, AUTOS[0], "none", *MORE_WAYS)
CASES = (
    Case("long", *SMALL, 10, HD, WAYS_OF_LONG, rounds=3, share=0.53),
    Case("lora_14b", *LARGE, 40, HD_14B, (FULL, OFFLOADED[1]), rounds=0, share=0.6, warm_up="nothing", lora=32),
    Case("short", *SMALL, 30, SHORT, (*WAYS, "none", *MORE_WAYS, AUTOS[0]), rounds=10, share=0.08, warm_up="step"),
    Case("compiled", *SMALL, 5, HD, WAYS_OF_COMPILED, rounds=3, share=0.2, warm_up="step", compiled={}),
)


IN_MINIATURE = {
    "plan 20 GiB": "plan 1 MiB",
    "plan 20 GiB, offload": "plan 1 MiB, offload",
    "auto": "auto 1 GiB",
    "auto 18 GiB": "",  # left out: as with offload
    "auto 15 GiB, offload": "auto 6 MiB, offload",
}


def in_miniature(case: Case) -> Case:
    """A case for a CPU. It has 1,024 tokens, since "long_attn_only" saves no shorter attention.

    "auto" has to be given memory there: as much as the other ways take at most, or less.
    """
    return dataclasses.replace(
        case,
        label=f"{case.label} in miniature (times mean nothing)",
        blocks=3,
        change={"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 16, "ffn_dim": 32},
        video=video_of(13, 256, 256, 8),
        dtype=torch.float32,
        ways=tuple(name for way in case.ways if (name := IN_MINIATURE.get(way, way))),
        rounds=min(case.rounds, 1),
        share={"long": 0.6, "short": 0.35, "compiled": 0.9}.get(case.name, 0.3),
        compiled=None if case.compiled is None else {"backend": "aot_eager"},
    )


# The ways

SETTLING = 1 + TURNS
"""The steps after which choices of "auto" stay: it measures one, and may choose again after each of the next ones."""


def is_auto(way: str) -> bool:
    return way.startswith("auto")


FASTVIDEO_LIST = {
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,  # added, for a CPU
}
"""Of FastVideo 0.2.1: without cuDNN's attention. Its every second mm is left out: a Linear with bias runs addmm."""

OF_TORCH: Mapping[str, Callable[[Any], object]] = {
    "none": lambda model: None,
    FULL: lambda model: model.enable_gradient_checkpointing(),
    "torch SAC, FastVideo's list": lambda model: enable_torch_sac(model, FASTVIDEO_LIST.__contains__),
    "torch SAC, by name": enable_torch_sac,
}


class Timed(NamedTuple):
    """A step."""

    seconds: float
    forward: float  # of these
    allocations: int = 0  # by the allocator, of memory of the GPU


class Training(ways.Workload):
    """Steps of a case, under one way at a time. Gradients are gone with the next step, the optimizer's states stay."""

    def __init__(self, case: Case, device: torch.device) -> None:
        super().__init__(*case.build(device), device)
        self.case = case
        self.target = torch.randn(self.inputs["hidden_states"].shape, device=device)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()  # makes its states
        self.switch = ways.Ways(self)  # to take a way off again, and for the blocks that fastac enabled
        self.warm_up = {"nothing": lambda: None, "forward": self.forward, "step": self.step}[case.warm_up]
        self.steps_per_turn = {"nothing": 1, "forward": 1.25, "step": 2}[case.warm_up]  # a forward is a fourth of one
        self.turns: list[float] = []  # seconds of some
        self.planners: dict[str, Planner] = {}

    def forward(self) -> torch.Tensor:
        torch.manual_seed(0)
        (output,) = self.model(**self.inputs)
        return torch.nn.functional.mse_loss(output.float(), self.target)

    def finish(self, loss: torch.Tensor) -> None:
        loss.backward()
        self.optimizer.step()

    def release(self) -> None:
        super().release()
        if (transport := transport_of(self.target.device)) is not None:
            transport.release()  # memory of copies in a forward that had no backward

    def timed(self) -> Timed:
        """A step. On the device, too, its forward has ended before its backward begins."""
        before, start = self.allocations(), time.perf_counter()
        loss = self.forward()
        self.synchronize()
        middle = time.perf_counter()
        self.finish(loss)
        self.synchronize()
        return Timed(time.perf_counter() - start, middle - start, self.allocations() - before)

    def allocations(self) -> int:
        """How often the allocator has asked the GPU for memory."""
        return torch.cuda.memory_stats().get("num_device_alloc", 0) if self.device.type == "cuda" else 0

    @property
    def besides(self) -> int:
        """Bytes of what a step begins with: weights, the optimizer's states and inputs."""
        if self.device.type == "cuda":
            return torch.cuda.memory_allocated(self.device)
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        found = [*states, self.target, *self.inputs.values()]
        return self.weights + sum(tensor.nbytes for tensor in found if isinstance(tensor, torch.Tensor))

    @functools.cached_property
    def forecast(self) -> Forecast:
        """That of fastac.plan, without its table."""
        return Forecast(fake_model(self.model, self.inputs))

    def policy(self, way: str) -> AnyPolicy:
        """The policy of one of fastac's ways, by the names of the plan's rows or for its bytes of saved outputs.

        That of "auto" is what it chose for the latest step.
        """
        if is_auto(way):
            chosen = self.planner(way).latest
            assert chosen is not None
            return chosen.policies
        if not way.startswith("plan "):
            return ROWS[way]
        budget, _, offloads = way.removeprefix("plan ").partition(", ")
        is_eager = self.case.compiled is None  # compiled blocks save no outputs of Linear modules
        return places.within(self.forecast, parse_bytes(budget), linear=is_eager, offload=bool(offloads))

    def planner(self, way: str) -> Planner:
        """The plans of one of the ways by "auto". Only one whose name says so uses the host."""
        if way not in self.planners:
            memory, _, offloads = way.removeprefix("auto").partition(", ")
            self.planners[way] = Planner(Auto(memory or None, None if offloads else 0))
        return self.planners[way]

    def planned_peak(self, way: str) -> int | None:
        """Bytes by the plan; None for what it does not know: compiled code, torch's selective checkpointing."""
        known = {"none": "none", FULL: "full"}.get(way)
        if self.case.compiled is not None or (way in OF_TORCH and known is None):
            return None
        return self.forecast.peak(known or self.policy(way))

    def to(self, way: str) -> None:
        """Switch a way on, and warm up. The steps that follow are like most: none compares values."""
        self.switch.off()
        gc.collect()  # after a step that ran out of memory
        options = self.case.compiled
        for block in self.model.blocks if options is not None else ():
            block._compiled_call_impl = None  # fastac and torch each compile theirs
        policy = None if way in OF_TORCH else self.planner(way) if is_auto(way) else self.policy(way)
        if policy is not None and options is None:
            fastac.enable(self.model, policy)
        elif policy is not None:
            fastac.compile(self.model, policy, **options)
        else:
            OF_TORCH[way](self.model)
            for block in self.model.blocks if options is not None else ():
                block.compile(**options)
        for _ in range(SETTLING if is_auto(way) and self.planner(way).latest is None else 0):
            self.step()
            self.release()
        for block in self.switch.blocks():
            state_of(block).step = 2**20 + 1
        start = time.perf_counter()
        self.warm_up()
        self.release()
        if (warmed_up := self.steps_per_turn - 1) > 0:
            self.turns.append((time.perf_counter() - start) * self.steps_per_turn / warmed_up)


# A case


def profile_step(training: Training) -> tuple[dict[str, Any], Timed]:
    """Bytes and kernels of a step under the way that is switched on, as fields of its row, and its time."""
    besides, before, parts = training.besides, training.allocations(), []

    def profiled(part: Callable[..., Any], *args: Any) -> Any:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            start = time.perf_counter()
            result = part(*args)
            training.synchronize()
            seconds = time.perf_counter() - start
        parts.append((seconds, profile.events()))
        return result

    if training.device.type == "cuda":
        step = [functools.partial(profiled, part) for part in (training.forward, training.finish)]
        held, peak = allocated_bytes(*step, training.device)
        (forward, events), (backward, later) = parts
        timed, kernels = Timed(forward + backward, forward, training.allocations() - before), grouped([*events, *later])
        running, waiting = running_and_waiting(events)
        copies = kernels[COPIES].seconds
        found = {
            "hidden": (hidden_seconds(events) + hidden_seconds(later)) / copies if copies else None,
            "attention_kernels": kernels["attention forward"].count,
            "forward_kernel_seconds": running,
            "forward_gap_seconds": waiting,
            "kernels": {group: one._asdict() for group, one in kernels.items()},
        }
    else:
        held, peak = allocated_bytes(training.forward, training.finish)
        training.release()  # gradients that are there make another choice of "auto"
        with executed_attention() as ran:
            timed = training.timed()
        found = dict.fromkeys(("hidden", "forward_kernel_seconds", "forward_gap_seconds"))
        found |= {"attention_kernels": sum(ran.values())}
    moved = offloaded_by(training.switch.blocks())
    host = 0 if moved is None else moved.host_bytes
    held -= host if training.device.type == "cpu" else 0  # one memory: the peak has them, too
    return {"held_bytes": held, "host_bytes": host, "peak_bytes": besides + peak, **found}, timed


def measure(
    case: Case, device: torch.device, deadline: float, found: dict[str, Any], write: Callable[[], object], tell: Tell
) -> None:
    """Measure a case. A way that is refused, or runs out of memory or time, is a row that says so.

    deadline: of time.monotonic(). found: what is known of the case, here its rows. write: is called after each.
    """
    rows: dict[str, dict[str, Any]] = {}
    profiled: dict[str, float] = {}  # seconds of a turn

    def add(way: str, problem: str, **figures: Any) -> None:
        rows[way] = {"way": way, "problem": problem, **figures}
        found["rows"] = list(rows.values())
        write()
        tell(f"  {way}: {problem or readable_bytes(figures['peak_bytes'])}")

    def count(way: str, step: Timed) -> None:
        for name, value in zip(("seconds", "forward_seconds", "allocator"), step, strict=True):
            rows[way][name].append(value)
        write()
        tell(f"  {way}: {step.seconds:.4g} s")

    tell(found["title"])
    try:
        training = Training(case, device)
    except FAILURES as error:
        for way in case.ways:
            add(way, failure(error))
        return

    quickest = 0.0  # seconds of a way that was switched on, compiled and profiled
    for way in case.ways:
        start, measured = time.perf_counter(), [row for row in rows.values() if not row["problem"]]
        turns = (1 + len(measured)) * bool(case.rounds) + SETTLING * is_auto(way)
        if time.monotonic() + quickest + turns * min(training.turns, default=0) > deadline:
            add(way, "no time left")
            continue
        try:
            training.to(way)
            figures, step = profile_step(training)
            planned = training.planned_peak(way)
        except FAILURES as error:
            add(way, failure(error))
            continue
        training.turns.append(training.steps_per_turn * step.seconds)
        profiled[way] = training.turns[-1]
        took = time.perf_counter() - start
        quickest = min(quickest or took, took)
        add(way, "", seconds=[], relative=None, forward_seconds=[], allocator=[], planned_peak_bytes=planned, **figures)
        if not case.rounds:
            count(way, step)

    if case.rounds and profiled:
        rounds = min(case.rounds, int((deadline - time.monotonic()) / sum(profiled.values())))
        found["rounds"] = max(1, rounds)
        current = [""]

        def switch(way: str) -> None:
            current[0] = way
            training.to(way)

        _, problems = take_turns(list(profiled), found["rounds"], switch, lambda: count(current[0], training.timed()))
        for way, problem in problems.items():
            add(way, problem)
    ratios = relative({way: row["seconds"] for way, row in rows.items() if not row["problem"]}, FULL)
    for way, ratio in ratios.items():
        rows[way]["relative"] = ratio
    write()


def table_of(found: Mapping[str, Any]) -> Table:
    """A case as it is written, as a table."""
    captions = [
        "peak: with weights, gradients and the optimizer's states; planned: by fastac.plan, and its error",
        "held: between forward and backward; hidden: share of the copies' time in which the GPU computed",
        *(f"{row['way']}: {row['problem']}" for row in found["rows"] if ": " in row["problem"]),
    ]
    headings = ["", "over full", "seconds", "forward", "kernels + gaps", "held", "host", "peak", "planned", "hidden"]
    table = table_of_figures(
        f"{found['title']}; timed steps of each way: {found['rounds']}", captions, [*headings, "attention kernels"]
    )
    for row in found["rows"]:
        if row["problem"]:
            table.add_row(row["way"], row["problem"].partition(": ")[0])
            continue
        peak, planned, running = row["peak_bytes"], row["planned_peak_bytes"], row["forward_kernel_seconds"]
        table.add_row(
            row["way"],
            "" if row["relative"] is None else f"{row['relative']:.3f}",
            *(f"{statistics.median(row[name]):.4g}" for name in ("seconds", "forward_seconds")),
            "" if running is None else f"{running:.4g} + {row['forward_gap_seconds']:.2g}",
            *map(readable_bytes, (row["held_bytes"], row["host_bytes"], peak)),
            "" if planned is None else f"{readable_bytes(planned)} ({planned / peak - 1:+.1%})",
            "" if row["hidden"] is None else f"{row['hidden']:.0%}",
            str(row["attention_kernels"]),
        )
    return table


def check(case: Case, device: torch.device) -> dict[str, Any]:
    """Gradients under attn_only against none: two blocks, a small video. The text says what differs."""
    small = video_of(9, 240, 416, case.video["text_tokens"])
    training = Training(dataclasses.replace(case, blocks=2, video=small), device)
    try:
        checked = fastac.verify(training.model, **training.inputs, policy="attn_only")
    except FAILURES as error:
        return {"text": str(error), "failed": True}
    different = len(checked.different)
    return {"text": str(checked), "failed": False, "compared": checked.compared, "different": different}


def main() -> int:
    arguments = parser(__doc__, "gpu_wan_<GPU>.json")
    arguments.add_argument("--minutes", type=float, default=6, help="in which it ends (default: %(default)s)")
    names = [case.name for case in CASES]
    arguments.add_argument("--cases", default=",".join(names), help="some of them (default: %(default)s)")
    arguments.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: in miniature")
    arguments.set_defaults(output=None)
    options = arguments.parse_args()
    asked, start, console = options.cases.split(","), time.monotonic(), Console(width=200)
    if not {*asked} <= {*names}:
        arguments.error(f"--cases {options.cases}: there are {', '.join(names)}")

    cases, output, device = CASES, options.output, torch.device(options.device)
    if device.type == "cpu":
        cases = tuple(map(in_miniature, cases))
        torch.set_num_threads(1)  # threads that wait for each other on a busy machine take a hundred times as long
        offload.SMALLEST = 0  # in miniature every tensor is smaller
    elif not torch.cuda.is_available():
        console.print("gpu_wan.py measures on a CUDA GPU, and torch finds none here: nothing was measured.")
        return 0
    elif output is None:
        name = re.sub(r"[^a-z0-9]+", "_", gpu()["name"].lower()).strip("_")
        output = RESULTS / f"gpu_wan_{name}.json"
    result: dict[str, Any] = {"minutes": options.minutes, "complete": False, "check": {}, "cases": []}

    def write() -> None:
        if output is not None:
            write_result(output, result)

    def tell(text: str) -> None:
        console.print(f"[{time.monotonic() - start:5.0f}] {text}", markup=False, highlight=False)

    result["check"] = check(cases[0], device)
    console.print(result["check"]["text"], markup=False)
    chosen = [case for case in cases if case.name in asked]
    for number, case in enumerate(chosen):
        torch.compiler.reset()
        gc.collect()
        gc.freeze()  # later collections skip what is imported
        torch.cuda.empty_cache()
        result["cases"].append({**case.facts(), "rows": []})
        now = time.monotonic()
        share = case.share / sum(one.share for one in chosen[number:])
        deadline = now + share * (start + 60 * options.minutes - now)
        measure(case, device, deadline, result["cases"][-1], write, tell)
        console.print(table_of(result["cases"][-1]))
    result["complete"] = True
    write()
    return int(result["check"]["failed"])


if __name__ == "__main__":
    sys.exit(main())
