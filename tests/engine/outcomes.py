"""Situations in which a checkpoint is to be exact, most of them those of torch's own tests of checkpointing.

`CASES` has them by name: each is called with a `Run`, and returns outputs. tests/engine/test_outcomes.py runs them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import allow_mutation_on_saved_tensors, save_on_cpu, saved_tensors_hooks
from torch.utils import checkpoint as torch_module

from tests import support
from tests.support import WIDTH, AttentionBlock, Tensors, run_checkpointed

NOTHING = contextlib.nullcontext()


class Run:
    """One run of a case: blocks, inputs and random numbers are the same in each.

    policy: "none" without checkpointing, "torch" for torch's own, else one of fastac. calls: of what is checkpointed
    and of the modules. found: gradients of what is no leaf.
    """

    def __init__(self, policy: str) -> None:
        self.policy, self.calls = policy, 0
        self.found: list[torch.Tensor] = []
        torch.manual_seed(0)
        self.block, self.other = AttentionBlock(dropout=0.2), AttentionBlock(dropout=0.2)
        self.scale, self.plain = torch.randn(WIDTH, requires_grad=True), torch.randn(WIDTH)
        self.video, self.text = support.stack_inputs().values()
        for module in (self.block, self.block.ffn, self.other):
            module.register_forward_pre_hook(self.count)

    def count(self, *_: Any) -> None:
        self.calls += 1

    def __call__(self, function: Callable[..., Any], *args: Any, options: Any = None, **kwargs: Any) -> Any:
        """Checkpoint a call, with these options of torch's checkpoint."""

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return function(*args, **kwargs)

        options = options if options and self.policy != "none" else {}
        called = function if isinstance(function, torch.nn.Module) else counted
        return run_checkpointed(called, *args, policy=self.policy, **options, **kwargs)

    def by_torch(self, function: Callable[..., Any], *args: Any, use_reentrant: bool = False) -> Any:
        """Under torch's own checkpoint, whatever the policy."""
        if self.policy == "none":
            return function(*args)
        return torch_module.checkpoint(function, *args, use_reentrant=use_reentrant)

    def region(self) -> torch.Tensor:
        return self(self.block, self.video, self.text)

    def attention(self, video: torch.Tensor) -> torch.Tensor:
        return self.block._attention(*self.block.qkv(video).chunk(3, dim=-1))

    def parts(self, video: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.attention(video).sin()
        return hidden, self.block.ffn(hidden)

    def smooth(self, video: torch.Tensor) -> torch.Tensor:
        """Unlike attention, it can be differentiated any number of times."""
        return torch.tanh(self.block.qkv(video)).square() * video.norm(dim=-1, keepdim=True).sin()

    def grad(self, output: torch.Tensor, *leaves: torch.Tensor, **options: Any) -> torch.Tensor:
        """Gradients that are compared. Returns the first."""
        found = torch.autograd.grad(output.square().sum(), leaves, **{"retain_graph": True} | options)
        self.found += found
        return found[0]

    def step(self, case: Callable[[Run], Any]) -> Tensors:
        """Outputs, gradients, and what is drawn afterwards. Outputs that require grad are backpropagated."""
        torch.manual_seed(1)
        outputs = support.flat_tensors(case(self), "output")
        found = {name: one.detach().clone() for name, one in outputs.items()}
        if roots := {name: one for name, one in outputs.items() if one.requires_grad}:
            support.loss_of(roots).backward()
        inputs = {"video": self.video, "text": self.text, "scale": self.scale}
        leaves = support.leaves_of(torch.nn.ModuleList([self.block, self.other]), inputs)
        found |= {f"gradient {number}": one.detach() for number, one in enumerate(self.found)}
        return found | support.gradients(leaves) | {"drawn": torch.rand(3)}


@dataclasses.dataclass
class Arguments:
    """Tensors where no checkpoint looks for any."""

    video: torch.Tensor
    more: dict[str, list[torch.Tensor]]


class Saving(torch.autograd.Function):
    """Its backward reads what it saved so often, and runs a backward of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor, reads: int) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        ctx.reads = reads
        return x * y + y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, y = [ctx.saved_tensors for _ in range(ctx.reads)][-1]
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (square,) = torch.autograd.grad((inner * y).sin().sum(), inner)
        return gradient * y + square, None, None


CASES: dict[str, Callable[[Any], Any]] = {
    "a block": Run.region,
    "a bound forward": lambda run: run(run.block.forward, run.video, run.text),
    "a frozen block": lambda run: run(run.block.requires_grad_(False), run.video, run.text),
    "a partial": lambda run: run(functools.partial(run.other, text=run.text), run.region()),
    "a closure": lambda run: run(lambda: run.block(run.video, run.text) * run.scale),
    "no argument requires grad": lambda run: run(run.block, run.video.detach(), run.text.detach()),
    "nothing is saved": lambda run: run(lambda video: video * 2 + 1, run.video),
    "an argument returned": lambda run: run(lambda video, _: (run.attention(video), video), run.video, run.text),
    "written in place": lambda run: run(lambda video: run.attention(video).sin().mul_(run.scale), run.video).mul_(2),
    "an output dropped": lambda run: run(run.parts, run.video)[0],
    "a region dropped": lambda run: (run.region(), run.region())[1],
    "three deep": lambda run: run(lambda one: run(lambda two: run(run.parts, run(run.parts, two)[1]), one), run.video),
    "side by side": lambda run: run(lambda one: run(run.parts, one)[0] * run(run.other, one, run.text), run.video),
    "torch inside": lambda run: run(lambda one: run.by_torch(run.block.ffn, run.attention(one)).sin(), run.video),
    "torch around": lambda run: run.by_torch(
        lambda one: run(run.block.ffn, F.dropout(run(run.block.ffn, one))), run.video
    ),
    "reentrant inside": lambda run: run(
        lambda one: run.by_torch(run.block.ffn, run.attention(one), use_reentrant=True), run.video
    ),
    "reentrant around": lambda run: run.by_torch(
        lambda one: run(run.block.ffn, one).sin(), run.video, use_reentrant=True
    ),
    "jvp inside": lambda run: run(lambda one: torch.func.jvp(run.smooth, (one,), (one.cos(),)), run.video),
    "torch.func.grad inside": lambda run: run(torch.func.grad(lambda one: run.smooth(one).sum()), run.video),
}


def copying_hooks() -> saved_tensors_hooks:
    return saved_tensors_hooks(lambda tensor: [tensor.clone()], lambda held: held[0])


class Cases(Run):
    """Longer cases. Each returns outputs; calling `self` checkpoints."""

    def nested_values(self) -> Any:
        def function(first: Any, *, scale: torch.Tensor, second: Arguments, number: int) -> Any:
            output = self.block(first[0], second.more["text"][0]) * scale
            return {"video": [output, None, (output.tanh(), number)]}, Arguments(second.video.sin(), {"all": [output]})

        second = Arguments(self.video / 2, {"text": [self.text]})
        nested, arguments = self(function, (second.video, 1), scale=self.scale, second=second, number=3)
        return nested, arguments.video, arguments.more["all"][0] * nested["video"][2][1]

    def argument_written_before_backward(self) -> Any:
        video = self.video.detach().clone()
        output = self(lambda video: self.scale.sin() * 2 + video, video)
        video.add_(1)
        return output

    def every_exception_caught_inside(self) -> Any:
        def function(video: torch.Tensor) -> Any:
            with contextlib.suppress(Exception):
                return self.attention(video).sin().cos()
            return video.sin()

        return self(function, self.video)

    def early_stop_of_inner_and_outer(self) -> Any:
        def function(video: torch.Tensor, stops: bool) -> torch.Tensor:
            return self(self.block, video, self.text, options={"early_stop": stops}).sin()

        options = [(inner, outer) for inner in (True, False) for outer in (True, False)]
        return [self(function, self.video, inner, options={"early_stop": outer}) for inner, outer in options]

    # Which gradients are asked for, and how often

    def some_leaves(self) -> Any:
        output = self.region()
        self.grad(output, self.text)
        self.grad(output, self.block.ffn[2].weight, self.block.norms[0].weight)
        output.sum().backward(inputs=[self.video, self.block.qkv.weight], retain_graph=True)
        return output

    def read_outside_backward(self) -> Any:
        output = self(lambda video: self.attention(video).sin().exp(), self.video)
        node, sine = output.grad_fn, output.grad_fn.next_functions[0][0]
        self.found += [node._saved_result, sine._saved_self, node._saved_result]
        self.grad(output, self.video)
        self.found.append(node._saved_result)
        return output

    def double_backward(self) -> Any:
        output = self(lambda video: self(self.smooth, self(lambda one: one.sin().exp(), video)), self.video)
        return output, self.grad(self.grad(output, self.video, create_graph=True), self.video, create_graph=True)

    def gradients_taken_inside(self) -> Any:
        def function(video: torch.Tensor) -> torch.Tensor:
            hidden = self.attention(video).sin()
            leaf = hidden.detach().requires_grad_()
            (penalty,) = torch.autograd.grad(self.attention(leaf).square().sum(), leaf)
            (inner,) = torch.autograd.grad(hidden.sum(), video, retain_graph=True)
            (freed,) = torch.autograd.grad(video.sin().cos().sum(), video)
            (smooth,) = torch.autograd.grad(self.smooth(video).sum(), video, create_graph=True)
            return (
                self.block(hidden, self.text) * inner * freed * penalty
                + self.attention(smooth)
                + self(self.smooth, video).sum()
            )

        return self(function, self.video)

    def group_of_backwards(self) -> Any:
        hidden, output = self(self.parts, self.video)
        with torch_module.GraphExecGroup():  # these do not overlap, and share a recompute
            hidden.backward(self.grad(output, hidden))

    # Functions of the user's own, inside

    def saved(self, reads: int = 1) -> Any:
        return self(lambda video, y: Saving.apply(self.attention(video), y, reads), self.video, self.plain)

    def saved_and_read_twice(self) -> Any:
        return self.saved(reads=2)

    # Exceptions, after which everything works

    def exception_in_the_forward(self) -> Any:
        with pytest.raises(ZeroDivisionError):
            self(lambda video: self.attention(video).sin() * (1 // 0), self.video)
        return self.region()

    def exception_in_the_recompute(self) -> Any:
        def function(video: torch.Tensor) -> torch.Tensor:
            hidden = F.dropout(self.attention(video), 0.3)
            calls.append(True)
            if len(calls) == 2:
                raise KeyError
            return self(self.block, hidden, self.text).sin()

        calls: list[bool] = []
        output = self(function, self.video)
        with NOTHING if self.policy == "none" else pytest.raises(KeyError):
            torch.autograd.grad(output.sum(), self.video, retain_graph=True)
        self.grad(output, self.video)
        return output

    # Contexts in the forward, and others in the backward

    def default_device_of_the_forward(self) -> Any:
        with torch.device("meta"):  # which a backward does not see
            output = self(lambda video: (self.attention(video) * (2 + torch.empty(0).is_meta)).sin(), self.video)
        output.backward(torch.ones_like(output))


def around(context: Callable[[], Any], place: str, run: Run) -> Any:
    """Two regions, one in the other, with a context around a part of the step."""

    def function(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        with context() if place == "function" else NOTHING:
            return run(run.other, run.block(video, text) * torch.ones(WIDTH), text).float()

    with context() if place == "everything" else NOTHING:
        with context() if place == "forward" else NOTHING:
            output = run(function, run.video * 1, run.text)
        with context() if place == "backward" else NOTHING:
            output.sum().backward()
    return output.detach()


CONTEXTS: dict[str, Callable[[], Any]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "the CPU as default device": lambda: torch.device("cpu"),
    "early stop off": lambda: torch_module.set_checkpoint_early_stop(False),
    "save_on_cpu": save_on_cpu,
}
CASES |= {name.replace("_", " "): one for name, one in vars(Cases).items() if not name.startswith("_")}
for _name, _context in CONTEXTS.items():
    for _place in ("function", "forward", "backward", "everything"):
        CASES[f"{_name} around {_place}"] = functools.partial(around, _context, _place)
CASES["saved tensors hooks around"] = functools.partial(around, copying_hooks, "everything")
for _context in (torch.autograd.detect_anomaly, allow_mutation_on_saved_tensors):
    CASES[_context.__name__] = functools.partial(around, _context, "everything")

MAY_RAISE = {
    "argument written before backward",
    "every exception caught inside",
    "saved and read twice",
    "torch.func.grad inside",
}
NEW = {
    "group of backwards": "2.10",
    "default device of the forward": "2.13",
}
"""They need a torch that has a GraphExecGroup, or whose own checkpoint takes default devices."""
assert CASES.keys() >= MAY_RAISE | NEW.keys()
