"""Outputs of Linear modules on the tape: exact, run once, held to the byte, or refused with the module's name.

Each test fails when its guard in fastac/linear.py, tape.py, replay.py or scopes.py is taken out. Products are counted
by the kernel of aten::addmm, in which a Linear module with a bias ends and no backward does.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import os
import subprocess
import sys
import textwrap
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from fastac import census, interception, linear, scopes
from fastac.errors import CompiledPolicyNotAppliedError, FastacError, PolicyNotAppliedError
from fastac.policy import Policy
from tests import support
from tests.live_bytes import allocated
from tests.model_state import state_of
from tests.support import CPU_ATTENTION, AttentionBlock, assert_same, stack, stack_inputs, train_step

ROOT = Path(__file__).resolve().parent.parent
Change = Callable[[torch.Tensor], torch.Tensor]

ALL = Policy("attn_only", linear=("*",))
ALONE = Policy("linear_only", linear=("*",))
NAMES = ("qkv", "self_out", "q", "kv", "cross_out", "ffn.0", "ffn.2")
"""The Linear modules of an AttentionBlock, in the order of their calls. torch ends a recompute before the last."""

NONE, FULL = 2 * 7, 2 * (7 + 6)
"""How often two AttentionBlocks multiply in a step without checkpointing, and under full."""


@pytest.fixture
def products() -> Iterator[Counter[str]]:
    """How often CPU kernels of matrix products ran since the test began or called `.clear()`."""
    with support.counting("aten::addmm", "aten::mm", "aten::bmm") as counts:
        yield counts


class One(torch.nn.Module):
    """A Linear module, what a test does to its input and output, another Linear module. Text is not looked at."""

    def __init__(
        self,
        change: Change | None = None,
        before: Change | None = None,
        bias: bool = True,
        first: Callable[[torch.nn.Linear], torch.nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.first = torch.nn.Linear(support.WIDTH, support.WIDTH, bias=bias)
        if first is not None:
            self.first = first(self.first)
        self.out = torch.nn.Linear(support.WIDTH, support.WIDTH)
        self.change, self.before = change, before

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        output = self.first(video if self.before is None else self.before(video))
        if self.change is not None:
            output = self.change(output)
        return video + self.out(torch.tanh(output))


FIRST = Policy("linear_only", linear=("first",))


def run_of(model: torch.nn.Module, inputs: Any, backward: Any = None) -> support.Tensors:
    found = train_step(model, inputs, backward=backward)
    found["generator"] = torch.get_rng_state()
    return found


def assert_exact(
    block: Callable[[], torch.nn.Module],
    policy: Any = ALL,
    again: int | None = None,
    backward: Callable[..., Any] | None = None,
    products: Counter[str] | None = None,
    **inputs_options: Any,
) -> None:
    """Two layers train as without checkpointing, bit for bit. again: how many products of any kind run again."""
    inputs = stack_inputs(**inputs_options)
    dtype = inputs_options.get("dtype", torch.float32)
    counts = products if products is not None else Counter()
    counts.clear()
    reference = run_of(stack(block=block, dtype=dtype), inputs, backward)
    needed = counts.total()
    model = stack(block=block, policy=policy, dtype=dtype)
    for _ in range(3):
        counts.clear()
        assert_same(run_of(model, inputs, backward), reference)
        assert again is None or counts.total() == needed + again


# Exact, and run once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("policy", "multiplied", "attended"),
    [
        ("none", NONE, 4),
        ("full", FULL, 8),
        ("attn_only", FULL, 4),
        (ALL, NONE, 4),
        (ALONE, NONE, 8),
        (Policy("attn_only", linear=("ffn.*",)), FULL - 2, 4),
        (Policy("attn_only", min_kv=10, linear=("q", "qkv")), FULL - 4, 6),
        (Policy("linear_only", linear=("ffn.2",)), FULL, 8),
    ],
    ids=str,
)
def test_steps_are_exact_and_saved_products_run_once(
    policy: Any,
    multiplied: int,
    attended: int,
    dtype: torch.dtype,
    products: Counter[str],
    attention_executions: Counter[str],
) -> None:
    """Without checkpointing N, under full all again that torch gets to, else what is not saved."""
    inputs = stack_inputs(dtype=dtype, batch=2)
    reference = train_step(stack(dtype=dtype), inputs)
    model = stack(policy=policy, dtype=dtype)
    for _ in range(3):
        products.clear()
        attention_executions.clear()
        assert_same(train_step(model, inputs), reference)
        assert products["addmm"] == multiplied
        assert attention_executions == {CPU_ATTENTION: attended}


def test_the_counting_kernel_is_gone_after_a_test() -> None:
    with support.counting("aten::addmm") as counts:
        torch.nn.Linear(2, 2)(torch.randn(1, 2))
    torch.nn.Linear(2, 2)(torch.randn(1, 2))
    assert counts == {"addmm": 1}


# How a Linear module multiplies, and what becomes of its output


def crossed(video: torch.Tensor) -> torch.Tensor:
    """The same values, in a layout that can not be flattened."""
    return video.transpose(1, 2).contiguous().transpose(1, 2)


def frozen(module: torch.nn.Linear) -> torch.nn.Linear:
    return module.requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("first", [None, frozen], ids=["trained", "frozen"])
@pytest.mark.parametrize("before", [None, crossed, torch.flatten], ids=["plain", "crossed", "vector"])
def test_every_way_to_multiply(bias: bool, first: Any, before: Any, products: Counter[str]) -> None:
    """In one op with the bias; in mm, to which the bias is added in place; frozen and not to be flattened, in bmm."""
    if before is torch.flatten:

        def before(video: torch.Tensor) -> torch.Tensor:
            return video[0, 0]

    assert_exact(lambda: One(bias=bias, first=first, before=before), FIRST, 0, products=products, batch=2)


def double(output: torch.Tensor) -> torch.Tensor:
    return output.mul_(2)


def double_a_view(output: torch.Tensor) -> torch.Tensor:
    output.transpose(1, 2)[:, :3].mul_(2)
    return output


def double_without_grad(output: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output.mul_(2)
    return output


CHANGES = (double, double_a_view, double_without_grad)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("first", [None, frozen], ids=["trained", "frozen"])
def test_in_place_change_of_an_output_is_noticed(change: Change, first: Any) -> None:
    """Legal without checkpointing: the product is the input of no backward."""
    model = stack(policy=FIRST, block=lambda: One(change, first=first))
    with pytest.raises(FastacError, match=r"addmm.*was changed in place after it was saved"):
        train_step(model, stack_inputs(batch=2))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("bias", "before"), [(False, None), (False, crossed), (True, crossed)])
def test_in_place_change_of_an_output_that_shares_no_version(
    change: Change, bias: bool, before: Any, products: Counter[str]
) -> None:
    """aten::_unsafe_view gives it another counter than the product's: silently wrong by 0.5 without a copy."""
    assert_exact(lambda: One(change, before, bias), FIRST, 0, products=products, batch=2)


