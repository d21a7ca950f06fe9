"""Saved outputs of Linear modules: exact, not run again, their bytes exact, or refused with the module's name.

Products are counted by the kernel of aten::addmm, in which a Linear module with a bias ends and no backward does.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model

import fastac
from fastac import FastacError, Policy, PolicyNotAppliedError
from fastac.engine.releases import WHOLE_PRODUCT
from fastac.errors import readable_bytes
from tests import support
from tests.engine.cases import Change, add_one, add_one_without_grad, assert_exact, held_bytes, twice
from tests.hook.hosts import diffuser
from tests.marks import NEEDS_COMPILED_MODELS
from tests.support import AttentionBlock, stack, stack_inputs, state_of, train_step

W = support.WIDTH

ALL = Policy("attn_only", linear=("*",))
ALONE = Policy("linear_only", linear=("*",))
FIRST = Policy("linear_only", linear=("first",))
PRODUCTS = "aten::addmm", "aten::mm", "aten::bmm"
FFN = Policy("attn_only", linear=("ffn.0",))


@pytest.fixture
def products() -> Iterator[Counter[str]]:
    """How often CPU kernels of matrix products ran since the test began or called `.clear()`."""
    with support.counting(*PRODUCTS) as counts:
        yield counts


class One(torch.nn.Module):
    """A Linear module, what a test does to its input and output, another Linear module. The text is not used."""

    def __init__(
        self,
        change: Change | None = None,
        before: Change | None = None,
        bias: bool = True,
        first: Callable[[torch.nn.Linear], torch.nn.Module] | None = None,
    ) -> None:
        super().__init__()
        self.first = torch.nn.Linear(W, W, bias=bias)
        if first is not None:
            self.first = first(self.first)
        self.out = torch.nn.Linear(W, W)
        self.change, self.before = change, before

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        output = self.first(video if self.before is None else self.before(video))
        if self.change is not None:
            output = self.change(output)
        return video + self.out(torch.tanh(output))


# Exact, and run once


@pytest.mark.parametrize(
    ("policy", "again", "attention"),
    [
        ("attn_only", 2 * 6, 0),  # a recompute ends before the last of the seven Linear modules
        (ALL, 0, 0),
        (ALONE, 0, 4),
        (Policy("attn_only", min_kv=10, linear=("q", "qkv")), 2 * 4, 2),
    ],
    ids=str,
)
def test_saved_products_run_once(policy: Any, again: int, attention: int, attention_executions: Counter[str]) -> None:
    with support.counting(*PRODUCTS) as products:
        assert_exact(AttentionBlock, products, again, policy, batch=2)
    assert_exact(AttentionBlock, attention_executions, attention, policy, batch=2)


def crossed(video: torch.Tensor) -> torch.Tensor:
    """The same values, in a layout that cannot be flattened."""
    return video.transpose(1, 2).contiguous().transpose(1, 2)


def first_token(video: torch.Tensor) -> torch.Tensor:
    return video[0, 0]


def frozen(module: torch.nn.Linear) -> torch.nn.Linear:
    return module.requires_grad_(False)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("first", [None, frozen], ids=["trained", "frozen"])
@pytest.mark.parametrize("before", [None, crossed, first_token], ids=["plain", "crossed", "vector"])
def test_every_way_to_multiply(bias: bool, first: Any, before: Any, products: Counter[str]) -> None:
    assert_exact(lambda: One(bias=bias, first=first, before=before), products, 0, FIRST, batch=2)


# What becomes of the output


CHANGES = pytest.mark.parametrize("change", [add_one, add_one_without_grad])


@pytest.mark.skipif(not WHOLE_PRODUCT, reason="it shares no version: the next test")
@CHANGES
def test_in_place_change_of_an_output(change: Change) -> None:
    """Legal without checkpointing: no backward needs the product."""
    model = stack(policy=FIRST, block=lambda: One(change))
    with pytest.raises(FastacError, match=r"addmm.*in place"):
        train_step(model, stack_inputs(batch=2))


@CHANGES
@pytest.mark.parametrize(("bias", "before"), [(False, None), (True, crossed), *[(True, None)] * (not WHOLE_PRODUCT)])
def test_in_place_change_of_an_output_that_shares_no_version(
    change: Change, bias: bool, before: Any, products: Counter[str]
) -> None:
    """aten::_unsafe_view gives it another counter than the product's: silently wrong by 0.5 without a copy."""
    for backward in (None, twice):
        assert_exact(lambda: One(change, before, bias), products, 0, FIRST, backward, batch=2)


@CHANGES
def test_in_place_change_of_an_output_outside_the_graph(change: Change) -> None:
    assert_exact(lambda: One(change, before=torch.Tensor.detach, first=frozen), policy=FIRST)


