"""Never silently inactive: an attention call that should be saved and is not is an error, with its module and cause.

The forward raises it, before any gradient is used.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastac
from fastac import Policy, PolicyNotAppliedError
from tests import support
from tests.diagnosis.observed import HiddenAttention, PastTheDispatcher
from tests.marks import needs_diffusers
from tests.support import (
    AttentionBlock,
    assert_same,
    dropping_out,
    executions_of,
    math_kernel,
    stack,
    stack_inputs,
    train_step,
    written_out,
)

sdpa = F.scaled_dot_product_attention
Attend = Callable[..., torch.Tensor]

WAN = "WanTransformer3DModel"
OWN_ALONE = Policy("attn_only", min_kv=support.TEXT_TOKENS + 1)


class Processor:
    """What WanAttnProcessor does, without norms and rotary embedding. attend: over (batch, heads, sequence, dim)."""

    _attention_backend = None
    _parallel_config = None

    def __init__(self, attend: Attend) -> None:
        self.attend = attend

    def __call__(self, attn: Any, hidden_states: Any, encoder_hidden_states: Any = None, *_: Any, **__: Any) -> Any:
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        split = [
            project(value).unflatten(-1, (attn.heads, -1)).transpose(1, 2)
            for project, value in ((attn.to_q, hidden_states), (attn.to_k, context), (attn.to_v, context))
        ]
        return attn.to_out[0](self.attend(*split).transpose(1, 2).flatten(2))


def wan(attend: Attend = sdpa) -> tuple[Any, dict[str, Any]]:
    """Two blocks of two attention calls. attend: of blocks.0.attn1; the others call scaled_dot_product_attention."""
    model, inputs = support.build(WAN)
    for block in model.blocks:
        for attention in (block.attn1, block.attn2):
            attention.processor = Processor(sdpa)
    model.blocks[0].attn1.processor.attend = attend
    return model, inputs


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(PolicyNotAppliedError) as error:
        function(*args, **kwargs)
    return str(error.value)


# Attention that torch decomposes


def mask_requires_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v, attn_mask=torch.zeros(q.shape[-2], k.shape[-2]).requires_grad_())


def narrow_value(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    half = v.shape[-1] // 2
    return F.pad(sdpa(q, k, v[..., :half]), (0, half))


def strided(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v.transpose(-1, -2).contiguous().transpose(-1, -2))


DECOMPOSED = {
    mask_requires_grad: 'mask requires grad.*bias that is trained: policy="full" trains it',
    dropping_out: "dropout",
    narrow_value: "dimensions",
    math_kernel: "math kernel",
    strided: "strides",
}


@pytest.mark.parametrize("attend", DECOMPOSED, ids=lambda attend: attend.__name__)
def test_decomposed_attention_is_named_with_its_cause(attend: Attend) -> None:
    """Once it is fixed, the next step is exact."""
    model, inputs = wan()
    expected = train_step(model, inputs)
    fastac.enable(model)
    model.blocks[0].attn1.processor.attend = attend
    message = error_of(model, **inputs)
    assert re.search(r"blocks\.0\b.*\n.*attn1\b", message)
    assert re.search(DECOMPOSED[attend], message), message
    assert "attn2" not in message, "the other one was saved"
    assert len(message.splitlines()) <= 5
    model.blocks[0].attn1.processor.attend = sdpa
    assert executions_of(model, inputs, expected) == 4


@needs_diffusers("0.35")
def test_math_backend_set_after_enable() -> None:
    """Every call of a region is decomposed, at a later step."""
    model, inputs = support.build(WAN)
    fastac.enable(model)
    for _ in range(2):
        train_step(model, inputs)
    model.set_attention_backend("_native_math")
    assert re.search(r"blocks\.0.*\n?.*math", error_of(model, **inputs))


# Attention written out


def written_with_baddbmm(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    scores = torch.baddbmm(q.new_zeros(1, 1, 1), q, k.transpose(-1, -2), beta=0, alpha=0.3)
    return torch.bmm(F.softmax(scores, dim=-1), v).unflatten(0, (1, -1))


BETWEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pad": lambda scores: F.pad(scores, (0, 2))[..., :-2],
    "gather": lambda scores: scores.gather(-1, torch.arange(scores.shape[-1]).expand_as(scores)),
    "scatter": lambda scores: torch.full_like(scores, -9).scatter(
        -1, torch.arange(scores.shape[-1]).expand_as(scores), scores
    ),
    "mask": lambda scores: scores.masked_fill(torch.zeros(scores.shape[-2:], dtype=torch.bool), -1e9) / 3 + 0.5,
    "dropout in another dtype": lambda scores: F.dropout(scores.double(), 0.1).to(scores.dtype),
    "sinks": lambda scores: torch.cat([scores, scores.new_zeros(*scores.shape[:-1], 1)], dim=-1)[..., :-1],
    "buffer": lambda scores: torch.empty_like(scores).copy_(scores),
    "tril": lambda scores: scores.tril(),
    "topk": lambda scores: scores.topk(scores.shape[-1]).values,
    "layer_norm": lambda scores: F.layer_norm(scores, scores.shape[-1:]),
    "conv": lambda scores: F.conv2d(scores, torch.ones(scores.shape[1], scores.shape[1], 1, 1)),
    "talking heads": lambda scores: torch.einsum("hg,bgqk->bhqk", torch.eye(scores.shape[1]).requires_grad_(), scores),
    "a Linear over heads": lambda scores: F.linear(
        scores.permute(0, 2, 3, 1), torch.eye(scores.shape[1]).requires_grad_()
    ).permute(0, 3, 1, 2),
}


def written_with(between: str, first: str) -> Attend:
    """first: what comes first, the softmax or the change."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        change, scores = BETWEEN[between], torch.matmul(q, k.transpose(-1, -2))
        weights = change(scores.softmax(-1)) if first == "softmax" else change(scores).softmax(-1)
        return torch.matmul(weights, v)

    return attend


