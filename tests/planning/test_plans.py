"""`fastac.plan`: states, what is within a number of bytes, what it is given, and that it leaves a model as it is."""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from fastac.errors import FastacError, readable_bytes
from fastac.planning.fake_model import fake_model
from fastac.planning.forecast import Forecast, states_of
from fastac.planning.plans import make_plan
from fastac.policy import Policy
from tests.hook.hosts import CheckpointsItself, diffuser
from tests.model_state import state_of
from tests.planning import planned
from tests.planning.planned import COGVIDEOX, HUNYUAN_VIDEO, WAN, plan_of, stack_inputs, tiny
from tests.support import AttentionStack, stack

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


def test_states_in_eight_bits() -> None:
    """Of bitsandbytes, which needs a GPU: two states, and a scale for 256 numbers of each."""
    model = torch.nn.Linear(256, 256, bias=False)
    assert states_of(model, "adamw8bit").optimizer == 2 * 256 * 256 + 2 * 4 * 256


def test_two_blocks_are_gathered_and_one_gradient() -> None:
    """The largest of the blocks counts."""
    model = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(8, 8, bias=False)])
    assert states_of(model, gpus=2, blocks=model).gathered == 3 * 8 * 8 * 4
    model.requires_grad_(False)
    assert states_of(model, gpus=2, blocks=model).gathered == 2 * 8 * 8 * 4


# Within a number of bytes


