"""What a run leaves behind: a folder with checkpoints, metrics, pictures and weights.

Two rules keep an earlier run whole. A file or folder gets its name only when it is complete (it is written under a
`.partial-` name next to it). Folders, and metrics that a resumed run does not go on from, are moved to
`<name>.previous-<n>` when something new takes their name, never deleted.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from einops import rearrange
from matplotlib.figure import Figure
from PIL import Image, ImageDraw

from train_wan_data import InputError

SETTINGS = "settings.json"
METRICS = "metrics.jsonl"
CHECKPOINT = "checkpoint.json"
CHECKPOINT_NAME = re.compile(r"checkpoint-(\d+)")


def free_output(base: Path) -> Path:
    """`base`, or the first of base-2, base-3, ... that is not there yet."""
    path, number = base, 1
    while path.exists():
        number += 1
        path = base.with_name(f"{base.name}-{number}")
    return path


def check_output(output: Path, resume: bool, overwrite: bool) -> None:
    """Raise InputError when a run cannot be written to `output` without spoiling what is there."""
    if output.exists() and not output.is_dir():
        raise InputError(f"--output {output}: is a file, not a folder")
    holds_run = (output / SETTINGS).is_file()
    empty = not output.exists() or not any(output.iterdir())
    if resume and not holds_run:
        raise InputError(f"--resume: no earlier run in {output} (there is no {SETTINGS})")
    if not empty and not holds_run:
        raise InputError(f"--output {output}: holds files that are no run of this script; name another folder")
    if holds_run and not resume and not overwrite:
        raise InputError(
            f"--output {output}: holds an earlier run; continue it with --resume, move it aside with --overwrite, "
            f"or name another folder"
        )
    parent = next(path for path in (output, *output.parents) if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(f"--output {output}: no permission to write in {parent}")


def move_aside(path: Path) -> Path:
    """Rename what is at `path` to the first free `<name>.previous-<n>`."""
    number = 1
    while (aside := path.with_name(f"{path.name}.previous-{number}")).exists():
        number += 1
    path.rename(aside)
    return aside


def partial_of(path: Path) -> Path:
    """The name of a file or folder while it is being written."""
    return path.with_name(f".partial-{path.name}")


def put_in_place(path: Path) -> None:
    """Give what was completely written as `partial_of(path)` its name."""
    if path.is_dir():
        move_aside(path)
    partial_of(path).replace(path)


def remove(path: Path) -> None:
    """Delete what a killed run left unfinished under a partial name."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def write(path: Path, fill: Callable[[Path], object]) -> None:
    """Have `fill` write a file or folder, and give it its name when it is complete."""
    remove(partial_of(path))
    fill(partial_of(path))
    put_in_place(path)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    write(path, lambda partial: partial.write_text(json.dumps(content, indent=2, default=str) + "\n"))


def seal_checkpoint(folder: Path, step: int, settings: Mapping[str, Any]) -> None:
    """Note a checkpoint's step, the settings it belongs to, its files' SHA-256 and a seal, for `open_checkpoint`."""
    _make_key()
    content = {
        "step": step,
        "settings": dict(settings),
        "files": {name: _sha256(folder / name) for name in _files(folder)},
    }
    write_json(folder / CHECKPOINT, content | {"seal": _seal(content)})


def find_checkpoint(output: Path, name: str) -> Path:
    """The checkpoint called `name` in a run's folder; "latest" is the one with the most steps."""
    steps = {
        int(match[1]): folder
        for folder in output.iterdir()
        if folder.is_dir() and (match := CHECKPOINT_NAME.fullmatch(folder.name))
    }
    if not steps:
        raise InputError(f"--resume: no checkpoint in {output}; start again with --overwrite")
    known = {folder.name: folder for folder in steps.values()}
    if name != "latest" and name not in known:
        raise InputError(f"--resume {name}: not in {output}, which has {', '.join(sorted(known))}")
    return steps[max(steps)] if name == "latest" else known[name]


def open_checkpoint(folder: Path, settings: Mapping[str, Any]) -> int:
    """The step of a checkpoint. Raises InputError for one that is damaged, of other settings, or not sealed here."""
    try:
        content = json.loads((folder / CHECKPOINT).read_text())
        step, made_with, digests = int(content["step"]), dict(content["settings"]), dict(content["files"])
        seal = str(content.pop("seal"))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise InputError(f"--resume: {folder} is broken: no readable {CHECKPOINT}{_earlier(folder)}") from error
    if not _key_file().is_file() or not hmac.compare_digest(seal.encode(), _seal(content).encode()):
        raise InputError(
            f"--resume: {folder} is not sealed with {_key_file()}, so another machine, user or hand wrote it, and "
            f"loading it may run code that is in it. If you trust it, bring the key of the machine that wrote it"
        )
    for name in sorted({*digests, *_files(folder)} - {CHECKPOINT}):
        if name not in digests or not (folder / name).is_file() or _sha256(folder / name) != digests[name]:
            raise InputError(f"--resume: {folder} is broken: {name} is not what was saved{_earlier(folder)}")
    different = [name for name in settings if made_with.get(name) != settings[name]]
    if different:
        changes = ", ".join(f"{name} was {made_with.get(name)} and is {settings[name]}" for name in different)
        raise InputError(f"--resume: {folder} belongs to another training: {changes}")
    return step


