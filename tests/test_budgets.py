"""Budgets: what a survey finds, how it is shared out among blocks, and that the limit holds, whatever is trained.

Each test fails when its guard in fastac/survey.py, shares.py or hook.py is taken out. How the outputs of a model are
chosen, `fastac.budget.choose`, has tests of its own; what is asked of it here holds for any choice, or is obvious.
"""

from __future__ import annotations

import copy
import io
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, inject_adapter_in_model

import fastac
from fastac import budget, hook, scopes, shares
from fastac import policy as policy_module
from fastac.budget import Output
from fastac.errors import CompiledPolicyNotAppliedError, FastacError
from fastac.policy import BlockPolicies, Policy
from fastac.shares import Share, share_out
from fastac.sizes import readable_bytes
from fastac.survey import Survey
from tests import support
from tests.live_bytes import allocated
from tests.model_state import state_of
from tests.support import CPU_ATTENTION, AttentionBlock, Tensors, assert_same, stack_inputs, train_step

HUGE = 1 << 40
W, VIDEO, TEXT = support.WIDTH, support.VIDEO_TOKENS, support.TEXT_TOKENS

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@pytest.fixture
def products() -> Iterator[Counter[str]]:
    with support.counting("aten::addmm") as counts:
        yield counts


class Model(torch.nn.Module):
    """Blocks, which get their inputs by position or by keyword."""

    keywords = False

    def __init__(self, layers: int = 3, block: Callable[[], torch.nn.Module] = AttentionBlock) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(block() for _ in range(layers))
        self.order: tuple[int, ...] = tuple(range(layers))

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for place in self.order:
            video = self.blocks[place](video=video, text=text) if self.keywords else self.blocks[place](video, text)
        return video


def twins(policy: Any, **options: Any) -> tuple[Any, Any]:
    """A model that never was under fastac, and its copy that is."""
    torch.manual_seed(0)
    plain = Model(**options)
    checked = copy.deepcopy(plain)
    fastac.enable(checked, policy, blocks="blocks")
    return plain, checked


def step_of(model: torch.nn.Module, inputs: dict[str, Any], backward: Any = None) -> Tensors:
    return train_step(model, inputs, backward=backward)


def held_in(model: torch.nn.Module, inputs: dict[str, Any]) -> int:
    """Bytes that the model holds after a forward, after which comes a backward."""
    outputs = []
    held = allocated(lambda: outputs.append(model(**inputs)))
    support.loss_of(outputs).backward()
    return held


def saved_in(model: torch.nn.Module, inputs: dict[str, Any], full: Any) -> int:
    """Bytes of saved outputs. full: the same model under full checkpointing, which keeps blocks' inputs."""
    return held_in(model, inputs) - held_in(full, inputs)


def budgets_of(model: torch.nn.Module) -> shares.Budgets:
    setting = hook.setting_of(model)
    assert setting is not None
    assert isinstance(setting.policy, BlockPolicies)
    return next(policy.budgets for policy in setting.policy.values() if isinstance(policy, Share))


def surveyed(model: torch.nn.Module, inputs: dict[str, Any]) -> dict[str, list[Output]]:
    """What a first step finds, by the names of blocks."""
    step_of(model, inputs)
    (surveys,) = budgets_of(model).running.surveyed
    return {block: [output for one in regions for output in one.outputs] for block, (_, regions) in surveys.items()}


def chosen(model: torch.nn.Module) -> dict[str, str]:
    """What the blocks save in passes such as the latest."""
    setting = hook.setting_of(model)
    assert setting is not None
    return {
        name: str(shares.decided(setting.policy_of(block)))  # type: ignore[arg-type]
        for container in hook.containers_of(model)
        for name, block in container.blocks.items()
    }


# What a survey finds


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
def test_a_survey_finds_every_output_with_its_bytes_and_flops(batch: int, dtype: torch.dtype) -> None:
    """By hand. The last Linear module is the input of no backward: torch ends the recompute before it."""
    _, model = twins(Policy.budget(HUGE))
    model.to(dtype)
    video, text, size = batch * VIDEO, batch * TEXT, dtype.itemsize

    def linear(name: str, rows: int, inner: int, columns: int, reached: bool = True) -> Output:
        return Output(name, rows * columns * size, 2 * rows * inner * columns * reached)

    def attention(keys: int) -> Output:
        # The output, and of each query and head a statistic, which is float32 always.
        return Output(
            "aten._scaled_dot_product_flash_attention_for_cpu.default",
            video * W * size + video * 2 * 4,
            2 * video * keys * 2 * W,
            keys,
        )

    expected = [
        linear("qkv", video, W, 3 * W),
        attention(VIDEO),
        linear("self_out", video, W, W),
        linear("q", video, W, W),
        linear("kv", text, W, 2 * W),
        attention(TEXT),
        linear("cross_out", video, W, W),
        linear("ffn.0", video, W, 2 * W),
        linear("ffn.2", video, 2 * W, W, reached=False),
    ]
    found = surveyed(model, stack_inputs(dtype=dtype, batch=batch))
    assert list(found) == ["blocks.0", "blocks.1", "blocks.2"]
    for outputs in found.values():
        assert [output.name for output in outputs if not output.keys] == [one.name for one in expected if not one.keys]
        assert sorted(map(str, outputs)) == sorted(map(str, expected))


