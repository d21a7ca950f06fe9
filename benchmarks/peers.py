"""One training step under fastac and under its peers: time, bytes, kernels, FLOPs, lines, and what each does in a trap.

The same Wan blocks with random weights under every way of checkpointing, in one process: each takes a step in every
round, in an order drawn anew. Two sizes are launch-bound, as in host_time.py: one thread, CPU time. The third is bound
by its kernels: two threads, wall time. Time is over that of `torch full` in the same round: median and quartiles.

A way is a function below that does to a plain model what its users do: its lines and those of its helpers are counted.
Held bytes are the allocator's between forward and backward, of the blocks. Attention kernels are events of the profiler
within which memory was allocated: one that torch's selective checkpointing (SAC) or fastac answers is an event as well.
FLOPs are FlopCounterMode's, without calls that fastac answers. Lists of ops are as published, with attention on a CPU
added, and addmm beside mm in "every second matmul": Linear modules with a bias run it. Of a peer that is not installed
the table says so.

    make peers
"""

from __future__ import annotations

import ast
import functools
import inspect
import logging
import math
import os
import statistics
import sys
import textwrap
import time
import types
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import dispatch_attention_fn
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import fastac
import host_time
from common import allocated_bytes, build_model, parser, positive, write_result
from fastac import registry
from fastac.cli import version
from fastac.engine.torch_private import profiled_events
from fastac.registry.flops import register_formulas
from fastac.verification.measuring import take_turns
from fastac.verification.ways import Workload
from held_bytes import LiveStorages
from host_time import CONFIG, TEXT
from plan_accuracy import replayed_flops

aten = torch.ops.aten
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"

# What is run


class Case(NamedTuple):
    """latents: batch, channels, frames, height, width; four latent pixels make a token. config: over host_time's."""

    dtype: torch.dtype
    latents: tuple[int, ...]
    config: dict[str, Any]
    threads: int = 1

    def least(self) -> int:
        """Bytes with which attention runs once: inputs of blocks, its outputs and statistics, from shapes alone."""
        sizes = {**CONFIG, **self.config}
        heads, dim, tokens = sizes["num_attention_heads"], sizes["attention_head_dim"], math.prod(self.latents[2:]) // 4
        hidden = self.dtype.itemsize * tokens * heads * dim
        shared = self.dtype.itemsize * (heads * dim * (TEXT[1] + 6) + 2 * tokens * dim)  # text, timestep, rotary
        return int(shared + sizes["num_layers"] * (hidden + 2 * (hidden + 4 * tokens * heads)))


LARGE = Case(torch.float32, (1, 4, 4, 32, 32), {"attention_head_dim": 64, "ffn_dim": 512, "num_layers": 2}, threads=2)
CASES = {name: Case(case.dtype, case.latents, {}) for name, case in host_time.CASES.items()}
CASES |= {"fp32, 1024 tokens": LARGE, "bf16, 1024 tokens": LARGE._replace(dtype=torch.bfloat16)}


class Step(Workload):
    """A training step under one way. arrange: changes the model before. budget: bytes of outputs that a plan saves."""

    def __init__(self, case: Case, way: Way, budget: int = 0, arrange: Callable[[Step], object] | None = None) -> None:
        model = build_model(WanTransformer3DModel, case.dtype, **{**CONFIG, **case.config})
        sizes = {"hidden_states": case.latents, "encoder_hidden_states": TEXT}
        inputs = {name: torch.randn(size).to(case.dtype) for name, size in sizes.items()}
        super().__init__(model, {**inputs, "timestep": torch.tensor([500])})
        self.budget = budget
        if arrange is not None:
            arrange(self)
        way.enable(self)

    def gradients(self, between: Callable[[Step], object] = lambda step: None) -> dict[str, torch.Tensor]:
        """Those of a step. between: is called between forward and backward."""
        loss = self.forward()
        between(self)
        self.finish(loss)
        found = {name: one.grad for name, one in self.model.named_parameters() if one.grad is not None}
        self.release()
        return found


# The ways: what their users write


def none(step: Step) -> None:
    """Nothing."""


def torch_full(step: Step) -> None:
    step.model.enable_gradient_checkpointing()


def torch_reentrant(step: Step) -> None:
    step.model.enable_gradient_checkpointing(functools.partial(checkpoint, use_reentrant=True))


