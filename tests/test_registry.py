"""Rows: what a well-formed row is, which op it claims, and how it reads a call."""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import fastac
from fastac import hook, registry
from fastac.diagnosis.recognition import looks_like_attention_forward
from fastac.registry import ResolvedOp
from fastac.registry import AttentionOp, CollectiveOp, DecompositionOp, SelectionOp
from tests import support

SDPA_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

QKV = "Tensor query, Tensor key, Tensor value"


pytestmark = pytest.mark.usefixtures("rows_as_before")


@pytest.fixture
def namespace() -> str:
    """A namespace that no other test has: an op can not be taken away again."""
    return f"fastac_rows_{uuid.uuid4().hex[:8]}"


Define = Callable[[str], torch._ops.OpOverload]


@pytest.fixture
def define(namespace: str) -> Iterator[Define]:
    """Define an op from its schema, such as "attend(Tensor query) -> Tensor"."""
    library = torch.library.Library(namespace, "FRAGMENT")

    def defined(schema: str) -> torch._ops.OpOverload:
        library.define(schema)
        name, _, overload = schema.partition("(")[0].partition(".")
        return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")

    yield defined
    registry._decisions.clear()
    library._destroy()


def row(**options: Any) -> AttentionOp:
    return AttentionOp(**{"backend": "tests", "namespace": "nowhere", "name": "attend", **options})


# What is refused


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("flash_attn", "expected a fastac.AttentionOp, got str"),
        (row(namespace="fl[ash"), "is not a regular expression"),
        (row(name="flash_attn::forward"), "bare name of an op.*AttentionOp"),
        (row(name="forward.default"), "bare name of an op"),
        (row(name=""), "bare name of an op"),
        (row(layout="bsd"), "layout 'bsd' of attend is none of bshd, bhsd, thd"),
    ],
)
def test_a_row_that_is_not_well_formed(wrong: Any, message: str) -> None:
    before = registry.rows()
    with pytest.raises(fastac.FastacError, match=message):
        fastac.register(wrong)
    assert registry.rows() == before


def test_rows_name_their_fields() -> None:
    with pytest.raises(TypeError):
        AttentionOp("fa2", "flash_attn", "_flash_attn_forward")  # type: ignore[misc]


def test_a_second_row_for_the_same_op() -> None:
    fastac.register(row())
    with pytest.raises(fastac.FastacError, match="there is a row for nowhere::attend already"):
        fastac.register(row(layout="bhsd"))


def test_two_patterns_that_claim_one_loaded_op(define: Define, namespace: str) -> None:
    define(f"attend({QKV}) -> Tensor")
    fastac.register(row(namespace=namespace))
    before = registry.rows()
    with pytest.raises(fastac.FastacError, match=f"{namespace}::attend is claimed by 2 rows"):
        fastac.register(row(namespace="fastac_rows_.*"))
    assert registry.rows() == before


def test_two_patterns_that_claim_an_op_loaded_later(define: Define, namespace: str) -> None:
    fastac.register(row(namespace=namespace), row(namespace="fastac_rows_.*"))
    op = define(f"attend({QKV}) -> Tensor")
    with pytest.raises(fastac.FastacError, match="is claimed by 2 rows"):
        registry.classify(op)


def test_an_op_that_always_writes_an_argument(define: Define, namespace: str) -> None:
    define(f"attend({QKV}, Tensor(a!) out) -> Tensor")
    with pytest.raises(fastac.FastacError, match=r"writes its argument 'out'.*wrong gradients"):
        fastac.register(row(namespace=namespace))


def test_an_op_that_returns_no_tensor(define: Define, namespace: str) -> None:
    define(f"attend({QKV}) -> int")
    with pytest.raises(fastac.FastacError, match="returns no tensor"):
        fastac.register(row(namespace=namespace))


@pytest.mark.parametrize("field", ["key", "max_kv", "dropout"])
def test_an_argument_that_the_op_does_not_have(field: str, define: Define, namespace: str) -> None:
    define(f"attend({QKV}) -> Tensor")
    with pytest.raises(fastac.FastacError, match=r"'k', which the op does not have.*query, key, value"):
        fastac.register(row(namespace=namespace, **{field: "k"}))


def test_nothing_is_registered_when_one_of_several_rows_is_wrong() -> None:
    before = registry.rows()
    with pytest.raises(fastac.FastacError):
        fastac.register(row(), row(name="no such name"))
    assert registry.rows() == before
    fastac.register(row())  # it was not left behind


