"""Every aten attention op of fastac/backends/sdpa.py, through torch's own autograd formulas.

Most of these ops have no CPU kernel; `aten_on_cpu` gives them one. On a GPU the real ones run (marker `gpu`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastac
from fastac.backends import sdpa
from fastac.registry import DecompositionOp, present_ops
from tests import support
from tests.backends import aten_on_cpu
from tests.support import Tensors, assert_same, train_step

aten = torch.ops.aten

# No two alike, so that a dimension that is mistaken for another shows.
BATCH, HEADS, QUERIES, KEYS, DIM = 3, 2, 24, 10, 8
QUERY_LENGTHS, KEY_LENGTHS = (9, 3, 12), (6, 10, 5)  # of packed sequences; KEYS is the longest


@pytest.fixture(scope="module", autouse=True)
def _cpu_kernels() -> Iterator[None]:
    with aten_on_cpu.registered():
        yield


@functools.cache
def _ends(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to call one op. call: (query, key, value, dropout_p) of shape (batch, heads, sequence, dim) -> output.

    packed: the tensors are (tokens, heads, dim), sequences of unequal length one after the other. differentiable:
    torch has an autograd formula; without one the op runs on inputs that do not require grad. drops: takes dropout.
    """

    op: str
    call: Callable[..., torch.Tensor]
    packed: bool = False
    differentiable: bool = True
    drops: bool = True
    way: str = ""

    @property
    def name(self) -> str:
        return self.op + (f" ({self.way})" if self.way else "")

    def inputs(self) -> Tensors:
        generator = torch.Generator().manual_seed(0)
        queries = (sum(QUERY_LENGTHS), HEADS, DIM) if self.packed else (BATCH, HEADS, QUERIES, DIM)
        keys = (sum(KEY_LENGTHS), HEADS, DIM) if self.packed else (BATCH, HEADS, KEYS, DIM)
        shapes = {"query": queries, "key": keys, "value": keys}
        return {name: torch.randn(shape, generator=generator).requires_grad_() for name, shape in shapes.items()}

    def region(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0) -> Any:
        """Something to recompute before and after the attention; dropout after it draws from the same generator."""
        inputs = [torch.tanh(tensor) for tensor in (query, key, value)]
        if not self.differentiable:
            inputs = [tensor.detach() for tensor in inputs]
        output = torch.tanh(self.call(*inputs, dropout_p))
        return F.dropout(output, dropout_p) * torch.tanh(query)

    def in_double(self) -> Tensors:
        """Outputs and gradients with torch's math attention in float64."""
        wide = {name: t.detach().double().requires_grad_() for name, t in self.inputs().items()}
        return train_step(dataclasses.replace(self, call=self.math).region, wide)

    def math(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            if not self.packed:
                return F.scaled_dot_product_attention(query, key, value)
            parts = zip(query.split(QUERY_LENGTHS), key.split(KEY_LENGTHS), value.split(KEY_LENGTHS), strict=True)
            return torch.cat(
                [F.scaled_dot_product_attention(*(t.transpose(0, 1) for t in part)).transpose(0, 1) for part in parts]
            )


def swapped_call(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """For an op in (batch, sequence, heads, dim)."""
    return lambda q, k, v, p: op(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), p).transpose(1, 2)


def ends() -> tuple[torch.Tensor, torch.Tensor]:
    return _ends(QUERY_LENGTHS), _ends(KEY_LENGTHS)


LONGEST = max(QUERY_LENGTHS), max(KEY_LENGTHS)

CASES = [
    Case(
        "_scaled_dot_product_flash_attention",
        lambda q, k, v, p: aten._scaled_dot_product_flash_attention(q, k, v, p)[0],
    ),
    Case(
        "_scaled_dot_product_flash_attention.quantized",
        lambda q, k, v, p: aten._scaled_dot_product_flash_attention.quantized(q, k, v, None, None, None, p)[0],
        differentiable=False,
    ),
    Case(
        "_scaled_dot_product_efficient_attention",
        lambda q, k, v, p: aten._scaled_dot_product_efficient_attention(q, k, v, None, True, p)[0],
    ),
    Case(
        "_scaled_dot_product_cudnn_attention",
        lambda q, k, v, p: aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, p)[0],
    ),
    Case(
        "_scaled_dot_product_fused_attention_overrideable",
        lambda q, k, v, p: aten._scaled_dot_product_fused_attention_overrideable(q, k, v, None, p)[0],
    ),
    Case(
        "_scaled_dot_product_flash_attention_for_cpu",
        lambda q, k, v, p: aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0],
        drops=False,
    ),
    Case(
        "_scaled_dot_product_attention_math_for_mps",
        lambda q, k, v, p: aten._scaled_dot_product_attention_math_for_mps(q, k, v)[0],
        differentiable=False,
        drops=False,
    ),
    Case(
        "_flash_attention_forward",
        swapped_call(
            lambda q, k, v, p: aten._flash_attention_forward(q, k, v, None, None, QUERIES, KEYS, p, False, False)[0]
        ),
        way="dense",
    ),
    Case(
        "_flash_attention_forward",
        lambda q, k, v, p: aten._flash_attention_forward(q, k, v, *ends(), *LONGEST, p, False, False)[0],
        packed=True,
        way="packed",
    ),
    Case(
        "_flash_attention_forward.quantized",
        lambda q, k, v, p: aten._flash_attention_forward.quantized(
            q, k, v, *ends(), *LONGEST, p, False, False, None, None, None
        )[0],
        packed=True,
        differentiable=False,
    ),
    Case(
        "_efficient_attention_forward",
        swapped_call(
            lambda q, k, v, p: aten._efficient_attention_forward(q, k, v, None, None, None, None, None, p, 0, True)[0]
        ),
        way="dense",
    ),
    Case(
        "_efficient_attention_forward",
        lambda q, k, v, p: aten._efficient_attention_forward(
            q[None], k[None], v[None], None, *ends(), *LONGEST, p, 0, True
        )[0][0],
        packed=True,
        way="packed",
    ),
    Case(
        "_cudnn_attention_forward",
        lambda q, k, v, p: aten._cudnn_attention_forward(q, k, v, None, None, None, QUERIES, KEYS, True, p)[0],
        way="dense",
    ),
    Case(
        "_cudnn_attention_forward",
        lambda q, k, v, p: aten._cudnn_attention_forward(q, k, v, None, *ends(), *LONGEST, True, p)[0],
        packed=True,
        way="packed",
    ),
]