def torch_sac(step: Step, saved: set[Any], matmuls: set[Any]) -> None:
    def contexts() -> Any:
        met: Counter[bool] = Counter()

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            met[context.is_recompute] += op in matmuls
            if op in saved or (op in matmuls and met[context.is_recompute] % 2):
                return CheckpointPolicy.MUST_SAVE
            return CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    step.model.enable_gradient_checkpointing(functools.partial(checkpoint, use_reentrant=False, context_fn=contexts))


def attention_ops() -> set[Any]:
    ops = {aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_efficient_attention.default}
    return ops | {aten._scaled_dot_product_flash_attention_for_cpu.default, torch.ops.peers.drawing_attention.default}


def fastvideo_list(step: Step) -> None:
    torch_sac(step, attention_ops(), matmuls={aten.mm.default})


def torchtitan_list(step: Step) -> None:
    torch_sac(step, attention_ops() | {aten.bmm.default}, matmuls={aten.mm.default, aten.addmm.default})


def attention_in_region(name: str) -> Any:
    """diffusers' processor, in a copy that calls attention as a region."""
    import torch_remat

    def attend(*args: Any, **kwargs: Any) -> Any:
        output = torch_remat.region(dispatch_attention_fn, name, recompute=False)(*args, **kwargs)
        torch_remat.recompute_needs_tensor(output)
        return output

    original = WanAttnProcessor.__call__
    names = {**original.__globals__, "dispatch_attention_fn": attend}
    copy = types.FunctionType(original.__code__, names, argdefs=original.__defaults__)
    return type("Processor", (WanAttnProcessor,), {"__call__": copy})()


def remat(step: Step, **options: Any) -> None:
    import torch_remat

    for block in step.model.blocks:
        block.attn1.set_processor(attention_in_region("attn1"))
        block.attn2.set_processor(attention_in_region("attn2"))
    checkpointed = torch_remat.checkpoint(**options)
    step.model.enable_gradient_checkpointing(lambda block, *args: checkpointed(block)(*args))


class GeneratorHook:
    def snapshot(self) -> torch.Tensor:
        return torch.get_rng_state()

    def restore(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


def remat_with_hook(step: Step) -> None:
    remat(step, recompute_state_hooks=(GeneratorHook(),))


def xformers_list(step: Step) -> None:
    from xformers.checkpoint import checkpoint as xformers_checkpoint

    function = functools.partial(xformers_checkpoint, policy_fn=list(attention_ops()))
    step.model.enable_gradient_checkpointing(function)


def fastac_full(step: Step) -> None:
    fastac.enable(step.model, policy="full")


def fastac_attention(step: Step) -> None:
    fastac.enable(step.model, policy="attn_only")


def fastac_plan(step: Step) -> None:
    fastac.enable(step.model, fastac.plan(step.model, step.inputs).within(step.budget))


class Way(NamedTuple):
    """helpers: what its users write beside the body of `enable`. saves: attention is not to run again."""

    enable: Callable[[Step], object]
    helpers: tuple[Any, ...] = ()
    saves: bool = True

    def lines(self) -> int:
        return lines_of(self.enable) - 1 + sum(map(lines_of, self.helpers))


def lines_of(part: Any) -> int:
    """Of a function or class, each statement on a line: without docstrings, comments, imports and blank lines."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(part))).body
    tree.body = tree.body[bool(ast.get_docstring(tree)) :]
    lines = map(str.strip, ast.unparse(tree).splitlines())
    return sum(bool(line) and not line.startswith(("import ", "from ")) for line in lines)


FULL, TITAN = "torch full", "torch SAC, torchtitan's list"
WAYS = {
    "none": Way(none, saves=False),
    FULL: Way(torch_full, saves=False),
    "torch reentrant": Way(torch_reentrant, saves=False),
    "torch SAC, FastVideo's list": Way(fastvideo_list, (torch_sac, attention_ops)),
    TITAN: Way(torchtitan_list, (torch_sac, attention_ops)),
    "torch_remat": Way(remat, (attention_in_region,)),
    "torch_remat with a hook": Way(remat_with_hook, (remat, attention_in_region, GeneratorHook)),
    "xformers.checkpoint": Way(xformers_list, (attention_ops,)),
    "fastac full": Way(fastac_full, saves=False),
    "fastac attn_only": Way(fastac_attention),
    "fastac plan": Way(fastac_plan),
}

# What they do in a trap


def attention_math(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
    return ((query @ key.mT * query.shape[-1] ** -0.5).softmax(-1) * keep) @ value


@torch.library.custom_op("peers::drawing_attention", mutates_args=())
def drawing_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with dropout inside: its output, and what was kept."""
    keep = (torch.rand(*query.shape[:-1], key.shape[-2]) > 0.2).to(query.dtype) / 0.8
    return attention_math(query, key, value, keep), keep


def drawing_backward(context: Any, grad: torch.Tensor, _: Any) -> Any:
    *inputs, keep = context.saved_tensors
    return torch.func.vjp(lambda *args: attention_math(*args, keep), *inputs)[1](grad)


drawing_kernel.register_fake(lambda query, key, value: (torch.empty_like(query), query @ key.mT))
drawing_kernel.register_autograd(
    drawing_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs, output[1])
)
ROW = fastac.AttentionOp(backend="peers", namespace="peers", name="drawing_attention", layout="bhsd")