# Which op a row claims


def test_a_namespace_is_a_pattern_over_the_whole_namespace(define: Define, namespace: str) -> None:
    """Hub builds carry a build-specific namespace; another library's may begin alike."""
    op = define(f"attend({QKV}) -> Tensor")
    fastac.register(row(namespace=namespace[:-1]))
    assert registry.classify(op) is None
    pattern = row(namespace=r"fastac_rows_\w{8}", backend="mine")
    fastac.register(pattern)
    found = registry.classify(op)
    assert found is not None
    assert found.row is pattern


def test_names_are_compared_whole(define: Define, namespace: str) -> None:
    fastac.register(row(namespace=namespace))
    assert registry.classify(define(f"attend_backward({QKV}) -> Tensor")) is None


def test_every_overload_of_an_op_is_claimed(define: Define, namespace: str) -> None:
    define(f"attend({QKV}) -> Tensor")
    define(f"attend.scaled({QKV}, float scale) -> Tensor")
    fastac.register(row(namespace=namespace))
    found = {op.qualified_name for op in registry.present_ops() if op.qualified_name.startswith(namespace)}
    assert found == {f"{namespace}::attend", f"{namespace}::attend.scaled"}


def test_an_implementation_without_a_definition_is_no_op_yet(namespace: str) -> None:
    library = torch.library.Library(namespace, "IMPL")
    library.impl("attend", lambda query, key, value: query, "CPU")
    fastac.register(row(namespace=namespace))
    assert not [op for op in registry.present_ops() if op.qualified_name.startswith(namespace)]


def test_a_decision_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    registry._decisions.clear()
    lookups = []
    row_of = registry._row_of
    monkeypatch.setattr(registry, "_row_of", lambda op: lookups.append(str(op)) or row_of(op))
    ops = [SDPA_CPU, torch.ops.aten.mm.default]
    first = [registry.classify(op) for op in ops]
    assert [registry.classify(op) for op in ops] == first
    assert lookups == [str(op) for op in ops]


def test_registering_clears_what_was_decided(define: Define, namespace: str) -> None:
    op = define(f"attend({QKV}) -> Tensor")
    assert registry.classify(op) is None
    fastac.register(row(namespace=namespace))
    assert registry.classify(op) is not None


def test_a_registration_that_failed_leaves_no_decision(define: Define, namespace: str) -> None:
    op = define(f"attend({QKV}) -> Tensor")
    with pytest.raises(fastac.FastacError):
        fastac.register(row(namespace=namespace), row(name="no such name"))
    assert registry.classify(op) is None


@pytest.mark.parametrize("other", [torch.ops.aten.mm, torch.ops.higher_order.cond, torch.nn.functional.softmax])
def test_what_is_no_overload_has_no_row(other: object) -> None:
    assert registry.classify(other) is None


def test_no_library_is_imported_to_classify_its_ops() -> None:
    fastac.register(row(namespace=r"flash_attn|xformers\w*", name="_flash_attn_forward"))
    before = set(sys.modules)
    registry.present_ops()
    hook.unavailable("tests")
    assert set(sys.modules) == before


# How a call is read


ARGUMENTS = f"{QKV}, float p=0.0, int? max_k=None"


@pytest.fixture
def packed(define: Define, namespace: str) -> ResolvedOp:
    op = define(f"attend({ARGUMENTS}) -> Tensor")
    return ResolvedOp(op, row(namespace=namespace, layout="thd", dropout="p", max_kv="max_k"))


def tensors(keys: int = 7) -> list[torch.Tensor]:
    return [torch.zeros(5, 2, 4), torch.zeros(keys, 2, 4), torch.zeros(keys, 2, 4)]


def test_an_argument_is_found_however_it_was_passed(packed: ResolvedOp) -> None:
    query, key, value = tensors()
    assert packed.argument("p", [query, key, value, 0.5], {}) == 0.5
    assert packed.argument("p", [query, key, value], {"p": 0.25}) == 0.25
    assert packed.argument("p", [query, key, value], {}) == 0.0
    assert packed.argument("key", [query], {"key": key, "value": value}) is key


def test_keys_come_from_max_kv_where_the_call_has_it(packed: ResolvedOp) -> None:
    assert packed.keys([*tensors(), 0.0, 3], {}) == 3
    assert packed.keys(tensors(), {"max_k": 4}) == 4
    assert packed.keys(tensors(), {}) == 7
    assert packed.keys([*tensors(), 0.0, None], {}) == 7


