"""What the tests of compiled training share: small models, two ways to compile them, steps that are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

from fastac.engine import releases
from tests import support
from tests.compiler import Compiled, compiled_so_far, reset
from tests.support import assert_same, stack, train_step


def compile_blocks(model: torch.nn.Module, backend: Any, dynamic: bool | None = False) -> torch.nn.Module:
    """Compile every block by itself, so that checkpointing stands around compiled code."""
    for block in model.blocks:
        block.compile(backend=backend, dynamic=dynamic)
    return model


def compile_whole(model: torch.nn.Module, backend: Any, dynamic: bool | None = False) -> torch.nn.Module:
    """Compile the model in place, so that checkpointing stands inside the traced code. Skips where torch is too old."""
    if not releases.has(releases.COMPILED_MODELS):
        pytest.skip(f"{releases.COMPILED_MODELS} needs torch {releases.FIRST_TORCH[releases.COMPILED_MODELS]}")
    model.compile(backend=backend, dynamic=dynamic)
    return model


WAYS = {"blocks": compile_blocks, "whole": compile_whole}
EACH_WAY = pytest.mark.parametrize("way", WAYS)


def hiding(
    module: Any, _: Any, op: Any = F.scaled_dot_product_attention, by: Callable[..., Any] = support.written_out
) -> Any:
    """A compiler whose code calls a function in the place of an op of attention."""
    for node in module.graph.find_nodes(op="call_function", target=op):
        node.target = by
    module.recompile()
    return module


class Steps(NamedTuple):
    """Training steps of one model: the tensors of each step, the attention executions of each, what was compiled."""

    tensors: list[support.Tensors]
    executions: list[int]
    compiled: list[Compiled]


def train(model: torch.nn.Module, *inputs: Mapping[str, Any], steps: int = 2) -> Steps:
    """Train on each of the inputs in turn, `steps` times, counting attention kernels that really ran."""
    support.count_cpu_attention()
    found = Steps([], [], [])
    for _ in range(steps):
        for one in inputs:
            support.executions.clear()
            found.tensors.append(train_step(model, one))
            found.executions.append(support.executions.total())
            found.compiled.append(compiled_so_far())
    return found


def assert_exact_and_saved(
    build: Callable[[str], torch.nn.Module], *inputs: Mapping[str, Any], calls: int, looks: int = 0
) -> Steps:
    """Train build("none") and build("attn_only"), compiling each anew, and compare every step.

    Each step, the first included, must be bitwise the same and run each of the `calls` attention calls once. The first
    `looks` steps may run them twice: a compiled block class gets a second, eager look, whatever the size of its inputs.
    Dynamo makes as many graphs of both, and none in the second round of steps or later.
    """
    reset()
    expected = train(build("none"), *inputs)
    reset()
    found = train(build("attn_only"), *inputs)
    for mine, theirs in zip(found.tensors, expected.tensors, strict=True):
        assert_same(mine, theirs)
    assert set(expected.executions) == {calls}
    assert set(found.executions[looks:]) == {calls}
    assert set(found.executions[:looks]) <= {calls, 2 * calls, calls + calls // 2}
    assert found.compiled[-1] == found.compiled[len(inputs) - 1], "recompiled from step to step"
    assert found.compiled[-1] == expected.compiled[-1]
    return found


class SmallBlock(torch.nn.Module):
    """One attention, frozen or trained projections, pointwise work behind them: few kernels for g++ to compile."""

    def __init__(self, attend: Callable[..., torch.Tensor] = F.scaled_dot_product_attention, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(support.WIDTH, 3 * support.WIDTH)
        self.out = torch.nn.Linear(support.WIDTH, support.WIDTH)
        self.ffn = torch.nn.Linear(support.WIDTH, support.WIDTH)
        self.attend = attend

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """video: (batch, tokens, width) -> the same; text is not looked at."""
        query, key, value = self.qkv(video).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        attended = self.attend(query, key, value).transpose(1, 2).flatten(2)
        return video + F.gelu(self.ffn(video + self.out(attended)))


def small(policy: Any, layers: int = 2, attend: Callable[..., Any] = F.scaled_dot_product_attention) -> Any:
    """A stack of SmallBlocks: one attention call per layer."""
    return stack(policy=policy, layers=layers, block=lambda: SmallBlock(attend))


def small_inputs(tokens: int = support.VIDEO_TOKENS) -> dict[str, torch.Tensor]:
    """Inputs of a stack of SmallBlocks, for a video with so many tokens."""
    video = torch.randn(1, tokens, support.WIDTH, generator=torch.Generator().manual_seed(tokens))
    return {"video": video.requires_grad_(), "text": torch.empty(0)}


def frozen(model: torch.nn.Module) -> torch.nn.Module:
    """Train the feed-forward alone, as a LoRA on it does: with `frozen_inputs`, no backward needs what attention of
    block 0 returned, so that a compiler may use its memory again."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("ff" in name)
    return model


def frozen_inputs(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same inputs as data: nothing before the first trained parameter needs a gradient."""
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def broken(attend: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Attention that dynamo cannot put into one graph."""

    def attend_and_break(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return attend(query, key, value)

    return attend_and_break
