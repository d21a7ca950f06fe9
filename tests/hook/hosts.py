"""Models for fastac.enable: of diffusers, with named blocks, and each of these with wrapped blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from tests import support
from tests.support import Tensors, assert_same, train_step


class Diffuser(ModelMixin, ConfigMixin):
    """The smallest diffusers model with gradient checkpointing. bound: checkpoints `block.__call__`."""

    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(self, layers: int = 2, bound: bool = False) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.bound = bound
        self.blocks = torch.nn.ModuleList(support.AttentionBlock() for _ in range(layers))

    def call(self, block: Any, *args: torch.Tensor) -> Any:
        if torch.is_grad_enabled() and self.gradient_checkpointing:
            return self._gradient_checkpointing_func(block.__call__ if self.bound else block, *args)
        return block(*args)

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            video = self.call(block, video, text)
        return video


class CheckpointsItself(Diffuser):
    """Calls torch's checkpoint, whatever function it was given, as SimpleTuner does."""

    def call(self, block: Any, *args: torch.Tensor) -> Any:
        return torch_checkpoint(block, *args, use_reentrant=False) if self.gradient_checkpointing else block(*args)


class Caller(support.AttentionStack):
    """Checkpoints its blocks itself, as the models of most trainers do."""

    call: Callable[..., torch.Tensor]
    forward = Diffuser.forward


def caller(call: Callable[..., torch.Tensor]) -> Caller:
    torch.manual_seed(0)
    model = Caller()
    model.call = call
    return model


def diffuser(kind: type[Diffuser] = Diffuser, **options: Any) -> Diffuser:
    torch.manual_seed(0)
    return kind(**options).train()


def alone(block: torch.nn.Module) -> torch.nn.Module:
    """As accelerate's FSDP2 plugin wraps with `activation_checkpointing`."""
    return checkpoint_wrapper(block, preserve_rng_state=False)


def offloaded(block: torch.nn.Module) -> torch.nn.Module:
    """The same with `activation_checkpointing_offload`."""
    return offload_wrapper(alone(block))


def wrap_blocks(model: Any, wrap: Callable[[torch.nn.Module], torch.nn.Module] = alone) -> Any:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = wrap(block)
    return model


class Host(NamedTuple):
    """make: a model of two blocks, `blocks`, of two attention calls each. blocks: what enable is called with.

    executions: of attention in a step without fastac, where wrapped blocks are checkpointed in full.
    """

    make: Callable[[], Any]
    blocks: str | None = None
    executions: int = 4

    def enable(self, model: Any, policy: Any = "attn_only") -> None:
        fastac.enable(model, policy, blocks=self.blocks)


HOSTS = {
    "diffusers": Host(diffuser),
    "diffusers, bound methods": Host(lambda: diffuser(bound=True)),
    "blocks": Host(support.stack, "blocks"),
    "wrapped blocks": Host(lambda: wrap_blocks(support.stack()), "blocks", 8),
    "diffusers, wrapped blocks": Host(lambda: wrap_blocks(diffuser()), None, 8),
    "diffusers, offloaded blocks": Host(lambda: wrap_blocks(diffuser(), offloaded), None, 8),
}


def plain(found: Tensors) -> Tensors:
    """The names of tensors without those of wrappers."""
    wrappers = ("_checkpoint_wrapped_module.", "_orig_mod.")
    return {name.replace(wrappers[0], "").replace(wrappers[1], ""): tensor for name, tensor in found.items()}


@functools.cache
def reference() -> Tensors:
    """A step of these models without checkpointing: all have the weights of the same seed."""
    return train_step(support.stack(), support.stack_inputs())


def step_of(model: torch.nn.Module) -> int:
    """How many attention kernels one training step runs. It computes what the reference does."""
    expected = reference()
    support.count_cpu_attention()
    support.executions.clear()
    assert_same(plain(train_step(model, support.stack_inputs())), expected)
    return support.executions[support.CPU_ATTENTION]


# UNets of 64 pixels

SIZES = {"norm_num_groups": 4, "layers_per_block": 1, "attention_head_dim": 4}
UNET = SIZES | {
    "block_out_channels": (8, 16),
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 8,
}
ATTENDING = {
    "down_block_types": ("AttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "AttnUpBlock2D"),
    "block_out_channels": (8, 8),
}
