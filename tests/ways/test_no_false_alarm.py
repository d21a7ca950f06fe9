"""Nothing changes before backward, and nothing raises, in steps whose values are compared and in those between.

Gradients are those without checkpointing, bit for bit; with noise in the block, up to the noise. In each case a real
change is an error. Offloaded weights: test_block_swap.py. FSDP2 in mixed precision:
distributed/test_data_parallel.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastac
from tests import support
from tests.hook.hosts import caller
from tests.support import VIDEO_TOKENS, WIDTH, AttentionBlock, Tensors, loss_of, run_checkpointed

Operation = Callable[[torch.Tensor], torch.Tensor]

STEPS = 5
"""Of these, the values of 0, 1, 2 and 4 are compared."""


class Block(AttentionBlock):
    """A block that begins with an operation. failing_call: runs out of memory."""

    multiplier = 1.0  # changed by a test before backward
    failing_call = 0
    calls = 0

    def __init__(self, operation: Operation) -> None:
        super().__init__()
        self.operation = operation

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == self.failing_call:
            raise torch.OutOfMemoryError("of the test")
        return super().forward(self.operation(video * self.multiplier), text)

    def other(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self(*inputs)


# Operations, made anew for each training


class Clamped(torch.nn.Linear):
    """A layer that clamps its own weight, which changes nothing the second time."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return super().forward(hidden)


class Added(torch.autograd.Function):
    """A product with a matrix, in parts that each call adds up in another order, in float32 as in kernels."""

    order = torch.Generator()  # and other things that differ at each call
    times = 1
    """So often the noise."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        dtype = torch.promote_types(hidden.dtype, torch.float32)

        def added(order: torch.Tensor) -> torch.Tensor:
            parts = [hidden[..., part].to(dtype) @ weight[part].to(dtype) for part in order.chunk(2)]
            return (parts[0] + parts[1]).to(hidden.dtype)

        found = added(torch.randperm(hidden.shape[-1], generator=Added.order))
        if Added.times == 1:
            return found
        usual = added(torch.arange(hidden.shape[-1]))
        return usual + Added.times * (found - usual)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, weight = ctx.saved_tensors
        return grad @ weight.T, torch.einsum("bti,bto->io", hidden, grad)


class Noise(torch.nn.Module):
    """Two layers with noise, and a norm in another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.wide = torch.nn.Parameter(torch.randn(WIDTH, 512) / 4)
        self.narrow = torch.nn.Parameter(torch.randn(512, WIDTH) / 23)
        self.dtype = dtype

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        added = Added.apply(torch.tanh(Added.apply(hidden, self.wide)), self.narrow)
        return F.silu(F.layer_norm(added.to(self.dtype), (WIDTH,))).to(hidden.dtype)


class Saves(torch.autograd.Function):
    """Saves a tensor for backward, which does not need it."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(saved)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        assert len(ctx.saved_tensors) == 1
        return grad, None


def random_state(hidden: torch.Tensor) -> torch.Tensor:
    """CUDA attention kernels without dropout save seed and offset unset: whatever is in that memory. Or a workspace."""
    for shape, dtype in (((), torch.int64), ((2,), torch.uint64), ((8,), torch.uint8)):
        hidden = Saves.apply(hidden, torch.randint(2**62, shape, generator=Added.order).to(dtype))
    return hidden


def hooked() -> torch.nn.Module:
    """Hooks write into the output of a layer, in place."""
    layer = torch.nn.Linear(WIDTH, WIDTH)
    layer.register_forward_hook(lambda module, args, output: output.add_(1))
    layer.register_forward_hook(lambda module, args, output: setattr(module, "seen", output[:, ::2].mul_(2).detach()))
    return layer


def masked(hidden: torch.Tensor) -> torch.Tensor:
    """Saves scores of minus infinity, and a NaN that is ignored."""
    scores = hidden @ hidden.mT + torch.full((VIDEO_TOKENS, VIDEO_TOKENS), -math.inf).triu(1).to(hidden.dtype)
    background = torch.full_like(hidden, math.nan)
    return torch.fmax(hidden, background) + torch.logsumexp(scores, -1, keepdim=True) * scores.sigmoid().mean(-1, True)


def outliers(hidden: torch.Tensor) -> torch.Tensor:
    """One channel is large, as in trained transformers."""
    return F.silu(hidden * torch.tensor([1000.0] + [1.0] * (WIDTH - 1), dtype=hidden.dtype))


HALF, BF16, DOUBLE = torch.float16, torch.bfloat16, torch.float64

OPERATIONS: dict[str, tuple[Callable[[], Operation], torch.dtype]] = {
    "batch norm": (lambda: torch.nn.BatchNorm1d(VIDEO_TOKENS), torch.float32),
    "instance norm": (lambda: torch.nn.InstanceNorm1d(VIDEO_TOKENS, track_running_stats=True), torch.float32),
    "hooks in place": (hooked, torch.float32),
    "weight in place": (Clamped, torch.float32),
    "infinite and NaN": (lambda: masked, torch.float32),
    "uint4": (lambda: lambda hidden: Saves.apply(hidden, torch.empty(4, dtype=torch.uint4)), torch.float32),
    "random state": (lambda: random_state, torch.float32),
    "outliers in float16": (lambda: outliers, HALF),
    "sums that cancel": (lambda: lambda hidden: F.silu(F.layer_norm(hidden, (WIDTH,))), torch.float32),
    "noise in float32": (lambda: Noise(torch.float32), torch.float32),
    "noise in bfloat16": (lambda: Noise(BF16), BF16),
    "noise in bfloat16, norm in float32": (lambda: Noise(torch.float32), BF16),
    "noise in float32, norm in float64": (lambda: Noise(DOUBLE), torch.float32),
}


def made(
    operation: Callable[[], Operation], dtype: torch.dtype, seed: int = 0
) -> tuple[Block, dict[str, torch.Tensor]]:
    """A block and its inputs, the same at every call."""
    torch.manual_seed(seed)
    Added.order.manual_seed(seed)
    return Block(operation()).to(dtype), support.stack_inputs(seed, dtype=dtype)


def step(block: Block, inputs: Mapping[str, torch.Tensor], policy: str) -> None:
    for tensor in support.leaves_of(block, inputs).values():
        tensor.grad = None
    loss_of(run_checkpointed(block, policy=policy, **inputs)).backward()


def train(
    operation: Callable[[], Operation], policy: str, dtype: torch.dtype = torch.float32, seed: int = 0, failing: int = 0
) -> Tensors:
    """The gradients of every step. failing: the call of the block in which each step runs out of memory, at first."""
    block, inputs = made(operation, dtype, seed)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
    found = {}
    for number in range(STEPS):
        if failing:
            block.calls, block.failing_call = 0, failing
            with pytest.raises(torch.OutOfMemoryError):
                step(block, inputs, policy)
        step(block, inputs, policy)
        gradients = support.gradients(support.leaves_of(block, inputs))
        found |= {f"step {number}: {name}": tensor for name, tensor in gradients.items()}
        optimizer.step()
    return found


@pytest.mark.parametrize("policy", ["attn_only", "full"])
@pytest.mark.parametrize("failing", [1, 2], ids=["forward", "recompute"])
def test_a_step_that_runs_out_of_memory_and_is_repeated(failing: int, policy: str) -> None:
    support.assert_same(train(hooked, policy, failing=failing), train(hooked, "none"))


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name: str) -> None:
    operation, dtype = OPERATIONS[name]
    found, expected = train(operation, "attn_only", dtype), train(operation, "none", dtype)
    if not name.startswith("noise"):
        support.assert_same(found, expected)
    for key, gradient in found.items():
        assert support.relative_error(gradient, expected[key]) < torch.finfo(dtype).eps ** 0.5, key
    block, inputs = made(operation, dtype)
    loss = loss_of(fastac.checkpoint(block, **inputs))
    block.multiplier = 1.5
    with pytest.raises(fastac.FastacError, match="does not compute what the forward did"):
        loss.backward()


@pytest.mark.soak
@pytest.mark.parametrize("dtype", [HALF, BF16])
def test_how_far_noise_reaches(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a quarter of what is allowed, in 40 trainings: four times as much is no error either."""
    monkeypatch.setattr(Added, "times", 4)
    for seed in range(40):
        train(lambda: Noise(torch.float32), "full", dtype, seed=seed)


