"""Rows: what a well-formed row is, which op it claims, and how it reads a call."""

from __future__ import annotations

import functools
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastac
from fastac import AttentionOp, FastacError, Policy, registry
from fastac.registry import Flops
from tests import support
from tests.support import assert_region, assert_same, train_step

QKV = "Tensor query, Tensor key, Tensor value"

pytestmark = pytest.mark.usefixtures("rows_as_before")

Define = Callable[[str], torch._ops.OpOverload]


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test has: an op cannot be removed again."""
    return support.new_name("fastac_rows")


@pytest.fixture
def define(namespace: str) -> Iterator[Define]:
    """Define an op from its schema, such as "attend(Tensor query) -> Tensor". It draws when its fourth is a tensor."""
    library = torch.library.Library(namespace, "FRAGMENT")

    def defined(schema: str) -> torch._ops.OpOverload:
        library.define(schema)
        qualified = schema.partition("(")[0]
        name, _, overload = qualified.partition(".")

        def kernel(query: torch.Tensor, *others: Any) -> torch.Tensor:
            support.executions[name] += 1
            return query * torch.rand(()) if isinstance(others[-1], torch.Tensor) and len(others) > 2 else query.clone()

        for key in ("CPU", "NestedTensorCPU"):
            library.impl(qualified, kernel, key)
        library.impl(qualified, torch.library.fallthrough_kernel, "AutogradNestedTensor")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")

    support.executions.clear()
    yield defined
    library._destroy()


def row(**options: Any) -> AttentionOp:
    return AttentionOp(**{"backend": "tests", "namespace": "nowhere", "name": "attend", **options})


def row_of(op: Any) -> Any:
    found = registry.classify(op)
    return None if found is None else found.row


def run(op: Any, *others: Any, key: Any = None, policy: str | Policy = "attn_only") -> None:
    """A step through a region that calls an op. others: its arguments behind query, key and value."""
    query = torch.ones(1, 2, 2, 4, requires_grad=True)
    key = query.detach() if key is None else key

    def region(query: torch.Tensor) -> torch.Tensor:
        return op(query.detach().sin(), key, key, *others).sin() * query.sin()

    fastac.checkpoint(region, query, policy=policy).sum().backward()


# What is refused


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("flash_attn", "str"),
        (row(namespace="fl[ash"), "regular expression"),
        (row(namespace="mine::"), "without '::'"),
        (row(namespace=""), "no namespace or module"),
        (row(name="flash_attn::forward"), "name"),
        (row(layout="bsd"), "layout 'bsd'"),
        (row(dropout=False), "dropout is False"),
        (row(flops=Flops(offsets=("cu_seqlens",))), "two arguments"),
        (fastac.Row(namespace="mine", name="choose", kind="chioce"), "kind 'chioce'"),
        (fastac.Row(namespace="mine", name="choose", kind="attention"), "kind 'attention'"),
        (row(flops=Flops(blocks=("query", "key"))), "coarse"),
    ],
    ids=str,
)
def test_a_row_that_is_not_well_formed(wrong: Any, message: str) -> None:
    """Nothing is registered when one of several rows is wrong."""
    fine = row(name=support.new_name("fine"))
    with pytest.raises(FastacError, match=message):
        fastac.register(fine, wrong)
    fastac.register(fine)


def test_a_row_that_is_registered_again(define: Define, namespace: str) -> None:
    """As by a notebook's cell that is run again. Another row for the op replaces it only if that is asked for."""
    op = define(f"attend({QKV}) -> Tensor")
    mine, other = row(namespace=namespace), row(namespace=namespace, layout="bhsd")
    for _ in range(2):
        fastac.register(mine)
        assert row_of(op) is mine
    with pytest.raises(FastacError, match=r"another row.*layout='bshd'.*replace=True"):
        fastac.register(other)
    assert row_of(op) is mine
    fastac.register(other, replace=True)
    assert row_of(op) is other


@pytest.mark.parametrize(
    ("options", "key", "lengths", "message"),
    [
        ({}, torch.ones(2, 3), None, r"layout of 'key' is 'bshd'.*\(2, 3\)"),
        ({"key": "kv"}, None, None, r"the layout of 'kv' is 'bshd', and it was called with a NoneType: None"),
        ({"max_kv": "lengths"}, None, [3, 4], r"'lengths' is the number of keys, .* called with \[3, 4\]"),
        ({}, torch.nested.nested_tensor([torch.ones(2, 2, 4)]), None, "called with a strided nested tensor"),
    ],
    ids=["fewer dimensions", "no key", "a list for max_kv", "nested"],
)
def test_arguments_that_are_not_what_the_row_says(
    options: dict[str, Any], key: Any, lengths: Any, message: str, define: Define, namespace: str
) -> None:
    op = define(f"attend({QKV}, Tensor? kv=None, int[]? lengths=None) -> Tensor")
    fastac.register(row(namespace=namespace, **options))
    with pytest.raises(FastacError, match=message):
        run(op, None, lengths, key=key)