@pytest.mark.parametrize("change", CHANGES)
def test_in_place_change_of_an_output_outside_the_graph(change: Change) -> None:
    """Nobody guards it there."""
    assert_exact(lambda: One(change, before=torch.Tensor.detach, first=frozen), FIRST, 0)


def test_in_place_change_of_an_output_made_without_grad(products: Counter[str]) -> None:
    class Guided(One):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                guide = self.first(video).mul_(2)
            return video + self.out(torch.tanh(self.first(video)) * guide)

    assert_exact(Guided, FIRST, 0, products=products)


def test_buffer_reused_inside_an_autograd_function(products: Counter[str]) -> None:
    """As in compiled code, and in kernels that fuse: no version tells of it."""

    class Reuses(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, video: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(video, weight)
            output = F.linear(video, weight, bias)
            scaled = output * 2
            output.data.zero_()
            return scaled

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            video, weight = ctx.saved_tensors
            grad = 2 * grad
            return grad @ weight, grad.flatten(0, 1).mT @ video.flatten(0, 1), grad.sum((0, 1))

    class Fused(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return Reuses.apply(input, self.weight, self.bias)

    def fused(module: torch.nn.Linear) -> torch.nn.Linear:
        other = Fused(module.in_features, module.out_features)
        other.load_state_dict(module.state_dict())
        return other

    assert_exact(lambda: One(first=fused), FIRST, 0, products=products)


def test_output_that_autograd_needs(products: Counter[str]) -> None:
    """exp keeps its output, mul both inputs: what is handed out in recompute is saved by the graph that it builds."""
    assert_exact(lambda: One(lambda output: (output * 0.1).exp() * output), FIRST, 0, products=products)


def test_autocast(products: Counter[str]) -> None:
    class Mixed(AttentionBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(video, text).float()

    assert_exact(Mixed, ALL, 0, products=products)


@pytest.mark.parametrize("trains", ["norms", "ffn", "q", "nothing"])
def test_frozen_weights(trains: str, products: Counter[str]) -> None:
    def block() -> torch.nn.Module:
        made = AttentionBlock()
        for name, parameter in made.named_parameters():
            parameter.requires_grad_(name.startswith(trains))
        return made

    assert_exact(block, ALL, 0, products=products, batch=2)


def test_gradients_of_parameters_alone(products: Counter[str]) -> None:
    inputs = {name: tensor.detach() for name, tensor in stack_inputs().items()}
    reference = train_step(stack(), inputs)
    products.clear()
    assert_same(train_step(stack(policy=ALL), inputs), reference)
    assert products["addmm"] == NONE


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("names", [("*",), ("*base_layer",), ("ffn.2*",)], ids=str)
def test_low_rank_adapters(names: tuple[str, ...], dropout: float) -> None:
    """Adapters are Linear modules as well, without a bias. Dropout between them draws what it drew."""

    def block() -> torch.nn.Module:
        config = LoraConfig(r=2, target_modules=["qkv", "ffn.2"], lora_dropout=dropout, init_lora_weights=False)
        return get_peft_model(AttentionBlock(dropout=dropout), config).train().base_model.model

    assert_exact(block, Policy("attn_only", linear=names), batch=2)


def test_dropout_after_a_saved_product(products: Counter[str]) -> None:
    assert_exact(lambda: AttentionBlock(dropout=0.3), ALL, 0, products=products)


@pytest.mark.parametrize("dropped", [0.0, 0.5])
def test_linear_called_twice_in_a_block(dropped: float, products: Counter[str]) -> None:
    class Twice(One):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            video = torch.tanh(self.first(F.dropout(video, dropped)))
            return super().forward(torch.tanh(self.first(F.dropout(video, dropped))), text)

    assert_exact(Twice, FIRST, 0, products=products)


def test_block_called_twice(products: Counter[str]) -> None:
    def shared(policy: Any) -> torch.nn.Module:
        torch.manual_seed(0)
        block = AttentionBlock()
        return stack(policy=policy, block=lambda: block)

    inputs = stack_inputs()
    reference = train_step(shared("none"), inputs)
    model = shared(ALL)
    for _ in range(2):
        products.clear()
        assert_same(train_step(model, inputs), reference)
        assert products["addmm"] == NONE


def test_products_that_are_no_linear_modules_run_again(products: Counter[str]) -> None:
    """Before, between and after: only what a hook announced is on the tape."""

    class Between(One):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            weight = self.out.weight
            video = video + (torch.mm(video[0], weight) + torch.addmm(self.out.bias, video[0], weight)).tanh()[None]
            output = torch.mm(self.first(video)[0], weight)[None]
            return video + self.out(torch.tanh(output))

    assert_exact(Between, Policy("linear_only", linear=("first", "out")), products=products)


# More than one forward or backward


def twice(loss: torch.Tensor) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def test_second_backward_with_retain_graph(products: Counter[str]) -> None:
    assert_exact(AttentionBlock, ALL, 0, backward=twice, products=products)


@pytest.mark.parametrize("bias", [True, False])
def test_second_backward_where_the_recompute_writes_into_what_it_was_given(bias: bool) -> None:
    assert_exact(lambda: One(double, crossed, bias), FIRST, 0, backward=twice, batch=2)


def test_second_backward_of_a_block_that_multiplies_itself_first() -> None:
    """torch ends the first recompute inside the last Linear module. That does not run any more when the second begins,
    whose first product is none of its."""

    class MultipliesFirst(One):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.mm(video[0], self.out.weight)[None].tanh(), text)

    assert_exact(MultipliesFirst, ALONE, backward=twice)


def test_second_backward_without_retain_graph_raises() -> None:
    loss = support.loss_of(stack(policy=ALL)(**stack_inputs()))
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_gradient_penalty() -> None:
    inputs = stack_inputs()

    def run(policy: Any) -> support.Tensors:
        model = stack(policy=policy, block=lambda: One(torch.tanh))
        (first,) = torch.autograd.grad(support.loss_of(model(**inputs)), inputs["video"], create_graph=True)
        leaves = support.leaves_of(model, inputs)
        wanted = [leaf for name, leaf in leaves.items() if "weight" in name]
        return dict(enumerate(torch.autograd.grad(first.square().sum(), wanted)))  # type: ignore[arg-type]

    assert_same(run(ALL), run("none"))


def test_gradients_accumulate(products: Counter[str]) -> None:
    first, second = stack_inputs(1), stack_inputs(2)

    def run(policy: Any) -> support.Tensors:
        model = stack(policy=policy)
        for inputs in (first, second, first):
            support.loss_of(model(**inputs)).backward()
        return support.gradients(support.leaves_of(model, {}))

    reference = run("none")
    products.clear()
    assert_same(run(ALL), reference)
    assert products["addmm"] == 3 * NONE


@pytest.mark.parametrize("later_first", [True, False])
def test_two_forwards_before_a_backward(later_first: bool, products: Counter[str]) -> None:
    def run(policy: Any) -> support.Tensors:
        model = stack(policy=policy)
        losses = [support.loss_of(model(**stack_inputs(seed))) for seed in (1, 2)]
        for loss in reversed(losses) if later_first else losses:
            loss.backward()
        return support.gradients(support.leaves_of(model, {}))

    reference = run("none")
    products.clear()
    assert_same(run(ALL), reference)
    assert products["addmm"] == 2 * NONE


# Regions inside regions


class RegionInside(torch.nn.Module):
    """A block that checkpoints a part of itself; it is checkpointed as a whole, too."""

    def __init__(self, policy: Any, layers: type[torch.nn.Module] = AttentionBlock) -> None:
        super().__init__()
        self.inner = layers()
        self.out = torch.nn.Linear(support.WIDTH, support.WIDTH)
        self.policy = policy

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        video = support.run_checkpointed(self.inner, torch.tanh(video), text, policy=self.policy)
        return self.out(torch.tanh(video))


SOME = Policy("attn_only", linear=("out", "inner.q"))


@pytest.mark.parametrize("inner", ["attn_only", "full", ALL, Policy("linear_only", linear=("ffn.0",))], ids=str)
@pytest.mark.parametrize("outer", ["attn_only", "full", ALL], ids=str)
def test_nested_regions(outer: Any, inner: Any) -> None:
    refused = None
    if outer != "full" and inner == "full":
        refused = r"inside a torch\.utils\.checkpoint of the block's own"
    elif outer == ALL:
        refused = r"Linear module 'inner\.qkv' is called inside a fastac\.checkpoint of the block's own"
    if refused is not None:
        with pytest.raises(PolicyNotAppliedError, match=refused):
            fastac.checkpoint(RegionInside(inner), *stack_inputs().values(), policy=outer)
    else:
        assert_exact(lambda: RegionInside(inner), outer)


def test_linear_in_a_region_inside_is_missed_by_name() -> None:
    """The inner region's policy decides about what is in it."""
    with pytest.raises(PolicyNotAppliedError, match=r"'inner\.q' is called inside a fastac\.checkpoint.* linear="):
        fastac.checkpoint(RegionInside("attn_only"), *stack_inputs().values(), policy=SOME)
    for inner in ("attn_only", ALL, Policy("linear_only", linear=("q",))):
        assert_exact(functools.partial(RegionInside, inner), Policy("attn_only", linear=("out",)))
        with pytest.raises(PolicyNotAppliedError, match=r"'inner\.q' is called inside a fastac\.checkpoint"):
            fastac.checkpoint(RegionInside(inner), *stack_inputs().values(), policy=SOME)


def test_linear_in_a_region_of_torch_s_own_inside_is_refused() -> None:
    """That runs it again once more, after the outer region is closed."""
    with pytest.raises(PolicyNotAppliedError, match=r"addmm.* inside a torch\.utils\.checkpoint of the block's own"):
        fastac.checkpoint(RegionInside("torch", One), *stack_inputs().values(), policy=ALONE)


# Threads, modes, and what torch lets users do around a region


def test_backward_in_another_thread(products: Counter[str]) -> None:
    def elsewhere(loss: torch.Tensor) -> None:
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    assert_exact(AttentionBlock, ALL, 0, backward=elsewhere, products=products)


def test_linear_of_another_thread_is_not_recorded() -> None:
    """The same module, with the same hooks, as a validation that runs meanwhile has it."""

    class Meanwhile(One):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=self.first, args=(torch.randn(3, support.WIDTH),))
            thread.start()
            thread.join()
            return super().forward(video, text)

    assert_exact(Meanwhile, FIRST)


def test_two_threads_train_at_once() -> None:
    inputs = [stack_inputs(seed) for seed in range(2)]
    references = [train_step(stack(seed), inputs[seed]) for seed in range(2)]
    models = [stack(seed, policy=ALL) for seed in range(2)]
    found: list[list[support.Tensors]] = [[], []]
    barrier = threading.Barrier(2)

    def work(seed: int) -> None:
        barrier.wait()
        for _ in range(5):
            found[seed].append(train_step(models[seed], inputs[seed]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(2):
        assert len(found[seed]) == 5
        for step in found[seed]:
            assert_same(step, references[seed])


def test_early_stop_switched_off(products: Counter[str]) -> None:
    with torch.utils.checkpoint.set_checkpoint_early_stop(False):
        assert_exact(AttentionBlock, ALL, 0, products=products)


def test_saved_tensors_on_cpu(products: Counter[str]) -> None:
    with torch.autograd.graph.save_on_cpu():
        assert_exact(AttentionBlock, ALL, 0, products=products)


def test_deterministic_mode_and_anomaly_detection(products: Counter[str]) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        with torch.autograd.set_detect_anomaly(True):
            assert_exact(AttentionBlock, ALL, 0, products=products)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("first", [None, frozen], ids=["trained", "frozen"])
def test_vmap_inside_a_region(bias: bool, first: Any) -> None:
    class Mapped(One):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return video + self.out(torch.tanh(torch.vmap(self.first)(video)))

    assert_exact(lambda: Mapped(bias=bias, first=first), FIRST, batch=2)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_alarm_without_gradients(mode: Any) -> None:
    inputs = stack_inputs()
    model = stack(policy=ALL)
    reference = train_step(stack(), inputs)
    for _ in range(2):
        with mode():
            output = model(**inputs)
        assert_same({"output": output}, {"output": reference["output"]})
        assert_same(train_step(model, inputs), reference)


def test_hooks_of_the_users_own_on_a_linear_module(products: Counter[str]) -> None:
    """They run in recompute as in forward, on what is replayed."""

    def hooked(module: torch.nn.Linear) -> torch.nn.Linear:
        module.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
        module.register_forward_hook(lambda module, args, output: output * 1.5)
        module.register_full_backward_hook(lambda module, grads, _: (grads[0] * 0.5,))
        return module

    assert_exact(lambda: One(first=hooked), FIRST, 0, products=products)


def saved_of_first(first: Callable[[torch.nn.Linear], torch.nn.Module]) -> int:
    """Bytes that are kept of the one Linear module whose output is saved."""
    model = stack(layers=1, block=functools.partial(One, first=first), policy=FIRST)
    train_step(model, stack_inputs())
    record = census.block_record(model.blocks[0])
    assert record is not None
    (found,) = record.censuses.values()
    (product,) = found.products
    return product.saved_bytes


def test_weight_that_is_computed() -> None:
    """A parametrization that multiplies: the weight's product is not that of the module, and is not saved for it."""

    class Product(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return torch.mm(weight, weight.mT.tanh())

    def parametrized(module: torch.nn.Linear) -> torch.nn.Module:
        return torch.nn.utils.parametrize.register_parametrization(module, "weight", Product())

    assert_exact(lambda: One(first=parametrized), FIRST)
    assert saved_of_first(parametrized) == rows_of(W) != rows_of(W, rows=W)


def test_linear_that_turns_its_input_first() -> None:
    """A class of the user's own multiplies before it does so with its weight."""

    class Rotated(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            return super().forward(torch.mm(input[0], torch.ones(W, 2 * W))[None, :, :W])

    def rotated(module: torch.nn.Linear) -> torch.nn.Module:
        return Rotated(module.in_features, module.out_features)

    assert_exact(lambda: One(first=rotated), FIRST)
    assert saved_of_first(rotated) == rows_of(W)


# Exceptions


class FailsOnCall(One):
    """Raises before, in or after its first Linear module, in the calls whose numbers are in `failing`."""

    where = "after"

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.failing = 0, set()
        self.first.register_forward_pre_hook(lambda *_: self.fail("in"))

    def fail(self, where: str) -> None:
        if where == self.where and self.calls in self.failing:
            raise ZeroDivisionError("on purpose")

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.fail("before")
        output = self.first(video)
        self.fail("after")
        return video + self.out(torch.tanh(output))


@pytest.mark.parametrize("where", ["before", "in", "after"])
@pytest.mark.parametrize("failing", [1, 2], ids=["in forward", "in recompute"])
@pytest.mark.parametrize("known", [False, True], ids=["first region", "known region"])
def test_exception_leaves_nothing_open(failing: int, known: bool, where: str) -> None:
    inputs = stack_inputs()
    reference = train_step(stack(layers=1, block=FailsOnCall), inputs)
    model = stack(layers=1, block=FailsOnCall, policy=FIRST)
    block = model.blocks[0]
    block.where = where
    if known:
        train_step(model, inputs)
    block.failing = {block.calls + failing}
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        train_step(model, inputs)
    assert scopes.thread.scope is None
    assert_same(train_step(model, inputs), reference)


def test_linear_that_raises_and_is_caught(products: Counter[str]) -> None:
    """The product after it is another's."""

    class FallsBack(One):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            try:
                self.first(video[..., :3])
            except RuntimeError:
                video = torch.mm(video[0], self.out.weight)[None]
            return super().forward(video, text)

    assert_exact(FallsBack, ALONE)


def test_linear_that_raises_before_its_product_and_is_caught() -> None:
    """The product that comes then is not taken for its own."""

    class Raises(torch.nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            raise ZeroDivisionError

    class Stops(One):
        def __init__(self) -> None:
            super().__init__()
            self.stopped = Raises(support.WIDTH, support.WIDTH)

        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            with contextlib.suppress(ZeroDivisionError):
                self.stopped(video)
            video = torch.mm(video[0], self.stopped.weight)[None]
            return super().forward(video, text)

    assert_exact(Stops, Policy("linear_only", linear=("first", "out")))
    model = stack(layers=1, block=Stops, policy=Policy("linear_only", linear=("*s*t*",)))
    with pytest.raises(PolicyNotAppliedError, match=r"with the weight of the Linear module 'stopped'"):
        train_step(model, stack_inputs())


# The recompute takes another path


@pytest.mark.parametrize(
    ("way", "message"),
    [
        ("order", "runs the Linear module 'q' where the forward ran 'self_out'"),
        ("other shape", r"Linear module 'ffn\.0'.* where aten\.addmm\.default of 'self_out' on .* was recorded"),
        ("fewer", "recompute made 1 attention calls and products where the forward made 2"),
        ("more", "'cross_out'|after the 1 attention calls and products"),
    ],
)
def test_recompute_on_another_path_raises(way: str, message: str) -> None:
    class Other(AttentionBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            again, self.called = getattr(self, "called", False), True
            if way == "order":
                modules = [self.q, self.self_out] if again else [self.self_out, self.q]
            elif way == "other shape":
                modules = [self.ffn[0]] if again else [self.self_out]
            elif way == "fewer":
                modules = [self.self_out] if again else [self.self_out, self.q]
            else:
                modules = [self.self_out, self.cross_out] if again else [self.self_out]
            with torch.no_grad():  # autograd keeps nothing of it, so that torch's own check counts nothing
                for module in modules:
                    module(video)
            return torch.tanh(video)

    output = fastac.checkpoint(Other(), **stack_inputs(), policy=ALONE, early_stop=False)
    with pytest.raises(FastacError, match=message):
        support.loss_of(output).backward()


def test_recompute_that_attends_where_the_forward_multiplied() -> None:
    class Other(AttentionBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            again, self.called = getattr(self, "called", False), True
            with torch.no_grad():
                self._attention(video, video, video) if again else self.q(video)
            return torch.tanh(video)

    output = fastac.checkpoint(Other(), **stack_inputs(), policy=ALL)
    with pytest.raises(FastacError, match=r"attention call 0 of recompute .* where aten\.addmm\.default of 'q' on"):
        support.loss_of(output).backward()


# Memory


def held_by(block: torch.nn.Module, policy: Any, inputs: dict[str, torch.Tensor]) -> tuple[int, int, int]:
    """Bytes that a region holds after its forward beside its output; after a backward; and a dropped forward."""

    def forward() -> torch.Tensor:
        return fastac.checkpoint(block, *inputs.values(), policy=policy, preserve_rng_state=False)

    def step() -> None:
        support.loss_of(forward()).backward()

    def dropped() -> None:
        forward()

    step()
    output = inputs["video"].untyped_storage().nbytes()
    return allocated(forward) - output, allocated(step), allocated(dropped)


def rows_of(columns: int, rows: int = support.VIDEO_TOKENS, size: int = 4) -> int:
    return columns * rows * size


W = support.WIDTH
BYTES = {
    "qkv": rows_of(3 * W),
    "self_out": rows_of(W),
    "q": rows_of(W),
    "kv": rows_of(2 * W, support.TEXT_TOKENS),
    "cross_out": rows_of(W),
    "ffn.0": rows_of(2 * W),
    "ffn.2": rows_of(W),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", [*[(name,) for name in NAMES], ("*",), ("ffn.*", "q")], ids=str)
def test_held_bytes_are_those_of_the_outputs(names: tuple[str, ...], dtype: torch.dtype) -> None:
    """To the byte, and nothing is left after a backward, or where none comes."""
    inputs = stack_inputs(dtype=dtype)
    block = AttentionBlock().to(dtype)
    chosen = {"*": NAMES, "ffn.*": ("ffn.0", "ffn.2", "q")}.get(names[0], names)
    held, after, dropped = held_by(block, Policy("linear_only", linear=names), inputs)
    assert held == sum(BYTES[name] for name in chosen) * dtype.itemsize // 4
    assert (after, dropped) == (0, 0)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("before", [None, crossed])
def test_held_bytes_of_copies(bias: bool, before: Any) -> None:
    """A copy is kept in the place of the output, not beside it."""
    held, after, dropped = held_by(One(before=before, bias=bias), FIRST, stack_inputs())
    assert (held, after, dropped) == (rows_of(W), 0, 0)


def test_outputs_are_freed_one_by_one_during_backward() -> None:
    model = stack(layers=3, policy=ALONE, block=One)
    inputs = stack_inputs()
    train_step(model, inputs)
    alive: list[int] = []
    entries: list[Any] = []
    for block in model.blocks:
        block.out.weight.register_post_accumulate_grad_hook(
            lambda _: alive.append(sum(entry is not None for tape in entries for entry in tape))
        )
    begin = scopes.Tape.__init__

    def remembered(tape: scopes.Tape) -> None:
        begin(tape)
        entries.append(tape)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scopes.Tape, "__init__", remembered)
        loss = support.loss_of(model(**inputs))
    assert [len(tape) for tape in entries] == [2, 2, 2]
    loss.backward()
    # Of the block whose backward runs, the output of the last Linear module, which torch does not get to again.
    assert alive == [5, 4, 3]


def test_report_and_census_say_what_is_held() -> None:
    model, inputs = support.build("WanTransformer3DModel")
    fastac.enable(model, Policy("attn_only", linear=("ffn.*",)))
    train_step(model, inputs)
    (row,) = fastac.report(model).rows
    block = model.blocks[0]
    tokens = 24 if row is None else inputs["hidden_states"][0, 0].numel() // 4
    hidden = block.ffn.net[0].proj.out_features + block.ffn.net[2].out_features
    assert row.linear_saved == 4
    assert row.linear_bytes == 2 * 4 * tokens * hidden * inputs["hidden_states"].shape[0]
    assert "outputs of Linear saved" in str(fastac.report(model))
    fastac.enable(model, "attn_only")
    train_step(model, inputs)
    assert "Linear" not in str(fastac.report(model))


# Refused


@pytest.mark.parametrize("names", [("ffn.1",), ("ffn",), ("*", "to_q"), ("fnn.*",)], ids=str)
def test_name_of_no_linear_module(names: tuple[str, ...]) -> None:
    with pytest.raises(FastacError, match=r"names no Linear module of the blocks.*qkv, self_out, q, kv.*ffn\.2"):
        fastac.checkpoint(AttentionBlock(), **stack_inputs(), policy=Policy("attn_only", linear=names))


def test_block_without_linear_modules() -> None:
    block = torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.Tanh())
    inputs = {"input": stack_inputs()["video"]}
    with pytest.raises(FastacError, match=r"names no Linear module of the blocks\. Their Linear modules are none"):
        fastac.checkpoint(block, **inputs, policy=Policy("linear_only", linear=("q",)))
    with pytest.raises(FastacError, match="names no Linear module of the blocks"):
        fastac.checkpoint(block, **inputs, policy=ALONE)


@pytest.mark.parametrize("kind", ["function", "partial", "method"])
def test_function_that_is_no_block(kind: str) -> None:
    block = AttentionBlock()
    functions: dict[str, Any] = {
        "function": lambda video, text: block(video, text),
        "partial": functools.partial(block),
        "method": block._attention,
    }
    arguments = list(stack_inputs().values()) + [torch.randn(1, 6, 16)] * (kind == "method")
    with pytest.raises(FastacError, match=r"linear=\.\.\. names Linear modules inside a block.*is no module"):
        fastac.checkpoint(functions[kind], *arguments, policy=ALL)


class Quantized(torch.nn.Linear):
    """Computes with its weight in a way of its own."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return (input[..., None, :] * self.weight).sum(-1) + self.bias


def test_linear_module_that_runs_no_product() -> None:
    block = One(first=lambda module: Quantized(module.in_features, module.out_features))
    with pytest.raises(PolicyNotAppliedError, match=r"'first' was to be saved.* Quantized computes in its own way"):
        fastac.checkpoint(block, **stack_inputs(), policy=ALONE)
    assert scopes.thread.scope is None
    assert_exact(lambda: copy.deepcopy(block), Policy("linear_only", linear=("out",)))


def test_functional_call_with_a_modules_weight() -> None:
    class Functional(One):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return video + self.out(torch.tanh(F.linear(video, self.first.weight, self.first.bias)))

    with pytest.raises(PolicyNotAppliedError, match=r"no Linear module 'first' of Functional was called.*were out"):
        fastac.checkpoint(Functional(), **stack_inputs(), policy=Policy("linear_only", linear=("first", "out")))


@pytest.mark.parametrize("way", ["its weight", "its forward", "another thread"])
def test_module_that_is_not_called_where_others_are(way: str) -> None:
    """A name with wildcards is right for others, so that alone tells nothing."""

    class Around(One):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            if way == "its weight":
                found = F.linear(video, self.first.weight, self.first.bias)
            elif way == "its forward":
                found = self.first.forward(video)
            else:
                with ThreadPoolExecutor(1) as pool:
                    found = pool.submit(self.first, video).result()
            return video + self.out(torch.tanh(found))

    with pytest.raises(PolicyNotAppliedError, match=r"computes with the weight of the Linear module 'first'.*call"):
        fastac.checkpoint(Around(), **stack_inputs(), policy=ALL)
    assert_exact(Around, Policy("linear_only", linear=("out",)))


def test_modules_that_are_not_used_are_no_error() -> None:
    class Spare(One):
        def __init__(self) -> None:
            super().__init__()
            self.spare, self.tied = (torch.nn.Linear(support.WIDTH, support.WIDTH) for _ in range(2))
            self.tied.weight = self.first.weight

    assert_exact(Spare, ALONE)


@pytest.mark.parametrize("name", ["first", "alias", "a*", "*"])
def test_module_with_two_names(name: str, products: Counter[str]) -> None:
    class Alias(One):
        def __init__(self) -> None:
            super().__init__()
            self.alias = self.first

    assert_exact(Alias, Policy("linear_only", linear=(name,)), 0, products=products)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("names", [("first",), ("*",)], ids=str)
def test_adapter_that_is_added_later_is_an_error(names: tuple[str, ...], steps: int) -> None:
    """It wraps the module: its output, and those of its own Linear modules, would not be saved."""
    policy = Policy("linear_only", linear=names)
    model = torch.nn.ModuleDict({"stack": stack(block=One)})
    fastac.enable(model, policy, blocks="stack.blocks")
    for _ in range(steps):
        train_step(model["stack"], stack_inputs())
    inject_adapter_in_model(LoraConfig(target_modules=["first"]), model)
    with pytest.raises(PolicyNotAppliedError, match=r"'first' of ModuleDict\.stack\.blocks\.0 was exchanged.*again"):
        train_step(model["stack"], stack_inputs())
    fastac.enable(model, Policy("linear_only", linear=("*",)), blocks="stack.blocks")
    train_step(model["stack"], stack_inputs())


class Grows(One):
    """Has a module list in it."""

    def __init__(self) -> None:
        super().__init__()
        self.more = torch.nn.ModuleDict({"a": torch.nn.Linear(W, W)})

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for module in self.more.values():
            video = torch.tanh(module(video))
        return super().forward(video, text)


@pytest.mark.parametrize("batch", [1, 2])
def test_module_that_is_added_later_is_an_error_where_it_is_named(batch: int) -> None:
    """As peft does with a second adapter."""
    for names, is_named in ((("*",), True), (("first", "out"), False)):
        model = stack(layers=1, block=Grows, policy=Policy("linear_only", linear=names))
        train_step(model, stack_inputs())
        model.blocks[0].more["b"] = torch.nn.Linear(W, W)
        with (
            pytest.raises(PolicyNotAppliedError, match=r"'more\.b' of Grows was exchanged, or added")
            if is_named
            else contextlib.nullcontext()
        ):
            for _ in range(2):
                train_step(model, stack_inputs(batch=batch))


def test_module_whose_parent_is_exchanged_is_an_error() -> None:
    """Also while somebody holds on to the old one."""
    model = stack(policy=Policy("linear_only", linear=("ffn.*",)))
    train_step(model, stack_inputs())
    before = model.blocks[0].ffn
    model.blocks[0].ffn = copy.deepcopy(before)
    with pytest.raises(PolicyNotAppliedError, match=r"'ffn\.0' of AttentionBlock was exchanged"):
        train_step(model, stack_inputs())
    with torch.no_grad():  # where nothing would be saved
        model(**stack_inputs())
    model.blocks[0].ffn = before
    train_step(model, stack_inputs())


def test_linear_module_made_in_the_first_forward_is_an_error() -> None:
    class Late(One):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "late"):
                self.late = torch.nn.Linear(W, W)
            return super().forward(self.late(video), text)

    with pytest.raises(PolicyNotAppliedError, match=r"'late' of Late was exchanged, or added"):
        fastac.checkpoint(Late(), **stack_inputs(), policy=ALONE)


def test_weight_of_another_module_that_is_not_named() -> None:
    class Tied(One):
        def __init__(self) -> None:
            super().__init__()
            self.twin = torch.nn.Linear(W, W)
            self.twin.weight = self.out.weight

    with pytest.raises(PolicyNotAppliedError, match=r"no Linear module 'twin'"):
        fastac.checkpoint(Tied(), **stack_inputs(), policy=Policy("linear_only", linear=("first", "twin")))
    assert_exact(Tied, Policy("linear_only", linear=("[ft]*",)))


@pytest.mark.parametrize("inner_first", [False, True])
def test_linear_module_inside_another(inner_first: bool, products: Counter[str]) -> None:
    """An adapter that is written as a class of its own."""

    class Adapted(torch.nn.Linear):
        def __init__(self, *sizes: int) -> None:
            super().__init__(*sizes)
            self.down, self.up = torch.nn.Linear(W, 2), torch.nn.Linear(2, W)

        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
            if inner_first:
                change = self.up(self.down(input))
                return super().forward(input) + change
            return super().forward(input) + self.up(self.down(input))

    def adapted(module: torch.nn.Linear) -> torch.nn.Module:
        return Adapted(module.in_features, module.out_features)

    assert_exact(lambda: One(first=adapted), Policy("linear_only", linear=("first*",)), 0, products=products)


@pytest.mark.parametrize("other_shape", [False, True])
@pytest.mark.parametrize("copied", [False, True], ids=["new", "with the hooks of the first"])
@pytest.mark.parametrize("names", [("*",), ("first", "out")], ids=str)
def test_linear_module_that_was_exchanged(names: tuple[str, ...], copied: bool, other_shape: bool) -> None:
    """Also where the next region is the first with inputs of its shapes."""
    model = stack(block=One, policy=Policy("linear_only", linear=names))
    train_step(model, stack_inputs())
    block = model.blocks[0]
    block.first = copy.deepcopy(block.first) if copied else torch.nn.Linear(W, W)
    with pytest.raises(
        PolicyNotAppliedError, match=r"Linear module 'first' of One was exchanged.*fastac\.enable again"
    ):
        train_step(model, stack_inputs(batch=2 if other_shape else 1))


def test_linear_module_that_was_exchanged_before_enabling_again(products: Counter[str]) -> None:
    model = support.stack()
    fastac.enable(model, ALL, blocks="blocks")
    train_step(model, stack_inputs())
    model.blocks[0].ffn[0] = torch.nn.Linear(W, 2 * W)
    fastac.enable(model, ALL, blocks="blocks")
    products.clear()
    train_step(model, stack_inputs())
    assert products["addmm"] == NONE


def test_linear_module_that_is_not_called_any_more() -> None:
    class Sometimes(One):
        skips = False

        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.out(video)) if self.skips else super().forward(video, text)

    model = stack(layers=1, block=Sometimes, policy=ALONE)
    train_step(model, stack_inputs())
    model.blocks[0].skips = True
    with pytest.raises(PolicyNotAppliedError, match=r"saved the outputs of 1 Linear modules, and 2 before.*first"):
        train_step(model, stack_inputs())


def test_engine_sac_is_refused() -> None:
    with pytest.raises(FastacError, match=r'engine="sac".*which Linear module'):
        fastac.checkpoint(AttentionBlock(), **stack_inputs(), policy=ALL, engine="sac")


@pytest.mark.parametrize("how", ["compile", "fastac.compile", "part"])
def test_compiled_block_is_refused(how: str) -> None:
    torch._dynamo.reset()
    model, inputs = support.build("WanTransformer3DModel")
    fastac.enable(model, ALL)
    if how == "fastac.compile":
        fastac.compile(model, ALL, backend="aot_eager")
    elif how == "part":
        model.blocks[0].ffn.compile(backend="aot_eager")
    else:
        for block in model.blocks:
            block.compile(backend="aot_eager")
    with pytest.raises(FastacError, match=r"is compiled, or runs compiled code.*long_attn_only"):
        train_step(model, inputs)


def test_model_compiled_as_a_whole_is_refused() -> None:
    torch._dynamo.reset()
    model = torch.compile(stack(policy=ALL), backend="aot_eager")
    with pytest.raises(CompiledPolicyNotAppliedError, match="is seen in eager mode alone"):
        train_step(model, stack_inputs())


@pytest.mark.parametrize("policy", [ALL, ALONE], ids=str)
def test_traces_are_refused(policy: Policy) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    block, inputs = AttentionBlock(), [tensor.detach() for tensor in stack_inputs().values()]
    with pytest.raises(FastacError, match="are for eager mode; this is a trace"):
        make_fx(lambda *args: fastac.checkpoint(block, *args, policy=policy))(*inputs)


def test_export_is_refused_where_it_has_regions() -> None:
    """Strict, a program for inference has none; else it traces with what is on: switch that off first."""
    model = stack(policy=ALL, layers=1)
    inputs = {name: tensor.detach() for name, tensor in stack_inputs().items()}
    expected = model(**inputs)
    program = torch.export.export(model, (), inputs, strict=True)
    assert torch.equal(program.module()(**inputs), expected)
    with pytest.raises(CompiledPolicyNotAppliedError, match="is seen in eager mode alone"):
        torch.export.export(model, (), inputs, strict=False)


# Hooks


def hooks_of(model: torch.nn.Module) -> int:
    return sum(
        hook in (linear._begin, linear._end)
        for module in model.modules()
        for hooks in (module._forward_pre_hooks, module._forward_hooks)
        for hook in hooks.values()
    )


@pytest.mark.parametrize("blocks", [None, "blocks"])
def test_hooks_come_and_go(blocks: str | None) -> None:
    """State-dict keys stay. A policy that saves no Linear module's output takes the hooks away, as disable does."""
    model, inputs = support.build("WanTransformer3DModel")
    before = state_of(model)
    keys = list(model.state_dict())
    fastac.enable(model, ALL, blocks=blocks)
    assert hooks_of(model) == 0
    train_step(model, inputs)
    linears = [module for block in model.blocks for module in block.modules() if isinstance(module, torch.nn.Linear)]
    assert hooks_of(model) == 2 * len(linears)
    train_step(model, inputs)
    assert hooks_of(model) == 2 * len(linears)
    assert list(model.state_dict()) == keys
    fastac.enable(model, "attn_only", blocks=blocks)
    assert hooks_of(model) == 0
    with support.counting("aten::addmm") as counts:
        train_step(model, inputs)
        recomputed = counts["addmm"]
        fastac.enable(model, ALL, blocks=blocks)
        counts.clear()
        train_step(model, inputs)
        assert counts["addmm"] < recomputed
    fastac.disable(model)
    assert hooks_of(model) == 0
    assert state_of(model) == before


@pytest.mark.parametrize("between", ["disabled", "attn_only", "full", Policy("linear_only", linear=("q",))], ids=str)
def test_what_is_enabled_between_forward_and_backward_is_for_the_next(between: Any, products: Counter[str]) -> None:
    """The recompute is that of its forward, and leaves no hooks behind."""
    model, inputs = stack(), stack_inputs()
    expected = train_step(model, inputs)

    def backward(loss: torch.Tensor) -> None:
        fastac.disable(model) if between == "disabled" else fastac.enable(model, between, blocks="blocks")
        products.clear()
        loss.backward()

    for _ in range(2):
        fastac.enable(model, ALL, blocks="blocks")
        assert_same(train_step(model, inputs, backward=backward), expected)
        assert products["addmm"] == 0
        assert hooks_of(model) == 0


def test_hooks_do_nothing_without_a_region(products: Counter[str]) -> None:
    block, inputs = One(), stack_inputs()
    reference = train_step(block, inputs)
    fastac.checkpoint(block, **inputs, policy=ALL)
    assert hooks_of(block) == 4
    products.clear()
    assert_same(train_step(block, inputs), reference)
    with torch.no_grad():
        block(**inputs)
    assert products["addmm"] == 4
    assert_same(
        train_step(lambda **named: torch_checkpoint(block, *named.values(), use_reentrant=False), inputs),
        {name: tensor for name, tensor in reference.items() if "input" in name or name == "output"},
    )


def test_hooks_under_another_policy_save_nothing() -> None:
    """The same block in a region of its own, with hooks from before."""
    block, inputs = One(), stack_inputs()
    fastac.checkpoint(block, **inputs, policy=ALL)
    held, _, _ = held_by(block, Policy("linear_only", linear=("out",)), inputs)
    assert held == rows_of(W)
    assert hooks_of(block) == 4
    held, _, _ = held_by(block, "attn_only", inputs)
    assert held == 0


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("way", ["deepcopy", "pickle"])
@pytest.mark.parametrize("blocks", [None, "blocks"])
def test_copies_of_an_enabled_model(blocks: str | None, way: str, trained: bool, products: Counter[str]) -> None:
    """A copy trains on its own, and saves on its own."""
    model, inputs = support.build("WanTransformer3DModel")
    reference = train_step(model, inputs)
    products.clear()
    train_step(model, inputs)
    needed = products["addmm"]
    fastac.enable(model, ALL, blocks=blocks)
    if trained:
        train_step(model, inputs)
    if way == "deepcopy":
        copied = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    for one in (copied, model):
        for _ in range(2):
            products.clear()
            assert_same(train_step(one, inputs), reference)
            assert products["addmm"] == needed
    fastac.disable(copied)
    assert hooks_of(copied) == 0
    assert hooks_of(model) > 0


def test_products_are_intercepted_only_where_a_policy_needs_it() -> None:
    """From then on every product of the process costs a few microseconds more."""
    program = """
        import torch, fastac
        from fastac import interception
        from fastac.policy import Policy
        ops = {"aten::addmm", "aten::mm", "aten::bmm"}
        block = torch.nn.TransformerEncoderLayer(8, 2, dropout=0.0)
        model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block])})
        model.forward = lambda video: model["blocks"][0](video)
        for policy in ("attn_only", "full", Policy.budget("1GiB", linear=False)):
            fastac.enable(model, policy, blocks="blocks")
            for _ in range(2):
                model(torch.randn(3, 2, 8)).sum().backward()
            assert interception.intercepted() and not ops & set(interception.intercepted()), policy
        fastac.enable(model, Policy("linear_only", linear=("linear1",)), blocks="blocks")
        model(torch.randn(3, 2, 8)).sum().backward()
        assert ops <= set(interception.intercepted())
        print("done")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "done" in run.stdout, run.stderr


def test_another_package_at_the_products_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interception, "_holders", {})
    with pytest.raises(FastacError, match=r"aten::addmm can not be saved: another package"):
        interception.install_linear()


@pytest.mark.parametrize("policy", [ALL, ALONE, Policy("linear_only", linear=("ffn.*",))], ids=str)
def test_verify_says_how_many_outputs_are_saved(policy: Policy) -> None:
    model, inputs = support.build("WanTransformer3DModel")
    found = fastac.verify(model, **inputs, policy=policy)
    linears = sum(isinstance(module, torch.nn.Linear) for module in model.blocks.modules())
    assert found.linear_saved == (4 if "ffn" in str(policy) else linears)
    assert "outputs of Linear modules saved" in str(found)
    assert hooks_of(model) == 0


def test_verify_leaves_an_enabled_model_as_it_was(products: Counter[str]) -> None:
    model, inputs = support.build("WanTransformer3DModel")
    fastac.enable(model, ALL)
    train_step(model, inputs)
    products.clear()
    reference = train_step(model, inputs)
    needed = products["addmm"]
    fastac.verify(model, **inputs)
    products.clear()
    assert_same(train_step(model, inputs), reference)
    assert products["addmm"] == needed


def test_model_that_was_changed_trains_when_it_is_enabled_again() -> None:
    """As the message for a Linear module that was exchanged says."""
    model, inputs = stack(policy="none"), stack_inputs()
    fastac.enable(model, ALL, blocks="blocks")
    train_step(model, inputs)
    for block in model.blocks:
        block.ffn = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh())
    plain = copy.deepcopy(model)
    fastac.disable(plain)
    expected = train_step(plain, inputs)
    fastac.enable(model, ALL, blocks="blocks")
    for _ in range(2):
        assert_same(train_step(model, inputs), expected)
