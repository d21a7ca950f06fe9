"""Values of a recompute are compared with those of its forward: what differs, what that costs, and when it raises."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch._dynamo.compiled_autograd
import torch.nn.functional as F

import fastac
from fastac import FastacError
from fastac.engine import fingerprints, recompute, region
from fastac.engine.fingerprints import fingerprint
from fastac.verification.measuring import allocated_bytes


class Saving(torch.autograd.Function):
    """Saves a tensor beside its input."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(saved)
        return hidden * 1

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        assert ctx.saved_tensors
        return grad, None


def saves(*tensors: torch.Tensor) -> torch.Tensor:
    """A region that saves one tensor in its forward, the next one in recompute."""
    following = iter(tensors)
    return fastac.checkpoint(  # type: ignore[no-any-return]
        lambda hidden: Saving.apply(hidden, next(following)), torch.ones(3, requires_grad=True), policy="full"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64])
def test_makes_no_copy(dtype: torch.dtype) -> None:
    """The step whose values are compared has the peak of any other: nothing of a tensor's size is allocated.

    On a CPU torch adds up narrower types as copies, of one tensor at a time.
    """
    tensor = torch.ones(4, 1024, 512, dtype=dtype)
    assert allocated_bytes(lambda: saves(tensor, tensor).sum().backward()).peak < 2**20 < tensor.nbytes


GENERATOR = torch.Generator().manual_seed(0)
TOKENS = torch.randn(2, 600, 300, generator=GENERATOR)
COMPLEX = torch.randn(30, 20, dtype=torch.complex64, generator=GENERATOR)
LARGE = torch.tensor([2**60, 5, 7])
NUMBERS = torch.full((3, 5000), 2**31)
NUMBERS[1, 17] += 1
FREED = torch.ones(5)
FREED.untyped_storage().resize_(0)

