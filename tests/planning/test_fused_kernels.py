"""Plans for CUDA that are made on a CPU: functions that run one kernel there are simulated as one."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import fastac
from fastac import FastacError
from fastac.engine import torch_private
from fastac.engine.torch_private import NEEDS_VALUES
from fastac.planning.fused_kernels import OneKernel
from tests.cli.conftest import Command, configuration
from tests.planning.planned import WAN, tiny
from tests.support import AttentionBlock, AttentionStack, stack_inputs
from tests.torch_data import torch_data

MEASURED = Path(__file__).parents[2] / "benchmarks/results/gpu_wan_nvidia_h100_80gb_hbm3.json"


def test_peaks_are_those_of_an_h100(command: Command, tmp_path: Path) -> None:
    """Planned without a GPU, from the configuration: within 1 % of what the GPU's allocator said."""
    case = json.loads(MEASURED.read_text())["cases"][0]
    path = configuration(tmp_path, case["model"], num_layers=case["blocks"])
    video = [f"--{name.replace('_', '-')}={size}" for name, size in case["video"].items()]
    found = json.loads(command("plan", path, *video, "--json").out)
    names = {"torch full": "full"}
    planned = {row["policy"]: row["peak_bytes"] for row in found["policies"]}
    measured = {names.get(row["way"], row["way"]): row["peak_bytes"] for row in case["rows"]}
    both = planned.keys() & measured.keys()
    assert {"full", "attn_only", "long_attn_only", "attn_only, offload"} <= both
    assert {way: planned[way] for way in both} == pytest.approx({way: measured[way] for way in both}, rel=0.01)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_plan_from_a_machine_without_the_device_is_the_same(device: str) -> None:
    model, inputs = tiny(WAN, torch.bfloat16)
    model = model.to("meta")
    there = copy.deepcopy(model).to_empty(device=device)
    moved = {name: one.to(device) if isinstance(one, torch.Tensor) else one for name, one in inputs.items()}
    truly, planned = fastac.plan(there, moved), fastac.plan(model, inputs, device=device)
    for mine, theirs in zip(planned.policies, truly.policies, strict=True):
        assert mine.peak_bytes == pytest.approx(theirs.peak_bytes, rel=0.01)
        assert mine.held_bytes == pytest.approx(theirs.held_bytes, rel=0.01)


def norm(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return F.rms_norm(values, (values.shape[-1],), values.new_ones(values.shape[-1], dtype=dtype))


def attend(values: torch.Tensor, width: int = 16, dropout: float = 0.0, masked: bool = False) -> torch.Tensor:
    heads = values.unflatten(-1, (2, -1)).transpose(1, 2)
    mask = values.new_ones(1, 1, 64, 64, dtype=torch.bool) if masked else None
    return F.scaled_dot_product_attention(heads, heads, heads[..., :width], mask, dropout)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "rms_norm": lambda values: norm(values, values.dtype),
    "rms_norm without a weight": lambda values: torch.rms_norm(values, (values.shape[-1],)),
    "rms_norm, by name": lambda values: torch.rms_norm(input=values, normalized_shape=[values.shape[-1]], eps=1e-6),
    "rms_norm inside vmap": torch.vmap(lambda one: F.rms_norm(one, (one.shape[-1],))),
    "rms_norm, weight in fp64": lambda values: norm(values, torch.float64),
    "dropout": lambda values: F.dropout(values, 0.1),
    "dropout in place": lambda values: F.dropout(values * 2, 0.1, inplace=True),
    "dropout of nothing": lambda values: F.dropout(values, 0.0),
    "dropout in evaluation": lambda values: F.dropout(values, 0.1, training=False),
    "softmax in fp32": lambda values: values.softmax(-1, dtype=torch.float32),
    "softmax in fp32, by position": lambda values: torch.softmax(values, -1, torch.float32),
    "softmax in fp32, by name": lambda values: torch.softmax(input=values, dim=-1, dtype=torch.float32),
    "softmax": lambda values: F.softmax(values, -1),
    "attention": attend,
    "attention with dropout": lambda values: attend(values, dropout=0.1),
    "attention with narrow values": lambda values: attend(values, 8),
    "attention with dropout and a mask": lambda values: attend(values, dropout=0.1, masked=True),
}


