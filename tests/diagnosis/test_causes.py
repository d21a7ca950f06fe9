"""Never silently inactive: an attention call that was to be saved and was not is an error that names module and cause.

Everything that is raised is raised by the forward, before any gradient is used.
"""

from __future__ import annotations

import functools
import re
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor
from torch.nn.attention import SDPBackend, sdpa_kernel

import fastac
from fastac import Policy, PolicyNotAppliedError
from fastac.engine import releases
from tests import support
from tests.marks import needs_diffusers
from tests.support import (
    CPU_ATTENTION,
    AttentionBlock,
    assert_same,
    dropping_out,
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


def tensors() -> list[torch.Tensor]:
    return [torch.randn(1, 2, 5, 4).requires_grad_() for _ in range(3)]


# Attention that torch decomposes


def mask_requires_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v, attn_mask=torch.zeros(q.shape[-2], k.shape[-2]).requires_grad_())


def narrow_value(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    half = v.shape[-1] // 2
    return F.pad(sdpa(q, k, v[..., :half]), (0, half))


def query_without_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).unflatten(0, q.shape[:2])


def mask_with_three_dimensions(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v, attn_mask=torch.zeros(q.shape[1], q.shape[-2], k.shape[-2]))


def strided(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v.transpose(-1, -2).contiguous().transpose(-1, -2))


DECOMPOSED = {
    mask_requires_grad: "mask requires grad",
    dropping_out: "dropout",
    narrow_value: "head dim 6",
    query_without_heads: "query has 3 dimensions",
    mask_with_three_dimensions: "mask has 3 dimensions",
    math_kernel: "math kernel",
    strided: "strides",
}
if releases.is_at_least("2.15"):  # fuses it
    del DECOMPOSED[query_without_heads]
CASES = pytest.mark.parametrize("attend", DECOMPOSED, ids=lambda attend: attend.__name__)


@CASES
def test_decomposed_attention_is_named_with_its_cause(attend: Attend, attention_executions: Counter[str]) -> None:
    """And the next step of a model that was mended is exact."""
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
    attention_executions.clear()
    assert_same(train_step(model, inputs), expected)
    assert attention_executions == {CPU_ATTENTION: 4}


@CASES
def test_decomposed_attention_in_a_later_step(attend: Attend) -> None:
    model, inputs = wan()
    fastac.enable(model)
    for _ in range(2):
        train_step(model, inputs)
    model.blocks[1].attn2.processor.attend = attend
    assert "blocks.1" in error_of(model, **inputs)


@needs_diffusers("0.35")
@pytest.mark.parametrize("steps", [0, 2])
def test_math_backend_set_after_enable(steps: int) -> None:
    model, inputs = support.build(WAN)
    fastac.enable(model)
    for _ in range(steps):
        train_step(model, inputs)
    model.set_attention_backend("_native_math")
    assert re.search(r"blocks\.0.*\n?.*math", error_of(model, **inputs))


def test_a_region_whose_every_call_is_decomposed() -> None:
    model, inputs = wan()
    fastac.enable(model)
    with sdpa_kernel(SDPBackend.MATH):
        message = error_of(model, **inputs)
    assert re.search(r"blocks\.0.*\n.*attn1.*math", message)


def test_one_decomposed_call_among_three() -> None:
    def three(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v) + sdpa(q, k, v) + dropping_out(q, k, v)

    message = error_of(fastac.checkpoint, three, *tensors())
    assert re.search(r"\b2 .*\n.*dropout", message)


def test_dropout_of_torch_s_own_layers() -> None:
    """Its default of 0.1 has no fused kernel on a CPU."""
    model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2)
    fastac.enable(model, blocks="layers")
    with pytest.raises(PolicyNotAppliedError, match="dropout"):
        model(stack_inputs()["video"])


# Attention written out


