"""What a transformer is called with for a video: it runs, has the tokens the video says, and is what pipelines pass."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import pytest
import torch

from fastac.errors import FastacError
from fastac.models import MODELS, block_lists
from fastac.models.row import ModelRow
from fastac.models.videos import Compression, Video, patch_of
from tests.models.tiny import TINY

LARGER = {
    "AllegroTransformer3DModel": {"attention_head_dim": 12, "cross_attention_dim": 24},
    "CosmosTransformer3DModel": {"max_size": (8, 32, 32)},
}
"""Where the tiny configuration is too small: heads for the positions that the pipeline passes, positions for frames."""


def row_of(name: str) -> ModelRow:
    return MODELS[name.partition(":")[0]]


def model_for(name: str, frames: int, **changes: Any) -> Any:
    config = dict(TINY[name].config) | LARGER.get(name, {}) | changes
    if "video_length" in config:
        config["video_length"] = frames
    torch.manual_seed(0)
    return getattr(diffusers, row_of(name).class_name)(**config).eval()


def small(row: ModelRow, config: Any, latents: tuple[int, int, int], **changes: Any) -> Video:
    video = row.default_of(config)
    first, scale = int(video.compression.first_alone), video.compression
    return dataclasses.replace(
        video,
        frames=(latents[0] - first) * scale.frames + first,
        height=latents[1] * scale.height,
        width=latents[2] * scale.width,
        **({"dtype": torch.float32} | changes),
    )


@pytest.mark.parametrize("name", MODELS)
def test_a_model_runs_on_the_inputs_of_a_video(name: str) -> None:
    """Two videos of them, and its blocks get the tokens of both."""
    row, latents = row_of(name), (4, 8, 12)
    model = model_for(name, latents[0])
    video = small(row, model.config, latents, batch=2)
    seen: list[torch.Tensor] = []

    def look(block: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(args[0] if args else kwargs["hidden_states"])

    (blocks, *_) = (blocks for name, blocks in block_lists(model).items() if "text" not in name)
    blocks[min(blocks)].register_forward_pre_hook(look, with_kwargs=True)
    with torch.no_grad():
        outputs = model(**row.video_inputs(model.config, video))
    assert isinstance(outputs, (tuple, torch.Tensor))  # return_dict=False
    assert seen[0].numel() // seen[0].shape[-1] == 2 * video.tokens(patch_of(model.config))


class Called(Exception):  # noqa: N818 nothing went wrong
    """What a pipeline calls its transformer with; the rest of it need not run."""


class Part(types.SimpleNamespace):
    """What a pipeline reads of a part that does not run here: a VAE, a text encoder, a guard of texts."""

    def to(self, device: object) -> None:
        """Nothing to be moved."""

    def check_text_safety(self, text: str) -> bool:
        """Every text passes."""
        return True

    def __call__(self, text: torch.Tensor, mask: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
        """As LTX-2's modules between text encoder and transformer, which leave the text as it is here."""
        return text, text, mask


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """One pipeline of diffusers, and how it is asked for a video.

    model: a name of TINY; changes: of its configuration. components: of the pipeline, without the transformer; the
    others are None. text: argument of the embedded text, and its width. mask: the dtype of its mask. frames: the name
    for their number. arguments: of the call, made from the video.
    """

    pipeline: str
    model: str
    components: Mapping[str, Any]
    changes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    text: tuple[str, int] = ("prompt_embeds", 16)
    mask: torch.dtype | None = None
    frames: str = "num_frames"
    guided: bool = True
    arguments: Callable[[Video], dict[str, Any]] = lambda video: {}

    def call(self, model: Any, video: Video) -> dict[str, Any]:
        """The arguments of the first call of the pipeline's transformer, by name, but for those that are None."""
        made = getattr(diffusers, self.pipeline)
        required = [one.name for one in inspect.signature(made).parameters.values() if one.default is one.empty]
        pipeline = made(**dict.fromkeys(required) | dict(self.components) | {"transformer": model})
        pipeline.set_progress_bar_config(disable=True)
        model.register_forward_pre_hook(look, with_kwargs=True)
        text, width = self.text
        arguments = {"height": video.height, "width": video.width, self.frames: video.frames}
        arguments |= {text: torch.randn(1, video.text_tokens, width, dtype=video.dtype)} | self.arguments(video)
        if self.mask is not None:
            arguments["prompt_attention_mask"] = torch.ones(1, video.text_tokens, dtype=self.mask)
        if self.guided:
            arguments["guidance_scale"] = 1.0
        with pytest.raises(Called) as called:
            pipeline(num_inference_steps=2, output_type="latent", **arguments)
        return {name: value for name, value in called.value.args[0].items() if value is not None}


