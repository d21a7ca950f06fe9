"""enable and disable: what they do to a model, what they refuse, and that a refused model is as it was."""

from __future__ import annotations

import copy
import functools
import io
import logging
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from diffusers import ModelMixin
from diffusers.configuration_utils import ConfigMixin, register_to_config
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from fastac import hook, models
from fastac.policy import Policy
from tests import support
from tests.marks import slow
from tests.model_state import state_of

WAN = "WanTransformer3DModel"


class Diffuser(ModelMixin, ConfigMixin):
    """The least that diffusers asks of a model with gradient checkpointing. bound: hands over `block.__call__`."""

    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(self, layers: int = 2, bound: bool = False) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.bound = bound
        self.blocks = torch.nn.ModuleList(support.AttentionBlock() for _ in range(layers))

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                video = self._gradient_checkpointing_func(block.__call__ if self.bound else block, video, text)
            else:
                video = block(video, text)
        return video


def diffuser(**options: Any) -> Diffuser:
    torch.manual_seed(0)
    return Diffuser(**options).train()


@pytest.fixture
def wan() -> tuple[Any, dict[str, Any]]:
    return support.build(WAN)


@pytest.fixture
def executions(attention_executions: Any) -> Any:
    """How many attention kernels one training step of a model runs; and that its step is exact."""

    def count(model: torch.nn.Module, inputs: dict[str, Any], expected: support.Tensors | None = None) -> int:
        attention_executions.clear()
        found = support.train_step(model, inputs)
        if expected is not None:
            support.assert_same(found, expected)
        return attention_executions[support.CPU_ATTENTION]

    return count


# Round trips


@pytest.mark.parametrize("policy", ["attn_only", "long_attn_only", "full", {"blocks.0": "full", "*": "attn_only"}])
def test_disable_restores_every_attribute(wan: Any, policy: Any) -> None:
    model, inputs = wan
    before = state_of(model)
    fastac.enable(model, policy)
    assert state_of(model) != before
    support.train_step(model, inputs)
    fastac.disable(model)
    assert state_of(model) == before


def test_disable_restores_the_user_s_own_checkpointing(wan: Any, executions: Any) -> None:
    model, inputs = wan

    def mine(block: Any, *args: Any) -> Any:
        return torch_checkpoint(block, *args, use_reentrant=False)

    model.enable_gradient_checkpointing(gradient_checkpointing_func=mine)
    before = state_of(model)
    fastac.enable(model)
    assert executions(model, inputs) == 4
    fastac.disable(model)
    assert state_of(model) == before
    assert model._gradient_checkpointing_func is mine
    assert executions(model, inputs) == 8


def test_disable_restores_a_switched_off_checkpointing(wan: Any) -> None:
    model, _ = wan
    model.enable_gradient_checkpointing()
    model.disable_gradient_checkpointing()
    before = state_of(model)
    fastac.enable(model)
    fastac.disable(model)
    assert state_of(model) == before


def test_disable_restores_modules_that_have_a_switch_of_their_own(executions: Any) -> None:
    """diffusers sets its function on every module with a `gradient_checkpointing`, also where there was none."""
    model, inputs = diffuser(), support.stack_inputs()
    model.blocks[1].gradient_checkpointing = False
    before = state_of(model)
    fastac.enable(model)
    assert executions(model, inputs) == 4
    fastac.disable(model)
    assert state_of(model) == before


def test_enabling_twice_is_enabling_once(wan: Any, executions: Any) -> None:
    model, inputs = wan
    before = state_of(model)
    fastac.enable(model)
    once = len(model._forward_pre_hooks)
    fastac.enable(model)
    assert len(model._forward_pre_hooks) == once
    assert executions(model, inputs) == 4
    fastac.disable(model)
    assert state_of(model) == before


def test_disable_without_enable_does_nothing(wan: Any) -> None:
    model, _ = wan
    model.enable_gradient_checkpointing()
    before = state_of(model)
    fastac.disable(model)
    fastac.disable(model)
    assert state_of(model) == before