def test_without_linear_modules_a_survey_finds_attention_alone() -> None:
    _, model = twins(Policy.budget(HUGE, linear=False))
    assert [[output.keys for output in outputs] for outputs in surveyed(model, stack_inputs()).values()] == [
        [VIDEO, TEXT]
    ] * 3


def test_early_stop_switched_off_reaches_everything() -> None:
    _, model = twins(Policy.budget(HUGE))
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        assert all(output.flops for outputs in surveyed(model, stack_inputs()).values() for output in outputs)


class Quantized(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return (input[..., None, :] * self.weight).sum(-1) + self.bias


class Odd(AttentionBlock):
    """Linear modules whose outputs can not be saved: changed in place, computed otherwise, or run twice anyhow."""

    def __init__(self) -> None:
        super().__init__()
        self.odd = torch.nn.Linear(W, W)
        self.quantized = Quantized(W, W)
        self.inside = torch.nn.Linear(W, W)

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        video = video + self.odd(video).mul_(2).tanh() + self.quantized(video).tanh()
        video = video + torch.utils.checkpoint.checkpoint(self.inside, video, use_reentrant=False).tanh()
        return super().forward(video, text)


def test_outputs_that_can_not_be_saved_are_no_candidates(products: Counter[str]) -> None:
    """And the next steps train."""
    plain, model = twins(Policy.budget(HUGE), block=Odd)
    inputs = stack_inputs()
    expected = step_of(plain, inputs)
    for outputs in surveyed(model, inputs).values():
        assert not {"odd", "quantized", "inside"} & {output.name for output in outputs}
        assert {"qkv", "self_out", "ffn.0"} < {output.name for output in outputs}
    for _ in range(2):
        products.clear()
        assert_same(step_of(model, inputs), expected)
        # Seven of the block, once. The odd one and the one inside run again.
        assert products["addmm"] == 3 * (7 + 2 + 2)


class Exposed(torch.nn.Module):
    """A block that hands out what a Linear module returned, which relu keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = AttentionBlock()
        self.up, self.down = torch.nn.Linear(W, 2 * W), torch.nn.Linear(2 * W, W)

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        up = self.up(self.attention(video, text))
        return self.down(torch.relu(up)), up


class Scaled(Model):
    """Changes in place what its blocks hand out."""

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        total = video.new_zeros(())
        for block in self.blocks:
            video, feature = block(video, text)
            total = total + feature.mul_(2).mean()
        return video + total


def test_output_that_is_changed_after_the_block_is_no_candidate(products: Counter[str]) -> None:
    plain, checked = twins(Policy.budget(HUGE), block=Exposed)
    plain.__class__ = checked.__class__ = Scaled
    inputs = stack_inputs()
    reference = step_of(plain, inputs)
    needed = Counter(products)
    for _ in range(3):
        products.clear()
        assert_same(step_of(checked, inputs), reference)
    assert products.total() == needed.total() + 3  # "up" of every block, and no other
    assert all("up" not in str(policy).split("linear=")[1].split("+") for policy in chosen(checked).values())


# Modules that are not called in every step, or are others by then


class Experts(torch.nn.Module):
    """Each token goes through one of a few Linear modules."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = AttentionBlock()
        self.choice = torch.nn.Linear(W, 16)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(W, W) for _ in range(16))

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        video = self.attention(video, text)
        choice = self.choice(video).argmax(-1)
        out = torch.zeros_like(video)
        for place, expert in enumerate(self.experts):
            chosen_here = choice == place
            if chosen_here.any():
                out = out.index_put((chosen_here,), torch.tanh(expert(video[chosen_here])))
        return video + out


def test_experts_that_are_called_in_some_steps() -> None:
    plain, checked = twins(Policy.budget(HUGE), block=Experts)
    for seed in range(8):
        inputs = stack_inputs(seed)
        assert_same(step_of(checked, inputs), step_of(plain, inputs))
    row = fastac.report(checked).rows[0]
    assert row.linear_saved >= 8


def test_modules_that_are_exchanged_for_others_of_their_name(products: Counter[str]) -> None:
    """Every shape of inputs is surveyed once more, and then all is saved again."""
    plain, checked = twins(Policy.budget(HUGE))
    shapes = [stack_inputs(batch=1), stack_inputs(batch=2)]
    for inputs in shapes * 2:
        assert_same(step_of(checked, inputs), step_of(plain, inputs))
    before = chosen(checked)
    for model in (plain, checked):
        for block in model.blocks:
            block.ffn[0] = copy.deepcopy(block.ffn[0])
    for again in (3 * 6, 0):
        for inputs in shapes:
            products.clear()
            reference = step_of(plain, inputs)
            needed = products.total()
            products.clear()
            assert_same(step_of(checked, inputs), reference)
            assert products.total() == needed + again
    assert chosen(checked) == before