@pytest.mark.parametrize("name", [WAN, HUNYUAN_VIDEO])
def test_what_is_within_holds_no_more(name: str) -> None:
    """As it was planned, measured under `enable` with that mapping; gradients are those without checkpointing."""
    model, inputs = tiny(name)
    plan = plan_of(name)
    saved = next(one.saved_bytes for one in plan.policies if one.policy == "attn_only")
    least = planned.allocated(planned.under(model, "full"), inputs)
    for limit in (saved // 2, 2 * saved):
        chosen = plan.within(limit)
        assert any(not policy.saves_nothing for policy in chosen.values())
        held = planned.allocated(planned.under(model, chosen), inputs)
        expected = plan.forecast.plan(chosen)
        assert held - least == expected.saved_bytes <= limit
    assert str(fastac.verify(model, **inputs, policy=chosen))
    report = planned.under(model, chosen)
    planned.step(report, inputs)
    assert sum(row.saved_bytes + row.linear_bytes for row in fastac.report(report).rows) == expected.saved_bytes


def test_within_takes_bytes_as_people_write_them(caplog: pytest.LogCaptureFixture) -> None:
    plan = plan_of(WAN)
    assert plan.within("20KiB") == plan.within(20 * 1024)
    assert {policy.linear for policy in plan.within("20KiB", linear=False).values()} == {()}
    offloading = plan.within("20KiB", offload=True)
    assert {policy.offload for policy in offloading.values()} == {True}
    assert {name: dataclasses.replace(policy, offload=False) for name, policy in offloading.items()} == plan.within(
        "20KiB"
    )
    with pytest.raises(FastacError, match="'much'"):
        plan.within("much")
    assert set(plan.within(1, offload=True).values()) == {Policy("full", offload=True)}


def test_bytes_in_which_nothing_can_be_saved(caplog: pytest.LogCaptureFixture) -> None:
    """A warning, also of `fastac plan --budget`, with the bytes that are needed: one less is not enough."""
    plan = fastac.plan(*tiny(WAN))
    assert not caplog.messages
    assert set(plan.within(1).values()) == {Policy("full")}
    (said,) = caplog.messages
    needed = int(said.removeprefix("plan.within(1 B) saves nothing: the smallest output takes ").removesuffix(" bytes"))
    for size, saves in ((needed, True), (needed - 1, False)):
        caplog.clear()
        policies = make_plan(plan.forecast, "Wan", "", budget=size).blocks.values()
        assert all(policy.saves_nothing for policy in policies) == bool(caplog.messages) == (not saves)
    plan = fastac.plan(torch.nn.Sequential(torch.nn.Linear(8, 8)), [torch.randn(2, 8)], blocks=["0"])
    plan.within("1GiB", linear=False)
    assert caplog.messages[-1] == "plan.within(1.0 GiB) saves nothing: no output of a block can be saved"


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


@functools.cache
def large() -> Forecast:
    torch.manual_seed(0)
    inputs = {"video": torch.randn(1, 8192, 16), "text": torch.randn(1, 6, 16)}
    return Forecast(fake_model(stack(layers=4), inputs, "blocks"))


def test_what_is_within_a_memory_fits(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The peak and the host's bytes, and it runs no more than any row that fits; copies are hidden if they can be."""
    monkeypatch.setattr("fastac.engine.offload.SMALLEST", 0)
    plan = make_plan(large(), "", "")
    rows = {row.policy: row for row in plan.policies}
    everything = large().peak(Policy("attn_only", linear=("*",)))
    least, most = rows["full, offload"].peak_bytes, rows["full, offload"].host_bytes
    for memory in range(least, everything, (everything - least) // 4):
        for host, gbps in ((0, 25.0), (most // 2, 1e12), (20 * most, 1e12), (20 * most, 60.0)):
            if memory < rows["full"].peak_bytes and host < most:
                continue
            found = large().plan(plan.within(memory=memory, host=host, gbps=gbps))
            assert found.peak_bytes <= memory
            assert found.host_bytes <= host
            fits = [row for row in plan.policies if row.peak_bytes <= memory and row.host_bytes <= host]
            hidden = [row for row in fits if row.bytes_per_flop * plan.tflops * 1e12 <= gbps * 1e9]
            if hidden:
                assert found.bytes_per_flop * plan.tflops * 1e12 <= gbps * 1e9 * (1 + 1e-9)
            assert found.flops <= min(row.flops for row in hidden or fits)
    assert plan.within(memory="1GiB") == large().policies("none")
    assert not caplog.messages
    without = plan.within(memory=(rows["full"].peak_bytes + everything) // 2, linear=False)
    assert {policy.linear for policy in without.values()} == {()}
    # On a slow bus, too, as nothing else fits.
    assert large().plan(plan.within(memory=least, host=most, gbps=1e-3)).host_bytes > 0
    (said,) = caplog.messages
    assert said.startswith("plan: nothing fits without copies to the host that need ")


def test_a_memory_in_which_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastac.engine.offload.SMALLEST", 0)
    plan = make_plan(large(), "", "")
    least = large().peak("full")
    assert large().peak(plan.within(memory=least)) == least
    for host in (0, "1B"):  # a byte of the host is of no use
        with pytest.raises(FastacError) as refused:
            plan.within(memory=least - 1, host=host)
        said = str(refused.value)
        assert said.startswith(f"plan.within(memory={least - 1}, host={host!r}): no policy fits. Besides ")
        least_bytes = readable_bytes(least - plan.states.total)
        assert f"a step takes {least_bytes} at least (10.8 MiB with 512.0 KiB of host memory)" in said
        assert "100% of the tokens would fit: fewer frames" in said


def test_arguments_of_within() -> None:
    plan = plan_of(WAN)
    for saved, options, message in (
        (None, {}, "give either"),
        ("1GiB", {"memory": "1GiB"}, "give either"),
        ("1GiB", {"host": "1GiB"}, "give either"),
        (None, {"memory": "1GiB", "offload": True}, "give either"),
        (None, {"memory": "1"}, "'1': expected bytes"),
        (None, {"memory": "1GiB", "host": "1"}, "'1': expected bytes"),
        (None, {"memory": "1GiB", "gbps": 0}, "0 GB/s beside 400 TFLOP/s"),
    ):
        with pytest.raises(FastacError, match=message):
            plan.within(saved, **options)


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


def test_a_plan_leaves_inputs_that_the_model_changes() -> None:
    class Changes(AttentionStack):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return super().forward(video, text.add_(1))

    inputs = stack_inputs()
    before = inputs["text"].clone()
    fastac.plan(Changes(), inputs, blocks="blocks")
    assert torch.equal(inputs["text"], before)


def test_a_model_without_weights() -> None:
    """On the device meta, inputs and all: the figures are the same."""
    model, inputs = tiny(COGVIDEOX)
    expected = plan_of(COGVIDEOX)
    shapes = {key: value.to("meta") if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
    found = fastac.plan(model.to("meta"), shapes)
    assert found == expected
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


def test_what_a_plan_says() -> None:
    found = plan_of(WAN)
    assert found.subject == WAN
    assert found.inputs.startswith("hidden_states (1, 4, 2, 16, 16), timestep (1,)")


# Refused


def test_a_class_that_checkpoints_by_itself() -> None:
    """By the forward of its blocks it is planned as any other, whatever its own switch says; else it is an error."""
    model, inputs = diffuser(CheckpointsItself), stack_inputs()
    model.enable_gradient_checkpointing()
    with pytest.raises(FastacError, match="Name them: blocks="):
        fastac.plan(model, inputs)
    expected = fastac.plan(diffuser(), inputs).policies
    assert fastac.plan(model, inputs, blocks="blocks").policies == expected
    assert expected[0].held_bytes > expected[3].held_bytes > expected[1].held_bytes
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
    """DDP changes no plan. FSDP1 is refused: what is wrong is no input, a plan comes before it."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        expected = fastac.plan(stack(), stack_inputs(), blocks="blocks")
        for model in (DistributedDataParallel(stack()), replicate(stack())):
            found = fastac.plan(model, stack_inputs(), blocks="blocks")
            assert dataclasses.replace(found, subject=expected.subject) == expected
        by_block: Any = stack()
        for i, block in enumerate(by_block.blocks):
            by_block.blocks[i] = FullyShardedDataParallel(block, device_id=torch.device("cpu"))
        for model in (by_block, FullyShardedDataParallel(stack(), device_id=torch.device("cpu"))):
            with pytest.raises(
                FastacError, match=r"AttentionStack is sharded by FSDP1.*Plan before you shard, with gp"
            ):
                fastac.plan(model, stack_inputs(), blocks="blocks")
    finally:
        torch.distributed.destroy_process_group()
