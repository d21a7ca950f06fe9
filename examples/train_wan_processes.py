"""What several processes are to train_wan.py: they share the batches and, if told so, the weights.

One process alone does nothing of this.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from diffusers import WanTransformer3DModel
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.tensor import DTensor

from train_wan_data import InputError


def new_accelerator(mixed_precision: str, gradient_accumulation_steps: int, shard: bool) -> Accelerator:
    """Ready for the processes that there are. shard: by FSDP2, as `accelerate launch --use_fsdp` may ask for as well.

    On CPUs accelerate has to be told that there are several processes, or each would train alone; and it shards nothing
    there of itself, though torch can.
    """
    options: dict[str, Any] = {"cpu": not torch.accelerator.is_available()}
    launched = os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true"
    if shard:
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["WanTransformerBlock"],
        )
    elif launched and os.environ.get("FSDP_VERSION", "1") != "2":
        raise InputError("this script shards by FSDP2: accelerate launch --use_fsdp --fsdp_version 2")
    if shard or launched:
        state = PartialState(cpu=options["cpu"])
        if state.distributed_type == DistributedType.NO:
            raise InputError(
                "--fsdp: needs several processes: torchrun --nproc-per-node N examples/train_wan.py --fsdp"
            )
        if state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type = DistributedType.MULTI_GPU
    accelerator = Accelerator(
        mixed_precision=mixed_precision, gradient_accumulation_steps=gradient_accumulation_steps, **options
    )
    if accelerator.is_fsdp2:
        # accelerate 1.15 fails in it on models with parameters beside their modules, as Wan's scale_shift_table.
        accelerator.state.fsdp_plugin.cpu_ram_efficient_loading = False
    return accelerator


def whole(
    accelerator: Accelerator, model: torch.nn.Module, transformer: WanTransformer3DModel, new: Callable[[], Any]
) -> WanTransformer3DModel | None:
    """The trained transformer with all of its weights on the main process, and None on others. Every process calls it.

    new: another transformer of the same shape, for the weights of one that is sharded.
    """
    if not accelerator.is_fsdp2:
        return transformer if accelerator.is_main_process else None
    weights = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return None
    gathered: WanTransformer3DModel = new()
    gathered.load_state_dict(weights)
    return gathered.to(accelerator.device)


def whole_number(tensor: torch.Tensor) -> float:
    """The value of a tensor with one element, which may be spread over the processes. Every process calls it."""
    return float(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def process_name() -> str:
    """Which of several processes this is, for messages; "" where there is one."""
    rank, processes = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    return f"process {rank} of {processes}: " if processes != "1" else ""


def reported(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let the launcher, where there is one, tell in its summary what the process that failed first raised."""
    return record(function) if torch.distributed.is_torchelastic_launched() else function
