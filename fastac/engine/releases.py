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
    """Whether a version, by default that of torch, is at least a release, such as "2.13". Its pre-releases are."""
    here, first = ([int(part) for part in one.split(".")[:2]] for one in (version or torch.__version__, release))
    return here >= first


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


WHOLE_PRODUCT = "" if is_at_least("2.15") else "aten.addmm.default"
"""The op whose output a Linear module returns as it is; none since 2.15. To other outputs it adds the bias in place. It
gives them another version counter (aten::_unsafe_view), which misses in-place changes."""
