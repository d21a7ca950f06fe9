"""Ops of torch that go another way under fastac, or save what they have yet to write; tensors without a version, and
tensors that are written; what a region draws."""

from __future__ import annotations

import collections
import dataclasses
import functools
import random
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import CheckpointError

import fastac
from fastac.engine import beginning
from tests import support
from tests.engine.cases import OneAttention
from tests.support import VIDEO_TOKENS, WIDTH, AttentionBlock, Tensors, run_checkpointed, stack_inputs

BATCH = 3

of_policies = pytest.mark.parametrize("policy", ["attn_only", "full"])


def transcribed(hidden: torch.Tensor) -> torch.Tensor:
    """Times a ctc_loss, which goes another way while a TorchDispatchMode is open."""
    targets = torch.arange(1, 5).repeat(BATCH, 1)
    lengths = [torch.full((BATCH,), length) for length in (hidden.shape[1], 4)]
    return hidden * F.ctc_loss(hidden.transpose(0, 1).log_softmax(-1), targets, *lengths)


def leaky(hidden: torch.Tensor) -> torch.Tensor:
    """Saves its noise before it draws it, so that values cannot be compared."""
    return F.rrelu(hidden, training=True)


def spectrum(hidden: torch.Tensor) -> torch.Tensor:
    """Writes into a view whose graph torch cannot make again."""
    changed = torch.fft.ifft(torch.fft.fft(hidden, dim=1) * 2, dim=1).real
    changed[..., 0] = 0
    return F.dropout(changed, 0.3)


def jittered(hidden: torch.Tensor) -> torch.Tensor:
    """Draws from a generator that torch does not have."""
    return hidden * random.random()


class WithOperation(AttentionBlock):
    """A block with an operation, before all else or after it."""

    def __init__(self, operation: Callable[[torch.Tensor], torch.Tensor], is_last: bool) -> None:
        super().__init__()
        self.operation, self.is_last = operation, is_last

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        if self.is_last:
            return self.operation(super().forward(video, text))
        return super().forward(self.operation(video), text)