every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_every_row_is_run() -> None:
    """In all overloads. A row that is added without a case here fails this test."""
    ops = {op.qualified_name.partition("::")[2] for op in present_ops() if op.row in sdpa.ROWS}
    assert {row.name for row in sdpa.ROWS} == {name.partition(".")[0] for name in ops}, "a row without an op"
    decompositions = {row.name for row in sdpa.ROWS if isinstance(row, DecompositionOp)}
    assert ops - decompositions == {case.op for case in CASES}


@every_case
def test_matches_math_in_double_precision(case: Case) -> None:
    """The kernels of these tests compute attention, through the formulas that torch has for the real ones."""
    found, expected = train_step(case.region, case.inputs()), case.in_double()
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert support.relative_error(found[name], tensor) < 1e-5, name


@every_case
@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("policy", ["full", "attn_only"])
def test_executions_and_gradients(case: Case, policy: str, engine: str, attention_executions: Counter[str]) -> None:
    inputs = case.inputs()
    reference = train_step(case.region, inputs)
    assert attention_executions == {f"aten::{case.op}": 1}
    region = functools.partial(support.run_checkpointed, case.region, policy=policy, engine=engine)
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(region, inputs), reference)
        assert attention_executions == {f"aten::{case.op}": 2 if policy == "full" else 1}


@pytest.mark.parametrize("case", [case for case in CASES if case.drops], ids=lambda case: case.name)
def test_dropout_in_the_kernel_and_after_it(case: Case, attention_executions: Counter[str]) -> None:
    """The kernel draws a seed, and what follows draws from where it left the generator, also when it does not run."""
    inputs = case.inputs()
    dropping = functools.partial(case.region, dropout_p=0.3)
    reference = train_step(dropping, inputs)
    assert not torch.equal(reference["output"], train_step(case.region, inputs)["output"])
    attention_executions.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, dropping), inputs), reference)
    assert attention_executions == {f"aten::{case.op}": 1}