def test_state_dict_keys_do_not_change(wan: Any) -> None:
    model, inputs = wan
    before = list(model.state_dict())
    fastac.enable(model)
    support.train_step(model, inputs)
    assert list(model.state_dict()) == before


def test_an_enabled_model_without_gradients_is_left_alone(wan: Any, executions: Any) -> None:
    model, inputs = wan
    with torch.no_grad():
        expected = model(**inputs)[0]
    fastac.enable(model)
    with torch.no_grad():
        assert torch.equal(model(**inputs)[0], expected)
    with torch.inference_mode():
        assert torch.equal(model(**inputs)[0], expected)
    assert fastac.report(model).rows[0].blocks_seen == 0


# Policies


def test_a_policy_can_be_switched(wan: Any, executions: Any) -> None:
    model, inputs = wan
    expected = support.train_step(model, inputs)
    before = state_of(model)
    for policy, count in (("attn_only", 4), ("full", 8), (Policy("attn_only", min_kv=13), 6), ("long_attn_only", 8)):
        fastac.enable(model, policy)
        assert executions(model, inputs, expected) == count, policy
    fastac.disable(model)
    assert executions(model, inputs, expected) == 4
    assert state_of(model) == before


def test_policies_per_block(wan: Any, executions: Any) -> None:
    model, inputs = wan
    expected = support.train_step(model, inputs)
    fastac.enable(model, {"blocks.0": "full", "blocks.*": "attn_only"})
    assert executions(model, inputs, expected) == 6
    assert fastac.report(model).policy == "mixed (attn_only, full)"
    (row,) = fastac.report(model).rows
    assert (row.blocks, row.blocks_seen, row.attention_calls, row.saved) == (2, 1, 2, 2)


def test_the_first_pattern_that_matches_counts(wan: Any, executions: Any) -> None:
    model, inputs = wan
    fastac.enable(model, {"blocks.1": "full", "blocks.?": "attn_only"})
    assert executions(model, inputs) == 6
    with pytest.raises(fastac.FastacError, match=r'"blocks\.1" matches no block'):
        fastac.enable(diffuser(layers=1), {"blocks.1": "full", "*": "attn_only"})


def test_policies_per_block_for_a_model_that_hands_over_bound_methods(executions: Any) -> None:
    """As PRX and Cosmos3 of diffusers do: `layer.__call__`."""
    model, inputs = diffuser(bound=True), support.stack_inputs()
    expected = support.train_step(model, inputs)
    fastac.enable(model, {"blocks.0": "full", "*": "attn_only"})
    assert executions(model, inputs, expected) == 6


def test_policies_per_block_when_a_block_was_exchanged(executions: Any) -> None:
    """A block that no pattern was matched against: an error that says so, not a KeyError."""
    model, inputs = diffuser(), support.stack_inputs()
    fastac.enable(model, {"blocks.0": "full", "*": "attn_only"})
    model.blocks[1] = support.AttentionBlock()
    with pytest.raises(fastac.FastacError, match="AttentionBlock"):
        model(**inputs)
    fastac.enable(model, {"blocks.0": "full", "*": "attn_only"})
    assert executions(model, inputs) == 6


def test_policies_per_block_when_a_block_was_compiled_after_enable(executions: Any) -> None:
    model, inputs = diffuser(), support.stack_inputs()
    expected = support.train_step(model, inputs)
    fastac.enable(model, {"blocks.0": "full", "*": "attn_only"})
    model.blocks[1] = torch.compile(model.blocks[1], backend="eager")
    torch._dynamo.reset()
    found = support.train_step(model, inputs)
    support.assert_same({name.replace("._orig_mod", ""): value for name, value in found.items()}, expected)
    assert executions(model, inputs) == 6


