"""Sizes of a video and of its VAE latents, from which the inputs of a transformer follow.

Tensors are made on the CPU. Under FakeTensorMode they cost nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from fastac.errors import FastacError


@dataclasses.dataclass(frozen=True)
class Compression:
    """How many frames, rows and columns of pixels one latent stands for."""

    frames: int
    height: int
    width: int
    first_alone: bool = True
    """The first frame has its own latent frame, so a video has k * frames + 1 frames."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Video:
    """A batch of videos for one call of a transformer.

    `latents` checks whether the sizes fit the transformer, since that depends on its patches.

    Raises:
        FastacError: a number is not positive, or the dtype is not floating-point.
    """

    frames: int
    height: int
    """Height in pixels; `width` is in pixels as well."""
    width: int
    batch: int = 1
    text_tokens: int
    dtype: torch.dtype = torch.bfloat16
    """The dtype of latents and text features."""
    compression: Compression

    def __post_init__(self) -> None:
        for name in ("frames", "height", "width", "batch", "text_tokens"):
            value = getattr(self, name)
            # True is an int in Python, and it is not a number of frames.
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise FastacError(f"video: {name} is {value!r}. Use a whole number from 1 on.")
        if not self.dtype.is_floating_point:
            raise FastacError(f"video: dtype {self.dtype} is not a floating-point type. Use torch.bfloat16 or another.")

    def __str__(self) -> str:
        return f"{self.batch} x {self.frames} frames of {self.height} x {self.width}, {self.text_tokens} tokens of text"

    def latents(self, patch: tuple[int, int, int] = (1, 1, 1)) -> tuple[int, int, int]:
        """Frames, height and width of the latents of one video.

        Args:
            patch: how many latent frames, rows and columns the transformer reads as one token.

        Raises:
            FastacError: the sizes do not divide evenly. diffusers would round most of them down.
        """
        frames, height, width = self.compression.frames, self.compression.height, self.compression.width
        return (
            _latents("frames", self.frames, frames, patch[0], int(self.compression.first_alone)),
            _latents("height", self.height, height, patch[1]),
            _latents("width", self.width, width, patch[2]),
        )

    def tokens(self, patch: tuple[int, int, int]) -> int:
        """The number of tokens of one video: patches of its latents."""
        latents = self.latents(patch)
        return (latents[0] // patch[0]) * (latents[1] // patch[1]) * (latents[2] // patch[2])

    def features(self, *shape: int) -> torch.Tensor:
        """Features of shape (batch, *shape), from the standard normal distribution."""
        return torch.randn(self.batch, *shape, dtype=self.dtype)

    def times(self, dtype: torch.dtype) -> torch.Tensor:
        """One timestep per video, between 0 and 1000: shape (batch,)."""
        # Which time it is does not matter: neither shapes nor attention calls depend on it.
        return torch.full((self.batch,), 500, dtype=dtype)

    def text_mask(self, dtype: torch.dtype, tokens: int | None = None) -> torch.Tensor:
        """A mask of valid text tokens, all of them: shape (batch, tokens)."""
        return torch.ones(self.batch, tokens or self.text_tokens, dtype=dtype)


def patch_of(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """How many latent frames, rows and columns one token stands for."""
    # Newer classes have one tuple. Older ones have a size in space and one in time, which may be None.
    size = config["patch_size"]
    return tuple(size) if isinstance(size, (list, tuple)) else (config.get("patch_size_t") or 1, size, size)


def inputs_of_text_to_video(
    config: Mapping[str, Any], video: Video, *, text_width: int, times: torch.dtype, mask: torch.dtype | None = None
) -> dict[str, Any]:
    """The inputs of most transformers: latents, text, one timestep per video.

    Shapes: (batch, channels, frames, height, width), (batch, tokens, text_width) and (batch,).

    Args:
        times: dtype of the timesteps.
        mask: dtype of the mask of valid text tokens; None for no mask.
    """
    inputs = {
        "hidden_states": video.features(config["in_channels"], *video.latents(patch_of(config))),
        "encoder_hidden_states": video.features(video.text_tokens, text_width),
        "timestep": video.times(times),
        "return_dict": False,
    }
    if mask is not None:
        inputs["encoder_attention_mask"] = video.text_mask(mask)
    return inputs


def _latents(name: str, asked: int, compression: int, patch: int, first: int = 0) -> int:
    """The number of latents along one axis. first: how many frames have their own latent frame."""
    step = compression * patch
    # The frames of the smallest video. The first frame, with a latent of its own, is part of the first patch.
    offset = 1 + step - compression if first else 0
    if (asked - offset) % step == 0:
        return (asked - first) // compression + first
    below = (asked - offset) // step * step + offset
    near = " or ".join(str(size) for size in (below, below + step) if size > 0)
    rule = f"a multiple of {step}" + (f", plus {offset}" if offset else "")
    raise FastacError(
        f"video: {name} {asked} is not {rule}, as the compression of the VAE and the patches of the transformer "
        f"require. Use {near}."
    )
