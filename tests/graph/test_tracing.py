"""fastac.graph.trace: a graph that does what the step does, on the model's present state, or an error."""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.fx.traceback
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
import fastac.graph
from fastac import FastacError
from tests.graph.steps import run, step_of
from tests.support import AttentionBlock, assert_same, stack, stack_inputs


def test_the_graph_uses_the_present_state_of_the_model() -> None:
    model, inputs = stack(), stack_inputs()
    with torch.no_grad():  # as under a validation's decorator: the trace turns gradients on
        traced = fastac.graph.trace(step_of(model), model, **inputs)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
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
    parameters = [*model.parameters(), inputs["video"]]

    def step(**inputs: Any) -> Any:
        return torch.autograd.grad(model(**inputs).square().sum(), parameters, allow_unused=True)

    expected, found = step(**inputs), fastac.graph.trace(step, model, **inputs)(**inputs)
    assert all(map(torch.equal, found, expected))


# What the trace took for granted


def refuses(function: Any, what: str, *args: Any, **kwargs: Any) -> None:
    with pytest.raises(FastacError, match=what):
        function(*args, **kwargs)


def test_another_call_than_the_traced_one_is_refused() -> None:
    model, inputs = stack(), stack_inputs()
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    longer = torch.randn(1, 25, 16, requires_grad=True)
    refuses(traced, r"argument\['video'\].*1, 25, 16.*now.*1, 24, 16", **inputs | {"video": longer})
    refuses(traced, r"argument\['video'\]", **inputs | {"video": inputs["video"].detach()})
    refuses(traced, r"argument\['text'\].*float64", **inputs | {"text": inputs["text"].double()})
    refuses(traced, r"argument\[0\]", *inputs.values())
    refuses(traced, r"argument\['more'\]: 1 now, absent when traced", **inputs, more=1)
    transposed = inputs["video"].detach().mT.contiguous().mT.requires_grad_()
    refuses(traced, r"384, 1, 24", **inputs | {"video": transposed})
    run(traced, inputs)


def test_a_number_that_changed_is_refused() -> None:
    model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    traced = fastac.graph.trace(lambda x, scale: model(x) * scale, model, x, [{"scale": 2.0}][0]["scale"])
    refuses(traced, r"argument\[1\]: 3\.0 now, 2\.0 when traced", x, 3.0)
    with_model = fastac.graph.trace(lambda model, x, part: model(x[part]), model, model, x, slice(0, 1))
    assert torch.equal(with_model(model, x, slice(0, 1)), model(x[:1]))
    refuses(with_model, r"argument\[0\]: Linear", torch.nn.Linear(2, 2), x, slice(0, 1))
    refuses(with_model, r"argument\[2\]: slice\(0, 2, None\)", model, x, slice(0, 2))


def test_a_model_that_changed_is_refused() -> None:
    model, inputs = stack(block=lambda: AttentionBlock(dropout=0.5)), stack_inputs()
    traced = fastac.graph.trace(step_of(model), model, **inputs)
    model.blocks[0].eval()
    refuses(traced, r"module blocks\.0: eval mode now, train mode when traced", **inputs)
    model.train()
    model.blocks[0].q.weight.requires_grad_(False)
    refuses(traced, r"blocks\.0\.q\.weight", **inputs)
    model.blocks[0].q.weight.requires_grad_(True)
    model.blocks[1].q.weight = model.blocks[0].q.weight  # tied now
    refuses(traced, r"blocks\.1\.q\.weight: absent now", **inputs)


def test_one_tensor_in_two_places_is_one_input() -> None:
    """So a call with two is another call, and one where two were traced as well."""
    one, other = torch.tensor(2.0), torch.tensor(3.0)
    model = stack(policy="attn_only")
    same, different = (fastac.graph.trace(lambda a, b: a * 10 + b, model, one, b) for b in (one, other))
    assert same(other, other) == 33
    assert different(other, one) == 32
    refuses(same, r"argument\[1\]", one, other)
    refuses(different, r"argument\[1\]", one, one)


def test_objects_that_may_hold_tensors_are_refused() -> None:
    """The same object with another tensor inside would train on the first one."""

    @dataclasses.dataclass
    class Batch:
        video: torch.Tensor

    for unknown in (Batch(torch.ones(1)), collections.UserDict(video=torch.ones(1))):
        refused(lambda batch: batch, stack(), rf"argument\[0\] is a {type(unknown).__name__}, and", unknown)


def test_autocast_is_that_of_the_trace() -> None:
    """What a graph casts, it casts by nodes: autocast around the call must neither be missed nor cast again."""
    model, inputs = stack(), stack_inputs()
    step = step_of(model)

    def under_autocast(**inputs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return step(**inputs)

    inside = fastac.graph.trace(under_autocast, model, **inputs)
    assert_same(run(inside, inputs), run(under_autocast, inputs))
    with torch.autocast("cpu", torch.bfloat16):
        around = fastac.graph.trace(step, model, **inputs)
        assert_same(run(around, inputs), run(step, inputs))
    refuses(around, "autocast on cpu: off now, torch.bfloat16 when traced", **inputs)


# Steps that a graph cannot repeat


def refused(step: Any, model: torch.nn.Module, what: str, *args: Any) -> None:
    refuses(fastac.graph.trace, what, step, model, *args)


@pytest.mark.parametrize("how", ["backward", "assigned", "added", "added from a list"])
def test_stored_gradients_are_refused(how: str) -> None:
    """The graph would not store them: the optimizer would step with none, or with old ones."""
    model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)
    held = list(model.parameters())
    if "added" in how:
        for parameter in held:
            parameter.grad = torch.zeros_like(parameter)
    before = [parameter.grad for parameter in held]

    def step(x: torch.Tensor) -> None:
        loss = model(x).sum()
        if how == "backward":
            loss.backward()
            return
        parameters = held if "list" in how else list(model.parameters())
        for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            if "added" in how:
                parameter.grad.add_(gradient)
            else:
                parameter.grad = gradient

    refused(step, model, r"stores gradients in \.grad", x)
    assert all(parameter.grad is gradient for parameter, gradient in zip(held, before, strict=True))
    assert all(gradient is None or not gradient.any() for gradient in before)