@pytest.mark.parametrize(("layout", "shape"), [("bshd", (1, 9, 2, 4)), ("bhsd", (1, 2, 9, 4)), ("thd", (9, 2, 4))])
def test_keys_are_counted_by_layout(layout: str, shape: tuple[int, ...], define: Define, namespace: str) -> None:
    resolved = ResolvedOp(define(f"attend({ARGUMENTS}) -> Tensor"), row(namespace=namespace, layout=layout))
    query = torch.zeros(1, 3, 3, 3)
    assert resolved.keys([query, torch.zeros(shape), torch.zeros(shape)], {}) == 9
    assert resolved.keys([query], {"key": torch.zeros(shape), "value": torch.zeros(shape)}) == 9


def test_a_kernel_that_may_draw(packed: ResolvedOp) -> None:
    assert packed.draws([*tensors(), 0.1], {})
    assert packed.draws(tensors(), {"p": 0.1})
    assert not packed.draws([*tensors(), 0.0], {})
    assert not packed.draws(tensors(), {})


def test_a_row_that_does_not_say_may_always_draw(packed: ResolvedOp) -> None:
    assert ResolvedOp(packed.op, row()).draws(tensors(), {})
    assert not ResolvedOp(packed.op, row(dropout=None)).draws([*tensors(), 0.9], {})


def test_an_argument_that_is_written_when_it_is_given(define: Define, namespace: str) -> None:
    op = define(f"attend({QKV}, Tensor(a!)? out=None) -> Tensor")
    resolved = ResolvedOp(op, row(namespace=namespace))
    resolved.check_writes(tensors(), {})
    resolved.check_writes([*tensors(), None], {"out": None})
    for args, kwargs in (([*tensors(), torch.zeros(1)], {}), (tensors(), {"out": torch.zeros(1)})):
        with pytest.raises(fastac.FastacError, match="called with 'out', which it writes"):
            resolved.check_writes(args, kwargs)


def test_scores_tell_the_keys_of_a_decomposition() -> None:
    decomposition = DecompositionOp(attention="sdpa", namespace="aten", name="_safe_softmax")
    resolved = ResolvedOp(torch.ops.aten._safe_softmax.default, decomposition)
    assert resolved.keys([torch.zeros(1, 2, 5, 11), -1], {}) == 11
    assert not resolved.draws([torch.zeros(1, 2, 5, 11), -1], {})


# What is there by itself


def test_torch_s_attention_ops_have_rows() -> None:
    """Every aten forward op of this torch that ends a scaled_dot_product_attention."""
    names = [
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_flash_attention_forward",
        "_efficient_attention_forward",
        "_cudnn_attention_forward",
    ]
    for name in names:
        resolved = registry.classify(getattr(torch.ops.aten, name).default)
        assert resolved is not None, name
        assert isinstance(resolved.row, AttentionOp), name
        assert resolved.row.backend == "sdpa", name


def test_an_op_that_writes_its_argument_has_no_row() -> None:
    assert registry.classify(torch.ops.aten._flash_attention_forward_no_dropout_inplace.default) is None


# Whether a backend can run here


def test_sdpa_is_available() -> None:
    assert hook.unavailable("sdpa") is None


def test_a_family_without_rows() -> None:
    assert hook.unavailable("nothing") == "fastac has no row for nothing yet"


def test_a_family_whose_library_is_not_loaded() -> None:
    fastac.register(row(backend="absent"))
    reason = hook.unavailable("absent")
    assert reason is not None
    assert "no op of absent is loaded in this process" in reason