def _earlier(folder: Path) -> str:
    names = [f.name for f in folder.parent.iterdir() if f != folder and CHECKPOINT_NAME.fullmatch(f.name)]
    return f" (there is also {', '.join(sorted(names))}: --resume NAME)" if names else ""


def _files(folder: Path) -> list[str]:
    return sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())


def _seal(content: Mapping[str, Any]) -> str:
    """Proof that a checkpoint was written by who holds the key. torch and accelerate unpickle what is in one."""
    written = json.dumps(content, sort_keys=True, default=str)
    return hmac.new(_key_file().read_bytes(), written.encode(), "sha256").hexdigest()


def _make_key() -> None:
    file = _key_file()
    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=file.parent) as new, contextlib.suppress(FileExistsError):
        new.write(secrets.token_bytes(32))
        new.flush()
        os.link(new.name, file)  # whole, for its owner alone, and never in the place of another


def _key_file() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "train_wan" / "key"


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            found.update(part)
    return found.hexdigest()


def read_metrics(path: Path, last_step: int) -> list[dict[str, Any]]:
    """The lines of steps 1 .. last_step of a metrics file. A line that a killed run left half written is not one."""
    metrics = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if entry["step"] <= last_step:
            metrics.append(entry)
    return metrics


def restart_metrics(path: Path, metrics: Sequence[Mapping[str, Any]]) -> None:
    """Let a metrics file end where a resumed run begins. What it had beyond that is kept aside."""
    text = "".join(json.dumps(entry) + "\n" for entry in metrics)
    if path.is_file() and path.read_text() != text:
        move_aside(path)
    write(path, lambda partial: partial.write_text(text))


def append_metrics(path: Path, entry: Mapping[str, Any]) -> None:
    """Add the line of one optimizer step."""
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def plot_loss(path: Path, metrics: Sequence[Mapping[str, Any]], title: str) -> None:
    """Write the loss of every step and its running mean as a PNG."""
    steps = np.array([entry["step"] for entry in metrics])
    losses = np.array([entry["loss"] for entry in metrics])
    window = max(1, len(losses) // 15)
    means = np.array([losses[max(0, end - window) : end].mean() for end in range(1, len(losses) + 1)])
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=1, label="each step")
    axes.plot(steps, means, color="tab:blue", linewidth=2, label=f"mean of {window} steps")
    axes.set(xlabel="optimizer step", ylabel="rectified flow loss", title=title, ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    write(path, lambda partial: figure.savefig(partial, format="png"))


def write_comparison(
    path: Path, originals: np.ndarray[Any, Any], samples: np.ndarray[Any, Any], frame_rate: float
) -> None:
    """Write clips and their samples as one GIF: a column per clip, the original above what the model made of noise.

    originals, samples: uint8 of shape (clips, frames, height, width, 3).
    """
    columns, frames, height, width, _ = originals.shape
    # One palette for all frames: a palette per frame flickers.
    mosaic = rearrange(np.stack([originals, samples]), "s b t h w c -> (s t h) (b w) c")
    palette = Image.fromarray(mosaic).quantize(256)
    scale = max(1, round(192 / width))
    gap, label = 6, 16
    row = label + height * scale + gap
    images = []
    for number in range(frames):
        sheet = Image.new("RGB", (gap + columns * (width * scale + gap), 2 * row), "white")
        draw = ImageDraw.Draw(sheet)
        for line, (name, clips) in enumerate((("original", originals), ("sampled from noise", samples))):
            draw.text((gap, line * row + 2), name, fill="black")
            for column in range(columns):
                picture = Image.fromarray(clips[column, number])
                picture = picture.resize((width * scale, height * scale), Image.Resampling.BICUBIC)
                sheet.paste(picture, (gap + column * (width * scale + gap), line * row + label))
        images.append(sheet.quantize(palette=palette))
    write(
        path,
        lambda partial: images[0].save(
            partial, format="GIF", save_all=True, append_images=images[1:], duration=round(1000 / frame_rate), loop=0
        ),
    )