def test_a_dropout_that_is_a_tensor_is_not_read(define: Define, namespace: str) -> None:
    """The kernel may draw. Dropout that follows it is that of no checkpointing."""
    attend = define(f"attend({QKV}, Tensor rate) -> Tensor")
    fastac.register(row(namespace=namespace, dropout="rate"))

    def region(query: torch.Tensor) -> torch.Tensor:
        key = query.detach()
        return F.dropout(attend(query.detach().sin(), key, key, torch.zeros(2)).sin() * query.sin())

    assert_region(region, {"query": torch.ones(1, 2, 2, 4, requires_grad=True)}, support.executions)


@pytest.mark.parametrize(
    ("schema", "options", "message"),
    [
        (f"attend({QKV}, Tensor(a!) out) -> Tensor", {}, r"writes.*'out'"),
        (f"attend({QKV}) -> int", {}, "no tensor"),
        (f"attend({QKV}) -> Tensor", {"key": "k"}, r"'k'.*query, key, value"),
        (f"attend({QKV}, float scale) -> Tensor", {"key": "scale"}, "'scale' holds the keys, and its type is float"),
        ("attend(Tensor[] key) -> Tensor", {}, r"'key' holds the keys, and its type is List\[Tensor\]"),
        (f"attend({QKV}) -> Tensor", {"max_kv": "k"}, "'k'"),
        (f"attend({QKV}) -> Tensor", {"coarse": "blocks"}, "'blocks'"),
        (f"attend({QKV}) -> Tensor", {"selection": ("b",)}, "'b'"),
        (f"attend({QKV}) -> Tensor", {"flops": Flops(offsets=("query", "nowhere"))}, "'nowhere'"),
        (f"attend({QKV}) -> Tensor", {"flops": Flops(blocks=("nowhere",))}, "'nowhere'"),
    ],
)
@pytest.mark.parametrize("loaded", ["before", "after"])
def test_an_op_that_a_row_does_not_fit(
    loaded: str, schema: str, options: dict[str, Any], message: str, define: Define, namespace: str
) -> None:
    """Refused when it is registered, or when the op is called whose library was loaded later."""
    wrong = row(namespace=namespace, **options)
    if loaded == "before":
        define(schema)
        with pytest.raises(FastacError, match=message):
            fastac.register(wrong)
    else:
        fastac.register(wrong)
        op = define(schema)
        with pytest.raises(FastacError, match=message):
            registry.classify(op)


def test_two_rows_that_claim_one_op(define: Define, namespace: str) -> None:
    """An error at `register`, or at the op that is loaded later; other ops are not hindered."""
    op = define(f"attend({QKV}) -> Tensor")
    fastac.register(row(namespace=namespace), row(namespace=namespace, name="later"))
    with pytest.raises(FastacError, match=f"{namespace}::attend"):
        fastac.register(row(namespace="fastac_rows_.*"))
    fastac.register(row(namespace=f"{namespace}|more", name="later"))
    with pytest.raises(FastacError, match="2 rows"):
        run(define(f"later({QKV}) -> Tensor"))
    fastac.register(row(name=support.new_name("another")))
    assert row_of(op) is not None


# Which op a row claims


def test_which_op_a_row_claims(define: Define, namespace: str) -> None:
    """A namespace is a pattern over the whole of it, as hub builds carry their own; names are compared whole."""
    op, other = define(f"attend({QKV}) -> Tensor"), define(f"attend_backward({QKV}) -> Tensor")
    scaled = define(f"attend.scaled({QKV}, float scale) -> Tensor")
    fastac.register(row(namespace=namespace[:-1]))
    assert row_of(op) is None
    mine = row(namespace=namespace[:-8] + r"\w{8}")
    fastac.register(mine)
    assert row_of(op) is row_of(scaled) is mine
    assert row_of(other) is None
    for unlike in (torch.ops.aten.mm.default, torch.ops.higher_order.cond, F.softmax):
        assert row_of(unlike) is None


