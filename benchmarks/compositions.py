"""Every way of putting torch.compile and checkpointing together: what runs twice, what is held, at what peak.

Of each composition one training step is looked at once everything is compiled: attention kernels that really ran in it
(by torch's profiler, less the calls that fastac answered), graphs and graph breaks that dynamo made so
far, beside those of the same composition without checkpointing, bytes that the allocator still holds after the
forward, its peak in the step, and how far the gradients are from those of eager training without checkpointing.
Compositions "with a graph break" have one before every feed-forward, where a router of experts or a print would make
it.

    python benchmarks/compositions.py [--check] [--models Wan LTX HunyuanVideo] [--backends aot_eager inductor]
"""

from __future__ import annotations

import functools
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from diffusers import HunyuanVideoTransformer3DModel
from rich.console import Console
from rich.table import Table
from torch._dynamo.utils import counters

import fastac
import fastac.graph
from common import allocated_bytes, build_model, finish, parser
from fastac.graph.application import KEEP_ORDER
from fastac.verification.step import executed_attention
from held_bytes import (
    BATCH,
    FRAMES,
    HEAD_DIM,
    HEADS,
    HEIGHT,
    TEXT_TOKENS,
    TOKENS,
    WIDTH_IN_PATCHES,
    build_ltx,
    build_wan,
    ltx_inputs,
    wan_inputs,
)

LAYERS = 4
WARM_UP = 3
"""Steps before the one that is looked at. In its first a compiled block class is run once more, eagerly."""

ROUNDING = 1e-6
"""How far gradients may be off in float32, besides what the same compiler does without checkpointing."""

Forward = Callable[..., Any]


def build_hunyuan(layers: int, dtype: torch.dtype) -> Any:
    """Half of the blocks are of each of its two classes."""
    return build_model(
        HunyuanVideoTransformer3DModel,
        dtype,
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        num_layers=layers // 2,
        num_single_layers=layers - layers // 2,
        num_refiner_layers=1,
        text_embed_dim=64,
        pooled_projection_dim=32,
        rope_axes_dim=(8, 12, 12),
    )


def hunyuan_inputs(dtype: torch.dtype) -> dict[str, Any]:
    mask = torch.ones(BATCH, TEXT_TOKENS)
    mask[:, 100:] = 0
    return {
        "hidden_states": torch.randn(BATCH, 4, FRAMES, 2 * HEIGHT, 2 * WIDTH_IN_PATCHES).to(dtype),
        "encoder_hidden_states": torch.randn(BATCH, TEXT_TOKENS, 64).to(dtype),
        "encoder_attention_mask": mask,
        "timestep": torch.tensor([500, 300]),
        "pooled_projections": torch.randn(BATCH, 32).to(dtype),
        "guidance": torch.tensor([6000, 6000]),
    }


MODELS: dict[str, tuple[Callable[[int, torch.dtype], Any], Callable[[torch.dtype], dict[str, Any]]]] = {
    "Wan": (build_wan, wan_inputs),
    "LTX": (build_ltx, ltx_inputs),
    "HunyuanVideo": (build_hunyuan, hunyuan_inputs),
}
CONTAINERS = ("blocks", "transformer_blocks", "single_transformer_blocks")
FEED_FORWARDS = ("ffn", "ff", "proj_mlp")


def blocks_of(model: Any) -> Iterator[tuple[torch.nn.ModuleList, int]]:
    for container in (getattr(model, name) for name in CONTAINERS if hasattr(model, name)):
        yield from ((container, index) for index in range(len(container)))


def break_graphs(model: Any) -> None:
    """A graph break before every feed-forward of a block."""
    for container, index in blocks_of(model):
        inner = dict(container[index].named_children())
        feed_forward = next(inner[name] for name in FEED_FORWARDS if name in inner)
        feed_forward.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())


def enable(model: Any, policy: str) -> None:
    if policy != "none":
        fastac.enable(model, policy)


