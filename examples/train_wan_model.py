"""The model's side of train_wan.py: a small Wan transformer, its loss, sampling from it, counting its attention."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

import peft
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from diffusers.training_utils import compute_density_for_timestep_sampling
from torch import Tensor

from train_wan_data import CAPTION_CHANNELS, LATENT_CHANNELS, POSITION_CHANNELS, POSITION_SCALE, InputError, unpatchify

# torch's profiler otherwise writes to stderr when it starts and stops.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

HEAD_CHANNELS = 32
LORA_TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]


def new_transformer(layers: int, width: int) -> WanTransformer3DModel:
    """A transformer with random weights for the latents of train_wan_data.py.

    The first and the last projection begin as each other's transpose, so that the velocity begins near x_t, which is
    most of what there is to say at large t. From independent random weights a third of a short run goes into that.
    """
    transformer = WanTransformer3DModel(
        patch_size=(1, 1, 1),  # patchify has made the patches
        num_attention_heads=width // HEAD_CHANNELS,
        attention_head_dim=HEAD_CHANNELS,
        in_channels=LATENT_CHANNELS + POSITION_CHANNELS,
        out_channels=LATENT_CHANNELS,
        text_dim=CAPTION_CHANNELS,
        ffn_dim=4 * width,
        num_layers=layers,
    )
    first, last = transformer.patch_embedding, transformer.proj_out
    torch.nn.init.orthogonal_(first.weight.flatten(1))
    # norm_out before the last projection brings tokens to unit variance. The factor undoes that: latents and noise
    # have a variance near 1, a sine half of its squared scale.
    energy = LATENT_CHANNELS + POSITION_CHANNELS * POSITION_SCALE**2 / 2
    with torch.no_grad():
        last.weight.copy_((energy / width) ** 0.5 * first.weight.flatten(1).T[:LATENT_CHANNELS])
        first.bias.zero_()
        last.bias.zero_()
    return transformer


def load_transformer(folder: Path) -> WanTransformer3DModel:
    """A transformer that an earlier run of this script saved. Raises InputError when the folder holds anything else."""
    if not (folder / "config.json").is_file():
        raise InputError(f"--transformer {folder}: no saved transformer there (there is no config.json)")
    try:
        transformer = WanTransformer3DModel.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, RuntimeError, TypeError) as error:
        raise InputError(f"--transformer {folder}: cannot be loaded: {error}") from error
    needed = {
        "patch_size": (1, 1, 1),
        "in_channels": LATENT_CHANNELS + POSITION_CHANNELS,
        "out_channels": LATENT_CHANNELS,
        "text_dim": CAPTION_CHANNELS,
    }
    for name, value in needed.items():
        saved = transformer.config[name]
        if (tuple(saved) if isinstance(saved, list) else saved) != value:
            raise InputError(f"--transformer {folder}: its {name} is {saved}, and this script needs {value}")
    return transformer


def add_lora(transformer: WanTransformer3DModel, rank: int) -> None:
    """Give a transformer's attention projections LoRA adapters. peft freezes everything else."""
    transformer.add_adapter(peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=LORA_TARGETS))


def flow_loss(
    transformer: torch.nn.Module, batch: dict[str, Tensor], positions: Tensor, generator: torch.Generator
) -> Tensor:
    """Rectified flow: the mean squared error of the predicted velocity noise - x_0 at logit-normal times.

    The times lean towards noise (mean of the logits 1), where a clip takes shape.
    """
    latents = batch["latents"]
    times = compute_density_for_timestep_sampling(
        "logit_normal", len(latents), logit_mean=1.0, logit_std=1.0, generator=generator
    )
    noise = torch.randn(latents.shape, generator=generator).to(latents)
    times = times.to(latents)
    share = times.view(-1, 1, 1, 1, 1)
    noisy = (1.0 - share) * latents + share * noise
    velocity = predict(transformer, noisy, times, batch["captions"], positions)
    return F.mse_loss(velocity.float(), noise - latents)


def predict(transformer: torch.nn.Module, noisy: Tensor, times: Tensor, captions: Tensor, positions: Tensor) -> Tensor:
    """The velocity (b, 96, t, h, w) at times in [0, 1]."""
    positions = positions.expand(len(noisy), -1, -1, -1, -1)
    inputs = torch.cat([noisy, positions], dim=1)
    return transformer(inputs, 1000.0 * times, captions, return_dict=False)[0]  # type: ignore[no-any-return]


@torch.no_grad()
def sample(transformer: torch.nn.Module, captions: Tensor, positions: Tensor, steps: int, seed: int) -> Tensor:
    """Pixels in [-1, 1] made from noise alone, one clip per caption, by Euler steps from t = 1 to 0."""
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(steps, device=captions.device)
    shape = (len(captions), LATENT_CHANNELS, *positions.shape[-3:])
    latents = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(captions.device)
    for timestep in scheduler.timesteps:
        times = (timestep / 1000.0).expand(len(captions))
        velocity = predict(transformer, latents, times, captions, positions)
        latents = scheduler.step(velocity.float(), timestep, latents, return_dict=False)[0]
    return unpatchify(latents)


class AttentionCount:
    """How many attention forwards ran, as torch's profiler saw it: a witness that knows nothing of fastac.

    An attention op shows up in the profile also where fastac replays its saved output. Only a kernel that runs
    allocates what it returns, so calls that allocate are counted.
    """

    def __init__(self) -> None:
        self.forward = 0
        self.backward = 0

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Count what runs in the body as "forward" or "backward"."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            yield
        for event in profiler.events() or ():
            attention = re.search(r"attn|attention", event.name) and "backward" not in event.name
            if attention and any(child.name.startswith("aten::empty") for child in event.cpu_children):
                setattr(self, phase, getattr(self, phase) + 1)
