"""Never silently inactive: an attention call that should have been saved and was not is an error that says why.

Wan, where the module and the cause must be named; small blocks elsewhere. Everything that is raised is raised by the
forward, before any gradient is used.
"""

from __future__ import annotations

import contextlib
import logging
import re
import textwrap
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers.models.attention_processor import Attention, AttnProcessor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from fastac import census, diagnosis, explanation, interception, observation, recognition, regions
from fastac.policy import Policy
from tests import support

sdpa = F.scaled_dot_product_attention
Attend = Callable[..., torch.Tensor]

WAN = "WanTransformer3DModel"
CPU_OP = "aten._scaled_dot_product_flash_attention_for_cpu.default"


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


def wan(attend: Attend | None = None, **where: Attend) -> tuple[Any, dict[str, Any]]:
    """Two blocks of two attention calls. attend: of blocks.0.attn1; the others call scaled_dot_product_attention."""
    model, inputs = support.build(WAN)
    for block in model.blocks:
        for attention in (block.attn1, block.attn2):
            attention.processor = Processor(sdpa)
    if attend is not None:
        model.blocks[0].attn1.processor.attend = attend
    return model, inputs


def block_of(attend: Attend = sdpa, **options: Any) -> support.AttentionBlock:
    torch.manual_seed(0)
    return support.AttentionBlock(attend=attend, **options)


def region(function: Any, *args: Any, policy: Any = "attn_only", **kwargs: Any) -> Any:
    return fastac.checkpoint(function, *args, policy=policy, **kwargs)


def inputs_of_block() -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(support.stack_inputs().values())  # type: ignore[return-value]


def error_of(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(fastac.PolicyNotAppliedError) as error:
        function(*args, **kwargs)
    return str(error.value)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every second look that was taken."""
    taken = []
    look_again = diagnosis.look_again

    def counted(function: Any, *args: Any) -> Any:
        taken.append(function)
        return look_again(function, *args)

    monkeypatch.setattr(diagnosis, "look_again", counted)
    return taken


@pytest.fixture
def observers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every region that was watched op by op."""
    made = []

    class Counted(observation.Observer):
        def __init__(self, *args: Any) -> None:
            made.append(args[0])
            super().__init__(*args)

    monkeypatch.setattr(regions, "Observer", Counted)
    return made


# What torch decomposes, with the module and the cause


def mask_requires_grad(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v, attn_mask=torch.zeros(q.shape[-2], k.shape[-2]).requires_grad_())


def dropout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v, dropout_p=0.25)


def narrow_value(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    half = v.shape[-1] // 2
    return F.pad(sdpa(q, k, v[..., :half]), (0, half))


def query_without_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)).unflatten(0, q.shape[:2])


def mask_with_three_dimensions(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v, attn_mask=torch.zeros(q.shape[1], q.shape[-2], k.shape[-2]))


def math_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return sdpa(q, k, v)


def strided(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return sdpa(q, k, v.transpose(-1, -2).contiguous().transpose(-1, -2))


DECOMPOSED = {
    mask_requires_grad: "its mask requires grad: detach it",
    dropout: r"it drops out \(dropout_p=0\.25\)",
    narrow_value: "its value has head dim 6 where query has 12",
    query_without_heads: r"its query has 3 dimensions: pass \(batch, heads, sequence, head dim\)",
    mask_with_three_dimensions: "its mask has 3 dimensions: pass 2 or 4",
    math_kernel: "the math kernel is forced",
    strided: "not contiguous in its last dimension",
}
CASES = pytest.mark.parametrize("attend", DECOMPOSED, ids=lambda attend: attend.__name__)


@CASES
@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_decomposed_attention_is_named_with_its_cause(attend: Attend, engine: str) -> None:
    model, inputs = wan(attend)
    fastac.enable(model, engine=engine)
    message = error_of(model, **inputs)
    assert message.startswith(f"attn_only: not every attention call at {WAN}.blocks.0 was saved (1 of 2 reached")
    (line,) = (line for line in message.splitlines() if line.startswith("-"))
    assert line.startswith(f"- scaled_dot_product_attention in {WAN}.blocks.0.attn1 over 128 keys ran as small ops")
    assert re.search(DECOMPOSED[attend], line), line
    assert message.endswith(
        f'Registered ops that did run: {CPU_OP}. Mend the cause, or use policy="full" for this block.'
    )


@CASES
def test_the_next_step_of_a_mended_model_is_exact(attend: Attend, attention_executions: Any) -> None:
    model, inputs = wan()
    expected = support.train_step(model, inputs)
    fastac.enable(model)
    model.blocks[0].attn1.processor.attend = attend
    error_of(model, **inputs)
    model.blocks[0].attn1.processor.attend = sdpa
    attention_executions.clear()
    support.assert_same(support.train_step(model, inputs), expected)
    assert attention_executions == {support.CPU_ATTENTION: 4}


@CASES
def test_attention_that_is_decomposed_from_the_third_step_on(attend: Attend) -> None:
    model, inputs = wan()
    fastac.enable(model)
    for _ in range(2):
        support.train_step(model, inputs)
    model.blocks[1].attn2.processor.attend = attend
    message = error_of(model, **inputs)
    assert f"{WAN}.blocks.1.attn2 over 12 keys" in message
    assert re.search(DECOMPOSED[attend], message)


def test_the_whole_region_decomposed() -> None:
    model, inputs = wan()
    fastac.enable(model)
    with sdpa_kernel(SDPBackend.MATH):
        message = error_of(model, **inputs)
    assert "(0 of 2 reached a registered op)" in message
    assert "Registered ops that did run: none." in message
    assert f"{WAN}.blocks.0.attn1 over" in message
    assert f"{WAN}.blocks.0.attn2 over" in message


def test_one_decomposed_call_among_three() -> None:
    def third(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v) + sdpa(q, k, v) + dropout(q, k, v)

    message = error_of(region, lambda q, k, v: third(q, k, v), *[torch.randn(1, 2, 5, 4).requires_grad_()] * 3)
    assert "(2 of 3 reached a registered op)" in message
    assert message.count("ran as small ops") == 1


def test_a_block_that_attends_itself_is_named_once() -> None:
    message = error_of(region, block_of(dropout), *inputs_of_block())
    assert "at AttentionBlock was saved" in message
    assert "AttentionBlock.AttentionBlock" not in message


def test_full_and_no_gradient_ask_for_nothing() -> None:
    block, inputs = block_of(math_kernel), inputs_of_block()
    region(block, *inputs, policy="full").sum().backward()
    with torch.no_grad():
        region(block, *inputs)
    with torch.inference_mode():
        region(block, *inputs)


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_short_attention_may_be_decomposed_when_long_attention_alone_is_saved(engine: str) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v) if k.shape[-2] == support.VIDEO_TOKENS else math_kernel(q, k, v)

    inputs = support.stack_inputs()
    expected = support.train_step(support.stack(block=lambda: support.AttentionBlock(attend=attend)), inputs)
    long = Policy("attn_only", min_kv=support.TEXT_TOKENS + 1)
    model = support.stack(block=lambda: support.AttentionBlock(attend=attend), policy=long, engine=engine)
    for _ in range(2):
        support.assert_same(support.train_step(model, inputs), expected)
    model.policy = Policy("attn_only", min_kv=support.TEXT_TOKENS)
    error_of(model, **inputs)


