"""Tiny models with random weights, one for each way to use a class of the catalogue: a configuration and inputs."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from importlib.metadata import version
from typing import Any

import pytest
import torch

from fastac.models.published import cast, fill_zeros

NAMES_BY_SIZE = {
    1: "LFE_depth LFE_num_id_token LFE_num_scale latent_patch_size mmdit_layers num_decoder_layers num_key_value_heads "
    "num_kv_heads num_layerwise_text_blocks num_refiner_text_blocks num_text_blocks",
    2: "LFE_num_heads LFE_num_querie audio_num_attention_heads cross_attn_num_heads face_encoder_num_heads "
    "full_chunk_limit inject_face_latents_blocks latent_channel num_attention_heads num_cross_attention_heads "
    "num_embodiment_domains num_heads num_hidden_layers num_layers num_single_layers num_text_layers num_visual_blocks "
    "patch_latent_dim rope_freq_dim softmax_every_n text_num_attention_heads text_num_key_value_heads time_embed_dim "
    "video_length",
    3: "action_dim motion_dim sound_dim",
    4: "LFE_dim_head LFE_vit_dim adaln_lora_dim audio_attention_head_dim audio_in_channels audio_out_channels "
    "cross_attn_dim_head in_audio_dim in_channels in_visual_dim latent_channels motion_style_dim out_audio_dim "
    "out_channels out_dim out_visual_dim vocab_size",
    6: "LFE_id_dim chunk_plucker_channels face_encoder_hidden_dim head_dim motion_encoder_dim",
    8: "audio_cross_attention_dim in_text_dim2 max_text_seq_length motion_encoder_size multiple_of "
    "pooled_projection_dim sample_size text_len",
    10: "LFE_output_dim",
    12: "attention_head_dim cap_feat_dim cross_attention_head_dim image_embed_dim in_dim text_embed_dim_t5 "
    "vace_in_channels",
    16: "caption_channels cross_attention_dim dim image_proj_dim linear_head_dim model_dim text_dim text_embed_dim "
    "text_hidden_dim text_intermediate_size time_dim timestep_embed_dim",
    24: "hidden_size in_text_dim intermediate_size time_embed_hidden_dim",
    32: "ff_dim ffn_dim freq_dim rope_max_seq_len",
    1000: "num_embeds_ada_norm",
}
SIZES = {name: size for size, names in NAMES_BY_SIZE.items() for name in names.split()}
"""Parameter of a class -> its size, in every class that has it."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tiny:
    """name: of a class, and behind a colon the way to use it where there are several.

    inputs: makes those of one call, from the standard normal distribution. more: of the configuration, beside SIZES or
    in their place. flex: its self-attention is flex_attention, which has no backward on a CPU:
    tests/backends/flex_on_cpu.py adds one.
    """

    name: str
    inputs: Callable[[], dict[str, Any]]
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    flex: bool = False

    @property
    def kind(self) -> Any:
        """The class, or None where this diffusers lacks it."""
        import diffusers  # not before a test has put kernels where diffusers looks for them

        return getattr(diffusers, self.name.partition(":")[0], None)

    @functools.cached_property
    def config(self) -> dict[str, Any]:
        """Keyword arguments of the class."""
        parameters = inspect.signature(self.kind).parameters
        return {name: size for name, size in SIZES.items() if name in parameters} | self.more


TIMES = re.compile("timestep|guidance")
PLACES = re.compile("mask|ind(ic|ex)es|position|rotary|camera")
"""Arguments whose names have one of these words say how features are to be read, and are none themselves."""


def tiny_model(
    name: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: Any
) -> tuple[Any, dict[str, Any]]:
    """A tiny model in training mode, and its keyword arguments for one call. Skips where diffusers lacks the class.

    name: of TINY or IMAGES. changes: of its configuration.

    Parameters that begin as zeros get small values, since every gradient behind them would be zero. What the class
    keeps in float32 stays so. Floating inputs, alone or in lists, tuples and dicts, are features, which get the dtype
    and require grad, but for those of arguments that TIMES names, which get the dtype alone, and of those that PLACES
    names, which stay as they are: a mask that requires grad would decompose attention.
    """
    tiny = (TINY | IMAGES)[name]
    if tiny.kind is None:  # what the catalogue has must be there, and more: test_parity
        pytest.skip(f"diffusers {version('diffusers')} has no {name}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tiny.kind(**{**tiny.config, **changes}).train()
        fill_zeros(model)
        inputs = tiny.inputs()
    for argument, value in inputs.items():
        is_place, is_time = (words.search(argument) is not None for words in (PLACES, TIMES))
        inputs[argument] = _typed(value, None if is_place else dtype, requires_grad=not is_place and not is_time)
    cast(model, dtype)
    return model, inputs


def _typed(value: Any, dtype: torch.dtype | None, requires_grad: bool) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(dtype).requires_grad_(requires_grad) if dtype and value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: _typed(item, dtype, requires_grad) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_typed(item, dtype, requires_grad) for item in value)
    return value


