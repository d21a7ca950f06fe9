"""torch's FlopCounterMode counts attention: every row's op, forward and backward, by numbers worked out by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import fastac
from fastac import AttentionOp, registry
from fastac.engine import releases
from fastac.registry import Flops
from tests import support

if releases.is_at_least("2.10"):
    import torch.nn.attention.varlen  # defines its ops

# No two alike, so that a dimension that is mistaken for another shows.
BATCH, HEADS, KV_HEADS, QUERIES, KEYS, DIM, VALUE_DIM = 2, 6, 3, 24, 10, 8, 16
PAIRS = BATCH * HEADS * QUERIES * KEYS
FORWARD = 2 * PAIRS * (DIM + VALUE_DIM)
BACKWARD = 2 * PAIRS * (3 * DIM + 2 * VALUE_DIM)

QUERY_LENGTHS, KEY_LENGTHS = (9, 3, 12), (6, 10, 5)
PACKED_PAIRS = HEADS * (9 * 6 + 3 * 10 + 12 * 5)

OF_LIBRARIES = {"fa2", "fa3", "xformers", "fastvideo", "vsa", "sage", "diffusers"}
"""Backends whose ops are not torch's: the parity tests of tests/backends/libraries count theirs."""


@pytest.fixture(autouse=True)
def _own_table(rows_as_before: None) -> Iterator[None]:
    before = dict(flop_registry)
    yield
    flop_registry.clear()
    flop_registry.update(before)


def counted(function: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        function(*args, **kwargs)
    return {str(op): flops for op, flops in counter.get_flop_counts().get("Global", {}).items()}


def define(schema: str, output: Callable[..., Any]) -> Any:
    """An op of a name of its own, `fastac_tests::<name>`; output: of its arguments."""
    name, _, rest = schema.partition("(")
    if not name.endswith("_backward"):  # that is named by a test
        name = support.new_name(name)
    library = torch.library.Library("fastac_tests", "FRAGMENT")
    library.define(f"{name}({rest}")
    library.impl(name, output, "CompositeExplicitAutograd")
    support._libraries.append(library)
    return getattr(torch.ops.fastac_tests, name)


def register(op: Any, flops: dict[str, Any] | None = None, **options: Any) -> None:
    name = str(op).rpartition(".")[2]
    options = {"backend": "tests", "namespace": "fastac_tests", "name": name, "dropout": None} | options
    fastac.register(AttentionOp(**options, flops=Flops(**flops or {})))
    look_for_ops()


def look_for_ops() -> None:
    """fastac looks for the ops of its rows where it is enabled."""
    fastac.enable(support.stack(), blocks="blocks")


def tensors(layout: str = "bhsd") -> list[torch.Tensor]:
    shapes = ((HEADS, QUERIES, DIM), (KV_HEADS, KEYS, DIM), (KV_HEADS, KEYS, VALUE_DIM))
    found = [torch.randn(BATCH, *shape) for shape in shapes]
    return found if layout == "bhsd" else [tensor.transpose(1, 2) for tensor in found]


def output_of(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty(*query.shape[:-1], value.shape[-1])


# Every row


def test_every_op_of_a_row_has_a_formula_and_so_has_its_backward() -> None:
    look_for_ops()
    absent = set()
    for attention in registry.rows():
        if not isinstance(attention, AttentionOp) or attention.backend == "tests":
            continue
        present = [bound for bound in registry.present_ops() if bound.row is attention]
        if not present:
            absent.add(attention.backend)
        for bound in present:
            assert getattr(bound.op, "overloadpacket", bound.op) in flop_registry
            if attention.flops.backward:
                backward = registry.find_op(f"{attention.namespace}::{attention.flops.backward}")
                assert backward is not None, f"no op {attention.flops.backward}"
                assert getattr(backward, "overloadpacket", backward) in flop_registry
    assert absent <= OF_LIBRARIES | ({"varlen"} if not releases.is_at_least("2.10") else set())


@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS])
def test_of_torchs_attention_for_cpus(kv_heads: int) -> None:
    """torch has no formula for it. Heads are those of the queries."""
    look_for_ops()
    query = torch.randn(BATCH, HEADS, QUERIES, DIM, requires_grad=True)
    key, value = (torch.randn(BATCH, kv_heads, KEYS, DIM, requires_grad=True) for _ in range(2))
    op = "aten._scaled_dot_product_flash_attention_for_cpu"
    found = counted(lambda: F.scaled_dot_product_attention(query, key, value, enable_gqa=True).sum().backward())
    assert found == {op: 4 * PAIRS * DIM, f"{op}_backward": 10 * PAIRS * DIM}


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_unequal_lengths_heads_and_head_dims(layout: str) -> None:
    op = define("uneven(Tensor query, Tensor key, Tensor value) -> Tensor", output_of)
    backward = f"{str(op).rpartition('.')[2]}_backward"
    of_backward = define(
        f"{backward}(bool flag, Tensor grad, Tensor query, Tensor key, Tensor value) -> Tensor",
        lambda flag, grad, query, key, value: torch.empty_like(query),
    )
    register(op, layout=layout, flops={"backward": backward})
    query, key, value = tensors(layout)
    output = op(query, key, value)
    assert counted(op, query, key, value) == {str(op): FORWARD}
    assert counted(of_backward, True, output, query, key, value=value) == {str(of_backward): BACKWARD}