def test_short_attention_may_be_written_out_when_long_attention_alone_is_saved() -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v) if k.shape[-2] == support.VIDEO_TOKENS else written_out(q, k, v)

    inputs = inputs_of_block()
    region(block_of(attend), *inputs, policy=Policy("attn_only", min_kv=support.TEXT_TOKENS + 1))
    error_of(region, block_of(attend), *inputs, policy=Policy("attn_only", min_kv=support.TEXT_TOKENS))


# The backend was switched after enable


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_math_backend_set_after_enable(steps: int) -> None:
    model, inputs = support.build(WAN)
    fastac.enable(model)
    for _ in range(steps):
        support.train_step(model, inputs)
    model.set_attention_backend("_native_math")
    message = error_of(model, **inputs)
    assert f"scaled_dot_product_attention in {WAN}.blocks.0.attn1 over" in message
    assert "the math kernel is forced" in message
    assert f"{WAN}.blocks.0.attn1 is set to backend '_native_math' (decomposed)" in message


def test_another_backend_that_can_be_saved(attention_executions: Any, looks: list[Any]) -> None:
    model, inputs = support.build(WAN)
    expected = support.train_step(model, inputs)
    fastac.enable(model)
    for backend in ("native", "_native_flash", "native"):
        model.set_attention_backend(backend)
        attention_executions.clear()
        support.assert_same(support.train_step(model, inputs), expected)
        assert attention_executions == {support.CPU_ATTENTION: 4}
    assert not looks


def test_another_op_that_can_be_saved_is_looked_at_once_per_block(looks: list[Any], attention_executions: Any) -> None:
    name = f"switched_{uuid.uuid4().hex[:8]}"
    attend = support.custom_attention(name)
    model, inputs = wan()
    fastac.enable(model)
    support.train_step(model, inputs)
    for block in model.blocks:
        block.attn1.processor.attend = attend
    support.train_step(model, inputs)
    assert len(looks) <= len(model.blocks)
    looks.clear()
    for _ in range(2):
        attention_executions.clear()
        support.train_step(model, inputs)
        assert attention_executions == {support.CPU_ATTENTION: 2, f"{support.NAMESPACE}::{name}": 2}
    assert not looks


@pytest.fixture
def library_loaded_later(rows_as_before: None) -> tuple[str, Callable[[], Attend]]:
    """Name of an op that has a row, and a function that loads its library."""
    name = f"later_{uuid.uuid4().hex[:8]}"
    fastac.register(
        fastac.AttentionOp(backend="tests", namespace=support.NAMESPACE, name=name, layout="bhsd", dropout=None)
    )
    loaded: list[Attend] = []

    def load() -> Attend:
        if not loaded:
            loaded.append(support.attention_function(support.define_attention_op(name)))
        return loaded[0]

    return f"{support.NAMESPACE}::{name}", load