def test_two_ops_of_one_name_are_told_by_an_argument(define: Define, namespace: str) -> None:
    """As flash-attn 2 and 3 had it for a month."""
    rows = [row(namespace=namespace, backend=name, with_argument=name) for name in ("dropout_p", "qv")]
    fastac.register(*rows)
    assert row_of(define(f"attend({QKV}, Tensor? qv=None) -> Tensor")) is rows[1]
    assert row_of(define(f"attend.other({QKV}, float dropout_p=0.) -> Tensor")) is rows[0]
    assert row_of(define(f"attend.neither({QKV}) -> Tensor")) is None


def test_choices_have_rows_where_they_do_not_write() -> None:
    for packet in (torch.ops.aten.topk, torch.ops.aten.sort):
        for overload in packet.overloads():
            op = getattr(packet, overload)
            writes = any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
            assert (row_of(op) is None) == writes, op


# How a call is read


CALLS: dict[str, tuple[dict[str, Any], list[Any], int]] = {
    "bshd": ({"layout": "bshd"}, [torch.zeros(1, 9, 2, 4)], 9),
    "bhsd": ({"layout": "bhsd"}, [torch.zeros(1, 2, 9, 4)], 9),
    "thd": ({"layout": "thd"}, [torch.zeros(9, 2, 4)], 9),
    "packed in one tensor": ({"layout": "bs3hd"}, [torch.zeros(1, 9, 3, 2, 4)], 9),
    "max_kv": ({"layout": "thd", "max_kv": "max_k"}, [torch.zeros(9, 2, 4), 3], 3),
    "max_kv, not given": ({"layout": "thd", "max_kv": "max_k"}, [torch.zeros(9, 2, 4), None], 9),
    "max_kv of -1, as xFormers has it": ({"layout": "thd", "max_kv": "max_k"}, [torch.zeros(9, 2, 4), -1], 9),
}


@pytest.mark.parametrize("by_name", [False, True], ids=["by position", "by name"])
@pytest.mark.parametrize("call", CALLS)
def test_keys_are_counted(call: str, by_name: bool, define: Define, namespace: str) -> None:
    options, (key, *rest), keys = CALLS[call]
    op = define(f"attend({QKV}, int? max_k=None) -> Tensor")
    fastac.register(row(namespace=namespace, dropout=None, **options))

    def named(query: Any, key: Any, value: Any, *rest: Any) -> Any:
        return op(query, key=key, value=value, **dict(zip(["max_k"], rest, strict=False)))

    for min_kv, executions in ((keys, 1), (keys + 1, 2)):
        support.executions.clear()
        run(named if by_name else op, *rest, key=key, policy=Policy("attn_only", min_kv=min_kv))
        assert support.executions.total() == executions


@pytest.mark.parametrize("policy", ["attn_only", "long_attn_only"])
def test_an_op_that_does_not_train_is_refused_with_its_note(policy: str, define: Define, namespace: str) -> None:
    """It may write, as SageAttention's do: refused where it is called, with the better reason."""
    op = define(f"attend({QKV}, Tensor(a!)? output=None) -> Tensor")
    fastac.register(row(namespace=namespace, trains=False, note="for inference alone"))
    with pytest.raises(fastac.UnsupportedBackendError, match="for inference alone"):
        run(op, policy=policy)


# Libraries


def test_no_library_is_imported_to_find_its_ops() -> None:
    before = set(sys.modules)
    fastac.register(row(namespace=r"flash_attn|xformers\w*", name=support.new_name("forward")))
    fastac.checkpoint(torch.sin, torch.ones(1, requires_grad=True))
    assert not {name.partition(".")[0] for name in set(sys.modules) - before} & {"flash_attn", "xformers"}


def test_a_library_that_is_loaded_between_two_regions(
    monkeypatch: pytest.MonkeyPatch, attention_executions: Counter[str]
) -> None:
    """Its op is saved from the first call on, also in a region that is known for long."""
    name = support.new_name("imported")
    fastac.register(row(namespace=support.NAMESPACE, name=name, layout="bhsd", dropout=None))
    inputs = support.attention_inputs(8, 8)
    attend: list[Any] = [F.scaled_dot_product_attention]

    def region(query: Any, key: Any, value: Any) -> Any:
        return torch.tanh(attend[0](torch.tanh(query), key, value))

    train_step(functools.partial(fastac.checkpoint, region), inputs)
    attend[0] = support.attention_function(support.define_attention_op(name))
    monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    reference = train_step(region, inputs)
    attention_executions.clear()
    assert_same(train_step(functools.partial(fastac.checkpoint, region), inputs), reference)
    assert attention_executions == {f"{support.NAMESPACE}::{name}": 1}