def look(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    raise Called(dict(zip(("hidden_states", "timestep"), args, strict=False)) | kwargs)


def ones(tokens: int) -> torch.Tensor:
    return torch.ones(1, tokens, dtype=torch.int64)


def glyphs(video: Video) -> dict[str, Any]:
    """The second text of HunyuanVideo 1.5, and the mask of the first."""
    return {
        "prompt_embeds_mask": ones(video.text_tokens),
        "prompt_embeds_2": torch.randn(1, 256, 10, dtype=video.dtype),
        "prompt_embeds_mask_2": ones(256),
    }


def pooled(name: str) -> Callable[[Video], dict[str, Any]]:
    return lambda video: {name: torch.randn(1, 8, dtype=video.dtype)}


FLOW = {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
SHIFTED = {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)}
UNI_PC = {"scheduler": diffusers.UniPCMultistepScheduler()}
HUNYUAN_VAE = Part(
    config=types.SimpleNamespace(latent_channels=4), temporal_compression_ratio=4, spatial_compression_ratio=16
)
OF_WAN = Compression(4, 8, 8)
"""A pipeline without VAE takes it for that of Wan 2.1."""
CHANNELS = ("in_channels", "out_channels")
ROTARY_HEADS = {"attention_head_dim": 16}  # the fewest whose quarter and three eighths are even numbers


def cogvideox(model: str = "CogVideoXTransformer3DModel", **changes: Any) -> Pipeline:
    components = {"scheduler": diffusers.CogVideoXDDIMScheduler()}
    return Pipeline("CogVideoXPipeline", model, components, changes, text=("prompt_embeds", 8))


PIPELINES = {
    "wan": Pipeline("WanPipeline", "WanTransformer3DModel", UNI_PC),
    "wan 5b": Pipeline(
        "WanPipeline", "WanTransformer3DModel", UNI_PC | {"expand_timesteps": True}, dict.fromkeys(CHANNELS, 48)
    ),
    "skyreels": Pipeline("SkyReelsV2Pipeline", "SkyReelsV2Transformer3DModel", UNI_PC),
    "hunyuan video": Pipeline(
        "HunyuanVideoPipeline",
        "HunyuanVideoTransformer3DModel",
        FLOW,
        mask=torch.int64,
        guided=False,
        arguments=pooled("pooled_prompt_embeds"),
    ),
    "hunyuan video 1.5": Pipeline(
        "HunyuanVideo15Pipeline",
        "HunyuanVideo15Transformer3DModel",
        FLOW | {"vae": HUNYUAN_VAE, "guider": diffusers.ClassifierFreeGuidance(guidance_scale=1.0)},
        {"in_channels": 9},
        guided=False,
        arguments=glyphs,
    ),
    "ltx": Pipeline("LTXPipeline", "LTXVideoTransformer3DModel", SHIFTED, mask=torch.bool),
    "ltx 2": Pipeline(
        "LTX2Pipeline",
        "LTX2VideoTransformer3DModel",
        SHIFTED | {"text_encoder": Part(dtype=torch.bfloat16), "connectors": Part()},
        {"audio_in_channels": 128},
        mask=torch.int64,
        arguments=lambda video: {"audio_guidance_scale": 1.0},
    ),
    "cosmos": Pipeline(
        "CosmosTextToWorldPipeline",
        "CosmosTransformer3DModel",
        {"scheduler": diffusers.EDMEulerScheduler(sigma_schedule="karras"), "safety_checker": Part()},
    ),
    "cogvideox 2b": cogvideox(),
    "cogvideox 5b": cogvideox(use_rotary_positional_embeddings=True, **ROTARY_HEADS),
    "cogvideox 1.5": cogvideox("CogVideoXTransformer3DModel:1.5", sample_height=24, sample_width=24, **ROTARY_HEADS),
    "mochi": Pipeline(
        "MochiPipeline",
        "MochiTransformer3DModel",
        {"scheduler": diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True)},
        mask=torch.bool,
    ),
    "allegro": Pipeline(
        "AllegroPipeline",
        "AllegroTransformer3DModel",
        {"scheduler": diffusers.EulerAncestralDiscreteScheduler()},
        text=("prompt_embeds", 8),
        mask=torch.int64,
    ),
    "latte": Pipeline(
        "LattePipeline",
        "LatteTransformer3DModel",
        {"scheduler": diffusers.DDIMScheduler()},
        text=("prompt_embeds", 8),
        frames="video_length",
        arguments=lambda video: {"negative_prompt": "", "clean_caption": False, "mask_feature": False},
    ),
    "easyanimate": Pipeline("EasyAnimatePipeline", "EasyAnimateTransformer3DModel", FLOW, mask=torch.int64),
    "sana video": Pipeline(
        "SanaVideoPipeline",
        "SanaVideoTransformer3DModel",
        {"scheduler": diffusers.DPMSolverMultistepScheduler()},
        mask=torch.int64,
        frames="frames",
        arguments=lambda video: {"use_resolution_binning": False},
    ),
    "kandinsky 5": Pipeline(
        "Kandinsky5T2VPipeline",
        "Kandinsky5Transformer3DModel",
        FLOW,
        text=("prompt_embeds_qwen", 24),
        arguments=lambda video: (
            pooled("prompt_embeds_clip")(video)
            | {"prompt_cu_seqlens": torch.tensor([0, video.text_tokens], dtype=torch.int32)}
        ),
    ),
}
NOT_INPUTS = {
    *("attention_kwargs", "return_dict"),
    "scale_factor",  # Kandinsky 5 stretches positions by it, which shapes nothing
    *("video_coords", "audio_coords"),  # LTX-2 works them out where it is given none
    *("isolate_modalities", "use_cross_timestep"),  # of LTX-2, switched off
    "padding_mask",  # the tiny Cosmos reads none
}


