"""Twins: a random model under fastac, and one without it. Everything else is done to both."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

import fastac
from fastac import Policy
from hunts import models
from hunts.attention import REFUSED, AttentionCall, observed
from hunts.models import SHAPES, ModelSpec, Policies
from hunts.steps import AROUND, WAYS, Step
from tests import support
from tests.support import Tensors, assert_same, train_step

INNER = {"inner region", "inner checkpoint"}


class Twins:
    """Operations on a model; `train` compares the two."""

    def __init__(self, spec: ModelSpec, how: str = "hook") -> None:
        torch._dynamo.reset()
        self.spec, self.how = spec, how  # how it is enabled, of models.HOW
        self.policy: Policies | None = None
        self.compiled: set[int] = set()  # places of blocks
        self.remade = False
        self.plain = models.build(spec)
        self.checked = copy.deepcopy(self.plain)

    @property
    def both(self) -> tuple[Any, Any]:
        return self.plain, self.checked

    def inputs(self, shape: int, seed: int) -> dict[str, Any]:
        return models.inputs(self.spec, shape, seed)

    # Operations

    def enable(self, policy: Policies, how: str = "") -> None:
        """how: of the two ways of fastac.enable, in the place of the one before; the same where it is ""."""
        if how and self.how != "checkpoint":
            self.how = how
        self.policy = policy["*"] if isinstance(policy, dict) and self.how == "checkpoint" else policy
        self.checked.enable(self.policy, self.how)

    def disable(self) -> None:
        self.checked.disable()
        self.policy = None

    def freeze(self, bits: int) -> None:
        for model in self.both:
            models.freeze(model, bits)

    def mode(self, training: bool) -> None:
        for model in self.both:
            model.train(training)

    def compile(self, place: int, backend: str) -> None:
        for model in self.both:
            block = model.blocks[place % len(model.blocks)]
            block.compile(backend=backend)
            self.compiled.add(block.place)

    def remake(self, place: int, kinds: list[str]) -> None:
        for model in self.both:
            block = model.blocks[place % len(model.blocks)]
            parts = [(kind, source) for (_, source), kind in zip(block.spec.parts, kinds, strict=False)]
            block.spec = dataclasses.replace(block.spec, parts=tuple(parts))
        self.remade = True

    def optimize(self, rate: float) -> None:
        """By the gradients of the last step, where it left the same in both: not after an error."""
        for plain, checked in zip(self.plain.parameters(), self.checked.parameters(), strict=True):
            if plain.grad is not None and checked.grad is not None:
                checked.grad.copy_(plain.grad)
            else:
                plain.grad = checked.grad = None
        for model in self.both:
            torch.optim.SGD(model.parameters(), lr=rate).step()

    def sample(self, mode: str) -> None:
        found: list[Tensors | Exception] = []
        for model in self.both:
            self.watch(model)
            torch.manual_seed(3)
            try:
                with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
                    found.append(support.flat_tensors(model(**self.inputs(0, 5)), "output"))
            except RuntimeError as error:
                found.append(error)
        if isinstance(found[0], Exception) or isinstance(found[1], Exception):
            assert type(found[0]) is type(found[1])
        else:
            assert_same(found[1], found[0])

    def fail(self, place: int, where: str, recompute: bool, shape: int) -> None:
        """The user's own error in a block: it comes through as it is."""
        results = []
        for model in self.both:
            block = model.blocks[place % len(model.blocks)]
            block.failure, observed.raised = (where, recompute), None
            result, _ = self.attempt(model, "plain", shape, 2)
            refused = isinstance(result, fastac.FastacError) and self.may_refuse("plain", shape)
            if block.failure is None and not refused:
                assert result is observed.raised, f"{result!r} in the place of the user's error"
            block.failure = None
            results.append(result)
        if not any(isinstance(result, Exception) for result in results):
            assert_same(*reversed(results))

    def train(self, way: str, shape: int, seed: int) -> None:
        expected, needed = self.attempt(self.plain, way, shape, seed)
        found, executed = self.attempt(self.checked, way, shape, seed)
        if isinstance(expected, Exception):
            assert not isinstance(found, Exception) or isinstance(found, (type(expected), fastac.FastacError)), found
        elif isinstance(found, Exception):
            if not (isinstance(found, fastac.FastacError) and self.may_refuse(way, shape)):
                raise found
            self.disable()  # after which the model is as good as before
            self.train("plain", shape, seed)
        else:
            assert not self.must_refuse(shape), "nothing was saved, and there was no error"
            assert_same(found, expected)
            self.check_executions(executed, needed, way)

    def attempt(self, model: Any, way: str, shape: int, seed: int) -> tuple[Tensors | Exception, int]:
        """What a step gives, or raises, and how many kernels it executed."""
        if any(block.changed for block in self.spec.blocks) and way in ("inside a region", "saved on cpu"):
            way = "plain"  # torch's checkpointing does not notice the change there, and its gradients are wrong
        batch, other = self.inputs(shape, seed), self.inputs((shape + seed) % len(SHAPES), seed + 1)
        step = Step(model, batch, other, *[functools.partial(self.meanwhile, model, of) for of in (None, "full")])
        self.watch(model)
        support.executions.clear()
        try:
            with AROUND.get(way, nullcontext)():
                found = train_step(model, batch, seed, backward=lambda loss: WAYS[way](step, loss))
            found["generator"] = torch.get_rng_state()
        except Exception as error:
            return error, 0
        return found, sum(support.executions.values())

    def meanwhile(self, model: Any, other: str | None, call: Callable[[], object]) -> None:
        """Make a call while the model has another policy, or none."""
        policy = self.policy
        if model is self.plain or policy is None:
            call()
            return
        self.disable() if other is None else self.enable(other)
        try:
            call()
        finally:
            self.enable(policy)

    def watch(self, model: Any) -> None:
        observed.calls.clear()
        observed.inner_regions = model is self.checked and self.policy is not None

    # What is expected

    @property
    def policies(self) -> list[str | Policy | None]:
        return list(self.policy.values()) if isinstance(self.policy, dict) else [self.policy]

    def calls_to_save(self, shape: int) -> list[tuple[Any, str]]:
        """Block and kind of attention of the calls that the policy saves."""
        _, tokens, text_tokens = SHAPES[shape]
        return [
            (block, kind)
            for block in self.checked.blocks
            for kind, source in block.spec.parts
            if self.checked.saved(self.policy, block.place, tokens if source == "video" else text_tokens, self.how)
        ]

    def must_refuse(self, shape: int) -> bool:
        """Whether a step has to end in a FastacError, because what is to be saved cannot be.

        Not where attention that was seen hides one that was not: only the first block of a class is watched.
        """
        return self.has_refused(shape) and not (self.remade or self.spec.one_class)

    def has_refused(self, shape: int) -> bool:
        return any(kind in REFUSED for _, kind in self.calls_to_save(shape))

    def may_refuse(self, way: str, shape: int) -> bool:
        """Whether a step may end in a FastacError: also a checkpoint around the model, and a policy without effect."""
        if self.policy is None:
            return False
        if self.checked.kinds & INNER and "full" in self.policies:
            return True  # the recompute of the block runs the region inside it again
        if way == "inside a region" or not all(self.calls_to_save(one) for one in range(len(SHAPES))):
            return True
        return self.remade or self.has_refused(shape)

    def check_executions(self, executed: int, needed: int, way: str) -> None:
        """Compare how often kernels ran. needed: how often in the step of the plain twin."""
        if way == "inside a region":
            return  # whose recompute need not come to its end
        assert executed >= needed
        if self.compiled or not self.checked.kinds.isdisjoint(INNER):
            return  # code that is compiled, or is in two regions, does not tell which of its calls are recomputed
        saved = [call for call in observed.calls if call.recompute and self.is_saved(call)]
        calls = len(observed.calls)
        assert executed == calls - len(saved), f"{executed} executions, {calls} calls, {len(saved)} saved"

    def is_saved(self, call: AttentionCall) -> bool:
        return self.checked.saved(self.policy, call.place, call.keys, self.how)
