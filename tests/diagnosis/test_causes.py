"""Never silently inactive: an attention call that should be saved and is not is an error, with its module and cause.

The forward raises it, before any gradient is used.
"""

from __future__ import annotations

import functools
import re
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastac
from fastac import Policy, PolicyNotAppliedError
from tests import support
from tests.diagnosis.hidden import PastTheDispatcher
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


def region(attend: Attend, policy: Any = "attn_only") -> Callable[..., torch.Tensor]:
    """A block under checkpointing, to be called with stack_inputs()."""
    torch.manual_seed(0)
    return functools.partial(fastac.checkpoint, AttentionBlock(attend=attend), policy=policy)


# Attention that torch decomposes


def mask_requires_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v, attn_mask=torch.zeros(q.shape[-2], k.shape[-2]).requires_grad_())


def narrow_value(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    half = v.shape[-1] // 2
    return F.pad(sdpa(q, k, v[..., :half]), (0, half))


def strided(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v.transpose(-1, -2).contiguous().transpose(-1, -2))


DECOMPOSED = {
    mask_requires_grad: "mask requires grad",
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
@pytest.mark.parametrize("steps", [0, 2])
def test_math_backend_set_after_enable(steps: int) -> None:
    """Every call of a region is decomposed, at the first step or a later one."""
    model, inputs = support.build(WAN)
    fastac.enable(model)
    for _ in range(steps):
        train_step(model, inputs)
    model.set_attention_backend("_native_math")
    assert re.search(r"blocks\.0.*\n?.*math", error_of(model, **inputs))


class Biased(torch.nn.Module):
    """Attention with a trained bias in the place of a mask, as T5's."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.randn(support.VIDEO_TOKENS, support.VIDEO_TOKENS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + sdpa(x[None], x[None], x[None], attn_mask=self.bias)[0]


def test_a_bias_that_is_trained() -> None:
    """Detaching it, as for other masks, would end its training. What the message names trains it."""
    block, inputs = Biased(), {"x": stack_inputs()["video"]}
    expected = train_step(block, inputs)
    message = error_of(fastac.checkpoint, block, **inputs)
    assert re.search(r'mask requires grad.*bias that is trained: policy="full" trains it', message)
    block.zero_grad()
    fastac.enable(block, "full", blocks=block)
    assert_same(train_step(block, inputs), expected)
    assert any("bias" in name for name in expected)


# Attention written out


def written_with_baddbmm(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    scores = torch.baddbmm(q.new_zeros(1, 1, 1), q, k.transpose(-1, -2), beta=0, alpha=0.3)
    return torch.bmm(F.softmax(scores, dim=-1), v).unflatten(0, (1, -1))


def written_with_a_mask_and_dropout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) / 3
    scores = scores.masked_fill(torch.zeros(scores.shape[-2:], dtype=torch.bool), -1e9) + 0.5
    return torch.matmul(F.dropout(scores.double().softmax(-1).to(v.dtype), 0.1), v)


def written_with_sinks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As in GPT-OSS: a column of scores for no key."""
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = torch.cat([scores, scores.new_zeros(*scores.shape[:-1], 1)], dim=-1)
    return torch.matmul((scores - scores.max(dim=-1, keepdim=True).values).softmax(-1)[..., :-1], v)


def written_in_chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As in Longformer: scores are written into a buffer, part by part."""
    scores = q.new_empty(*q.shape[:-1], k.shape[-2])
    half = q.shape[-2] // 2
    for rows in (slice(0, half), slice(half, None)):
        scores[..., rows, :] = torch.matmul(q[..., rows, :], k.transpose(-1, -2))
    return torch.matmul(scores.softmax(-1), v)


BETWEEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "pad": lambda scores: F.pad(scores, (0, 2))[..., :-2],
    "gather": lambda scores: scores.gather(-1, torch.arange(scores.shape[-1]).expand_as(scores)),
    "scatter": lambda scores: torch.full_like(scores, -9).scatter(
        -1, torch.arange(scores.shape[-1]).expand_as(scores), scores
    ),
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


WRITTEN = [written_out, written_with_baddbmm, written_with_a_mask_and_dropout, written_with_sinks, written_in_chunks]
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


class Mixture(torch.nn.Module):
    """Experts under a softmax gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(16, 4, bias=False)
        self.experts = torch.nn.Parameter(torch.randn(4, 16, 16) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        every = torch.einsum("btc,ecd->bted", x, self.experts)
        return torch.einsum("bte,bted->btd", weights, every)


def softmax_linear_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Shen et al. 2018 (arXiv:1812.01243): softmax over features and over positions, never over scores."""
    return q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v)


def projected(x: torch.Tensor) -> torch.Tensor:
    """Linear attention after a projection per head, which is a batched matrix product with a weight."""
    return softmax_linear_attention(
        *(torch.einsum("btc,chd->bhtd", x, torch.randn(16, 2, 8).requires_grad_()) for _ in range(3))
    )


def softmax_at_the_end(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.transpose(-1, -2)).softmax(-1).argmax(-1) * x.mean(-1)


class AfterProducts(AttentionBlock):
    """Experts under a softmax gate, behind attention and linear attention."""

    def forward(self, x: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        x = super().forward(x, x)
        x = x + self.self_out(torch.bmm(x, torch.bmm(x.transpose(1, 2), x)))
        return Mixture()(self.norms[0](x))


def pooled(x: torch.Tensor) -> torch.Tensor:
    """Soft pooling over positions, of what two products made."""
    changed = F.layer_norm(torch.bmm(x, torch.bmm(x.transpose(1, 2), x)), x.shape[-1:])
    return torch.einsum("btc,btd->bcd", changed.softmax(1), x)


NO_ATTENTION: dict[str, Callable[[], Any]] = {
    "experts": Mixture,
    "softmax linear": lambda: AttentionBlock(attend=softmax_linear_attention),
    "per head": lambda: projected,
    "after products": AfterProducts,
    "pooled": lambda: pooled,
    "softmax at the end": lambda: softmax_at_the_end,
}


@pytest.mark.parametrize("name", NO_ATTENTION)
def test_what_is_no_softmax_attention(name: str) -> None:
    torch.manual_seed(0)
    function, video = NO_ATTENTION[name](), torch.randn(2, 16, 6).requires_grad_()
    more = [torch.randn(2, 4, 16)] if isinstance(function, AttentionBlock) else []
    fastac.checkpoint(function, video.transpose(1, 2), *more).sum().backward()


# An op without a row


ATTENTIONS = (
    *("my_attention_forward", "block_sparse_attn_triton", "_varlen_attn"),
    *("mha_fwd", "efficient_attention_forward_ck", "masked_attention", "selfattention", "flash_mla", "fa3_fwd"),
    *("sageattn_fwd", "flash_attention_bias", "na3d", "fna_forward"),
)
OTHERS = (
    *("attention_mask_of", "attn_bias_forward", "attention_backward", "flattened", "retention", "attn_concat"),
    *("attn_rope", "attn_qk_norm", "attn_gate", "attn_residual_add", "attn_out_proj", "post_attention_layernorm"),
    *("attn_pool", "attn_modulate", "attention_scale_shift", "attn_dropout_add", "fused_attn_mlp", "attn_rms"),
    *("attn_ada_ln", "attn_lora", "attn_moe_experts", "attn_swiglu", "attn_window_partition"),
)


@pytest.mark.parametrize("name", [*ATTENTIONS, *OTHERS])
def test_ops_that_look_like_attention(name: str) -> None:
    """Named, with what to write."""
    namespace = f"fastac_library_{uuid.uuid4().hex[:8]}"
    op = torch.library.custom_op(
        f"{namespace}::{name}",
        lambda q, k, v: q * 2,
        mutates_args=(),
        schema="(Tensor q, Tensor k, Tensor v) -> Tensor",
    )
    op.register_autograd(lambda ctx, grad: (grad, None, None))
    attend = region(lambda q, k, v: sdpa(op(q, k, v), k, v))
    if name in ATTENTIONS:
        message = error_of(attend, **stack_inputs())
        assert re.search(rf"{namespace}::{name}\b", message)
        assert "fastac.register" in message
    else:
        attend(**stack_inputs()).sum().backward()


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
    "2 dims": ("(Tensor q, Tensor k, Tensor v) -> Tensor", lambda op, q, k, v: op(q[0, 0], k[0, 0], v[0, 0])),
    "6 dims": (
        "(Tensor q, Tensor k, Tensor v) -> Tensor",
        lambda op, q, k, v: op(q[None, None], k[None, None], v[None, None])[0, 0],
    ),
    "in another thread": ("(Tensor q, Tensor k, Tensor v) -> Tensor", lambda *called: in_a_thread(*called)),
}


def in_a_thread(function: Callable[..., Any], *tensors: torch.Tensor) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function, *tensors).result()


def first_of(*values: Any, **named: Any) -> torch.Tensor:
    value = [*values, *named.values()][0]
    return (value[0] if isinstance(value, (list, tuple)) else value) * 2


@pytest.mark.parametrize("signature", SIGNATURES)
def test_signatures_of_attention(signature: str) -> None:
    schema, call = SIGNATURES[signature]
    namespace = f"fastac_library_{uuid.uuid4().hex[:8]}"
    if signature == "keyword-only":  # custom_op does not take it
        library = torch.library.Library(namespace, "DEF")
        library.define(f"video_attention{schema}")
        library.impl("video_attention", first_of, "CPU")
        op = getattr(torch.ops, namespace).video_attention
    else:
        op = torch.library.custom_op(f"{namespace}::video_attention", first_of, mutates_args=(), schema=schema)
        op.register_autograd(lambda ctx, grad, *_: None)
    message = error_of(region(lambda q, k, v: sdpa(q, k, v) + call(op, q, k, v)), **stack_inputs())
    assert "video_attention" in message


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
    message = error_of(model, **inputs)
    assert "blocks.0" in message
    assert "thread" in message


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


# Later regions of a kind. Other numbers of calls: tests/models/test_quirks.py


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


class HidingAttention(PastTheDispatcher):
    """The same, but its name says attention."""


def closure(model: Any, i: int, *args: torch.Tensor) -> torch.Tensor:
    """A checkpointed block as in older trainers: all blocks share one code."""
    block = model.blocks[i]

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        return block(*inputs)

    return fastac.checkpoint(run, *args)


@pytest.mark.parametrize("when", ["from the first step on", "in every second step", "in two sizes"])
@pytest.mark.parametrize("way", ["blocks", "closures"])
def test_attention_that_a_later_block_of_a_known_class_hides(way: str, when: str) -> None:
    """After a region with fewer calls than the first of its kind, the block's next ones are watched."""
    sizes = [1, 2] if when == "in two sizes" else [1]
    model, steps = stack(layers=4), [stack_inputs(batch=size) for size in sizes]
    hiding, hidden = model.blocks[1], HidingAttention.apply
    if way == "blocks":
        fastac.enable(model, blocks="blocks")
    else:
        model.forward = lambda video, text: functools.reduce(lambda x, i: closure(model, i, x, text), range(4), video)
    seen = hiding.attend
    unnoticed = 2 if when in ("in every second step", "in two sizes") else 1
    for step in range(unnoticed):
        hiding.attend = seen if when == "in every second step" and step % 2 else hidden
        train_step(model, steps[step % len(steps)])
    hiding.attend = hidden
    for _ in range(2):
        assert "HidingAttention" in error_of(train_step, model, steps[0])
