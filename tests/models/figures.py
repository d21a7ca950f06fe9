"""What a tiny model does under `attn_only`, counted and compared while it trains: a line of the tables of models."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import fastac
from tests import support
from tests.backends import flex_on_cpu
from tests.models.tiny import TINY
from tests.support import Tensors, assert_same, train_step

OWN_SDPA, FLEX, AS_SET = "always SDPA", "always flex", "as set"

HEADINGS = (
    *("model", "block containers", "attention kernels per step", "run again under `full`", "under `attn_only`"),
    *("bytes saved", "compared", "attention backend", "remarks"),
)


class Reference(NamedTuple):
    """Training without checkpointing: what it computed, and which blocks a checkpointing function is called for.

    attention: kernels in the step. in_blocks: those of them inside these blocks.
    """

    tensors: Tensors
    blocks: tuple[str, ...]
    attention: int
    in_blocks: int


class Figures(NamedTuple):
    """What one model did in a step under `attn_only`. again: attention kernels that ran in its backward."""

    name: str
    containers: tuple[str, ...]
    attention: int
    in_blocks: int
    again: int
    saved_bytes: int
    compared: int
    backend: str

    def cells(self) -> tuple[str, ...]:
        """A line of the table in docs/models.md, below HEADINGS."""
        outside = self.attention - self.in_blocks
        return (
            f"`{self.name}`",
            ", ".join(f"`{container}`" for container in self.containers),
            *map(str, (self.attention, self.in_blocks, self.again)),
            f"{self.saved_bytes:,}",
            str(self.compared),
            self.backend,
            f"{outside} outside the blocks" if outside else "",
        )


@functools.cache
def reference(name: str) -> Reference:
    support.count_cpu_attention()
    model, inputs = support.build(name)
    names = {module: module_name for module_name, module in model.named_modules()}
    blocks, in_blocks = [], 0

    def plain(block: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal in_blocks
        blocks.append(names[getattr(block, "__self__", block)])
        before = support.executions.total()
        outputs = block(*args, **kwargs)
        in_blocks += support.executions.total() - before
        return outputs

    model.enable_gradient_checkpointing(gradient_checkpointing_func=plain)
    support.executions.clear()
    with flex_on_cpu.registered():
        tensors = train_step(model, inputs)
    return Reference(tensors, tuple(blocks), support.executions.total(), in_blocks)


def measured(name: str) -> Figures:
    """Train two steps under `attn_only`, the first of its kind and one that is known; each is compared bit for bit.

    The blocks that fastac knows must be those that the model checkpoints.
    """
    expected = reference(name)
    model, inputs = support.build(name)
    fastac.enable(model)
    for _ in range(2):
        support.executions.clear()
        with flex_on_cpu.registered():
            assert_same(train_step(model, inputs), expected.tensors)
    lists = fastac.models.block_lists(model)
    assert sorted(block for blocks in lists.values() for block in blocks) == sorted(set(expected.blocks))
    rows = fastac.report(model).rows
    assert sum(row.saved for row in rows) == expected.in_blocks
    return Figures(
        name=name,
        containers=tuple(row.container for row in rows),
        attention=expected.attention,
        in_blocks=expected.in_blocks,
        again=support.executions.total() - expected.attention,
        saved_bytes=sum(row.saved_bytes for row in rows),
        compared=len(expected.tensors),
        backend=_backend(name, model),
    )


def _backend(name: str, model: Any) -> str:
    """Processors of diffusers that ask for the backend have an attribute for it; the older ones call SDPA."""
    if name in TINY and TINY[name].flex:
        return FLEX
    processors = [module.processor for module in model.modules() if hasattr(module, "processor")]
    asks = any(hasattr(processor, "_attention_backend") for processor in processors)
    return AS_SET if asks or not processors else OWN_SDPA
