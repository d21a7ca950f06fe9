"""What ways to checkpoint a model took, as values and as a table: time, bytes, attention kernels, gradients."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any

from rich.table import Table

from fastac.reporting import render
from fastac.sizes import readable_bytes


@dataclasses.dataclass(frozen=True)
class Measurement:
    """What one way to checkpoint a model took. problem: why there are no figures, else empty.

    seconds: of each timed step. relative: the median over rounds of its time over that of full checkpointing. Bytes
    are above those of weights and inputs: held between forward and backward, and the most at one time of a step.
    attention: kernels that ran in a step. different: of the outputs and gradients compared, how many are not bitwise
    those of the reference, and by how much at most.
    """

    variant: str
    problem: str = ""
    seconds: tuple[float, ...] = ()
    relative: float | None = None
    held_bytes: int = 0
    peak_bytes: int = 0
    attention: int = 0
    compared: int = 0
    different: int = 0
    largest_difference: float = 0.0


@dataclasses.dataclass(frozen=True)
class Measurements:
    """What every way to checkpoint a model took.

    weights: bytes of parameters and buffers. budget: bytes, None where not known.
    reference: whose outputs and gradients the others were compared with. noise: by how much its own differ from run to
    run, above 0 where kernels are not deterministic.
    """

    subject: str
    rounds: int
    weights: int
    budget: int | None
    reference: str
    noise: float
    rows: tuple[Measurement, ...]

    def __str__(self) -> str:
        captions = [
            f"medians of {self.rounds} steps each, in turns",
            f"bytes besides {readable_bytes(self.weights)} of weights; their gradients are in the peak",
        ]
        captions += [f"two runs of {self.reference} differ by up to {self.noise:.2g}"] * bool(self.noise)
        captions += [f"budget: {readable_bytes(self.budget)}"] if self.budget is not None else []
        captions += [f"{row.variant}: {row.problem}" for row in self.rows if ": " in row.problem]
        table = Table(title=self.subject, title_justify="left", caption="\n".join(captions), caption_justify="left")
        headings = ("step / full", "seconds (from - to)", "held", "peak", "attention kernels")
        table.add_column("checkpointing", no_wrap=True)
        for heading in headings:
            table.add_column(heading, justify="right", no_wrap=True)
        table.add_column(f"outputs and gradients as {self.reference}", no_wrap=True)
        for row in self.rows:
            if row.problem:
                table.add_row(row.variant, *[""] * len(headings), row.problem.partition(": ")[0])
                continue
            table.add_row(
                row.variant,
                "" if row.relative is None else f"{row.relative:.3f}",
                f"{statistics.median(row.seconds):.4g} ({min(row.seconds):.4g} - {max(row.seconds):.4g})",
                *map(readable_bytes, (row.held_bytes, row.peak_bytes)),
                str(row.attention),
                self._equality(row),
            )
        return render(table)

    def as_json(self) -> dict[str, Any]:
        """The measurements in what JSON has."""
        return dataclasses.asdict(self)

    def _equality(self, row: Measurement) -> str:
        if not row.different:
            return "bitwise"
        return f"{row.different} of {row.compared} differ, by up to {row.largest_difference:.2g}"