def test_a_backend_whose_library_was_loaded_since_the_first_step(
    library_loaded_later: Any, attention_executions: Any
) -> None:
    """`set_attention_backend` of a hub kernel in the middle of a training loads it then."""
    name, load = library_loaded_later
    model, inputs = wan()
    fastac.enable(model)
    support.train_step(model, inputs)
    model.blocks[0].attn1.processor.attend = model.blocks[1].attn1.processor.attend = load()
    support.train_step(model, inputs)
    attention_executions.clear()
    support.train_step(model, inputs)
    assert attention_executions == {support.CPU_ATTENTION: 2, name: 2}


@pytest.mark.parametrize("compiled", [False, True])
def test_a_library_that_the_first_forward_loads(
    compiled: bool, library_loaded_later: Any, attention_executions: Any
) -> None:
    """The kernels of that one region are not saved; from the next on they are. A compiled region is looked at again."""
    name, load = library_loaded_later

    @torch.compiler.disable
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return load()(q, k, v)

    block, inputs = block_of(attend), support.stack_inputs()
    if compiled:
        torch._dynamo.reset()
        block.compile(backend="eager")
    model = support.AttentionStack(layers=1, policy="attn_only", block=lambda: block)
    for _ in range(2):
        support.train_step(model, inputs)
    attention_executions.clear()
    support.train_step(model, inputs)
    assert attention_executions == {name: 2}
    (row,) = (census.block_record(block).latest,)
    assert [call.saved for call in row.calls] == [True, True]


# Attention written out


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    return torch.softmax(scores, dim=-1) @ v


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