def test_policies_per_block_when_blocks_were_compiled_before_enable(executions: Any) -> None:
    """As accelerate's regional compilation leaves them: wrapped, in their places."""
    model, inputs = diffuser(), support.stack_inputs()
    expected = support.train_step(model, inputs)
    torch._dynamo.reset()
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="eager")
    for blocks in (None, "blocks"):
        fastac.enable(model, {"blocks.0": "full", "*": "attn_only"}, blocks=blocks)
        found = support.train_step(model, inputs)
        support.assert_same({name.replace("._orig_mod", ""): value for name, value in found.items()}, expected)
        assert executions(model, inputs) == 6


def test_policies_per_block_survive_a_deep_copy(wan: Any, executions: Any) -> None:
    model, inputs = wan
    fastac.enable(model, {"blocks.0": "full", "*": "attn_only"})
    expected = support.train_step(model, inputs)
    copied = copy.deepcopy(model)
    assert executions(copied, inputs, expected) == 6
    assert executions(model, inputs, expected) == 6
    fastac.disable(copied)
    assert executions(copied, inputs, expected) == 4
    assert executions(model, inputs, expected) == 6


def test_policies_per_block_survive_torch_save(wan: Any, executions: Any) -> None:
    model, inputs = wan
    fastac.enable(model, {"blocks.0": "full", "*": "attn_only"})
    expected = support.train_step(model, inputs)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert executions(loaded, inputs, expected) == 6
    assert fastac.report(loaded).active


def test_two_models_with_different_policies_at_once(executions: Any) -> None:
    """One class, one input signature: what is known about the one does not pass for the other."""
    (one, inputs), (other, _) = support.build(WAN), support.build(WAN)
    expected = support.train_step(one, inputs)
    fastac.enable(one, "attn_only")
    fastac.enable(other, Policy("attn_only", min_kv=13))
    for _ in range(2):
        assert executions(one, inputs, expected) == 4
        assert executions(other, inputs, expected) == 6
    assert [fastac.report(model).rows[0].saved for model in (one, other)] == [4, 2]


def test_two_models_in_one_step(wan: Any, executions: Any) -> None:
    """Both forwards before either backward, as with a student and a teacher."""
    (one, inputs), (other, _) = wan, support.build(WAN, seed=3)
    model = torch.nn.Module()
    model.one, model.other = one, other
    model.forward = lambda **kwargs: (one(**kwargs)[0], other(**kwargs)[0])
    expected = support.train_step(model, inputs)
    fastac.enable(one, "attn_only")
    fastac.enable(other, {"blocks.0": "attn_only", "*": "full"})
    assert executions(model, inputs, expected) == 4 + 6


# diffusers' own switches afterwards


def test_diffusers_own_disable_then_works_as_without_fastac(wan: Any, executions: Any) -> None:
    model, inputs = wan
    expected = support.train_step(model, inputs)
    fastac.enable(model)
    support.train_step(model, inputs)
    model.disable_gradient_checkpointing()
    assert executions(model, inputs, expected) == 4
    assert not model.is_gradient_checkpointing
    assert not fastac.report(model).active
    fastac.enable(model, "full")
    assert executions(model, inputs, expected) == 8


def test_checkpointing_enabled_again_without_fastac_is_found_at_the_next_forward(wan: Any, executions: Any) -> None:
    model, inputs = wan
    expected = support.train_step(model, inputs)
    fastac.enable(model)
    support.train_step(model, inputs)
    model.disable_gradient_checkpointing()
    model.enable_gradient_checkpointing()
    with pytest.raises(fastac.PolicyNotAppliedError, match="enabled again without fastac") as error:
        support.train_step(model, inputs)
    assert WAN in str(error.value)
    assert "fastac.enable(model)" in str(error.value)
    assert "fastac.disable(model)" in str(error.value)
    assert fastac.report(model).problem == "gradient checkpointing was enabled again without fastac: nothing is saved"
    with torch.no_grad():
        model(**inputs)
    fastac.enable(model)
    assert executions(model, inputs, expected) == 4


