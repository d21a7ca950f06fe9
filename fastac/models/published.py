"""Published configurations of models, without weights: shipped with fastac, from a file, or a class's defaults."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.resources
import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fastac.errors import FastacError, did_you_mean
from fastac.models import MODELS
from fastac.models.row import ModelRow
from fastac.models.videos import Compression, Video, patch_of

LORA_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
"""The Linear modules to which diffusers' training scripts add LoRA weights."""

BLOCK_COUNTS = (
    "num_layers",
    "num_single_layers",
    "num_decoder_layers",
    "num_text_blocks",
    "num_visual_blocks",
    "num_hidden_layers",
)
"""Arguments of diffusers' classes that are the number of blocks in a list."""

MOST_BLOCKS = 100
"""A configuration with more blocks in a list is an error: it would fill the memory before anything is said."""

_SHIPPED = importlib.resources.files("fastac.models") / "configurations"


@dataclasses.dataclass(frozen=True)
class Configuration:
    """A transformer as published, and its default video."""

    name: str
    row: ModelRow
    config: Mapping[str, Any]
    """Every keyword argument of its class. If the source has none, it is the class's default."""
    source: str
    """Where the figures come from."""
    default: Video

    @property
    def patch(self) -> tuple[int, int, int]:
        """How many latent frames, rows and columns one token stands for."""
        return patch_of(self.config)

    def part(self, video: Video, ranks: int) -> Video:
        """A video with as many tokens as one rank has when several ranks split this video.

        Raises:
            FastacError: the tokens do not divide by the number of ranks.
        """
        tokens = video.tokens(self.patch)
        for frames, height in (
            (a, b) for a in range(1, ranks + 1) for b in range(1, ranks + 1) if ranks % (a * b) == 0
        ):
            part = _part(video, frames, height, ranks // (frames * height))
            # Whether a size fits is known only when inputs are made for it: VAE and patches both have to divide it.
            with contextlib.suppress(FastacError):
                self.inputs(part)
                # Sizes are rounded down, which may have lost tokens.
                if part.tokens(self.patch) * ranks == tokens:
                    return part
        raise FastacError(
            f"plan: the {tokens} tokens of {video.frames} frames of {video.height} x {video.width} cannot be split "
            f"into {ranks} equal parts of whole rows, columns or frames. Use another size, or fewer ranks."
        )

    def inputs(self, video: Video) -> dict[str, Any]:
        """The keyword arguments of one call. Raises FastacError if the video does not fit the model."""
        return self.row.video_inputs(self.config, video)


def shipped() -> list[str]:
    """Names of the configurations that fastac ships."""
    return sorted(entry.name.removesuffix(".json") for entry in _SHIPPED.iterdir() if entry.name.endswith(".json"))


def load_configuration(name_or_path: str) -> Configuration:
    """Load a configuration: a shipped name, a diffusers class, or the path of a diffusers config.json.

    Raises:
        FastacError: anything else; the message lists the names and classes.
    """
    classes, name = _known(), name_or_path.lower()
    if name in shipped():
        return _of_file(name, json.loads((_SHIPPED / f"{name}.json").read_text(encoding="utf-8")))
    if name_or_path in classes:
        row = classes[name_or_path]
        return _of_class(name_or_path, row, {}, f"the defaults of diffusers.{row.class_name}")
    try:
        content = json.loads(Path(name_or_path).read_text(encoding="utf-8"))
    # RecursionError is JSON that is nested too deep. ValueError is no JSON, no text, or a path with a null byte.
    except (OSError, ValueError, RecursionError) as error:
        # This looks like a repository of the Hub. fastac downloads nothing, so the message has the commands.
        if re.fullmatch(r"[\w-]+/[\w.-]+(?<!\.json)", name_or_path) and not Path(name_or_path).exists():
            folder = name_or_path.partition("/")[2]
            advice = (
                "Plan a model of the Hugging Face Hub from its configuration:\n"
                f"hf download {name_or_path} transformer/config.json --local-dir {folder}\n"
                f"fastac plan {folder}/transformer/config.json"
            )
        else:
            advice = f"{did_you_mean(name_or_path, (*shipped(), *classes))} {_what_there_is()}".strip()
        why = "" if isinstance(error, FileNotFoundError) else f" ({error})"
        raise FastacError(
            f"configuration {name_or_path!r}: no such name or class, and no JSON file{why}. {advice}"
        ) from error
    row = _row(name_or_path, content.get("_class_name") if isinstance(content, dict) else None)
    return _of_class(name_or_path, row, content, name_or_path)


def build(configuration: Configuration, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Build the model with random weights, in training mode, on the current device or in the current fake mode.

    As with `from_pretrained(torch_dtype=dtype)`, modules that the class keeps in float32 stay in float32.
    """
    model: torch.nn.Module = getattr(_diffusers(), configuration.row.class_name).from_config(dict(configuration.config))
    cast(model, dtype)
    return model.train()


def cast(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Cast as `from_pretrained(torch_dtype=dtype)` does: modules that the class keeps in float32 stay in float32."""
    in_float32 = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        # diffusers, too, compares the whole parts of a dotted name.
        if tensor.is_floating_point() and in_float32.isdisjoint(name.split(".")):
            tensor.data = tensor.data.to(dtype)


def fill_zeros(model: torch.nn.Module) -> None:
    """Give parameters that are all zero small values: gradients behind zeros are zero, and comparing shows nothing."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and not parameter.any():
                parameter.normal_(0, 0.02)


def _part(video: Video, frames: int, height: int, width: int) -> Video:
    """Divide latent frames, rows and columns, rounded down."""
    compression = video.compression
    first = int(compression.first_alone)
    latent = (video.frames - first) // compression.frames + first
    return dataclasses.replace(
        video,
        frames=max(1, (max(1, latent // frames) - first) * compression.frames + first),
        height=max(1, video.height // height),
        width=max(1, video.width // width),
    )


def with_layers(config: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Limit each list of blocks to its first `layers`."""
    limited = dict(config)
    for name in BLOCK_COUNTS:
        if isinstance(limited.get(name), int):
            limited[name] = min(layers, limited[name])
    # These are the indices of the blocks that have a VACE block beside them.
    if limited.get("vace_layers"):
        limited["vace_layers"] = [index for index in limited["vace_layers"] if index < layers]
    return limited


def add_lora(model: Any, rank: int) -> None:
    """Add LoRA weights to the modules to which diffusers' training scripts add them, and freeze all others.

    Raises:
        FastacError: peft is not installed, or the class takes no adapters or has no such Linear modules.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise FastacError("LoRA needs peft: pip install peft") from error
    # All weights are frozen before the adapters are there, which have to train.
    model.requires_grad_(False)
    try:
        model.add_adapter(LoraConfig(r=rank, lora_alpha=rank, target_modules=list(LORA_TARGETS)))
    except (AttributeError, ValueError) as error:
        raise FastacError(f"LoRA of {type(model).__name__}: diffusers and peft cannot add it: {error}") from error


def _of_file(name: str, content: Mapping[str, Any]) -> Configuration:
    row = _row(name, content["transformer"]["_class_name"])
    configuration = _of_class(name, row, content["transformer"], content["source"])
    # Models of one class differ in their VAEs and sizes, so the file has these.
    compression = Compression(**content["compression"])
    video = dataclasses.replace(
        configuration.default, **content["default"], text_tokens=content["text_tokens"], compression=compression
    )
    return dataclasses.replace(configuration, default=video)


def _of_class(name: str, row: ModelRow, content: Mapping[str, Any], source: str) -> Configuration:
    # Keys that begin with an underscore (_class_name, _diffusers_version) are not arguments of the class.
    config = _defaults(row) | {key: value for key, value in content.items() if not key.startswith("_")}
    for key in BLOCK_COUNTS:
        if isinstance(config.get(key), int) and config[key] > MOST_BLOCKS:
            raise FastacError(f"configuration {name}: {key} is {config[key]}, more than {MOST_BLOCKS} blocks")
    try:
        # default_of computes with values of the file, and these may be of any type.
        return Configuration(name, row, config, source, row.default_of(config))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise FastacError(f"configuration {name}: no video fits it: {type(error).__name__}: {error}") from error


def _known() -> dict[str, ModelRow]:
    """The classes of the installed diffusers that have a row."""
    # Older releases of diffusers lack the newest classes.
    has = functools.partial(hasattr, _diffusers())
    return {name: row for name, row in MODELS.items() if has(row.class_name)}


def _defaults(row: ModelRow) -> dict[str, Any]:
    parameters = list(inspect.signature(getattr(_diffusers(), row.class_name).__init__).parameters.values())
    return {parameter.name: parameter.default for parameter in parameters[1:]}


def _diffusers() -> Any:
    try:
        import diffusers
    except ModuleNotFoundError as error:
        raise FastacError(
            "a published model is built by diffusers, which is not installed: pip install 'diffusers>=0.33'"
        ) from error
    return diffusers


def _row(name: str, class_name: object) -> ModelRow:
    classes = _known()
    if not isinstance(class_name, str) or class_name not in classes:
        raise FastacError(
            f"configuration {name}: fastac cannot make the inputs of {class_name} for a video. {_what_there_is()}"
        )
    return classes[class_name]


def _what_there_is() -> str:
    return (
        f"There are {', '.join(shipped())}; the classes {', '.join(_known())}; and the path of a config.json of one of "
        "these classes."
    )
