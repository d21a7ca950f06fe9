"""Models that are partitioned once and compiled again, and what both partitions hold."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch.distributed as dist
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import aot_compile_joint_with_descriptors, aot_export_joint_with_descriptors
from torch.fx import GraphModule, Node
from torch.testing._internal.distributed.fake_pg import FakeStore

from fastac.graph import held_bytes
from fastac.graph.saved_values import saved_nodes
from fastac.graph.torch_private import Partitioner
from fastac.registry import AttentionOp, classify
from tests.support import AttentionBlock, AttentionStack

WORLD = 8

Partition = Callable[..., tuple[GraphModule, GraphModule]]
min_cut: Partition = min_cut_rematerialization_partition


@dataclasses.dataclass
class Split:
    """What a partitioner returned. num_fwd_outputs: how many outputs of the forward are the user's."""

    forward: GraphModule
    backward: GraphModule
    num_fwd_outputs: int

    @property
    def saved(self) -> list[Node]:
        """Tensors that the forward returns for the backward."""
        return saved_nodes(self.forward, self.num_fwd_outputs)

    @property
    def held_bytes(self) -> int:
        """Bytes of all memory that is saved and was no input, each storage once."""
        return held_bytes(self.forward, self.num_fwd_outputs)

    def count(self, part: str, wanted: Callable[[Node], bool]) -> int:
        """How many calls of a kind one of the two graphs has."""
        graph = getattr(self, part).graph
        return sum(node.op == "call_function" and wanted(node) for node in graph.nodes)

    @property
    def attention(self) -> tuple[int, int]:
        """Attention forwards in forward and backward."""
        return self.count("forward", is_attention), self.count("backward", is_attention)

    @property
    def gathers(self) -> tuple[int, int]:
        """All-gathers in forward and backward."""
        return self.count("forward", is_gather), self.count("backward", is_gather)

    @property
    def figures(self) -> tuple[Any, ...]:
        """Attention forwards, all-gathers, saved bytes."""
        return self.attention, self.gathers, self.held_bytes


def is_attention(node: Node) -> bool:
    targets = [node.target, *node.args[:1]]  # torch wraps an op whose generator it restores
    found = [classify(target) for target in targets if not isinstance(target, Node)]
    return any(resolved is not None and isinstance(resolved.row, AttentionOp) for resolved in found)


def is_gather(node: Node) -> bool:
    return node.target in (
        torch.ops._c10d_functional.all_gather_into_tensor.default,
        torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default,
    )


class Watched(Partitioner):
    """A partitioner that keeps what it returned. before: a change of the joint graph that comes first."""

    def __init__(self, partition: Partition, before: Callable[[GraphModule], object] | None = None) -> None:
        self.partition, self.before = partition, before
        self.splits: list[Split] = []

    def __call__(self, joint: GraphModule, joint_inputs: Any, **options: Any) -> tuple[GraphModule, GraphModule]:
        if self.before is not None:
            self.before(joint)
        forward, backward = self.partition(joint, joint_inputs, **options)
        self.splits.append(Split(forward, backward, options["num_fwd_outputs"]))
        return forward, backward

    @property
    def split(self) -> Split:
        """The only partition it made."""
        (split,) = self.splits
        return split


class Partitioned(torch.nn.Module):
    """A module whose forward and backward were partitioned ahead, as users of AOTAutograd's graphs make them."""

    def __init__(self, module: torch.nn.Module, args: Sequence[Any], partition: Partition) -> None:
        super().__init__()
        self.module = module
        with contextlib.ExitStack() as stack:
            joint = aot_export_joint_with_descriptors(stack, module, tuple(args))
            self.function = aot_compile_joint_with_descriptors(joint, partition_fn=partition)

    def forward(self, *args: Any) -> Any:
        return self.function(*self.module.parameters(), *self.module.buffers(), *args)


def compiled_again(module: torch.nn.Module, partition: Partition, **options: Any) -> Any:
    """torch.compile with AOTAutograd's graphs run as they are."""
    backend = aot_autograd(fw_compiler=as_it_is, bw_compiler=as_it_is, partition_fn=partition)
    return torch.compile(module, backend=backend, **options)


def as_it_is(graph: GraphModule, inputs: object) -> Any:
    return make_boxed_func(graph.forward)


def round_trip(
    module: torch.nn.Module,
    args: Sequence[Any],
    first: Partition,
    second: Partition,
    *,
    budget: float = 1.0,
    cse: bool = True,
    before: Callable[[GraphModule], object] | None = None,
) -> tuple[Split, Split, list[torch.Tensor]]:
    """Both partitions of one step, and the gradients. budget: activation_memory_budget of the first partitioner."""
    once, again = Watched(first), Watched(second, before)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        partitioned = Partitioned(module, args, once)
    with torch._functorch.config.patch(cse=cse):
        gradients = gradients_of(module, compiled_again(partitioned, again), args)
    return once.split, again.split, gradients


def gradients_of(module: torch.nn.Module, function: Callable[..., Any], args: Sequence[Any]) -> list[torch.Tensor]:
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    loss = function(*args).float().square().sum()
    return list(torch.autograd.grad(loss, parameters, allow_unused=True))


# A model with its parameters gathered in the graph


@pytest.fixture
def eight_ranks() -> Iterator[None]:
    """A process group of 8 ranks that does nothing, in one process, which compiles everything anew."""
    torch._dynamo.reset()
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    try:
        with torch._functorch.config.patch(enable_autograd_cache=False):
            yield
    finally:
        dist.destroy_process_group()
        torch._dynamo.reset()


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, shard: torch.Tensor) -> torch.Tensor:
        ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
        return ops.wait_tensor(ops.all_gather_into_tensor(shard.to(torch.bfloat16), WORLD, group))

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name
        return ops.wait_tensor(ops.reduce_scatter_tensor(gradient.contiguous(), "sum", WORLD, group)).float()


class ShardedLinear(torch.nn.Module):
    """A linear layer of which each rank holds rows, as SimpleFSDP's parametrization does: cast, gather, use."""

    def __init__(self, layer: torch.nn.Linear) -> None:
        super().__init__()
        self.shard = torch.nn.Parameter(layer.weight.detach()[: layer.out_features // WORLD].float())

    def weight(self) -> torch.Tensor:
        """The whole weight."""
        return _Gather.apply(self.shard)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight())


def small_stack(**options: Any) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    """A block with self- and cross-attention that nobody checkpoints, and its inputs."""
    torch.manual_seed(0)
    model = AttentionStack(1, block=lambda: AttentionBlock(**options))
    return model, (torch.randn(2, 8, 16), torch.randn(2, 4, 16))


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    """The same model in bfloat16, with sharded layers."""
    for name, layer in list(model.bfloat16().named_modules()):
        if isinstance(layer, torch.nn.Linear):
            model.set_submodule(name, ShardedLinear(layer))
    return model


def sharded_stack() -> tuple[torch.nn.Module, tuple[Any, ...]]:
    model, args = small_stack()
    return sharded(model), tuple(one.bfloat16() for one in args)


def careless(joint: GraphModule, inputs: Any, **options: Any) -> Any:
    """A partitioner that does not obey tags."""
    for node in joint.graph.nodes:
        node.meta.pop("recompute", None)
    return min_cut(joint, inputs, **options)