def test_a_family_without_a_kernel_for_this_machine(
    define: Define, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    define(f"attend({QKV}) -> Tensor")
    library = torch.library.Library(namespace, "IMPL")
    library.impl("attend", lambda query, key, value: query, "CUDA")
    fastac.register(row(namespace=namespace, backend="gpu_only"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert hook.unavailable("gpu_only") == (
        f"{namespace}.attend.default has no kernel for the CPU, which is all this machine has"
    )
    library.impl("attend", lambda query, key, value: query, "CPU")
    assert hook.unavailable("gpu_only") is None


# A row of one's own is all it takes


def test_an_attention_of_one_s_own_is_saved_once_it_has_a_row(attention_executions: Any) -> None:
    name = f"own_{uuid.uuid4().hex[:8]}"
    attend = support.attention_function(support.define_attention_op(name))

    def executions(policy: str) -> int:
        model = support.stack(policy=policy, block=lambda: support.AttentionBlock(attend=attend))
        attention_executions.clear()
        support.train_step(model, support.stack_inputs())
        return attention_executions[f"{support.NAMESPACE}::{name}"]

    assert executions("full") == 8
    fastac.register(row(namespace=support.NAMESPACE, name=name, layout="bhsd", dropout=None))
    assert executions("attn_only") == 4


@pytest.mark.parametrize("policy", ["attn_only", "long_attn_only"])
@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_an_op_that_does_not_train_is_refused_with_its_note(engine: str, policy: str) -> None:
    op = support.define_attention_op(f"inference_only_{engine}_{policy}")
    row = AttentionOp(
        backend="tests",
        namespace=support.NAMESPACE,
        name=f"inference_only_{engine}_{policy}",
        trains=False,
        note="no backward",
    )
    fastac.register(row)
    block = support.AttentionBlock(attend=support.attention_function(op))
    with pytest.raises(fastac.UnsupportedBackendError, match="no backward"):
        fastac.checkpoint(block, **support.stack_inputs(), engine=engine, policy=policy)


@pytest.mark.parametrize(
    ("name", "attention"),
    [
        ("flash_attn_3::fwd", True),
        ("xformers_flash::flash_fwd", True),
        ("xformers::efficient_attention_forward_ck", True),
        ("fastvideo_kernel::block_sparse_attn_triton", True),
        ("torch_attn::_varlen_attn", True),
        ("mine::mha_fwd", True),
        ("mine::fmha_forward", True),
        ("flash_attn_3::bwd", False),
        ("flash_attn::_flash_attn_backward", False),
        ("aten::linear", False),
        ("aten::addcmul", False),
        ("mine::attention_mask", False),
        ("mine::retention", False),
    ],
)
def test_names_that_look_like_an_attention_forward(name: str, attention: bool) -> None:
    tensors = [torch.ones(1, 2, 3, 4)] * 3
    assert looks_like_attention_forward(name, tensors) is attention
    assert not looks_like_attention_forward(name, tensors[:2])


# What sparse attention, higher-order ops and unlike ops of one name need


def test_two_ops_of_one_name_are_told_by_an_argument(define: Define, namespace: str) -> None:
    """As flash-attn 2 and 3 had it for a month."""
    rows = [row(namespace=namespace, backend=name, with_argument=name) for name in ("dropout_p", "qv")]
    fastac.register(*rows)
    op = define(f"attend({QKV}, Tensor? qv=None) -> Tensor")
    assert registry.classify(op).row is rows[1]
    other = define(f"attend.other({QKV}, float dropout_p=0.) -> Tensor")
    assert registry.classify(other).row is rows[0]
    assert registry.classify(define(f"attend.neither({QKV}) -> Tensor")) is None


@pytest.mark.parametrize("options", [{"selection": ("blocks",)}, {"coarse": "blocks"}], ids=["selection", "coarse"])
def test_an_argument_of_sparse_attention_that_the_op_does_not_have(
    options: dict[str, Any], define: Define, namespace: str
) -> None:
    define(f"attend({QKV}) -> Tensor")
    with pytest.raises(fastac.FastacError, match="names the argument 'blocks', which the op does not have"):
        fastac.register(row(namespace=namespace, **options))


def test_choices_and_coarse_keys_are_read_by_name(define: Define, namespace: str) -> None:
    op = define(f"attend({QKV}, Tensor blocks, Tensor sizes) -> Tensor")
    fastac.register(row(namespace=namespace, selection=("blocks",), coarse="sizes"))
    resolved = registry.classify(op)
    blocks, sizes = torch.arange(2), torch.ones(7)
    q = torch.zeros(1, 2, 3, 4)
    assert resolved.selection((q, q, q, blocks, sizes), {}) == [blocks]
    assert resolved.selection((q, q, q), {"sizes": sizes, "blocks": blocks}) == [blocks]
    assert resolved.coarse_keys((q, q, q, blocks, sizes), {}) == 7
    assert resolved.has_selection


def test_a_kernel_that_is_not_sparse_has_neither() -> None:
    resolved = registry.classify(SDPA_CPU)
    assert (resolved.has_selection, resolved.selection((), {}), resolved.coarse_keys((), {})) == (False, [], 0)


@pytest.mark.parametrize("name", ["topk", "sort"])
def test_choosing_ops_have_rows_where_they_do_not_write(name: str) -> None:
    packet = getattr(torch.ops.aten, name)
    for overload in packet.overloads():
        op = getattr(packet, overload)
        writes = any(a.alias_info is not None and a.alias_info.is_write for a in op._schema.arguments)
        resolved = registry.classify(op)
        assert (resolved is None) == writes, op
        if resolved is not None:
            assert isinstance(resolved.row, SelectionOp)
            assert not resolved.is_attention


def test_a_higher_order_op_is_read_like_any_other() -> None:
    op = torch.ops.higher_order.flex_attention
    resolved = registry.classify(op)
    assert resolved.qualified_name == "higher_order::flex_attention"
    assert resolved in registry.present_ops()
    query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 9, 4)
    assert resolved.keys((query, key, key, None, (), 1.0, {}), {}) == 9
    assert not resolved.draws((query, key, key), {})
    assert registry.classify(torch.ops.higher_order.cond) is None


def test_a_length_that_is_given_as_minus_one(packed: ResolvedOp) -> None:
    """xFormers does so where nothing is packed."""
    assert packed.keys([*tensors(), 0.0, -1], {}) == 7
    assert packed.keys(tensors(), {"max_k": -1}) == 7


def test_an_op_that_does_not_train_may_write(define: Define, namespace: str) -> None:
    """SageAttention's do. They are refused where they are called, with the better reason."""
    op = define(f"attend({QKV}, Tensor(a!) output) -> Tensor")
    fastac.register(row(namespace=namespace, trains=False, note="for inference"))
    with pytest.raises(fastac.UnsupportedBackendError, match="does not train: for inference"):
        registry.classify(op).check_trains()


@pytest.mark.parametrize("field", ["namespace", "name", "backend", "key", "layout", "coarse", "with_argument", "note"])
def test_a_field_that_is_no_text(field: str) -> None:
    before = registry.rows()
    with pytest.raises(fastac.FastacError, match=f"{field} is no text"):
        fastac.register(row(name="fine"), row(**{field: None}))
    assert registry.rows() == before


@pytest.mark.parametrize("field", ["max_kv", "dropout"])
def test_a_field_that_may_be_none_is_text_otherwise(field: str) -> None:
    with pytest.raises(fastac.FastacError, match=f"{field} is no text"):
        fastac.register(row(**{field: 3}))
    fastac.register(row(**{field: None}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"selection": "blocks"}, "selection is no tuple of texts"),
        ({"trains": "no"}, "trains is neither True nor False"),
    ],
)
def test_other_fields_of_the_wrong_kind(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fastac.FastacError, match=message):
        fastac.register(row(**options))