def eager(model: Any, policy: str, backend: str) -> Forward:
    enable(model, policy)
    return model


def whole(model: Any, policy: str, backend: str) -> Forward:
    enable(model, policy)
    model.compile(backend=backend)
    return model


def blocks_then_enabled(model: Any, policy: str, backend: str) -> Forward:
    model.compile_repeated_blocks(backend=backend)
    enable(model, policy)
    return model


def enabled_then_blocks(model: Any, policy: str, backend: str) -> Forward:
    enable(model, policy)
    model.compile_repeated_blocks(backend=backend)
    return model


class Inside(torch.nn.Module):
    """A block with its checkpoint inside, to be compiled together."""

    def __init__(self, block: torch.nn.Module, policy: str) -> None:
        super().__init__()
        self.block, self.policy = block, policy

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.policy == "none":
            return self.block(*args, **kwargs)
        return fastac.checkpoint(self.block, *args, policy=self.policy, **kwargs)


def inside(model: Any, policy: str, backend: str) -> Forward:
    for container, index in list(blocks_of(model)):
        container[index] = Inside(container[index], policy)
        container[index].compile(backend=backend)
    return model


def by_fastac(model: Any, policy: str, backend: str) -> Forward:
    if policy == "none":
        for container, index in blocks_of(model):
            container[index].compile(backend=backend)
    else:
        fastac.compile(model, policy, backend=backend)
    return model


def step_of(model: Any, policy: str) -> Callable[..., Any]:
    """A training step as `fastac.graph` takes it."""
    enable(model, policy)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def step(**inputs: Any) -> Any:
        (output,) = model(**inputs)
        return torch.autograd.grad(output.square().mean(), trained, allow_unused=True)

    return step


def traced(model: Any, inputs: dict[str, Any], policy: str) -> Callable[..., Any]:
    step = fastac.graph.trace(step_of(model, policy), model, **inputs)
    return step if policy == "none" else fastac.graph.apply(step)


def traced_and_compiled(model: Any, inputs: dict[str, Any], policy: str) -> Callable[..., Any]:
    return fastac.graph.compile(traced(model, inputs, policy))


def step_compiled(model: Any, inputs: dict[str, Any], policy: str) -> Callable[..., Any]:
    compiled = torch.compile(step_of(model, policy), fullgraph=True, dynamic=False, options=KEEP_ORDER)

    def call(**inputs: Any) -> Any:
        with torch._dynamo.config.patch(trace_autograd_ops=True):
            return compiled(**inputs)

    return call


def wrapped_regions() -> AbstractContextManager[Any]:
    return torch._inductor.config.patch(wrap_inductor_compiled_regions=True)


@dataclass(frozen=True)
class Composition:
    """code: what the user writes. setting: what is on while it is compiled and run. backends: that it is for.

    given_up: torch runs a checkpoint inside compiled code eagerly when it meets a graph break. make_step: instead of
    `make`, for a training step that is one graph, with its gradients as outputs and no forward of its own.
    """

    name: str
    code: str
    make: Callable[[Any, str, str], Forward]
    policy: str = "attn_only"
    breaks: bool = False
    given_up: bool = False
    setting: Callable[[], AbstractContextManager[Any]] = nullcontext
    backends: tuple[str, ...] = ("aot_eager", "inductor")
    make_step: Callable[[Any, dict[str, Any], str], Callable[..., Any]] | None = None


