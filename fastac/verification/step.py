"""One training step of a user's model: outputs, gradients and written buffers, and the attention kernels that ran."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity, supported_activities

from fastac import registry
from fastac.compiled import graphs
from fastac.diagnosis.autograd_graph import nodes_between
from fastac.engine.beginning import generators_preserved
from fastac.engine.device_memory import local
from fastac.engine.module_state import modules_preserved
from fastac.engine.process import process
from fastac.engine.results import Call, Product, RegionResult
from fastac.engine.torch_private import profiled_events, profiler, tree_leaves, tree_map
from fastac.errors import FastacError, class_name
from fastac.registry.torch_private import name_of
from fastac.verification.recompute import RecomputeProfile, recompute_of
from fastac.verification.report import Offloaded, block_states, offloaded_by


class Executed(Counter[str]):
    """Attention kernels that ran, by op."""

    recompute: RecomputeProfile | None = None
    """What recompute ran, if these were counted in a backward."""


@contextlib.contextmanager
def executed_attention(on_device: bool = False) -> Iterator[Executed]:
    """Count the attention kernels that run inside, by op. The counts are complete when the context ends.

    torch's profiler counts every call of an op. A call that fastac answered from a tape ran no kernel and is
    subtracted. Calls that dynamo makes while it traces run none either, and are counted.

    on_device: profile the accelerator as well. Its times say which ops of recompute are expensive.
    """
    ran = Executed()
    answered: Counter[str] = Counter()
    process.replayed_calls.append(answered)
    try:
        # fastac does not count at BackendSelect: another package may have taken that key of an op, and calls would be
        # missed.
        with profiler(activities=supported_activities() if on_device else [ProfilerActivity.CPU]) as profiled:
            yield ran
    finally:
        # `list.remove` compares by value, and could take another counter with the same counts.
        process.replayed_calls[:] = [counter for counter in process.replayed_calls if counter is not answered]
    names = {name_of(op.op) for op in registry.present_ops() if op.is_attention}
    ends: Counter[int] = Counter()  # thread -> the end of the last counted call
    events = profiled_events(profiled)
    for event in events:
        thread, name = event.start_thread_id(), event.name()
        # If a call is inside another, a dispatch mode, a tensor subclass or a kernel made it: count the outer call.
        if name in names and event.start_ns() >= ends[thread]:
            ran[name] += 1
            ends[thread] = event.end_ns()
    ran.subtract(answered)
    ran.recompute = recompute_of(events, answered)


@dataclasses.dataclass
class Step:
    """One forward and backward."""

    tensors: dict[str, torch.Tensor | None]
    """Every output and gradient, and every buffer that was written, by name."""
    executions: tuple[int, int]
    """Attention kernels that ran in forward and in backward."""
    calls: list[Call]
    graphs: set[str]
    """Ids of the compilations whose graphs ran."""
    in_graph: bool = False
    """Whether `calls` were decided while these graphs were traced: no region is seen while a graph runs."""
    frozen: int = 0
    """Attention kernels that ran in the forward of regions without a graph."""
    products: list[Product] = dataclasses.field(default_factory=list)
    offloaded: Offloaded | None = None
    kernels: tuple[str, ...] = ()
    """Attention ops that ran in forward."""
    recompute: RecomputeProfile | None = None
    """What recompute ran; None if there was no recompute, or nothing was counted."""


def fresh(inputs: Any) -> Any:
    """Copies of inputs: tensors become leaves with memory of their own, modules stay, other objects are deep copies."""

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            # Backward writes gradients into these leaves, so the user's inputs keep theirs.
            return value.detach().clone().requires_grad_(value.requires_grad)
        return value if isinstance(value, torch.nn.Module) else copy.deepcopy(value)

    return tree_map(copied, inputs)


def run_step(
    model: torch.nn.Module, function: Callable[..., Any], args: Any, kwargs: Any, is_counted: bool = True
) -> Step:
    """Run a forward, and a backward of a fixed random projection of all floating outputs. Random state stays.

    is_counted: whether attention kernels are counted, by torch's profiler. That takes most of a small step's time.
    """
    # With None, a parameter that gets no gradient differs from a parameter whose gradient is zero.
    model.zero_grad(set_to_none=True)
    args, kwargs = fresh((args, kwargs))
    regions: list[RegionResult] = []
    for state in block_states(model.modules()):
        # If this step offloads nothing, the copies of an earlier step would be reported as its own.
        state.transfers = None
    process.collectors.append(regions)
    try:
        with generators_preserved(), modules_preserved([model]) as before, torch.enable_grad():
            with _counting(is_counted) as forward:
                outputs = [local(t) for t in floating(function(*args, **kwargs))]
            compiled = graphs.ids_among(nodes_between(outputs, ()))
            # Random weights: in a plain sum, errors of opposite sign would cancel. On the CPU, so that all devices and
            # both steps have the same.
            generator = torch.Generator().manual_seed(0)
            weights = [torch.randn(t.shape, generator=generator).to(t.device) for t in outputs]
            differentiable = [(t, w) for t, w in zip(outputs, weights, strict=True) if t.requires_grad]
            if not differentiable:
                raise FastacError(f"verify: no output of {class_name(model)} requires grad, so there is no gradient")
            with _counting(is_counted, on_device=outputs[0].device.type != "cpu") as backward:
                torch.stack([(t.float() * w).sum() for t, w in differentiable]).sum().backward()
            # Buffers are read inside the context, which restores them when it ends.
            unchanged = before.versions.keys() - before.changed()
            written = {f"buffer {name}": b.detach().clone() for name, b in model.named_buffers() if b not in unchanged}
    finally:
        # `list.remove` compares by value, and all empty lists are equal.
        process.collectors[:] = [collector for collector in process.collectors if collector is not regions]
    tensors: dict[str, torch.Tensor | None] = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    tensors |= {f"gradient of {name}": local(parameter.grad) for name, parameter in model.named_parameters()}
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    tensors |= {f"gradient of input {i}": local(leaf.grad) for i, leaf in enumerate(leaves)}
    tensors |= written
    # `tensors` holds these gradients. With None, the next backward makes new ones and leaves these as they are.
    model.zero_grad(set_to_none=True)
    return Step(
        tensors,
        executions=(forward.total(), backward.total()),
        calls=[call for region in regions for call in region.calls],
        graphs=compiled,
        frozen=sum(len(region.attention_calls) for region in regions if not region.has_graph),
        products=[product for region in regions for product in region.products],
        offloaded=offloaded_by(model.modules()),
        kernels=tuple(sorted(name for name, count in forward.items() if count)),
        recompute=backward.recompute,
    )


def _counting(is_counted: bool, on_device: bool = False) -> contextlib.AbstractContextManager[Executed]:
    return executed_attention(on_device) if is_counted else contextlib.nullcontext(Executed())


def floating(outputs: Any) -> list[torch.Tensor]:
    """All floating-point tensors among a model's outputs, in order."""
    # pytree takes a mapping of a class that it does not know for one leaf.
    leaves = tree_leaves(tuple(outputs.values()) if isinstance(outputs, Mapping) else outputs)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
