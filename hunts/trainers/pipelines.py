"""Tiny pipelines with random weights, clips and images on disk, for trainers' own scripts: docs/trainers.md.

python -m hunts.trainers.pipelines FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image

PROMPTS = ("a cat", "a dog", "a tree", "a red car")
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def t5() -> tuple[Any, Any]:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in LETTERS)]
    config = transformers.T5Config(vocab_size=32, d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4)
    tokenizer = transformers.T5Tokenizer(vocab=pieces, extra_ids=0, model_max_length=64)
    return tokenizer, transformers.T5EncoderModel(config).eval()


def clip() -> tuple[Any, Any]:
    pieces = [*LETTERS, *(f"{letter}</w>" for letter in LETTERS), "<|startoftext|>", "<|endoftext|>"]
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 1, "num_attention_heads": 4}
    special = {"bos_token_id": 52, "eos_token_id": 53, "pad_token_id": 53}
    config = transformers.CLIPTextConfig(vocab_size=len(pieces), projection_dim=32, **sizes, **special)
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = transformers.CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77)
    return tokenizer, transformers.CLIPTextModel(config).eval()


def cogvideox() -> Any:
    transformer = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        time_embed_dim=8,
        text_embed_dim=32,
        max_text_seq_length=16,
        patch_size=2,
        sample_width=4,
        sample_height=4,
        sample_frames=9,
        use_rotary_positional_embeddings=True,
    )
    vae = diffusers.AutoencoderKLCogVideoX(
        latent_channels=4, layers_per_block=1, norm_num_groups=2, block_out_channels=(8, 8, 8, 8)
    )
    tokenizer, text_encoder = t5()
    return diffusers.CogVideoXPipeline(tokenizer, text_encoder, vae, transformer, diffusers.CogVideoXDDIMScheduler())


def flux() -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
        num_layers=2,
        num_single_layers=2,
        in_channels=16,
        joint_attention_dim=32,
        pooled_projection_dim=32,
    )
    vae = diffusers.AutoencoderKL(
        latent_channels=4,
        block_out_channels=(8, 8),
        norm_num_groups=2,
        shift_factor=0.1,
        scaling_factor=0.36,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    (tokenizer, text_encoder), (tokenizer_2, text_encoder_2) = clip(), t5()
    return diffusers.FluxPipeline(
        scheduler, vae, text_encoder, tokenizer, text_encoder_2, tokenizer_2, transformer=transformer
    )


def ltx() -> Any:
    transformer = diffusers.LTXVideoTransformer3DModel(
        num_attention_heads=4,
        attention_head_dim=8,
        in_channels=8,
        out_channels=8,
        num_layers=2,
        cross_attention_dim=32,
        caption_channels=32,
    )
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8,
        block_out_channels=(8,) * 4,
        decoder_block_out_channels=(8,) * 4,
        patch_size=1,
        layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5,
        spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
    )
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    tokenizer, text_encoder = t5()
    return diffusers.LTXPipeline(scheduler, vae, text_encoder, tokenizer, transformer)


def write_data(folder: Path) -> None:
    """clips: four of 9 frames of 64 x 64, as CogVideoX's script and finetrainers list them. images: four of 32 x 32."""
    import av  # not where tests are only collected, or run on a GPU: it may be missing there

    random = np.random.default_rng(0)
    clips, images = folder / "clips", folder / "images"
    clips.mkdir(parents=True, exist_ok=True)
    images.mkdir(exist_ok=True)
    for index, prompt in enumerate(PROMPTS):
        (clips / f"{index}.txt").write_text(prompt)
        Image.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(images / f"{index}.png")
        with av.open(str(clips / f"{index}.mp4"), "w") as video:
            stream: Any = video.add_stream("mpeg4", rate=8)
            stream.width = stream.height = 64
            stream.pix_fmt = "yuv420p"
            for _ in range(9):
                pixels = random.integers(0, 256, (64, 64, 3), dtype=np.uint8)
                video.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
            video.mux(stream.encode())
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    (folder / "videos.txt").write_text("\n".join(f"clips/{index}.mp4" for index in range(len(PROMPTS))))


def main(folder: Path) -> None:
    for make in (cogvideox, flux, ltx):
        torch.manual_seed(0)
        make().save_pretrained(folder / make.__name__)
    write_data(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
