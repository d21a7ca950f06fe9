"""Nothing that fastac imports or runs moves a random generator: Python's, numpy's, or torch's of any device.

Each path runs in a process in which fastac was not used before, forked from one that has only imported torch. What a
model itself draws is drawn as often as without fastac.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import importlib
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

import fastac
from fastac.engine.beginning import generators_preserved
from tests import support
from tests.cli.conftest import configuration

ROOT = Path(__file__).resolve().parent.parent

SERVERS = {
    "torch": "import torch._dynamo",
    "torch without numpy": "sys.modules['numpy'] = None; import torch._dynamo",
    "diffusers": "from diffusers import WanTransformer3DModel",
}
"""What a process has imported before it uses fastac -> how. A first step imports torch._dynamo, where it is not yet."""

START = """
import random, sys
before = random.getstate()
import fastac
assert random.getstate() == before, "import fastac"
{}
from tests import test_random_state
test_random_state.serve()
"""

WAN = "WanTransformer3DModel"


# Generators


def states() -> dict[str, Any]:
    """The states of all generators that a process has one of, by name."""
    found = {"random": random.getstate(), "torch": torch.get_rng_state()}
    if (numpy := sys.modules.get("numpy")) is not None:
        found["numpy"] = numpy.random.get_state(legacy=False)
    return found


def after(run: Callable[[], object]) -> dict[str, Any]:
    """The states after a call. They are put back."""
    before = states()
    run()
    found = states()
    random.setstate(before["random"])
    torch.set_rng_state(before["torch"])
    if "numpy" in before:
        sys.modules["numpy"].random.set_state(before["numpy"])
    return found


@contextlib.contextmanager
def ends_in(expected: Mapping[str, Any]) -> Iterator[None]:
    """Raise AssertionError if generators are in other states at the end."""
    yield
    now = states()
    moved = [name for name, state in expected.items() if _plain(state) != _plain(now[name])]
    assert not moved, f"moved: {', '.join(moved)}"


def _plain(state: Any) -> Any:
    return state.tolist() if isinstance(state, torch.Tensor) else pickle.dumps(state)


def unmoved() -> contextlib.AbstractContextManager[None]:
    return ends_in(states())


def draw() -> float:
    """A number from Python's generator and numpy's."""
    numpy = sys.modules.get("numpy")
    return random.random() + (0 if numpy is None else numpy.random.rand())


def scale(model: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """A hook: the first input is multiplied by such a number."""
    first, *_ = kwargs
    return args, {**kwargs, first: kwargs[first] * draw()}


# Models


class DrawingBlock(support.AttentionBlock):
    """A block that draws from every generator, from Python's and numpy's without using the number."""

    def __init__(self) -> None:
        super().__init__(dropout=0.1)

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        draw()
        return super().forward(video, text)


def stack(**options: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model with dropout in its blocks, which draws from the other generators outside of them; its inputs."""
    options.setdefault("block", functools.partial(support.AttentionBlock, dropout=0.1))
    model = support.stack(**options)
    model.register_forward_pre_hook(scale, with_kwargs=True)
    return model, support.stack_inputs()


def wan() -> tuple[Any, dict[str, Any]]:
    model, inputs = support.build(WAN)
    model.register_forward_pre_hook(scale, with_kwargs=True)
    return model, inputs


def train(model: Any, inputs: Mapping[str, Any], steps: int = 2) -> None:
    """In the first step of a region's kind it is watched, in later ones it is not."""
    for _ in range(steps):
        support.loss_of(model(**inputs)).backward()


def trains(model: Any, inputs: Mapping[str, Any], ours: Callable[[Any], object]) -> None:
    """Train a copy of a model, and the model after `ours(model)`: both end in the same states."""
    with ends_in(after(lambda: train(copy.deepcopy(model), inputs))):
        ours(model)
        train(model, inputs)
        str(fastac.report(model))


# Paths


def first_use(name: str) -> None:
    with unmoved():
        getattr(fastac, name)


def rich() -> None:
    with unmoved():
        importlib.import_module("rich.style")