def test_weight_in_place_of_several_layers() -> None:
    """One code runs them all, as in trainers that checkpoint by themselves."""
    model = caller(lambda block, *args: run_checkpointed(block.other, *args, policy=model.policy))
    model.blocks = torch.nn.ModuleList([Block(Clamped()) for _ in range(2)])

    def run(policy: Any) -> Tensors:
        model.policy = policy
        return support.train_step(model, support.stack_inputs())

    support.assert_alike(run, steps=STEPS)


class Streamed:
    """Calls a layer whose weights are copied into one block for each call. Nobody sees that it holds the block."""

    def __init__(self, block: torch.nn.Module, weights: list[torch.Tensor]) -> None:
        self.block, self.weights = block, weights

    def __call__(self, **inputs: Any) -> torch.Tensor:
        with torch.no_grad():
            for parameter, weight in zip(self.block.parameters(), self.weights, strict=True):
                parameter.copy_(weight)
        return self.block(**inputs)  # type: ignore[no-any-return]


STREAMED: dict[str, Any] = {
    "closure": lambda one: lambda **inputs: Streamed(one.block, one.weights)(**inputs),
    "default": lambda one: lambda block=one.block, weights=one.weights, **inputs: Streamed(block, weights)(**inputs),
    "keyword default": lambda one: (
        lambda *, run=one.block.forward, weights=one.weights, **inputs: Streamed(run.__self__, weights)(**inputs)
    ),
    "nobody": lambda one: one,
}


def streaming(
    way: str, policy: str, change: Callable[[int, torch.Tensor], None] = lambda step, weight: None
) -> Tensors:
    """Steps through two layers. change: called before each backward with a weight of the first."""
    torch.manual_seed(0)
    block, found = AttentionBlock().requires_grad_(False), {}
    weights = [[torch.randn_like(one) / 4 for one in block.parameters()] for _ in range(2)]
    layers = [STREAMED[way](Streamed(block, one)) for one in weights]
    for step in range(5):
        inputs = support.stack_inputs(step)
        video = inputs["video"]
        for layer in layers:
            video = run_checkpointed(layer, policy=policy, video=video, text=inputs["text"])
        loss = loss_of(video)
        change(step, weights[0][6])
        loss.backward()
        found |= {f"step {step}: {name}": one.grad for name, one in inputs.items() if one.grad is not None}
    return found


@pytest.mark.parametrize("policy", ["attn_only", "full"])
@pytest.mark.parametrize("way", STREAMED)
def test_weights_streamed_into_one_block(way: str, policy: str) -> None:
    """By whomever the block is held. Without checkpointing torch raises, as autograd saves the one block's weights."""
    support.assert_same(streaming(way, policy), streaming(way, "torch"))


@pytest.mark.parametrize("way", ["default", "nobody"])
def test_streamed_weights_that_change_are_an_error(way: str) -> None:
    """In a step that compares values."""

    def change(step: int, weight: torch.Tensor) -> None:
        if step == 4:
            weight.mul_(2)

    with pytest.raises(fastac.FastacError, match="does not compute what the forward did"):
        streaming(way, "attn_only", change)