def test_low_rank_adapters() -> None:
    """Adapters are Linear modules as well, without a bias. Dropout between them draws what it drew."""

    def block() -> torch.nn.Module:
        config = LoraConfig(r=2, target_modules=["qkv", "ffn.2"], lora_dropout=0.3, init_lora_weights=False)
        return get_peft_model(AttentionBlock(dropout=0.3), config).train().base_model.model

    assert_exact(block, policy=ALL, batch=2)


def test_products_that_are_no_linear_modules_run_again() -> None:
    """Before, between and after Linear modules. Only products inside their hooks are saved."""

    class Between(One):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            weight = self.out.weight
            video = video + (torch.mm(video[0], weight) + torch.addmm(self.out.bias, video[0], weight)).tanh()[None]
            output = torch.mm(self.first(video)[0], weight)[None]
            return video + self.out(torch.tanh(output))

    assert_exact(Between, policy=Policy("linear_only", linear=("first", "out")))
    # torch ends the first recompute inside the last module, which does not run any more when the second begins.
    assert_exact(Between, policy=ALONE, backward=twice)


# What users do around it


def test_recompute_on_another_path() -> None:
    class Other(AttentionBlock):
        calls = 0

        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            with torch.no_grad():  # autograd keeps nothing of it, so that torch's own check counts nothing
                for module in (self.self_out, self.q)[:: 1 if self.calls == 1 else -1]:
                    module(video)
            return torch.tanh(video)

    output = fastac.checkpoint(Other(), **stack_inputs(), policy=ALL, early_stop=False)
    with pytest.raises(FastacError, match="Linear module"):
        support.loss_of(output).backward()


# Memory


def rows_of(columns: int, rows: int = support.VIDEO_TOKENS) -> int:
    return columns * rows * 4


BYTES = {"qkv": rows_of(3 * W), "kv": rows_of(2 * W, support.TEXT_TOKENS), "ffn.*": rows_of(2 * W) + rows_of(W)}
BYTES["*"] = sum(BYTES.values()) + 3 * rows_of(W)


@pytest.mark.parametrize("name", BYTES)
def test_held_bytes_are_those_of_the_outputs(name: str) -> None:
    """To the byte, and nothing is left after a backward, or where none comes."""
    assert held_bytes(AttentionBlock(), Policy("linear_only", linear=(name,))) == (BYTES[name], 0, 0)


@pytest.mark.parametrize(("bias", "before"), [(False, None), (True, crossed)])
def test_held_bytes_of_copies(bias: bool, before: Any) -> None:
    assert held_bytes(One(before=before, bias=bias), FIRST) == (rows_of(W), 0, 0)


