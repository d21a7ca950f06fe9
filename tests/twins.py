"""Twins: a model under fastac and one that never was. Whatever else is done to one is done to the other."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

import fastac
from fastac.engine import blocks
from tests import random_models, support
from tests.random_attention import observed
from tests.random_models import SHAPES, Policies
from tests.random_steps import AROUND, WAYS, Step
from tests.support import Tensors, assert_same, train_step


class Twins:
    """What may be done to a model of any kind; `train` compares."""

    plain: Any
    checked: Any

    def __init__(self) -> None:
        blocks._blocks.clear()
        blocks._kinds.clear()
        torch._dynamo.reset()
        self.policy: Policies | None = None
        self.engine = "tape"
        self.others: list[Twins] = []

    @property
    def both(self) -> tuple[Any, Any]:
        return self.plain, self.checked

    # What a kind of model has of its own

    def inputs(self, shape: int, seed: int) -> dict[str, Any]:
        """New inputs, of one of several shapes."""
        raise NotImplementedError

    def put_on(self, policy: Policies, engine: str) -> None:
        """Enable fastac on the one of them."""
        fastac.enable(self.checked, policy, engine=engine)

    def must_refuse(self, shape: int) -> bool:
        """Whether a step has to end in a FastacError, because what is to be saved can not be."""
        raise NotImplementedError

    def may_refuse(self, way: str, shape: int) -> bool:
        """Whether a step may end in a FastacError."""
        raise NotImplementedError

    def check_executions(self, executed: int, needed: int, way: str) -> None:
        """Kernels ran as often as they should. needed: as often as in the step of the twin."""
        raise NotImplementedError

    # Operations

    def go_on(self) -> None:
        """Change nothing."""

    def enable(self, policy: Policies, engine: str) -> None:
        self.put_on(policy, engine)
        self.policy, self.engine = policy, engine

    def disable(self) -> None:
        fastac.disable(self.checked)
        self.policy = None

    def copy(self, goes_on: bool) -> None:
        """Go on with a copy, or keep one for later."""
        other = copy.copy(self)
        other.others = []
        other.plain, other.checked = copy.deepcopy(self.plain), copy.deepcopy(self.checked)
        self.others.append(other)
        if goes_on:
            self.exchange()

    def exchange(self) -> None:
        """Go on with the copy that was made last, and keep this."""
        if self.others:
            other = self.others.pop()
            mine = {name: value for name, value in vars(self).items() if name != "others"}
            theirs = {name: value for name, value in vars(other).items() if name != "others"}
            vars(other).update(mine)
            vars(self).update(theirs)
            self.others.append(other)

    def freeze(self, bits: int) -> None:
        for model in self.both:
            random_models.freeze(model, bits)

    def mode(self, training: bool) -> None:
        for model in self.both:
            model.train(training)

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
        """A forward without gradients."""
        found: list[Any] = []
        for model in self.both:
            self.watch(model)
            torch.manual_seed(3)
            try:
                with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
                    found.append(support.flat_tensors(model(**self.inputs(0, 5)), "output"))
            except RuntimeError as error:
                found.append(error)
        if isinstance(found[0], RuntimeError):
            assert type(found[0]) is type(found[1])
        else:
            assert_same(found[1], found[0])

    def train(self, way: str, shape: int, seed: int) -> None:
        """A training step of both, which must be the same."""
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
        self.disable() if other is None else self.enable(other, self.engine)
        try:
            call()
        finally:
            self.enable(policy, self.engine)

    def watch(self, model: Any) -> None:
        """This model is the one that runs now."""
        observed.calls.clear()
        observed.inner_regions = model is self.checked and self.policy is not None