EAGER = ("eager",)
COMPOSITIONS = (
    Composition("eager, no checkpointing", "", eager, "none", backends=EAGER),
    Composition("eager, full", "fastac.enable(model, 'full')", eager, "full", backends=EAGER),
    Composition("eager", "fastac.enable(model)", eager, backends=EAGER),
    Composition("model compiled, no checkpointing", "model.compile()", whole, "none"),
    Composition("model compiled, full", "fastac.enable(model, 'full'); model.compile()", whole, "full"),
    Composition("model compiled", "fastac.enable(model); model.compile()", whole),
    Composition(
        "blocks compiled, then enabled", "model.compile_repeated_blocks(); fastac.enable(model)", blocks_then_enabled
    ),
    Composition(
        "enabled, then blocks compiled", "fastac.enable(model); model.compile_repeated_blocks()", enabled_then_blocks
    ),
    Composition("fastac.compile", "fastac.compile(model)", by_fastac),
    Composition(
        "blocks compiled, checkpoint inside", "each block's forward calls fastac.checkpoint; block.compile()", inside
    ),
    Composition(
        "regions wrapped",
        "torch._inductor.config.wrap_inductor_compiled_regions = True; fastac.compile(model)",
        by_fastac,
        setting=wrapped_regions,
        backends=("inductor",),
    ),
    Composition(
        "model compiled, with a graph break",
        "fastac.enable(model); model.compile()",
        whole,
        breaks=True,
        given_up=True,
    ),
    Composition("fastac.compile, with a graph break", "fastac.compile(model)", by_fastac, breaks=True),
    Composition(
        "blocks compiled, checkpoint inside, with a graph break",
        "each block's forward calls fastac.checkpoint; block.compile()",
        inside,
        breaks=True,
        given_up=True,
    ),
    Composition(
        "traced step",
        "fastac.graph.apply(fastac.graph.trace(step, model, **inputs))",
        eager,
        backends=EAGER,
        make_step=traced,
    ),
    Composition(
        "traced step, compiled",
        "fastac.graph.compile(fastac.graph.apply(fastac.graph.trace(step, model, **inputs)))",
        eager,
        backends=("inductor",),
        make_step=traced_and_compiled,
    ),
    Composition(
        "step compiled with its gradients",
        "torch.compile(step)",
        eager,
        backends=("inductor",),
        make_step=step_compiled,
    ),
)


@dataclass(frozen=True)
class Row:
    """One composition of one model. attention: calls of a step without checkpointing. again: how many more ran.

    graphs, graph_breaks: what dynamo made; plain_graphs, plain_graph_breaks: of the same without checkpointing. held:
    bytes after the forward, None where it is no part of its own; peak: in the step. error: norm of the difference of
    all gradients over their norm; plain_error: of the same without checkpointing.
    """

    model: str
    backend: str
    composition: str
    code: str
    policy: str
    given_up: bool
    attention: int
    again: int
    graphs: int
    graph_breaks: int
    plain_graphs: int
    plain_graph_breaks: int
    held: int | None
    peak: int
    error: float
    plain_error: float

    def is_off(self) -> str:
        """What is not as fastac promises, "" where all is."""
        if self.policy == "attn_only" and self.again:
            return f"{self.again} attention calls ran again"
        if not self.given_up and (self.graphs, self.graph_breaks) != (self.plain_graphs, self.plain_graph_breaks):
            return "checkpointing changes the number of graphs"
        if self.error > ROUNDING + 4 * self.plain_error:
            return f"gradients are off by {self.error:.1e}"
        return ""


class Measured(NamedTuple):
    """What one composition did under one policy."""

    attention: int
    graphs: int
    graph_breaks: int
    held: int | None
    peak: int
    gradients: list[torch.Tensor]


@functools.cache
def eager_gradients(name: str) -> list[torch.Tensor]:
    return measure_one(name, COMPOSITIONS[0], "none", "eager").gradients


def measure_one(name: str, composition: Composition, policy: str, backend: str) -> Measured:
    torch._dynamo.reset()
    counters.clear()
    build, inputs_of = MODELS[name]
    model = build(LAYERS, torch.float32)
    torch.manual_seed(1)
    inputs = inputs_of(torch.float32) | {"return_dict": False}
    if composition.breaks:
        break_graphs(model)
    if composition.make_step is not None:
        return measure_step(composition.make_step(model, inputs, policy), inputs)
    with composition.setting():
        run = composition.make(model, policy, backend)

        def forward() -> torch.Tensor:
            (output,) = run(**inputs)
            return output.square().mean()

        def step() -> None:
            forward().backward()

        for _ in range(WARM_UP):
            step()
            model.zero_grad()
        with executed_attention() as calls:
            step()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        gc.collect()
        held = allocated_bytes(forward).held
        gc.collect()
        peak = allocated_bytes(step).peak
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return Measured(calls.total(), graphs, breaks, held, peak, gradients)


