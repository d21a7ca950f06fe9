"""What a block reads besides its arguments changes between forward and backward: the backward raises fastac's error.

The situations are those of public reports. Shapes agree in all of them, so that torch's own checkpointing returns
wrong gradients.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.attention_dispatch import attention_backend
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointError

import fastac
from tests import support
from tests.support import AttentionBlock
from tests.ways import recipes

MULTIPLIER = contextvars.ContextVar("MULTIPLIER", default=1.0)
"""Read by the feed-forward of every block."""

ADAPTERS = ("default", "other")


def multiply(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Before the forward of a module."""
    return args[0] * MULTIPLIER.get()


class Trained:
    """A transformer of diffusers whose blocks read peft's adapters, `MULTIPLIER`, and a cache of keys and values."""

    def __init__(self, policy: str, **options: Any) -> None:
        self.model, self.batch = recipes.build()
        for adapter in reversed(ADAPTERS):
            recipes.adapt(self.model, dropout=0.0, name=adapter)
        self.layers = [layer for layer in self.model.modules() if isinstance(layer, BaseTunerLayer)]
        self.cache = {name: torch.randn(1, 3, 24) for name in ("to_k", "to_v")}
        for block in self.model.blocks:
            block.ffn.register_forward_pre_hook(multiply)
            for name in self.cache:
                getattr(block.attn2, name).register_forward_hook(functools.partial(self._prepend, name))
        fastac.enable(self.model, policy, **options)

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return recipes.adamw(self.model)

    def activate(self, adapter: str) -> None:
        for layer in self.layers:
            layer.set_adapter(adapter)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.requires_grad_()  # both adapters train

    def _prepend(self, name: str, module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.cache[name], output], 1)

    def loss(self, scale: float = 1.0) -> torch.Tensor:
        """Of one forward, in which diffusers sets the scale of the adapters, and at whose end it resets it."""
        return support.loss_of(self.model(**self.batch, attention_kwargs={"scale": scale}))


# The situations: the forward of a training step, and the change when there is one


def scale_reset(trained: Trained, changed: bool) -> torch.Tensor:
    return trained.loss(scale=0.5 if changed else 1.0)


def adapter_activated(trained: Trained, changed: bool) -> torch.Tensor:
    trained.activate("default")
    loss = trained.loss()
    trained.activate("other" if changed else "default")
    return loss


def cache_replaced(trained: Trained, changed: bool) -> torch.Tensor:
    """The oldest token leaves the cache, and another comes."""
    loss = trained.loss()
    if changed:
        for name, tensor in trained.cache.items():
            trained.cache[name] = torch.cat([tensor[..., 1:, :], torch.randn_like(tensor[..., :1, :])], -2)
    return loss


def variable_reset(trained: Trained, changed: bool) -> torch.Tensor:
    token = MULTIPLIER.set(0.5 if changed else 1.0)
    loss = trained.loss()
    MULTIPLIER.reset(token)
    return loss


def weights_stepped(trained: Trained, changed: bool) -> torch.Tensor:
    first, second = trained.loss(), trained.loss()
    first.backward()
    if changed:
        trained.optimizer.step()
    return second


Situation = Callable[[Trained, bool], torch.Tensor]

WHERE = {
    scale_reset: r"attn1\.(to|norm)_q",
    adapter_activated: r"attn1\.to_q\.lora_A",
    cache_replaced: "attn2",
    variable_reset: r"ffn\.net\.0",
    weights_stepped: r"attn1\.to_q\.lora_A\.default\.weight",
}
"""The module that an error names: the first whose result differs, or that saves one that does."""

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")


def train(trained: Trained, situation: Situation, steps: int) -> None:
    """Steps in which nothing changes before backward."""
    for _ in range(steps):
        trained.optimizer.zero_grad()
        situation(trained, False).backward()
        trained.optimizer.step()


def error_of(loss: torch.Tensor) -> str:
    """What the backward of a loss raises."""
    with pytest.raises(fastac.FastacError) as caught:
        loss.backward()
    assert isinstance(caught.value, CheckpointError)
    assert len(str(caught.value).splitlines()) <= 5
    return str(caught.value)


@pytest.mark.parametrize("policy", ["attn_only", "full"])
@pytest.mark.parametrize("situation", WHERE)
def test_a_change_is_an_error(situation: Situation, policy: str) -> None:
    """After steps without the change. The error names the block whose backward is first, and the module inside it."""
    trained = Trained(policy)
    train(trained, situation, 3 if situation is weights_stepped else 2)  # step 3 compares no values
    message = error_of(situation(trained, True))
    assert message.startswith("WanTransformer3DModel.blocks.1: ")
    assert re.search(rf"\b{WHERE[situation]}\b", message), message
    of_weights = situation in (weights_stepped, adapter_activated)
    assert ("written between forward and backward" in message) == of_weights, message
    assert ("recompute does not compute what the forward did" in message) != of_weights, message


def test_a_buffer_that_is_written_is_an_error() -> None:
    """In a step that compares no values. Autograd saves the buffer itself."""
    trained = Trained("attn_only")
    block = trained.model.blocks[1]
    block.register_buffer("scale", torch.ones(24))
    block.ffn.register_forward_pre_hook(lambda module, args: args[0] * block.scale)
    train(trained, lambda trained, changed: trained.loss(), 3)
    loss = trained.loss()
    block.scale.mul_(2)
    message = error_of(loss)
    assert "scale" in message, message
    assert "written between forward and backward" in message