WRITTEN = [written_out, written_with_baddbmm]
WRITTEN += [written_with(between, first) for between in BETWEEN for first in ("softmax", "change")]


@pytest.mark.parametrize("attend", WRITTEN)
def test_attention_written_out_in_small_ops(attend: Attend) -> None:
    model, inputs = wan(attend)
    fastac.enable(model)
    assert re.search(r"blocks\.0.*\n.*attn1.*written out", error_of(model, **inputs))


@pytest.mark.parametrize("short", [math_kernel, written_out])
def test_attention_that_the_policy_recomputes_may_be_decomposed(short: Attend) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (sdpa if k.shape[-2] == support.VIDEO_TOKENS else short)(q, k, v)

    inputs, block = stack_inputs(), functools.partial(AttentionBlock, attend=attend)
    expected = train_step(stack(block=block), inputs)
    model = stack(block=block, policy=OWN_ALONE)
    for _ in range(2):
        assert_same(train_step(model, inputs), expected)
    train_step(stack(block=block, policy="full"), inputs)
    error_of(stack(block=block, policy="attn_only"), **inputs)


# What is no attention


def mixture(x: torch.Tensor) -> torch.Tensor:
    """Experts under a softmax gate."""
    gate, experts = (torch.randn(shape).requires_grad_() for shape in ((4, 16), (4, 16, 16)))
    every = torch.einsum("btc,ecd->bted", x, experts)
    return torch.einsum("bte,bted->btd", F.linear(x, gate).softmax(-1), every)


