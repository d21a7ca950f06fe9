"""AOT's partitioner knows registered attention for what it is, and so do torch's FLOP counts."""

from __future__ import annotations

import sys

import pytest
import torch
import torch._functorch.config
import torch._functorch.partitioners
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import fastac
from fastac import registry
from tests import support
from tests.support import AttentionBlock, assert_same, attention_inputs, stack, stack_inputs, train_step
from tests.test_compile import compile_blocks, compile_whole
from tests.test_compile import fresh_compiler as fresh_compiler
from tests.test_compile import kernel_folder as kernel_folder


@torch.library.custom_op("fastac_tests::budget_attention", mutates_args=())
def budget_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An attention op of a library's own, as AOT finds it in a graph."""
    support.executions["fastac_tests::budget_attention"] += 1
    return support.attention_math(query, key, value)


@budget_attention.register_fake
def _(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return query.new_empty(query.shape), query.new_empty(query.shape[:-1])


def _save(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    return support.attention_math_backward(grad, *ctx.saved_tensors)


budget_attention.register_autograd(_backward, setup_context=_save)
fastac.register(
    fastac.AttentionOp(backend="tests", namespace="fastac_tests", name="budget_attention", layout="bhsd", dropout=None)
)


class Stack(torch.nn.Module):
    """Two blocks with the custom attention, none of them checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList([AttentionBlock(attend=lambda q, k, v: budget_attention(q, k, v)[0])] * 2)

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            video = block(video, text)
        return video


def executions_of_step(model: torch.nn.Module) -> int:
    """Attention kernels, of the custom op and of torch's own, that one step runs once it is compiled."""
    support.count_cpu_attention()
    train_step(model, stack_inputs())
    support.executions.clear()
    train_step(model, stack_inputs())
    return support.executions.total()


@pytest.mark.usefixtures("uninformed")
class TestActivationMemoryBudget:
    """Without any checkpointing: what a user of torch's own memory budget gets."""

    @pytest.mark.parametrize("build", [Stack, lambda: stack(policy="none")], ids=["custom op", "torch's for CPUs"])
    @pytest.mark.parametrize(
        ("budget", "kept"), [(0.5, "the long ones"), pytest.param(0.7, "all", marks=pytest.mark.slow)]
    )
    def test_attention_is_kept_once_the_partitioner_knows_it(self, build: type, budget: float, kept: str) -> None:
        counts = {}
        for informed in (False, True):
            if informed:
                fastac.inform_partitioner()
            torch._dynamo.reset()
            with torch._functorch.config.patch(activation_memory_budget=budget):
                model = compile_whole(build(), "aot_eager")
                counts[informed] = executions_of_step(model)
                assert_same(train_step(model, stack_inputs()), train_step(build(), stack_inputs()))
        # Four in the forward; of two over 24 keys and two over 6 it gives up the short ones first.
        assert counts == {False: 4 + 4, True: 4 + (2 if kept == "the long ones" else 0)}

    def test_enable_and_checkpoint_inform_it(self) -> None:
        """The compiled blocks of a checkpointed model are partitioned with it."""
        model = compile_blocks(stack(policy=fastac.Policy("attn_only", min_kv=10)), "aot_eager")
        with torch._functorch.config.patch(activation_memory_budget=0.7):
            train_step(model, stack_inputs())  # an error, if the long attention ran again
        known = torch._functorch.partitioners.get_default_op_list().compute_intensive_ops
        assert torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in known

    def test_ops_that_come_later_are_known_and_none_twice(self, rows_as_before: None) -> None:
        fastac.inform_partitioner()
        first = torch._functorch.partitioners.get_default_op_list
        fastac.inform_partitioner()
        assert torch._functorch.partitioners.get_default_op_list is first
        attend = support.custom_attention("comes_after_informing")
        assert attend is not None
        op = torch.ops.fastac_tests.comes_after_informing
        assert op in first().compute_intensive_ops
        assert op in flop_registry


class TestFlops:
    @pytest.mark.parametrize(("queries", "keys"), [(24, 24), (24, 6), (5, 1024)])
    def test_of_torchs_attention_for_cpus(self, queries: int, keys: int) -> None:
        """torch has no formula for it: as many as matrix products would take."""
        fastac.inform_partitioner()
        inputs = attention_inputs(queries, keys)
        with FlopCounterMode(display=False) as counter:
            F.scaled_dot_product_attention(*inputs.values())
        query, key, value = inputs.values()
        with FlopCounterMode(display=False) as products:
            (query @ key.transpose(-1, -2)).softmax(-1) @ value
        assert counter.get_total_flops() == products.get_total_flops() > 0

    def test_of_a_custom_op(self) -> None:
        fastac.inform_partitioner()
        with FlopCounterMode(display=False) as counter:
            budget_attention(*attention_inputs(24, 6).values())
        assert counter.get_total_flops() == 2 * (2 * 3 * 24) * 6 * (8 + 8)

    @pytest.mark.parametrize(
        ("layout", "shape"), [("bshd", (2, 24, 3, 8)), ("thd", (48, 3, 8)), ("bs3hd", (2, 24, 3, 3, 8))]
    )
    def test_layouts(self, layout: str, shape: tuple[int, ...], rows_as_before: None) -> None:
        """Two sequences of 24 tokens, three heads of 8."""
        name = f"flops_{layout}"
        library = torch.library.Library("fastac_tests", "FRAGMENT")
        library.define(f"{name}(Tensor key, int longest) -> Tensor")
        library.impl(name, lambda key, longest: torch.empty(2, 24, 3, 8), "CPU")
        row = fastac.AttentionOp(
            backend="tests", namespace="fastac_tests", name=name, layout=layout, max_kv="longest", dropout=None
        )
        fastac.register(row)
        fastac.inform_partitioner()
        op = getattr(torch.ops.fastac_tests, name)
        with FlopCounterMode(display=False) as counter:
            op(torch.empty(shape), 24)
        assert counter.get_total_flops() == 2 * (2 * 24 * 3) * 24 * 16
        del flop_registry[op]

    def test_torchs_own_formulas_stay(self) -> None:
        theirs = flop_registry[torch.ops.aten._scaled_dot_product_flash_attention]
        fastac.inform_partitioner()
        assert flop_registry[torch.ops.aten._scaled_dot_product_flash_attention] is theirs
        assert not theirs.__module__.startswith("fastac")

    def test_every_op_of_a_row_has_one(self) -> None:
        fastac.inform_partitioner()
        torch._functorch.partitioners.get_default_op_list()
        for resolved in registry.present_ops():
            if resolved.is_attention:
                assert getattr(resolved.op, "overloadpacket", resolved.op) in flop_registry, resolved.name


def test_the_compiler_is_not_imported_for_it() -> None:
    """Importing it takes a while, which a user who does not compile need not wait."""
    import subprocess

    code = (
        "import sys, fastac; from tests import support; model, _ = support.build('WanTransformer3DModel');"
        "fastac.enable(model); assert 'torch._functorch.partitioners' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
