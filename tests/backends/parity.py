"""The parity tests: what every attention library is put through, case by case.

A library file in tests/backends/libraries brings its package, CPU kernels and cases; the tests come by inheritance:

    packages.use("flash_attn_2")             # the real package on sys.path
    sys.modules["flash_attn_2_cuda"] = ...   # a stand-in for what is no Python in it
    from flash_attn import flash_attn_func   # noqa: E402

    def kernel(q, k, v, dropout_p, ...):     # registered for the real op: torch.library.register_kernel(op, "cpu", ...)
        support.executions["flash_attn::_flash_attn_forward"] += 1
        ...

    CASES = [
        Case("flash_attn::_flash_attn_forward", swapped(lambda q, k, v, p: flash_attn_func(q, k, v, p)), drops=True),
        Case(..., way="causal", keys=QUERIES, mask=causal),     # self-attention: as many keys as queries
        Case(..., way="grouped", kv_heads=1),                   # what makes a case another one is in its way
        Case(..., way="packed", packed=True),                   # tensors are (tokens, heads, dim) then
        Case(..., way="sparse", reference=of_chosen_blocks),    # float64: (query, key, value) -> output
    ]

    class TestParity(Parity):
        cases = CASES
        rows = flash_attn_2.ROWS                                # each is run by a case, or named in not_run
        not_run = {"block_sparse_attn_sm90": "its Python layer calls the extension past the op"}

One run of a case is a region of a few operations around the attention, forward and backward. A kernel counts its own
executions in `support.executions`, so that what is found does not rest on fastac's bookkeeping.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import fastac
from fastac.engine import interception, opaque
from fastac.registry import classify
from fastac.registry import ALWAYS, AttentionOp, DecompositionOp, OpaqueFunction, Row
from tests import support
from tests.support import Tensors, assert_same, train_step

# No two alike, so that a dimension that is mistaken for another shows.
BATCH, HEADS, QUERIES, KEYS, DIM = 3, 2, 24, 10, 8
QUERY_LENGTHS, KEY_LENGTHS = (9, 3, 12), (6, 10, 5)  # of packed sequences; KEYS is the longest

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to call one op.

    op: `namespace::name`, with `.overload` where it has one. call: (query, key, value, dropout_p) -> output, all of
    shape (batch, heads, sequence, dim); packed (tokens, heads, dim), sequences of unequal length one after the other.
    kernel: under which name executions are counted, where it is not that of the op (one that calls another inside).
    seen: the number of keys of each call of the op, where it is not called once, or not with `keys`.
    mask: (queries, keys) -> which pairs attend, or a bias, broadcast over heads. reference: attention in float64, of
    the same shapes, where it is not dense under that mask. without_reference: why there is none to compare with.
    differentiable: False where the op has no autograd formula and runs on inputs that do not require grad.
    pairs: of a query and a key that are multiplied, of all heads and sequences; 0 for all that a sequence has.
    counted_dim: the head dim that the op gets, where its library pads it. counts_backward: False where no op runs it.
    without_flops: why torch's FlopCounterMode does not count by the formula.
    drops: takes dropout. tolerances: largest error by dtype, relative to the largest value.
    """

    op: str
    call: Callable[..., torch.Tensor]
    way: str = ""
    batch: int = BATCH
    heads: int = HEADS
    kv_heads: int = 0
    queries: int = QUERIES
    keys: int = KEYS
    dim: int = DIM
    packed: bool = False
    query_lengths: tuple[int, ...] = QUERY_LENGTHS
    key_lengths: tuple[int, ...] = KEY_LENGTHS
    kernel: str = ""
    seen: tuple[int, ...] = ()
    mask: Callable[[int, int], torch.Tensor] | None = None
    reference: Attend | None = None
    without_reference: str = ""
    differentiable: bool = True
    pairs: int = 0
    counted_dim: int = 0
    counts_backward: bool = True
    without_flops: str = ""
    drops: bool = False
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    tolerances: Mapping[torch.dtype, float] = dataclasses.field(
        default_factory=lambda: {torch.float32: 1e-5, torch.bfloat16: 3e-2}
    )

    @property
    def name(self) -> str:
        return self.op.partition("::")[2] + (f" ({self.way})" if self.way else "")

    @property
    def keys_of_calls(self) -> tuple[int, ...]:
        return self.seen or (max(self.key_lengths) if self.packed else self.keys,)

    def executions(self, times: int = 1) -> dict[str, int]:
        """What the kernel counts when every call runs so many times."""
        return {self.kernel or self.op: times * len(self.keys_of_calls)}

    def flops(self) -> tuple[int, int]:
        """Of forward and backward, by the products of softmax attention: two, and five."""
        pairs = self.pairs or self.heads * (
            sum(q * k for q, k in zip(self.query_lengths, self.key_lengths, strict=True))
            if self.packed
            else self.batch * self.queries * self.keys
        )
        product = 2 * pairs * (self.counted_dim or self.dim)
        return 2 * product, 5 * product if self.counts_backward and self.differentiable else 0

    def inputs(self, dtype: torch.dtype = torch.float32) -> Tensors:
        generator = torch.Generator().manual_seed(0)
        kv_heads = self.kv_heads or self.heads
        queries: tuple[int, ...] = (self.batch, self.heads, self.queries, self.dim)
        keys: tuple[int, ...] = (self.batch, kv_heads, self.keys, self.dim)
        if self.packed:
            queries = (sum(self.query_lengths), self.heads, self.dim)
            keys = (sum(self.key_lengths), kv_heads, self.dim)
        shapes = {"query": queries, "key": keys, "value": keys}
        return {n: torch.randn(shape, generator=generator).to(dtype).requires_grad_() for n, shape in shapes.items()}

    def region(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0) -> Any:
        """Something to recompute before and after the attention; dropout after it draws from the same generator."""
        inputs = [torch.tanh(tensor) for tensor in (query, key, value)]
        if not self.differentiable:
            inputs = [tensor.detach() for tensor in inputs]
        output = torch.tanh(self.call(*inputs, dropout_p if self.drops else 0.0))
        return F.dropout(output, dropout_p) * torch.tanh(query)

    def in_double(self, dtype: torch.dtype) -> Tensors:
        """Outputs and gradients with the reference in float64, from the values that the inputs have in a dtype."""
        wide = {name: t.detach().double().requires_grad_() for name, t in self.inputs(dtype).items()}
        reference = self.reference or self.math
        return train_step(dataclasses.replace(self, call=lambda q, k, v, _: reference(q, k, v)).region, wide)

    def math(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """torch's math attention."""
        if not self.packed:
            return self._math(query, key, value)
        parts = zip(
            query.split(self.query_lengths), key.split(self.key_lengths), value.split(self.key_lengths), strict=True
        )
        return torch.cat([self._math(*(t.transpose(0, 1)[None] for t in part))[0].transpose(0, 1) for part in parts])

    def _math(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        mask = self.mask(query.shape[-2], key.shape[-2]) if self.mask is not None else None
        if mask is not None and mask.is_floating_point():
            mask = mask.to(query.dtype)
        with sdpa_kernel(SDPBackend.MATH):
            grouped = query.shape[1] != key.shape[1]
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=grouped)


def swapped(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """For a call whose tensors are (batch, sequence, heads, dim)."""
    return lambda q, k, v, p: call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), p).transpose(1, 2)


