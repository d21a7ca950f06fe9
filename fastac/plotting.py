"""The picture of a plan: what FLOPs a step costs for the bytes that are saved."""

from __future__ import annotations

from pathlib import Path

from fastac.errors import FastacError
from fastac.plans import Plan
from fastac.sizes import readable_bytes

GIB = 2**30


SUFFIXES = (".png", ".svg", ".pdf")


def check_path(path: Path) -> None:
    """Raise FastacError for a file that a plot can not be written to."""
    if path.suffix not in SUFFIXES:
        raise FastacError(f"plan: a plot is a file that ends in {', '.join(SUFFIXES)}, not {path.name}")
    if not path.parent.is_dir():
        raise FastacError(f"plan: can not write the plot {path}: there is no folder {path.parent}")


def plot(plan: Plan, path: str | Path) -> None:
    """Write the frontier of a plan, with the policies on it, as a picture. path: ends in .png, .svg or .pdf.

    Raises FastacError where matplotlib is not installed, or can not write such a file.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise FastacError("plan: a plot needs matplotlib: pip install matplotlib") from error
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(
        [saved / GIB for saved, _ in plan.frontier],
        [relative for _, relative in plan.frontier],
        color="tab:blue",
        linewidth=1.5,
        label="Policy.budget",
        zorder=1,
    )
    for one in plan.policies:
        if one.policy == "none":
            label = f"no checkpointing (holds {readable_bytes(one.held_bytes)})"
            axes.axhline(one.relative, color="gray", linestyle="--", linewidth=1, label=label)
            continue
        marker, size = ("*", 130) if one.policy.startswith("budget") else ("o", 45)
        axes.scatter(one.saved_bytes / GIB, one.relative, marker=marker, s=size, zorder=2, label=one.policy)
    axes.set_xlabel("saved outputs, GiB")
    axes.set_ylabel("FLOPs of a step, relative to full checkpointing")
    axes.set_title(f"{plan.subject}\n{plan.inputs}", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise FastacError(f"plan: can not write the plot {path}: {error}") from error
