"""The parity tests: what every attention library is put through, case by case.

A file in tests/backends/libraries brings its package, CPU kernels and cases; the tests come by inheritance
(docs/adding_a_backend.md).

One run of a case is a region of a few operations around the attention, forward and backward. A kernel counts its own
executions in `support.executions`, so that what is found does not rest on fastac's bookkeeping.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import CheckpointError
from torch.utils.flop_counter import FlopCounterMode

import fastac
from fastac.registry import classify, find_op
from tests.support import Tensors, assert_region, assert_same, run_checkpointed, train_step

# No two alike, so that a dimension that is mistaken for another shows.
BATCH, HEADS, QUERIES, KEYS, DIM = 3, 2, 24, 10, 8
QUERY_LENGTHS, KEY_LENGTHS = (9, 3, 12), (6, 10, 5)  # of packed sequences; KEYS is the longest


@functools.cache
def ends(lengths: tuple[int, ...]) -> torch.Tensor:
    """Where packed sequences of these lengths begin, and where the last one ends: cu_seqlens."""
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


LENGTHS: dict[str, Any] = {
    "cu_seqlens_q": ends(QUERY_LENGTHS),
    "cu_seqlens_k": ends(KEY_LENGTHS),
    "max_seqlen_q": max(QUERY_LENGTHS),
    "max_seqlen_k": max(KEY_LENGTHS),
}
"""How most libraries describe packed sequences."""


SWAPPED = "torch's formula for this op takes (batch, sequence, heads, dim) for (batch, heads, sequence, dim)"
"""Why its counter does not count by the formula."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to call one op.

    op: `namespace::name`, with `.overload` where it has one. call: (query, key, value, dropout_p) -> output, all of
    shape (batch, heads, sequence, dim); packed (tokens, heads, dim), sequences of unequal length one after the other.
    function: the autograd.Function that is made visible, where no op shows the kernel.
    kernel: under which name executions are counted, where it is not that of the op (one that calls another inside).
    seen: the number of keys of each call of the op, where it is not called once, or not with `keys`.
    differentiable: False where the op has no autograd formula and runs on inputs that do not require grad.
    pairs: of a query and a key that are multiplied, of all heads and sequences; 0 for all that a sequence has.
    counts_backward: False where no op runs it. without_flops: why torch's counter does not count by the formula.
    drops: takes dropout.
    chooser: whose function of that name chooses what to attend to, by its first argument. turned: that argument, times
    a sign, which is -1 for another choice.
    """

    op: str
    call: Callable[..., torch.Tensor]
    way: str = ""
    function: type | None = None
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
    differentiable: bool = True
    pairs: int = 0
    counts_backward: bool = True
    without_flops: str = ""
    drops: bool = False
    dtype: torch.dtype = torch.float32
    chooser: tuple[Any, str] | None = None
    turned: Callable[[torch.Tensor, int], torch.Tensor] = torch.mul

    @property
    def name(self) -> str:
        op = self.op.partition("::")[2] if self.function is None else self.function.__name__
        return op + (f" ({self.way})" if self.way else "")

    @property
    def keys_of_calls(self) -> tuple[int, ...]:
        return self.seen or (max(self.key_lengths) if self.packed else self.keys,)

    def executions(self, times: int = 1) -> dict[str, int]:
        return {self.kernel or self.op: times * len(self.keys_of_calls)}

    def flops(self) -> tuple[int, int]:
        """Of forward and backward, by the products of softmax attention: two, and five."""
        pairs = self.pairs or self.heads * (
            sum(q * k for q, k in zip(self.query_lengths, self.key_lengths, strict=True))
            if self.packed
            else self.batch * self.queries * self.keys
        )
        product = 2 * pairs * self.dim
        return 2 * product, 5 * product if self.counts_backward and self.differentiable else 0

    def inputs(self) -> Tensors:
        generator = torch.Generator().manual_seed(0)
        kv_heads = self.kv_heads or self.heads
        queries: tuple[int, ...] = (self.batch, self.heads, self.queries, self.dim)
        keys: tuple[int, ...] = (self.batch, kv_heads, self.keys, self.dim)
        if self.packed:
            queries = (sum(self.query_lengths), self.heads, self.dim)
            keys = (sum(self.key_lengths), kv_heads, self.dim)
        shapes = {"query": queries, "key": keys, "value": keys}
        return {
            n: torch.randn(shape, generator=generator).to(self.dtype).requires_grad_() for n, shape in shapes.items()
        }

    def region(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0) -> Any:
        """Something to recompute before and after the attention; dropout after it draws from the same generator."""
        inputs = [torch.tanh(tensor) for tensor in (query, key, value)]
        if not self.differentiable:
            inputs = [tensor.detach() for tensor in inputs]
        output = torch.tanh(self.call(*inputs, dropout_p if self.drops else 0.0))
        return F.dropout(output, dropout_p) * torch.tanh(query)

    def is_of(self, row: Any) -> bool:
        if self.function is None:
            resolved = classify(find_op(self.op))
            return resolved is not None and resolved.row is row
        module = getattr(row, "module", "")
        return row.name == self.function.__name__ and bool(re.fullmatch(module, self.function.__module__))


def swapped(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """For a call whose tensors are (batch, sequence, heads, dim)."""
    return lambda q, k, v, p: call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), p).transpose(1, 2)


def contiguous(call: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """For a call of kernels that take no other tensors."""
    return lambda q, k, v, p: call(q.contiguous(), k.contiguous(), v.contiguous(), p)


class Parity:
    """The tests over the cases of one library.

    rows: of the library, each of which a case must run, or `refused` or `not_run` must name. refused: functions of
    (query, key, value) with the name of an op that does not train, which they call. not_run: with the reason.
    """

    cases: Sequence[Case] = ()
    rows: Sequence[Any] = ()
    refused: Sequence[Callable[..., Any]] = ()
    not_run: Mapping[str, str] = {}

    def __init_subclass__(cls) -> None:
        """Tests that have no case are left out; pytest would call them skipped."""
        for test in (name for name in vars(Parity) if name.startswith("test_") and name != "test_every_row_is_run"):
            if not cls._parameters(test):
                setattr(cls, test, None)

    @classmethod
    def _parameters(cls, test: str) -> list[Any]:
        if test == "test_refused":
            return list(cls.refused)
        concerns = {
            "test_flops": lambda case: not case.without_flops,
            "test_dropout_in_the_kernel_and_after_it": lambda case: case.drops,
            "test_recompute_keeps_what_was_chosen": lambda case: case.chooser is not None,
        }
        return [case for case in cls.cases if concerns.get(test, bool)(case)]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        parameters = self._parameters(metafunc.function.__name__)
        if "case" in metafunc.fixturenames:
            metafunc.parametrize("case", parameters, ids=[case.name for case in parameters])
        elif "function" in metafunc.fixturenames:
            metafunc.parametrize("function", parameters, ids=lambda function: function.__name__)

    def test_every_row_is_run(self) -> None:
        """A row that is added without a case fails here, and so does one whose kernel draws without dropout in it."""
        left_out = {*self.not_run, *(function.__name__ for function in self.refused)}
        assert self.cases or left_out, "a library without cases"
        for row in self.rows:
            own = [case for case in self.cases if case.is_of(row)]
            assert bool(own) != (row.name in left_out), f"{row.name}: either a case, or a reason why there is none"
            assert row.dropout or not any(case.drops for case in own), f"{row.name} draws, and its row says never"
        assert left_out <= {row.name for row in self.rows}, "a reason for no row"

    def test_parity(self, case: Case, attention_executions: Counter[str]) -> None:
        """Gradients of no checkpointing, bit for bit. The kernel runs once; twice where the policy wants more keys.

        Saved in two steps: the first region of its kind is watched.
        """
        inputs = case.inputs()
        reference = train_step(case.region, inputs)
        assert attention_executions == case.executions()
        least, most = min(case.keys_of_calls), max(case.keys_of_calls)
        for min_kv, times in ((least, 1), (least, 1), (most + 1, 2)):
            attention_executions.clear()
            policy = fastac.Policy("attn_only", min_kv=min_kv)
            assert_same(train_step(functools.partial(fastac.checkpoint, case.region, policy=policy), inputs), reference)
            assert attention_executions == case.executions(times), f"min_kv={min_kv}"

    def test_flops(self, case: Case) -> None:
        """What torch's counter finds, without matrix products that are ops of their own."""
        inputs = case.inputs()
        fastac.checkpoint(case.region, **inputs)  # the first of a process looks for ops, and gives them formulas
        products = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm}

        def of_attention() -> int:
            counts = counter.get_flop_counts().get("Global", {})
            return sum(flops for op, flops in counts.items() if op not in products)

        with FlopCounterMode(display=False) as counter:
            output = case.region(**inputs)
            forward = of_attention()
            output.sum().backward()
        assert (forward, of_attention() - forward) == case.flops()

    def test_dropout_in_the_kernel_and_after_it(self, case: Case, attention_executions: Counter[str]) -> None:
        """What follows the kernel draws from where it left the generator, also when it does not run."""
        inputs = case.inputs()
        assert_region(functools.partial(case.region, dropout_p=0.3), inputs, attention_executions)
        outputs = [case.call(*(t.detach() for t in inputs.values()), dropout_p) for dropout_p in (0.0, 0.3)]
        assert not torch.equal(*outputs), "no dropout in the kernel"

    def test_recompute_keeps_what_was_chosen(self, case: Case) -> None:
        assert case.chooser is not None
        inputs, (module, name) = case.inputs(), case.chooser
        reference = train_step(case.region, inputs)
        choose = getattr(module, name)

        def step(policy: str) -> Tensors:
            signs = itertools.cycle([1, -1])

            def choose_otherwise(scores: torch.Tensor, *args: Any, **options: Any) -> Any:
                return choose(case.turned(scores, next(signs)), *args, **options)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(module, name, choose_otherwise)
                return train_step(functools.partial(run_checkpointed, case.region, policy=policy), inputs)

        assert_same(step("attn_only"), reference)
        try:
            full = step("full")
        except CheckpointError:  # another choice of another size
            return
        assert any(not torch.equal(full[name], reference[name]) for name in reference), "no matter what it chooses"

    def test_refused(self, function: Callable[..., Any]) -> None:
        """Gradients before it would silently be None."""

        def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
            return function(torch.tanh(query), key, value) + query

        with pytest.raises(fastac.UnsupportedBackendError, match=rf"{function.__name__}\b.* does not train"):
            train_step(functools.partial(fastac.checkpoint, region), Case("", function).inputs())
