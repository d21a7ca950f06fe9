"""Host time of a training step under each way of checkpointing, relative to torch's non-reentrant checkpoint.

The model is a Wan transformer so small that kernels take little time: what is left is what Python, the dispatcher and
autograd cost per step, which is what a GPU waits for when it is launch-bound. torch has one thread, and the clock is
the CPU time of the process: on an idle machine that is the time that passes, and on a busy one it leaves out the work
of others. All variants take a step in every round, in an order drawn anew, so that a slower spell of the
machine meets all of them; garbage is collected between steps, never within one. The figure of a variant is its fastest
step, relative to the fastest of `full`, which is torch's checkpoint as diffusers calls it; beside it stands the median
over rounds of the ratio within a round. `reentrant` is torch's older checkpoint. `hooks alone` is the floor: no region
of this kind takes less.

Torch's selective checkpointing (SAC) appears twice with the same policy, around each block, deciding by a part of the
op's name: once with a cache in front and once without.

`auto` plans for memory halfway between what `full` and `attn_only` take. `auto, as a mapping` is enabled with the
policies that it chose: what `auto` takes beyond it is the lookup of known inputs.

In `attn_only, a branch` half of the blocks call their cross-attention in 30 % of the steps only, at random. When the
number of calls changes, fastac may observe some of the next regions, at 10 to 20 times their host time: few, so that a
later step takes no longer.

    python benchmarks/host_time.py [--check]
"""

from __future__ import annotations

import functools
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.utils.checkpoint
from diffusers import WanTransformer3DModel
from rich.console import Console
from rich.table import Table
from torch.autograd.graph import saved_tensors_hooks

import fastac
from common import build_model, finish, parser, positive
from fastac.hook import enabled_on
from fastac.planning.auto import RESERVE, TURNS
from fastac.verification.measuring import take_turns
from fastac.verification.ways import enable_torch_sac, is_attention_by_name


class Case(NamedTuple):
    """latents: batch, channels, frames, height, width; four latent pixels make a token. targets: most, over full.

    With 128 tokens the attention kernel costs about as much as its bookkeeping, so that saving its output gains
    nothing; with 512 it is still a small part of a step. What is gained here is gained by the region.
    """

    dtype: torch.dtype
    latents: tuple[int, ...]
    targets: dict[str, float]


CASES = {
    "fp32, 128 tokens": Case(torch.float32, (1, 4, 2, 16, 16), {"attn_only": 0.84, "fastac full": 0.82}),
    "bf16, 128 tokens": Case(torch.bfloat16, (1, 4, 2, 16, 16), {"attn_only": 0.88, "fastac full": 0.88}),
    "fp32, 512 tokens": Case(torch.float32, (1, 4, 2, 32, 32), {"attn_only": 0.84, "fastac full": 0.88}),
    "bf16, 512 tokens": Case(torch.bfloat16, (1, 4, 2, 32, 32), {"attn_only": 0.90, "fastac full": 0.96}),
}

LAYERS = 8
CONFIG: dict[str, Any] = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 16,
    "freq_dim": 256,
    "ffn_dim": 32,
    "num_layers": LAYERS,
    "rope_max_seq_len": 32,
}
TEXT = (1, 12, 16)  # batch, tokens, width

Enable = Callable[[Any, dict[str, Any]], None]
"""Enables a variant on a model, for a call with some inputs."""