def blocks_of(model: Any, policy: Any = "attn_only") -> None:
    fastac.enable(model, policy, blocks="blocks")


DRAWING = functools.partial(stack, block=DrawingBlock)
TRAINING: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "enable": (stack, blocks_of),
    "a block that draws": (DRAWING, blocks_of),
    "offload": (stack, lambda model: blocks_of(model, fastac.Policy("attn_only", offload=True))),
    "disable": (stack, lambda model: (blocks_of(model), fastac.disable(model))),
    "diffusers": (wan, lambda model: fastac.enable(model, fastac.first_blocks(model, 1, "attn_only"))),
    "checkpoint": (stack, lambda model: setattr(model, "policy", "attn_only")),
    "compile": (stack, lambda model: str(fastac.compile(model, blocks="blocks", backend="aot_eager"))),
}
"""A way to train -> what makes a model and its inputs, and what switches it on."""


def training(*way: str) -> None:
    make, ours = TRAINING[" ".join(way)]
    trains(*make(), ours)


def patch_checkpoint() -> None:
    model, inputs = stack(policy="torch")
    with ends_in(after(lambda: train(copy.deepcopy(model), inputs))), fastac.patch_checkpoint():
        train(model, inputs)


def threads() -> None:
    """First use and steps in another thread; and the backward alone."""

    def run(function: Callable[..., object], *args: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(function, *args).result()

    model, inputs = stack()
    with ends_in(after(lambda: train(copy.deepcopy(model), inputs, steps=3))):
        run(lambda: fastac.enable(model, blocks="blocks"))
        run(train, model, inputs)
        run(support.loss_of(model(**inputs)).backward)


def compile_attention() -> None:
    with unmoved():
        from torch.nn.attention.flex_attention import flex_attention

        attend = fastac.compile_attention(flex_attention, backend="aot_eager")
        attend(*[torch.ones(1, 1, 128, 16)] * 3)


def make_visible() -> None:
    """And rows: of an op that is there, and of a library that is not."""
    with unmoved():
        hidden = support.attention_function(support.define_attention_op("random_state_hidden"))
        fastac.make_visible(hidden.__self__, layout="bhsd", dropout=None)
        attend = support.custom_attention("random_state")
        fastac.register(fastac.AttentionOp(backend="tests", namespace="absent", name="attention"))
        for function in (hidden, attend):
            inputs = support.attention_inputs(8, 8)
            fastac.checkpoint(function, *inputs.values()).sum().backward()


def verify() -> None:
    model, inputs = DRAWING()
    with unmoved():
        found = fastac.verify(model, **inputs, blocks="blocks")
        assert found.different == (), found  # each run draws the same
    with unmoved():
        str(fastac.verify(model, **inputs, blocks="blocks", policy="full", reference="full"))


def verify_per_block() -> None:
    model, inputs = wan()
    with unmoved():
        str(fastac.verify(model, **inputs, per_block=True))


def plan() -> None:
    model, inputs = stack()
    with unmoved():
        found = fastac.plan(model, inputs, blocks="blocks")
        assert "attn_only" in str(found)
    with unmoved():
        str(fastac.plan(model, inputs, checkpointed=1, blocks="blocks"))
        found.within("1MB", offload=True)
        found.within(memory="1GB", host="1GB")
        found.as_json()


def command(name: str) -> None:
    """The command as it is installed, on a small model, with all that it prints and draws."""
    (installed,) = entry_points(group="console_scripts", name="fastac")
    with tempfile.TemporaryDirectory() as folder, unmoved():
        path = configuration(Path(folder), WAN)
        small = [path, "--frames", "5", "--height", "32", "--width", "48", "--text-tokens", "8"]
        more = {"backends": ["--all"], "plan": [*small, "--plot", str(Path(folder, "plan.svg"))], "bench": small}
        sys.argv = ["fastac", name, *more[name]]
        assert not installed.load()()


def graph() -> None:
    """A traced step draws as often as the step itself."""
    model = support.stack(block=functools.partial(support.AttentionBlock, dropout=0.1), policy="attn_only")
    inputs = support.stack_inputs()

    def step(**inputs: Any) -> Any:
        loss = model(**inputs).square().sum()
        return loss.detach(), torch.autograd.grad(loss, list(model.parameters()))

    plain = copy.deepcopy(model)
    plain.policy = "none"
    with ends_in(after(lambda: plain(**inputs).sum().backward())):
        import fastac.graph

        with unmoved():
            found = fastac.graph.apply(fastac.graph.trace(step, model, **inputs), "attn_only")
            repr(found)
        found(**inputs)


# The processes


def serve() -> None:
    """For each path that is read, run it in a fork. Writes "", or what went wrong, in a line each."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # paths print
    gc.freeze()  # forks do not look at it, nor copy it
    for line in sys.stdin:
        if (child := os.fork()) == 0:
            print(json.dumps(problem_of(line.strip())), file=answers, flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print(json.dumps("the process died"), file=answers, flush=True)
    os._exit(0)


def problem_of(path: str) -> str:
    name, *arguments = path.split(" ")
    random.seed(5)
    torch.manual_seed(5)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(5)
    try:
        assert "rich.style" not in sys.modules, "rich is here before fastac is used"
        globals()[name](*arguments)
    except BaseException:
        return traceback.format_exc()
    return ""


@pytest.fixture(scope="module")
def answer() -> Iterator[Callable[[str, str], str]]:
    """A function of a server and a path: returns what went wrong. A server begins with its first path."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def started(server: str) -> subprocess.Popen[str]:
            command = [sys.executable, "-W", "ignore", "-c", START.format(SERVERS[server])]
            environment = os.environ | {"KINETO_LOG_LEVEL": "99"}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            return stack.enter_context(subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes))

        def answered(server: str, path: str) -> str:
            process = started(server)
            process.stdin.write(f"{path}\n")
            process.stdin.flush()
            return str(json.loads(process.stdout.readline()))

        yield answered