def measure_step(step: Callable[..., Any], inputs: dict[str, Any]) -> Measured:
    for _ in range(WARM_UP):
        step(**inputs)
    with executed_attention() as calls:
        gradients = step(**inputs)
    gc.collect()
    peak = allocated_bytes(lambda: step(**inputs)).peak
    graphs, breaks = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    return Measured(calls.total(), graphs, breaks, None, peak, [one for one in gradients if one is not None])


def measure(name: str, composition: Composition, backend: str) -> Row:
    plain = measure_one(name, composition, "none", backend)
    mine = plain if composition.policy == "none" else measure_one(name, composition, composition.policy, backend)
    return Row(
        model=name,
        backend=backend,
        composition=composition.name,
        code=composition.code,
        policy=composition.policy,
        given_up=composition.given_up,
        attention=plain.attention,
        again=mine.attention - plain.attention,
        graphs=mine.graphs,
        graph_breaks=mine.graph_breaks,
        plain_graphs=plain.graphs,
        plain_graph_breaks=plain.graph_breaks,
        held=mine.held,
        peak=mine.peak,
        error=error_of(mine.gradients, eager_gradients(name)),
        plain_error=error_of(plain.gradients, eager_gradients(name)),
    )


def error_of(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    pairs = list(zip(found, expected, strict=True))
    difference = sum((mine - theirs).square().sum() for mine, theirs in pairs)
    return float((difference / sum(theirs.square().sum() for _, theirs in pairs)) ** 0.5)


def tabulate(rows: list[Row]) -> Table:
    table = Table(title=f"{LAYERS} blocks, {TOKENS} video tokens, {TEXT_TOKENS} of text, batch {BATCH}, float32")
    for heading in ("model", "composition"):
        table.add_column(heading, no_wrap=True)
    for heading in ("attention", "graphs", "breaks", "held MiB", "peak MiB", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.model} {row.backend}",
            row.composition,
            f"{row.attention} + {row.again}",
            f"{row.graphs} ({row.plain_graphs})",
            f"{row.graph_breaks} ({row.plain_graph_breaks})",
            "" if row.held is None else f"{row.held / 2**20:.1f}",
            f"{row.peak / 2**20:.1f}",
            f"{row.error:.0e}",
        )
    return table


def main() -> int:
    arguments = parser(__doc__, "compositions_cpu.json", check="attention ran again, or there are more graphs")
    arguments.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    arguments.add_argument(
        "--backends", nargs="+", choices=("aot_eager", "inductor"), default=["aot_eager", "inductor"]
    )
    arguments.add_argument("--only", default="", help="only compositions whose name holds this")
    options = arguments.parse_args()

    logging.getLogger("torch").setLevel(logging.ERROR)  # dynamo tells of graph breaks, which are meant
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    rows = [
        measure(name, composition, backend)
        for name in options.models
        for backend in (*EAGER, *options.backends)
        for composition in COMPOSITIONS
        if backend in composition.backends and options.only in composition.name
    ]
    console = Console(width=160)
    console.print(tabulate(rows))
    shapes = {"layers": LAYERS, "batch": BATCH, "tokens": TOKENS, "text_tokens": TEXT_TOKENS, "dtype": "float32"}
    off = [f"{row.model} {row.backend} {row.composition}: {row.is_off()}" for row in rows if row.is_off()]
    return finish(options, {"unit": "bytes", **shapes, "results": [asdict(row) for row in rows]}, off)


if __name__ == "__main__":
    sys.exit(main())
