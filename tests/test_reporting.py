"""The report: what was saved and recomputed in the latest forward, to the byte, and what is wrong if something is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch._functorch.config

import fastac
from fastac.policy import Policy
from fastac.verify import readable_bytes
from tests import support
from tests.compiler import fresh_compiler as fresh_compiler
from tests.compiler import kernel_folder as kernel_folder

WAN = "WanTransformer3DModel"
CPU_OP = "aten._scaled_dot_product_flash_attention_for_cpu"


@pytest.fixture
def wan() -> tuple[Any, dict[str, Any]]:
    return support.build(WAN)


def bytes_of(batch: int, heads: int, queries: int, dim: int) -> int:
    """Output and logsumexp of one attention call in float32."""
    return 4 * batch * heads * queries * (dim + 1)


def test_what_attn_only_saved(wan: Any) -> None:
    model, inputs = wan
    fastac.enable(model)
    support.train_step(model, inputs)
    report = fastac.report(model)
    assert (report.model_class, report.policy, report.engine) == (WAN, "attn_only", "tape")
    assert report.active
    assert report.problem == ""
    (row,) = report.rows
    assert (row.container, row.block_class, row.blocks, row.blocks_seen) == ("blocks", "WanTransformerBlock", 2, 2)
    assert (row.attention_calls, row.saved, row.recomputed) == (4, 4, 0)
    assert row.ops == (CPU_OP,)
    # 2 blocks of self- and cross-attention; 128 video tokens are the queries of both.
    assert row.saved_bytes == 4 * bytes_of(batch=1, heads=2, queries=128, dim=12)


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_what_a_bound_on_the_keys_left_to_recomputation(wan: Any, engine: str) -> None:
    model, inputs = wan
    fastac.enable(model, Policy("attn_only", min_kv=100), engine=engine)
    support.train_step(model, inputs)
    report = fastac.report(model)
    assert report.policy == "attn_only(min_kv=100)"
    (row,) = report.rows
    assert (row.attention_calls, row.saved, row.recomputed) == (4, 2, 2)
    assert row.saved_bytes == 2 * bytes_of(batch=1, heads=2, queries=128, dim=12)


class Masked(support.AttentionBlock):
    """Attends to the text tokens that a mask leaves, as Mochi does: how many keys there are no shape tells."""

    def forward(self, video: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return super().forward(video, text[:, mask])


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_lengths_that_depend_on_values_are_reported_as_they_are(engine: str, attention_executions: Any) -> None:
    torch.manual_seed(0)
    model = torch.nn.ModuleList([Masked()])
    model.forward = lambda **inputs: model[0](*inputs.values())
    inputs = support.stack_inputs()
    policy = Policy("attn_only", min_kv=4)
    fastac.enable(model, policy, blocks="0", engine=engine)
    for valid, saved in ((5, 2), (3, 1), (5, 2), (4, 2)):
        here = inputs | {"mask": torch.arange(support.TEXT_TOKENS) < valid}
        attention_executions.clear()
        support.train_step(model, here)
        (row,) = fastac.report(model).rows
        assert (row.attention_calls, row.saved) == (2, saved)
        assert row.saved_bytes == saved * bytes_of(batch=1, heads=2, queries=support.VIDEO_TOKENS, dim=8)
        assert attention_executions == {support.CPU_ATTENTION: 4 - saved}
        assert fastac.verify(model[0], *here.values(), policy=policy, engine=engine).saved == saved


def test_bytes_are_those_of_the_latest_forward(wan: Any) -> None:
    model, inputs = wan
    fastac.enable(model)
    sizes = []
    for batch in (1, 2, 1):
        repeated = {
            name: value.detach().repeat(batch, *[1] * (value.dim() - 1)) if isinstance(value, torch.Tensor) else value
            for name, value in inputs.items()
        }
        model(**repeated)
        sizes.append(fastac.report(model).rows[0].saved_bytes)
    assert sizes == [sizes[0], 2 * sizes[0], sizes[0]]


def test_a_forward_without_gradients_does_not_change_the_report(wan: Any) -> None:
    model, inputs = wan
    fastac.enable(model)
    support.train_step(model, inputs)
    before = fastac.report(model)
    with torch.no_grad():
        model(**inputs)
    assert fastac.report(model) == before


def test_the_table(wan: Any) -> None:
    model, inputs = wan
    fastac.enable(model)
    support.train_step(model, inputs)
    text = str(fastac.report(model))
    assert text.startswith(f"{WAN}: policy attn_only, engine tape")
    for part in ("blocks x 2", "WanTransformerBlock", "attention calls", "saved", "recomputed", "52.0 KiB", CPU_OP):
        assert part in text
    assert max(map(len, text.splitlines())) <= 140
    assert "\x1b" not in text


def test_before_the_first_forward(wan: Any) -> None:
    model, _ = wan
    fastac.enable(model)
    report = fastac.report(model)
    assert report.active
    assert report.problem.startswith("no forward with gradients was seen yet")
    assert "blocks x 2 (0 seen)" in str(report)
    assert "none seen" in str(report)


def test_a_model_that_was_never_enabled(wan: Any) -> None:
    model, inputs = wan
    support.train_step(model, inputs)
    report = fastac.report(model)
    assert not report.active
    assert (report.policy, report.engine) == ("none", "none")
    assert report.problem == "fastac.enable(model) was not called, or was undone"
    assert str(report).startswith(f"{WAN}: not enabled by fastac.enable")


def test_a_model_that_was_disabled(wan: Any) -> None:
    model, inputs = wan
    fastac.enable(model)
    support.train_step(model, inputs)
    fastac.disable(model)
    report = fastac.report(model)
    assert not report.active
    assert report.problem == "fastac.enable(model) was not called, or was undone"


def test_a_model_whose_hook_was_replaced(wan: Any) -> None:
    model, inputs = wan
    fastac.enable(model)
    support.train_step(model, inputs)
    model.enable_gradient_checkpointing()
    report = fastac.report(model)
    assert not report.active
    assert report.problem == "gradient checkpointing was enabled again without fastac: nothing is saved"
    assert "enabled again without fastac" in str(report)


def test_under_full_nothing_is_claimed_to_be_saved(wan: Any) -> None:
    model, inputs = wan
    fastac.enable(model, "full")
    support.train_step(model, inputs)
    report = fastac.report(model)
    assert report.active
    assert (report.policy, report.rows[0].saved, report.rows[0].saved_bytes) == ("full", 0, 0)
    assert report.problem == "this policy saves nothing, and attention calls are not watched under it"


def test_a_switch_to_full_forgets_what_was_saved_before(wan: Any) -> None:
    """The report is about the latest forward; the one before it ran under another policy."""
    model, inputs = wan
    fastac.enable(model, "attn_only")
    support.train_step(model, inputs)
    fastac.enable(model, "full")
    support.train_step(model, inputs)
    (row,) = fastac.report(model).rows
    assert (row.saved, row.saved_bytes) == (0, 0)


def test_a_copy_is_reported_by_itself(wan: Any) -> None:
    model, inputs = wan
    fastac.enable(model)
    support.train_step(model, inputs)
    copied = copy.deepcopy(model)
    assert fastac.report(copied).active
    assert fastac.report(copied).rows[0].blocks_seen == 0
    support.train_step(copied, inputs)
    assert fastac.report(copied).rows == fastac.report(model).rows


def test_a_model_without_the_hook_can_be_reported_too() -> None:
    """fastac.checkpoint is called by the model itself."""
    model = support.stack(policy="attn_only", layers=3)
    support.train_step(model, support.stack_inputs())
    report = fastac.report(model)
    (row,) = report.rows
    assert (row.container, row.blocks_seen, row.attention_calls, row.saved) == ("blocks", 3, 6, 6)
    assert row.saved_bytes == 6 * bytes_of(batch=1, heads=2, queries=support.VIDEO_TOKENS, dim=8)
    assert "was not called" not in report.problem, "it saves; nothing is wrong"


def test_a_model_without_blocks() -> None:
    report = fastac.report(torch.nn.Linear(2, 2))
    assert report.rows == ()
    assert str(report)


def test_bytes_for_people() -> None:
    sizes = [0, 1023, 1024, 1536, 5 * 1024**2, 3 * 1024**3, 2 * 1024**4]
    assert [readable_bytes(size) for size in sizes] == [
        "0 B",
        "1023 B",
        "1.0 KiB",
        "1.5 KiB",
        "5.0 MiB",
        "3.0 GiB",
        "2.0 TiB",
    ]


class TestCompiledModel:
    """Nothing is seen while a graph runs: the report tells what was decided while it was traced."""

    @pytest.fixture(autouse=True)
    def compiler(self, fresh_compiler: None) -> None:
        """Nothing compiled so far."""

    def compiled(self, policy: Any = "attn_only", dynamic: bool | None = False) -> tuple[Any, dict[str, Any]]:
        model, inputs = support.build(WAN)
        fastac.enable(model, policy)
        model.compile(backend="aot_eager", dynamic=dynamic)
        return model, inputs

    def test_before_it_ran(self) -> None:
        model, _ = self.compiled()
        report = fastac.report(model)
        assert report.problem == "no forward with gradients was seen yet"
        assert (report.rows[0].blocks_seen, report.rows[0].blocks_compiled) == (0, 0)

    def test_counts_and_bytes(self) -> None:
        model, inputs = self.compiled(Policy("attn_only", min_kv=100))
        support.train_step(model, inputs)
        report = fastac.report(model)
        (row,) = report.rows
        assert report.problem == ""
        assert (row.blocks_seen, row.blocks_compiled) == (2, 2)
        assert (row.attention_calls, row.saved, row.recomputed) == (4, 2, 2)
        assert row.ops == (CPU_OP,)
        assert row.saved_bytes == 2 * bytes_of(batch=1, heads=2, queries=128, dim=12)
        assert "blocks x 2 (2 as decided when compiled)" in str(report)

    @pytest.mark.slow
    @pytest.mark.parametrize("dynamic", [False, None])
    def test_of_the_latest_trace(self, dynamic: bool | None) -> None:
        """A second size is traced anew, with symbols in place of what changed."""
        model, inputs = self.compiled(dynamic=dynamic)
        support.train_step(model, inputs)
        video = inputs["hidden_states"]
        support.train_step(model, inputs | {"hidden_states": torch.cat([video, video], dim=2)})
        (row,) = fastac.report(model).rows
        assert (row.attention_calls, row.saved, row.blocks_seen) == (4, 4, 2)
        assert row.saved_bytes == 4 * bytes_of(batch=1, heads=2, queries=256, dim=12)

    def test_policies_per_block(self) -> None:
        model, inputs = self.compiled({"blocks.0": "full", "*": "attn_only"})
        support.train_step(model, inputs)
        (row,) = fastac.report(model).rows
        assert (row.blocks_full, row.blocks_compiled, row.saved, row.recomputed) == (1, 1, 2, 0)

    @pytest.mark.slow
    def test_another_policy_since(self) -> None:
        model, inputs = self.compiled()
        support.train_step(model, inputs)
        fastac.enable(model, "long_attn_only")
        assert fastac.report(model).rows[0].blocks_seen == 0
        support.train_step(model, inputs)
        assert (fastac.report(model).rows[0].saved, fastac.report(model).rows[0].recomputed) == (0, 4)

    @pytest.mark.slow
    def test_inside_a_compiled_step(self) -> None:
        """The model is a part of what was compiled."""
        model, inputs = support.build(WAN)
        fastac.enable(model)

        def loss(**inputs: Any) -> torch.Tensor:
            return model(**inputs, return_dict=False)[0].square().sum()

        torch.compile(loss, backend="aot_eager")(**{k: v for k, v in inputs.items() if k != "return_dict"}).backward()
        (row,) = fastac.report(model).rows
        assert (row.saved, row.blocks_compiled) == (4, 2)

    @pytest.mark.slow
    def test_a_graph_break_around_the_blocks(self) -> None:
        model, inputs = self.compiled()
        model.norm_out.register_forward_pre_hook(lambda *_: torch._dynamo.graph_break())
        support.train_step(model, inputs)
        (row,) = fastac.report(model).rows
        assert (row.saved, row.blocks_seen) == (4, 2)

    def test_of_a_model_that_was_trained_eagerly_before(self) -> None:
        """What the compiled model does is the newer, for the sizes it was traced with; and the other way round."""
        model, inputs = support.build(WAN)
        fastac.enable(model)
        support.train_step(model, inputs)
        video = inputs["hidden_states"]
        model.compile(backend="aot_eager")
        support.train_step(model, inputs | {"hidden_states": torch.cat([video, video], dim=2)})
        (row,) = fastac.report(model).rows
        assert (row.saved_bytes, row.blocks_compiled) == (4 * bytes_of(batch=1, heads=2, queries=256, dim=12), 2)
        model._compiled_call_impl = None
        support.train_step(model, inputs)
        (row,) = fastac.report(model).rows
        assert (row.saved_bytes, row.blocks_compiled) == (4 * bytes_of(batch=1, heads=2, queries=128, dim=12), 0)

    def test_blocks_whose_names_end_alike(self) -> None:
        class Two(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.encoder = support.stack(layers=1)
                self.blocks = torch.nn.ModuleList([support.AttentionBlock()])

            def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
                return self.blocks[0](self.encoder(video, text), text)

        model = Two()
        fastac.enable(model, blocks=["encoder.blocks", "blocks"])
        model.compile(backend="aot_eager")
        support.train_step(model, support.stack_inputs())
        assert {row.container: row.attention_calls for row in fastac.report(model).rows} == {
            "encoder.blocks": 2,
            "blocks": 2,
        }

    @pytest.mark.slow
    def test_after_a_compilation_that_failed(self) -> None:
        """What was traced in vain does not count."""
        model, inputs = self.compiled()
        with torch._functorch.config.patch(activation_memory_budget=0.0), pytest.raises(fastac.PolicyNotAppliedError):
            support.train_step(model, inputs)
        support.train_step(model, inputs)
        (row,) = fastac.report(model).rows
        assert (row.attention_calls, row.saved, row.blocks_seen) == (4, 4, 2)