def test_steps_whose_values_are_compared() -> None:
    """0, 1, 2, 4, 8, ... A backward that raised does not end its step."""
    block, inputs, raised = AttentionBlock(), support.stack_inputs(), []
    block.ffn.register_forward_pre_hook(multiply)
    changes = {0: "++.", 1: "+.", 2: "+.", 3: "+", 4: "++.", 5: "+", 6: "+", 7: "+", 8: "+"}
    """Step -> whether something is changed when it is tried, and tried again."""
    for change in "".join(changes.values()):
        token = MULTIPLIER.set(0.5 if change == "+" else 1.0)
        loss = support.loss_of(fastac.checkpoint(block, **inputs))
        MULTIPLIER.reset(token)
        try:
            loss.backward()
            raised.append(False)
        except fastac.FastacError:
            raised.append(True)
    expected = {0: "++.", 1: "+.", 2: "+.", 3: ".", 4: "++.", 5: ".", 6: ".", 7: ".", 8: "+"}
    assert raised == [seen == "+" for seen in "".join(expected.values())]


# Contexts of attention around the forward alone, or around backward


ALL = "CUDNN_ATTENTION, FLASH_ATTENTION, EFFICIENT_ATTENTION, MATH"
NATIVE = ("native", "_native_math")
CONTEXTS: dict[str, tuple[Callable[[], Any], str, str, str]] = {
    "sdpa_kernel": (lambda: sdpa_kernel(SDPBackend.MATH), "torch.nn.attention.sdpa_kernel allowed", ALL, "MATH"),
    "diffusers": (lambda: attention_backend(NATIVE[1]), "diffusers' attention_backend was", *NATIVE),
}


@pytest.mark.parametrize(("side", "policy"), [("forward", "full"), ("backward", "full"), ("backward", "attn_only")])
@pytest.mark.parametrize("name", CONTEXTS)
def test_an_attention_context_on_one_side(name: str, side: str, policy: str) -> None:
    """attn_only refuses a forward without a kernel to save, and names it. Around both sides, the context is exact."""
    context, begin, usual, inside = CONTEXTS[name]
    model, batch = recipes.build()
    fastac.enable(model, policy)
    with context() if side == "forward" else contextlib.nullcontext():
        loss = support.loss_of(model(**batch))
    with context() if side == "backward" else contextlib.nullcontext():
        message = error_of(loss)
    first, second = (inside, usual) if side == "forward" else (usual, inside)
    assert f"\n{begin} {first} in the forward and {second} in recompute: " in message
    assert message.count("in the forward and") == 1
    if policy == "full":
        with context():
            support.loss_of(model(**batch)).backward()


def test_a_context_of_the_block_s_own_is_not_blamed() -> None:
    """It is open when the error is raised, in the forward and in recompute."""
    block, more = AttentionBlock(), 1
    block.attend = lambda query, key, value: support.math_kernel(query, key, value * more)
    loss = support.loss_of(fastac.checkpoint(block, **support.stack_inputs(), policy="full"))

    def fails(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return query[..., 1:].sin()

    block.attend = fails
    assert "sdpa_kernel" not in error_of(loss)


# Blocks that change what they read themselves, in training mode, and hold it in no buffer


class Layer(torch.nn.Module):
    """Multiplies by a number that it gets with its state, in training."""

    def __init__(self, draw: Callable[[Any], Any], generator: Any = None) -> None:
        super().__init__()
        self.draw, self.generator, self.calls = draw, generator, 1

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + self.training
        return (hidden * self.draw(self)).tanh() if self.training else hidden


LAYERS: dict[str, Callable[[], Layer]] = {
    "calls": lambda: Layer(lambda layer: layer.calls),
    "torch": lambda: Layer(lambda one: torch.rand((), generator=one.generator), torch.Generator().manual_seed(0)),
    "numpy": lambda: Layer(lambda one: one.generator.random(), np.random.default_rng(0)),
    "random": lambda: Layer(lambda one: one.generator.random(), random.Random(0)),
}
"""Whose numbers they are -> a layer that changes a state when it gets one."""


@pytest.mark.parametrize("is_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("whose", LAYERS)
def test_a_state_of_the_block_is_an_error(whose: str, is_last: bool) -> None:
    """The same layer in evaluation mode keeps its state, and trains. Of buffers: tests/engine/test_buffers.py."""
    block, layer, inputs = AttentionBlock(), LAYERS[whose](), support.stack_inputs()
    if is_last:
        block.ffn.append(layer)
    else:
        block.norms[0] = torch.nn.Sequential(layer, block.norms[0])

    def loss() -> torch.Tensor:
        return support.loss_of(fastac.checkpoint(block, **inputs))

    layer.eval()
    for _ in range(2):
        loss().backward()
    layer.train()
    message = error_of(loss())
    assert "a state that the block changes itself" in message
    assert re.findall(r"of (\w+), \S+\.generator", message) == ([] if whose == "calls" else [whose])