def softmax_linear_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Shen et al. 2018 (arXiv:1812.01243): softmax over features and over positions, never over scores."""
    return q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v)


def projected(x: torch.Tensor) -> torch.Tensor:
    """Linear attention after a projection per head, which is a batched matrix product with a weight."""
    return softmax_linear_attention(
        *(torch.einsum("btc,chd->bhtd", x, torch.randn(16, 2, 8).requires_grad_()) for _ in range(3))
    )


def after_products(x: torch.Tensor) -> torch.Tensor:
    """Experts under a softmax gate, behind attention and linear attention."""
    head = x[:, None].contiguous()
    x = x + sdpa(head, head, head)[:, 0]
    x = x + F.linear(torch.bmm(x, torch.bmm(x.transpose(1, 2), x)), torch.eye(16).requires_grad_())
    return mixture(F.layer_norm(x, x.shape[-1:]))


def pooled(x: torch.Tensor) -> torch.Tensor:
    """Soft pooling over positions, of what two products made."""
    changed = F.layer_norm(torch.bmm(x, torch.bmm(x.transpose(1, 2), x)), x.shape[-1:])
    return torch.einsum("btc,btd->bcd", changed.softmax(1), x)


NO_ATTENTION: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "experts": mixture,
    "softmax linear": lambda x: softmax_linear_attention(x, x, x),
    "per head": projected,
    "after products": after_products,
    "pooled": pooled,
    "softmax at the end": lambda x: (x @ x.transpose(-1, -2)).softmax(-1).argmax(-1) * x.mean(-1),
}


@pytest.mark.parametrize("name", NO_ATTENTION)
def test_what_is_no_softmax_attention(name: str) -> None:
    torch.manual_seed(0)
    video = torch.randn(2, 16, 6).requires_grad_().transpose(1, 2)
    fastac.checkpoint(lambda x: NO_ATTENTION[name](x), video).sum().backward()


# An op without a row


SIGNATURES: dict[str, tuple[str, Callable[..., Any]]] = {
    "packed qkv": ("(Tensor qkv) -> Tensor", lambda op, q, k, v: op(torch.stack([q, q, q], 2))[:, :, 0]),
    "q, kv": ("(Tensor q, Tensor kv) -> Tensor", lambda op, q, k, v: op(q, torch.stack([k, v], 2))),
    "a list": ("(Tensor[] qkv) -> Tensor", lambda op, q, k, v: op([q, k, v])),
    "keyword-only": ("(*, Tensor q, Tensor k, Tensor v) -> Tensor", lambda op, q, k, v: op(q=q, k=k, v=v)),
    "a scale before q": (
        "(Tensor scale, Tensor q, Tensor k, Tensor v) -> Tensor",
        lambda op, q, k, v: op(torch.ones(1), q, k, v) * q.sum(),
    ),
    "q and k | v in one": ("(Tensor q, Tensor kv) -> Tensor", lambda op, q, k, v: op(q, torch.cat([k, v], -1))),
}


def in_a_thread(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *tensors).result()


def first_of(*values: Any, **named: Any) -> torch.Tensor:
    value = [*values, *named.values()][0]
    return (value[0] if isinstance(value, (list, tuple)) else value) * 2


@pytest.mark.parametrize("signature", SIGNATURES)
def test_signatures_of_attention(signature: str) -> None:
    """Named, with what to write."""
    schema, call = SIGNATURES[signature]
    library = support.define_op(f"video_attention{schema}", first_of)
    op = torch.ops.fastac_tests.video_attention
    block = AttentionBlock(attend=lambda q, k, v: sdpa(q, k, v) + call(op, q, k, v))
    message = error_of(fastac.checkpoint, block, **stack_inputs())
    library._destroy()
    assert re.search(r"fastac_tests::video_attention\b.*fastac\.register", message)


# A kernel that is no op


def test_an_attention_module_whose_attention_cannot_be_seen() -> None:
    """While it runs nothing is recorded, and nothing recognized."""
    model, inputs = wan(PastTheDispatcher.apply)
    fastac.enable(model)
    assert re.search(r"blocks\.0.*\n.*attn1", error_of(model, **inputs))


def without_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """As SageAttention 1: the kernel writes into a new tensor, unseen by autograd."""
    return support.attention_math(query.detach(), key.detach(), value.detach())[0]


def test_parameters_that_get_no_gradient_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """If attention has no backward, the projections before it do not train. The one after it does."""
    model, inputs = wan(without_backward)
    fastac.enable(model)
    train_step(model, inputs)
    (said,) = caplog.messages
    assert re.search(r"attn1\.to_[qkv]", said)
    assert "to_out" not in said


# Recompute that differs. By what a block reads: tests/ways/test_changed_before_backward.py


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("policy", ["attn_only", "full"])
def test_a_backward_outside_vmap(policy: str) -> None:
    """torch says that a tensor escaped. The block reads no state, and has no cache."""
    model, (video, text) = stack(policy=policy, layers=1), stack_inputs().values()
    videos = torch.stack([video, video])
    outputs = torch.vmap(lambda one: model(one, text))(videos)
    with pytest.raises(fastac.FastacError, match=r"forward ran inside torch\.vmap") as error:
        outputs.sum().backward()
    assert "cache" not in str(error.value)
    assert len(str(error.value).splitlines()) <= 5


# Threads


def test_attention_in_another_thread() -> None:
    model, inputs = wan(functools.partial(in_a_thread, sdpa))
    fastac.enable(model)
    assert re.search(r"(?s)blocks\.0.*thread", error_of(model, **inputs))


def test_attention_over_a_keyword_argument_in_another_thread() -> None:
    """Of a region without a module, whose inputs alone tell that the attention is its own."""

    def keyword(x: torch.Tensor, *, context: torch.Tensor) -> torch.Tensor:
        return x + in_a_thread(lambda t: sdpa(t, t, t), context * 2)

    first, second = (torch.randn(1, 2, 5, 4).requires_grad_() for _ in range(2))
    assert "thread" in error_of(fastac.checkpoint, keyword, first, context=second)


def test_another_model_that_is_trained_meanwhile_is_no_error() -> None:
    """Another thread trains other models while a region is watched."""
    plain, enabled = stack(seed=5), stack(seed=6, policy="attn_only")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        in_a_thread(lambda: [train_step(model, stack_inputs(seed=9)) for model in (plain, enabled)])
        return sdpa(q, k, v)

    inputs = stack_inputs()
    expected = train_step(stack(), inputs)
    model = stack(policy="attn_only", block=lambda: AttentionBlock(attend=attend))
    for _ in range(2):
        assert_same(train_step(model, inputs), expected)


# Later regions of a kind. Other numbers of calls: tests/models/test_parity.py


class Alternating(AttentionBlock):
    """Blocks of one class, of which some attend to the text and some do not."""

    cross = True
    watched = 0

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        self.watched += torch._C._len_torch_dispatch_stack() > 0 and torch._C._current_graph_task_id() == -1
        if self.cross:
            return super().forward(video, text)
        return video + self.dropout(self.self_out(self._attention(*self.qkv(self.norms[0](video)).chunk(3, dim=-1))))


@pytest.mark.parametrize("policy", ["attn_only", Policy("attn_only", linear=("self_out", "cross_out"))], ids=str)
def test_fewer_calls_than_the_first_of_its_kind(policy: Policy, caplog: pytest.LogCaptureFixture) -> None:
    """A branch on the timestep, or a dropped layer: exact, watched once more, and nothing is logged."""
    plain, model, inputs = stack(block=Alternating), stack(policy=policy, block=Alternating), stack_inputs()
    for step in range(6):
        plain.blocks[1].cross = model.blocks[1].cross = step in (0, 3)
        assert_same(train_step(model, inputs), train_step(plain, inputs))
    assert [block.watched for block in model.blocks] == [1, 1]
    assert not caplog.records


@pytest.mark.parametrize("when", ["from the first step on", "in every second step", "in two sizes"])
@pytest.mark.parametrize("way", ["blocks", "closures"])
def test_attention_that_a_later_block_of_a_known_class_hides(way: str, when: str) -> None:
    """After a region with fewer calls than the first of its kind, the block's next ones are watched.

    Closures, as in older trainers: all blocks share one code.
    """
    sizes = [1, 2] if when == "in two sizes" else [1]
    model, steps = stack(layers=4), [stack_inputs(batch=size) for size in sizes]
    hiding, hidden = model.blocks[1], HiddenAttention.apply
    if way == "blocks":
        fastac.enable(model, blocks="blocks")
    else:
        model.forward = lambda video, text: functools.reduce(
            lambda x, block: fastac.checkpoint(lambda *args: block(*args), x, text), model.blocks, video
        )
    seen = hiding.attend
    unnoticed = 2 if when in ("in every second step", "in two sizes") else 1
    for step in range(unnoticed):
        hiding.attend = seen if when == "in every second step" and step % 2 else hidden
        train_step(model, steps[step % len(steps)])
    hiding.attend = hidden
    for _ in range(2):
        assert "HiddenAttention" in error_of(train_step, model, steps[0])