# Packed and sparse attention: what counts where values can be read, and on the device meta, where they cannot


QKV = "Tensor query, Tensor key, Tensor value"


def ends(lengths: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def packed_tensors() -> list[torch.Tensor]:
    queries, keys = sum(QUERY_LENGTHS), sum(KEY_LENGTHS)
    return [torch.empty(queries, HEADS, DIM), *(torch.empty(keys, KV_HEADS, dim) for dim in (DIM, VALUE_DIM))]


def padding(tokens: int, *lengths: int) -> torch.Tensor:
    return torch.arange(tokens) < torch.tensor(lengths)[:, None]


# Two blocks of 12 queries, five blocks of two keys.
CHOSEN = torch.zeros(BATCH, HEADS, 2, 5, dtype=torch.bool)
CHOSEN[:, :, 0, 1] = CHOSEN[:, :, 1, 2:4] = True
LISTS = torch.zeros(BATCH, HEADS, 2, 3, dtype=torch.int32)  # with room for three blocks
IN_LISTS = (LISTS, CHOSEN.sum(-1), torch.full((5,), 2))
BY_BLOCKS = 2 * BATCH * HEADS * (12 * 2) * (DIM + VALUE_DIM)
BY_MAP = {"layout": "bhsd", "flops": {"blocks": ("map",)}}

CASES: dict[str, tuple[str, dict[str, Any], list[Any], int, int | None]] = {
    "packed": (
        "Tensor? ends_q, Tensor? ends_k, int longest=-1",
        {"layout": "thd", "max_kv": "longest", "flops": {"offsets": ("ends_q", "ends_k")}},
        [*packed_tensors(), ends(QUERY_LENGTHS), ends(KEY_LENGTHS), 10],
        2 * PACKED_PAIRS * (DIM + VALUE_DIM),
        2 * sum(QUERY_LENGTHS) * HEADS * 10 * (DIM + VALUE_DIM),  # by the longest
    ),
    "masks of padding": (
        "Tensor mask_q, Tensor mask_k",
        {"flops": {"offsets": ("mask_q", "mask_k")}},
        [*tensors("bshd"), padding(QUERIES, 20, 7), padding(KEYS, 9, 4)],
        2 * HEADS * (20 * 9 + 7 * 4) * (DIM + VALUE_DIM),
        None,
    ),
    "lists of blocks": (
        "Tensor lists, Tensor number, Tensor sizes",
        {"layout": "bhsd", "flops": {"blocks": ("lists", "number")}, "coarse": "sizes"},
        [*tensors(), *IN_LISTS],
        BY_BLOCKS * 3,
        BY_BLOCKS * 2 * 3,  # by the room in the lists
    ),
    "a map of blocks": ("Tensor map", BY_MAP, [*tensors(), CHOSEN], BY_BLOCKS * 3, FORWARD),
    "one map for all heads": ("Tensor map", BY_MAP, [*tensors(), CHOSEN[:1, :1].int()], BY_BLOCKS * 3, None),
}
"""Further arguments of an op, its row, a call, its FLOPs, and its FLOPs where values cannot be read."""


@pytest.mark.parametrize("case", CASES)
def test_packed_and_sparse_attention(case: str) -> None:
    arguments, options, args, flops, without_values = CASES[case]
    op = define(f"attend({QKV}, {arguments}) -> Tensor", output_of)
    register(op, **options)
    assert counted(op, *args) == {str(op): flops}
    if without_values is not None:
        on_meta = [one.to("meta") if isinstance(one, torch.Tensor) else one for one in args]
        assert counted(op, *on_meta) == {str(op): without_values}


# When


def test_a_formula_that_is_there_stays() -> None:
    op = define("own_formula(Tensor query, Tensor key, Tensor value) -> Tensor", output_of)
    torch.utils.flop_counter.register_flop_formula(op)(lambda *args, **kwargs: 7)
    register(op)
    assert counted(op, *tensors()) == {str(op): 7}


def test_the_op_of_compiled_flex_attention() -> None:
    look_for_ops()
    formula = flop_registry[torch.ops.fastac_compiled.flex_attention]
    output = output_of(*tensors())
    assert formula(*tensors(), [], [], 0, out_val=(output, output[..., 0], output[..., 0])) == FORWARD
