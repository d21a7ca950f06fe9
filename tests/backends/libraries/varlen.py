"""torch.nn.attention.varlen: the real custom ops and their Python layer, over `aten::_flash_attention_forward`.

Also the exchange of kernels below the aten ops, which `activate_flash_attention_impl` does: what is saved must be what
the kernel of the moment computes, however late it came.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    register_flash_attention_impl,
    restore_flash_attention_impl,
)
from torch.nn.attention.varlen import AuxRequest, varlen_attn, varlen_attn_out

import fastac
from fastac.engine import interception
from fastac.backends import varlen
from tests.backends import aten_on_cpu, kernels_on_cpu
from tests.backends.parity import KEY_LENGTHS, QUERY_LENGTHS, Case, Parity, causal, ends, window
from tests.support import Tensors, assert_same, train_step

OP, KERNEL = "torch_attn::_varlen_attn", "aten::_flash_attention_forward"
LONGEST_QUERY, LONGEST_KEY = max(QUERY_LENGTHS), max(KEY_LENGTHS)


@pytest.fixture(scope="module", autouse=True)
def _cpu_kernels() -> Iterator[None]:
    with aten_on_cpu.registered():
        yield


def cross(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float, **options: Any) -> torch.Tensor:
    ends_of_both = ends(QUERY_LENGTHS), ends(KEY_LENGTHS)
    return varlen_attn(query, key, value, *ends_of_both, LONGEST_QUERY, LONGEST_KEY, **options)


def own(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _: float, **options: Any) -> torch.Tensor:
    """Self-attention: keys are where queries are."""
    return varlen_attn(query, key, value, *2 * (ends(QUERY_LENGTHS),), LONGEST_QUERY, LONGEST_QUERY, **options)


_case = functools.partial(Case, OP, kernel=KERNEL, packed=True)

CASES = [
    _case(cross),
    _case(own, way="self", key_lengths=QUERY_LENGTHS),
    _case(functools.partial(cross, enable_gqa=True), way="grouped", heads=4, kv_heads=2),
    _case(functools.partial(own, window_size=(-1, 0)), way="causal", key_lengths=QUERY_LENGTHS, mask=causal),
    _case(functools.partial(own, window_size=(2, 1)), way="window", key_lengths=QUERY_LENGTHS, mask=window(2, 1)),
    _case(lambda *args: cross(*args, return_aux=AuxRequest(lse=True))[0], way="with statistics"),
]


# activate_flash_attention_impl: the exchange of kernels


def region(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return torch.tanh(cross(torch.tanh(query), torch.tanh(key), torch.tanh(value), 0.0))


def dense(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    output = torch.ops.aten._scaled_dot_product_flash_attention(torch.tanh(query), key, value)[0]
    return torch.tanh(output)


OPS: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], Tensors]]] = {
    "aten::_flash_attention_forward": (region, CASES[0].inputs),
    "aten::_scaled_dot_product_flash_attention": (dense, Case("", dense).inputs),
}


@pytest.fixture
def _restored() -> Iterator[None]:
    yield
    if current_flash_attention_impl() is not None:
        restore_flash_attention_impl()


class Replacement:
    """Kernels in the place of others for as long as it is active, as those of FA3 and FA4. Twice the output."""

    def __init__(self, *ops: str) -> None:
        self.library = torch.library.Library("aten", "IMPL")
        for op in ops:
            name = op.removeprefix("aten::")
            packet = getattr(torch.ops.aten, name)
            kernel = kernels_on_cpu.forward_kernel(f"replaced {op}", packet.default, aten_on_cpu.FORWARD[name])
            self.library.impl(name, functools.partial(self._twice, kernel), "CPU", allow_override=True)

    @staticmethod
    def _twice(kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        output, *others = kernel(*args, **kwargs)
        return (2 * output, *others)

    def remove(self) -> None:
        """As torch asks a handle."""
        self.library._destroy()


def _saves_what_the_kernel_of_the_moment_computes(op: str, executions: Counter[str]) -> None:
    run, inputs_of = OPS[op]
    inputs = inputs_of()
    executions.clear()
    expected = train_step(run, inputs)
    (kernel,) = executions
    for engine in ("tape", "sac"):
        executions.clear()
        assert_same(train_step(functools.partial(fastac.checkpoint, run, engine=engine), inputs), expected)
        assert executions == {kernel: 1}


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.usefixtures("_restored")
def test_another_kernel_was_activated_before(attention_executions: Counter[str]) -> None:
    """In a process where fastac has not met the ops yet, so this is the first test."""
    register_flash_attention_impl("twice", register_fn=lambda: Replacement(*OPS))
    activate_flash_attention_impl("twice")
    assert not set(OPS) & set(interception.intercepted())
    for op in OPS:
        _saves_what_the_kernel_of_the_moment_computes(op, attention_executions)
        assert attention_executions == {f"replaced {op}": 1}


@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.usefixtures("_restored")
def test_another_kernel_is_activated_after(op: str, attention_executions: Counter[str]) -> None:
    """Where fastac already stands at the op; and when the first kernel is restored."""
    register_flash_attention_impl("twice", register_fn=lambda: Replacement(*OPS))
    _saves_what_the_kernel_of_the_moment_computes(op, attention_executions)
    assert attention_executions == {op: 1}
    activate_flash_attention_impl("twice")
    interception.install()
    _saves_what_the_kernel_of_the_moment_computes(op, attention_executions)
    assert attention_executions == {f"replaced {op}": 1}
    restore_flash_attention_impl()
    _saves_what_the_kernel_of_the_moment_computes(op, attention_executions)
    assert attention_executions == {op: 1}


class TestParity(Parity):
    cases = CASES
    rows = varlen.ROWS


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_the_variant_that_writes_its_output_is_refused(engine: str) -> None:
    """Its op has no backward and no row: a region with it can not be saved, and says so."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_flash_attention_forward_no_dropout_inplace", _writes_its_output, "CPU")

    def written(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            lengths = ends(QUERY_LENGTHS), ends(KEY_LENGTHS), LONGEST_QUERY, LONGEST_KEY
            out = varlen_attn_out(torch.empty_like(query), query, key, value, *lengths)
        return torch.tanh(query) * out

    try:
        with pytest.raises(fastac.PolicyNotAppliedError, match="_varlen_attn_out"):
            train_step(functools.partial(fastac.checkpoint, written, engine=engine), CASES[0].inputs())
    finally:
        library._destroy()


def _writes_its_output(out: torch.Tensor, query: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    out.copy_(query)
    return query.new_zeros(query.shape[1], query.shape[0])


def test_a_kernel_that_changes_between_forward_and_backward(attention_executions: Counter[str]) -> None:
    """What was saved is what the forward computed."""
    inputs = CASES[0].inputs()
    expected = train_step(region, inputs)
    replacements = []

    def backward(loss: torch.Tensor) -> None:
        replacements.append(Replacement(KERNEL))
        loss.backward()

    attention_executions.clear()
    try:
        assert_same(train_step(functools.partial(fastac.checkpoint, region), inputs, backward=backward), expected)
    finally:
        replacements[0].remove()
    assert attention_executions == {KERNEL: 1}


def test_what_fa3_and_fa4_register_are_ops_with_rows() -> None:
    """The kernels that torch can exchange, read from its own registration: each belongs to an op that is saved."""
    from torch.nn.attention import _fa3, _fa4

    registered: set[str] = set()

    class Recorder:
        def __init__(self, *args: Any) -> None: ...

        def impl(self, name: str, function: Any, key: str) -> None:
            registered.add(f"aten::{name}")

    with pytest.MonkeyPatch.context() as patch:
        for module in (_fa3, _fa4):
            patch.setattr(module, "Library", Recorder)
        _fa3._fa3_register_kernels()
        _fa4._fa4_register_kernels()
    forwards = {name for name in registered if "backward" not in name and "inplace" not in name}
    assert forwards == {
        "aten::_flash_attention_forward",
        "aten::_flash_attention_forward.quantized",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention.quantized",
    }
    interception.install()
    assert forwards <= set(interception.intercepted())