def test_report_and_verify_say_what_is_held() -> None:
    model, inputs = support.build("WanTransformer3DModel")
    policy = Policy("attn_only", linear=("ffn.*",))
    verified = fastac.verify(model, **inputs, policy=policy)
    assert verified.policy_executions == (verified.reference_executions[0], 0), "of attention alone"
    fastac.enable(model, policy)
    train_step(model, inputs)
    (row,) = fastac.report(model).rows
    block, video = model.blocks[0], inputs["hidden_states"]
    columns = block.ffn.net[0].proj.out_features + block.ffn.net[2].out_features
    assert row.linear_saved == verified.linear_saved == 4
    assert row.linear_bytes == 2 * 4 * video.shape[0] * (video[0, 0].numel() // 4) * columns
    assert (verified.saved_bytes, verified.linear_bytes) == (row.saved_bytes, row.linear_bytes)
    assert all(readable_bytes(row.linear_bytes) in str(one) for one in (fastac.report(model), verified))


# Refused


@pytest.mark.parametrize("names", [("*", "to_q"), ("to_q",)])
def test_a_name_of_no_linear_module(names: tuple[str, ...]) -> None:
    with pytest.raises(PolicyNotAppliedError, match=r"'to_q'.*qkv"):
        fastac.checkpoint(AttentionBlock(), **stack_inputs(), policy=Policy("attn_only", linear=names))


def test_a_name_of_no_block_fails_at_enable() -> None:
    """A name that only some blocks have is fine there. The model is left as it was."""
    model = support.stack(layers=2)
    model.blocks[1].extra = torch.nn.Linear(4, 4)
    for policy, message in (
        (Policy(linear=("ffn.0", "to_q")), r"no block of AttentionStack.* 'to_q'\. "),
        (Policy(linear=("fnn.*",)), r"'fnn\.\*'\. Did you mean \"ffn\.\*\"\? "),
        ({"blocks.0": Policy(linear=("extra",)), "*": "full"}, "'extra'"),
    ):
        before = state_of(model)
        with pytest.raises(FastacError, match=message):
            fastac.enable(model, policy, blocks="blocks")
        assert state_of(model) == before
    fastac.enable(model, Policy(linear=("extra", "ffn.*")), blocks="blocks")


def test_names_in_a_model_whose_blocks_are_guessed() -> None:
    """It may call parts of them, as a UNet does: these have other names."""
    model = diffuser()
    fastac.enable(model, Policy(linear=("0",)))
    with pytest.raises(FastacError, match="'to_q'"):
        fastac.enable(model, Policy(linear=("to_q",)))
    known = support.build("WanTransformer3DModel")[0]
    for name in ("to_q", "proj_out", "condition_embedder.time_proj"):
        with pytest.raises(FastacError, match="no block of WanTransformer3DModel"):
            fastac.enable(known, Policy(linear=(name,)))


@pytest.mark.parametrize("function", [lambda block: lambda *args: block(*args), functools.partial], ids=["", "partial"])
def test_a_function_that_is_no_block(function: Any) -> None:
    with pytest.raises(FastacError, match=r"linear="):
        fastac.checkpoint(function(AttentionBlock()), *stack_inputs().values(), policy=ALL)


class Quantized(torch.nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002
        return (input[..., None, :] * self.weight).sum(-1) + self.bias


@pytest.mark.parametrize("way", ["its own way", "parametrized", "its weight", "its forward", "another thread"])
def test_a_module_whose_product_is_not_seen(way: str) -> None:
    class Around(One):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            if way == "its weight":
                found = F.linear(video, self.first.weight, self.first.bias)
            elif way == "its forward":
                found = self.first.forward(video)
            elif way == "another thread":
                with ThreadPoolExecutor(1) as pool:
                    found = pool.submit(self.first, video).result()
            else:
                found = self.first(video)
            return video + self.out(torch.tanh(found))

    def first(module: torch.nn.Linear) -> torch.nn.Module:
        if way == "parametrized":
            return torch.nn.utils.parametrizations.weight_norm(module)
        return Quantized(W, W) if way == "its own way" else module

    with pytest.raises(FastacError, match="'first'"):
        fastac.checkpoint(Around(first=first), **stack_inputs(), policy=FIRST)
    assert_exact(lambda: Around(first=first), policy=Policy("linear_only", linear=("out",)))


@pytest.mark.parametrize("how", ["block", pytest.param("model", marks=NEEDS_COMPILED_MODELS)])
def test_compiled_code_is_refused(how: str) -> None:
    torch._dynamo.reset()
    model, inputs = stack(), stack_inputs()
    fastac.enable(model, ALL, blocks="blocks")
    compiled = {"block": model.blocks[0], "model": model}[how]
    compiled.compile(backend="aot_eager")
    with pytest.raises(FastacError, match=r"compiled|eager"):
        train_step(model, inputs)


# Hooks


def test_hooks_come_and_go(products: Counter[str]) -> None:
    """State-dict keys never change, hooks are removed by disable, and each policy saves only what it names."""
    model, inputs = stack(), stack_inputs()
    before, keys, executed = state_of(model), list(model.state_dict()), []
    for policy in ("attn_only", ALL, "attn_only", ALL):
        fastac.enable(model, policy, blocks="blocks")
        for _ in range(2):
            products.clear()
            train_step(model, inputs)
        executed.append(products["addmm"])
        assert list(model.state_dict()) == keys
        if policy == ALL:
            fastac.disable(model)
            assert state_of(model) == before
    assert executed[1] == executed[3] < executed[0] == executed[2]


def disable_and_train(model: Any) -> None:
    fastac.disable(model)
    train_step(model, stack_inputs(2))


MEANWHILE: dict[str, Callable[[Any], object]] = {
    "disable and train": disable_and_train,
    "other names": lambda model: fastac.enable(model, FFN, blocks="blocks"),
    "verify": lambda model: fastac.verify(model, **stack_inputs(2)),
}


@pytest.mark.parametrize("meanwhile", MEANWHILE)
def test_a_graph_that_is_alive_meanwhile(meanwhile: str, products: Counter[str]) -> None:
    """Its recompute gets the products that its forward saved. No hook stays behind."""
    model, inputs = stack(), stack_inputs()
    expected, plain = train_step(model, inputs), state_of(model)
    fastac.enable(model, ALL, blocks="blocks")

    def backward(loss: torch.Tensor) -> None:
        MEANWHILE[meanwhile](model)
        model.zero_grad()
        products.clear()
        loss.backward()
        assert not products["addmm"]

    support.assert_same(train_step(model, inputs, backward=backward), expected)
    support.assert_same(train_step(model, inputs), expected)
    fastac.disable(model)
    assert state_of(model) == plain
