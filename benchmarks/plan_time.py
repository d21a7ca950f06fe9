"""How long a plan of a published model takes before training, and a choice in a memory, on one core.

The models are on the device "meta", without weights, on the video that they were made for. What is timed: a plan, for
which two steps are simulated, and the best policies for a GPU of 80 GB, a host of 64 GiB and a bus of 25 GB/s. The same
choice is made from a measured step in training, which is faster: its moments are fewer.

    taskset -c 0 python benchmarks/plan_time.py [--check]
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import fastac
from common import finish, parser
from fastac.models import published as configurations
from fastac.planning.plans import summary
from fastac.planning.video import without_weights

SECONDS = 10.0
"""The most that a plan may take."""

CASES = {"wan2.1-t2v-1.3b": 0, "wan2.1-t2v-14b": 32, "hunyuanvideo": 32, "ltx-video-2b": 0}
"""Model -> the rank of LoRA weights; 0 if all weights are trained."""


def seconds_of(name: str, lora: int) -> dict[str, Any]:
    """Seconds of a plan and of a choice, and what was chosen."""
    configuration = configurations.load_configuration(name)
    model = without_weights(configuration, configuration.default.dtype, lora)
    with torch.device("meta"):
        inputs = configuration.inputs(configuration.default)
    begin = time.perf_counter()
    plan = fastac.plan(model, inputs)
    planned = time.perf_counter()
    policies = plan.within(memory="80GB", host="64GiB")
    chosen = time.perf_counter()
    figures = {"plan": planned - begin, "choice": chosen - planned, "chosen": summary(policies.values())}
    return {"model": name, "lora": lora, **figures}


def main() -> int:
    arguments = parser(__doc__, "plan_time_cpu.json", check=f"a plan takes more than {SECONDS:g} s").parse_args()
    torch.set_num_threads(1)
    import diffusers.models.transformers  # noqa: F401 a training script has imported it by then

    results = [seconds_of(name, lora) for name, lora in CASES.items()]
    table = Table("model", "plan", "choice", "chosen", title="Seconds", title_justify="left")
    for found in results:
        figures = [f"{found[what]:.2f}" for what in ("plan", "choice")]
        table.add_row(found["model"] + ", LoRA" * bool(found["lora"]), *figures, found["chosen"])
    Console(width=140).print(table)
    slow = [found["model"] for found in results if found["plan"] + found["choice"] > SECONDS]
    return finish(arguments, {"results": results}, [f"{name}: its plan takes too long" for name in slow])


if __name__ == "__main__":
    sys.exit(main())