def _video(size: tuple[int, ...] = (1, 4, 2, 8, 8), text: tuple[int, int] = (12, 16), **more: Any) -> dict[str, Any]:
    """What most models take: latents, a timestep for each of them, and text: how many tokens, and how wide."""
    return {
        "hidden_states": torch.randn(size),
        "timestep": torch.tensor([500, 300][: size[0]]),
        "encoder_hidden_states": torch.randn(size[0], *text),
        **more,
    }


def _valid(tokens: int, *valid: int) -> torch.Tensor:
    """The mask of texts, of which so many tokens are no padding."""
    return torch.arange(tokens) < torch.tensor(valid)[:, None]


def _hunyuan_video(size: tuple[int, ...] = (1, 4, 2, 8, 8), **more: Any) -> dict[str, Any]:
    mask, guidance = _valid(12, 8), torch.tensor([6000])
    pooled = torch.randn(1, 8)
    return _video(size, encoder_attention_mask=mask, pooled_projections=pooled, guidance=guidance, **more)


def _cogvideox_video(**more: Any) -> dict[str, Any]:
    return _video((2, 2, 4, 8, 8), (8, 8), **more)


def _wan_animate_reference() -> dict[str, Any]:
    from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVCache

    return {
        "hidden_states": [torch.randn(4, 2, 8, 8)],
        "timestep": torch.tensor([1]),
        "encoder_hidden_states": [torch.randn(6, 16)],
        "condition_latents": [torch.randn(8, 2, 8, 8)],
        "encoder_hidden_states_image": torch.randn(1, 4, 1280),
        "kv_cache": WanAnimate2KVCache(2),
        "kv_cache_mode": "extract",
        "seq_len": 32,
        "offset_grid_sizes": torch.tensor([[2, 4, 4]]),
    }


def _cogvideox_rotary() -> dict[str, Any]:
    angles = torch.arange(16.0).unsqueeze(1) / torch.tensor([1, 1, 10, 10, 100, 100, 1000, 1000])
    return _cogvideox_video(image_rotary_emb=(angles.cos(), angles.sin()))


def _cosmos_omni() -> dict[str, Any]:
    places = torch.arange(24)
    text, *others = places.split([4, 16, 2, 2])
    inputs = {
        "input_ids": text,
        "text_indexes": text,
        "position_ids": places.expand(3, -1),
        "und_len": len(text),
        "sequence_length": len(places),
        "action_domain_ids": [torch.tensor(1)],
    }
    tokens = {"vision": torch.randn(1, 2, 1, 4, 4), "sound": torch.randn(3, 2), "action": torch.randn(2, 3)}
    shapes = ((1, 4, 4), (2, 1, 1), (2, 1, 1))
    for name, shape, indexes in zip(tokens, shapes, others, strict=True):
        inputs |= {
            f"{name}_tokens": [tokens[name]],
            f"{name}_token_shapes": [shape],
            f"{name}_sequence_indexes": indexes,
            f"{name}_mse_loss_indexes": indexes,
            f"{name}_timesteps": torch.full((len(indexes),), 500),
            f"{name}_noisy_frame_indexes": [torch.arange(shape[0])],
        }
    return inputs


def _sana_camera() -> dict[str, Any]:
    frames = 2
    pose = torch.eye(4).flatten().expand(1, frames, 16) + 0.1 * torch.randn(1, frames, 16)
    intrinsics = torch.tensor([4.0, 4.0, 2.0, 2.0]).expand(1, frames, 4)
    return {
        "hidden_states": torch.randn(1, 4, frames, 4, 4),
        "timestep": torch.full((1, 1, frames), 500),
        "encoder_hidden_states": torch.randn(1, 1, 12, 16),
        "encoder_attention_mask": _valid(12, 8),
        "camera_conditions": torch.cat([pose, intrinsics], dim=-1),
        "chunk_plucker": torch.randn(1, 6, frames, 4, 4),
    }


MINIMAX_TEXT, MINIMAX_AUDIO, MINIMAX_VIDEO = 4, 6, 16


