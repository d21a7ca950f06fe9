"""The first release of torch for each feature: the table that README, docs/versions.md and errors use."""

from __future__ import annotations

import torch

from fastac.errors import FastacError

ENGINE = "fastac (enable, checkpoint, verify, report, plan)"
COMPILED_BLOCKS = "compiled blocks (fastac.compile)"
FLEX = "flex_attention that fastac.compile or compile_attention compiles"
COMPILED_MODELS = "a checkpoint inside compiled code (torch.compile of a whole model)"
TRACES = "a traced graph (fastac.graph)"

FIRST_TORCH = {
    ENGINE: "2.9",
    COMPILED_BLOCKS: "2.9",
    FLEX: "2.13",
    COMPILED_MODELS: "2.13",
    TRACES: "2.13",
}
"""Feature -> the first release of torch that has it."""


def is_at_least(release: str, version: str | None = None) -> bool:
    """Whether a version, by default torch's, is at least a release, such as "2.13". Pre-releases of it are."""
    current, first = ([int(part) for part in text.split(".")[:2]] for text in (version or torch.__version__, release))
    return current >= first


def has(feature: str) -> bool:
    """Whether this torch has a feature of `FIRST_TORCH`."""
    return is_at_least(FIRST_TORCH[feature])


def need_traces() -> None:
    """Raise FastacError if this torch cannot trace graphs, for the functions of `fastac.graph`."""
    need(TRACES, "Train eagerly, or compile the blocks: fastac.compile(model).")


def need(feature: str, instead: str) -> None:
    """Raise FastacError if this torch lacks a feature. instead: a sentence that says what to do."""
    if not has(feature):
        raise FastacError(
            f"{feature} needs torch {FIRST_TORCH[feature]} or newer; this is torch {torch.__version__}. {instead}"
        )


# Since torch 2.15 nn.Linear with a bias returns a view of addmm's output that does not share its version counter
# (pytorch#194077).
WHOLE_PRODUCT = "" if is_at_least("2.15") else "aten.addmm.default"
"""The matmul whose output nn.Linear returns unchanged; none since torch 2.15. Other matmul outputs are changed
afterwards: the bias is added in place, or aten::_unsafe_view gives them a new version counter, so that in-place changes
go unnoticed."""