def test_after_disable_the_user_s_new_checkpointing_stays(wan: Any, executions: Any) -> None:
    model, inputs = wan
    fastac.enable(model)
    model.enable_gradient_checkpointing()
    fastac.disable(model)
    assert model.is_gradient_checkpointing
    assert executions(model, inputs) == 8


# Wrong calls


class Pipeline:
    def __init__(self, transformer: torch.nn.Module) -> None:
        self.transformer = transformer


class WithoutSupport(Diffuser):
    _supports_gradient_checkpointing = False


class WithoutBlocks(ModelMixin, ConfigMixin):
    _supports_gradient_checkpointing = True

    @register_to_config
    def __init__(self) -> None:
        super().__init__()
        self.gradient_checkpointing = False
        self.layers = torch.nn.ModuleList([torch.nn.Linear(2, 2)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "attention_only"}, 'policy=\'attention_only\': no such policy. There are "full", "attn_only"'),
        ({"policy": None}, "expected a name, a fastac.Policy or a mapping"),
        ({"policy": 3}, "expected a name, a fastac.Policy or a mapping"),
        ({"policy": {"blocks.0": "attn_only"}}, r"no pattern for block 'blocks\.1'"),
        ({"policy": {"layers.*": "full", "*": "attn_only"}}, r'"layers\.\*" matches no block'),
        ({"policy": {"*": "attention_only"}}, "no such policy"),
        ({"policy": {}}, "no pattern for block"),
        ({"engine": "cuda"}, "engine='cuda'.: there are tape, sac"),
    ],
)
def test_a_wrong_argument(options: dict[str, Any], message: str) -> None:
    model = diffuser()
    before = state_of(model)
    with pytest.raises(fastac.FastacError, match=message):
        fastac.enable(model, **options)
    assert state_of(model) == before


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (None, "expected a model, got NoneType"),
        (Pipeline(torch.nn.Linear(1, 1)), r"expected a model, got Pipeline\. With a pipeline.*pipe\.transformer"),
        (Diffuser, "expected a model, got"),
    ],
)
def test_what_is_no_model(model: Any, message: str) -> None:
    with pytest.raises(fastac.FastacError, match=message):
        fastac.enable(model)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (support.stack, r"AttentionStack has no enable_gradient_checkpointing.*fastac\.checkpoint\(block"),
        (WithoutSupport, "WithoutSupport has no gradient checkpointing of its own.*blocks="),
        (WithoutBlocks, r"no transformer blocks in WithoutBlocks.*enable\(model, blocks="),
    ],
)
def test_a_model_that_can_not_be_enabled(build: Any, message: str) -> None:
    model = build()
    before = state_of(model)
    with pytest.raises(fastac.FastacError, match=message):
        fastac.enable(model)
    assert state_of(model) == before


def test_a_refused_change_leaves_what_was_enabled(wan: Any, executions: Any) -> None:
    model, inputs = wan
    fastac.enable(model, "attn_only")
    before = state_of(model)
    with pytest.raises(fastac.FastacError):
        fastac.enable(model, "attention")
    assert state_of(model) == before
    assert executions(model, inputs) == 4


# Logging


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "fastac"]