sdpa = F.scaled_dot_product_attention
calls: list[str] = []


def small_ops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> torch.Tensor:
    calls.append("small ops")
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(query, key, value)


def with_dropout(step: Step) -> None:
    if ROW not in registry.rows():  # fastac knows the kernel, as the lists do
        fastac.register(ROW)
    for block in step.model.blocks:
        block.attn1.to_out[1].p = 0.3


def with_lora(step: Step) -> None:
    """As diffusers' scripts do it: the scale is set for the forward alone."""
    from peft import LoraConfig

    step.model.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    step.model.requires_grad_(True)
    step.inputs = {**step.inputs, "attention_kwargs": {"scale": 0.5}}


@torch.no_grad()
def change_weights(step: Step) -> None:
    for weight in step.model.blocks.parameters():
        weight.mul_(0.9)


class Trap(NamedTuple):
    """arrange: the model before it is checkpointed. between: forward and backward."""

    arrange: Callable[[Step], object] = lambda step: None
    attention: Callable[..., Any] = sdpa
    between: Callable[[Step], object] = lambda step: None


TRAPS = {
    "dropout after attention": Trap(with_dropout),
    "a kernel draws, dropout follows": Trap(
        with_dropout, lambda query, key, value, **_: drawing_kernel(query, key, value)[0]
    ),
    "attention in small ops": Trap(attention=small_ops),
    "LoRA scale reset before backward": Trap(with_lora),
    "weights changed before backward": Trap(between=change_weights),
}
ROUNDING = 1e-5


