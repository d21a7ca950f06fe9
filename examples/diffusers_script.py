"""Train a LoRA on a video transformer, in the shape of diffusers' own training scripts and without fastac.

    python examples/diffusers_script.py --gradient_checkpointing
    accelerate launch examples/diffusers_script.py --pretrained_model_name_or_path Wan-AI/Wan2.1-T2V-1.3B-Diffusers ...

This is the script before the change: diffusers_script.md shows the line that brings fastac in. Left to itself it takes
a tiny transformer with random weights, and its data are random latents and random text embeddings, as an encoder's
cache would hold them: it trains nothing of use, in seconds, on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import WanTransformer3DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import cast_training_params
from peft import LoraConfig
from torch.utils.data import DataLoader, Dataset

TINY = {
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 32,
    "ffn_dim": 128,
    "num_layers": 2,
}
WEIGHT_DTYPES = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a LoRA on a Wan transformer.")
    add = parser.add_argument
    add("--pretrained_model_name_or_path", help="with the folder transformer/ (default: a tiny one, random weights)")
    add("--output_dir", type=Path, default=Path("runs/diffusers_script"))
    add("--seed", type=int, default=0)
    add("--rank", type=int, default=8)
    add("--lora_alpha", type=int, default=8)
    add("--lora_dropout", type=float, default=0.1)
    add("--num_clips", type=int, default=16, help="random latents to train on")
    add("--frames", type=int, default=5, help="of the latents")
    add("--height", type=int, default=16, help="of the latents")
    add("--width", type=int, default=16, help="of the latents")
    add("--text_tokens", type=int, default=32)
    add("--train_batch_size", type=int, default=1)
    add("--gradient_accumulation_steps", type=int, default=2)
    add("--gradient_checkpointing", action="store_true")
    add("--max_train_steps", type=int, default=4)
    add("--learning_rate", type=float, default=1e-3)
    add("--lr_scheduler", default="constant_with_warmup")
    add("--lr_warmup_steps", type=int, default=2)
    add("--max_grad_norm", type=float, default=1.0)
    add("--mixed_precision", choices=WEIGHT_DTYPES, default="no")
    return parser.parse_args()


class RandomLatents(Dataset):
    """Clips as a VAE and a text encoder would leave them: (channels, frames, height, width) and (tokens, text_dim)."""

    def __init__(self, args: argparse.Namespace, transformer: WanTransformer3DModel) -> None:
        generator = torch.Generator().manual_seed(args.seed)
        video = (transformer.config.in_channels, args.frames, args.height, args.width)
        text = (args.text_tokens, transformer.config.text_dim)
        self.latents = torch.randn(args.num_clips, *video, generator=generator)
        self.prompt_embeds = torch.randn(args.num_clips, *text, generator=generator)

    def __len__(self) -> int:
        return len(self.latents)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"latents": self.latents[index], "prompt_embeds": self.prompt_embeds[index]}


def main(args: argparse.Namespace) -> None:
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps, mixed_precision=args.mixed_precision
    )
    set_seed(args.seed)

    weight_dtype = WEIGHT_DTYPES[accelerator.mixed_precision]
    if args.pretrained_model_name_or_path is None:
        transformer = WanTransformer3DModel(**TINY)
    else:
        transformer = WanTransformer3DModel.from_pretrained(
            args.pretrained_model_name_or_path, subfolder="transformer", torch_dtype=weight_dtype
        )
    transformer.requires_grad_(False)
    transformer.to(accelerator.device)

    if args.gradient_checkpointing:
        transformer.enable_gradient_checkpointing()

    transformer.add_adapter(
        LoraConfig(
            r=args.rank,
            lora_alpha=args.lora_alpha,
            lora_dropout=args.lora_dropout,
            target_modules=["to_q", "to_k", "to_v", "to_out.0"],
        )
    )
    cast_training_params(transformer, dtype=torch.float32)
    lora_parameters = [parameter for parameter in transformer.parameters() if parameter.requires_grad]

    optimizer = torch.optim.AdamW(lora_parameters, lr=args.learning_rate)
    dataset = RandomLatents(args, transformer)
    dataloader = DataLoader(dataset, batch_size=args.train_batch_size, shuffle=True)
    lr_scheduler = get_scheduler(
        args.lr_scheduler,
        optimizer,
        num_warmup_steps=args.lr_warmup_steps * accelerator.num_processes,
        num_training_steps=args.max_train_steps * accelerator.num_processes,
    )
    transformer, optimizer, dataloader, lr_scheduler = accelerator.prepare(
        transformer, optimizer, dataloader, lr_scheduler
    )

    global_step = 0
    losses: list[float] = []
    transformer.train()
    while global_step < args.max_train_steps:
        for batch in dataloader:
            with accelerator.accumulate(transformer):
                latents = batch["latents"].to(weight_dtype)
                noise = torch.randn_like(latents)
                sigmas = torch.rand(len(latents), device=latents.device)
                share = sigmas.view(-1, 1, 1, 1, 1).to(weight_dtype)
                (model_pred,) = transformer(
                    hidden_states=(1 - share) * latents + share * noise,
                    timestep=sigmas * 1000,
                    encoder_hidden_states=batch["prompt_embeds"].to(weight_dtype),
                    return_dict=False,
                )
                # Flow matching: the velocity from the clip to the noise.
                loss = F.mse_loss(model_pred.float(), (noise - latents).float())
                accelerator.backward(loss)
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(lora_parameters, args.max_grad_norm)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()

            if accelerator.sync_gradients:
                global_step += 1
                accelerator.print(f"step {global_step}: loss {sum(losses) / len(losses)!r}")
                losses.clear()
                if global_step == args.max_train_steps:
                    break

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(transformer).save_lora_adapter(args.output_dir)
        print(f"LoRA weights are in {args.output_dir}")
    accelerator.end_training()


if __name__ == "__main__":
    main(parse_args())
