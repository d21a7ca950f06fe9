"""What the tests of plans share: the step that a plan is about, what it allocates, and models with many blocks."""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

import fastac
from fastac import subjects
from fastac.forecast import Forecast
from fastac.models import MODELS
from fastac.models.published import add_lora
from fastac.policy import Policy
from fastac.subjects import subject
from tests.live_bytes import LiveBytes
from tests.models.tiny import tiny_model
from tests.support import AttentionBlock

sys.path.append(str(Path(__file__).resolve().parents[1] / "benchmarks"))

from common import allocated_bytes
from held_bytes import build_wan as build_wan
from held_bytes import wan_inputs as wan_inputs
from plan_accuracy import replayed_flops

FAMILIES = (
    "WanTransformer3DModel",
    "HunyuanVideoTransformer3DModel",
    "LTXVideoTransformer3DModel",
    "CogVideoXTransformer3DModel",
    "MochiTransformer3DModel",
)
"""The classes that people train most."""

WAN, LTX, COGVIDEOX = "WanTransformer3DModel", "LTXVideoTransformer3DModel", "CogVideoXTransformer3DModel"
HUNYUAN_VIDEO = "HunyuanVideoTransformer3DModel"
"""The classes that quick tests are about; the others take longer, and are slow ones."""

CAN_NOT_BE_SIMULATED = {
    "WanAnimate2Transformer3DModel": "aten._local_scalar_dense",  # asks for values of features
    "AnyFlowFARTransformer3DModel": "FlexAttention does not support backward on CPU",
    "Kandinsky6SRTransformer3DModel": "FlexAttention does not support backward on CPU",
}
"""Class -> what the error says."""

CAN_BE_SIMULATED = tuple(name for name in MODELS if name not in CAN_NOT_BE_SIMULATED)


def tiny(
    name: str, dtype: torch.dtype = torch.float32, lora: int = 0, **config: Any
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A tiny model of the catalogue and its inputs. lora: rank of weights that are trained alone. config: changes."""
    model, inputs = tiny_model(name, dtype, **config)
    if lora:
        add_lora(model, lora)
    return model, inputs


@functools.cache
def forecast_of(name: str, dtype: torch.dtype = torch.float32, lora: int = 0) -> Forecast:
    """The forecast of a tiny model."""
    return Forecast(subject(*tiny(name, dtype, lora)))


def whole(forecasted: Forecast) -> Forecast:
    """The same model and inputs, every block simulated."""
    before, subjects.ends_of = subjects.ends_of, tuple
    try:
        found = Forecast(dataclasses.replace(forecasted.subject), forecasted.states, forecasted.gpus, forecasted.split)
        assert all(one.is_whole for one in found.subject.lists)
        assert found.plain, found.full
        return found
    finally:
        subjects.ends_of = before


def policies_of(found: Forecast) -> dict[str, Policy | None]:
    """Policies that save different things on a tiny model; None is no checkpointing."""
    keys = sorted({one.keys for candidates in found.candidates.values() for one in candidates if one.keys})
    policies: dict[str, Policy | None] = {"none": None, "full": Policy("full"), "attn_only": Policy()}
    if len(keys) > 1:
        policies["longest"] = Policy("attn_only", min_kv=keys[-1])
    return policies | {"linear": Policy(linear=("*",)), "linear_only": Policy("linear_only", linear=("*",))}


def places(found: Forecast, policy: Policy) -> list[Any]:
    """What a policy saves everywhere."""
    return found.of_policies(dict.fromkeys(found.outputs(), policy))


def plan_of(found: Forecast, policy: Policy | None) -> Any:
    """The plan of one policy everywhere; None is no checkpointing."""
    return found.without_checkpointing() if policy is None else found.plan(str(policy), places(found, policy))


def under(model: torch.nn.Module, policy: Policy | Mapping[str, Policy] | None, **options: Any) -> Any:
    """A copy of a model under a policy."""
    mine = copy.deepcopy(model)
    if policy is not None:
        fastac.enable(mine, policy, **options)
    return mine


def step(model: torch.nn.Module, inputs: Mapping[str, Any]) -> None:
    """The step that is simulated."""
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


def allocated(model: torch.nn.Module, inputs: Mapping[str, Any]) -> tuple[int, int]:
    """Bytes of the allocator: still allocated after the forward, and the most of a step."""
    step(model, inputs)  # what is built once is built now
    clear(model, inputs)
    held = allocated_bytes(lambda: model(**inputs)).held
    clear(model, inputs)
    return held, allocated_bytes(lambda: step(model, inputs)).peak


def counted_flops(model: torch.nn.Module, inputs: Mapping[str, Any]) -> int:
    """FLOPs of a step as torch counts calls, without those that are replayed."""
    with FlopCounterMode(display=False) as counter, replayed_flops() as replayed:
        step(model, inputs)
    clear(model, inputs)
    return int(counter.get_total_flops() - sum(replayed))


class Stack(torch.nn.Module):
    """Blocks of no library, one after the other."""

    def __init__(self, *blocks: torch.nn.Module) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(blocks)

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.layers:
            video = block(video, text)
        return video


def wide_block() -> AttentionBlock:
    """A block whose feed-forward is wider than that of others."""
    block = AttentionBlock()
    block.ffn = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 16))
    return block
