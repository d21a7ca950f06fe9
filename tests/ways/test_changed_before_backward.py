"""What a block reads besides its arguments changes between forward and backward: the backward raises fastac's error.

The six situations are those of public reports, on a Wan transformer through `fastac.enable` and on a plain block
through `fastac.checkpoint`. Shapes agree in all of them, so that torch's own checkpointing returns wrong gradients.
"""

from __future__ import annotations

import contextvars
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft.tuners.tuners_utils import BaseTunerLayer
from torch.utils.checkpoint import CheckpointError

import fastac
from tests import support
from tests.support import AttentionBlock
from tests.ways import recipes

MULTIPLIER = contextvars.ContextVar("MULTIPLIER", default=1.0)
"""Read by the feed-forward of every block."""

WIDTH, RANK, ADAPTERS = support.WIDTH, 4, ("default", "other")


class LoraLinear(torch.nn.Linear):
    """A frozen linear layer with two adapters, of which one is active; named as in peft."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)
        self.lora_A = torch.nn.ParameterDict({name: torch.randn(RANK, WIDTH) / 4 for name in ADAPTERS})
        self.lora_B = torch.nn.ParameterDict({name: torch.randn(WIDTH, RANK) / 4 for name in ADAPTERS})
        self.scaling = dict.fromkeys(ADAPTERS, 1.0)
        self.set_adapter("default")

    def set_adapter(self, adapter: str) -> None:
        self.active = adapter

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        added = F.linear(F.linear(hidden, self.lora_A[self.active]), self.lora_B[self.active])
        return super().forward(hidden) + added * self.scaling[self.active]


class Trained:
    """A model whose blocks read adapters, `MULTIPLIER`, and a cache: keys and values of earlier tokens."""

    model: Any
    layers: list[Any]
    """Those with adapters."""
    cache: dict[str, torch.Tensor]
    loss: Callable[..., torch.Tensor]
    """Of one forward, which sets the scale of the adapters and resets it to 1 at its end, as in diffusers."""

    @functools.cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return recipes.adamw(self.model)

    def activate(self, adapter: str) -> None:
        for layer in self.layers:
            layer.set_adapter(adapter)
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                parameter.requires_grad_()  # both adapters train


def multiply(module: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Before the forward of a module."""
    return args[0] * MULTIPLIER.get()


class Wan(Trained):
    """A transformer of diffusers with adapters of peft; the block whose backward comes first is the last, blocks.1."""

    block = "WanTransformer3DModel.blocks.1"

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

    def _prepend(self, name: str, module: torch.nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.cache[name], output], 1)

    def loss(self, scale: float = 1.0) -> torch.Tensor:
        return support.loss_of(self.model(**self.batch, attention_kwargs={"scale": scale}))