def test_enable_and_the_census_of_each_block_class_are_logged_once(wan: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = wan
    caplog.set_level(logging.INFO, "fastac")
    fastac.enable(model)
    for _ in range(3):
        support.train_step(model, inputs)
    assert lines(caplog) == [
        f"{WAN}: policy attn_only, engine tape, 2 blocks",
        f"{WAN}.blocks.0: 2 attention calls, 2 saved by attn_only "
        "(aten._scaled_dot_product_flash_attention_for_cpu.default)",
    ]


def test_nothing_is_warned_about_in_a_normal_run(wan: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, inputs = wan
    caplog.set_level(logging.WARNING, "fastac")
    fastac.enable(model)
    support.train_step(model, inputs)
    fastac.report(model)
    fastac.disable(model)
    assert lines(caplog) == []


# What stands on the model


def test_the_function_on_the_model_can_be_read_and_pickled(wan: Any) -> None:
    model, _ = wan
    fastac.enable(model, Policy("attn_only", min_kv=5), engine="sac")
    function = model._gradient_checkpointing_func
    assert isinstance(function, functools.partial)
    assert function.func is fastac.checkpoint
    assert function.keywords == {"policy": Policy("attn_only", min_kv=5), "engine": "sac"}
    assert hook.enabled_function(model) is function


def test_the_sac_engine_saves_the_same(wan: Any, executions: Any) -> None:
    model, inputs = wan
    expected = support.train_step(model, inputs)
    fastac.enable(model, engine="sac")
    for _ in range(2):
        assert executions(model, inputs, expected) == 4
    assert fastac.report(model).engine == "sac"


def test_a_model_that_hands_over_bound_methods(executions: Any) -> None:
    model, inputs = diffuser(bound=True), support.stack_inputs()
    expected = support.train_step(model, inputs)
    fastac.enable(model)
    for _ in range(2):
        assert executions(model, inputs, expected) == 4
    (row,) = fastac.report(model).rows
    assert (row.blocks_seen, row.saved) == (2, 4)


def test_a_block_that_attends_nowhere_is_no_error(executions: Any) -> None:
    class AttentionFreeBlock(support.AttentionBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return F.gelu(self.ffn(video))

    model, inputs = diffuser(), support.stack_inputs()
    model.blocks[1] = AttentionFreeBlock()
    fastac.enable(model)
    for _ in range(2):
        model(**inputs).sum().backward()
    (row,) = fastac.report(model).rows
    assert (row.blocks_seen, row.attention_calls) == (2, 2)


# Models inside something


class Engine(torch.nn.Module):
    """Holds a model as `module`, and is none of torch's own wrappers."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, **kwargs: Any) -> Any:
        return self.module(**kwargs)


def peft_model(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(0)
    wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["to_q", "to_v"]))
    support.fill_zeros(wrapped)
    return wrapped


WRAPPERS: dict[str, Any] = {
    "optimized": lambda model: torch.compile(model, backend="aot_eager"),
    "peft": peft_model,
    "engine": Engine,
    "optimized peft": lambda model: torch.compile(peft_model(model), backend="aot_eager"),
}


@pytest.mark.parametrize("wrapper", ["peft", "engine", *slow("optimized", "optimized peft")])
def test_a_wrapped_model_is_enabled_inside(wrapper: str, wan: Any, executions: Any) -> None:
    """Block names are those of the model inside, whatever it is wrapped in."""
    torch._dynamo.reset()
    model, inputs = wan
    wrapped = WRAPPERS[wrapper](model)
    inner = models.unwrapped(wrapped)
    assert inner is model
    before = state_of(inner)
    expected = support.train_step(wrapped, inputs)
    for policy, count in (("attn_only", 4), ({"blocks.0": "full", "*": "attn_only"}, 6)):
        fastac.enable(wrapped, policy)
        executions(wrapped, inputs)
        assert executions(wrapped, inputs, expected if "optimized" not in wrapper else None) == count
        report = fastac.report(wrapped)
        assert (report.model_class, report.active) == (WAN, True)
    assert [row.container for row in report.rows] == ["blocks"]
    fastac.disable(wrapped)
    assert state_of(inner) == before
    assert executions(wrapped, inputs) == 4


@pytest.mark.parametrize("wrapper", ["peft", "engine"])
def test_a_wrapped_model_is_verified(wrapper: str, wan: Any) -> None:
    model, inputs = wan
    wrapped = WRAPPERS[wrapper](model)
    for per_block in (False, True):
        found = fastac.verify(wrapped, **inputs, per_block=per_block)
        assert (found.subject, found.saved, found.different) == (WAN, 4, ())
    assert not fastac.report(wrapped).active


def test_a_child_of_that_name_is_no_wrapper() -> None:
    model = torch.nn.Module()
    model.module = torch.nn.Linear(1, 1)
    assert models.unwrapped(model) is model
