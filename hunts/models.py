"""Models of random blocks, their inputs, and hypothesis strategies for both and for what is done to them."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import Any

import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from hypothesis import strategies as st

import fastac
from fastac import Policy
from hunts.attention import CHANGES, REFUSED, SUPPORTED, WIDTH, observed
from hunts.blocks import BlockSpec, RandomAttentionBlock

Policies = str | Policy | dict[str, str | Policy]

HOW = ("hook", "blocks", "checkpoint")
"""Ways to enable: as diffusers' checkpointing function, on the blocks' forward, in the model's own calls."""


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    blocks: tuple[BlockSpec, ...]  # the different ones
    order: tuple[int, ...]  # index of the block at each place; one may be at several
    dtype: str = "float32"
    autocast: bool = False  # to bfloat16
    frozen: int = 0  # parameter i does not train if bit i is set, of 24 that repeat
    frozen_inputs: tuple[str, ...] = ()  # of "video" and "text"
    one_class: bool = False  # all blocks are of one class


class RandomModel(ModelMixin, ConfigMixin):
    """Calls its blocks as diffusers' models do, or under fastac.checkpoint itself.

    own: policy of the calls it checkpoints itself; None for diffusers' way.
    """

    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.own: Any = None

    def build(self, spec: ModelSpec) -> RandomModel:
        """Make the blocks; the weights come from the default generator."""
        self.spec = spec
        made = []
        for place, block in enumerate(spec.blocks):
            kind = RandomAttentionBlock
            if not spec.one_class:
                kind = type(f"RandomAttentionBlock{place}", (RandomAttentionBlock,), {})
            made.append(kind(block, place))
        self.blocks = torch.nn.ModuleList(made[index] for index in spec.order)
        freeze(self, spec.frozen)
        torch.nn.Module.to(self, getattr(torch, spec.dtype))  # diffusers' own warns every time
        return self.train()

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        observed.in_forward = True
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=self.spec.autocast):
                for block in self.blocks:
                    video = self.call(block, video, text)
        finally:
            observed.in_forward = False
        return video, text

    def call(self, block: torch.nn.Module, *args: torch.Tensor) -> torch.Tensor:
        if self.own is not None and torch.is_grad_enabled():
            return fastac.checkpoint(block, *args, policy=self.own)
        if self.gradient_checkpointing and torch.is_grad_enabled():
            return self._gradient_checkpointing_func(block, *args)
        return block(*args)

    def enable(self, policy: Policies, how: str) -> None:
        """how: of HOW. A model that calls fastac.checkpoint itself knows no mapping."""
        if how == "checkpoint":
            self.own = policy
        else:
            fastac.enable(self, policy, blocks="blocks" if how == "blocks" else None)

    def disable(self) -> None:
        self.own = None
        fastac.disable(self)

    @property
    def kinds(self) -> set[str]:
        return {kind for block in self.blocks for kind, _ in block.spec.parts}

    def saved(self, policy: Policies | None, place: int, keys: int, how: str) -> bool:
        """Whether an attention call at a place is to be saved. place: of the block among the different ones."""
        if isinstance(policy, dict):
            names = [f"blocks.{i}" for i, used in enumerate(self.spec.order) if used == place]
            name = names[0] if how == "blocks" else names[-1]  # of a block that has several, one counts
            policy = next(value for pattern, value in policy.items() if fnmatch.fnmatchcase(name, pattern))
        if isinstance(policy, Policy):
            return policy.name == "attn_only" and keys >= policy.min_kv
        return policy == "attn_only"


def freeze(model: torch.nn.Module, bits: int) -> None:
    """Let the parameters train whose bits are not set, of 24; base layers of adapters never do."""
    for i, (name, parameter) in enumerate(model.named_parameters()):
        parameter.requires_grad_(".base." not in name and not bits >> i % 24 & 1)


def build(spec: ModelSpec, seed: int = 0) -> RandomModel:
    """A model whose weights depend on spec and seed alone."""
    torch.manual_seed(seed)
    return RandomModel().build(spec)


SHAPES = ((1, 6, 3), (2, 4, 3), (2, 6, 5), (1, 9, 1))
"""Of inputs: batch, tokens, text tokens."""


def inputs(spec: ModelSpec, shape: int, seed: int) -> dict[str, torch.Tensor]:
    """Inputs of a model, which require grad where the spec does not freeze them."""
    batch, tokens, text_tokens = SHAPES[shape]
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, length in (("video", tokens), ("text", text_tokens)):
        tensor = torch.randn(batch, length, WIDTH, generator=generator).to(getattr(torch, spec.dtype))
        made[name] = tensor.requires_grad_(name not in spec.frozen_inputs)
    return made


# Strategies. What is first in each is what a failing example shrinks to.


def parts(kinds: tuple[str, ...]) -> st.SearchStrategy[tuple[tuple[str, str], ...]]:
    """What a block attends with, and to."""
    part = st.tuples(st.sampled_from((*kinds, "none")), st.sampled_from(("video", "text")))
    return st.lists(part, min_size=1, max_size=3).map(lambda parts: tuple(part for part in parts if part[0] != "none"))


def blocks(kinds: tuple[str, ...], changed: tuple[str, ...]) -> st.SearchStrategy[BlockSpec]:
    return st.builds(
        BlockSpec,
        parts=parts(kinds),
        dropout=st.sampled_from((0.0, 0.0, 0.3)),
        changed=st.sampled_from(("", *changed)),
        in_place=st.booleans(),
        adapted=st.booleans(),
    )


@st.composite
def models(
    draw: st.DrawFn,
    kinds: tuple[str, ...] = tuple(SUPPORTED),
    changed: tuple[str, ...] = (),
) -> ModelSpec:
    """Specs of models with one to three different blocks at one to four places."""
    made = tuple(draw(st.lists(blocks(kinds, changed), min_size=1, max_size=3)))
    order = list(range(len(made)))
    if draw(st.booleans()):
        order.append(draw(st.sampled_from(order)))
    return ModelSpec(
        blocks=made,
        order=tuple(order),
        dtype=draw(st.sampled_from(("float32", "bfloat16"))),
        autocast=draw(st.booleans()),
        frozen=draw(st.one_of(st.just(0), st.integers(0, 2**24 - 1))),
        frozen_inputs=draw(st.sampled_from(((), ("video",), ("text",), ("video", "text")))),
        one_class=draw(st.booleans()),
    )


POLICIES = st.sampled_from(("attn_only", "full", Policy("attn_only", min_kv=4), Policy("attn_only", min_kv=6)))
MAPPINGS = st.builds(lambda first, others: {"blocks.0": first, "*": others}, POLICIES, POLICIES)
ALL_KINDS = (*SUPPORTED, *REFUSED)
ALL_CHANGES = tuple(CHANGES)
