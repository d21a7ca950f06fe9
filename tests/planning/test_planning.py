"""`fastac.plan`: states, the largest budget, what it is given, and that it leaves a model as it is."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fastac
from fastac.errors import FastacError
from fastac.planning import MIB, OPTIMIZERS, Planner, states_of
from fastac.policy import Policy
from fastac.subjects import subject
from tests import planned, support
from tests.marks import slow
from tests.planned import CAN_NOT_BE_SIMULATED, COGVIDEOX, LTX, WAN, Stack, tiny
from tests.support import AttentionBlock

POLICIES = ["none", "full", "long_attn_only", "attn_only", "ops"]


def stack(count: int = 3) -> tuple[Stack, dict[str, Any]]:
    """A model of no library, and its inputs."""
    inputs = {name: tensor.detach() for name, tensor in support.stack_inputs().items()}
    return Stack(*(AttentionBlock() for _ in range(count))), inputs


# States

REAL: dict[str, Callable[[Any], torch.optim.Optimizer]] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
"""The optimizers of torch's own; bitsandbytes, of which adamw8bit is, needs a GPU."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", REAL)
def test_states_are_those_of_the_optimizer(name: str, dtype: torch.dtype) -> None:
    """Of what is trained, after a step of it: but for the counts of steps, one number for each parameter."""
    model, inputs = tiny(WAN, dtype)
    model.get_submodule("blocks.0").requires_grad_(False)
    planned.step(model, inputs)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = REAL[name](parameters)
    optimizer.step()
    kept = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    found = states_of(model, name)
    assert found.optimizer == sum(value.nbytes for value in kept if value.ndim)
    assert found.weights == sum(value.nbytes for value in (*model.parameters(), *model.buffers()))
    assert found.gathered == 0
    planner = Planner(subject(model, inputs), name)
    assert planner.gradients == sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
    assert planner.states == found


def test_every_optimizer_is_known() -> None:
    assert set(OPTIMIZERS) == {*REAL, "adamw8bit"}
    model = torch.nn.Linear(256, 256, bias=False)
    eight_bits = 2 * 256 * 256 + 2 * 4 * 256  # two states, and a scale for 256 numbers of each
    assert states_of(model, "adamw8bit").optimizer == eight_bits


def test_two_blocks_are_gathered_and_one_gradient() -> None:
    """The largest of the blocks counts."""
    model = Stack(AttentionBlock(), planned.wide_block())
    size = sum(parameter.nbytes for parameter in planned.wide_block().parameters())
    found = states_of(model, gpus=2, blocks=list(model.layers))
    assert found.gathered == 3 * size
    model.layers[1].requires_grad_(False)
    model.layers[0].requires_grad_(False)
    assert states_of(model, gpus=2, blocks=list(model.layers)).gathered == 2 * size


# Budgets


@functools.cache
def large_planner() -> Planner:
    """Of outputs of several MiB."""
    torch.manual_seed(0)
    inputs = {"video": torch.randn(1, 8192, 16), "text": torch.randn(1, 6, 16)}
    return Planner(subject(stack()[0], inputs, "layers"))


