"""Ops of torch's own test data under the modes of a first region."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tests.diagnosis.observed import Mode, changed_by
from tests.torch_data import some

DTYPES = (torch.float32, torch.float64, torch.complex64)

_CHECKS = "it checks the range of its second input only where no mode is open"
_FILLS = "it fills a new tensor, which has the version 1, and 0 under a mode"

OTHER_PATH = {
    "linalg.matrix_rank": _FILLS,
    "linalg.matrix_rank.hermitian": _FILLS,
    "nanquantile": _CHECKS,
    "quantile": _CHECKS,
}
"""Ops that differ under any mode of torch's, and why."""

AT_TIMES = {"nn.functional.ctc_loss": "under a mode it takes another overload, depending on what ran before"}
"""Ops that differ in some processes only. Recompute of a region that was observed runs under a mode as well."""


def samples_of(op: Any, dtype: torch.dtype, count: int) -> Iterator[Any]:
    """(args, kwargs) of calls."""
    if dtype in op.supported_dtypes("cpu"):
        torch.manual_seed(0)
        for one in some(op.sample_inputs("cpu", dtype, requires_grad=op.supports_autograd))[:count]:
            yield (one.input, *one.args), one.kwargs


def lazily_changed(one: torch.Tensor) -> torch.Tensor:
    """A view that is to be conjugated or negated by the op that uses it."""
    if one.layout is not torch.strided:
        return one
    if one.is_complex():
        return one.conj()
    return torch._neg_view(one) if one.is_floating_point() else one


def variants_of(op: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Ways to call an op."""
    function = op.get_op()

    def on_views(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(torch.Tensor, lazily_changed, (args, kwargs))
        return function(*args, **kwargs)

    yield "", function
    yield "on views", on_views
    in_place = op.get_inplace()
    if in_place is not None:

        def on_copy(first: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            copy = first.clone()
            return copy, in_place(copy, *args, **kwargs)

        yield "in place", on_copy


def changes_of_op(
    op: Any, dtypes: Iterable[torch.dtype], samples: int, modes: dict[str, Mode], counts: Counter[str]
) -> list[str]:
    """What is not the same under some modes. samples: of each dtype, at most. counts: verdicts so far."""
    found = []
    before = counts["samples"]
    for dtype in dtypes:
        for number, values in enumerate(samples_of(op, dtype, samples)):
            counts["samples"] += 1
            for variant, function in variants_of(op):
                changed = changed_by(modes, function, values)
                if changed is None:
                    counts["left out"] += 1
                    continue
                for mode, lines in changed.items():
                    counts["differ" if lines else "exact"] += 1
                    if lines:
                        where = f"{op.full_name} {variant}, {dtype}, sample {number}, {mode}"
                        found.append(f"{where}: {'; '.join(lines)}"[:600])
    counts["ops"] += counts["samples"] > before
    return found
