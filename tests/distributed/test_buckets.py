"""Ranks whose batches have other sizes, in other steps: nothing that fastac does communicates on one rank alone.

Compiled code cannot be watched. In one process it is run again, eagerly, once: among ranks, only what is a rank's own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

import fastac
from fastac.engine import releases
from tests.compiled.steps import SmallBlock, compile_blocks, hiding, small, small_inputs
from tests.distributed import ranks, steps
from tests.distributed.models import Differentiable, all_to_all_out, flat, sharded, ulysses
from tests.support import assert_same, loss_of, run_checkpointed, stack, stack_inputs, written_out

UNEQUAL = ((24, 16), (24, 24), (16, 24))
"""Tokens of rank 0 and of rank 1, in each step."""

EQUAL = tuple((both, both) for both, _ in UNEQUAL)
"""For an attention over the tokens of both."""


compiled = partial(compile_blocks, backend="eager")


def compiled_inside(model: Any) -> Any:
    """Blocks whose own forward is checkpointed: FSDP2 gathers around it. Sharded after `enable`."""
    if model.policy != "none":
        policy, model.policy = model.policy, "none"
        fastac.compile(model, policy, blocks="blocks", backend="eager", dynamic=False)
    return model


def attending(attend: Callable[..., torch.Tensor], model: Any) -> Any:
    for block in model.blocks:
        block.attend = attend
    return model


def doubled(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value) * 2


compiled_doubled = torch.compile(doubled, backend="eager", dynamic=False)


@torch.compiler.disable
def sent_into_buffers(parts: torch.Tensor) -> torch.Tensor:
    """By an all-to-all of torch.distributed, which writes buffers. dynamo leaves it out of its graphs."""
    received: torch.Tensor = Differentiable.apply(parts, all_to_all_out, all_to_all_out)
    return received


def summed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """DTensor adds up what the ranks have, inside an op, where no dispatch mode sees it."""
    part = DTensor.from_local(compiled_doubled(query, key, value), init_device_mesh("cpu", (2,)), [Partial()])
    return F.gelu(part).to_local()


def listed(model: Any) -> Any:
    """Blocks that are called by functions which hold them in a list, where nobody looks for modules."""
    blocks = list(model.blocks)

    def forward(**inputs: torch.Tensor) -> torch.Tensor:
        for number in range(len(blocks)):
            inputs["video"] = run_checkpointed(lambda i=number, **kw: blocks[i](**kw), **inputs, policy=model.policy)
        return inputs["video"]

    model.forward = forward
    return model


class Twice(torch.nn.Module):
    """Two forwards before a backward: FSDP2 counts them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.model(video=video, text=text) + self.model(video=video * 2, text=text)
        return output


class Way(NamedTuple):
    """How a stack is trained."""

    build: Callable[[Any], torch.nn.Module]
    sizes: Any = UNEQUAL  # of the batches
    again: int = 0  # collectives that a recompute issues again, in each step
    looks: bool = False  # compiled code is run again, eagerly


WAYS = {
    "fsdp2, compiled blocks": Way(lambda model: Twice(sharded(compiled(model)))),
    "fsdp2, compiled forwards": Way(lambda model: sharded(compiled_inside(model)), looks=True),
    "fsdp2, a compiled function": Way(lambda model: sharded(attending(compiled_doubled, model))),
    "fsdp2, compiled blocks in a list": Way(lambda model: Twice(sharded(listed(compiled(model))))),
    "fsdp1, compiled blocks": Way(lambda model: flat(compiled(model))),
    "ddp, compiled blocks": Way(lambda model: DistributedDataParallel(compiled(model)), looks=True),
    "all-reduce beside a compiled function": Way(lambda model: attending(summed, model), EQUAL),
    "all-to-all in compiled blocks": Way(lambda model: compiled(attending(ulysses, model)), EQUAL),
    "all-to-all into buffers in compiled blocks": Way(
        lambda model: compiled(attending(partial(ulysses, send=sent_into_buffers), model)), EQUAL, again=8
    ),
}


def _trained(way: Way, policy: str) -> list[steps.Measured]:
    model, found = way.build(small(policy)), []
    for tokens in way.sizes:
        found.append(steps.measured(model, small_inputs(tokens[dist.get_rank()])))
        steps.descend(model)
    return found


def _on_rank(name: str) -> tuple[list[steps.Measured], list[steps.Measured], int]:
    """Steps without checkpointing, steps with it, and how many lines of fastac's log say that something is not seen."""
    with steps.logged(logging.INFO) as messages:
        plain, saving = (_trained(WAYS[name], policy) for policy in ("none", "attn_only"))
    return plain, saving, sum("is not found" in line for line in messages)


@pytest.mark.parametrize("name", WAYS)
def test_no_rank_communicates_alone(name: str) -> None:
    way = WAYS[name]
    for plain, saving, unseen in ranks.run(_on_rank, name):
        assert unseen == (not way.looks)
        for found, expected in zip(saving, plain, strict=True):
            assert_same(found.tensors, expected.tensors)
            if releases.is_at_least("2.12"):  # the profiler of older releases loses collectives of gloo's now and then
                assert found.forward == expected.forward
                assert found.backward == expected.backward + Counter({"gloo:all_to_all": way.again})


# Hidden attention


def _hidden() -> tuple[list[str], list[str]]:
    errors, warned = [], []
    for wrap in (torch.nn.Identity, sharded):
        model = compile_blocks(small("attn_only"), hiding)
        wrapped = model if wrap is torch.nn.Identity else wrap(model)
        with steps.logged(logging.WARNING) as warnings:
            try:
                for tokens in (24, 16):
                    wrapped(**small_inputs(tokens))
            except fastac.PolicyNotAppliedError as error:
                errors.append(str(error))
        warned += warnings
    return errors, warned


def test_attention_that_compiled_code_hides() -> None:
    """An error where the block does not communicate, else a warning."""
    for errors, warnings in ranks.run(_hidden):
        assert len(errors) == len(warnings) == 1
        assert "scaled_dot_product" in errors[0]
        assert "0 attention calls" in warnings[0]


# Engines that come after `enable`, and change the class of blocks


def twice(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The calls that every block makes, and one more that is hidden."""
    return F.scaled_dot_product_attention(query, key, value) + written_out(query, key, value)


def _second_model() -> None:
    for attend in (F.scaled_dot_product_attention, twice):
        model = attending(attend, stack())
        fastac.enable(model, blocks="blocks")
        sharded(model)
        loss_of(model(**stack_inputs())).backward()


def _blocks_of_several_classes() -> None:
    model = small("attn_only")
    model.blocks[1] = type("Hiding", (SmallBlock,), {})(twice)
    flat(model)(**small_inputs())


def _refused(train: Callable[[], None]) -> str:
    with pytest.raises(fastac.PolicyNotAppliedError) as error:
        train()
    return str(error.value)


@pytest.mark.parametrize("train", [_second_model, _blocks_of_several_classes])
def test_another_class_or_model_than_the_first(train: Callable[[], None]) -> None:
    """A second model that is enabled before it is sharded, and blocks of several classes in FSDP1."""
    for error in ranks.run(_refused, train):
        assert "written out" in error
