"""What is planned of a step, against the step: bytes to the byte, on the device and the host, and FLOPs.

Of blocks that are alike five run, so a plan of six is a plan of what was repeated.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel, UNetMotionModel, UNetSpatioTemporalConditionModel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import fastac
from fastac import Policy
from fastac.engine.releases import WHOLE_PRODUCT
from tests import support
from tests.marks import quick
from tests.planning import planned
from tests.planning.planned import COGVIDEOX, HUNYUAN_VIDEO, LTX, WAN, stack_inputs, tiny
from tests.support import AttentionBlock, AttentionStack, stack

NONE, FULL, ALL_LINEAR = Policy("none"), Policy("full"), Policy(linear=("*",))


def assert_measured(
    plan: fastac.Plan, model: Any, inputs: Mapping[str, Any], policies: Mapping[str, Policy], **options: Any
) -> None:
    """A step under policies of all blocks holds and runs what the plan says. To be called on an exact device."""
    row = planned.row_of(plan, policies)
    mine = planned.under(model, policies, **options)
    with planned.exact() as device:
        planned.step(mine, inputs)
        held, host, peak = planned.live(mine, inputs, device)
    said = f"{row} planned, under {policies}"
    bare = {name: FULL if policy.checkpoints else policy for name, policy in policies.items()}
    if any(policy.linear for policy in policies.values()):
        # Some of these are copies that no operator returns: the allocator alone knows them.
        if not any(policy.offload for policy in policies.values()):
            only_full = planned.allocated(planned.under(model, bare, **options), inputs)
            assert row.saved_bytes == planned.allocated(mine, inputs) - only_full, said
        assert row.peak_bytes - plan.states.total >= peak, said
    else:
        assert (row.held_bytes, row.host_bytes, row.peak_bytes - plan.states.total) == (held, host, peak), said
    if policies == bare:
        assert row.flops == planned.counted_flops(mine, inputs), said


# Random stacks


class Drawn(AttentionStack):
    """A stack of which some blocks are frozen or called twice, and what it does between its blocks."""

    ran: list[set[int]]

    def __init__(
        self, layers: int, block: Any, *, frozen: int, again: int, between: str, autocast: bool, unlike: bool
    ) -> None:
        super().__init__(layers, block=block)
        self.blocks[:frozen].requires_grad_(False)
        self.again, self.between, self.autocast = again, between, autocast
        if unlike:
            self.blocks[layers // 2].fraction = 0.5

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        if planned.is_planned(video):
            Drawn.ran.append(set())
        outputs, aside = [], []
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            for number, block in enumerate((*self.blocks, *self.blocks[: self.again])):
                video = block(video, text)
                if self.between == "one is doubled" and number == 3:
                    video = video * 2
                if self.between == "kept aside":
                    aside.append(video.detach() * 2)
                if self.between == "all are added":
                    outputs.append(video)
        return torch.stack([one * one for one in outputs]).sum(0) if outputs else video


class Noted(AttentionBlock):
    """A block that says of itself when it runs in a simulation."""

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        if planned.is_planned(video):
            Drawn.ran[-1].add(id(self))
        return super().forward(video, text)


OPTIONS: dict[str, Sequence[Any]] = {
    "layers": (6, 2, 3, 4, 5),
    "dtype": (torch.float32, torch.bfloat16),
    "attend": (None, support.written_out),
    "dropout": (0.0, 0.1),
    "frozen": (0, 1, 2),
    "again": (0, 1),
    "between": ("nothing", "one is doubled", "kept aside", "all are added"),
    "autocast": (False, True),
    "unlike": (False, True),
}
PLAIN = {name: values[0] for name, values in OPTIONS.items()}
STACKS: dict[str, tuple[dict[str, Any], list[int]]] = {
    "alike": (PLAIN, [5]),
    "called twice": ({**PLAIN, "layers": 3, "again": 1}, [3]),
    "frozen": ({**PLAIN, "layers": 4, "frozen": 2}, [4]),
    "autocast": ({**PLAIN, "autocast": True}, [5]),
    "another attribute": ({**PLAIN, "unlike": True}, [6]),
    "one is doubled": ({**PLAIN, "between": "one is doubled"}, [5, 6]),
    "kept aside": ({**PLAIN, "between": "kept aside"}, [2, 6]),
    "all are added": ({**PLAIN, "between": "all are added"}, [5, 6]),
    "any": ({}, []),
}
"""What all examples have, and how many blocks run in each simulation: sometimes one was in vain."""

POLICIES = st.sampled_from(
    [
        NONE,
        FULL,
        Policy(),
        Policy(min_kv=13),
        ALL_LINEAR,
        Policy("linear_only", linear=("qkv", "ffn.*")),
        Policy(offload=True, keep=1),
        Policy(offload="attention"),
        Policy("full", offload=True),
        Policy(offload="inputs", keep=3),
    ]
)


@functools.lru_cache(1)
def planned_stack(items: tuple[tuple[str, Any], ...]) -> tuple[fastac.Plan, Any, dict[str, Any]]:
    drawn = dict(items)
    layers, dtype = drawn.pop("layers"), drawn.pop("dtype")
    block = partial(Noted, attend=drawn.pop("attend"), dropout=drawn.pop("dropout"))
    torch.manual_seed(0)
    model = Drawn(layers, block, **drawn | {"frozen": min(layers - 1, drawn["frozen"])}).to(dtype)
    inputs = stack_inputs(dtype=dtype)
    fastac.enable(model, "full", blocks="blocks")
    model(**inputs)  # its blocks have states now
    fastac.disable(model)
    Drawn.ran = []
    with planned.exact():
        return fastac.plan(model, inputs, blocks="blocks"), model, inputs


@pytest.mark.parametrize("name", quick(STACKS, "alike"))
def test_random_stacks(name: str) -> None:
    fixed, ran = STACKS[name]
    drawn = {key: st.just(fixed[key]) if fixed else st.sampled_from(values) for key, values in OPTIONS.items()}

    @settings(max_examples=2 if fixed else 4, derandomize=True, deadline=None, database=None)
    @given(st.fixed_dictionaries(drawn), st.lists(POLICIES, min_size=1, max_size=3))
    def check(stack: dict[str, Any], policies: Sequence[Policy]) -> None:
        if stack["between"] == "all are added":  # what is used outside of its block does not leave
            policies = [dataclasses.replace(policy, offload=False) for policy in policies]
        if stack["attend"] is not None:  # nothing of small ops can be saved
            policies = [FULL if policy.name == "attn_only" else policy for policy in policies]
        plan, model, inputs = planned_stack(tuple(stack.items()))
        assert not ran or list(map(len, Drawn.ran[: 2 * len(ran)])) == 2 * ran  # without checkpointing, and with it
        of_blocks = dict(zip(plan.within(0), itertools.cycle(policies), strict=False))
        with planned.exact():
            assert_measured(plan, model, inputs, of_blocks, blocks="blocks")

    check()


# Models of the catalogue


KINDS: dict[str, dict[str, Any]] = {
    WAN: {"dtype": torch.bfloat16, "lora": 4, "num_layers": 3},
    LTX: {},
    COGVIDEOX: {},  # video and text joined
    HUNYUAN_VIDEO: {"num_layers": 6, "num_single_layers": 6},  # two lists of blocks, and a mask whose values count
    "LTX2VideoTransformer3DModel": {},  # video and sound
    "WanVACETransformer3DModel": {},  # a second list beside the first
    "SanaVideoTransformer3DModel": {},  # linear attention
    "MochiTransformer3DModel": {},  # parts under autocast
}


@pytest.mark.parametrize("name", quick(KINDS, COGVIDEOX))
def test_models_of_the_catalogue(name: str) -> None:
    """Also with half of the blocks checkpointed."""
    model, inputs = tiny(name, **KINDS[name])
    with planned.exact():
        plan = fastac.plan(model, inputs)
        blocks = list(plan.within(0))
        half = len(blocks) // 2
        for policies in (
            [NONE] * len(blocks),
            [FULL] * len(blocks),
            [ALL_LINEAR] * len(blocks),
            [Policy()] * half + [NONE] * (len(blocks) - half),
            [Policy(offload=True, keep=1)] * len(blocks),
        ):
            assert_measured(plan, model, inputs, dict(zip(blocks, policies, strict=True)))
    none, full, attention = plan.policies[0], plan.policies[1], plan.policies[3]
    assert none.relative < attention.relative < full.relative == 1
    assert attention.held_bytes - attention.saved_bytes == full.held_bytes


def test_flops_and_copies_by_hand() -> None:
    """Of a stack whose attention is 4 products of 24 x 24 tokens, and of 24 x 6, each of width 16.

    The input of a block is copied while a later one runs forward, and back in the step of the next one, which replays
    saved attention and not the last product. Small storages stay.
    """
    model, inputs = stack(layers=4), support.stack_inputs()
    model.blocks[3].ffn = torch.nn.Sequential(torch.nn.Linear(16, 400), torch.nn.Linear(400, 16))
    with planned.exact():
        plan = fastac.plan(model, inputs, blocks="blocks")
        full, attention = plan.policies[1], plan.policies[3]
        assert full.flops - attention.flops == full.recomputed_flops - attention.recomputed_flops
        assert full.flops - attention.flops == 4 * 24 * (24 + 6) * 16 * 4
        assert plan.policies[2].flops == full.flops, "no attention is long"
        with FlopCounterMode(display=False) as forward:
            model.blocks[2](**inputs)
        size, both = inputs["video"].nbytes, planned.counted_flops(model.blocks[2], inputs)
        one = planned.row_of(plan, Policy("full", offload=True, keep=1))
        assert (one.host_bytes, one.bytes_per_flop) == (2 * size, size / forward.get_total_flops())
        saving = planned.row_of(plan, Policy(offload="inputs", keep=2))
        assert (saving.host_bytes, saving.bytes_per_flop) == (
            size,
            size / (both - 4 * 24 * (24 + 6) * 16 - 2 * 24 * 32 * 16),
        )
    assert planned.row_of(plan, Policy("full", offload=True)).host_bytes == 0


@pytest.mark.skipif(not WHOLE_PRODUCT, reason="since torch 2.15 it is copied, and may be chosen")
def test_a_product_that_is_changed_in_place_is_not_chosen() -> None:
    """It could not be replayed."""

    class Changes(AttentionBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return super().forward(self.changed(video).mul_(2), text)

    model, inputs = stack(block=Changes), stack_inputs()
    for block in model.blocks:
        block.changed = torch.nn.Linear(16, 16)
    chosen = fastac.plan(model, inputs, blocks="blocks").within(10**9)
    assert all("changed" not in policy.linear and len(policy.linear) > 3 for policy in chosen.values())
    planned.step(planned.under(model, chosen, blocks="blocks"), inputs)


# Models that are no video transformers of diffusers: causal LLMs of transformers, and UNets


Model = tuple[torch.nn.Module, dict[str, Any]]

LLM: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "use_cache": False,
}


def llama(tokens: int, *masks: str) -> Model:
    """masks: in which nothing is left out. transformers reads the values, and skips the mask."""
    inputs = dict.fromkeys(masks, torch.ones(2, tokens, dtype=torch.int64))
    return LlamaForCausalLM(LlamaConfig(**LLM)), inputs | {"input_ids": torch.randint(0, 64, (2, tokens))}


def mixtral(tokens: int) -> Model:
    """In fp32, which the fake kernel of its grouped matmul refuses."""
    model = MixtralForCausalLM(MixtralConfig(**LLM, num_local_experts=4))
    return model, {"input_ids": torch.randint(0, 64, (2, tokens))}


def unet(cls: Any, kind: str, sizes: tuple[int, ...], text: tuple[int, ...], *more: str, **options: Any) -> Model:
    """more: inputs of three numbers."""
    blocks = {"down_block_types": (f"CrossAttnDownBlock{kind}",), "up_block_types": (f"CrossAttnUpBlock{kind}",)}
    model = cls(block_out_channels=(32,), layers_per_block=1, cross_attention_dim=16, **blocks, **options)
    inputs = {"sample": torch.randn(1, *sizes), "encoder_hidden_states": torch.randn(*text, 16)}
    return model, {**inputs, "timestep": torch.tensor([3]), **{name: torch.randn(1, 3) for name in more}}


UNETS: dict[str, Callable[[], Model]] = {
    "Stable Diffusion": partial(unet, UNet2DConditionModel, "2D", (4, 8, 8), (1, 7), attention_head_dim=8),
    "AnimateDiff": partial(unet, UNetMotionModel, "Motion", (4, 2, 8, 8), (2, 7), num_attention_heads=2),
    "Stable Video Diffusion": partial(
        unet,
        UNetSpatioTemporalConditionModel,
        "SpatioTemporal",
        (2, 8, 8, 8),
        (1, 1),
        "added_time_ids",
        num_attention_heads=(2,),
        addition_time_embed_dim=16,
        projection_class_embeddings_input_dim=48,
    ),
}
CASES = {
    "llama": partial(llama, 512),
    "masked llama": partial(llama, 64, "attention_mask"),
    "mixtral": partial(mixtral, 64),
    **UNETS,
}


@pytest.mark.parametrize("name", quick(CASES, "llama", "masked llama", "mixtral", "Stable Diffusion"))
def test_prediction_is_measurement(name: str) -> None:
    """Held bytes and peak are those of the tensors that operators return."""
    model, inputs = CASES[name]()
    with planned.exact() as device:
        plan = fastac.plan(model, inputs)
        for row in (plan.policies[0], plan.policies[3]):
            trained = planned.under(model, row.policy)
            planned.step(trained, inputs)
            held, _, peak = planned.live(trained, inputs, device)
            assert row.held_bytes == pytest.approx(held, rel=0.02), row.policy
            assert row.peak_bytes - plan.states.total == pytest.approx(peak, rel=0.02), row.policy


@pytest.mark.parametrize("name", quick(UNETS, "Stable Diffusion"))
def test_what_is_within_can_be_enabled(name: str) -> None:
    """A UNet checkpoints modules beside those in its lists: a plan names them, and `enable` knows the names."""
    model, inputs = UNETS[name]()
    plan = fastac.plan(model, inputs, checkpointed=3)
    assert plan.policies[-1].recomputed_flops > 0  # of the first three that it calls
    saved = plan.policies[3].saved_bytes
    fastac.enable(model, plan.within(saved // 2))
    planned.step(model, inputs)
    assert 0 < sum(row.saved_bytes for row in fastac.report(model).rows) <= saved // 2


def test_wrappers_around_blocks() -> None:
    """fastac takes the place of torch's CheckpointWrapper, as accelerate's FSDP puts it there. So does the plan."""
    model, inputs = tiny(WAN)
    plain = fastac.plan(model, inputs).policies
    apply_activation_checkpointing(model, check_fn=lambda module: module in {*model.blocks})
    before = [block.checkpoint_fn for block in model.blocks]
    assert fastac.plan(model, inputs).policies == plain
    assert [block.checkpoint_fn for block in model.blocks] == before