DIFFERENT: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "one of many whole numbers": (NUMBERS, torch.full((3, 5000), 2**31)),
    "large whole numbers": (LARGE, LARGE + torch.tensor([0, 1, 0])),
    "other tokens": (TOKENS, TOKENS.flip(1)),
    "other channels": (TOKENS, TOKENS.flip(2)),
    "tokens in bf16": (TOKENS.bfloat16(), TOKENS.bfloat16().flip(1)),
    "a conjugate": (COMPLEX, COMPLEX.conj()),
}
EQUAL = {
    "a conjugate": (COMPLEX.conj(), COMPLEX.conj_physical()),
    "empty": (torch.ones(0, 3, dtype=torch.bfloat16),) * 2,
    "meta": (torch.ones(5, device="meta"),) * 2,
    "freed": (FREED,) * 2,
    "sparse": (torch.ones(4, 4).to_sparse(),) * 2,
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_values_that_differ(name: str) -> None:
    one, other = DIFFERENT[name]
    saves(one, one.clone()).sum().backward()
    with differs():
        saves(one, other).sum().backward()


@pytest.mark.parametrize("name", EQUAL)
def test_values_that_are_equal(name: str) -> None:
    """Or that cannot be compared."""
    saves(*EQUAL[name]).sum().backward()


class OnDevice(torch.Tensor):
    """A number on an accelerator: reading it is counted."""

    reads = 0
    READING = frozenset(
        {torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.to}
        | {getattr(torch.Tensor, name) for name in ("__float__", "__int__", "__bool__", "__index__")}
    )

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.reads += function in OnDevice.READING
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.fixture(autouse=True)
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fingerprints are tensors, as on an accelerator."""

    def on_device(tensor: torch.Tensor) -> fingerprints.Fingerprint | None:
        found = fingerprint(tensor)
        if found is None:
            return None
        wide = torch.float64 if isinstance(found.norm, float) else torch.int64
        numbers = [torch.tensor(one, dtype=wide).as_subclass(OnDevice) for one in (*found.sums, found.norm)]
        return found._replace(sums=numbers[:-1], norm=numbers[-1])

    for module in (recompute, region):
        monkeypatch.setattr(module, "fingerprint", on_device)
    monkeypatch.setattr(OnDevice, "reads", 0)


class Scaled(torch.nn.Module):
    """A layer that reads a scale besides its input, and saves whole numbers as well."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.scale = 1.0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        chosen = (self.linear(hidden) * self.scale).sin()
        return chosen.gather(-1, chosen.argsort(-1))


def blocks(count: int = 3) -> list[Scaled]:
    torch.manual_seed(0)
    return [Scaled() for _ in range(count)]


def forward(layers: list[Scaled], hook: Any = None) -> torch.Tensor:
    """hook: called by backward when all layers are done."""
    hidden = torch.ones(5, 4, requires_grad=True)
    if hook is not None:
        hidden.register_hook(hook)
    for layer in layers:
        hidden = fastac.checkpoint(layer, hidden, policy="full")
    return hidden


def change(layers: list[Scaled], scale: float = 2.0) -> None:
    for layer in layers:
        layer.scale = scale


def wrong(layers: list[Scaled], hook: Any = None) -> torch.Tensor:
    """A forward, and a change after it."""
    output = forward(layers, hook)
    change(layers)
    return output


at_end_of_backward: Callable[[Callable[[], Any]], None] = torch.autograd.Variable._execution_engine.queue_callback


def differs() -> Any:
    return pytest.raises(
        FastacError, match=r"recompute does not compute what the forward did.*\((relative|whole numbers)"
    )


def test_a_backward_reads_once_at_its_end_and_raises() -> None:
    """In a program of one step. Between steps that compare values, nothing is read. The error names what it would."""
    fastac.enable(torch.nn.ModuleList(blocks()), blocks="")  # choices are seen from then on
    layers = blocks()
    output = wrong(layers)
    with differs() as raised:
        output.sum().backward()
    assert str(raised.value).startswith("Scaled: recompute")
    assert "makes its choices (sort) again" in str(raised.value)
    assert OnDevice.reads == 1
    assert layers[0].linear.weight.grad is not None, "the backward ran to its end"
    change(layers, 1.0)
    reads = []
    for _ in range(9):  # step 0 once more; of the others, 1, 2, 4 and 8 compare values
        OnDevice.reads = 0
        forward(layers).sum().backward()
        reads.append(OnDevice.reads)
    assert reads == [1, 1, 1, 0, 1, 0, 0, 0, 1]


def _raises(layers: list[Scaled]) -> None:
    """After every layer was compared."""

    def fail(*_: Any) -> None:
        raise ArithmeticError

    output = wrong(layers, fail)
    with pytest.raises(ArithmeticError):
        output.sum().backward()


def _partial(layers: list[Scaled]) -> None:
    """Gradients of the last layer's weight alone."""
    output = wrong(layers)
    with differs():
        torch.autograd.grad(output.sum(), layers[-1].linear.weight)


def _inside_the_forward(layers: list[Scaled]) -> None:
    def function(hidden: torch.Tensor) -> torch.Tensor:
        inner = wrong(layers)
        with differs():
            torch.autograd.grad(inner.sum(), layers[0].linear.weight)
        change(layers, 1.0)
        return hidden * 2

    fastac.checkpoint(function, torch.ones(3, requires_grad=True), policy="full").sum().backward()


def _outside_a_backward(layers: list[Scaled]) -> None:
    """A saved tensor is read."""
    output = wrong(layers)
    with differs():
        print(output.grad_fn._saved_index)  # type: ignore[union-attr]


@pytest.mark.parametrize("fail", [_raises, _partial, _inside_the_forward, _outside_a_backward])
def test_a_later_model_hears_of_no_earlier_one(fail: Any) -> None:
    fail(blocks())
    OnDevice.reads = 0
    forward(blocks()).sum().backward()
    assert OnDevice.reads == 1


def test_backwards_in_two_threads() -> None:
    """Each raises its own error, or none: the one that is right ends while the other one has yet to read."""
    compared, done = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        compared.set()
        assert done.wait(60)

    def train_wrong() -> None:
        with differs():
            outputs[0].sum().backward()

    outputs = wrong(blocks(), wait), forward(blocks())
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(train_wrong)
        assert compared.wait(60)
        outputs[1].sum().backward()
        done.set()
        other.result(60)
    assert OnDevice.reads == 2


def test_compiled_autograd() -> None:
    """It drops callbacks of the engine: each region reads its own."""
    output = wrong(blocks())
    with torch._dynamo.compiled_autograd._enable(lambda graph: graph), differs():
        output.sum().backward()
    assert OnDevice.reads == 1, "the first one raises"


@pytest.mark.parametrize("habit", [1.0, None])
def test_weights_that_are_streamed(habit: float | None) -> None:
    """Somebody copies the weights of many blocks through one parameter: the same values are right. In step 3, which
    compares none, they count as the same if a write was right before."""
    weight = torch.nn.Parameter(torch.ones(4, 4))

    def step(gain: float | None, reads: int = 1) -> None:
        hidden = torch.ones(5, 4, requires_grad=True)
        output = fastac.checkpoint(lambda hidden: F.linear(hidden, weight).sin(), hidden, policy="full")
        with torch.no_grad():
            weight.mul_(gain) if gain else None
        OnDevice.reads = 0
        output.sum().backward()
        assert OnDevice.reads == reads

    changed = pytest.raises(FastacError, match=r"uses other values of a parameter \(4, 4\)")
    step(habit)
    with changed:
        step(1.01)
    for _ in range(2):
        step(habit)
    with contextlib.nullcontext() if habit else changed:
        step(1.0, reads=0)


def test_a_write_that_changed_values_is_no_habit() -> None:
    """Not even if their error was caught."""

    def step(*, write: bool) -> None:
        hidden, angle = torch.ones(5, 4, requires_grad=True), torch.ones(4)
        output = fastac.checkpoint(lambda hidden, angle: (hidden * angle).sin(), hidden, policy="full", angle=angle)
        if write:
            angle.mul_(3)
        output.sum().backward()

    with differs():
        step(write=True)
    for _ in range(3):
        step(write=False)
    with pytest.raises(FastacError, match="given by keyword"):
        step(write=True)  # in step 3, which compares no values


@pytest.mark.parametrize("count", [1, 3])
def test_a_step_that_raised_is_compared_again(count: int) -> None:
    """Step 4 is tried again, and again. Step 5 compares nothing."""
    layers = blocks(count)
    for _ in range(4):
        forward(layers).sum().backward()
    for _ in range(3):
        output = wrong(layers)
        with differs():
            output.sum().backward()
        change(layers, 1.0)
    forward(layers).sum().backward()
    wrong(layers).sum().backward()


def test_a_step_of_two_regions_of_one_block() -> None:
    """The later one is right, and its recompute comes first. The step is tried again: another one would be the fourth,
    which compares nothing."""
    (layer,) = blocks(1)
    for _ in range(4):
        hidden = fastac.checkpoint(layer, torch.ones(5, 4, requires_grad=True), policy="full")
        hidden.register_hook(lambda gradient: change([layer]))
        output = fastac.checkpoint(layer, hidden, policy="full")
        with differs():
            output.sum().backward()
        change([layer], 1.0)


def test_callbacks_of_others_run_before_the_error() -> None:
    """As that of DDP must: without it, later forwards raise."""
    ran: list[str] = []
    output = wrong(blocks(), lambda _: at_end_of_backward(lambda: ran.append("theirs")))
    with differs():
        output.sum().backward()
    assert ran


def test_a_callback_that_recomputes() -> None:
    """When the numbers of the backward itself were read."""
    ran, later = [], wrong(blocks())

    def unpack() -> None:
        ran.append(later.grad_fn._saved_index)  # type: ignore[union-attr]

    output = forward(blocks(), lambda _: at_end_of_backward(lambda: at_end_of_backward(unpack)))
    with differs():
        output.sum().backward()
    assert ran