def _minimax_audio_and_video() -> dict[str, Any]:
    rows = torch.arange(MINIMAX_TEXT + MINIMAX_AUDIO + MINIMAX_VIDEO)
    text, audio, video = rows.split([MINIMAX_TEXT, MINIMAX_AUDIO, MINIMAX_VIDEO])
    return {
        "hidden_states": torch.randn(2, MINIMAX_VIDEO, 16),
        "audio_hidden_states": torch.randn(2, MINIMAX_AUDIO, 6),
        "encoder_hidden_states": torch.randn(2, MINIMAX_TEXT, 8),
        "timestep": torch.tensor([0.75, 0.25]),
        "timestep_indices": ((rows >= MINIMAX_TEXT) & (rows < MINIMAX_TEXT + MINIMAX_AUDIO)).long(),
        "token_tags": torch.tensor([1] * MINIMAX_TEXT + [2] * MINIMAX_AUDIO + [0] * MINIMAX_VIDEO),
        "position_ids": torch.stack([rows, rows % 4, rows % 2], dim=-1),
        "video_indices": video,
        "audio_indices": audio,
        "text_indices": text,
    }


HEADS_OF_8 = {"attention_head_dim": 8}
HUNYUAN = HEADS_OF_8 | {"num_refiner_layers": 1, "rope_axes_dim": (2, 2, 4)}
COGVIDEOX = HEADS_OF_8 | {"text_embed_dim": 8, "sample_width": 8, "sample_height": 8, "sample_frames": 5}
COSMOS = {
    "max_size": (4, 32, 32),
    "concat_padding_mask": False,  # it is resized by torchvision, which need not be there
}
KANDINSKY = {"axes_dims": (4, 2, 2)}