def test_optional_arguments_of_sparse_attention_may_be_missing(define: Define, namespace: str) -> None:
    op = define(f"attend({QKV}, Tensor? blocks=None, Tensor? sizes=None) -> Tensor")
    fastac.register(row(namespace=namespace, selection=("blocks",), coarse="sizes"))
    resolved = registry.classify(op)
    assert resolved.selection(tensors(), {}) == [None]
    assert resolved.coarse_keys(tensors(), {}) == 0


def test_rows_that_collide_over_an_op_loaded_later_do_not_hinder_others(
    define: Define, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    fastac.register(row(namespace=namespace, backend="one"), row(namespace=f"{namespace}|more", backend="two"))
    op = define(f"attend({QKV}) -> Tensor")
    with caplog.at_level(logging.ERROR, logger="fastac"):
        fastac.register(row(name="another"))
        registry.present_ops()
        registry.present_ops()
    assert len(caplog.records) == 1
    assert f"of one; {namespace}|more::attend of two" in caplog.text
    with pytest.raises(fastac.FastacError, match="is claimed by 2 rows"):
        registry.classify(op)


def test_registering_in_two_threads_loses_nothing() -> None:
    """One of them fails, and takes back its own rows only."""
    begun = threading.Barrier(2)

    def register(number: int) -> None:
        begun.wait()
        for i in range(50):
            with contextlib.suppress(fastac.FastacError):
                fastac.register(
                    row(name=f"thread_{number}_{i}"), row(name="wrong", layout="none" if number else "bshd")
                )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(register, range(2)))
    names = {one.name for one in registry.rows()}
    assert "thread_0_0" in names
    assert not any(name.startswith("thread_1_") for name in names)


def test_a_collective_of_no_known_kind() -> None:
    with pytest.raises(fastac.FastacError, match="kind 'broadcast' of all_reduce is none of exchange, gather, wait"):
        fastac.register(CollectiveOp(namespace="tests", name="all_reduce", kind="broadcast"))