class Plain(Trained):
    """A block without diffusers and peft, that is called through fastac.checkpoint."""

    block = "AttentionBlock"

    def __init__(self, policy: str, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = AttentionBlock(attend=self._attend)
        self.model.self_out = LoraLinear()
        self.layers = [self.model.self_out]
        self.model.ffn.register_forward_pre_hook(multiply)
        self.inputs = support.stack_inputs()
        self.cache = {name: torch.randn(1, 2, 3, WIDTH // 2) for name in ("key", "value")}
        self.options = {"policy": policy, **options}

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        key, value = torch.cat([self.cache["key"], key], 2), torch.cat([self.cache["value"], value], 2)
        return F.scaled_dot_product_attention(query, key, value)

    def loss(self, scale: float = 1.0) -> torch.Tensor:
        scaling = self.model.self_out.scaling
        self.model.self_out.scaling = {adapter: value * scale for adapter, value in scaling.items()}
        loss = support.loss_of(fastac.checkpoint(self.model, **self.inputs, **self.options))
        self.model.self_out.scaling = scaling
        return loss


# The situations: the forward of a training step, and the change when there is one


def scale_reset(trained: Trained, changed: bool) -> torch.Tensor:
    return trained.loss(scale=0.5 if changed else 1.0)


def adapter_activated(trained: Trained, changed: bool) -> torch.Tensor:
    trained.activate("default")
    loss = trained.loss()
    trained.activate("other" if changed else "default")
    return loss


def cache_replaced(trained: Trained, changed: bool) -> torch.Tensor:
    """It rolls on: without its oldest token, and with one more."""
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


def sign_flipped(trained: Trained, changed: bool) -> torch.Tensor:
    """One backward through two forwards, as trainers of sliders have it."""
    losses = []
    for sign in (1.0, -1.0 if changed else 1.0):
        for layer in trained.layers:
            layer.scaling["default"] = sign
        losses.append(trained.loss())
    return torch.stack(losses).sum()


Situation = Callable[[Trained, bool], torch.Tensor]

WHERE = {
    scale_reset: (r"attn1\.(to|norm)_q", r"(self_out|norms\.1)"),
    adapter_activated: (r"attn1\.to_q\.lora_A", "self_out"),
    cache_replaced: ("attn2", "AttentionBlock"),
    variable_reset: (r"ffn\.net\.0", r"ffn\.0"),
    weights_stepped: (r"attn1\.to_q\.lora_A\.default\.weight", r"norms\.0\.(weight|bias)"),
    sign_flipped: (r"attn1\.(to|norm)_q", r"(self_out|norms\.1)"),
}
"""The module that an error names: what computed the first result that differs, or saves it. In Wan, and in Plain."""

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config` attribute")
of_policies = pytest.mark.parametrize("policy", ["attn_only", "full"])
of_models = pytest.mark.parametrize("kind", [Wan, Plain])
of_situations = pytest.mark.parametrize("situation", WHERE)


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


@of_policies
@of_models
@of_situations
def test_a_change_is_an_error(situation: Situation, kind: type[Trained], policy: str) -> None:
    """After steps of the same code without the change. The error names the block and the module inside it."""
    trained = kind(policy)
    train(trained, situation, 3 if situation is weights_stepped else 2)  # of step 3 no values are compared
    message = error_of(situation(trained, True))
    assert message.startswith(f"{kind.block}: ")
    assert re.search(rf"\b{WHERE[situation][kind is Plain]}\b", message), message
    of_weights = situation in (weights_stepped, adapter_activated)
    assert ("written between forward and backward" in message) == of_weights, message
    assert ("recompute does not compute what the forward did" in message) != of_weights, message


@of_policies
def test_a_buffer_that_is_written_is_an_error(policy: str) -> None:
    """In a step whose values are not compared, where autograd saves it as it is."""
    trained = Plain(policy)
    trained.model.register_buffer("scale", torch.ones(WIDTH))
    trained.model.ffn.register_forward_pre_hook(lambda module, args: args[0] * trained.model.scale)
    train(trained, lambda trained, changed: trained.loss(), 3)
    loss = trained.loss()
    trained.model.scale.mul_(2)
    message = error_of(loss)
    assert "scale" in message, message
    assert "written between forward and backward" in message


@of_policies
@of_models
@of_situations
def test_without_the_check_it_trains(situation: Situation, kind: type[Trained], policy: str) -> None:
    trained = kind(policy, determinism_check="none")
    train(trained, situation, 1)
    trained.optimizer.zero_grad()
    situation(trained, True).backward()
    found = support.gradients(dict(trained.model.named_parameters()))
    assert any(gradient.any() for gradient in found.values())
    assert all(gradient.isfinite().all() for gradient in found.values())


@of_policies
def test_steps_whose_values_are_compared(policy: str) -> None:
    """A change in every step is seen in some; a backward that raised ends its step."""
    trained, seen = Plain(policy), []
    for step in range(9):
        try:
            cache_replaced(trained, True).backward()
        except fastac.FastacError:
            seen.append(step)
    assert seen == [0, 1, 2, 4, 8]


@of_policies
@of_models
def test_adapters_that_begin_with_zeros(kind: type[Trained], policy: str) -> None:
    """Behind a second factor of zeros the scale changes nothing: the first step is right. The second is an error."""

    def first_step(policy: str) -> tuple[Trained, support.Tensors]:
        trained = kind(policy)
        with torch.no_grad():
            for name, parameter in trained.model.named_parameters():
                if "lora_B" in name:
                    parameter.zero_()
        scale_reset(trained, True).backward()
        return trained, support.gradients(support.leaves_of(trained.model, {}))

    trained, found = first_step(policy)
    support.assert_same(found, first_step("none")[1])
    trained.optimizer.step()
    assert "an adapter or its scale" in error_of(scale_reset(trained, True))


# Blocks that change what they read themselves, in training mode


class Layer(torch.nn.Module):
    """Computes by a rule from its input and a buffer, which the rule may write."""

    def __init__(self, rule: Callable[[Layer, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.rule = rule
        self.register_buffer("state", torch.ones(()))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.rule(self, hidden)


def counted(layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
    """Multiplied by the number of calls."""
    layer.state += layer.training
    return hidden * layer.state


def scaled(layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
    """Divided by the largest value of the call before: delayed scaling, as in float8 layers."""
    output = hidden / layer.state
    if layer.training:
        layer.state = hidden.detach().abs().max()
    return output


def shuffled(layer: Layer, hidden: torch.Tensor) -> torch.Tensor:
    """The tokens in an order that is drawn at each call, from a generator of its own."""
    layer.generator = getattr(layer, "generator", None) or torch.Generator().manual_seed(0)
    order = torch.randperm(hidden.shape[1], generator=layer.generator)
    return hidden[:, order] if layer.training else hidden


LAYERS: dict[str, Callable[[], torch.nn.Module]] = {
    "spectral norm": lambda: torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(WIDTH, WIDTH)),
    "counted": lambda: Layer(counted),
    "delayed scaling": lambda: Layer(scaled),
    "shuffled": lambda: Layer(shuffled),
}


class WithLayer(AttentionBlock):
    """A block with one more layer, before all others or after them."""

    def __init__(self, layer: torch.nn.Module, is_last: bool) -> None:
        super().__init__()
        self.layer = layer
        self.is_last = is_last

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        if self.is_last:
            return self.layer(super().forward(video, text))
        return super().forward(self.layer(video), text)


@of_policies
@pytest.mark.parametrize("is_last", [False, True], ids=["first", "last"])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_state_of_the_block_is_an_error(layer: str, is_last: bool, policy: str) -> None:
    """The same layer in evaluation mode keeps its state, and trains."""
    torch.manual_seed(1)  # of the weight of seed 0, spectral norm is exact from the first step
    block = WithLayer(LAYERS[layer](), is_last)
    inputs = support.stack_inputs()

    def loss() -> torch.Tensor:
        return support.loss_of(fastac.checkpoint(block, **inputs, policy=policy))

    block.layer.eval()
    for _ in range(2):
        loss().backward()
    block.layer.train()
    assert "a state that the block changes itself" in error_of(loss())