VIDEOS = (
    Tiny("WanTransformer3DModel", lambda: _video((1, 4, 2, 16, 16))),
    Tiny(
        "WanTransformer3DModel:i2v",
        lambda: _video(text=(512, 16), encoder_hidden_states_image=torch.randn(1, 5, 16)),
        {"image_dim": 16, "added_kv_proj_dim": 24},
    ),
    Tiny(
        "WanVACETransformer3DModel",
        lambda: _video(control_hidden_states=torch.randn(1, 12, 2, 8, 8)),
        {"num_layers": 4, "vace_layers": [0, 2]},
    ),
    Tiny("ChronoEditTransformer3DModel", _video),
    Tiny("SkyReelsV2Transformer3DModel", _video),
    Tiny(
        "SkyReelsV2Transformer3DModel:diffusion_forcing",
        lambda: _video(
            (1, 4, 4, 8, 8), timestep=torch.tensor([[500, 500, 300, 300]]), enable_diffusion_forcing=True, fps=[1]
        ),
        {"num_frame_per_block": 2, "inject_sample_info": True},
    ),
    Tiny(
        "WanAnimateTransformer3DModel",
        lambda: _video(
            (1, 12, 3, 8, 8),
            (8, 16),
            encoder_hidden_states_image=torch.randn(1, 4, 16),
            pose_hidden_states=torch.randn(1, 4, 2, 8, 8),
            face_pixel_values=torch.randn(1, 3, 5, 8, 8),
        ),
        {"in_channels": 12, "image_dim": 16, "motion_encoder_channel_sizes": {"4": 4, "8": 4}},
    ),
    Tiny("WanAnimate2Transformer3DModel", _wan_animate_reference),
    Tiny(
        "AnyFlowTransformer3DModel",
        lambda: _video((1, 2, 4, 8, 8), timestep=torch.full((1, 2), 500.0), r_timestep=torch.full((1, 2), 250.0)),
    ),
    Tiny(
        "AnyFlowFARTransformer3DModel",
        lambda: _video(
            (1, 3, 4, 8, 8),
            timestep=torch.full((1, 3), 500.0),
            r_timestep=torch.full((1, 3), 250.0),
            chunk_partition=[1, 1, 1],
            clean_hidden_states=torch.randn(1, 2, 4, 8, 8),
            clean_timestep=torch.zeros(1, 2),
        ),
        flex=True,
    ),
    Tiny(
        "HeliosTransformer3DModel",
        lambda: _video(
            indices_hidden_states=torch.arange(7, 9)[None],
            indices_latents_history_short=torch.arange(6, 7)[None],
            indices_latents_history_mid=torch.arange(4, 6)[None],
            indices_latents_history_long=torch.arange(4)[None],
            latents_history_short=torch.randn(1, 4, 1, 8, 8),
            latents_history_mid=torch.randn(1, 4, 2, 8, 8),
            latents_history_long=torch.randn(1, 4, 4, 8, 8),
        ),
        {"rope_dim": (4, 4, 4)},
    ),
    Tiny(
        "LTXVideoTransformer3DModel",
        lambda: _video(
            (2, 2 * 8 * 8, 4), (16, 16), encoder_attention_mask=_valid(16, 12, 12), num_frames=2, height=8, width=8
        ),
        HEADS_OF_8,
    ),
    Tiny(
        "LTX2VideoTransformer3DModel",
        lambda: _video(
            (2, 2 * 4 * 4, 4),
            (16, 16),
            encoder_attention_mask=_valid(16, 12, 8),
            audio_hidden_states=torch.randn(2, 9, 4),
            audio_encoder_hidden_states=torch.randn(2, 16, 16),
            audio_encoder_attention_mask=_valid(16, 12, 8),
            num_frames=2,
            height=4,
            width=4,
            audio_num_frames=9,
        ),
        HEADS_OF_8,
    ),
    Tiny("HunyuanVideoTransformer3DModel", _hunyuan_video, HUNYUAN),
    Tiny(
        "HunyuanVideoTransformer3DModel:token_replace",
        _hunyuan_video,
        HUNYUAN | {"image_condition_type": "token_replace"},
    ),
    Tiny(
        "HunyuanVideo15Transformer3DModel",
        lambda: _video(
            (1, 4, 2, 4, 4),
            (6, 16),
            timestep=torch.tensor([500.0]),
            encoder_attention_mask=_valid(6, 4),
            encoder_hidden_states_2=torch.randn(1, 4, 10),
            encoder_attention_mask_2=_valid(4, 3),
            image_embeds=torch.randn(1, 3, 12),
        ),
        HUNYUAN | {"text_embed_2_dim": 10},
    ),
    Tiny(
        "HunyuanVideoFramepackTransformer3DModel",
        lambda: _hunyuan_video(
            (1, 4, 3, 4, 4),
            image_embeds=torch.randn(1, 4, 16),
            indices_latents=torch.arange(11, 14),
            latents_clean=torch.randn(1, 4, 1, 4, 4),
            indices_latents_clean=torch.arange(1),
            latents_history_2x=torch.randn(1, 4, 2, 4, 4),
            indices_latents_history_2x=torch.arange(9, 11),
            latents_history_4x=torch.randn(1, 4, 8, 4, 4),
            indices_latents_history_4x=torch.arange(1, 9),
        ),
        HUNYUAN | {"has_image_proj": True, "has_clean_x_embedder": True},
    ),
    Tiny("CogVideoXTransformer3DModel", _cogvideox_video, COGVIDEOX),
    Tiny(
        "CogVideoXTransformer3DModel:1.5",
        _cogvideox_rotary,
        COGVIDEOX | {"patch_size_t": 2, "patch_bias": False, "use_rotary_positional_embeddings": True},
    ),
    Tiny(
        "ConsisIDTransformer3DModel",
        lambda: _cogvideox_video(id_cond=torch.randn(2, 6), id_vit_hidden=[torch.randn(2, 3, 4)]),
        COGVIDEOX | {"is_train_face": True},
    ),
    Tiny(
        "MochiTransformer3DModel",
        lambda: _video((2, 4, 2, 8, 8), (16, 16), encoder_attention_mask=_valid(16, 12, 8)),
        HEADS_OF_8 | {"pooled_projection_dim": 16, "time_embed_dim": 4},
    ),
    Tiny(
        "AllegroTransformer3DModel",
        lambda: _video((2, 4, 2, 8, 8), (16, 8), encoder_attention_mask=_valid(16, 12, 8)),
        HEADS_OF_8 | {"caption_channels": 8},
    ),
    Tiny(
        "LatteTransformer3DModel",
        lambda: _video((1, 4, 2, 16, 16), (8, 8)),
        {
            "attention_head_dim": 4,
            "out_channels": 8,
            "cross_attention_dim": 8,
            "attention_bias": True,
            "sample_size": 16,
            "patch_size": 2,
            "activation_fn": "gelu-approximate",
            "norm_type": "ada_norm_single",
            "norm_elementwise_affine": False,
            "caption_channels": 8,
        },
    ),
    Tiny(
        "EasyAnimateTransformer3DModel",
        lambda: _video((2, 4, 2, 8, 8), (8, 16), encoder_hidden_states_t5=torch.randn(2, 4, 12)),
        {"attention_head_dim": 16, "patch_size": 2, "time_embed_dim": 8},
    ),
    Tiny("CosmosTransformer3DModel", lambda: _video(attention_mask=_valid(12, 8), fps=30), COSMOS),
    Tiny(
        "CosmosTransformer3DModel:2.5",
        lambda: _video(
            timestep=torch.full((1, 1, 2, 1, 1), 500),
            encoder_hidden_states=(torch.randn(1, 12, 20), torch.randn(1, 4, 10)),
            attention_mask=None,
            fps=30,
        ),
        COSMOS
        | {
            "extra_pos_embed_type": None,
            "use_crossattn_projection": True,
            "crossattn_proj_in_channels": 20,
            "encoder_hidden_states_channels": 16,
            "img_context_dim_in": 10,
            "img_context_dim_out": 24,
        },
    ),
    Tiny(
        "Cosmos3OmniTransformer",
        _cosmos_omni,
        {"hidden_size": 12, "action_gen": True, "sound_gen": True, "rope_axes_dim": (1, 1, 1)},
    ),
    Tiny(
        "SanaVideoTransformer3DModel", lambda: _video(encoder_attention_mask=_valid(12, 8)), {"cross_attention_dim": 24}
    ),
    Tiny("SanaWMTransformer3DModel", _sana_camera, {"hidden_size": 32}),
    Tiny(
        "Kandinsky5Transformer3DModel",
        lambda: _video(
            (1, 2, 8, 8, 4),
            (6, 24),
            timestep=torch.tensor([500.0]),
            pooled_projections=torch.randn(1, 8),
            visual_rope_pos=[torch.arange(2), torch.arange(4), torch.arange(4)],
            text_rope_pos=torch.arange(6),
        ),
        KANDINSKY,
    ),
    Tiny(
        "Kandinsky6Transformer3DModel",
        lambda: _video(
            (1, 2, 8, 8, 9),
            (6, 24),
            timestep=torch.tensor([500.0]),
            pooled_projections=torch.randn(1, 8),
            audio_hidden_states=torch.randn(1, 5, 4),
            encoder_attention_mask=_valid(6, 4),
        ),
        KANDINSKY,
    ),
    Tiny(
        "Kandinsky6SRTransformer3DModel",
        lambda: {"hidden_states": torch.randn(1, 1, 16, 16, 9), "timestep": torch.tensor([500.0])},
        KANDINSKY,
        flex=True,
    ),
    Tiny(
        "MotifVideoTransformer3DModel",
        lambda: _video((1, 9, 2, 8, 8), encoder_attention_mask=_valid(12, 8), image_embeds=torch.randn(1, 3, 10)),
        {
            "in_channels": 9,
            "image_embed_dim": 10,
            "rope_axes_dim": (4, 4, 4),
            "enable_text_cross_attention_dual": True,
            "enable_text_cross_attention_single": True,
        },
    ),
    Tiny(
        "MiniMaxH3Transformer3DModel",
        _minimax_audio_and_video,
        {"attention_head_dim": 16, "audio_in_channels": 6, "text_dim": 8, "freq_dim": 8, "time_embed_dim": 16},
    ),
)
TINY = {tiny.name: tiny for tiny in VIDEOS}