@pytest.mark.parametrize("determinism_check", ["default", "none"])
@of_policies
@pytest.mark.parametrize("is_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("operation", [transcribed, leaky, spectrum, jittered])
def test_operation(operation: Any, is_last: bool, policy: str, determinism_check: str) -> None:
    """In four steps, of which the last compares no values."""
    if operation is leaky and determinism_check == "default":
        pytest.skip("a limit: docs/limits.md")
    torch.manual_seed(0)
    block, inputs = WithOperation(operation, is_last), stack_inputs(batch=BATCH)

    def run(policy: str) -> Tensors:
        early_stop = operation is not leaky or not is_last
        options: Any = {"determinism_check": determinism_check, "early_stop": early_stop} if policy != "none" else {}
        random.seed(0)
        return support.train_step(lambda **inputs: run_checkpointed(block, policy=policy, **options, **inputs), inputs)

    support.assert_alike(run, policy=policy, steps=4)


def test_in_a_nested_region() -> None:
    """Its forward in the recompute of the outer one is under a mode, and so is its own recompute."""
    torch.manual_seed(0)
    block = WithOperation(transcribed, True)

    def run(policy: str) -> Tensors:
        inner = functools.partial(run_checkpointed, block, policy=policy)
        outer = functools.partial(run_checkpointed, lambda **inputs: inner(**inputs), policy=policy)
        return support.train_step(outer, stack_inputs(batch=BATCH))

    support.assert_alike(run)


def test_a_change_of_what_is_saved_last() -> None:
    """It belongs to no graph, and is compared as every other."""
    table = [torch.ones(WIDTH)]
    output = fastac.checkpoint(lambda video: video * table[0], stack_inputs()["video"], policy="full")
    table[0] = table[0] * 2
    with pytest.raises(fastac.FastacError, match="does not compute what the forward did"):
        output.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
def test_a_weight_that_is_written(dtype: torch.dtype) -> None:
    """Its values tell, on a CPU at once. Those of a quantized weight are not compared, so its version tells."""
    weight = torch.nn.Parameter(torch.ones(WIDTH, dtype=dtype), requires_grad=False)
    output = fastac.checkpoint(lambda video: video * weight, stack_inputs()["video"], policy="full")
    weight.mul_(2)
    with pytest.raises(fastac.FastacError, match="uses other values of a parameter"):
        output.sum().backward()


@of_policies
@pytest.mark.parametrize("way", ["buffer", "argument", "keyword", "in a tuple"])
def test_inference_tensors(way: str, policy: str) -> None:
    """They have no version: a table that was filled in validation."""
    torch.manual_seed(0)
    block = AttentionBlock()
    with torch.inference_mode():
        table = torch.randn(WIDTH)
    block.register_buffer("table", table)
    args, kwargs = {
        "buffer": ((), {}),
        "argument": ((table,), {}),
        "keyword": ((), {"one": table}),
        "in a tuple": (((table,),), {}),
    }[way]

    def function(video: torch.Tensor, text: torch.Tensor, one: Any = block.table) -> torch.Tensor:
        return block(video + (one[0] if isinstance(one, tuple) else one), text)  # type: ignore[no-any-return]

    def run(policy: str) -> Tensors:
        call = functools.partial(run_checkpointed, function, policy=policy, **kwargs)
        return support.train_step(lambda video, text: call(video, text, *args), stack_inputs())

    support.assert_alike(run, policy=policy)


@of_policies
def test_strided_nested_tensors(policy: str) -> None:
    """They have no shape: torch's own checkpoint raises an internal error."""
    torch.manual_seed(0)
    parts, projection = [torch.randn(length, 8) for length in (3, 5)], torch.nn.Linear(8, 8)

    def train(policy: str) -> list[torch.Tensor]:
        projection.zero_grad()
        nested = torch.nested.nested_tensor(parts, requires_grad=True)
        output = run_checkpointed(lambda x: projection(x.sin()) * x, nested, policy=policy)
        torch.nested.to_padded_tensor(output, 0.0).square().sum().backward()
        return [*nested.grad.unbind(), projection.weight.grad.clone()]

    expected = train("none")
    for _ in range(4):
        assert all(map(torch.equal, train(policy), expected))


# Generators: what a region that does not restore them may draw, and whose states a region keeps


@of_policies
@pytest.mark.parametrize("way", ["checkpoint", "patch_checkpoint"])
def test_dropout_whose_mask_is_not_drawn_again(way: str, policy: str) -> None:
    """With preserve_rng_state=False recompute draws another mask. The same block without dropout trains."""
    inputs = stack_inputs()

    def call(block: torch.nn.Module) -> torch.Tensor:
        if way == "checkpoint":
            return fastac.checkpoint(block, **inputs, policy=policy, preserve_rng_state=False)  # type: ignore[no-any-return]
        with fastac.patch_checkpoint(policy):
            call: Any = torch.utils.checkpoint.checkpoint
            return call(block, **inputs, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

    block = AttentionBlock(dropout=0.1)
    with pytest.raises(fastac.FastacError, match="draws random numbers") as caught:
        call(block)
    assert len(str(caught.value).splitlines()) <= 5
    support.assert_same({"output": call(block.eval())}, {"output": block(**inputs)})


def test_while_a_cuda_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The generator's state cannot be read then. Steps before a capture are compared."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    fastac.checkpoint(AttentionBlock(dropout=0.1), **stack_inputs(), policy="full", preserve_rng_state=False)


def test_without_the_check_it_draws() -> None:
    options: Any = {"preserve_rng_state": False, "determinism_check": "none"}
    support.loss_of(fastac.checkpoint(AttentionBlock(dropout=0.1), **stack_inputs(), **options)).backward()


def test_a_saved_attention_may_draw() -> None:
    """Its output is not computed again. What the block draws beside it is."""
    attend = support.custom_attention("draws_and_is_saved", "dropout", "dropout_p")
    attention = OneAttention(lambda query, key, value: attend(query, key, value, 0.1))
    fastac.checkpoint(attention, **stack_inputs(), preserve_rng_state=False)
    attention.out.register_forward_hook(lambda module, args, output: F.dropout(output, 0.1))
    with pytest.raises(fastac.FastacError, match="draws random numbers"):
        fastac.checkpoint(attention, **stack_inputs(), preserve_rng_state=False)


@pytest.mark.parametrize(
    ("devices", "kept"),
    [
        ([], {"cpu", "cuda:0"}),
        (["cpu"], {"cpu", "cuda:0"}),
        (["cuda:1"], {"cpu", "cuda:1"}),
        (["cuda:0", "cuda:1"], {"cpu", "cuda:0", "cuda:1"}),
    ],
)
def test_only_generators_of_its_own_devices(
    devices: list[str], kept: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The generator of another device may be drawn from by another thread. Without a GPU: with fake tensors."""
    with FakeTensorMode():
        args = [torch.empty(1, device=device) for device in devices]
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda device: types.SimpleNamespace(is_initialized=lambda: True))
    monkeypatch.setattr(beginning, "generator_state", lambda device: torch.zeros(0))
    assert {str(device) for device, _ in beginning.current_states(args)} == kept


# Tensors that are written in place where autograd would notice: in a backward, and before one


class WritingBackward(torch.autograd.Function):
    """Multiplies. Its backward writes the gradient into a tensor that it saved, as fused losses and gates do."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, gate)
        return hidden * gate

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        hidden, gate = ctx.saved_tensors
        of_gate = grad * hidden
        return grad * gate, gate.copy_(of_gate)


def gated(output: torch.Tensor) -> torch.Tensor:
    """Through a gate whose sigmoid needs its result in backward."""
    return WritingBackward.apply(output, output.sigmoid())  # type: ignore[no-any-return, no-untyped-call]


@of_policies
def test_a_backward_that_writes_what_another_saved(policy: str) -> None:
    """An error, as without checkpointing: autograd compares versions, and so does a region."""
    block = OneAttention(change=gated)
    inputs = stack_inputs()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        support.loss_of(block(**inputs)).backward()
    for _ in range(2):  # the first region of its kind is watched
        loss = support.loss_of(fastac.checkpoint(block, **inputs, policy=policy))
        with pytest.raises(CheckpointError, match="written in place") as caught:
            loss.backward()
        assert isinstance(caught.value, fastac.FastacError)
        assert len(str(caught.value).splitlines()) <= 5


# Inputs that are no tensors by position


class Rotated(AttentionBlock):
    """Multiplied by what diffusers gives as (cos, sin). May write its cache, as autoregressive models do."""

    def forward(self, video: Any, text: Any, rotary: Any = None, cache: Any = None, number: int = 0) -> torch.Tensor:
        rotary = rotary.angles if isinstance(rotary, Angles) else rotary
        cos, sin = rotary if isinstance(rotary, tuple) else rotary["angles"]
        if cache is not None:
            cache[number][:, : video.shape[1]] = video.detach()
            video = video + cache[number][:, : video.shape[1]]
        return super().forward(video * cos + video.flip(-1) * sin, text)


def angles() -> tuple[torch.Tensor, torch.Tensor]:
    angle = torch.linspace(0, 1, VIDEO_TOKENS)[:, None]
    return angle.cos(), angle.sin()


@dataclasses.dataclass
class Angles:
    angles: Any


WAYS: dict[str, Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "in a dataclass": lambda pair: ((Angles(pair),), {}),
    "in a mapping": lambda pair: ((collections.UserDict(angles=pair),), {}),
    "in a tuple": lambda pair: ((pair,), {}),
    "in a list in a dict": lambda pair: (({"angles": list(pair)},), {}),
    "by keyword": lambda pair: ((), {"rotary": pair}),
}


@of_policies
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("step", [0, 3], ids=["compared", "not compared"])
def test_an_input_that_is_written_before_backward(step: int, way: str, policy: str) -> None:
    """Also in a step that compares no values."""
    block, inputs, pair = Rotated(), stack_inputs(), angles()
    args, kwargs = WAYS[way](pair)

    def loss() -> torch.Tensor:
        return support.loss_of(fastac.checkpoint(block, *inputs.values(), *args, policy=policy, **kwargs))

    for _ in range(step):
        loss().backward()
    last = loss()
    pair[1].mul_(2)
    message = "does not compute what the forward did" if step == 0 else "written in place between forward and backward"
    with pytest.raises(CheckpointError, match=message) as caught:
        last.backward()
    assert len(str(caught.value).splitlines()) <= 5
    loss().backward()


def test_an_input_that_is_written_where_no_values_are_compared() -> None:
    """In step 0, which compares them only with the generators restored."""
    inputs, pair = stack_inputs(), angles()
    output = fastac.checkpoint(Rotated(), **inputs, rotary=pair, preserve_rng_state=False)
    pair[1].mul_(2)
    with pytest.raises(CheckpointError, match=r"^Rotated: a tensor given by keyword"):
        output.sum().backward()


@of_policies
@pytest.mark.parametrize("given", ["its own", "that of all layers"])
def test_a_cache_that_the_blocks_write(given: str, policy: str) -> None:
    """Also when another block, or a later call, writes it before the backward: what a block reads stays."""
    inputs = stack_inputs()

    def step(policy: str) -> support.Tensors:
        blocks = support.stack(layers=2, block=Rotated).blocks
        cache = [torch.zeros(1, VIDEO_TOKENS, WIDTH) for _ in blocks]

        def call(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            for number, block in enumerate(blocks):
                own = {"cache": cache[number:]} if given == "its own" else {"cache": cache, "number": number}
                video = support.run_checkpointed(block, video, text, rotary=angles(), policy=policy, **own)
            return video

        return support.train_step(lambda **inputs: (call(**inputs), call(**inputs)), inputs)

    support.assert_alike(step, policy=policy, steps=4)


@of_policies
def test_containers_that_change(policy: str) -> None:
    """A tensor that is replaced, or that comes before others, is none that is written."""
    block, inputs = Rotated(), stack_inputs()
    for _ in range(4):
        given: dict[str, Any] = {"angles": angles(), "unread": [torch.zeros(2)]}
        output = fastac.checkpoint(block, *inputs.values(), given, policy=policy)
        given["unread"][0] = torch.zeros(2).add_(1)
        given["unread"].insert(0, torch.zeros(3).add_(1).add_(1))
        support.loss_of(output).backward()
