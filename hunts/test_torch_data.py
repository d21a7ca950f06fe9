"""torch's own test data inside regions: every op and every module that it differentiates, bit for bit.

Each sample is all of a region, and the middle of one; each region runs twice, as the first of its kind is watched.
What two runs without checkpointing do not agree on is left out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import fastac
from hunts.hostile_blocks import differences, is_written, words_of
from tests.conftest import as_in_a_fresh_process
from tests.support import Tensors, run_checkpointed
from tests.torch_data import churn, dense, fresh, some, torch_data

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

CHUNKS = 24
DTYPES = (torch.float32, torch.float64)


def trains(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def train(function: Callable[..., Any], values: Any, policy: str, middle: bool) -> Tensors:
    """Two steps of function(*args, **kwargs). values: (args, kwargs). middle: other ops around it save tensors."""
    leaves, structure = tree_flatten(fresh(values))
    scale = torch.ones((), requires_grad=True)

    def region(scale: torch.Tensor, *leaves: Any) -> Any:
        leaves = [one * scale if middle and trains(one) else one for one in leaves]
        args, kwargs = tree_unflatten(leaves, structure)
        outputs, _ = tree_flatten(function(*args, **kwargs))
        return [one * scale if middle and trains(one) else one for one in outputs]

    parameters = dict(function.named_parameters()) if isinstance(function, torch.nn.Module) else {}
    trained = [scale, *filter(trains, leaves), *filter(trains, parameters.values())]
    found = {}
    for step in range(2):
        torch.manual_seed(step)
        outputs = [one for one in run_checkpointed(region, scale, *leaves, policy=policy) if torch.is_tensor(one)]
        roots = [dense(one) for one in outputs if one.requires_grad]
        weights = [torch.randn_like(one) for one in roots]
        gradients = torch.autograd.grad(roots, trained, weights, allow_unused=True)
        found |= {f"output {step}.{number}": dense(one) for number, one in enumerate(outputs)}
        found |= {f"gradient {step}.{number}": dense(one) for number, one in enumerate(gradients) if one is not None}
    if isinstance(function, torch.nn.Module):
        found |= {f"buffer {name}": one for name, one in function.named_buffers()}
    return {name: one.detach().clone() for name, one in found.items()} | {"generator": torch.get_rng_state()}


def outcome(make: Callable[[], Callable[..., Any]], values: Any, policy: str, middle: bool) -> Tensors | Exception:
    with as_in_a_fresh_process():
        try:
            torch.manual_seed(0)
            return train(make(), values, policy, middle)
        except Exception as error:
            return error.with_traceback(None)


def check(name: str, make: Callable[[], Callable[..., Any]], values: Any, counts: Counter[str]) -> list[str]:
    """What goes wrong with a function that `make` makes. counts: verdicts so far."""
    wrong = []
    for middle in (False, True):
        expected = outcome(make, values, "none", middle)
        if isinstance(expected, Exception) or differences(outcome(make, values, "none", middle), expected):
            counts["left out"] += 2
            continue
        for policy in ("attn_only", "full"):
            found = outcome(make, values, policy, middle)
            if isinstance(found, fastac.FastacError) or is_written(found):
                counts[f"refused: {name}: {words_of(found)}"] += 1
            elif not (different := differences(found, expected)):
                counts["exact"] += 1
            elif any(differences(outcome(make, values, "none", middle), expected) for _ in range(50) if churn()):
                counts["left out"] += 1
            else:
                wrong.append(f"{name}, {policy}{', middle' if middle else ''}: {different}")
    return wrong


def samples_of_op(op: Any) -> Iterator[Any]:
    for dtype in DTYPES:
        if op.supports_autograd and dtype in op.supported_dtypes("cpu"):
            torch.manual_seed(0)
            for one in some(op.sample_inputs("cpu", dtype, requires_grad=True)):
                yield (one.input, *one.args), one.kwargs


def samples_of_module(info: Any) -> Iterator[tuple[Callable[[], torch.nn.Module], Any]]:
    for dtype, training in itertools.product(DTYPES, (True, False)):
        if dtype not in info.dtypes:
            continue
        torch.manual_seed(0)
        inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
        for one in some(inputs):
            made = one.constructor_input

            def make(made: Any = made, dtype: torch.dtype = dtype, training: bool = training) -> torch.nn.Module:
                return info.module_cls(*made.args, **made.kwargs).to(dtype).train(training)

            if one.forward_input is not None:
                yield make, (one.forward_input.args, one.forward_input.kwargs)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_ops(chunk: int) -> None:
    counts: Counter[str] = Counter()
    wrong = []
    for op in torch_data()[0][chunk::CHUNKS]:
        for values in samples_of_op(op):
            wrong += check(op.full_name, lambda op=op: op.get_op(), values, counts)
    print(counts)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_modules(chunk: int) -> None:
    counts: Counter[str] = Counter()
    wrong = []
    for info in torch_data()[1][chunk::CHUNKS]:
        for make, values in samples_of_module(info):
            wrong += check(info.name, make, values, counts)
    print(counts)
    assert not wrong, "\n".join(wrong)