def shapes(value: Any) -> Any:
    """What a value is but for its numbers: shapes and dtypes of tensors, in lists of any depth, and all else."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, (list, tuple)):
        return [shapes(inner) for inner in value]
    return value


@pytest.mark.parametrize("name", PIPELINES)
def test_inputs_are_those_of_the_pipeline(name: str) -> None:
    pipeline, latents = PIPELINES[name], (3, 12, 8)
    row = row_of(pipeline.model)
    model = model_for(pipeline.model, latents[0], **pipeline.changes).to(torch.bfloat16)
    video = small(row, model.config, latents, dtype=torch.bfloat16)
    if name == "wan 5b":
        video = dataclasses.replace(video, compression=OF_WAN)
    ours = row.video_inputs(model.config, video)
    theirs = pipeline.call(model, video)
    for arguments in (ours, theirs):
        for argument in NOT_INPUTS & arguments.keys():
            del arguments[argument]
    assert {key: shapes(value) for key, value in ours.items()} == {key: shapes(value) for key, value in theirs.items()}


@pytest.mark.parametrize(
    ("name", "config", "sizes", "message"),
    [
        ("WanTransformer3DModel", {}, {"frames": 80}, r"frames 80 is not a multiple of 4, plus 1.* Use 77 or 81\."),
        ("WanTransformer3DModel", {"patch_size": (2, 2, 2)}, {"frames": 81}, r"of 8, plus 5.* Use 77 or 85\."),
        ("WanTransformer3DModel", {"patch_size": (2, 2, 2)}, {"frames": 3}, r"Use 5\."),
        ("WanTransformer3DModel", {}, {"width": 4}, r"width 4 is not a multiple of 16.* Use 16\."),
        ("WanTransformer3DModel:i2v", {}, {"text_tokens": 226}, "Use 512"),
        ("CosmosTransformer3DModel", {"extra_pos_embed_type": None}, {}, "only Cosmos 1"),
        ("Kandinsky5Transformer3DModel", {"attention_type": "nabla"}, {}, "'nabla'"),
    ],
)
def test_what_a_model_refuses(name: str, config: dict[str, Any], sizes: dict[str, int], message: str) -> None:
    row, known = row_of(name), dict(model_for(name, 2).config)
    video = small(row, known, (2, 8, 8))
    assert row.video_inputs(known, video)
    with pytest.raises(FastacError, match=message):
        row.video_inputs(known | config, dataclasses.replace(video, **sizes))