def lora(model: torch.nn.Module) -> None:
    torch.manual_seed(1)
    inject_adapter_in_model(LoraConfig(target_modules=["qkv", "q"], init_lora_weights=False), model)


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("steps", [1, 2])
def test_adapter_that_comes_as_soon_as_there_was_a_survey(steps: int, copied: bool, products: Counter[str]) -> None:
    """What was decided was not used yet, or not by this copy."""
    plain, checked = twins(Policy.budget(HUGE))
    inputs = stack_inputs()
    for _ in range(steps):
        step_of(checked, inputs)
    if copied:
        assert chosen(checked)
        checked = copy.deepcopy(checked)
    lora(plain)
    lora(checked)
    for again in (None, 0, 0):
        products.clear()
        reference = step_of(plain, inputs)
        needed = products.total()
        products.clear()
        assert_same(step_of(checked, inputs), reference)
        assert again is None or products.total() == needed
    assert "qkv.lora_A.default" in chosen(checked)["blocks.0"]


def test_modules_whose_parent_is_exchanged(products: Counter[str]) -> None:
    plain, checked = twins(Policy.budget(HUGE))
    inputs = stack_inputs()
    for _ in range(2):
        step_of(checked, inputs)
    held_on_to = [block.ffn for block in checked.blocks]
    for block in checked.blocks:
        block.ffn = copy.deepcopy(block.ffn)
    reference = step_of(plain, inputs)
    for again in (3 * 6, 0):
        products.clear()
        assert_same(step_of(checked, inputs), reference)
        assert products.total() == 3 * 7 + again
    assert held_on_to


@pytest.mark.parametrize("limit", [HUGE, 40_000], ids=str)
def test_adapters_that_come_and_go(limit: int) -> None:
    """The budget is shared out anew among the Linear modules that there are then."""
    plain, checked = twins(Policy.budget(limit))
    inputs = stack_inputs()
    for change in (
        lambda model: inject_adapter_in_model(LoraConfig(target_modules=["qkv", "q"], init_lora_weights=False), model),
        lambda model: setattr(model.blocks[1], "qkv", model.blocks[1].qkv.get_base_layer()),
    ):
        for _ in range(3):
            assert_same(step_of(checked, inputs), step_of(plain, inputs))
        before = chosen(checked)
        torch.manual_seed(1)
        change(plain)
        torch.manual_seed(1)
        change(checked)
        assert_same(step_of(checked, inputs), step_of(plain, inputs))
        for _ in range(2):
            assert_same(step_of(checked, inputs), step_of(plain, inputs))
        assert chosen(checked) != before
        assert "qkv.base_layer" in chosen(checked)["blocks.0"]


def test_attention_that_can_not_be_saved_is_an_error_under_a_budget() -> None:
    def decomposed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.softmax(query @ key.mT, -1) @ value

    _, model = twins(Policy.budget(HUGE), block=lambda: AttentionBlock(attend=decomposed))
    with pytest.raises(fastac.PolicyNotAppliedError, match=r"Model\.blocks\.0"):
        step_of(model, stack_inputs())


# Steps


BUDGETS = {
    "nothing": Policy.budget(1),
    "one of them": Policy.budget(3 * W * VIDEO * 4),
    "some": Policy.budget(20_000),
    "per block": Policy.budget(per_block=8_000),
    "attention": Policy.budget(20_000, linear=False),
    "everything": Policy.budget(HUGE),
    "everything per block": Policy.budget(per_block=HUGE),
    "mixed": {"blocks.0": "full", "blocks.1": Policy.budget(6_000), "*": Policy.budget(HUGE)},
    "mixed with attn_only": {"blocks.0": "attn_only", "*": Policy.budget(per_block=4_000)},
}


