"""What the tests of plans share: the step that a plan is about, what it allocates, and models of no library."""

from __future__ import annotations

import copy
import functools
import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import fastac
from fastac.cli.measuring import allocated_bytes
from fastac.engine import flops
from fastac.models.published import add_lora
from fastac.planning.fake_model import fake_model
from fastac.planning.forecast import Forecast
from fastac.policy import Policy
from tests import support
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


@functools.cache
def forecast_of(name: str) -> Forecast:
    return Forecast(fake_model(*tiny(name)))


def under(model: torch.nn.Module, policy: str | Policy | Mapping[str, Policy], **options: Any) -> Any:
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


def live(model: torch.nn.Module, inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of the storages that operators return: alive after the forward, and the most of a step.

    Of a model that ran before: what is built once is there.
    """
    with LiveBytes(clear(model, inputs)) as meter:
        outputs = model(**inputs)
        held = meter.now
    del outputs
    with LiveBytes(clear(model, inputs)) as meter:
        step(model, inputs)
    return held, meter.peak


def allocated(model: torch.nn.Module, inputs: Mapping[str, Any]) -> int:
    """Bytes of the allocator that are still allocated after the forward."""
    step(model, inputs)  # what is built once is built now
    clear(model, inputs)
    return allocated_bytes(lambda: model(**inputs)).held


def counted_flops(model: torch.nn.Module, inputs: Mapping[str, Any]) -> dict[str, int]:
    flops.register_formulas()
    with FlopCounterMode(display=False) as counter:
        step(model, inputs)
    clear(model, inputs)
    return {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}


def stack_inputs() -> dict[str, Any]:
    """Inputs of a stack, which need no gradients."""
    return {name: tensor.detach() for name, tensor in support.stack_inputs().items()}
