"""What each step of a region costs on the host: per region, and per tensor that autograd saves in it.

A block of n sines saves n tensors. What one of them costs over no checkpointing is the region's, and what each further
one adds is the tensor's. Ways are measured in turns, the fastest counts; single steps are timed by themselves, on the
functions that a region calls. 100 is what torch's checkpoint costs, so that a table of one machine holds on another.
`hooks alone` is the floor: see host_time.py.

    python benchmarks/region_steps.py
"""

from __future__ import annotations

import logging
import sys
import time
import timeit
import weakref
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fastac
from common import parser, positive, write_result
from fastac.engine import beginning, offload, recompute, region, torch_private
from fastac.engine.blocks import BlockState, state_of
from fastac.policy import Policy
from fastac.verification.measuring import take_turns
from host_time import hooks_alone

FEW, MANY = 1, 81
REPEATED = 4  # steps that are timed together


class Sines(torch.nn.Module):
    """A block that saves one tensor per sine."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for _ in range(self.count):
            hidden = torch.sin(hidden)
        return hidden


Way = Callable[..., torch.Tensor]

WAYS: dict[str, Way] = {
    "none": lambda block, hidden: block(hidden),
    "torch": lambda block, hidden: torch.utils.checkpoint.checkpoint(block, hidden, use_reentrant=False),
    "hooks alone": hooks_alone,
    "full": lambda block, hidden: fastac.checkpoint(block, hidden, policy="full"),
    "full, no early stop": lambda block, hidden: fastac.checkpoint(block, hidden, policy="full", early_stop=False),
    "attn_only": lambda block, hidden: fastac.checkpoint(block, hidden, policy="attn_only"),
}


def measure(rounds: int) -> dict[str, tuple[float, float]]:
    """Microseconds of each way: of a region with one tensor, and of each further tensor."""
    hidden = torch.randn(8, requires_grad=True)
    cases = {f"{name}, {count}": (way, Sines(count)) for name, way in WAYS.items() for count in (FEW, MANY)}
    current = ""

    def switch(name: str) -> None:
        nonlocal current
        current = name

    def step() -> None:
        way, block = cases[current]
        for _ in range(REPEATED):
            way(block, hidden).sum().backward()

    for name in cases:  # past the steps in which values are compared
        switch(name)
        for _ in range(5):
            step()
    seconds, problems = take_turns(tuple(cases), rounds, switch, step, clock=time.process_time)
    assert not problems, problems
    fastest = {name: 1e6 * min(series) / REPEATED for name, series in seconds.items()}
    few = {name: fastest[f"{name}, {FEW}"] for name in WAYS}
    return {name: (few[name], (fastest[f"{name}, {MANY}"] - few[name]) / (MANY - FEW)) for name in WAYS}


def microseconds(call: Callable[[], Any]) -> float:
    """Of a call, without what calling an empty function costs."""
    repeats = 20_000

    def fastest(one: Callable[[], Any]) -> float:
        return 1e6 * min(timeit.repeat(one, number=repeats, repeat=5)) / repeats

    return fastest(call) - fastest(lambda: None)


def steps_of_a_tensor() -> dict[str, float]:
    """Microseconds of each step that `hooks alone` leaves out."""
    tensor = torch.randn(8, requires_grad=True).sin()
    before = torch_private.metadata(tensor)

    def slot() -> None:
        one = recompute.Slot()
        one.metadata = before
        weakref.ref(one)()

    def running() -> Any:
        return torch_private.graph_exec_group() or torch_private.running_backward()

    return {
        "metadata of forward and recompute, compared": microseconds(
            lambda: torch_private.metadata(tensor) == torch_private.metadata(tensor)
        ),
        "a slot, and a weak reference to it": microseconds(slot),
        "the tensor without its graph": microseconds(lambda: tensor.data if tensor.requires_grad else tensor),
        "which backward asks": microseconds(running),
    }


def steps_of_a_region(measured: dict[str, tuple[float, float]]) -> dict[str, float]:
    """Microseconds of each step that `hooks alone` leaves out."""
    tensor = torch.randn(8, requires_grad=True)
    states = beginning.current_states((tensor,))

    block = torch.nn.Identity()
    fastac.checkpoint(block, tensor, policy="full").sum().backward()
    state = state_of(block)
    state.step = 3  # a step in which values are not compared

    def call() -> Any:
        return fastac.checkpoint(block, tensor, policy="full")

    def frame() -> Any:
        return region.Region(beginning.Beginning(block, (tensor,), {}, [block], state), None).forward((tensor,))

    return {
        "early stop": measured["full"][0] - measured["full, no early stop"][0],
        "generators read twice, put back twice": 2 * microseconds(lambda: beginning.current_states((tensor,)))
        + 2 * microseconds(lambda: beginning.set_states(states)),
        "inputs saved as autograd does, and asked back": microseconds(
            lambda: torch_private.unpack(torch_private.save((tensor,)))
        ),
        "autocast and default device, looked at twice": 2
        * microseconds(lambda: (beginning.autocast_state(), torch_private.default_device())),
        "what is called, under which policy, in which trace": microseconds(call) - microseconds(frame),
    }


def offloaded(count: int = 8) -> float:
    """Microseconds of the host to offload and reload a storage of one byte, of so many in a region."""
    policy = Policy("full", offload=True, keep=1)

    def offload_and_reload() -> None:
        inputs = [torch.empty(1, dtype=torch.uint8) for _ in range(count)]
        stash = offload.Stash(policy, None, BlockState(), inputs)
        kept = [stash.take_input(one) for one in inputs]
        stash.end_forward()
        inputs.clear()
        stash.offload()
        held = stash.reload()
        assert len(held) == count
        assert all(one.tensor().numel() for one in kept)
        assert stash.transfers.host_bytes == count

    smallest, offload.SMALLEST = offload.SMALLEST, 0
    try:
        return 1e6 * min(timeit.repeat(offload_and_reload, number=20, repeat=50)) / 20 / count
    finally:
        offload.SMALLEST = smallest


def parts(name: str, place: int, measured: dict[str, tuple[float, float]], steps: dict[str, float]) -> dict[str, float]:
    """Shares of what torch's checkpoint costs, by step. place: 0 of a region, 1 of a tensor."""
    none = measured["none"][place]
    least = measured["hooks alone"][place] - none
    full = measured["full"][place] - none
    found = {
        f"{name}: torch's checkpoint": measured["torch"][place] - none,
        "hooks alone, the floor": least,
        **steps,
        "the rest: Python between them": full - least - sum(steps.values()),
        "= fastac, policy full": full,
        "= fastac, attn_only": measured["attn_only"][place] - none,
    }
    return {step: 100 * cost / (measured["torch"][place] - none) for step, cost in found.items()}


def main() -> int:
    arguments = parser(__doc__, "region_steps_cpu.json")
    arguments.add_argument("--rounds", type=positive, default=300, help="timings of each way (%(default)s)")
    options = arguments.parse_args()
    torch.set_num_threads(1)
    logging.disable()  # it says that attn_only saves nothing in a block of sines
    measured = measure(options.rounds)
    tables = {
        "per region": parts("a region", 0, measured, steps_of_a_region(measured)),
        "per tensor": parts("a saved tensor", 1, measured, steps_of_a_tensor()),
    }
    table = Table("step", title="Host time over no checkpointing; torch's checkpoint = 100")
    table.add_column("", justify="right")
    for shares in tables.values():
        for step, share in shares.items():
            table.add_row(step, f"{share:.0f}")
        table.add_section()
    Console().print(table)
    memory = offloaded()
    print(f"offload: {memory:.0f} us of the host for a storage, in which 25 GB/s copy {memory * 25e3:,.0f} bytes")
    write_result(options.output, {"microseconds": measured, "of_torch_100": tables, "offloaded_storage": memory})
    return 0


if __name__ == "__main__":
    sys.exit(main())
