"""Weights that are stored in other ways: offloaded, cast by layer, quantized. Values that a model reads."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate import disk_offload
from diffusers.hooks import HookRegistry, ModelHook

import fastac
from fastac.errors import FastacError
from tests.marks import needs_diffusers
from tests.planning import planned
from tests.planning.planned import WAN, stack_inputs, tiny
from tests.planning.test_plans import everything_of
from tests.support import AttentionStack, stack

CPU = torch.device("cpu")
FLOAT8 = {"storage_dtype": torch.float8_e4m3fn, "compute_dtype": torch.bfloat16}


class Packed(torch.nn.Parameter):
    """Int8 numbers, as libraries have them: a class of their own, with scales that are no parameter."""

    def __new__(cls, weight: torch.Tensor) -> Any:
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        mine = super().__new__(cls, (weight.detach() / scale).to(torch.int8).flatten(), requires_grad=False)
        mine.scale = scale
        return mine


class ByParameter(torch.nn.Linear):
    """A Linear module with such a weight in the place of its own."""

    def __init__(self, plain: torch.nn.Linear) -> None:
        super().__init__(plain.in_features, plain.out_features, plain.bias is not None, "meta")
        self.weight, self.bias = Packed(plain.weight), plain.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.weight, self.weight.scale, self.bias)


class ByBuffer(torch.nn.Module):
    """The same without a weight, with its scales in a dict."""

    def __init__(self, plain: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = plain.in_features, plain.out_features, plain.bias
        packed = Packed(plain.weight)
        self.meta = {"scale": packed.scale}
        self.register_buffer("packed", packed.data)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(x, self.packed, self.meta["scale"], self.bias)


def linear(x: torch.Tensor, numbers: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, numbers.view(len(scale), -1).to(x.dtype) * scale, bias)


def packed(model: Any, kind: Callable[[torch.nn.Linear], torch.nn.Module]) -> None:
    for name, module in list(model.blocks.named_modules()):
        if type(module) is torch.nn.Linear and not module.weight.requires_grad:
            model.blocks.set_submodule(name, kind(module))


WAYS: dict[str, Callable[[Any, Path], object]] = {
    "blocks": lambda model, path: model.enable_group_offload(
        CPU, CPU, offload_type="block_level", num_blocks_per_group=1
    ),
    "leaves, on disk": lambda model, path: model.enable_group_offload(
        CPU, CPU, "leaf_level", offload_to_disk_path=str(path)
    ),
    "layerwise casting": lambda model, path: model.enable_layerwise_casting(**FLOAT8),
    "disk_offload": lambda model, path: disk_offload(model, str(path), CPU),
    "quantized": lambda model, path: packed(model, ByParameter),
    "quantized, in buffers": lambda model, path: packed(model, ByBuffer),
}


def steps_of(plan: fastac.Plan) -> list[Any]:
    """What the policies of a plan do, whatever weights hold."""
    return [dataclasses.replace(one, peak_bytes=one.peak_bytes - plan.states.total) for one in plan.policies]


@functools.cache
def plain_plan() -> fastac.Plan:
    return fastac.plan(*tiny(WAN, torch.bfloat16, lora=4))


CASES = [pytest.param(way, False, marks=[needs_diffusers("0.36")] * (way == "leaves, on disk")) for way in WAYS]


@pytest.mark.parametrize(("way", "enabled"), [*CASES, ("blocks", True)])
def test_weights_that_are_stored_in_another_way(way: str, enabled: bool, tmp_path: Path) -> None:
    """Planned as those of a plain model, with their own bytes; and what is planned can be enabled and trained."""
    model, inputs = tiny(WAN, torch.bfloat16, lora=4)
    expected = plain_plan()
    if enabled:
        fastac.enable(model, "full", blocks="blocks")
    WAYS[way](model, tmp_path)
    before = everything_of(model)
    found = fastac.plan(model, inputs)
    assert everything_of(model) == before
    assert steps_of(found) == steps_of(expected)
    assert found.states.optimizer == expected.states.optimizer
    tensors = [*model.parameters(), *model.buffers()]
    scales = [one.weight.scale for one in model.modules() if isinstance(one, ByParameter)]
    scales += [one.meta["scale"] for one in model.modules() if isinstance(one, ByBuffer)]
    assert found.states.weights == sum(tensor.nbytes for tensor in (*tensors, *scales))
    if "_offload" not in way:  # which takes the adapters away, too
        if not enabled:
            fastac.enable(model, found.within("1GiB"))
        planned.step(model, inputs)
        assert all(one.grad is not None for one in model.parameters() if one.requires_grad)
        assert fastac.report(model).rows


def test_what_cannot_be_planned_says_when_it_can() -> None:
    """With the cause: hooks that change what is computed, and modules that cannot be copied."""

    class Whole(AttentionStack):
        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("in parts here")

    hooked = stack()
    HookRegistry.check_if_exists_or_initialize(hooked).register_hook(ModelHook(), "own")
    for model, cause in ((Whole(), "AssertionError: in parts here"), (hooked, "FakeTensor")):
        said = rf"{cause}[^\n]*\nIf its weights are quantized, plan before"
        with pytest.raises(FastacError, match=said) as caught:
            fastac.plan(model, stack_inputs(), blocks="blocks")
        assert caught.value.__cause__ is not None


def test_what_trains_under_autocast_is_planned_under_it() -> None:
    """Layerwise casting to fp32 leaves what its patterns skip as it is: in bf16."""
    model, inputs = tiny("HunyuanVideoTransformer3DModel", torch.bfloat16, lora=4)
    model.enable_layerwise_casting(storage_dtype=torch.bfloat16, compute_dtype=torch.float32)
    inputs = {name: one.float() if one.is_floating_point() else one for name, one in inputs.items()}
    with pytest.raises(FastacError, match=r"RuntimeError[^\n]*type[^\n]*\nIf it trains under torch.autocast"):
        fastac.plan(model, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        fastac.plan(model, inputs)
        planned.step(model, inputs)


def test_a_linear_module_of_a_class_of_its_own_is_not_chosen() -> None:
    model: Any = stack()
    for block in model.blocks:
        block.ffn.requires_grad_(False)
    packed(model, ByParameter)
    chosen = fastac.plan(model, stack_inputs(), blocks="blocks").within("1GiB")
    assert all(policy.linear and not any("ffn" in name for name in policy.linear) for policy in chosen.values())


def test_what_cannot_be_copied_is_shared() -> None:
    """A Python module, a lock, a generator, also inside of others. Inputs by position are those by name."""
    model: Any = stack()
    expected = fastac.plan(model, stack_inputs(), blocks="blocks")
    for given in (tuple(stack_inputs().values()), list(stack_inputs().values())):
        found = fastac.plan(model, given, blocks="blocks")
        assert (found.policies, found.inputs) == (expected.policies, "(1, 24, 16), (1, 6, 16)")
    model.library, model.blocks[0].lock = torch, threading.Lock()
    model.blocks[1].queue = [{"items": (number for number in range(3))}]
    assert fastac.plan(model, stack_inputs(), blocks="blocks") == expected
    assert list(model.blocks[1].queue[0]["items"]) == [0, 1, 2]


# Values of small inputs: a model may ask for them, and for what follows from them alone


MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 1]])


class Asks(AttentionStack):
    """A stack that asks for something before its blocks run."""

    def __init__(self, ask: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.ask, self.unknown = ask, torch.nn.Parameter(torch.ones(2, 5, 7))

    def forward(self, video: torch.Tensor, text: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        FOUND.append(self.ask(mask, self.unknown.detach()))
        return super().forward(video, text)


FOUND: list[Any] = []
"""What models found, in simulations too: those run copies of them."""


def asked(ask: Callable[[torch.Tensor, torch.Tensor], Any], mask: torch.Tensor = MASK, **options: Any) -> Any:
    """What a model finds in a plan; the values of `mask` are known, those of weights are not."""
    FOUND.clear()
    fastac.plan(Asks(ask), {**stack_inputs(), "mask": mask}, blocks="blocks", **options)
    assert all(found == FOUND[0] for found in FOUND)
    return FOUND[0]


def places(mask: torch.Tensor, features: torch.Tensor) -> list[Any]:
    """Their number is a shape: of what a mask picks, and of its places."""
    picked = [features[mask].shape, features[:, mask[0]].shape, mask.nonzero().shape]
    return [*map(tuple, picked), *(len(of_one) for of_one in mask[0].nonzero(as_tuple=True))]


def of_constants(mask: torch.Tensor, unknown: torch.Tensor) -> tuple[int, int]:
    return int((torch.arange(5) * mask[0]).max()), int(torch.full((2,), 3).sum() + torch.zeros(1, dtype=torch.int64))


def of_a_shape(mask: torch.Tensor, unknown: torch.Tensor) -> tuple[int, ...]:
    return int(torch.zeros_like(unknown).sum()), int(torch.ones_like(unknown).sum()), int(unknown.new_full((6,), 7)[5])


def test_what_follows_from_inputs_is_known() -> None:
    """Through several operations, constants and shapes. Of one in place, too, as views of it are."""
    assert asked(lambda mask, _: mask.sum(dim=1).tolist()) == [3, 1]
    assert asked(of_constants) == (3, 6)
    assert asked(of_a_shape) == (0, 70, 7)
    assert asked(places, MASK.bool()) == [(4, 7), (2, 3, 7), (4, 2), 3]
    assert asked(lambda mask, _: int(mask.clone()[0].add_(1).sum())) == 8


def test_an_input_that_is_changed_stays_as_it_is() -> None:
    given = MASK.clone()
    assert asked(lambda mask, _: int(mask.add_(1)[0].sum()) - int(mask[1].sum()), given) == 2
    assert torch.equal(given, MASK)


@pytest.mark.parametrize(
    "ask",
    [
        lambda mask, unknown: unknown.sum().item(),
        lambda mask, unknown: (unknown[..., 0] + mask).sum().item(),
        lambda mask, unknown: mask.copy_(unknown[..., 0]).sum().item(),
        lambda mask, unknown: torch.empty_like(mask).sum().item(),
    ],
)
def test_what_depends_on_other_values_is_not_known(ask: Callable[..., Any]) -> None:
    """Nor what is changed in place by them."""
    with pytest.raises(FastacError, match=r"does not run without data"):
        asked(ask)


def test_values_that_a_cpu_does_not_compute() -> None:
    """Kernels of CUDA on known values: their results are not known."""
    half = torch.ones(2, 4, dtype=torch.float16)
    assert asked(lambda mask, _: (mask + 1).sum().item(), half, device="cuda") == 16
    for ask in (
        lambda mask, _: mask.softmax(-1, dtype=torch.float32).sum().item(),
        lambda mask, _: torch.nn.functional.rms_norm(mask, (4,)).sum().item(),
    ):
        with pytest.raises(FastacError, match=r"does not run without data"):
            asked(ask, half, device="cuda")
