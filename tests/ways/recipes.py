"""What the ways of training share: models, runs that count attention step by step, and their comparison.

A way is a recipe: a function that builds a model, calls `run.enable` where a script calls `fastac.enable`, and trains
by `run.train` or `run.step`. It runs without checkpointing, under `attn_only` and under `full`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.training_utils import cast_training_params

import fastac
from tests import support
from tests.support import CPU_ATTENTION, Tensors, assert_same

WAN = "WanTransformer3DModel"
COGVIDEOX = "CogVideoXTransformer3DModel"

ATTENTION = {WAN: 4, COGVIDEOX: 2}
"""Attention calls in one forward of a tiny model, all of them in checkpointed blocks."""

POLICIES: dict[str, Any] = {"attn_only": "attn_only", "full": "full"}
"""Name of a run -> its policy; test_offload_ways.py has others."""

FEED_FORWARD = r".*blocks\.\d+\.(ffn|ff|ff_context)\.net\.(0\.proj|2)"
"""The linear layers of the feed-forwards, as peft is told its targets."""

Batch = dict[str, Any]


def build(name: str = WAN, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Any, Batch]:
    """A tiny model and a batch for it. As in a training script, no input requires grad, and the seed is set once."""
    model, inputs = support.build(name, dtype, seed)
    torch.manual_seed(seed)
    return model, {key: value.detach() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}


def adapt(
    model: Any,
    targets: Any = ("to_q", "to_v"),
    dropout: float = 0.3,
    name: str = "default",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Adapters on a frozen model, as diffusers adds them. Their dropout draws numbers inside the recomputed part.

    dtype: of the adapters. peft makes them in the model's, and scripts cast them.
    """
    import peft  # here, as few who import this module need it

    model.requires_grad_(False)
    targets = targets if isinstance(targets, str) else list(targets)
    model.add_adapter(peft.LoraConfig(r=4, lora_dropout=dropout, target_modules=targets), adapter_name=name)
    cast_training_params(model, dtype)
    support.fill_zeros(model)  # the second factor, behind which the first has no gradient


def batches(batch: Batch, count: int) -> list[Batch]:
    """Batches of the same shapes with videos and texts of their own, the same at every call."""
    generator = torch.Generator().manual_seed(11)

    def drawn(like: torch.Tensor) -> torch.Tensor:
        return torch.randn(like.shape, generator=generator).to(like.dtype)

    names = ("hidden_states", "encoder_hidden_states")
    return [batch | {name: drawn(batch[name]) for name in names} for _ in range(count)]


def narrow(batch: Batch) -> Batch:
    """The left half of the video, as from another aspect-ratio bucket."""
    video = batch["hidden_states"]
    return batch | {"hidden_states": video[..., : video.shape[-1] // 2].contiguous()}


def sampled(model: torch.nn.Module, batch: Batch, mode: Callable[[], Any] = torch.no_grad) -> torch.Tensor:
    """Two Euler steps from noise, as in a validation; every attention call in them must run, once."""
    support.executions.clear()
    with mode():
        video = batch["hidden_states"]
        for _ in range(2):
            video = video - model(**batch | {"hidden_states": video})[0] / 2
    assert support.executions == {CPU_ATTENTION: 2 * ATTENTION[type(model).__name__]}, support.executions
    return video


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    """An optimizer of what is to be trained. The rate is high, so that a differing bit grows."""
    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2)


class Run:
    """One training under a policy, None for none: the numbers of every step, and how many attention kernels it ran."""

    def __init__(self, policy: str | None) -> None:
        self.policy = policy
        self.tensors: Tensors = {}
        self.executions: list[int] = []
        support.count_cpu_attention()

    def enable(self, model: torch.nn.Module, policy: Any = None) -> None:
        """Where a script enables fastac. policy: the name of another than the run's."""
        if self.policy is not None:
            fastac.enable(model, POLICIES[policy or self.policy])

    def train(self, model: torch.nn.Module, batch: Batch, steps: int = 3, **options: Any) -> None:
        """Steps with one optimizer, each on a batch of its own. options: those of `step`."""
        optimizer = adamw(model)
        for one in batches(batch, steps):
            self.step(model, one, optimizer=optimizer, **options)

    def step(
        self,
        model: torch.nn.Module,
        *micro_batches: Mapping[str, Any],
        optimizer: torch.optim.Optimizer,
        forward: Callable[..., Any] | None = None,
        backward: Callable[[torch.Tensor], object] | None = None,
    ) -> None:
        """One optimizer step. Keeps losses, outputs, gradients and parameters.

        Random numbers go on from step to step: a recompute that draws one too many changes every later step.
        forward: called with a micro-batch instead of the model. backward: called with its loss.
        """
        number = len(self.executions)
        optimizer.zero_grad()
        support.executions.clear()
        for index, batch in enumerate(micro_batches):
            outputs = (forward or model)(**batch)
            loss = support.loss_of(outputs)
            loss.backward() if backward is None else backward(loss)
            self.keep(f"step {number}.{index}", {"loss": loss} | support.flat_tensors(outputs, "output"))
        self.executions.append(support.executions[CPU_ATTENTION])
        self.keep(f"step {number}", support.gradients(support.leaves_of(model, {})))
        optimizer.step()
        self.keep(f"step {number} parameter", dict(model.named_parameters()))

    def keep(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors that must be the same in every run."""
        copies = {f"{name}: {key}": tensor.detach().clone() for key, tensor in tensors.items()}
        assert not copies.keys() & self.tensors.keys(), "kept twice under one name"
        self.tensors |= copies


Recipe = Callable[[Run], object]


def assert_exact_and_saved(
    recipe: Recipe,
    name: str = WAN,
    forwards: int = 1,
    again: int | list[int] | None = None,
    saved_again: int | list[int] = 0,
) -> Run:
    """Run a recipe with and without checkpointing: every number is the same, bit for bit, and attention runs once.

    forwards: how often a step calls the model. again: how many attention calls a step runs a second time under `full`;
    by default all in blocks. They show that blocks are checkpointed and kernels counted. saved_again: the same under
    `attn_only`. Both may differ by step.
    """
    plain, saved, full = Run(None), Run("attn_only"), Run("full")
    for run in (plain, saved, full):
        recipe(run)
    attention = ATTENTION[name]
    steps = len(plain.executions)
    assert steps, "the recipe made no step"
    assert plain.executions == [forwards * attention] * steps, f"without checkpointing: {plain.executions}"
    again = forwards * attention if again is None else again
    for run, more in ((saved, saved_again), (full, again)):
        each = more if isinstance(more, list) else [more] * steps
        expected = [count + extra for count, extra in zip(plain.executions, each, strict=True)]
        assert run.executions == expected, f"{run.policy}: {run.executions} attention executions, not {expected}"
        assert_same(run.tensors, plain.tensors)
    assert any("gradient of" in key for key in plain.tensors), "nothing was trained"
    assert not untrained(plain), f"no step trained {untrained(plain)}"
    return saved


def untrained(run: Run) -> list[str]:
    """Parameters whose gradients are zero in every step."""
    seen, moved = set(), set()
    for key, tensor in run.tensors.items():
        _, is_gradient, parameter = key.partition("gradient of ")
        if is_gradient:
            seen.add(parameter)
            moved |= {parameter} if tensor.any() else set()
    # A softmax does not see the bias of a key: its gradient is rounding noise.
    return sorted(parameter for parameter in seen - moved if not parameter.endswith(("_k.bias", "_k_proj.bias")))