@every_case
def test_number_of_keys(case: Case, attention_executions: Counter[str]) -> None:
    """Read from the right dimension, or from the longest sequence of a packed batch: so many save, one fewer do not."""
    for min_kv, executions in ((KEYS, 1), (KEYS + 1, 2)):
        region = functools.partial(fastac.checkpoint, case.region, policy=fastac.Policy("attn_only", min_kv=min_kv))
        attention_executions.clear()
        train_step(region, case.inputs())
        assert attention_executions == {f"aten::{case.op}": executions}, f"min_kv={min_kv}"


def test_op_that_writes_its_output_argument_can_have_no_row() -> None:
    """aten::_flash_attention_forward_no_dropout_inplace, which is why sdpa.ROWS leaves it out."""
    row = fastac.AttentionOp(backend="sdpa", namespace="aten", name="_flash_attention_forward_no_dropout_inplace")
    with pytest.raises(fastac.FastacError, match="writes its argument 'out'"):
        fastac.register(row)


# scaled_dot_product_attention itself: what it ends in on the CPU


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"scale": 0.3},
        {"attn_mask": torch.randn(QUERIES, QUERIES)},
        {"attn_mask": torch.ones(QUERIES, QUERIES).tril().bool()},
    ],
    ids=["plain", "causal", "scale", "float mask", "bool mask"],
)
@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_sdpa_on_the_cpu(
    options: dict[str, Any], engine: str, dtype: torch.dtype, attention_executions: Counter[str]
) -> None:
    options = {
        name: v.to(dtype) if isinstance(v, torch.Tensor) and v.is_floating_point() else v for name, v in options.items()
    }
    inputs = {
        name: torch.randn(2, HEADS, QUERIES, DIM).to(dtype).requires_grad_() for name in ("query", "key", "value")
    }

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.scaled_dot_product_attention(torch.tanh(query), key, value, **options))

    reference = train_step(region, inputs)
    for _ in range(2):
        attention_executions.clear()
        found = train_step(functools.partial(fastac.checkpoint, region, engine=engine), inputs)
        assert_same(found, reference)
        assert attention_executions == {support.CPU_ATTENTION: 1}


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_math_fallback_is_told_from_attention(engine: str) -> None:
    """The decomposition row: a call of aten::_safe_softmax means that an attention had nothing to save."""
    inputs = {name: torch.randn(1, HEADS, QUERIES, DIM, requires_grad=True) for name in ("query", "key", "value")}
    region = functools.partial(fastac.checkpoint, F.scaled_dot_product_attention, engine=engine)
    with sdpa_kernel(SDPBackend.MATH), pytest.raises(fastac.PolicyNotAppliedError, match="math kernel is forced"):
        train_step(region, inputs)


# The real kernels


@pytest.mark.gpu
@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize(
    ("backend", "op"),
    [
        (SDPBackend.FLASH_ATTENTION, "_scaled_dot_product_flash_attention"),
        (SDPBackend.EFFICIENT_ATTENTION, "_scaled_dot_product_efficient_attention"),
        (SDPBackend.CUDNN_ATTENTION, "_scaled_dot_product_cudnn_attention"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_cuda_kernels(backend: SDPBackend, op: str, dropout_p: float, attention_executions: Counter[str]) -> None:
    """Executions 1 / 2 / 1 of the CUDA kernel, and equal gradients; torch is told to take deterministic backwards."""
    support.count_kernel(f"aten::{op}", "CUDA")
    torch.manual_seed(0)
    inputs = {
        name: torch.randn(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        for name in ("query", "key", "value")
    }

    def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            output = F.scaled_dot_product_attention(torch.tanh(query), key, value, dropout_p=dropout_p)
        return F.dropout(torch.tanh(output), dropout_p)

    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        reference = train_step(region, inputs)
        for policy, executions in (("full", 2), ("attn_only", 1)):
            attention_executions.clear()
            found = train_step(functools.partial(fastac.checkpoint, region, policy=policy), inputs)
            assert_same(found, reference)
            assert attention_executions == {f"aten::{op}": executions}
    finally:
        torch.use_deterministic_algorithms(False)
