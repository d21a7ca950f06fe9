"""What 8 and 64 GPUs do to what selective checkpointing saves: computed from the shapes, not measured.

Wan2.1 14B at 720x1280x77 in bf16, all weights trained, FSDP over all GPUs, Ulysses over up to 8 of them (its 40 heads
cannot be split 64 ways), one video for each group of these. Compute is matrix products and attention at an assumed
share of an H100's peak. FSDP's gathers and reductions run beside compute: their time is given as a share of it. The
all-to-alls of Ulysses do not: their time is added, and given as a share of the step.

    python benchmarks/scaling.py
"""

from __future__ import annotations

import dataclasses
import sys

from rich.console import Console
from rich.table import Table

LAYERS, WIDTH, FEED_FORWARD, HEADS = 40, 5120, 13824, 40  # Wan2.1 14B, as its public configuration has them
TOKENS, TEXT_TOKENS = 20 * 45 * 80, 512  # (77 - 1) / 4 + 1 latent frames of 90 x 160, in patches of 2 x 2
NUMBER = 2  # bytes of a bf16

PEAK = 989e12  # FLOPs per second, bf16 dense, H100 SXM data sheet
UTILIZATION = 0.4  # assumed
NVLINK = 450e9  # bytes per second and direction, H100 SXM data sheet
NETWORK = 50e9  # one 400 Gb/s adapter per GPU
GPUS_PER_NODE = 8
LINKS = {"": NVLINK, "NVLink": NVLINK, "network": NETWORK}

LAYOUTS = ((1, 1, ""), (8, 1, ""), (8, 8, "NVLink"), (64, 1, ""), (64, 8, "NVLink"), (64, 8, "network"))
"""GPUs, how many of them Ulysses splits a video over, and what its all-to-alls go through."""

AGAIN = ', collectives="recompute"'
POLICIES = ("full", "attn_only", "attn_only" + AGAIN, "long_attn_only", "long_attn_only" + AGAIN)


@dataclasses.dataclass(frozen=True)
class Row:
    """One layout under one policy, for one GPU and one step. link: that of the all-to-alls.

    held: block inputs and what the policy saves. exchanged: given to all-to-alls; sharded: to FSDP's collectives.
    exchange_share: of the step; sharded_share: of the compute it runs beside. over_full: step time over that of full.
    """

    gpus: int
    ulysses: int
    link: str
    policy: str
    held: float
    exchanged: float
    sharded: float
    exchange_share: float
    sharded_share: float
    over_full: float


def _flops(tokens: float) -> tuple[float, float, float]:
    """Forward FLOPs of a layer for so many of a video's tokens: products, self-attention, cross-attention."""
    square = WIDTH * WIDTH
    products = 2 * tokens * (4 * square + 2 * square + 2 * WIDTH * FEED_FORWARD) + 2 * TEXT_TOKENS * 2 * square
    return products, 4 * tokens * TOKENS * WIDTH, 4 * tokens * TEXT_TOKENS * WIDTH


def _step(gpus: int, ulysses: int, link: str, policy: str) -> dict[str, float]:
    tokens = TOKENS / ulysses
    products, long, short = _flops(tokens)
    again = products
    if policy == "full":
        again += long + short
    elif policy.startswith("long_attn_only"):
        again += short
    # Backward has two products for each of the forward; flash attention recomputes its scores: 2.5.
    flops = LAYERS * (3 * products + 3.5 * (long + short) + again)
    hidden = LAYERS * tokens * WIDTH * NUMBER
    statistics = LAYERS * tokens * HEADS * 4
    kept = {"full": 0, "long_attn_only": 1, "attn_only": 2}[policy.removesuffix(AGAIN)]
    held = hidden + kept * (hidden + statistics)
    exchanges = 0
    if ulysses > 1:
        saved = policy in ("attn_only", "long_attn_only")
        exchanges = 8 if saved else 12  # query, key, value and output: forward, backward, and again
        held += 4 * hidden * saved
    exchanged = exchanges * hidden * (ulysses - 1) / ulysses
    weights = LAYERS * (8 * WIDTH * WIDTH + 2 * WIDTH * FEED_FORWARD) * NUMBER
    sharded = 3 * weights * (gpus - 1) / gpus  # gathered in forward and in backward, gradients reduced
    compute = flops / (PEAK * UTILIZATION)
    exchange_time = exchanged / LINKS[link]
    return {
        "held": held,
        "exchanged": exchanged,
        "sharded": sharded,
        "exchange_share": exchange_time / (compute + exchange_time),
        "sharded_share": sharded / (NVLINK if gpus <= GPUS_PER_NODE else NETWORK) / compute,
        "seconds": compute + exchange_time,
    }


def rows() -> list[Row]:
    """Every layout under every policy that differs in it."""
    found = []
    for gpus, ulysses, link in LAYOUTS:
        full = _step(gpus, ulysses, link, "full")["seconds"]
        for policy in POLICIES:
            if ulysses == 1 and policy.endswith(AGAIN):
                continue
            step = _step(gpus, ulysses, link, policy)
            found.append(Row(gpus, ulysses, link, policy, over_full=step.pop("seconds") / full, **step))
    return found


HEADINGS = (
    "GPUs",
    "Ulysses",
    "policy",
    "held GiB",
    "all-to-all GiB",
    "their share",
    "FSDP GiB",
    "FSDP share",
    "step over full",
)


def cells(row: Row) -> tuple[str, ...]:
    """A row of the table, under HEADINGS."""
    return (
        str(row.gpus),
        f"{row.ulysses}, {row.link}" if row.link else "",
        row.policy,
        f"{row.held / 2**30:.1f}",
        f"{row.exchanged / 2**30:.1f}",
        f"{row.exchange_share:.1%}",
        f"{row.sharded / 2**30:.1f}",
        f"{row.sharded_share:.1%}",
        f"{row.over_full:.3f}",
    )


def main() -> int:
    table = Table(title="Computed, not measured", title_justify="left")
    for heading in HEADINGS:
        table.add_column(heading)
    for row in rows():
        table.add_row(*cells(row))
    Console(width=140).print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