@pytest.mark.parametrize("name", ["large", WAN])
def test_the_largest_budget_fits(name: str) -> None:
    """Also after it was rounded: fewer bytes may be saved by other blocks, at a worse moment."""
    planner = large_planner() if name == "large" else Planner(planned.forecast_of(name).subject)
    everything = sum(one.bytes for found in planner.forecast.candidates.values() for one in found)
    full, most = planner.policy("full").peak_bytes, planner.budget(everything)[0].peak_bytes
    assert full < most
    for share in range(1, 10):
        memory = full + (most - full) * share // 10
        limit = planner.largest_budget(memory)
        assert limit is not None
        assert planner.budget(limit)[0].peak_bytes <= memory
        if name == "large":
            assert limit % MIB == 0 or limit < MIB
        else:
            assert planner.budget(limit + everything // 500)[0].peak_bytes > memory
    assert planner.largest_budget(full - 1) is None
    assert planner.largest_budget(most) == -(-everything // MIB) * MIB


def test_a_plan_for_a_memory() -> None:
    model, inputs = stack()
    peak = {one.policy: one.peak_bytes for one in fastac.plan(model, inputs, blocks="layers").policies}
    found = fastac.plan(model, inputs, blocks="layers", memory=peak["attn_only"])
    assert found.policies[-1].peak_bytes <= peak["attn_only"]
    assert found.budget is not None
    assert found.policies[-1].policy == str(Policy.budget(found.budget))
    assert list(found.blocks) == ["layers.0", "layers.1", "layers.2"]
    fastac.enable(model, found.blocks, blocks="layers")
    both = fastac.plan(model, inputs, blocks="layers", memory=peak["attn_only"], budget=1000)
    assert both.budget == 1000
    none = fastac.plan(model, inputs, blocks="layers", memory="1KiB")
    assert (none.budget, none.blocks, [one.policy for one in none.policies]) == (None, {}, POLICIES)
    assert "no policy fits" in str(none)


# What it is given


def everything_of(model: torch.nn.Module) -> dict[str, Any]:
    """What a plan might leave behind."""
    return {
        "training": [module.training for module in model.modules()],
        "attributes": [sorted(vars(module)) for module in model.modules()],
        "children": [list(module._modules) for module in model.modules()],
        "hooks": [
            len(hooks)
            for module in model.modules()
            for name, hooks in vars(module).items()
            if name.endswith("_hooks") and hooks is not None
        ],
        "checkpointing": [getattr(module, "gradient_checkpointing", None) for module in model.modules()],
        "functions": [getattr(module, "_gradient_checkpointing_func", None) for module in model.modules()],
        "identities": [id(value) for value in (*model.parameters(), *model.buffers())],
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "gradients": [None if one.grad is None else id(one.grad) for one in model.parameters()],
    }


@pytest.mark.parametrize("name", [WAN, LTX])
@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_plan_leaves_a_model_as_it_is(name: str, checkpoints: bool) -> None:
    """Its parameters and gradients, its modes and hooks, its inputs, and the generator of random numbers."""
    model, inputs = tiny(name)
    planned.step(model, inputs)
    if checkpoints:
        model.enable_gradient_checkpointing()  # type: ignore[operator]
    model.get_submodule("blocks.0" if name == WAN else "transformer_blocks.0").eval()
    before, values = everything_of(model), copy.deepcopy([*model.parameters(), *model.buffers()])
    gradients = [one.grad.clone() for one in model.parameters() if one.grad is not None]
    given = copy.deepcopy(inputs)
    torch.manual_seed(7)
    state = torch.get_rng_state()
    fastac.plan(model, inputs, budget="10KiB", memory="1MiB")
    assert torch.equal(torch.get_rng_state(), state)
    assert everything_of(model) == before
    assert all(map(torch.equal, [*model.parameters(), *model.buffers()], values))
    assert all(map(torch.equal, [one.grad for one in model.parameters() if one.grad is not None], gradients))
    assert list(inputs) == list(given)
    assert all(torch.equal(inputs[key], given[key]) for key in given if isinstance(given[key], torch.Tensor))


def test_a_plan_leaves_inputs_that_the_model_changes() -> None:
    class Changes(Stack):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return super().forward(video, text.add_(1))

    inputs = stack()[1]
    before = inputs["text"].clone()
    fastac.plan(Changes(*stack()[0].layers), inputs, blocks="layers")
    assert torch.equal(inputs["text"], before)


def test_a_model_without_weights() -> None:
    """On the device meta, inputs and all: the figures are the same."""
    model, inputs = tiny(COGVIDEOX)
    expected = fastac.plan(model, inputs, budget="10KiB").as_json()
    assert fastac.plan(copy.deepcopy(model).to("meta"), inputs, budget="10KiB").as_json() == expected
    shapes = {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    assert fastac.plan(model.to("meta"), shapes, budget="10KiB").as_json() == expected


@pytest.mark.parametrize(
    "policy",
    [Policy.budget("10KiB"), *slow(Policy(), Policy(linear=("*",)))],
    ids=str,
)
def test_a_model_that_is_enabled(policy: Policy) -> None:
    """What is enabled on it is neither planned nor lost, before its first step and after others."""
    model, inputs = tiny(WAN)
    expected = fastac.plan(model, inputs).as_json()
    fastac.enable(model, policy)
    for _ in range(2):
        assert fastac.plan(model, inputs).as_json() == expected
        planned.step(model, inputs)
    assert fastac.report(model).rows


def test_a_plan_of_some_blocks() -> None:
    """What is not named is not checkpointed, as with `enable`."""
    model, inputs = stack()
    one, all_of_them = (fastac.plan(model, inputs, blocks=names) for names in (["layers.1"], "layers"))
    assert (
        one.policies[0] == all_of_them.policies[0] or one.policies[0].held_bytes == all_of_them.policies[0].held_bytes
    )
    assert one.policies[3].saved_bytes * 3 == all_of_them.policies[3].saved_bytes
    assert one.policies[1].held_bytes > all_of_them.policies[1].held_bytes
    assert list(fastac.plan(model, inputs, blocks=["layers.1"], budget=10**6).blocks) == ["layers.1"]


def test_what_a_plan_says() -> None:
    model, inputs = tiny(WAN)
    found = fastac.plan(model, inputs, budget="20KiB")
    assert [one.policy for one in found.policies] == [*POLICIES, "budget(20.0 KiB)"]
    assert found.subject == WAN
    assert found.inputs.startswith("hidden_states (1, 4, 2, 16, 16), timestep (1,)")
    saved, relative = zip(*found.frontier, strict=True)
    assert (saved[0], relative[0]) == (0, 1.0)
    assert list(saved) == sorted(set(saved))
    assert list(relative) == sorted(set(relative), reverse=True)
    content = json.loads(json.dumps(found.as_json()))
    again = {name: Policy(**policy) for name, policy in content["blocks"].items()}
    assert again == found.blocks
    fastac.enable(model, again)
    assert "│ ops (torchtitan)" in str(found)
    assert "budget: " in str(found)


# Refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "lion"}, r"plan\(optimizer='lion'\): there are adamw, adamw8bit, sgd"),
        ({"gpus": 0}, r"plan\(gpus=0\): 1 or more"),
        ({"budget": "much"}, "'much': expected bytes"),
        ({"memory": "1.5"}, "expected bytes"),
        ({"blocks": "nowhere"}, "no such module"),
    ],
    ids=str,
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    model, inputs = stack()
    with pytest.raises(FastacError, match=message):
        fastac.plan(model, inputs, **{"blocks": "layers", **options})


def test_a_model_that_is_not_trained() -> None:
    model, inputs = stack()
    model.requires_grad_(False)
    with pytest.raises(FastacError, match="no output of the model requires grad"):
        fastac.plan(model, inputs, blocks="layers")


@pytest.mark.parametrize("name", CAN_NOT_BE_SIMULATED)
def test_a_class_that_can_not_be_simulated(name: str) -> None:
    """One error that names it."""
    with pytest.raises(FastacError, match=f"plan: .*{name.partition('Transformer')[0]}"):
        fastac.plan(*tiny(name))