def test_trained_tensors_from_elsewhere_are_refused() -> None:
    """Their share of the gradients would be missing, or all of it."""
    model, other, x = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2), torch.ones(1, 2)
    held = list(model.parameters())

    def decays(x: torch.Tensor) -> Any:
        return torch.autograd.grad(model(x).sum() + held[0].square().sum(), held)

    def through(x: torch.Tensor) -> Any:
        return torch.autograd.grad(other(model(x)).sum(), [*model.parameters()])

    refused(decays, model, r"\(2, 2\) that requires grad.*model\.get_parameter", x)
    refused(through, model, "requires grad", x)
    refused(
        lambda x: torch.autograd.grad(model(x).sum(), [other.weight], allow_unused=True), model, "differentiates by", x
    )
    other.requires_grad_(False)  # a frozen teacher
    traced = fastac.graph.trace(through, model, x)
    other.weight.add_(1)  # its present state counts
    assert all(map(torch.equal, traced(x), through(x)))


def test_tensors_that_the_step_stores_in_the_model_are_refused() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    layer, x = model[0], torch.ones(1, 2)
    layer.last = None
    refused(lambda x: setattr(layer, "last", model(x)), model, r"stores a tensor in the model \(0\.last\)", x)
    refused(lambda x: setattr(model, "new", model(x)), model, r"stores a tensor in the model \(new\)", x)
    assert layer.last is None
    assert not hasattr(model, "new")
    layer.seen, layer.cache = [], {}
    refused(lambda x: layer.seen.append(model(x)), model, r"stores a tensor in the model \(0\.seen\)", x)
    refused(lambda x: layer.cache.update(last=model(x)), model, r"stores a tensor in the model \(0\.cache\)", x)
    refused(lambda x: layer.register_buffer("late", model(x)), model, r"stores a tensor in the model", x)
    assert (layer.seen, layer.cache, dict(layer.named_buffers())) == ([], {}, {})
    layer.register_buffer("calls", torch.zeros(()))
    refused(lambda x: setattr(layer, "calls", layer.calls + 1), model, r"replaces 'calls'.*self\.calls\.copy_", x)
    assert layer.calls == 0


def test_random_numbers_that_a_graph_does_not_repeat_are_refused() -> None:
    """No operator draws them, or a generator that the step makes anew and the graph does not."""
    model, held = torch.nn.Linear(2, 2), torch.Generator()
    state = torch.get_rng_state()
    for step, message in (
        (lambda x: (torch.manual_seed(0), model(x))[1], "seeds a generator or draws random numbers"),
        (lambda x: model(x) * random.random(), "seeds a generator or draws random numbers"),
        (lambda x: model(x) + torch.randn(1, 2, generator=torch.Generator().manual_seed(0)), "it makes or holds"),
        (lambda x: model(x) + torch.randn(1, 2, generator=held), "it makes or holds"),
    ):
        refused(step, model, message, torch.ones(1, 2))
    torch.set_rng_state(state)


def test_a_generator_may_be_an_argument() -> None:
    model, x = torch.nn.Linear(2, 2), torch.ones(1, 2)

    def step(x: torch.Tensor, generator: torch.Generator) -> Any:
        return torch.autograd.grad((model(x) * torch.randn(1, 2, generator=generator)).sum(), [*model.parameters()])

    generator = torch.Generator().manual_seed(3)
    traced = fastac.graph.trace(step, model, x, generator)
    found = [traced(x, generator)[0] for _ in range(2)]
    generator.manual_seed(3)
    assert all(torch.equal(one, step(x, generator)[0]) for one in found)


def test_dropout_in_torchs_checkpoint_is_refused() -> None:
    """Its recompute would be more operators of the graph, which draw other numbers: wrong gradients, no error."""
    model = torch.nn.Linear(4, 4)

    def step(x: torch.Tensor, rate: float) -> Any:
        loss = torch_checkpoint(lambda x: F.dropout(model(x).sin(), rate).sin(), x, use_reentrant=False).sum()
        return torch.autograd.grad(loss, [*model.parameters()])

    x = torch.ones(2, 4, requires_grad=True)
    refused(step, model, "draws random numbers in the backward", x, 0.5)
    assert all(map(torch.equal, fastac.graph.trace(step, model, x, 0.0)(x, 0.0), step(x, 0.0)))


# What a trace leaves behind


def test_the_engine_is_as_before_after_a_trace() -> None:
    before = torch.autograd.graph._engine_run_backward, torch.autograd._engine_run_backward
    with pytest.raises(ZeroDivisionError):
        fastac.graph.trace(lambda: 1 / 0, torch.nn.Linear(2, 2))
    assert (torch.autograd.graph._engine_run_backward, torch.autograd._engine_run_backward) == before
