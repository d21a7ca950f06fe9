"""Which torch is the first for what: the one table that README, docs/versions.md and the errors go by."""

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
    """Whether a version, by default that of torch, is a release, such as "2.13", or one after it.

    Builds on the way to a release count as that one.
    """
    here, first = ([int(part) for part in one.split(".")[:2]] for one in (version or torch.__version__, release))
    return here >= first


def has(feature: str) -> bool:
    """Whether this torch has a feature of `FIRST_TORCH`."""
    return is_at_least(FIRST_TORCH[feature])


def need_traces() -> None:
    """Raise FastacError where this torch has no traced graphs: the entries of `fastac.graph`."""
    need(TRACES, "Train eagerly, or compile the blocks: fastac.compile(model).")


def need(feature: str, instead: str) -> None:
    """Raise FastacError where this torch does not have a feature. instead: the sentence that says what to do."""
    if not has(feature):
        raise FastacError(
            f"{feature} needs torch {FIRST_TORCH[feature]} or newer; this is torch {torch.__version__}. {instead}"
        )


WHOLE_PRODUCT = "" if is_at_least("2.15") else "aten.addmm.default"
"""The op whose output is that of the Linear module. To that of others it adds its bias in place, and hands it out under
another version counter (aten::_unsafe_view), by which no change of it is noticed. Since 2.15 it does so with all."""
