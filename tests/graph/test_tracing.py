"""fastac.graph.trace: a graph that does what the step does, on the model's present state, or an error."""

from __future__ import annotations

import collections
import dataclasses
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac.graph
from fastac import FastacError
from tests.graph.steps import run, step_of, targets
from tests.support import AttentionBlock, AttentionStack, assert_same, stack, stack_inputs


def test_the_graph_uses_the_present_state_of_the_model() -> None:
    model, inputs = stack(), stack_inputs()
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    for seed in (1, 2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.1 * seed)
        assert_same(run(traced, inputs), run(step_of(model), inputs))
    model.load_state_dict(stack(seed=5).state_dict(), assign=True)  # other tensors altogether
    assert_same(run(traced, inputs), run(step_of(model), inputs))


def test_arguments_and_results_of_any_structure() -> None:
    model = torch.nn.Linear(3, 3)

    def step(batch: dict[str, Any], /, *, scale: float, targets: list[torch.Tensor] | None = None) -> Any:
        output = model(batch["x"]["y"]) * scale
        loss = output.square().sum() + (targets[0].sum() if targets else 0)
        return {"loss": loss, "rest": (torch.autograd.grad(loss, [*model.parameters()]), None, scale)}

    batch = {"x": {"y": torch.randn(2, 3)}}
    for kwargs in ({"scale": 2.0}, {"scale": 0.5, "targets": [torch.ones(2)]}):
        traced = fastac.graph.trace(step, model, batch, **kwargs)
        expected, found = step(batch, **kwargs), traced(batch, **kwargs)
        assert found["rest"][1:] == (None, kwargs["scale"])
        assert torch.equal(found["loss"], expected["loss"])
        assert all(map(torch.equal, found["rest"][0], expected["rest"][0]))
        assert not found["loss"].requires_grad


def test_parameters_that_a_step_holds_in_a_list_are_the_models() -> None:
    """As an optimizer's list: gradients would be None without an error, under allow_unused."""
    model, inputs = stack(), stack_inputs()
    parameters = list(model.parameters())
    video = inputs["video"]

    def step(**inputs: Any) -> Any:
        loss = model(**inputs).square().sum()
        return torch.autograd.grad(loss, [*parameters, video], allow_unused=True)

    expected, found = step(**inputs), fastac.graph.trace(step, model, **inputs)(**inputs)
    assert len(found) == len(expected) == len(parameters) + 1
    assert all(map(torch.equal, found, expected))


def test_tied_weights_are_one_input() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight

    def step(x: torch.Tensor) -> Any:
        return torch.autograd.grad(model(x).square().sum(), [*model.parameters()])

    x = torch.randn(2, 4)
    traced = fastac.graph.trace(step, model, x)
    assert all(map(torch.equal, traced(x), step(x)))
    model[1].weight = torch.nn.Parameter(torch.randn(4, 4))
    with pytest.raises(FastacError, match=r"parameters and buffers \(1\.weight\)"):
        traced(x)


def test_no_region_and_no_gradient_are_fine_for_a_trace() -> None:
    model = torch.nn.Linear(3, 3)
    x = torch.randn(2, 3)
    assert torch.equal(fastac.graph.trace(model, model, x)(x), model(x))


def test_backward_of_a_step_is_traced_wherever_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trace turns gradients on: a training loop may have them off, as under a validation's decorator."""
    model, inputs = stack(), stack_inputs()
    with torch.no_grad():
        traced = fastac.graph.trace(step_of(model), model, **inputs)
    assert_same(run(traced, inputs), run(step_of(model), inputs))


# What the trace took for granted