def difference(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest of any gradient, over the largest number in it."""
    if found.keys() != expected.keys():
        return math.inf
    pairs = [(found[name], expected[name]) for name in expected]
    return max(((a - b).abs().max() / b.abs().max()).nan_to_num().item() for a, b in pairs)


def outcomes(case: Case, trap: Trap, budgets: Mapping[str, int]) -> dict[str, tuple[str, str]]:
    """Of a step in a trap, by way; and the error or warning that told of it. budgets: of each way that is tried."""
    found = {}
    with mock.patch.object(F, "scaled_dot_product_attention", trap.attention):
        calls.clear()
        expected = Step(case, WAYS["none"], arrange=trap.arrange).gradients()  # of the function that runs forward
        runs = len(calls)
        for name, budget in budgets.items():
            calls.clear()
            with mock.patch.object(logging.getLogger("fastac"), "warning") as warned:  # its peers log none
                try:
                    gradients = Step(case, WAYS[name], budget, trap.arrange).gradients(trap.between)
                except Exception as error:
                    found[name] = "refused", str(error).partition("\n")[0]
                    continue
            if difference(gradients, expected) > ROUNDING:
                found[name] = "silently wrong", ""
            elif not WAYS[name].saves or len(calls) <= runs:
                found[name] = "exact", ""
            else:
                said = [template % tuple(values) for template, *values in (call.args for call in warned.mock_calls)]
                found[name] = ("again, with a warning", said[0]) if said else ("silently again", "")
    return found


# What a step takes


def executed(step: Step) -> int:
    """Attention kernels of a step. One inside its like is the same call, made again by a dispatch mode."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step.step()
    events = profiled_events(profiled)
    allocations = [event.start_ns() for event in events if event.name() == "[memory]" and event.nbytes() > 0]
    ran = end = 0
    for event in events:
        if event.name() == ATTENTION and event.start_ns() >= end:
            end = event.end_ns()
            ran += any(event.start_ns() <= allocated < end for allocated in allocations)
    return ran


def held(step: Step) -> int:
    """Bytes between forward and backward."""
    allocated = allocated_bytes(step.forward).held
    meter = LiveStorages([*step.model.parameters(), *step.model.buffers(), *step.inputs.values()])
    meter.watch(step.model.blocks)
    with meter:
        loss = step.forward()
    of_blocks, of_all = meter.held()
    del loss
    return allocated - (of_all - of_blocks)


def flops(step: Step) -> int:
    with FlopCounterMode(display=False) as counter, replayed_flops() as replayed:
        step.step()
    return int(counter.get_total_flops() - sum(replayed))


def measure(case: Case, rounds: int) -> dict[str, dict[str, Any]]:
    """The figures of every way, or its problem. time: over that of FULL, lower quartile, median, upper quartile."""
    torch.set_num_threads(case.threads)
    expected = Step(case, WAYS["none"]).gradients()
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for name, way in WAYS.items():
        budget = rows[TITAN]["held"] - rows["fastac full"]["held"] if way.enable is fastac_plan else 0
        try:
            step = Step(case, way, budget)
            rows[name] = {"difference": difference(step.gradients(), expected), "flops": flops(step)}
            step.release()
            rows[name] |= {"held": held(Step(case, way, budget)), "budget": budget}
            step.step()  # the third is the last in which fastac compares by value, which allocates
            rows[name]["attention"] = executed(step)
            steps[name] = step
        except Exception as error:
            rows[name] = {"problem": f"{type(error).__name__}: {error}"}

    running: list[Step] = []

    def switch(name: str) -> None:
        for step in running:
            step.release()
        running[:] = [steps[name]]

    clock = time.process_time if case.threads == 1 else time.perf_counter
    seconds, problems = take_turns(list(steps), rounds, switch, lambda: running[0].step(), clock=clock)
    assert not problems, problems
    for name, series in seconds.items():
        ratios = [a / b for a, b in zip(series, seconds[FULL], strict=True)]
        rows[name]["time"] = statistics.quantiles(ratios, n=4) if rounds > 1 else ratios * 3
    return rows


def tables(measured: Mapping[str, Any]) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Headings and rows of what `main` wrote, by the title of their table."""
    cases, ways = measured["cases"], measured["ways"]
    *_, last = cases
    least, full = cases[last]["least"], cases[last]["ways"][FULL]

    def time_of(row: Mapping[str, Any]) -> str:
        return "{1:.2f} ({0:.2f} to {2:.2f})".format(*row["time"]) if "time" in row else problem_of(row)

    def figures(row: Mapping[str, Any]) -> list[str]:
        if "problem" in row:
            return [problem_of(row), "", ""]
        return [f"{row['held'] / least:.2f}", str(row["attention"]), f"{row['flops'] / full['flops']:.3f}"]

    def problem_of(row: Mapping[str, Any]) -> str:
        return "not installed" if row["problem"].startswith("ModuleNotFoundError") else row["problem"]

    times = [[way, *(time_of(case["ways"][way]) for case in cases.values())] for way in ways]
    taken = [[way, *figures(cases[last]["ways"][way]), str(ways[way]["lines"])] for way in ways]
    traps = [[way, *(ways[way]["traps"].get(trap, [""])[0] for trap in TRAPS)] for way in ways]
    return {
        "Time of a step, over torch full": (["", *cases], times),
        f"A step of {last}": (["", "held, over the least", "attention kernels", "FLOPs, over full", "lines"], taken),
        "Five checks, in a first step": (["", *TRAPS], traps),
    }


def main() -> int:
    arguments = parser(__doc__, "peers_cpu.json")
    arguments.add_argument("--rounds", type=positive, default=20, help="steps per way and case (default: %(default)s)")
    options = arguments.parse_args()

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of every start and stop
    register_formulas()  # of attention on a CPU torch has none
    cases = {name: {**case._asdict(), "dtype": str(case.dtype), "least": case.least()} for name, case in CASES.items()}
    for name, case in CASES.items():
        print(f"{name} ...", flush=True)
        cases[name]["ways"] = measure(case, options.rounds)
    (name, case), *_ = CASES.items()
    budgets = {name: row["budget"] for name, row in cases[name]["ways"].items() if "problem" not in row}
    ways = {name: {"lines": way.lines(), "traps": {}} for name, way in WAYS.items()}
    for title, trap in TRAPS.items():
        print(f"{title} ...", flush=True)
        for way, found in outcomes(case, trap, budgets).items():
            ways[way]["traps"][title] = found
    versions = {name: version(name) for name in ("torch_remat", "xformers", "peft")}
    result = {"versions": versions, "rounds": options.rounds, "ways": ways, "cases": cases}
    for title, (headings, lines) in tables(result).items():
        table = Table(*headings, title=title)
        for line in lines:
            table.add_row(*line)
        Console().print(table)
    write_result(options.output, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
