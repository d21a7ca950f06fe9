"""`fastac.plan`: states, what it is given, and that it leaves a model as it is."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import flop_registry

import fastac
from fastac.errors import FastacError
from tests.hook.hosts import CheckpointsItself, diffuser
from tests.planning import planned
from tests.planning.planned import COGVIDEOX, WAN, plan_of, stack_inputs, tiny
from tests.support import AttentionStack, stack, state_of

# States


@pytest.mark.parametrize(("name", "cls"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_states_are_those_of_the_optimizer(name: str, cls: Any) -> None:
    """Of what is trained, after a step of it: but for the counts of steps, one number for each parameter."""
    model, inputs = tiny(WAN, torch.bfloat16)
    model.get_submodule("blocks.0").requires_grad_(False)
    planned.step(model, inputs)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = cls(parameters)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    found = fastac.plan(model, inputs, optimizer=name)
    assert found.states.optimizer == sum(value.nbytes for value in kept if value.ndim)
    assert found.states.weights == sum(value.nbytes for value in (*model.parameters(), *model.buffers()))
    assert found.states.gathered == 0
    assert found.gradients == sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)


def test_states_by_hand() -> None:
    """Of 8-bit AdamW, which needs a GPU: two states, and a scale for 256 numbers of each.

    Of FSDP2: two of the largest blocks, and one whole gradient if it is trained. It shards no buffers.
    """
    inputs, blocks = {"input": torch.randn(1, 16)}, ["0", "1"]
    model = torch.nn.Sequential(torch.nn.Linear(16, 16, bias=False), torch.nn.Linear(16, 2))
    model.register_buffer("table", torch.ones(10))
    weights = 16 * 16 + 16 * 2 + 2
    one = fastac.plan(model, inputs, blocks=blocks, optimizer="adamw8bit")
    assert one.states.optimizer == int(2 * weights + 2 * 4 / 256 * weights)
    two = fastac.plan(model, inputs, blocks=blocks, gpus=2)
    assert (two.states.weights, two.states.optimizer, two.gradients) == (2 * weights + 40, 4 * weights, 2 * weights)
    assert two.states.gathered == 3 * 16 * 16 * 4
    steps = [plan.policies[1].peak_bytes - plan.states.total for plan in (one, two)]
    assert 0 < steps[0] - steps[1] <= one.gradients - two.gradients
    model[0].requires_grad_(False)
    assert fastac.plan(model, inputs, blocks=blocks, gpus=2).states.gathered == 2 * 16 * 16 * 4


def test_attention_that_cannot_be_saved(caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = tiny(WAN)
    fastac.plan(model, inputs)
    assert not caplog.messages
    with sdpa_kernel(SDPBackend.MATH):
        fastac.plan(model, inputs)
    (said,) = caplog.messages
    assert said.startswith("plan: no attention of WanTransformer3DModel on hidden_states (")


def test_blocks_that_are_named() -> None:
    """What is not named is not checkpointed, as with `enable`."""
    model, inputs = stack(layers=3), stack_inputs()
    one, all_of_them = (fastac.plan(model, inputs, blocks=names) for names in (["blocks.1"], "blocks"))
    assert one.policies[3].saved_bytes * 3 == all_of_them.policies[3].saved_bytes
    assert one.policies[1].held_bytes > all_of_them.policies[1].held_bytes
    assert list(one.within(10**6)) == ["blocks.1"]
    mine = planned.under(model, one.within(10**6), blocks=["blocks.1"])
    planned.step(mine, inputs)


# What it is given


def everything_of(model: torch.nn.Module) -> Any:
    """What a plan might leave behind."""
    tensors = [*model.parameters(), *model.buffers()]
    attributes = [sorted(vars(module)) for module in model.modules()]
    return state_of(model), attributes, [(id(tensor), tensor.requires_grad, id(tensor.grad)) for tensor in tensors]


def test_a_plan_leaves_a_model_as_it_is() -> None:
    """Its parameters and gradients, its modes and hooks, its inputs, and the generator of random numbers."""
    model, inputs = tiny(WAN)
    planned.step(model, inputs)
    model.enable_gradient_checkpointing()  # type: ignore[operator]
    model.get_submodule("blocks.0").eval()
    before, values = everything_of(model), copy.deepcopy([*model.parameters(), *model.buffers()])
    given = copy.deepcopy(inputs)
    state = torch.get_rng_state()
    fastac.plan(model, inputs).within("10KiB")
    assert torch.equal(torch.get_rng_state(), state)
    assert everything_of(model) == before
    assert all(map(torch.equal, [*model.parameters(), *model.buffers()], values))
    assert all(torch.equal(inputs[key], given[key]) for key in given if isinstance(given[key], torch.Tensor))


def test_a_model_without_weights() -> None:
    """On the device meta, inputs and all: the figures are the same."""
    model, inputs = tiny(COGVIDEOX)
    expected = plan_of(COGVIDEOX)
    shapes = {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    found = fastac.plan(model.to("meta"), shapes)
    assert found == expected
    assert found.subject == COGVIDEOX
    assert found.within("10KiB") == expected.within("10KiB")


def test_a_model_that_is_enabled() -> None:
    """What is enabled on it is neither planned nor lost, before its first step and after others."""
    model, inputs = tiny(WAN)
    expected = plan_of(WAN)
    fastac.enable(model, expected.within("20KiB"))
    for _ in range(2):
        assert fastac.plan(model, inputs) == expected
        planned.step(model, inputs)
    assert fastac.report(model).rows


def test_the_best_row_that_fits() -> None:
    """Copies that are waited for are worse than any recompute, and bytes that the host does not have are none."""
    found = plan_of(WAN)
    waits = dataclasses.replace(found.policies[3], peak_bytes=1, host_bytes=2, bytes_per_flop=1.0)
    full = dataclasses.replace(found.policies[1], peak_bytes=1)
    for fits, host, best in (((waits, full), 2, full), ((waits,), 2, waits), ((waits,), 1, None), ((), 1, None)):
        assert dataclasses.replace(found, policies=fits, memory=1, host=host).best is best


# Refused


def test_a_formula_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan would save no output whose FLOPs it does not know."""
    for op in [op for op in flop_registry if "scaled_dot_product" in str(op)]:
        monkeypatch.setitem(flop_registry, op, lambda *args, **kwargs: {}["mine"])
    with pytest.raises(FastacError, match="KeyError: 'mine'"):
        fastac.plan(*tiny(WAN))