def written_with_einsum(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    probabilities = torch.einsum("bhqd,bhkd->bhqk", q, k).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", probabilities, v)


def written_with_baddbmm(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    scores = torch.baddbmm(q.new_zeros(1, 1, 1), q, k.transpose(-1, -2), beta=0, alpha=0.3)
    return torch.bmm(F.softmax(scores, dim=-1), v).unflatten(0, (1, -1))


def written_with_a_mask_and_dropout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = torch.matmul(q, k.transpose(-1, -2)) / 3
    scores = scores.masked_fill(torch.zeros(scores.shape[-2:], dtype=torch.bool), -1e9) + 0.5
    return torch.matmul(F.dropout(scores.double().softmax(-1).to(v.dtype), 0.1), v)


def written_with_sinks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As GPT-OSS has them: a column of scores that attends to nothing."""
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores = torch.cat([scores, scores.new_zeros(*scores.shape[:-1], 1)], dim=-1)
    return torch.matmul((scores - scores.max(dim=-1, keepdim=True).values).softmax(-1)[..., :-1], v)


def written_in_chunks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """As Longformer does: scores of parts are written into a buffer."""
    scores = q.new_empty(*q.shape[:-1], k.shape[-2])
    half = q.shape[-2] // 2
    for rows in (slice(0, half), slice(half, None)):
        scores[..., rows, :] = torch.matmul(q[..., rows, :], k.transpose(-1, -2))
    return torch.matmul(scores.softmax(-1), v)


def written_under_autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return written_out(q, k, v).to(q.dtype)


@pytest.mark.parametrize(
    "attend",
    [
        written_out,
        written_with_einsum,
        written_with_baddbmm,
        written_with_a_mask_and_dropout,
        written_with_sinks,
        written_in_chunks,
        written_under_autocast,
    ],
)
def test_attention_written_out_in_small_ops(attend: Attend) -> None:
    model, inputs = wan(attend)
    fastac.enable(model)
    assert re.search(r"blocks\.0.*\n.*attn1.*written out", error_of(model, **inputs))


def test_the_legacy_attention_processor_of_diffusers() -> None:
    torch.manual_seed(0)
    attention = Attention(query_dim=16, heads=2, dim_head=8, processor=AttnProcessor())
    assert "over 9 keys" in error_of(fastac.checkpoint, attention, torch.randn(1, 9, 16).requires_grad_())


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
    """Experts under a softmax gate: every expert, or the best two."""

    def __init__(self, best: int | None = None) -> None:
        super().__init__()
        self.gate = torch.nn.Linear(16, 4, bias=False)
        self.experts = torch.nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.best = best

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        if self.best is not None:
            values, chosen = weights.topk(self.best, dim=-1)
            weights = torch.zeros_like(weights).scatter(-1, chosen, values)
        every = torch.einsum("btc,ecd->bted", x, self.experts)
        return torch.einsum("bte,bted->btd", weights, every)


def softmax_linear_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Shen et al. 2018 (arXiv:1812.01243): softmax over features and over positions, never over scores."""
    return q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v)


def relu_linear_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k = q.relu(), k.relu()
    return (q @ (k.transpose(-1, -2) @ v)) / (q @ k.sum(-2, keepdim=True).transpose(-1, -2) + 1e-6)


def projected(x: torch.Tensor) -> torch.Tensor:
    """Linear attention after a projection per head, which is a batched matrix product with a weight."""
    return softmax_linear_attention(
        *(torch.einsum("btc,chd->bhtd", x, torch.randn(16, 2, 8).requires_grad_()) for _ in range(3))
    )


def softmax_at_the_end(x: torch.Tensor) -> torch.Tensor:
    return (x @ x.transpose(-1, -2)).softmax(-1).argmax(-1) * x.mean(-1)


@pytest.mark.parametrize(
    "make",
    [
        Mixture,
        lambda: Mixture(2),
        lambda: Mixture().requires_grad_(False),
        lambda: AttentionBlock(attend=softmax_linear_attention),
        lambda: AttentionBlock(attend=relu_linear_attention),
        lambda: projected,
        lambda: softmax_at_the_end,
    ],
    ids=[
        "experts",
        "best experts",
        "frozen experts",
        "softmax linear",
        "relu linear",
        "per head",
        "softmax at the end",
    ],
)
def test_what_is_no_softmax_attention(make: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    function, video = make(), torch.randn(2, 16, 6).requires_grad_()
    more = [torch.randn(2, 4, 16)] if isinstance(function, AttentionBlock) else []
    fastac.checkpoint(function, video.transpose(1, 2), *more).sum().backward()


# An op without a row


@pytest.mark.parametrize(
    ("name", "is_attention"),
    [
        ("my_attention_forward", True),
        ("block_sparse_attn_triton", True),
        ("_varlen_attn", True),
        ("mha_fwd", True),
        ("efficient_attention_forward_ck", True),
        ("attention_mask_of", False),
        ("attn_bias_forward", False),
        ("attention_backward", False),
        ("flattened", False),
        ("retention", False),
    ],
)
def test_ops_that_look_like_attention(name: str, is_attention: bool) -> None:
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
    if is_attention:
        message = error_of(attend, **stack_inputs())
        assert re.search(rf"{namespace}::{name}\b", message)
        assert "fastac.register" in message
    else:
        attend(**stack_inputs()).sum().backward()


# A kernel that is no op


class PastTheDispatcher(torch.autograd.Function):
    """Attention by numpy, as a kernel behind ctypes or pybind: no op of torch runs for it. Its name says nothing."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        a, b, c = (t.detach().numpy() for t in (q, k, v))
        weights = np.exp(np.einsum("bhqd,bhkd->bhqk", a, b) * a.shape[-1] ** -0.5)
        return torch.from_numpy(np.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdims=True), c))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            return torch.autograd.grad(written_out(*leaves), leaves, grad)


def test_an_attention_module_whose_attention_cannot_be_seen() -> None:
    """Nothing was recorded and nothing recognized while it ran. In a later block it is one of fewer calls."""
    model, inputs = wan()
    model.blocks[0].attn1.processor.attend = PastTheDispatcher.apply
    fastac.enable(model)
    assert re.search(r"blocks\.0.*\n.*attn1", error_of(model, **inputs))


def without_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """As SageAttention 1: a kernel that writes into a new tensor, of which autograd knows nothing."""
    with torch.no_grad():
        return support.attention_math(query, key, value)[0]


def test_parameters_that_get_no_gradient_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """Where the attention has no backward, the projections before it do not train; the one after it does."""
    model, inputs = wan(without_backward)
    fastac.enable(model)
    try:
        train_step(model, inputs)
    except PolicyNotAppliedError as error:
        caplog.messages.append(str(error))
    said = "\n".join([record.getMessage() for record in caplog.records] + caplog.messages)
    assert "attn1" in said
    assert "to_q" in said
    assert "to_out" not in said


# Threads


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


def test_attention_in_another_thread(pool: ThreadPoolExecutor) -> None:
    model, inputs = wan(lambda *qkv: pool.submit(sdpa, *qkv).result())
    fastac.enable(model)
    message = error_of(model, **inputs)
    assert "blocks.0" in message
    assert "thread" in message


@pytest.mark.parametrize("over", ["decomposed", "the region's own inputs", "a keyword argument"])
def test_attention_in_another_thread_of_other_kinds(over: str, pool: ThreadPoolExecutor) -> None:
    def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return pool.submit(math_kernel if over == "decomposed" else sdpa, q, k, v).result() * 2

    def keyword(x: torch.Tensor, *, context: torch.Tensor) -> torch.Tensor:
        return x + pool.submit(lambda t: sdpa(t, t, t), context * 2).result()

    first, second, third = tensors()
    run = functools.partial(fastac.checkpoint, own, first, second, third)
    if over == "a keyword argument":
        run = functools.partial(fastac.checkpoint, keyword, first, context=second)
    with pytest.raises(PolicyNotAppliedError, match="thread"):
        run()


def test_another_model_that_is_trained_meanwhile_is_no_error(pool: ThreadPoolExecutor) -> None:
    """In the middle of the region that is being watched, another thread takes whole steps of other models."""
    plain, enabled = stack(seed=5), stack(seed=6, policy="attn_only")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pool.submit(lambda: [train_step(model, stack_inputs(seed=9)) for model in (plain, enabled)]).result()
        return sdpa(q, k, v)

    inputs = stack_inputs()
    expected = train_step(stack(), inputs)
    model = stack(policy="attn_only", block=lambda: AttentionBlock(attend=attend))
    for _ in range(2):
        assert_same(train_step(model, inputs), expected)


# Later regions of a kind


class Alternating(AttentionBlock):
    """Blocks of one class, of which some attend to the text and some do not."""

    cross = True

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        if self.cross:
            return super().forward(video, text)
        return video + self.dropout(self.self_out(self._attention(*self.qkv(self.norms[0](video)).chunk(3, dim=-1))))


@pytest.mark.parametrize("unlike", [{0}, {1, 3}, {0, 1, 2}], ids=str)
def test_blocks_of_one_class_that_make_different_calls(unlike: set[int], attention_executions: Counter[str]) -> None:
    """Layer drop and branches are legal training, whichever came first; dropout draws what it would have drawn."""
    inputs = stack_inputs()

    def build(policy: str) -> support.AttentionStack:
        model = stack(layers=4, policy=policy, block=lambda: Alternating(dropout=0.2))
        for i in unlike:
            model.blocks[i].cross = False
        return model

    expected, model = train_step(build("none"), inputs), build("attn_only")
    for _ in range(2):
        attention_executions.clear()
        assert_same(train_step(model, inputs), expected)
    assert attention_executions == {CPU_ATTENTION: 8 - len(unlike)}


@pytest.mark.parametrize("policy", ["attn_only", Policy("attn_only", linear=("self_out", "cross_out"))], ids=str)
def test_fewer_calls_than_the_first_of_its_kind(
    policy: Policy, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A branch on the timestep, or a layer that is dropped: exact, watched once more, and not worth a word."""
    inputs, expected, found, judged = stack_inputs(), [], [], []
    judge = fastac.diagnosis.judge
    monkeypatch.setattr("fastac.diagnosis.judge", lambda *args: judged.append(args[0]) or judge(*args))
    for one, steps in (("none", expected), (policy, found)):
        model = stack(policy=one, block=Alternating)
        for step in range(6):
            model.blocks[1].cross = step in (0, 3)
            steps.append(train_step(model, inputs))
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)
    assert judged == [*model.blocks]
    assert not caplog.records


class HidingAttention(torch.autograd.Function):
    """A kernel that no op shows, and whose Function says what it is."""

    @staticmethod
    def forward(ctx: Any, *qkv: torch.Tensor) -> torch.Tensor:
        return PastTheDispatcher.forward(ctx, *qkv)

    backward = PastTheDispatcher.backward


def closure(model: Any, i: int, *args: torch.Tensor) -> torch.Tensor:
    """A checkpointed block as older trainers have it: all share one code."""
    block = model.blocks[i]

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        return block(*inputs)

    checkpointed: torch.Tensor = fastac.checkpoint(run, *args)
    return checkpointed


def by_number(model: Any, i: int, *args: torch.Tensor) -> torch.Tensor:
    """A function that may run any of the blocks."""
    checkpointed: torch.Tensor = fastac.checkpoint(lambda *inputs: model.blocks[i](*inputs), *args)
    return checkpointed


@pytest.mark.parametrize("when", ["from the first step on", "later", "in every second step", "in two sizes"])
@pytest.mark.parametrize("way", ["diffusers", "blocks", "closures", "by number"])
def test_attention_that_a_later_block_of_a_known_class_hides(way: str, when: str) -> None:
    """A region makes fewer calls than the first of its kind: its block's next ones are watched, until they do again."""
    sizes = [1, 2] if when == "in two sizes" else [1]
    if way == "diffusers":
        model, inputs = wan()
        steps = [
            {
                name: tensor.repeat_interleave(size, 0)
                for name, tensor in inputs.items()
                if isinstance(tensor, torch.Tensor)
            }
            | {"return_dict": False}
            for size in sizes
        ]
        hiding, hidden, place = model.blocks[1].attn1.processor, PastTheDispatcher.apply, "blocks.1.attn1"
        fastac.enable(model)
    else:
        model, steps = stack(layers=4), [stack_inputs(batch=size) for size in sizes]
        hiding, hidden, place = model.blocks[1], HidingAttention.apply, "HidingAttention"
        if way == "blocks":
            fastac.enable(model, blocks="blocks")
        else:
            run = closure if way == "closures" else by_number
            model.forward = lambda video, text: functools.reduce(lambda x, i: run(model, i, x, text), range(4), video)
    if when == "later":
        train_step(model, steps[0])
    seen = hiding.attend
    unnoticed = 2 if when in ("in every second step", "in two sizes") else 1
    for step in range(unnoticed):
        hiding.attend = seen if when == "in every second step" and step % 2 else hidden
        train_step(model, steps[step % len(steps)])
    hiding.attend = hidden
    for _ in range(2):
        assert place in error_of(train_step, model, steps[0])


def test_an_additional_call_that_is_decomposed() -> None:
    """The block makes the calls that its class was seen to make, and one more that cannot be saved."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return (sdpa if k.shape[-2] == support.VIDEO_TOKENS else dropping_out)(q, k, v)

    model = stack(policy="attn_only", block=lambda: Alternating(attend=attend))
    model.blocks[0].cross = False
    assert "small ops" in error_of(model, **stack_inputs())


def test_a_partial_is_named_by_what_it_calls() -> None:
    """transformers checkpoints a functools.partial of each layer's forward."""
    function = functools.partial(AttentionBlock.forward, AttentionBlock(attend=dropping_out))
    assert "AttentionBlock.forward" in error_of(fastac.checkpoint, function, **stack_inputs())


def test_a_flag_or_a_shape_that_changes_the_number_of_calls(
    attention_executions: Counter[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Another signature: Mochi attends once per sample of a batch. No error, and no warning."""
    qkv = torch.nn.Linear(16, 48)

    def per_sample(video: torch.Tensor, attend: bool) -> torch.Tensor:
        q, k, v = qkv(video)[:, None].chunk(3, dim=-1)
        return torch.cat(
            [sdpa(q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i in range(len(q) if attend else 0)] or [q]
        )

    for batch, attend in ((1, True), (3, True), (2, False), (2, True), (3, False), (3, True), (1, True)):
        video = stack_inputs(batch=batch)["video"]
        attention_executions.clear()
        fastac.checkpoint(per_sample, video, attend).sum().backward()
        assert attention_executions.total() == batch * attend
    assert not caplog.records


@pytest.mark.usefixtures("counted")
@needs_diffusers("0.35")
def test_another_kernel_in_a_later_step(attention_executions: Counter[str]) -> None:
    """A backend that is set after the first step and can be saved is saved."""
    name = f"switched_{uuid.uuid4().hex[:8]}"
    model, inputs = wan()
    fastac.enable(model)
    train_step(model, inputs)
    attend = support.custom_attention(name)
    for block in model.blocks:
        block.attn1.processor.attend = attend
    for _ in range(2):
        attention_executions.clear()
        train_step(model, inputs)
    assert attention_executions == {CPU_ATTENTION: 2, f"{support.NAMESPACE}::{name}": 2}
    model, inputs = support.build(WAN)
    fastac.enable(model)
    for backend in ("native", "_native_flash", "native"):
        model.set_attention_backend(backend)
        attention_executions.clear()
        train_step(model, inputs)
        assert attention_executions == {CPU_ATTENTION: 4}