def nodes(outputs: torch.Tensor) -> set[str]:
    """Names of the autograd nodes behind a tensor, without views, and all kernels of attention under one name."""
    found, left = set(), [outputs.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            found.add("attention" if "DotProduct" in node.name() else node.name().rstrip("0123456789"))
            left += [one for one, _ in node.next_functions]
    return found - {"ReshapeAliasBackward", "ViewBackward", "UnsafeViewBackward"}


class Ops(TorchDispatchMode):
    """Names of ops, without those of autograd's own."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names += [str(func)] * (func.namespace == "aten" and "detach" not in str(func))
        return func(*args, **(kwargs or {}))


class Calls(torch.nn.Module):
    """A block that calls a function, and notes what autograd recorded of it and which ops ran, by its name."""

    noted: dict[str, tuple[set[str], list[str]]] = {}  # noqa: RUF012 copies that are simulated have it too

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.weight = name, torch.nn.Parameter(torch.ones(()))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        trained = values.detach() * self.weight.to(values.dtype)
        with Ops() as ops:
            output = FUNCTIONS[self.name](trained)
        Calls.noted.setdefault(self.name, (nodes(output), ops.names))
        return values + output.mean()


def noted(values: torch.Tensor, device: str | None = None) -> dict[str, tuple[set[str], list[str]]]:
    """What functions do in a plan for a device; without one, on the device of the values."""
    Calls.noted.clear()
    blocks = torch.nn.Sequential(*map(Calls, FUNCTIONS))
    if device is None:
        blocks.to(values.device)(values)
    else:
        fastac.plan(blocks, [values], blocks=list(map(str, range(len(blocks)))), device=device)
    return dict(Calls.noted)


DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_autograd_records_what_it_does_on_the_device(dtype: torch.dtype, device: str) -> None:
    values = torch.randn(1, 64, 32, dtype=dtype)
    truly, planned = noted(values.to(device)), noted(values, device)
    assert planned.keys() == truly.keys() == FUNCTIONS.keys()
    for name in FUNCTIONS:
        assert planned[name][0] == truly[name][0], name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_functions_that_ask_for_the_device(dtype: torch.dtype) -> None:
    """torch runs fake tensors on CUDA without a GPU, though not their backward: the same ops are simulated."""
    planned = noted(torch.empty(1, 64, 32, dtype=dtype), "cuda")
    for name in [name for name in FUNCTIONS if not name.startswith(("rms_norm", "attention"))]:
        with FakeTensorMode(), torch.no_grad():
            values = torch.empty(1, 64, 32, dtype=dtype, device="cuda")
            with Ops() as truly:
                FUNCTIONS[name](values)
        assert planned[name][1] == truly.names, name


VALUES_DECIDE = {"nn.functional.ctc_loss", "nn.functional.gaussian_nll_loss"}

OTHER_KERNELS = {
    "nn.functional.batch_norm": "cuDNN's, which saves as much and a small reserve",
    "nn.functional.instance_norm": "the same",
    "nn.functional.grid_sample": "cuDNN's, which saves the same",
    "nn.functional.multi_head_attention_forward": "what it calls is not replaced: it is one function of torch",
    "nn.functional.scaled_dot_product_attention": "small ops for some sizes, on either device; FUNCTIONS has the usual",
}
"""Functions that may record something else on CUDA, with the reason."""


@pytest.mark.parametrize(
    "device", [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def test_no_other_function_asks_for_the_device(device: str) -> None:
    """Samples of torch's own tests for all of `torch.nn.functional`: one that is not in these lists is new."""
    found, count = set(), 0
    for op in [op for op in torch_data()[0] if op.name.startswith("nn.functional.")]:
        for dtype in DTYPES if device == "cuda" else DTYPES[2:]:
            if not op.supports_dtype(dtype, device):
                continue
            for sample in itertools.islice(op.sample_inputs(device, dtype, requires_grad=True), 3):
                given = ((sample.input, *sample.args), sample.kwargs)
                try:
                    truly = recorded(op.op, *given)
                except (RuntimeError, ValueError):
                    continue  # it is one that must raise
                mode = torch_private.fake_mode()
                with mode, OneKernel() if device == "cuda" else contextlib.nullcontext():
                    try:
                        planned = recorded(op.op, *tree_map_only(torch.Tensor, faked, given))
                    except NEEDS_VALUES:
                        planned = None
                found |= {op.name} if planned != truly else set()
                count += 1
    assert count > 250
    assert found - (OTHER_KERNELS.keys() if device == "cuda" else set()) == VALUES_DECIDE


def recorded(function: Callable[..., Any], args: Any, kwargs: Any) -> list[set[str]]:
    outputs = torch_private.tree_leaves(function(*args, **kwargs))
    return [nodes(output) for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]


def faked(value: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    return empty.requires_grad_(value.requires_grad)


def test_a_fused_norm_is_counted_to_the_byte() -> None:
    """It holds the output and one fp32 number for each norm; backward makes a gradient for each of input and weight.

    The inputs of the first need no gradient.
    """
    values = torch.empty(2, 3, 8, dtype=torch.bfloat16)
    model = torch.nn.Sequential(torch.nn.RMSNorm(8), torch.nn.RMSNorm(8), torch.nn.Linear(8, 1, bias=False))
    plan = fastac.plan(model.bfloat16(), [values], blocks=["0", "1"], device="cuda")
    none = plan.policies[0]
    assert none.held_bytes == 2 * (values.nbytes + 2 * 3 * 4) + 2 * 3 * 2
    weights = 3 * 8 * 2
    assert plan.gradients == weights
    assert none.peak_bytes > plan.states.total + none.held_bytes + weights


def test_the_device_that_trains() -> None:
    """CUDA for a model on "meta"; the CPU for one that is there, unless the plan is asked for the other."""
    model, inputs = tiny(WAN, torch.bfloat16)
    empty = copy.deepcopy(model).to("meta")
    cuda, on_cpu, cpu, on_cuda = (
        fastac.plan(of, inputs, device=device).policies
        for of, device in [(empty, None), (empty, "cpu"), (model, None), (model, "cuda")]
    )
    assert (cuda, cpu) == (on_cuda, on_cpu)
    assert cuda[0].peak_bytes < 0.95 * cpu[0].peak_bytes
    with pytest.raises(FastacError, match=r"device='tpu'.*'cuda' and 'cpu'"):
        fastac.plan(model, inputs, device="tpu")


def test_autocast_of_the_device() -> None:
    """torch applies that of CUDA to no tensor on the CPU, and switches it off where there is no GPU."""
    model, inputs = AttentionStack(), stack_inputs()
    with torch.autocast("cpu", torch.bfloat16):
        expected = fastac.plan(model, inputs, blocks="blocks", device="cuda").policies
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        found = fastac.plan(model, inputs, blocks="blocks", device="cuda").policies
    finally:
        torch.set_autocast_enabled("cuda", False)
    plain = fastac.plan(model, inputs, blocks="blocks", device="cuda").policies
    assert found[0].held_bytes == pytest.approx(expected[0].held_bytes, rel=0.02)
    assert found[0].held_bytes < 0.9 * plain[0].held_bytes


def test_attention_with_dropout_is_saved_on_cuda() -> None:
    """A CPU has no kernel for it."""
    attend = partial(F.scaled_dot_product_attention, dropout_p=0.1)
    model = AttentionStack(block=lambda: AttentionBlock(heads=2, attend=attend))
    cpu, cuda = (fastac.plan(model, stack_inputs(), blocks="blocks", device=device) for device in ("cpu", "cuda"))
    assert cpu.policies[3].saved_bytes == 0 < cuda.policies[3].saved_bytes
