"""Ranks whose batches have other sizes, in other steps: nothing that fastac does communicates on one rank alone.

Compiled code cannot be watched. In one process it is run again, eagerly, once: among ranks, only what is a rank's own.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Partial
from torch.nn.parallel import DistributedDataParallel

import fastac
from fastac.engine import releases
from tests.compiled.steps import SmallBlock, hiding, small, small_inputs
from tests.distributed import ranks, steps
from tests.distributed.models import sharded, ulysses
from tests.support import Tensors, assert_same, loss_of, run_checkpointed, stack, stack_inputs, written_out

LIMIT = 20.0
"""Seconds that a collective waits: a rank that communicates alone ends the test."""

UNEQUAL = ((24, 16), (24, 24), (16, 24))
"""Tokens of rank 0 and of rank 1, in each step."""

EQUAL = tuple((both, both) for both, _ in UNEQUAL)
"""For an attention over the tokens of both."""


def compiled(model: Any) -> Any:
    for block in model.blocks:
        block.compile(backend="eager", dynamic=False)
    return model


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


def flat(model: Any) -> torch.nn.Module:
    units = ModuleWrapPolicy({SmallBlock})
    return FullyShardedDataParallel(model, auto_wrap_policy=units, device_id=torch.device("cpu"), use_orig_params=True)


def doubled(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value) * 2


compiled_doubled = torch.compile(doubled, backend="eager", dynamic=False)


class Exchange(torch.autograd.Function):
    """An all-to-all of torch.distributed, which writes buffers. dynamo leaves it out of its graphs."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, gather: int, split: int) -> torch.Tensor:
        ctx.dims = gather, split
        parts = [part.contiguous() for part in tensor.chunk(2, dim=split)]
        received = [torch.empty_like(part) for part in parts]
        dist.all_to_all(received, parts)
        return torch.cat(received, dim=gather)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        gather, split = ctx.dims
        return exchanged(grads[0], split, gather), None, None


@torch.compiler.disable
def exchanged(tensor: torch.Tensor, gather: int, split: int) -> torch.Tensor:
    output: torch.Tensor = Exchange.apply(tensor, gather, split)
    return output


def ulysses_by_buffers(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    whole = [exchanged(tensor, 2, 1) for tensor in (query, key, value)]
    return exchanged(F.scaled_dot_product_attention(*whole), 1, 2)


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
        lambda model: compiled(attending(ulysses_by_buffers, model)), EQUAL, again=8
    ),
}


class Trained(NamedTuple):
    """Steps of one rank, and the lines of fastac's log that say something is not seen."""

    tensors: list[Tensors]
    forward: list[Counter[str]]  # collectives
    backward: list[Counter[str]]
    unseen: list[str]


def train(way: Way, policy: str) -> Trained:
    logger = logging.getLogger("fastac")
    trained, lines = Trained([], [], [], []), steps.Warnings()
    lines.setLevel(logging.INFO)
    logger.setLevel(logging.INFO)
    with lines as messages:
        model = way.build(small(policy))
        for tokens in way.sizes:
            step = steps.measured(model, small_inputs(tokens[dist.get_rank()]))
            trained.tensors.append(step.tensors)
            trained.forward.append(step.forward)
            trained.backward.append(step.backward)
            steps.descend(model)
    logger.setLevel(logging.NOTSET)
    return trained._replace(unseen=[line for line in messages if "is not found" in line])


def _on_rank(name: str) -> dict[str, Trained]:
    return {policy: train(WAYS[name], policy) for policy in ("none", "attn_only")}


@pytest.mark.parametrize("name", WAYS)
def test_no_rank_communicates_alone(name: str) -> None:
    way = WAYS[name]
    for trained in ranks.results(ranks.outcomes(_on_rank, name, timeout=LIMIT, patience=4 * LIMIT)):
        plain, saving = trained["none"], trained["attn_only"]
        for found, expected in zip(saving.tensors, plain.tensors, strict=True):
            assert_same(found, expected)
        assert len(saving.unseen) == (not way.looks)
        if releases.is_at_least("2.12"):  # the profiler of older releases loses collectives of gloo's now and then
            again = Counter({"gloo:all_to_all": way.again})
            assert saving.forward == plain.forward
            assert saving.backward == [one + again for one in plain.backward]


# Hidden attention


def _hidden() -> tuple[list[str], list[str]]:
    errors, warned = [], []
    for wrap in (torch.nn.Identity, sharded):
        model = small("attn_only")
        for block in model.blocks:
            block.compile(backend=hiding, dynamic=False)
        wrapped = model if wrap is torch.nn.Identity else wrap(model)
        with steps.Warnings() as warnings:
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


def _second_model() -> list[str]:
    for attend in (F.scaled_dot_product_attention, twice):
        model = attending(attend, stack())
        fastac.enable(model, blocks="blocks")
        sharded(model)
        try:
            loss_of(model(**stack_inputs())).backward()
        except fastac.PolicyNotAppliedError as error:
            return str(error)
    return ""


def test_a_second_model_that_is_enabled_before_it_is_sharded() -> None:
    for error in ranks.run(_second_model):
        assert "written out" in error


class Hiding(SmallBlock):
    """A class of its own."""


def _classes_in_fsdp1() -> str:
    model = small("attn_only")
    model.blocks[1] = Hiding(twice)
    try:
        FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({SmallBlock}), device_id=torch.device("cpu"), use_orig_params=True
        )(**small_inputs())
    except fastac.PolicyNotAppliedError as error:
        return str(error)
    return ""


def test_blocks_of_several_classes_in_fsdp1() -> None:
    for error in ranks.run(_classes_in_fsdp1):
        assert "written out" in error
