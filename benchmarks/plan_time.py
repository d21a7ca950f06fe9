"""How long policy="auto" plans when the first forward of a published model begins, on one core.

The models are on the device "meta", without weights, on the video that they were made for. What is timed is all that
happens before the first block: the model is copied without its data, a step is simulated, and the best policies for a
GPU of 80 GB, a host of 64 GiB and a bus of 25 GB/s are searched; then the same for a second size of inputs, for the
first one again, which is known by then, and once more for that one.

    taskset -c 0 python benchmarks/plan_time.py [--check]
"""

from __future__ import annotations

import dataclasses
import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fastac
from common import finish, parser
from fastac.hook import enabled_on, plan_in_words
from fastac.models import published as configurations
from fastac.planning.video import without_weights

SECONDS = 10.0
"""The most that a plan may take."""

CASES = {"wan2.1-t2v-1.3b": 0, "wan2.1-t2v-14b": 32, "hunyuanvideo": 32, "ltx-video-2b": 0}
"""Model -> the rank of LoRA weights; 0 if all weights are trained."""


def seconds_of(name: str, lora: int) -> dict[str, Any]:
    """Seconds of the first plan, of one for another size, and of a look at known ones; and what was chosen."""
    configuration = configurations.load_configuration(name)
    video = configuration.default
    shorter = dataclasses.replace(video, frames=(video.frames - 1) // 2 // 8 * 8 + 1)
    model = without_weights(configuration, video.dtype, lora)
    auto = fastac.Auto(memory="80GB", host="64GiB", gbps=25)
    fastac.enable(model, auto)
    enabled = enabled_on(model)
    assert enabled is not None
    found: dict[str, Any] = {"model": name, "lora": lora}
    with torch.device("meta"):
        inputs = [configuration.inputs(size) for size in (video, shorter, video, video)]
    for what, arguments in zip(("first", "other size", "known", "same again"), inputs, strict=True):
        start = time.perf_counter()
        enabled.before_forward(model, (), arguments)
        found[what] = time.perf_counter() - start
    found["chosen"] = plan_in_words(model)
    return found


def main() -> int:
    arguments = parser(__doc__, "plan_time_cpu.json", check=f"a plan takes more than {SECONDS:g} s").parse_args()
    torch.set_num_threads(1)
    import diffusers.models.transformers  # noqa: F401 a training script has imported it by then

    results = [seconds_of(name, lora) for name, lora in CASES.items()]
    table = Table(title="Seconds before the first block", title_justify="left")
    for heading in ("model", "first", "other size", "known", "same again", "chosen"):
        table.add_column(heading)
    for found in results:
        figures = [f"{found[what]:.2f}" for what in ("first", "other size")]
        figures += [f"{found[what]:.5f}" for what in ("known", "same again")]
        table.add_row(found["model"] + ", LoRA" * bool(found["lora"]), *figures, found["chosen"])
    Console(width=140).print(table)
    slow = [found["model"] for found in results if found["first"] > SECONDS]
    return finish(arguments, {"results": results}, [f"{name}: its plan takes too long" for name in slow])


if __name__ == "__main__":
    sys.exit(main())