@functools.cache
def ends(lengths: tuple[int, ...]) -> torch.Tensor:
    """Where packed sequences of these lengths begin, and where the last one ends: cu_seqlens."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def causal(queries: int, keys: int) -> torch.Tensor:
    """Each query attends to no later key; the last query is as late as the last key."""
    return window(keys, 0)(queries, keys)


def window(left: int, right: int) -> Callable[[int, int], torch.Tensor]:
    """Each query attends to so many earlier and later keys only."""

    def mask(queries: int, keys: int) -> torch.Tensor:
        ahead = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
        return (ahead >= -left) & (ahead <= right)

    return mask


def op_of(name: str) -> Any:
    """The op of a qualified name."""
    namespace, _, rest = name.partition("::")
    packet, _, overload = rest.partition(".")
    op = getattr(getattr(torch.ops, namespace), packet)
    return op if namespace == "higher_order" else getattr(op, overload or "default")


def _serves(row: Row | OpaqueFunction, case: Case) -> bool:
    if isinstance(row, OpaqueFunction):
        function, _ = opaque._visible.get(case.op.removeprefix(f"{opaque.NAMESPACE}::"), (None, ()))
        return (
            function is not None
            and row.name == function.__name__
            and bool(re.fullmatch(row.module, function.__module__))
        )
    resolved = classify(op_of(case.op))
    return resolved is not None and resolved.row is row


class Parity:
    """The tests over the cases of one library.

    rows: of the library, each of which a case must run or `not_run` must name (by name, with the reason).
    not_dropped: rows that name a dropout argument, and why no case passes it.
    """

    cases: Sequence[Case] = ()
    rows: Sequence[Row | OpaqueFunction] = ()
    not_run: Mapping[str, str] = {}
    not_dropped: Mapping[str, str] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if {"case", "dtype"} <= set(metafunc.fixturenames):
            compared = metafunc.function.__name__ == "test_matches_the_reference"
            cases = [case for case in self.cases if not (compared and case.without_reference)]
            both = [(case, dtype) for case in cases for dtype in case.dtypes]
            ids = [f"{case.name}-{str(dtype).removeprefix('torch.')}" for case, dtype in both]
            metafunc.parametrize(("case", "dtype"), both, ids=ids)
        elif "case" in metafunc.fixturenames:
            counted = metafunc.function.__name__ == "test_flops"
            cases = [case for case in self.cases if not (counted and case.without_flops)]
            metafunc.parametrize("case", cases, ids=[case.name for case in cases])

    def test_every_row_is_run(self) -> None:
        """A row that is added without a case fails here, and so does one whose kernel draws without dropout in it."""
        assert self.cases, "a library without cases"
        for row in self.rows:
            if isinstance(row, DecompositionOp):
                continue
            own = [case for case in self.cases if _serves(row, case)]
            assert bool(own) != (row.name in self.not_run), f"{row.name}: either a case, or a reason why there is none"
            if own and isinstance(row, (AttentionOp, OpaqueFunction)):
                if row.dropout not in (None, ALWAYS) and row.name not in self.not_dropped:
                    assert any(case.drops for case in own), f"{row.name} may draw: a case with dropout, or a reason"
                elif row.dropout is None:
                    assert not any(case.drops for case in own), f"{row.name} draws, and its row says never"
        reasons = {**self.not_run, **self.not_dropped}
        assert set(reasons) <= {row.name for row in self.rows}, "a reason for no row"
        assert all(reasons.values())

    def test_every_case_ends_in_an_op_with_a_row(self) -> None:
        assert [case.name for case in self.cases if classify(op_of(case.op)) is None] == []

    def test_every_op_of_a_row_has_a_formula(self) -> None:
        """The op of its backward, too, which is there under the name that the row has for it."""
        interception.install()
        for case in self.cases:
            resolved = classify(op_of(case.op))
            assert resolved is not None
            assert isinstance(resolved.row, AttentionOp)
            names = [resolved.qualified_name]
            if resolved.row.backward:
                names.append(f"{names[0].partition('::')[0]}::{resolved.row.backward}")
            for op in map(op_of, names):
                assert getattr(op, "overloadpacket", op) in flop_registry

    def test_flops(self, case: Case) -> None:
        """What torch's counter finds, beside the matrix products that are ops of their own."""
        interception.install()  # as fastac.enable does
        products = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}

        def of_attention() -> int:
            counts = counter.get_flop_counts().get("Global", {})
            return sum(flops for op, flops in counts.items() if op not in products)

        with FlopCounterMode(display=False) as counter:
            output = case.region(**case.inputs(case.dtypes[0]))
            forward = of_attention()
            output.sum().backward()
        assert (forward, of_attention() - forward) == case.flops()

    def test_matches_the_reference(self, case: Case, dtype: torch.dtype) -> None:
        """What the kernels of these tests compute is attention, through the real code that leads to them."""
        found, expected = train_step(case.region, case.inputs(dtype)), case.in_double(dtype)
        assert found.keys() == expected.keys()
        for name, tensor in expected.items():
            assert support.relative_error(found[name], tensor) < case.tolerances[dtype], name

    @pytest.mark.parametrize("engine", ["tape", "sac"])
    @pytest.mark.parametrize("policy", ["full", "attn_only"])
    def test_executions_and_gradients(
        self, case: Case, dtype: torch.dtype, policy: str, engine: str, attention_executions: Counter[str]
    ) -> None:
        """The kernel runs 1 / 2 / 1 times; once more when the census of the region is known."""
        inputs = case.inputs(dtype)
        reference = train_step(case.region, inputs)
        assert attention_executions == case.executions()
        region = functools.partial(support.run_checkpointed, case.region, policy=policy, engine=engine)
        for _ in range(2):
            attention_executions.clear()
            assert_same(train_step(region, inputs), reference)
            assert attention_executions == case.executions(2 if policy == "full" else 1)

    def test_dropout_in_the_kernel_and_after_it(self, case: Case, attention_executions: Counter[str]) -> None:
        """What follows the kernel draws from where it left the generator, also when it does not run."""
        inputs = case.inputs(case.dtypes[0])
        dropping = functools.partial(case.region, dropout_p=0.3)
        reference = train_step(dropping, inputs)
        attention_executions.clear()
        assert_same(train_step(functools.partial(fastac.checkpoint, dropping), inputs), reference)
        assert attention_executions == case.executions()
        selective = functools.partial(fastac.checkpoint, dropping, engine="sac")
        if not case.drops:
            assert_same(train_step(selective, inputs), reference)
            return
        outputs = [case.call(*(t.detach() for t in inputs.values()), dropout_p) for dropout_p in (0.0, 0.3)]
        assert not torch.equal(*outputs), "no dropout in the kernel"
        with pytest.raises(fastac.FastacError, match="draws random numbers"):
            train_step(selective, inputs)

    def test_number_of_keys(self, case: Case, attention_executions: Counter[str]) -> None:
        """Read from the right place, for each call of the op: so many save it, one more do not."""
        for keys in sorted(set(case.keys_of_calls)):
            for min_kv in (keys, keys + 1):
                policy = fastac.Policy("attn_only", min_kv=min_kv)
                attention_executions.clear()
                train_step(
                    functools.partial(fastac.checkpoint, case.region, policy=policy), case.inputs(case.dtypes[0])
                )
                expected = sum(1 if seen >= min_kv else 2 for seen in case.keys_of_calls)
                assert attention_executions == {case.kernel or case.op: expected}, f"min_kv={min_kv}"
