"""Twins: a model under fastac and one that never was. Whatever else is done to one is done to the other."""

from __future__ import annotations

import copy
import dataclasses
from contextlib import nullcontext

import torch

import fastac
from fastac import census
from tests import random_models, support
from tests.random_attention import AttentionCall, observed
from tests.random_models import SHAPES, ModelSpec, Policies, RandomModel
from tests.random_steps import SECOND_BACKWARDS, WAYS, Step
from tests.support import Tensors, assert_same, train_step

NOT_IN_SAC = {"drawing"}
"""Kinds of attention that engine sac refuses."""


class Twins:
    """own: the model calls fastac.checkpoint itself. compiled: blocks that are, by their place."""

    def __init__(self, spec: ModelSpec, own: bool = False) -> None:
        census._blocks.clear()
        census._kinds.clear()
        torch._dynamo.reset()
        self.compiled: set[int] = set()
        self.spec, self.own = spec, own
        self.plain = random_models.build(spec)
        self.checked = copy.deepcopy(self.plain)
        self.policy: Policies | None = None
        self.engine = "tape"
        self.others: list[Twins] = []

    @property
    def both(self) -> tuple[RandomModel, RandomModel]:
        return self.plain, self.checked

    # Operations

    def go_on(self) -> None:
        """Change nothing."""

    def enable(self, policy: Policies, engine: str = "tape") -> None:
        if isinstance(policy, dict) and self.own:
            policy = policy["*"]
        self.checked.enable(policy, engine, self.own)
        self.policy, self.engine = policy, engine

    def disable(self) -> None:
        self.checked.disable()
        self.policy = None

    def copy(self, goes_on: bool) -> None:
        """Go on with a copy, or keep one for later."""
        other = copy.copy(self)
        other.others, other.compiled = [], set()  # torch leaves compiled code behind
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

    def compile(self, place: int, backend: str) -> None:
        for model in self.both:
            block = model.blocks[place % len(model.blocks)]
            block.compile(backend=backend)
            self.compiled.add(block.place)

    def freeze(self, bits: int) -> None:
        for model in self.both:
            model.freeze(bits)

    def load(self, seed: int) -> None:
        """The weights of another model of the kind."""
        assert self.checked.state_dict().keys() == self.plain.state_dict().keys()
        for model in self.both:
            model.load_state_dict(random_models.build(self.spec, seed).state_dict())

    def mode(self, training: bool) -> None:
        for model in self.both:
            model.train(training)

    def cast(self, dtype: str) -> None:
        self.spec = dataclasses.replace(self.spec, dtype=dtype)
        for model in self.both:
            model.cast(dtype)

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
        found = []
        for model in self.both:
            self.watch(model)
            torch.manual_seed(3)
            with torch.no_grad() if mode == "no_grad" else torch.inference_mode():
                outputs = model(**random_models.inputs(self.spec, 0, 5))
            found.append(support.flat_tensors(outputs, "output"))
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
        self.train("plain", shape, 2)

    def train(self, way: str, shape: int, seed: int) -> None:
        """A training step of both, which must be the same."""
        support.executions.clear()
        expected, _ = self.attempt(self.plain, way, shape, seed)
        needed = sum(support.executions.values())
        support.executions.clear()
        found, calls = self.attempt(self.checked, way, shape, seed)
        executed = sum(support.executions.values())
        if isinstance(expected, Exception):
            assert not isinstance(found, Exception) or isinstance(found, (type(expected), fastac.FastacError)), found
            return
        if isinstance(found, Exception):
            if not (isinstance(found, fastac.FastacError) and self.may_refuse(way, shape)):
                raise found
            self.recover(shape, seed)
            return
        assert not self.must_refuse(shape), "nothing was saved, and there was no error"
        assert_same(found, expected)
        assert executed >= needed or way == "inside a region"  # whose recompute need not come to its end
        self.check_executions(calls, executed)

    def recover(self, shape: int, seed: int) -> None:
        """After an error the model is as good as before: it trains without fastac."""
        self.disable()
        self.train("plain", shape, seed)

    def has_hopeless(self, shape: int) -> bool:
        """Whether attention is to be saved that has no output to save."""
        _, tokens, text_tokens = SHAPES[shape]
        for block in self.checked.blocks:
            for kind, source in block.spec.parts:
                hopeless = kind in ("written out", "math")
                hopeless = hopeless or (kind == "learned bias" and block.bias.requires_grad)
                hopeless = hopeless or (kind == "dropout" and block.training)
                keys = tokens if source == "video" else text_tokens
                if hopeless and self.checked.saved(self.policy, block.place, keys):
                    return True
        return False

    def must_refuse(self, shape: int) -> bool:
        """Not where attention that was seen hides one that was not: only the first block of a class is watched."""
        return self.has_hopeless(shape) and not self.spec.one_class and self.spec.caller in ("block", "call")

    def may_refuse(self, way: str, shape: int) -> bool:
        """Also a block that makes fewer calls than it did before, where a policy saves none of these."""
        if self.policy is None:
            return False
        changed = any(block.changed for block in self.spec.blocks)
        if changed and (self.engine == "sac" or way == "saved on cpu"):
            return True  # the latter keeps a copy of its own, so that any change is legal
        if self.engine == "sac" and (way in SECOND_BACKWARDS or self.spec.kinds & NOT_IN_SAC):
            return True
        return self.has_hopeless(shape) or bool(self.spec.kinds & {"learned bias", "dropout"})

    def check_executions(self, calls: list[AttentionCall], executed: int) -> None:
        """calls: of attention, by the model under fastac."""
        if self.compiled or not self.spec.kinds.isdisjoint({"inner full", "inner saved"}):
            return  # code that is compiled, or is in two regions, does not tell which of its calls are recomputed
        saved = [call for call in calls if call.recompute and self.checked.saved(self.policy, call.place, call.keys)]
        assert executed == len(calls) - len(saved), f"{executed} executions, {len(calls)} calls, {len(saved)} saved"

    def watch(self, model: RandomModel) -> None:
        """This model is the one that runs now."""
        observed.calls.clear()
        observed.inner_regions = model is self.checked and self.policy is not None

    def attempt(
        self, model: RandomModel, way: str, shape: int, seed: int
    ) -> tuple[Tensors | Exception, list[AttentionCall]]:
        """What a step gives, or raises, and the attention calls that it made."""
        if way == "inside a region" and any(block.changed for block in self.spec.blocks):
            way = "plain"  # torch's checkpointing does not notice the change, and its gradients are wrong
        batch = random_models.inputs(self.spec, shape, seed)
        other = random_models.inputs(self.spec, (shape + seed) % len(SHAPES), seed + 1)
        enabled = model is self.checked and self.policy is not None
        step = Step(model, batch, other, (lambda: self.enable(self.policy, self.engine)) if enabled else None)
        self.watch(model)
        around = torch.autograd.graph.save_on_cpu() if way == "saved on cpu" else nullcontext()
        try:
            with around:
                found = train_step(model, batch, seed, backward=lambda loss: WAYS[way](step, loss))
            found["generator"] = torch.get_rng_state()
        except Exception as error:
            return error, []
        return found, list(observed.calls)