def hooks_alone(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """The mechanism of a region and nothing else: what is saved gets a number, and one recompute fills a list.

    The hooks of forward and recompute are C functions. Nothing is compared, no generator or autocast put back, no
    recompute ends early, a second backward or one inside the forward is wrong.
    """
    saved: list[Any] = []

    def unpack(number: int) -> Any:
        if not saved:
            with saved_tensors_hooks(saved.append, saved.append), torch.enable_grad():
                function(*args, **kwargs)
        tensor, saved[number] = saved[number], None
        return tensor

    with saved_tensors_hooks(functools.partial(next, itertools.count()), unpack):
        return function(*args, **kwargs)


class Sometimes(torch.nn.Module):
    """An attention that is left out when `skips` is set."""

    def __init__(self, attention: torch.nn.Module) -> None:
        super().__init__()
        self.attention = attention
        self.skips = False

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return torch.zeros_like(hidden) if self.skips else self.attention(hidden, *args, **kwargs)


def enable_with_branch(model: Any, inputs: dict[str, Any]) -> None:
    """Enable `attn_only` on a model of which every second block calls its cross-attention in 30 % of the steps."""
    branching = type("Branching", (type(model.blocks[0]),), {})  # kinds of regions are by class
    for block in model.blocks[::2]:
        block.__class__, block.attn2 = branching, Sometimes(block.attn2)
    draw = random.Random(0)

    def choose(*_: Any) -> None:
        skips = draw.random() >= 0.3
        for block in model.blocks[::2]:
            block.attn2.skips = skips

    fastac.enable(model, policy="attn_only")
    model.register_forward_pre_hook(choose)


def enable_auto(model: Any, inputs: dict[str, Any]) -> None:
    """Enable `auto` with memory for a part of what `attn_only` saves, and let it choose."""
    peaks = {row.policy: row.peak_bytes for row in fastac.plan(model, inputs, optimizer="sgd").policies}
    memory = (peaks["full"] + peaks["attn_only"]) / 2 / (1 - RESERVE)
    fastac.enable(model, policy=fastac.Auto(memory=int(memory)))
    for _ in range(1 + TURNS):
        model(**inputs).sample.square().mean().backward()


def enable_as_auto_chose(model: Any, inputs: dict[str, Any]) -> None:
    """Enable the policies that `auto` chooses, as a mapping."""
    enable_auto(model, inputs)
    enabled = enabled_on(model)
    assert enabled is not None
    fastac.enable(model, policy={name: enabled.policy_of(block) for name, block in enabled.blocks.items()})


AUTO, AS_AUTO_CHOSE = "auto", "auto, as a mapping"
MOST_FOR_AUTO = 1.03
"""The most that a step of `auto` takes, over one under the policies that it chose, in the median."""

BRANCH = "attn_only, a branch"
MOST_FOR_BRANCH = 1.1
"""The most that a step of `attn_only, a branch` takes, over one of `attn_only`."""

VARIANTS: dict[str, Enable] = {
    "none": lambda model, inputs: model.disable_gradient_checkpointing(),
    "full": lambda model, inputs: model.enable_gradient_checkpointing(),
    "reentrant": lambda model, inputs: model.enable_gradient_checkpointing(
        functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
    ),
    "hooks alone": lambda model, inputs: model.enable_gradient_checkpointing(hooks_alone),
    "fastac full": lambda model, inputs: fastac.enable(model, policy="full"),
    "attn_only": lambda model, inputs: fastac.enable(model, policy="attn_only"),
    BRANCH: enable_with_branch,
    AUTO: enable_auto,
    AS_AUTO_CHOSE: enable_as_auto_chose,
    "torch SAC, cached": lambda model, inputs: enable_torch_sac(model, functools.cache(is_attention_by_name)),
    "torch SAC, strings": lambda model, inputs: enable_torch_sac(model),
}
BEFORE_FASTAC = ("none", "full")


class Step:
    """One variant's model and inputs; calling it runs a step. Its gradients are gone with `clear`."""

    def __init__(self, enable: Enable, case: Case) -> None:
        self.model = build_model(WanTransformer3DModel, case.dtype, **CONFIG)
        self.inputs = {
            "hidden_states": torch.randn(case.latents).to(case.dtype),
            "encoder_hidden_states": torch.randn(TEXT).to(case.dtype),
            "timestep": torch.tensor([500]),
            "return_dict": False,
        }
        enable(self.model, self.inputs)

    def __call__(self) -> None:
        (output,) = self.model(**self.inputs)
        output.sum().backward()

    def clear(self) -> None:
        self.model.zero_grad(set_to_none=True)


def measure(names: Sequence[str], case: Case, rounds: int) -> dict[str, list[float]]:
    """Seconds of CPU time of each variant's step in each round."""
    steps = {name: Step(VARIANTS[name], case) for name in names}
    current = ""

    def switch(name: str) -> None:
        nonlocal current
        if current:
            steps[current].clear()
        current = name

    for name, step in steps.items():
        for _ in range(30 if name == BRANCH else 3):  # past the steps in which regions are observed
            step()
            step.clear()
    seconds, problems = take_turns(names, rounds, switch, lambda: steps[current](), clock=time.process_time)
    assert not problems, problems
    return seconds


def summarize(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    fastest_full = min(times["full"])
    return {
        name: {
            "fastest_ms": 1e3 * min(series),
            "median_ms": 1e3 * statistics.median(series),
            "ratio_of_fastest": min(series) / fastest_full,
            "median_ratio": statistics.median(a / b for a, b in zip(series, times["full"], strict=True)),
            "total_ms": 1e3 * sum(series),
        }
        for name, series in times.items()
    }


def main() -> int:
    arguments = parser(__doc__, "host_time_cpu.json", check="a variant takes more than its target")
    arguments.add_argument("--rounds", type=positive, default=50, help="steps per variant and case (%(default)s)")
    options = arguments.parse_args()

    torch.set_num_threads(1)  # a second thread has nothing to do here and only adds noise
    # fastac leaves its interception in place once it was enabled. What that costs steps without fastac shows here.
    before = {name: summarize(measure(BEFORE_FASTAC, case, options.rounds)) for name, case in CASES.items()}
    results = {name: summarize(measure(tuple(VARIANTS), case, options.rounds)) for name, case in CASES.items()}

    console = Console()
    table = Table(title=f"Host time of a step, Wan with {LAYERS} layers, {options.rounds} rounds; full = 1")
    table.add_column("variant", no_wrap=True)
    for name in CASES:
        table.add_column(name, justify="right")
    for variant in VARIANTS:
        rows = [results[name][variant] for name in CASES]
        table.add_row(variant, *(f"{row['ratio_of_fastest']:.3f} ({row['median_ratio']:.3f})" for row in rows))
    table.caption = "ratio of the fastest steps (median over rounds of the ratio within a round)"
    console.print(table)
    for name in CASES:
        console.print(f"full before fastac was first enabled, {name}: {before[name]['full']['fastest_ms']:.2f} ms")

    result = {
        "model": {"class": "WanTransformer3DModel", **CONFIG, "text": TEXT},
        "latents": {name: case.latents for name, case in CASES.items()},
        "rounds": options.rounds,
        "results": results,
        "before_fastac_was_enabled": before,
    }
    missed = [
        f"{name}: {variant} missed its target {target}"
        for name, case in CASES.items()
        for variant, target in case.targets.items()
        if results[name][variant]["ratio_of_fastest"] > target
    ]
    for name in CASES:
        branch = results[name][BRANCH]["total_ms"] / results[name]["attn_only"]["total_ms"]
        print(f"a branch in 30 % of the steps, over attn_only, {name}: {branch:.2f}")
        missed += [f"{name}: a branch takes {branch:.2f} of a step without"] * (branch > MOST_FOR_BRANCH)
        ratios = results[name]
        auto = ratios[AUTO]["median_ms"] / ratios[AS_AUTO_CHOSE]["median_ms"]
        print(f"auto over the policies that it chose, {name}: {auto:.3f}")
        missed += [f"{name}: auto takes {auto:.3f} of a step under the policies it chose"] * (auto > MOST_FOR_AUTO)
    return finish(options, result, missed)


if __name__ == "__main__":
    sys.exit(main())