PATHS = {
    "torch": (
        *(f"first_use {name}" for name in ("checkpoint", "enable", "first_blocks", "plan")),
        *(f"training {way}" for way in TRAINING if way not in ("compile", "diffusers")),
        *("patch_checkpoint", "threads", "make_visible", "verify", "plan", "graph", "command backends"),
    ),
    "torch without numpy": ("training enable", "verify"),
}
MORE = {
    "torch": (
        *(f"first_use {name}" for name in fastac.__all__ if f"first_use {name}" not in PATHS["torch"]),
        *("training compile", "compile_attention"),
    ),
    "torch without numpy": ("patch_checkpoint", "training compile", "make_visible", "graph"),
    "diffusers": ("training diffusers", "verify_per_block", "command plan", "command bench"),
}


def cases(paths: dict[str, tuple[str, ...]], *marks: Any) -> list[Any]:
    return [pytest.param(path, server, marks=marks) for server in paths for path in paths[server]]


@pytest.mark.parametrize(("path", "server"), [*cases(PATHS), *cases(MORE, pytest.mark.slow)])
def test_generators_stay(answer: Callable[[str, str], str], path: str, server: str) -> None:
    """Also while rich is imported, and where numpy is not there."""
    assert not (problem := answer(server, path)), problem


def test_every_device_of_the_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is in use. A model on the CPU may send its blocks to any of them."""
    drawn, in_use = [3, 5], [False]

    def set_state(state: int, device: torch.device) -> None:
        drawn[device.index] = state

    module = types.SimpleNamespace(
        is_initialized=lambda: in_use[0], get_rng_state=lambda device: drawn[device.index], set_rng_state=set_state
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(drawn))
    for in_use[0], expected in ((True, [3, 5]), (False, [4, 6])):
        with generators_preserved():
            drawn[:] = [4, 6]
        assert drawn == expected


def test_the_import_of_rich_draws(answer: Callable[[str, str], str]) -> None:
    """Else the tests above show less than they say."""
    assert "moved: random\n" in answer("torch", "rich")