def test_a_class_that_checkpoints_by_itself() -> None:
    """By the forward of its blocks it is planned as any other, whatever its own switch says; else it is an error."""
    model, inputs = diffuser(CheckpointsItself), stack_inputs()
    model.enable_gradient_checkpointing()
    with pytest.raises(FastacError, match="Name them: blocks="):
        fastac.plan(model, inputs)
    assert fastac.plan(model, inputs, blocks="blocks").policies == fastac.plan(diffuser(), inputs).policies
    assert model.gradient_checkpointing


def test_a_switch_that_nobody_knows() -> None:
    class Own(AttentionStack):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                video = torch_checkpoint(block, video, text, use_reentrant=False)
            return video

    with pytest.raises(FastacError, match=r"'blocks\.0' runs in a checkpoint of the model's own"):
        fastac.plan(Own(), {name: one.requires_grad_() for name, one in stack_inputs().items()})


def test_what_cannot_be_planned() -> None:
    given, blocks = (stack(), stack_inputs()), {"blocks": "blocks"}
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (given, blocks | {"optimizer": "lion"}, "'lion'"),
        (given, blocks | {"gpus": 0}, "gpus=0"),
        (given, {"blocks": "nowhere"}, "no such module"),
        ((stack().requires_grad_(False), stack_inputs()), blocks, "requires grad"),
        ((stack(), torch.ones(2)), blocks, "mapping"),
        ((torch.nn.Linear(2, 2), {"input": torch.randn(1, 2)}), {}, "Linear has no list of attention"),
        (tiny("WanAnimate2Transformer3DModel"), {}, "plan: WanAnimate2"),
    ]
    for args, options, message in cases:
        with pytest.raises(FastacError, match=message):
            fastac.plan(*args, **options)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_a_model_in_another_data_parallel_engine(tmp_path: Any) -> None:
    """DDP changes no plan. What changes the model's modules is refused: a plan comes before it."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        expected = fastac.plan(stack(), stack_inputs(), blocks="blocks")
        found = fastac.plan(DistributedDataParallel(stack()), stack_inputs(), blocks="blocks")
        assert dataclasses.replace(found, subject=expected.subject) == expected
        by_block: Any = stack()
        for i, block in enumerate(by_block.blocks):
            by_block.blocks[i] = FullyShardedDataParallel(block, device_id=torch.device("cpu"))
        in_fsdp1 = FullyShardedDataParallel(stack(), device_id=torch.device("cpu"))
        in_fsdp2 = fully_shard(stack(), mesh=init_device_mesh("cpu", (1,)))
        for model in (by_block, in_fsdp1, in_fsdp2, replicate(stack())):
            with pytest.raises(FastacError, match=r"AttentionStack is sharded by FSDP, or.*Plan before that, with gp"):
                fastac.plan(model, stack_inputs(), blocks="blocks")
    finally:
        torch.distributed.destroy_process_group()