def written_in_half_precision_under_autocast(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return written_out(q, k, v).to(q.dtype)


WRITTEN = pytest.mark.parametrize(
    "attend",
    [
        written_out,
        written_with_einsum,
        written_with_baddbmm,
        written_with_a_mask_and_dropout,
        written_in_half_precision_under_autocast,
    ],
)


@WRITTEN
@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_attention_written_out_in_small_ops_is_found(attend: Attend, engine: str) -> None:
    model, inputs = wan(attend)
    fastac.enable(model, engine=engine)
    message = error_of(model, **inputs)
    assert "(1 of 2 reached a registered op)" in message
    (line,) = (line for line in message.splitlines() if line.startswith("-"))
    assert "softmax attention written out in small ops" in line
    assert "over 128 keys" in line
    assert f"{WAN}.blocks.0.attn1" in line


@WRITTEN
def test_attention_that_is_written_out_from_the_third_step_on(attend: Attend) -> None:
    model, inputs = wan()
    fastac.enable(model)
    for _ in range(2):
        support.train_step(model, inputs)
    model.blocks[1].attn1.processor.attend = attend
    message = error_of(model, **inputs)
    assert "softmax attention written out in small ops" in message
    assert f"{WAN}.blocks.1" in message


def test_the_legacy_attention_processor_of_diffusers_is_found() -> None:
    torch.manual_seed(0)
    attention = Attention(query_dim=16, heads=2, dim_head=8, processor=AttnProcessor())
    message = error_of(region, attention, torch.randn(1, 9, 16).requires_grad_())
    assert "(0 of 1 reached a registered op)" in message
    assert "over 9 keys ran as small ops" in message


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


@pytest.mark.parametrize("best", [None, 2])
def test_a_mixture_of_experts_is_no_attention(best: int | None) -> None:
    torch.manual_seed(0)
    region(Mixture(best), torch.randn(1, 6, 16).requires_grad_()).sum().backward()


def test_a_frozen_gate_over_a_strided_input_is_no_attention() -> None:
    """torch multiplies these by bmm, not by mm."""
    torch.manual_seed(0)
    mixture = Mixture()
    mixture.gate.requires_grad_(False)
    video = torch.randn(2, 16, 6).requires_grad_()
    region(lambda x: mixture(x.transpose(1, 2)), video).sum().backward()


@pytest.mark.parametrize("attend", [softmax_linear_attention, relu_linear_attention])
def test_linear_attention_is_no_softmax_attention(attend: Attend) -> None:
    region(block_of(attend), *inputs_of_block()).sum().backward()


def test_linear_attention_after_projections_by_einsum_is_no_softmax_attention() -> None:
    """A projection per head is a batched matrix product as well, with a weight."""
    weights = torch.randn(3, 16, 2, 8).requires_grad_()

    def function(x: torch.Tensor) -> torch.Tensor:
        return softmax_linear_attention(*(torch.einsum("btc,chd->bhtd", x, weight) for weight in weights))

    region(function, torch.randn(1, 6, 16).requires_grad_()).sum().backward()


def test_a_softmax_at_the_end_is_no_attention() -> None:
    def function(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return (q @ k.transpose(-1, -2)).softmax(-1).argmax(-1) * q.mean(-1)

    region(function, *(torch.randn(1, 2, 5, 4).requires_grad_() for _ in range(2))).sum().backward()


# An op without a row


def unregistered(name: str) -> Attend:
    return support.attention_function(support.define_attention_op(name))


@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("pattern", ["my_attention_forward_{}", "block_sparse_attn_{}", "varlen_attn_{}_fwd"])
def test_an_op_that_looks_like_attention_is_named(pattern: str, engine: str) -> None:
    name = pattern.format(f"x{uuid.uuid4().hex[:6]}")
    model, inputs = wan(unregistered(name))
    fastac.enable(model, engine=engine)
    message = error_of(model, **inputs)
    assert f"{support.NAMESPACE}::{name} looks like an attention forward and has no row" in message
    assert f"at {WAN}.blocks.0 was saved (1 of 2 reached a registered op)" in message


@pytest.mark.usefixtures("rows_as_before")
@pytest.mark.parametrize("kind", ["plain", "dropout"])
def test_the_lines_that_the_error_gives_register_the_op(kind: str, attention_executions: Any) -> None:
    name = f"my_attention_forward_{uuid.uuid4().hex[:6]}"
    model, inputs = wan(support.attention_function(support.define_attention_op(name, kind)))
    expected = support.train_step(model, inputs)
    fastac.enable(model)
    message = error_of(model, **inputs)
    lines = re.search(r"    import fastac\n    row = .*\n    fastac\.register\(row\)\n", message)
    assert lines, message
    assert f"dropout={'None' if kind == 'plain' else repr('dropout_p')}" in message
    exec(textwrap.dedent(lines.group()).replace("bshd", "bhsd"), {})
    for _ in range(2):
        attention_executions.clear()
        support.assert_same(support.train_step(model, inputs), expected)
    assert attention_executions == {support.CPU_ATTENTION: 3, f"{support.NAMESPACE}::{name}": 1}


def test_an_op_without_a_row_in_the_place_of_one_with() -> None:
    name = f"my_attention_forward_{uuid.uuid4().hex[:6]}"
    model, inputs = wan()
    fastac.enable(model)
    support.train_step(model, inputs)
    model.blocks[1].attn1.processor.attend = unregistered(name)
    message = error_of(model, **inputs)
    assert f"{support.NAMESPACE}::{name} looks like an attention forward" in message
    assert f"at {WAN}.blocks.1 was saved" in message


@pytest.mark.parametrize("name", ["attention_mask_of", "attn_bias_forward", "attention_backward", "flattened", "attnx"])
def test_what_is_named_alike_is_no_attention(name: str) -> None:
    tensors = [torch.zeros(1, 2, 3, 4)] * 3
    assert not recognition.looks_like_attention_forward(f"mine::{name}", tensors)


def test_an_attention_forward_takes_three_tensors_of_three_or_four_dimensions() -> None:
    q = torch.zeros(1, 2, 3, 4)
    assert recognition.looks_like_attention_forward("mine::attention_forward", [q, q, q])
    assert recognition.looks_like_attention_forward("mine::attn_varlen", [q[0], q[0], q[0], 3])
    assert not recognition.looks_like_attention_forward("mine::attention_forward", [q, q])
    assert not recognition.looks_like_attention_forward("mine::attention_forward", [q, q, q.long()])
    assert not recognition.looks_like_attention_forward("mine::attention_forward", [q[0, 0], q, q])


# A call past the dispatcher


class PastTheDispatcher(torch.autograd.Function):
    """Attention by numpy, as a kernel behind ctypes or pybind: no op of torch runs for it."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        import numpy as np

        ctx.save_for_backward(q, k, v)
        a, b, c = (t.detach().numpy() for t in (q, k, v))
        scores = np.einsum("bhqd,bhkd->bhqk", a, b) * a.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return torch.from_numpy(np.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdims=True), c))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            return torch.autograd.grad(written_out(*leaves), leaves, grad)


@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_call_that_goes_past_the_dispatcher_from_some_step_on(steps: int, engine: str) -> None:
    model, inputs = wan()
    fastac.enable(model, engine=engine)
    for _ in range(steps):
        support.train_step(model, inputs)
    model.blocks[1].attn1.processor.attend = PastTheDispatcher.apply
    message = error_of(model, **inputs)
    assert message.startswith(f"attn_only: not every attention call at {WAN}.blocks.1 was saved (1 of 2 reached")
    assert "called past the dispatcher" in message
    assert "called past the dispatcher" in message


def test_every_call_of_a_block_goes_past_the_dispatcher() -> None:
    block = block_of()
    region(block, *inputs_of_block())
    block.attend = PastTheDispatcher.apply
    assert "(0 of 2 reached" in error_of(region, block, *inputs_of_block())


# Threads


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_attention_in_another_thread_is_found(pool: ThreadPoolExecutor, engine: str) -> None:
    model, inputs = wan(lambda *qkv: pool.submit(sdpa, *qkv).result())
    fastac.enable(model, engine=engine)
    message = error_of(model, **inputs)
    assert f"{CPU_OP} was called in another thread, where no region is open" in message
    assert message.startswith(f"attn_only: not every attention call at {WAN}.blocks.0 was saved (1 of 2 reached")


def test_attention_that_moves_to_another_thread_later(pool: ThreadPoolExecutor) -> None:
    model, inputs = wan()
    fastac.enable(model)
    for _ in range(2):
        support.train_step(model, inputs)
    model.blocks[1].attn2.processor.attend = lambda *qkv: pool.submit(sdpa, *qkv).result()
    message = error_of(model, **inputs)
    assert f"at {WAN}.blocks.1 was saved (1 of 2" in message
    assert "was called in another thread" in message


def test_decomposed_attention_in_another_thread_is_found(pool: ThreadPoolExecutor) -> None:
    block = block_of(lambda *qkv: pool.submit(math_kernel, *qkv).result())
    assert "in another thread" in error_of(region, block, *inputs_of_block())


def test_attention_over_a_region_s_own_inputs_in_another_thread_is_found(pool: ThreadPoolExecutor) -> None:
    def function(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return pool.submit(sdpa, q, k, v).result() * 2

    tensors = [torch.randn(1, 2, 5, 4).requires_grad_() for _ in range(3)]
    assert "in another thread" in error_of(region, function, *tensors)


def test_attention_over_a_keyword_argument_in_another_thread_is_found(pool: ThreadPoolExecutor) -> None:
    def function(x: torch.Tensor, *, context: torch.Tensor) -> torch.Tensor:
        return x + pool.submit(lambda t: sdpa(t, t, t), context * 2).result()

    tensors = [torch.randn(1, 2, 5, 4).requires_grad_() for _ in range(2)]
    assert "in another thread" in error_of(region, function, tensors[0], context=tensors[1])


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_another_model_that_is_trained_meanwhile_is_no_error(pool: ThreadPoolExecutor, engine: str) -> None:
    """In the middle of the region that is being watched, another thread takes whole steps of other models."""
    plain, enabled = support.stack(seed=5), support.stack(seed=6, policy="attn_only")
    steps = []

    def others() -> None:
        for model in (plain, enabled):
            steps.append(support.train_step(model, support.stack_inputs(seed=9)))

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        pool.submit(others).result()
        return sdpa(q, k, v)

    inputs = support.stack_inputs()
    expected = support.train_step(support.stack(), inputs)
    model = support.stack(policy="attn_only", engine=engine, block=lambda: support.AttentionBlock(attend=attend))
    for _ in range(2):
        support.assert_same(support.train_step(model, inputs), expected)
    assert len(steps) >= 8


def test_models_of_one_class_trained_in_threads_at_once(looks: list[Any]) -> None:
    expected = [support.train_step(support.stack(seed=i), support.stack_inputs(seed=i)) for i in range(4)]
    barrier = threading.Barrier(4)

    def train(i: int) -> None:
        model, inputs = support.stack(seed=i, policy="attn_only"), support.stack_inputs(seed=i)
        barrier.wait(60)
        for _ in range(5):
            support.assert_same(support.train_step(model, inputs), expected[i])

    models = threading.Lock()
    original = support.stack

    def stack(**options: Any) -> Any:
        with models:  # torch.manual_seed is process-wide
            return original(**options)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(4) as executor:
        patch.setattr(support, "stack", stack)
        for future in [executor.submit(train, i) for i in range(4)]:
            future.result()
    assert not looks


# No error where nothing is to be saved


def test_a_region_without_attention(looks: list[Any]) -> None:
    linear = torch.nn.Linear(4, 4)
    for _ in range(2):
        region(linear, torch.randn(3, 4)).sum().backward()
    assert not looks


def test_a_region_without_gradients(looks: list[Any], observers: list[Any]) -> None:
    block, inputs = block_of(math_kernel), inputs_of_block()
    with torch.no_grad():
        region(block, *inputs)
    assert not looks


def test_a_region_without_gradients_does_not_count_as_the_first() -> None:
    """Nothing is recorded there; that must not pass for "this block makes no attention calls"."""
    model, inputs = wan()
    expected = support.train_step(model, inputs)
    fastac.enable(model)
    with torch.no_grad():
        model(**inputs)
    support.assert_same(support.train_step(model, inputs), expected)
    assert fastac.report(model).rows[0].saved == 4


def test_inside_reentrant_checkpointing(attention_executions: Any, looks: list[Any]) -> None:
    """Its forward runs without gradients; in its recompute a region is a region again."""
    inputs = support.stack_inputs()
    expected = support.train_step(support.stack(), inputs)
    model = support.stack(policy="attn_only")

    def outer(**kwargs: Any) -> torch.Tensor:
        return torch_checkpoint(model, *kwargs.values(), use_reentrant=True)

    outer.named_parameters = model.named_parameters  # type: ignore[attr-defined]
    for _ in range(2):
        attention_executions.clear()
        leaves = support.leaves_of(model, inputs)
        for leaf in leaves.values():
            leaf.grad = None
        support.loss_of(outer(**inputs)).backward()
        support.assert_same(
            support.gradients(leaves), {name: value for name, value in expected.items() if "gradient" in name}
        )
        assert attention_executions == {support.CPU_ATTENTION: 8}  # once without gradients, once with
    assert not looks


def test_another_checkpoint_around_a_region_is_told_of(
    caplog: pytest.LogCaptureFixture, attention_executions: Any
) -> None:
    """A region can not keep what somebody else's recompute asks its function for."""
    explanation.warn_of_outer_checkpoint.cache_clear()
    inputs = support.stack_inputs()
    model = support.stack(policy="attn_only")

    def count(outer: Any, **options: Any) -> int:
        attention_executions.clear()
        outer(model, *inputs.values(), **options).sum().backward()
        return attention_executions[support.CPU_ATTENTION]

    with caplog.at_level(logging.WARNING, logger="fastac"):
        assert count(lambda function, *args: function(*args)) == 4
        assert count(fastac.checkpoint) == 4, "this one keeps them"
        assert not caplog.records
        assert count(torch_checkpoint, use_reentrant=False) == count(torch_checkpoint, use_reentrant=False) == 6
    (record,) = caplog.records
    assert "AttentionBlock: its forward runs again in backward" in record.getMessage()


# One census per block class and signature


def four_blocks(**options: Any) -> support.AttentionStack:
    return support.stack(layers=4, policy="attn_only", **options)


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_the_census_runs_once_per_class_and_signature(engine: str, observers: list[Any], looks: list[Any]) -> None:
    model = four_blocks(engine=engine)
    for _ in range(3):
        support.train_step(model, support.stack_inputs())
    assert len(observers) == 1
    for _ in range(3):
        support.train_step(model, support.stack_inputs(batch=2))
    assert len(observers) == 2
    support.train_step(model, support.stack_inputs())
    assert len(observers) == 2
    assert not looks


def test_the_census_runs_once_for_two_models_of_one_class(observers: list[Any]) -> None:
    for seed in range(2):
        support.train_step(four_blocks(seed=seed), support.stack_inputs())
    assert len(observers) == 1


def test_a_number_that_changes_with_every_step_is_no_new_signature(observers: list[Any]) -> None:
    block = block_of()

    def function(video: torch.Tensor, text: torch.Tensor, scale: float, step: int) -> torch.Tensor:
        return block(video, text) * scale

    for step in range(3):
        region(function, *inputs_of_block(), 0.1 * step, step)
    assert len(observers) == 1


def test_a_flag_that_switches_attention_off_is_another_signature(observers: list[Any], looks: list[Any]) -> None:
    block = block_of()

    def function(video: torch.Tensor, text: torch.Tensor, attend: bool) -> torch.Tensor:
        return block(video, text) if attend else video * 2

    for attend in (True, False, True, False):
        region(function, *inputs_of_block(), attend).sum().backward()
    assert len(observers) == 2
    assert not looks


def test_the_signature_of_what_a_block_is_called_with() -> None:
    x = torch.zeros(2, 3)
    assert census.signature((x, [x, None], {"a": True})) == census.signature((x + 1, [x, None], {"a": True}))
    different = [x[:1], x.double(), [x], (x, x), {"a": x}, None, True, False, "text", 3]
    assert len({census.signature((value,)) for value in different}) == len(different)
    assert census.signature((3,)) == census.signature((4,))


class Alternating(support.AttentionBlock):
    """Blocks of one class, of which some attend to the text and some do not."""

    cross = True

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        if self.cross:
            return super().forward(video, text)
        return video + self.dropout(self.self_out(self._attention(*self.qkv(self.norms[0](video)).chunk(3, dim=-1))))


@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("odd", [{0}, {1, 3}, {0, 1, 2}])
def test_blocks_of_one_class_with_different_numbers_of_calls(
    odd: set[int], engine: str, looks: list[Any], attention_executions: Any
) -> None:
    """At most one second look per odd block, whichever came first; dropout draws what it would have drawn."""
    inputs = support.stack_inputs()

    def build(policy: str) -> support.AttentionStack:
        model = support.stack(
            layers=4, policy=policy, engine=engine, block=lambda: Alternating(dropout=0.2 if engine == "tape" else 0)
        )
        for i in odd:
            model.blocks[i].cross = False
        return model

    expected = support.train_step(build("none"), inputs)
    model = build("attn_only")
    calls = 8 - len(odd)
    for step in range(4):
        attention_executions.clear()
        support.assert_same(support.train_step(model, inputs), expected)
        if step > 0:
            assert attention_executions == {support.CPU_ATTENTION: calls}
    assert len(looks) == len(set(looks)) <= 3


def test_an_odd_block_that_goes_past_the_dispatcher_is_still_found() -> None:
    model = support.stack(layers=2, policy="attn_only", block=Alternating)
    model.blocks[1].cross = False
    for _ in range(2):
        model(**support.stack_inputs())
    model.blocks[1].attend = PastTheDispatcher.apply
    assert "(0 of 1 reached" in error_of(model, **support.stack_inputs())


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_an_odd_block_whose_additional_call_is_decomposed(engine: str) -> None:
    """It records what its class was seen to make, and one more call that can not be recorded."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sdpa(q, k, v) if k.shape[-2] == support.VIDEO_TOKENS else dropout(q, k, v)

    model = support.stack(policy="attn_only", engine=engine, block=lambda: Alternating(attend=attend))
    model.blocks[0].cross = False
    assert "over 6 keys ran as small ops" in error_of(model, **support.stack_inputs())


class Layers(torch.nn.Module):
    """Runs its layers by number, under checkpointing, through a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Alternating() for _ in range(3))
        self.layers[1].cross = False

    def run_layer(self, number: int, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return self.layers[number](video, text)

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for number in range(3):
            video = region(self.run_layer, number, video, text)
        return video


def test_a_method_that_runs_unlike_layers() -> None:
    model = Layers()
    for _ in range(2):
        support.train_step(model, support.stack_inputs())


class PerSample(torch.nn.Module):
    """One attention call per sample of the batch, as Mochi makes them for its padded text."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(16, 48)

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(video)[:, None].chunk(3, dim=-1)
        return video + torch.cat([sdpa(q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i in range(len(q))])[:, 0]


def test_shapes_that_change_the_number_of_calls(looks: list[Any], attention_executions: Any) -> None:
    model = support.stack(policy="attn_only", block=PerSample)
    plain = support.stack(block=PerSample)
    for batch in (1, 3, 2, 3, 1):
        inputs = support.stack_inputs(batch=batch)
        del inputs["text"]
        inputs["text"] = torch.zeros(1)
        expected = support.train_step(plain, inputs)
        attention_executions.clear()
        support.assert_same(support.train_step(model, inputs), expected)
        assert attention_executions == {support.CPU_ATTENTION: 2 * batch}
    assert not looks


def test_what_is_known_about_a_block_goes_with_it() -> None:
    import gc
    import weakref

    model = support.stack(policy="attn_only")
    support.train_step(model, support.stack_inputs())
    blocks = [weakref.ref(block) for block in model.blocks]
    assert len(census._blocks) == 2
    del model
    gc.collect()
    assert [block() for block in blocks] == [None, None]
    assert len(census._blocks) == 0


# A second look changes nothing


class Stateful(torch.nn.Module):
    """Buffers that a forward writes in place, and one that it replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(16)
        self.block = support.AttentionBlock(dropout=0.3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.block(self.norm(video.transpose(1, 2)).transpose(1, 2), text)


def test_a_second_look_leaves_random_numbers_and_buffers_as_they_were() -> None:
    torch.manual_seed(0)
    block = Stateful()
    buffers = {name: value.clone() for name, value in block.named_buffers()}
    state = torch.get_rng_state()
    look = diagnosis.look_again(block, inputs_of_block(), {}, Policy("attn_only"))
    assert [str(op.op) for op in look.ops] == [CPU_OP] * 2
    assert torch.equal(torch.get_rng_state(), state)
    support.assert_same(dict(block.named_buffers()), buffers)
    assert all(parameter.grad is None for parameter in block.parameters())


@pytest.mark.parametrize("checkpoint", [fastac.checkpoint, torch_checkpoint])
def test_a_second_look_inside_somebody_s_checkpoint(checkpoint: Any) -> None:
    """What that saves is counted in its forward, and in its recompute no second look is taken any more."""
    model = support.stack(layers=2, policy="attn_only", block=Alternating)
    model.blocks[1].cross = False
    inputs = support.stack_inputs()
    plain = support.stack(layers=2, block=Alternating)
    plain.blocks[1].cross = False
    expected = support.train_step(plain, inputs)
    del expected["output"]
    options = {} if checkpoint is fastac.checkpoint else {"use_reentrant": False}
    for _ in range(2):
        for leaf in support.leaves_of(model, inputs).values():
            leaf.grad = None
        torch.manual_seed(7)
        support.loss_of(checkpoint(model, *inputs.values(), **options)).backward()
        support.assert_same(support.gradients(support.leaves_of(model, inputs)), expected)


class Falling(support.AttentionBlock):
    """Tries a kernel that is not there for this device, and falls back to torch's."""

    tries = True

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        if self.tries:
            with contextlib.suppress(NotImplementedError):
                torch.ops.fastac_tests.not_for_this_device(video, video, video)
            return video + self._attention(*self.qkv(self.norms[0](video)).chunk(3, dim=-1))
        return super().forward(video, text)


def test_a_second_look_counts_no_kernel_that_raised(looks: list[Any], rows_as_before: None) -> None:
    library = torch.library.Library("fastac_tests", "FRAGMENT")
    library.define("not_for_this_device(Tensor query, Tensor key, Tensor value) -> Tensor")

    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    library.impl("not_for_this_device", kernel, "CPU")
    row = fastac.AttentionOp(backend="tests", namespace="fastac_tests", name="not_for_this_device", layout="bhsd")
    fastac.register(row)
    model = support.stack(layers=2, policy="attn_only", block=Falling)
    model.blocks[0].tries = False
    inputs = support.stack_inputs()
    plain = support.stack(layers=2, block=Falling)
    plain.blocks[0].tries = False
    expected = support.train_step(plain, inputs)
    for _ in range(2):
        support.assert_same(support.train_step(model, inputs), expected)
    assert looks, "its second block makes fewer calls than its class did before"


def test_a_second_look_takes_its_hooks_away() -> None:
    before = [list(hooks) for hooks in global_hooks()]
    block = block_of(math_kernel)
    diagnosis.look_again(block, inputs_of_block(), {}, Policy("attn_only"))
    with pytest.raises(ZeroDivisionError):
        diagnosis.look_again(lambda x: 1 / 0, inputs_of_block()[:1], {}, Policy("attn_only"))
    assert [list(hooks) for hooks in global_hooks()] == before
    assert not interception.watchers


def global_hooks() -> list[Any]:
    module = torch.nn.modules.module
    return [module._global_forward_hooks, module._global_forward_pre_hooks]


def test_an_exception_in_the_watched_forward_leaves_nothing_behind(attention_executions: Any) -> None:
    """The fixture of every test looks for open scopes and watchers; the next step is watched, and exact."""
    fail = [True]

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        output = sdpa(q, k, v)
        if fail and fail.pop():
            raise ZeroDivisionError
        return output

    inputs = support.stack_inputs()
    model = support.stack(policy="attn_only", block=lambda: support.AttentionBlock(attend=attend))
    with pytest.raises(ZeroDivisionError):
        model(**inputs)
    support.assert_same(support.train_step(model, inputs), support.train_step(support.stack(), inputs))
    model.blocks[0].attend = PastTheDispatcher.apply
    error_of(model, **inputs)


# Attention that nobody can see


class Opaque(torch.autograd.Function):
    """Attention as pybind and CuTe libraries have it: its kernel is no op of the dispatcher."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        scores = np.matmul(q.numpy(force=True), np.swapaxes(k.numpy(force=True), -1, -2))
        return torch.from_numpy(np.matmul(np.tanh(scores), v.numpy(force=True)))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, k, v = ctx.saved_tensors
        return grad @ v.transpose(-1, -2) @ k, grad @ v, grad


class OpaqueProcessor:
    """A processor of Wan that attends with a kernel past the dispatcher."""

    _attention_backend = None

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        return attn.to_out[0](Opaque.apply(q, k, v))


@pytest.mark.parametrize("engine", ["tape", "sac"])
@pytest.mark.parametrize("which", [[0], [1], [0, 1]], ids=str)
def test_an_attention_module_whose_attention_can_not_be_seen(which: list[int], engine: str) -> None:
    """Nothing was recorded and nothing recognized while it ran; in the second block its class is known already."""
    model, inputs = wan()
    for index in which:
        model.blocks[index].attn1.processor = OpaqueProcessor()
    fastac.enable(model, engine=engine)
    with pytest.raises(fastac.PolicyNotAppliedError, match=rf"blocks\.{which[0]}\.attn1 ran, and no attention call"):
        support.train_step(model, inputs)


def test_attention_linear_in_its_length_is_seen_by_its_products() -> None:
    class Linear(OpaqueProcessor):
        def __call__(self, attn: Any, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
            return attn.to_out[0](q.relu() @ (k.relu().transpose(-1, -2) @ v))

    model, inputs = wan()
    for block in model.blocks:
        block.attn1.processor = Linear()
    fastac.enable(model)
    support.train_step(model, inputs)
    assert fastac.report(model).rows[0].attention_calls == 2


@pytest.mark.parametrize("backend", ["flash_4_hub", "sage", "_flash_3"])
@pytest.mark.parametrize("block", [0, 1])
def test_a_hopeless_backend_set_after_enable_is_found_before_it_runs(backend: str, block: int) -> None:
    model, inputs = wan()
    fastac.enable(model)
    model.blocks[block].attn1.processor._attention_backend = backend
    with pytest.raises(fastac.PolicyNotAppliedError, match=rf"blocks\.{block}\.attn1 is set to backend '{backend}'"):
        support.train_step(model, inputs)


def test_many_shapes_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "MANY", 4)
    block = support.AttentionBlock()
    for tokens in range(2, 14):
        video, text = torch.randn(1, tokens, support.WIDTH).requires_grad_(), torch.randn(1, 3, support.WIDTH)
        fastac.checkpoint(block, video, text).sum().backward()
    assert len(census.known(block)) <= 4
    assert len(census.block_record(block).censuses) <= 4


# Kernels without a backward


def without_backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """As SageAttention 1: a kernel that writes into a new tensor, of which autograd knows nothing."""
    with torch.no_grad():
        return support.attention_math(query, key, value)[0]


@pytest.mark.parametrize("policy", ["attn_only", "long_attn_only"])
def test_parameters_that_get_no_gradient_are_named(policy: str, caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = wan(without_backward)
    fastac.enable(model, policy)
    unseen = contextlib.suppress(fastac.PolicyNotAppliedError)  # the module ran, and no attention was seen in it
    with caplog.at_level(logging.WARNING, logger="fastac"), unseen:
        support.train_step(model, inputs)
    (said,) = [record.getMessage() for record in caplog.records]
    assert all(f"attn1.{name}.{part}" in said for name in ("to_q", "to_k", "to_v") for part in ("weight", "bias"))
    assert "to_out" not in said
    assert "SageAttention" in said


def test_parameters_that_all_have_a_part_are_no_matter(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="fastac"):
        model, inputs = support.build("WanTransformer3DModel")
        fastac.enable(model)
        support.train_step(model, inputs)
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        model.blocks[0].attn1.to_q.requires_grad_(True)
        census._kinds.clear()
        census._blocks.clear()
        fastac.enable(model)
        support.train_step(model, inputs)
    assert not caplog.records


def test_attention_that_is_left_out_altogether_is_no_matter(caplog: pytest.LogCaptureFixture) -> None:
    """A path that this call does not take: its parameters have no part in the output, all of them."""

    class Skips(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attn = torch.nn.Linear(8, 8)
            self.ffn = torch.nn.Linear(8, 8)

        def forward(self, video: torch.Tensor) -> torch.Tensor:
            return self.ffn(video)

    with caplog.at_level(logging.WARNING, logger="fastac"):
        fastac.checkpoint(Skips(), torch.randn(1, 4, 8, requires_grad=True))
    assert not caplog.records