def _image(**more: Any) -> dict[str, Any]:
    return _video((1, 4, 8, 8), (6, 12), **more)


def _krea() -> dict[str, Any]:
    """Six tokens of text and an image of 4 x 4, with their frames, rows and columns."""
    rows = torch.arange(16)
    places = torch.stack([torch.zeros(16), rows // 4, rows % 4], -1)
    return {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 6, 2, 16),
        "timestep": torch.tensor([0.5]),
        "position_ids": torch.cat([torch.zeros(6, 3), places]),
    }


PICTURES = (
    Tiny("Krea2Transformer2DModel", _krea, HEADS_OF_8 | {"intermediate_size": 16, "axes_dims_rope": (4, 2, 2)}),
    Tiny(
        "HunyuanImageTransformer2DModel",
        lambda: _image(timestep=torch.tensor([500.0]), encoder_attention_mask=_valid(6, 4)),
        HUNYUAN | {"num_layers": 1, "text_embed_dim": 12, "rope_axes_dim": (4, 4)},
    ),
    Tiny(
        "Lumina2Transformer2DModel",
        lambda: _image(timestep=torch.tensor([0.5]), encoder_attention_mask=_valid(6, 6)),
        {"num_refiner_layers": 1, "axes_dim_rope": (4, 4, 4), "axes_lens": (16, 16, 16)},
    ),
)
"""Of the classes that have a row, those for images."""

IMAGES = {tiny.name: tiny for tiny in PICTURES}