def refuses(traced: fastac.graph.Traced, what: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(FastacError, match=what):
        traced(*args, **kwargs)


def test_another_call_than_the_traced_one_is_refused() -> None:
    model, inputs = stack(), stack_inputs()
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    longer = torch.randn(1, 25, 16, requires_grad=True)
    refuses(
        traced,
        r"argument video: shape \(1, 25, 16\) now, traced with \(1, 24, 16\)\. Trace the step again",
        **inputs | {"video": longer},
    )
    refuses(traced, "argument video: requires_grad False now, .* True", **inputs | {"video": inputs["video"].detach()})
    refuses(traced, "argument text: dtype torch.float64 now", **inputs | {"text": inputs["text"].double()})
    refuses(traced, r"called with \(_, _\), traced with \(video=_, text=_\)", *inputs.values())
    refuses(traced, r"called with \(video=_, text=_, more=_\), traced", **inputs, more=1)
    refuses(traced, "argument text: 3 now, traced with a tensor", **inputs | {"text": 3})
    transposed = inputs["video"].detach().mT.contiguous().mT.requires_grad_()
    refuses(traced, r"argument video: strides \(384, 1, 24\) now", **inputs | {"video": transposed})
    run(traced, inputs)


def test_a_number_that_changed_is_refused() -> None:
    model = torch.nn.Linear(2, 2)

    def step(x: torch.Tensor, scale: float) -> Any:
        return torch.autograd.grad((model(x) * scale).sum(), [*model.parameters()])

    x = torch.ones(1, 2)
    traced = fastac.graph.trace(step, model, x, 2.0)
    refuses(traced, r"argument 1: 3\.0 now, traced with 2\.0.*pass it as a tensor", x, 3.0)
    with_model = fastac.graph.trace(lambda model, x, part: model(x[part]), model, model, x, slice(0, 1))
    assert torch.equal(with_model(model, x, slice(0, 1)), model(x[:1]))
    refuses(with_model, r"another Linear than the one that was traced", torch.nn.Linear(2, 2), x, slice(0, 1))
    refuses(with_model, r"argument 2: slice\(0, 2, None\) now", model, x, slice(0, 2))


def test_an_argument_inside_another_is_named() -> None:
    model = torch.nn.Linear(2, 2)
    x = torch.ones(1, 2)
    traced = fastac.graph.trace(lambda batch, options: model(batch["x"][0]), model, {"x": [x]}, options=[1, {"y": 2}])
    refuses(traced, r"argument 0\['x'\]\[0\]: shape", {"x": [torch.ones(2, 2)]}, options=[1, {"y": 2}])
    refuses(traced, r"argument options\[1\]\['y'\]: 3 now", {"x": [x]}, options=[1, {"y": 3}])
    refuses(traced, r"called with \(\{'x': _\}, options=", {"x": x}, options=[1, {"y": 2}])


def test_a_model_that_changed_is_refused() -> None:
    model, inputs = stack(block=lambda: AttentionBlock(dropout=0.5)), stack_inputs()
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    model.eval()
    refuses(traced, r"the model was traced in train mode, and is in eval mode now: call model\.train\(\)", **inputs)
    model.train()
    model.blocks[0].eval()
    refuses(traced, r"module blocks\.0 .*: call model\.get_submodule\('blocks\.0'\)\.train\(\)", **inputs)
    model.train()
    model.add_module("more", torch.nn.Identity())
    refuses(traced, r"other modules than the traced one \(more\)", **inputs)
    del model.more
    model.blocks[0].q.weight.requires_grad_(False)
    refuses(traced, r"blocks\.0\.q\.weight", **inputs)
    model.blocks[0].q.weight.requires_grad_(True)
    model.double()
    refuses(traced, "parameters and buffers", **inputs)


def test_one_tensor_in_two_places_is_one_input() -> None:
    """So a call with two is another call, and one where two were traced as well."""
    one, other = torch.tensor(2.0), torch.tensor(3.0)

    def step(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a * 10 + b

    model = stack(policy="attn_only")
    same, different = fastac.graph.trace(step, model, one, one), fastac.graph.trace(step, model, one, other)
    assert same(other, other) == 33
    assert different(other, one) == 32
    refuses(same, "one and the same tensor", one, other)
    refuses(different, "one and the same tensor", one, one)


def test_objects_that_may_hold_tensors_are_refused() -> None:
    @dataclasses.dataclass
    class Batch:
        video: torch.Tensor

    def step(batch: Any) -> Any:
        return batch

    for strange in (Batch(torch.ones(1)), collections.UserDict(video=torch.ones(1))):
        refused(step, stack(), f"argument 0 is a {type(strange).__name__}, and what is inside", strange)
    assert fastac.graph.trace(step, stack(), float("nan"))(float("nan")) != 0


@pytest.mark.parametrize("writes", [False, True])
def test_arguments_that_share_memory(writes: bool) -> None:
    """Two slices of one batch are two tensors, unless the step writes to one of them."""
    model = torch.nn.Linear(2, 2)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = (model(x) * y).sum()
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        if writes:
            y.add_(1.0)
        return gradients

    traced = fastac.graph.trace(step, model, torch.ones(1, 2), torch.ones(1, 2))
    batch = torch.randn(2, 2)
    if writes:
        refuses(traced, "one and the same tensor, or share their memory", batch[:1], batch[1:])
    else:
        found = traced(batch[:1], batch[1:])
        assert all(map(torch.equal, found, step(batch[:1], batch[1:])))
        refuses(traced, "one and the same tensor", x := batch[:1], x)


def test_a_setting_of_a_module_that_changed_is_refused() -> None:
    class Switched(AttentionStack):
        on = True
        calls = 0

        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            self.calls += 1  # of no account: the step changes it itself
            return super().forward(video, text) * (2.0 if self.on else 1.0)

    model = Switched()
    model.blocks[1].dropout.p = 0.5
    model.sizes = (1, (2, torch.float32))
    inputs = stack_inputs()
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    traced(**inputs)
    model.sizes = (1, (2, torch.bfloat16))
    refuses(traced, r"the model's .sizes is \(1, \(2, torch.bfloat16\)\) now", **inputs)
    model.sizes = (1, (2, torch.float32))
    model.calls = 17
    traced(**inputs)
    model.on = False
    refuses(traced, "the model's .on is False now, traced with not set", **inputs)
    del model.on
    model.blocks[1].dropout.p = 0.25
    refuses(traced, "the model's blocks.1.dropout.p is 0.25 now, traced with 0.5", **inputs)


def test_a_backward_in_another_thread_goes_on_meanwhile() -> None:
    weight = torch.ones(3, requires_grad=True)
    found = []

    def elsewhere() -> None:
        found.append(torch.autograd.grad((weight * 2).sum(), weight)[0].tolist())

    def step(**inputs: Any) -> Any:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
        return step_of(model)(**inputs)

    model = stack(policy="attn_only")
    fastac.graph.trace(step, model, **stack_inputs())
    assert found == [[2.0, 2.0, 2.0]]


def test_autocast_is_that_of_the_trace() -> None:
    """What a graph casts, it casts by nodes: autocast around the call must neither be missed nor cast again."""
    model, inputs = stack(), stack_inputs()
    step = step_of(model)

    def under_autocast(**inputs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return step(**inputs)

    inside = fastac.graph.trace(under_autocast, model, **inputs)
    assert_same(run(inside, inputs), run(under_autocast, inputs))
    outside = fastac.graph.trace(step, model, **inputs)
    with torch.autocast("cpu", torch.bfloat16):
        refuses(outside, "autocast: torch.bfloat16 on cpu now, traced with none", **inputs)
        around = fastac.graph.trace(step, model, **inputs)
        assert_same(run(around, inputs), run(step, inputs))
        with torch.autocast("cpu", torch.float16):
            refuses(around, "autocast", **inputs)
    refuses(around, "autocast", **inputs)


def test_what_the_step_kept_from_autocast_is_kept_from_it() -> None:
    """A model under autocast that computes its modulation in fp32, as Wan's does."""
    model = torch.nn.Linear(8, 8)

    def step(x: torch.Tensor) -> Any:
        with torch.autocast("cpu", enabled=False):
            precise = model(x)
        return torch.autograd.grad(model(precise).square().sum(), [*model.parameters()])

    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        traced = fastac.graph.trace(step, model, x)
        assert all(map(torch.equal, traced(x), step(x)))


# Steps that a graph can not repeat


def refused(step: Any, model: torch.nn.Module, what: str, *args: Any) -> None:
    with pytest.raises(FastacError, match=what):
        fastac.graph.trace(step, model, *args)


def test_stored_gradients_are_refused() -> None:
    model = torch.nn.Linear(2, 2)
    refused(lambda x: model(x).sum().backward(), model, r"stores gradients in \.grad \(weight\)", torch.ones(1, 2))
    assert model.weight.grad is None
    x = torch.ones(1, 2, requires_grad=True)
    refused(lambda x: x.square().sum().backward(), model, "stores gradients", x)
    model.weight.grad = torch.ones(2, 2)  # of an earlier step: not this one's

    def step(x: torch.Tensor) -> Any:
        return torch.autograd.grad(model(x).sum(), [*model.parameters()])

    assert all(map(torch.equal, fastac.graph.trace(step, model, x)(x), step(x)))


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("listed", [False, True])
def test_gradients_that_the_step_assigns_are_refused(listed: bool, accumulates: bool) -> None:
    """By way of the model, where they would go to stand-ins, and of a list, where they would be stand-ins."""
    model = torch.nn.Linear(2, 2)
    held = list(model.parameters())
    before = [torch.ones_like(parameter) if accumulates else None for parameter in held]
    for parameter, gradient in zip(held, before, strict=True):
        parameter.grad = gradient

    def step(x: torch.Tensor) -> None:
        parameters = held if listed else list(model.parameters())
        gradients = torch.autograd.grad(model(x).sum(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if accumulates:
                parameter.grad.add_(gradient)  # type: ignore[union-attr]
            else:
                parameter.grad = gradient

    refused(step, model, r"stores gradients in \.grad \(weight\)", torch.ones(1, 2))
    assert all(parameter.grad is gradient for parameter, gradient in zip(held, before, strict=True))
    assert before[0] is None or torch.equal(before[0], torch.ones(2, 2))


def test_gradients_are_as_before_when_the_trace_fails() -> None:
    model = torch.nn.Linear(2, 2)
    held, x = list(model.parameters()), torch.ones(1, 2, requires_grad=True)

    def step(x_: torch.Tensor) -> None:
        for tensor in (*held, x):
            tensor.grad = torch.zeros_like(tensor)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fastac.graph.trace(step, model, x)
    assert [tensor.grad for tensor in (*held, x)] == [None] * 3


def test_another_thread_may_train_during_a_trace() -> None:
    """What is watched in a trace is watched in its thread; a second trace waits for the first."""
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    second: list[Any] = []

    def trace_as_well() -> None:
        second.append(fastac.graph.trace(lambda x: torch.autograd.grad(other(x).sum(), other.weight), other, x))

    def step(x: torch.Tensor) -> Any:
        for function in (lambda: (other(torch.ones(1, 2)).sum().backward(), optimizer.step()), trace_as_well):
            thread = threading.Thread(target=function)
            thread.start()
            thread.join(timeout=2)
        assert not second
        threads.append(thread)
        return torch.autograd.grad(model(x).sum(), model.weight)

    threads: list[threading.Thread] = []
    x, before = torch.ones(1, 2), other.weight.detach().clone()
    traced = fastac.graph.trace(step, model, x)
    threads[0].join()
    assert not torch.equal(other.weight, before)
    assert torch.equal(traced(x)[0], torch.ones(2, 2))
    assert torch.equal(second[0](x)[0], torch.ones(2, 2))


def test_a_step_of_an_optimizer_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(x: torch.Tensor) -> None:
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(model(x).sum(), [*model.parameters()]), strict=True
        ):
            parameter.grad = gradient
        optimizer.step()

    refused(step, model, r"calls AdamW\.step\(\).*let the optimizer step outside", torch.ones(1, 2))
    assert not optimizer.state
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # no hook was left


def test_parameters_from_a_list_that_are_updated_or_computed_with_are_refused() -> None:
    model = torch.nn.Linear(2, 2)
    held, x = list(model.parameters()), torch.ones(1, 2)

    @torch.no_grad()
    def updates(x: torch.Tensor, parameters: Any = held) -> Any:
        with torch.enable_grad():
            gradients = torch.autograd.grad(model(x).sum(), held)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.detach().view(-1).sub_(gradient.reshape(-1))
        return gradients

    def at_once(x: torch.Tensor) -> Any:
        gradients = torch.autograd.grad(model(x).sum(), held)
        with torch.no_grad():
            torch._foreach_sub_(held, gradients)

    def decays(x: torch.Tensor) -> Any:
        return torch.autograd.grad(model(x).sum() + held[0].square().sum(), held)

    refused(updates, model, r"updates parameter weight in place \(aten\.sub_\.Tensor\).*optimizer step outside", x)
    refused(at_once, model, r"updates parameter weight in place \(aten\._foreach_sub_", x)
    refused(decays, model, r"computes with weight from a place of its own.*model\.get_parameter", x)
    traced = fastac.graph.trace(lambda x: updates(x, list(model.parameters())), model, x)  # a graph can do that
    expected = [(p - g).detach() for p, g in zip(held, torch.autograd.grad(model(x).sum(), held), strict=True)]
    traced(x)
    assert all(map(torch.equal, held, expected))


def test_tensors_that_the_step_stores_in_the_model_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    layer, x = model[0], torch.ones(1, 2)
    layer.last, layer.all, layer.nested = None, [x], {"a": {"b": x}}

    def step_that(stores: Callable[[torch.Tensor], object]) -> Any:
        return lambda x: (stores(model(x).sum().detach()), model(x))[1]

    for where, stores in {
        r"0\.last": lambda loss: setattr(layer, "last", loss),
        r"0\.new": lambda loss: setattr(layer, "new", {"loss": [loss]}),
        r"0\.all\.1": lambda loss: layer.all.append(loss),
        r"0\.nested\.a\.c": lambda loss: layer.nested["a"].update(c=loss),
        r"0\.buffer": lambda loss: layer.register_buffer("buffer", loss),
        r"Sequential\.last": lambda loss: setattr(model, "last", loss),
    }.items():
        refused(step_that(stores), model, rf"stores a tensor in the model \({where}\).*Return it from the step", x)
        with pytest.raises(ZeroDivisionError):
            fastac.graph.trace(lambda x, stores=stores: (stores(x), 1 // 0), model, x)
    assert layer.last is None
    assert layer.all[0] is layer.nested["a"]["b"] is x
    assert (len(layer.all), len(layer.nested["a"]), dict(model.named_buffers())) == (1, 1, {})
    assert not hasattr(layer, "new")
    assert not hasattr(model, "last")
    layer.last = x  # what is there, and what is no tensor, is no matter
    fastac.graph.trace(step_that(lambda loss: setattr(layer, "count", 1)), model, x)
    assert layer.count == 1


def test_tensors_from_elsewhere_that_are_trained_are_refused() -> None:
    model, other = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    x = torch.ones(1, 2)

    def through(x: torch.Tensor) -> Any:
        return torch.autograd.grad(other(model(x)).sum(), [*model.parameters()])

    def by(x: torch.Tensor) -> Any:
        return torch.autograd.grad(model(x).sum(), [other.weight], allow_unused=True)

    refused(through, model, "neither a parameter of the model nor an argument", x)  # not the model's
    refused(by, model, "differentiates by a tensor", x)
    other.requires_grad_(False)  # a frozen teacher
    traced = fastac.graph.trace(through, model, x)
    other.weight.add_(1)  # its present state counts as well
    assert all(map(torch.equal, traced(x), through(x)))


def test_random_numbers_that_no_operator_draws_are_refused() -> None:
    model = torch.nn.Linear(2, 2)

    def seeds(x: torch.Tensor) -> Any:
        torch.manual_seed(0)
        return model(x)

    def draws(x: torch.Tensor) -> Any:
        return model(x) * random.random()

    state = torch.get_rng_state()
    for step in (seeds, draws):
        refused(step, model, "seeds a generator or draws random numbers", torch.ones(1, 2))
    torch.set_rng_state(state)


def test_a_generator_is_an_argument() -> None:
    model = torch.nn.Linear(2, 2)

    def step(x: torch.Tensor, generator: torch.Generator | None = None) -> Any:
        generator = generator or torch.Generator().manual_seed(3)
        loss = (model(x) * torch.randn(1, 2, generator=generator)).sum()
        return torch.autograd.grad(loss, [*model.parameters()])

    x = torch.ones(1, 2)
    refused(step, model, "draws from a generator that is no argument", x)
    generator = torch.Generator().manual_seed(3)
    traced = fastac.graph.trace(step, model, x, generator)
    found = [traced(x, generator) for _ in range(2)]
    generator.manual_seed(3)
    expected = [step(x, generator) for _ in range(2)]
    assert not torch.equal(found[0][0], found[1][0])
    assert all(torch.equal(f, e) for i in range(2) for f, e in zip(found[i], expected[i], strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_dropout_in_torchs_checkpoint_is_refused(use_reentrant: bool) -> None:
    """Its recompute would be more operators of the graph, which draw other numbers: wrong gradients, no error."""
    model = torch.nn.Linear(4, 4)

    def region(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(model(x).sin(), 0.5).sin()

    def step(x: torch.Tensor) -> Any:
        loss = torch_checkpoint(region, x, use_reentrant=use_reentrant).sum()
        return torch.autograd.grad(loss, [*model.parameters()])

    x = torch.ones(2, 4, requires_grad=True)
    if use_reentrant:
        with pytest.raises(RuntimeError):  # torch's own: it does not work with autograd.grad at all
            fastac.graph.trace(step, model, x)
    else:
        refused(step, model, "draws random numbers in the backward", x)


def test_torchs_checkpoint_without_dropout_is_traced_as_it_is() -> None:
    model, inputs = stack(policy="torch"), stack_inputs()
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    assert targets(traced.graph_module)["aten._scaled_dot_product_flash_attention_for_cpu.default"] == 8
    assert_same(run(traced, inputs), run(step_of(stack()), inputs))


class Router(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()


def test_a_step_that_looks_at_data_is_refused() -> None:
    model = torch.nn.Linear(2, 2)
    x = torch.ones(1, 2)
    refused(lambda x: model(x) if x.sum() > 0 else x, model, r"looks at the values of a tensor", x)
    refused(lambda x: model(x)[x > 0], model, r"looks at the values of a tensor \(aten.nonzero", x)
    routed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ModuleDict({"router": Router()})["router"])
    refused(routed, routed, r"\(aten\._local_scalar_dense\.default\) in 1 \(Router\), by \.item\(\)", x)
    assert not isinstance(model.weight, FakeTensor)


def test_a_step_that_puts_another_tensor_into_the_model_is_refused() -> None:
    class Rebinding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = self.calls + 1
            return x + self.calls

    model = Rebinding()
    refused(model, model, r"into the place of 'calls'.*self\.calls\.copy_", torch.ones(1))
    assert model.calls == 0


def test_a_module_that_is_there_twice_is_as_it_was_after_a_trace() -> None:
    model = torch.nn.Sequential(*[torch.nn.Linear(2, 2)] * 2)
    before = dict(model.named_parameters(remove_duplicate=False))
    traced = fastac.graph.trace(model, model, x := torch.ones(1, 2))
    with pytest.raises(ZeroDivisionError):
        fastac.graph.trace(lambda x: model(x) / (1 // 0), model, x)
    assert all(mine is before[name] for name, mine in model.named_parameters(remove_duplicate=False))
    assert torch.equal(traced(x), model(x))


def test_a_class_in_the_place_of_the_model_is_refused() -> None:
    with pytest.raises(FastacError, match="expected a model after the step"):
        fastac.graph.trace(lambda x: x, torch.ones(1))  # type: ignore[arg-type]


# Buffers


class Statistics(AttentionStack):
    """Counts its calls, and keeps running statistics in ways of its own, beside BatchNorm's."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        output = super().forward(video, text)
        self.mean.lerp_(output.detach().mean((0, 1)), 0.1)
        return output + self.mean


def test_buffers_that_the_step_changes_are_changed() -> None:
    found, expected = (torch.manual_seed(0) and Statistics() for _ in range(2))
    inputs = stack_inputs()
    traced = fastac.graph.trace(step_of(found), found, **inputs)
    assert found.calls == 0  # the trace itself leaves them
    for _ in range(2):
        assert_same(run(traced, inputs), run(step_of(expected), inputs))
    assert found.calls == 2
    assert_same(dict(found.named_buffers()), dict(expected.named_buffers()))
