"""What the tests of plans share: the step that a plan is about, what it allocates, and models of no library."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import fastac
from fastac.models.published import add_lora
from fastac.policy import Policy
from tests import live_bytes, support
from tests.engine.simulated import Simulated, simulated
from tests.live_bytes import LiveBytes
from tests.models.tiny import tiny_model

WAN, LTX, COGVIDEOX = "WanTransformer3DModel", "LTXVideoTransformer3DModel", "CogVideoXTransformer3DModel"
HUNYUAN_VIDEO = "HunyuanVideoTransformer3DModel"


def tiny(
    name: str, dtype: torch.dtype = torch.float32, lora: int = 0, **config: Any
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A tiny model of the catalogue and its inputs. lora: rank of weights that are trained alone. config: changes."""
    model, inputs = tiny_model(name, dtype, **config)
    if lora:
        add_lora(model, lora)
    return model, inputs


@functools.cache
def plan_of(name: str) -> fastac.Plan:
    return fastac.plan(*tiny(name))


@contextlib.contextmanager
def exact() -> Iterator[Simulated]:
    """A device on which plans are right to the byte: small storages leave, too, and torch holds no generator's state.

    That state is no tensor that an operator returns.
    """
    with pytest.MonkeyPatch.context() as patch, simulated(late=False) as device:
        patch.setattr("fastac.planning.simulation.GENERATOR_STATE", 0)
        yield device


def row_of(plan: fastac.Plan, policies: str | Policy | Mapping[str, Any]) -> Any:
    """The row of any policies, as those that a plan has by itself."""
    return plan.forecast.figures(policies)


def under(model: torch.nn.Module, policy: str | Policy | Mapping[str, Any], **options: Any) -> Any:
    """A copy of a model under a policy, or under none."""
    mine = copy.deepcopy(model)
    if policy != "none":
        fastac.enable(mine, policy, **options)
    return mine


def step(model: torch.nn.Module, inputs: Mapping[str, Any]) -> None:
    outputs = [t for t in tree_leaves(model(**inputs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    losses = [output.float().square().mean() for output in outputs]
    torch.stack(losses).sum().backward()


def clear(model: torch.nn.Module, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Nothing of a step is left. The tensors that are there before one."""
    outside = [*model.parameters(), *model.buffers(), *(x for x in tree_leaves(inputs) if isinstance(x, torch.Tensor))]
    for tensor in outside:
        tensor.grad = None
    gc.collect()
    return outside


def live(model: torch.nn.Module, inputs: Mapping[str, Any], device: Simulated) -> tuple[int, int, int]:
    """Bytes of the storages that operators return: alive after the forward, on the host then, and the most of a step.

    Of a model that ran before: what is built once is there.
    """
    with LiveBytes(clear(model, inputs)) as meter:
        outputs = model(**inputs)
        held, host = meter.now, device.in_use
    del outputs
    with LiveBytes(clear(model, inputs)) as meter:
        step(model, inputs)
    return held, host, meter.peak


def allocated(model: torch.nn.Module, inputs: Mapping[str, Any]) -> int:
    """Bytes of the allocator that are still allocated after the forward."""
    step(model, inputs)  # what is built once is built now
    clear(model, inputs)
    return live_bytes.allocated(lambda: model(**inputs))


def counted_flops(model: torch.nn.Module, inputs: Mapping[str, Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        step(model, inputs)
    clear(model, inputs)
    return counter.get_total_flops()


def stack_inputs(tokens: int = support.VIDEO_TOKENS, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Inputs of a stack, which need no gradients."""
    torch.manual_seed(tokens)
    shapes = {"video": tokens, "text": support.TEXT_TOKENS}
    return {name: torch.randn(1, length, support.WIDTH, dtype=dtype) for name, length in shapes.items()}


def is_planned(value: torch.Tensor) -> bool:
    """Whether a model runs in a simulation, by one of its tensors."""
    return isinstance(value, FakeTensor)