def limit_of(policy: Any) -> int | None:
    """Bytes that three blocks may hold."""
    if isinstance(policy, dict):
        return None
    return policy.limit * (3 if policy.per_block else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", BUDGETS)
def test_steps_are_exact_and_within_the_limit(name: str, dtype: torch.dtype) -> None:
    policy = BUDGETS[name]
    plain, model = twins(policy)
    full = copy.deepcopy(plain)
    fastac.enable(full, "full", blocks="blocks")
    for one in (plain, model, full):
        one.to(dtype)
    inputs = stack_inputs(dtype=dtype)
    expected = step_of(plain, inputs)
    held = []
    for _ in range(3):
        assert_same(step_of(model, inputs), expected)
        held.append(saved_in(model, inputs, full))
    limit = limit_of(policy)
    assert len(set(held)) == 1
    assert limit is None or held[0] <= limit
    assert (held[0] == 0) == (name == "nothing")
    if name.startswith("everything"):
        rows = 3 * W + W + W + W + 2 * W + W + W  # of all but ffn.2, which recompute does not get to
        assert held[0] == 3 * ((rows * VIDEO + 2 * W * TEXT) * dtype.itemsize + 2 * 2 * VIDEO * 4)


def test_the_first_step_saves_nothing_and_the_next_runs_everything_once(
    products: Counter[str], attention_executions: Counter[str]
) -> None:
    plain, model = twins(Policy.budget(HUGE))
    inputs = stack_inputs()
    expected = step_of(plain, inputs)
    for multiplied, attended in ((3 * 13, 12), (3 * 7, 6), (3 * 7, 6)):
        products.clear()
        attention_executions.clear()
        assert_same(step_of(model, inputs), expected)
        assert (products["addmm"], attention_executions[CPU_ATTENTION]) == (multiplied, attended)


def test_a_survey_holds_nothing_after_its_forward() -> None:
    _, model = twins(Policy.budget(HUGE))
    full = copy.deepcopy(model)
    fastac.enable(full, "full", blocks="blocks")
    assert saved_in(model, stack_inputs(), full) == 0


def test_dropout_in_a_survey_and_after(products: Counter[str]) -> None:
    plain, model = twins(Policy.budget(HUGE), block=lambda: AttentionBlock(dropout=0.3))
    inputs = stack_inputs()
    expected = step_of(plain, inputs)
    for _ in range(3):
        assert_same(step_of(model, inputs), expected)


def test_a_budget_that_is_too_small_says_so(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = twins(Policy.budget(700))
    inputs = stack_inputs()
    with caplog.at_level(logging.INFO, "fastac"):
        for _ in range(3):
            assert_same(step_of(model, inputs), step_of(plain, inputs))
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings == ["budget(700 B): nothing is saved: no output of a block is small enough, and recomputed"]
    assert set(chosen(model).values()) == {"full"}


# Passes


@pytest.mark.parametrize("watched", [True, False], ids=["model called", "forward called"])
@pytest.mark.parametrize("keywords", [False, True])
def test_every_input_shape_has_a_plan_of_its_own(keywords: bool, watched: bool) -> None:
    """Shapes alternate. What fits for the small one is too much for the large."""
    limit = 40_000
    plain, model = twins(Policy.budget(limit))
    full = copy.deepcopy(plain)
    fastac.enable(full, "full", blocks="blocks")
    for one in (plain, model, full):
        one.keywords = keywords
    shapes = [stack_inputs(batch=batch) for batch in (1, 4)]
    expected = [step_of(plain, inputs) for inputs in shapes]
    if not watched:
        model._forward_pre_hooks.clear()  # as where somebody calls model.forward
    for i in (0, 1, 0, 1, 1, 0, 0):
        assert_same(step_of(model, shapes[i]), expected[i])
    held = [saved_in(model, inputs, full) for inputs in shapes]
    assert all(0 < one <= limit for one in held)
    assert len({tuple(one.chosen.items()) for one in budgets_of(model).passes.values()}) == 2


class TextFirst(torch.nn.Module):
    """The blocks that are called first see the text alone, whose length is always the same."""

    def __init__(self) -> None:
        super().__init__()
        self.text_blocks = torch.nn.ModuleList([AttentionBlock()])
        self.video_blocks = torch.nn.ModuleList([AttentionBlock(), AttentionBlock()])

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.text_blocks:
            text = block(text, text)
        for block in self.video_blocks:
            video = block(video, text)
        return video


def test_a_pass_is_told_by_the_inputs_of_the_model() -> None:
    limit = 40_000
    torch.manual_seed(0)
    plain = TextFirst()
    model, full = copy.deepcopy(plain), copy.deepcopy(plain)
    for one, policy in ((model, Policy.budget(limit)), (full, "full")):
        fastac.enable(one, policy, blocks=["text_blocks", "video_blocks"])
    small, large = stack_inputs(), stack_inputs()
    large["video"] = torch.randn(1, 8 * VIDEO, W).requires_grad_()
    for inputs in (small, large, small, large, small, large):
        assert_same(step_of(model, inputs), step_of(plain, inputs))
        assert saved_in(model, inputs, full) <= limit


@pytest.mark.parametrize("watched", [True, False], ids=["model called", "forward called"])
def test_blocks_that_are_skipped_and_added(watched: bool) -> None:
    """Layer drop. A block that was never seen is watched first; all together are within the limit at all times."""
    limit = 3 * W * VIDEO * 4
    plain, model = twins(Policy.budget(limit))
    full = copy.deepcopy(plain)
    fastac.enable(full, "full", blocks="blocks")
    inputs = stack_inputs()

    def run(model: Any) -> Any:
        return model if watched else (lambda **inputs: model.forward(**inputs))

    for order in ((0, 2), (1, 2), (0, 2), (0, 1, 2), (2,), (1,), (0, 2), (0, 1, 2), (0, 1), (1, 2), (0, 1, 2)):
        plain.order = model.order = full.order = order
        assert_same(step_of(run(model), inputs), step_of(run(plain), inputs))
        assert_same(step_of(model, inputs), step_of(plain, inputs))
        if watched:
            assert saved_in(model, inputs, full) <= limit


def greedy(blocks: Any, limit: int) -> dict[str, budget.Choice]:
    """What fits, by itself right: all outputs of a name, and all attention over at least so many keys."""
    found = {}
    for block, outputs in blocks.items():
        names, min_kv, size, avoided = [], None, 0, 0
        for bound in sorted({one.keys for one in outputs if one.keys}, reverse=True):
            added = [one for one in outputs if one.keys == bound]
            if sum(one.bytes for one in added) > limit:
                break
            min_kv, limit, size = bound, limit - sum(one.bytes for one in added), size + sum(one.bytes for one in added)
            avoided += sum(one.flops for one in added)
        for name in dict.fromkeys(one.name for one in outputs if not one.keys and one.flops):
            added = [one for one in outputs if one.name == name]
            if sum(one.bytes for one in added) <= limit:
                names.append(name)
                limit, size = limit - sum(one.bytes for one in added), size + sum(one.bytes for one in added)
                avoided += sum(one.flops for one in added)
        found[block] = budget.Choice(min_kv, tuple(names), size, avoided)
    return found


@pytest.mark.parametrize("order", [(0, 0, 0), (0, 1, 0, 1), (2, 1, 0)], ids=str)
def test_blocks_that_are_called_several_times_or_in_another_order(
    order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is of one forward of the model, in which each call holds outputs of its own."""
    monkeypatch.setattr(budget, "choose", greedy)
    limit = 4 * W * VIDEO * 4
    plain, model = twins(Policy.budget(limit))
    full = copy.deepcopy(plain)
    fastac.enable(full, "full", blocks="blocks")
    plain.order = model.order = full.order = order
    inputs = stack_inputs()
    for _ in range(3):
        assert_same(step_of(model, inputs), step_of(plain, inputs))
        assert saved_in(model, inputs, full) <= limit
    assert saved_in(model, inputs, full) > 0


def decided_within(model: torch.nn.Module, inputs: dict[str, Any], steps: int) -> bool:
    for _ in range(steps):
        step_of(model, inputs)
    return bool(budgets_of(model).running.chosen)


def test_evaluation_in_between() -> None:
    plain, model = twins(Policy.budget(HUGE))
    inputs, other = stack_inputs(), stack_inputs(batch=3)
    for _ in range(3):
        assert_same(step_of(model, inputs), step_of(plain, inputs))
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                assert torch.equal(model(**inputs), plain(**inputs))
                assert torch.equal(model(**other), plain(**other))
    assert set(chosen(model).values()) == {"attn_only(linear=qkv+self_out+q+kv+cross_out+ffn.0)"}, "one step was enough"


def test_survey_under_no_grad_does_not_count() -> None:
    """As fastac.checkpoint may be called: torch asks for contexts there that nobody enters."""
    _, model = twins(Policy.budget(HUGE))
    inputs = stack_inputs()
    step_of(model, inputs)
    policy = hook.setting_of(model).policy
    with torch.no_grad():
        fastac.checkpoint(model.blocks[0], *inputs.values(), policy=policy)
    (_, regions) = budgets_of(model).running.surveyed[-1]["blocks.0"]
    assert len(regions) == 1
    assert decided_within(model, inputs, 1)


def test_evaluation_between_a_forward_and_its_backward() -> None:
    """It is not recomputed, and what it could save is not counted: a budget that just holds all goes as far as ever."""
    every = 3 * ((9 * W * VIDEO + 2 * W * TEXT + 2 * W * VIDEO) * 4 + 2 * 2 * VIDEO * 4)
    _, model = twins(Policy.budget(every))
    inputs = stack_inputs()
    loss = support.loss_of([model(**inputs)])
    with torch.no_grad():
        model(**inputs)
        for block in model.blocks:
            fastac.checkpoint(block, *inputs.values(), policy=hook.setting_of(model).policy)  # type: ignore[union-attr]
    loss.backward()
    step_of(model, inputs)
    assert set(chosen(model).values()) == {"attn_only(linear=qkv+self_out+q+kv+cross_out+ffn.0)"}


@pytest.mark.parametrize("forwards", [1, 3])
def test_a_forward_whose_backward_never_comes(forwards: int) -> None:
    """Also one in every step, as of a teacher or for a log, and of inputs that are never trained on."""
    plain, model = twins(Policy.budget(HUGE))
    inputs = stack_inputs()
    for _ in range(3):

        def backward(loss: torch.Tensor) -> None:
            for _ in range(forwards):
                model(**inputs)
            loss.backward()

        model(**stack_inputs(batch=2))
        found = step_of(model, inputs, backward)
        assert_same(found, step_of(plain, inputs))
    assert decided_within(model, inputs, 0) or decided_within(model, inputs, 1)
    budgets = budgets_of(model)
    assert [bool(one.chosen) for one in budgets.passes.values()] == [False, True]


def test_surveys_of_forwards_that_are_dropped_do_not_heap_up() -> None:
    _, model = twins(Policy.budget(HUGE))
    for _ in range(50):
        model(**stack_inputs())
    assert len(budgets_of(model).running.surveyed) <= shares.ATTEMPTS + 1


def test_gradients_accumulate_and_forwards_come_in_pairs() -> None:
    plain, model = twins(Policy.budget(HUGE))
    first, second = stack_inputs(1), stack_inputs(2)

    def run(model: torch.nn.Module) -> Tensors:
        model.zero_grad()
        (support.loss_of(model(**first)) + support.loss_of(model(**second))).backward()
        support.loss_of(model(**first)).backward()
        return support.gradients(support.leaves_of(model, {}))

    expected = run(plain)
    for _ in range(3):
        assert_same(run(model), expected)
    assert decided_within(model, first, 0)


class Fails(AttentionBlock):
    failing = False

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        video = self.self_out(video).tanh()
        if self.failing:
            raise ZeroDivisionError("on purpose")
        return super().forward(video, text)


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("in_recompute", [False, True])
def test_exception_in_the_middle_of_a_pass(steps: int, in_recompute: bool, products: Counter[str]) -> None:
    plain, model = twins(Policy.budget(HUGE), block=Fails)
    inputs = stack_inputs()
    for _ in range(steps):
        step_of(model, inputs)

    def backward(loss: torch.Tensor) -> None:
        model.blocks[1].failing = True
        loss.backward()

    model.blocks[1].failing = not in_recompute
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        step_of(model, inputs, backward)
    model.blocks[1].failing = False
    assert scopes.thread.scope is None
    for _ in range(3):
        products.clear()
        assert_same(step_of(model, inputs), step_of(plain, inputs))
    assert products["addmm"] == 2 * 3 * 8
    assert "None" not in chosen(model).values()


@pytest.mark.parametrize("trained", [1, 2])
def test_blocks_that_are_never_recomputed(trained: int, products: Counter[str]) -> None:
    """Nothing before the first trained parameter has gradients: the others have the whole budget."""
    plain, model = twins(Policy.budget(HUGE))
    inputs = {name: tensor.detach() for name, tensor in stack_inputs().items()}
    for one in (plain, model):
        for block in one.blocks[:-trained]:
            block.requires_grad_(False)
    for multiplied in (21 + 6 * trained, 21, 21):
        products.clear()
        found = step_of(model, inputs)
        assert products["addmm"] == multiplied
        assert_same(found, step_of(plain, inputs))
    assert list(chosen(model).values()).count("None") == 3 - trained, "these are watched on"
    for one in (plain, model):
        one.requires_grad_(True)
    for multiplied in (21 + 6 * (3 - trained), 21):  # those that train now as well
        products.clear()
        found = step_of(model, inputs)
        assert products["addmm"] == multiplied
        assert_same(found, step_of(plain, inputs))


def test_gradients_of_a_part_do_not_decide_for_the_rest() -> None:
    """Adaptive loss weights ask for the gradient at the last layer first, through no other block."""
    plain, model = twins(Policy.budget(HUGE))
    inputs = stack_inputs()

    def backward(model: torch.nn.Module) -> Callable[[torch.Tensor], None]:
        def run(loss: torch.Tensor) -> None:
            torch.autograd.grad(loss, model.blocks[-1].qkv.weight, retain_graph=True)
            loss.backward()

        return run

    for _ in range(3):
        assert_same(step_of(model, inputs, backward(model)), step_of(plain, inputs, backward(plain)))
    assert not {"full", "None"} & set(chosen(model).values())


@pytest.mark.parametrize("when", [0, 1, 2])
def test_copies_train_on_their_own(when: int, products: Counter[str]) -> None:
    """As for an exponential moving average: what one learns, the other does not get to know."""
    plain, model = twins(Policy.budget(HUGE))
    inputs = stack_inputs()
    expected = step_of(plain, inputs)
    for _ in range(when):
        step_of(model, inputs)
    copied = copy.deepcopy(model)
    assert budgets_of(copied) is not budgets_of(model)
    for _ in range(2):
        assert_same(step_of(copied, inputs), expected)
    assert len(budgets_of(model).passes) == min(when, 1)
    for one in (model, copied):
        assert_same(step_of(one, inputs), expected)
        assert_same(step_of(one, inputs), expected)
        products.clear()
        assert_same(step_of(one, inputs), expected)
        assert products["addmm"] == 3 * 7


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("blocks", [None, "blocks"])
def test_models_are_written_and_read_with_their_budgets(steps: int, blocks: str | None, products: Counter[str]) -> None:
    model, inputs = support.build("WanTransformer3DModel")
    expected = step_of(model, inputs)
    products.clear()
    step_of(model, inputs)
    needed = products["addmm"]
    fastac.enable(model, Policy.budget(HUGE), blocks=blocks)
    for _ in range(steps):
        step_of(model, inputs)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert list(loaded.state_dict()) == list(model.state_dict())
    for _ in range(3 - steps):
        products.clear()
        assert_same(step_of(loaded, inputs), expected)
    assert products["addmm"] == needed


# Models of diffusers


@pytest.mark.parametrize("name", ["HunyuanVideoTransformer3DModel", "Kandinsky5Transformer3DModel"])
def test_models_with_two_kinds_of_blocks(name: str) -> None:
    """One budget for all of them."""
    model, inputs = support.build(name)
    expected = step_of(model, inputs)
    full, _ = support.build(name)
    fastac.enable(full, "full")
    limit = 30_000
    fastac.enable(model, Policy.budget(limit))
    for _ in range(3):
        assert_same(step_of(model, inputs), expected)
    assert len(budgets_of(model).running.chosen) == sum(len(one.blocks) for one in hook.containers_of(model))
    assert 0 < saved_in(model, inputs, full) <= limit


def test_enable_and_disable_leave_a_model_as_it_was() -> None:
    for blocks in (None, "blocks"):
        model, inputs = support.build("WanTransformer3DModel")
        before, hooks = state_of(model), len(model._forward_pre_hooks)
        for _ in range(2):
            fastac.enable(model, Policy.budget(HUGE), blocks=blocks)
            step_of(model, inputs)
            step_of(model, inputs)
        assert sum(isinstance(getattr(one, "__self__", None), shares.Budgets) for one in _hooks_of(model)) == 1
        fastac.disable(model)
        assert state_of(model) == before
        assert len(model._forward_pre_hooks) == hooks


def _hooks_of(model: torch.nn.Module) -> list[Any]:
    return [one for module in model.modules() for one in module._forward_pre_hooks.values()]


@pytest.mark.parametrize("blocks", [None, "blocks"])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_verify_of_a_budget(steps: int, blocks: str | None, products: Counter[str]) -> None:
    """Before it was shared out and after; the model goes on as it was."""
    model, inputs = support.build("WanTransformer3DModel")
    expected = step_of(model, inputs)
    fastac.enable(model, Policy.budget(HUGE), blocks=blocks)
    for _ in range(steps):
        step_of(model, inputs)
    before = chosen(model)
    found = fastac.verify(model, **inputs)
    linears = sum(isinstance(one, torch.nn.Linear) for one in model.blocks.modules())
    assert linears - 2 <= found.linear_saved <= linears
    assert found.saved == 4
    assert not found.different
    assert chosen(model) == before
    for _ in range(3 - steps):
        assert_same(step_of(model, inputs), expected)
    with support.counting("aten::addmm") as counts:
        step_of(model, inputs)
        saved = counts["addmm"]
        fastac.disable(model)
        counts.clear()
        step_of(model, inputs)
        assert saved == counts["addmm"]


def test_verify_of_a_budget_that_is_given_to_it() -> None:
    model, inputs = support.build("WanTransformer3DModel")
    before = state_of(model)
    found = fastac.verify(model, **inputs, policy=Policy.budget(20_000))
    assert 0 < found.saved_bytes <= 20_000
    assert state_of(model) == before
    mixed = fastac.verify(model, **inputs, policy={"blocks.0": "full", "*": Policy.budget(HUGE, linear=False)})
    assert (mixed.saved, mixed.linear_saved) == (2, 0)
    per_block = fastac.verify(model, **inputs, policy=Policy.budget(per_block=HUGE), per_block=True)
    assert not per_block.different


def test_report_before_while_and_after() -> None:
    full, _ = support.build("WanTransformer3DModel")
    fastac.enable(full, "full")
    model, inputs = support.build("WanTransformer3DModel")
    fastac.enable(model, Policy.budget(HUGE))
    for _ in range(2):
        assert "2 blocks are watched first" in " ".join(fastac.report(model).remarks)
        loss = support.loss_of(model(**inputs))
    (row,) = fastac.report(model).rows
    assert (row.attention_calls, row.saved, row.linear_saved) == (4, 0, 0)
    loss.backward()
    step_of(model, inputs)
    remarks = " ".join(fastac.report(model).remarks)
    assert "the budget was shared out: attention in 2 of 2 blocks, attn1.to_q in 2, " in remarks
    (row,) = fastac.report(model).rows
    assert row.held_bytes == row.saved_bytes + row.linear_bytes == saved_in(model, inputs, full) > 0
    assert f"saved in the latest forward: {readable_bytes(row.held_bytes)}, under budget(1.0 TiB)" in remarks
    assert "watched first" not in remarks
    step_of(model, inputs)
    report = fastac.report(model)
    (row,) = report.rows
    assert row.saved == 4
    assert row.linear_saved > 10
    assert "budget(1.0 TiB)" in report.policy
    assert "outputs of Linear saved" in str(report)


def test_a_share_is_printed_as_the_budget_it_comes_from() -> None:
    _, model = twins(Policy.budget("3MiB", linear=False))
    setting = hook.setting_of(model)
    assert str(setting.policy) == "budget(3.0 MiB, linear=False)"
    assert hook.policy_as_given(model, setting) == {
        f"blocks.{i}": Policy.budget("3MiB", linear=False) for i in range(3)
    }


def test_fastac_disable_makes_a_budget_full(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of Linear modules are not looked for either."""
    monkeypatch.setattr(policy_module, "DISABLED", True)
    for policy in (Policy.budget(HUGE), Policy("attn_only", linear=("no such name",))):
        plain, model = twins(policy)
        assert_same(step_of(model, stack_inputs()), step_of(plain, stack_inputs()))
        assert str(hook.setting_of(model).policy) == "full"


# Refused


def test_a_budget_of_checkpoint_itself_is_refused() -> None:
    with pytest.raises(
        FastacError, match=r"of AttentionBlock: a budget is shared out among the blocks.*fastac\.enable"
    ):
        fastac.checkpoint(AttentionBlock(), **stack_inputs(), policy=Policy.budget("1GiB"))


def test_engine_sac_is_refused() -> None:
    model, inputs = support.build("WanTransformer3DModel")
    fastac.enable(model, Policy.budget("1GiB"), engine="sac")
    with pytest.raises(FastacError, match=r'engine="sac"'):
        step_of(model, inputs)


@pytest.mark.parametrize("whole", [False, True])
def test_compiled_code_is_refused(whole: bool) -> None:
    """But for a budget of attention alone, around compiled blocks."""
    torch._dynamo.reset()
    _, model = twins(Policy.budget(HUGE))
    inputs = stack_inputs()
    if whole:
        with pytest.raises(CompiledPolicyNotAppliedError, match="is seen in eager mode alone"):
            step_of(torch.compile(model, backend="aot_eager"), inputs)
        return
    for block in model.blocks:
        block.compile(backend="aot_eager")
    with pytest.raises(FastacError, match=r"runs compiled code.*Policy\.budget\(\.\.\., linear=False\)"):
        step_of(model, inputs)


def test_attention_of_compiled_blocks_is_shared_out(attention_executions: Counter[str]) -> None:
    torch._dynamo.reset()
    plain, model = twins(Policy.budget(HUGE, linear=False), layers=2)
    inputs = stack_inputs()
    for block in model.blocks:
        block.compile(backend="aot_eager")
    expected = step_of(plain, inputs)
    for attended in (None, None, 4, 4):  # compiled blocks are looked at twice under each policy
        attention_executions.clear()
        found = step_of(model, inputs)
        assert attended is None or attention_executions[CPU_ATTENTION] == attended
        assert all(support.relative_error(found[name], expected[name]) < 1e-5 for name in expected)


# How it is shared out, of surveys that are made up


def survey(*outputs: tuple[str, int, int, int], communicated: int = 0) -> Survey:
    found = {place: Output(*values) for place, values in enumerate(outputs)}
    return Survey(found, communicated, len(outputs))


SURVEYS = {
    "blocks.0": survey(("sdpa", 100, 10_000, 64), ("ffn.0", 50, 4_000, 0), communicated=30),
    "blocks.1": survey(("sdpa", 100, 10_000, 64), ("sdpa", 100, 100, 8), communicated=30),
}


@pytest.mark.parametrize(
    ("limit", "per_block", "expected"),
    [
        # Collectives first, as they are not weighed: 60 in all, or 30 of each block.
        (310, False, ["attn_only(linear=ffn.0)", "attn_only(min_kv=9)"]),
        (260, False, ["attn_only", "attn_only(min_kv=9)"]),
        (60, False, ["attn_only(min_kv=65)", "attn_only(min_kv=65)"]),
        (59, False, ["linear_only(collectives='recompute', linear=ffn.0)", "full"]),
        (180, True, ["attn_only(linear=ffn.0)", "attn_only(min_kv=9)"]),
        (179, True, ["attn_only", "attn_only(min_kv=9)"]),
        (29, True, ["full", "full"]),
    ],
)
def test_collectives_count_first(limit: int, per_block: bool, expected: list[str]) -> None:
    policy = Policy.budget(per_block=limit) if per_block else Policy.budget(limit)
    found = share_out(policy, SURVEYS)
    assert [str(one) for one in found.values()] == expected


def test_each_budget_is_for_its_own_blocks() -> None:
    """Two of a model: neither is shared out among the blocks of the other."""
    policy = {"blocks.0": Policy.budget(HUGE), "*": Policy.budget(2 * W * VIDEO * 4)}
    plain, model = twins(policy)
    full = copy.deepcopy(plain)
    fastac.enable(full, "full", blocks="blocks")
    for _ in range(3):
        step_of(model, stack_inputs())
    assert chosen(model)["blocks.0"] == "attn_only(linear=qkv+self_out+q+kv+cross_out+ffn.0)"
    only_first = copy.deepcopy(plain)
    fastac.enable(only_first, policy | {"*": "full"}, blocks="blocks")
    for _ in range(3):
        step_of(only_first, stack_inputs())
    rest = saved_in(model, stack_inputs(), full) - saved_in(only_first, stack_inputs(), full)
    assert 0 < rest <= 2 * W * VIDEO * 4


def test_calls_over_as_many_keys_are_saved_together_or_not() -> None:
    """What is not chosen has fewer keys than what is: a bound on keys tells them apart."""
    found = share_out(Policy.budget(100), {"b": survey(("sdpa", 100, 9_000, 64), ("sdpa", 100, 9_000, 63))})
    assert str(found["b"]) == "attn_only(min_kv=64)"


def test_verification_block_by_block_needs_what_was_decided() -> None:
    """Alone, each block would be given the budget of all."""
    model, inputs = support.build("WanTransformer3DModel")
    fastac.enable(model, Policy.budget(HUGE))
    with pytest.raises(FastacError, match=r"a budget of all blocks is shared out in a step of the whole model"):
        fastac.verify(model, per_block=True, **inputs)
    for _ in range(2):
        support.loss_of(model(**inputs)).backward()
    assert fastac.verify(model, per_block=True, **inputs).linear_saved > 10
