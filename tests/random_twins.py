"""Twins of a random model, and what may be refused of it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map

import fastac
from fastac.policy import Policy
from tests import random_models
from tests.random_attention import AttentionCall, observed
from tests.random_models import SHAPES, ModelSpec, Policies, RandomModel
from tests.random_steps import SECOND_BACKWARDS
from tests.support import Tensors, assert_same
from tests.twins import Twins

INNER = {"inner region", "inner checkpoint"}
NOT_IN_SAC = {"drawing", "fallback"}
"""Kinds of attention that engine sac refuses."""


def _scaled(values: Any) -> Any:
    return tree_map(lambda value: value * 0.9 if isinstance(value, torch.Tensor) else value, values)


HOOKS: dict[str, Callable[..., Any]] = {
    "forward": lambda module, args, output: _scaled(output),
    "forward_pre": lambda module, args: _scaled(args),
    "full_backward": lambda module, grad_inputs, grad_outputs: _scaled(grad_inputs),
}


class RandomTwins(Twins):
    """Of a random model. how: it is enabled, of HOW. compiled: blocks that are, by their place."""

    plain: RandomModel
    checked: RandomModel

    def __init__(self, spec: ModelSpec, how: str = "hook") -> None:
        super().__init__()
        self.spec, self.how = spec, how
        self.compiled: set[int] = set()
        self.remade = False
        self.plain = random_models.build(spec)
        self.checked = copy.deepcopy(self.plain)

    def inputs(self, shape: int, seed: int) -> dict[str, Any]:
        return random_models.inputs(self.spec, shape, seed)

    def put_on(self, policy: Policies, engine: str) -> None:
        self.checked.enable(policy, engine, self.how)

    def enable(self, policy: Policies, engine: str, how: str = "") -> None:
        """how: of the two ways of fastac.enable, in the place of the one before; the same where it is ""."""
        if how and self.how != "checkpoint" and self.spec.calls_blocks:
            self.how = how
        super().enable(policy["*"] if isinstance(policy, dict) and self.how == "checkpoint" else policy, engine)

    def disable(self) -> None:
        self.checked.disable()
        self.policy = None

    def copy(self, goes_on: bool) -> None:
        compiled, self.compiled = self.compiled, set()  # torch leaves compiled code behind
        super().copy(goes_on)
        if goes_on:
            self.others[-1].compiled = compiled
        else:
            self.compiled = compiled

    def compile(self, place: int, backend: str) -> None:
        for model in self.both:
            block = model.blocks[place % len(model.blocks)]
            block.compile(backend=backend)
            self.compiled.add(block.place)

    def remake(self, place: int, kinds: list[str]) -> None:
        """Let a block attend in other ways than it did, as one does whose attention function was exchanged."""
        for model in self.both:
            block = model.blocks[place % len(model.blocks)]
            parts = [(kind, source) for (_, source), kind in zip(block.spec.parts, kinds, strict=False)]
            block.spec = dataclasses.replace(block.spec, parts=tuple(parts))
        self.remade = True

    def load(self, seed: int) -> None:
        """The weights of another model of the kind."""
        assert self.checked.state_dict().keys() == self.plain.state_dict().keys()
        for model in self.both:
            model.load_state_dict(random_models.build(self.spec, seed).state_dict())

    def change(self, **options: Any) -> None:
        """What of the spec is about calls, rather than about what the model is made of."""
        self.spec = dataclasses.replace(self.spec, **options)
        for model in self.both:
            model.spec = self.spec

    def freeze_inputs(self, names: tuple[str, ...]) -> None:
        self.change(frozen_inputs=names)

    def autocast(self, enabled: bool) -> None:
        self.change(autocast=enabled)

    def hook(self, place: int, kind: str) -> None:
        """A hook of the user's own on a block, which changes what passes."""
        for model in self.both:
            getattr(model.blocks[place % len(model.blocks)], f"register_{kind}_hook")(HOOKS[kind])

    def cast(self, dtype: str) -> None:
        self.change(dtype=dtype)
        for model in self.both:
            model.cast(dtype)

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

    def attempt(self, model: Any, way: str, shape: int, seed: int) -> tuple[Tensors | Exception, int]:
        if self.changes and way in ("inside a region", "saved on cpu"):
            way = "plain"  # torch's checkpointing does not notice the change there, and its gradients are wrong
        return super().attempt(model, way, shape, seed)

    @property
    def changes(self) -> bool:
        return any(block.changed for block in self.spec.blocks)

    def has_hopeless(self, shape: int) -> bool:
        """Whether attention is to be saved that can not be."""
        _, tokens, text_tokens = SHAPES[shape]
        for block in self.checked.blocks:
            for kind, source in block.spec.parts:
                hopeless = kind in ("written out", "math", "inner checkpoint")
                hopeless = hopeless or (kind == "learned bias" and block.bias.requires_grad)
                hopeless = hopeless or (kind == "dropout" and block.training)
                keys = tokens if source == "video" else text_tokens
                if hopeless and self.checked.saved(self.policy, block.place, keys, self.how):
                    return True
        return False

    def must_refuse(self, shape: int) -> bool:
        """Not where attention that was seen hides one that was not: only the first block of a class is watched."""
        known = self.remade or self.spec.one_class or not self.spec.calls_blocks
        return self.has_hopeless(shape) and not known and self.engine == "tape"

    def may_refuse(self, way: str, shape: int) -> bool:
        """Also a block that makes fewer calls than it did before, where a policy saves none of these."""
        if self.policy is None:
            return False
        if self.saves_linear() and (self.writes_linear or self.misses_linear()):
            return True
        if self.engine == "sac" and (way in SECOND_BACKWARDS or self.changes or self.checked.kinds & NOT_IN_SAC):
            return True
        return self.remade or self.has_hopeless(shape) or bool(self.checked.kinds & {"learned bias", "dropout"})

    def saves_linear(self) -> bool:
        """Whether a policy names Linear modules: under a budget none is an error."""
        policies = self.policy.values() if isinstance(self.policy, dict) else [self.policy]
        return any(isinstance(one, Policy) and one.linear and not one.is_budget for one in policies)

    @property
    def writes_linear(self) -> bool:
        """Whether a block writes into what its Linear modules return."""
        return any(block.in_place for block in self.spec.blocks)

    def misses_linear(self) -> bool:
        """Whether a block has no Linear module of some name, or does not call it."""
        names = {"text", "projections.*"}
        policies = self.policy.values() if isinstance(self.policy, dict) else [self.policy]
        named = {name for one in policies if isinstance(one, Policy) for name in one.linear}
        unlike = any(not block.parts or block.style in ("tensor", "keyword") for block in self.spec.blocks)
        return unlike and bool(names & named)

    def check_executions(self, executed: int, needed: int, way: str) -> None:
        policies = self.policy.values() if isinstance(self.policy, dict) else [self.policy]
        if any(isinstance(one, Policy) and one.is_budget for one in policies):
            return  # what it chose, tests/test_budgets.py looks at
        assert executed >= needed or way == "inside a region"  # whose recompute need not come to its end
        if self.compiled or not self.checked.kinds.isdisjoint(INNER):
            return  # code that is compiled, or is in two regions, does not tell which of its calls are recomputed
        saved = [call for call in observed.calls if call.recompute and self.is_saved(call)]
        calls = len(observed.calls)
        assert executed == calls - len(saved), f"{executed} executions, {calls} calls, {len(saved)} saved"

    def is_saved(self, call: AttentionCall) -> bool:
        return self.checked.saved(self.policy, call.place, call.keys, self.how)
