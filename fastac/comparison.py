"""One training step of a model, with every output and gradient by name, and what ran; and how two of them differ."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from fastac import autograd_graph, census, hook, scopes
from fastac.census import Call, Census, Product
from fastac.compile import graphs as compiled_graphs
from fastac.errors import FastacError
from fastac.preservation import buffers_preserved, generators_preserved
from fastac.ranks import class_name
from fastac.torch_internals import tree_leaves, tree_map


@dataclasses.dataclass
class Step:
    """One forward and backward: every output and gradient by name, and what ran.

    graphs: ids of the compilations whose graphs ran. in_graph: calls are those that were decided on while these were
    traced, in which no region is seen.
    """

    tensors: dict[str, torch.Tensor | None]
    executions: tuple[int, int]
    calls: list[Call]
    graphs: set[str]
    in_graph: bool = False
    products: list[Product] = dataclasses.field(default_factory=list)

    def rounding(self, name: str) -> float:
        """What two orders of adding up may make of a tensor: a few units in the last place of its largest number."""
        tensor = self.tensors[name]
        return 0.0 if tensor is None else 16 * torch.finfo(tensor.dtype).eps * tensor.abs().max().item()


def fresh(inputs: Any) -> Any:
    """Copies that share nothing with the originals, leaves of their own graph; other objects are deep-copied."""

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        return value if isinstance(value, torch.nn.Module) else copy.deepcopy(value)

    return tree_map(copied, inputs)


def run_forward(model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """One forward with gradients on, on fresh inputs, that is followed by no backward of the whole model."""
    args, kwargs = fresh((args, kwargs))
    with contextlib.ExitStack() as stack, torch.enable_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                stack.enter_context(module.no_sync())  # else it waits for the gradients of one backward
        return model(*args, **kwargs)


def run_step(model: torch.nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Step:
    """One forward and backward of a fixed random projection of all floating outputs, from the same random state."""
    model.zero_grad(set_to_none=True)
    args, kwargs = fresh((args, kwargs))
    counter: Counter[str] = Counter()
    regions: list[Census] = []
    scopes.execution_counters.append(counter)
    census.listeners.append(regions.append)
    try:
        with generators_preserved(_devices(model)), torch.enable_grad():
            outputs = [_local(t) for t in floating(function(*args, **kwargs))]
            forward = counter.total()
            graphs = compiled_graphs.ids_among(autograd_graph.nodes_between(outputs, ()))
            generator = torch.Generator().manual_seed(0)
            weights = [torch.randn(t.shape, generator=generator).to(t.device) for t in outputs]
            differentiable = [(t, w) for t, w in zip(outputs, weights, strict=True) if t.requires_grad]
            if not differentiable:
                raise FastacError(f"verify: no output of {class_name(model)} requires grad, so there is no gradient")
            torch.stack([(t.float() * w).sum() for t, w in differentiable]).sum().backward()
    finally:
        scopes.execution_counters.remove(counter)
        census.listeners.remove(regions.append)
    tensors: dict[str, torch.Tensor | None] = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    tensors |= {f"gradient of {name}": _local(parameter.grad) for name, parameter in model.named_parameters()}
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    tensors |= {f"gradient of input {i}": _local(leaf.grad) for i, leaf in enumerate(leaves)}
    model.zero_grad(set_to_none=True)
    calls = [call for region in regions for call in region.calls]
    products = [product for region in regions for product in region.products]
    return Step(tensors, (forward, counter.total() - forward), calls, graphs, products=products)


def _local(tensor: Any) -> Any:
    """This rank's part of a tensor that is sharded over several (DTensor)."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def floating(outputs: Any) -> list[torch.Tensor]:
    """All floating-point tensors among what a model returns, in order."""
    leaves = tree_leaves(tuple(outputs.values()) if isinstance(outputs, Mapping) else outputs)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def differences(expected: Step, got: Step) -> dict[str, float]:
    """Largest absolute difference of each output and gradient that is not bitwise equal; inf for a missing one."""
    found = {}
    for name, wanted in expected.tensors.items():
        value = got.tensors.get(name)
        if wanted is None and value is None:
            continue
        if (
            wanted is None
            or value is None
            or wanted.shape != value.shape
            or not torch.equal(wanted.isnan(), value.isnan())
        ):
            found[name] = float("inf")
        elif not torch.equal(wanted.nan_to_num(), value.nan_to_num()):
            found[name] = (wanted.double() - value.double()).nan_to_num().abs().max().item()
    return found


def _devices(model: torch.nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in [*model.parameters(), *model.buffers()]}


@contextlib.contextmanager
def as_found(model: torch.nn.Module) -> Iterator[None]:
    """Leave a model as it is now: gradients, buffers, generator states, checkpointing, its blocks' records."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    checkpointing = hook.snapshot(model)
    records = [record for module in model.modules() if (record := census.block_record(module)) is not None]
    latest = [(record, record.latest, record.latest_key, record.communication) for record in records]
    try:
        with generators_preserved(_devices(model)), buffers_preserved(model):
            yield
    finally:
        hook.restore(model, checkpointing)
        for record, before, key, communication in latest:
            record.latest, record.latest_key, record.communication = before, key, communication
        for parameter, gradient in gradients:
            parameter.grad = gradient
