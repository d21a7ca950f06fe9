"""What a release of torch does not have is one error, where it is used: on any torch, told that it is an old one."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import fastac
import fastac.graph
from tests import support
from tests.hook.hosts import diffuser
from tests.support import stack, stack_inputs

COMPILED_MODELS = "a checkpoint inside compiled code (torch.compile of a whole model)"
FLEX = "flex_attention that fastac.compile or compile_attention compiles"
TRACES = "a traced graph (fastac.graph)"


def on_fakes(model: Any, inputs: Any) -> None:
    mode = FakeTensorMode()
    fakes = [mode.from_tensor(tensor) for tensor in inputs.values()]
    with mode:
        fastac.checkpoint(model.blocks[0], *fakes)


CALLS: dict[str, tuple[str, Callable[..., object]]] = {
    "compile": (COMPILED_MODELS, lambda model, inputs: torch.compile(model, backend="aot_eager")(**inputs)),
    "fake tensors": (COMPILED_MODELS, on_fakes),
    "compile_attention": (FLEX, lambda *_: fastac.compile_attention(support.written_out)),
    "trace": (TRACES, lambda model, _: fastac.graph.trace(lambda: None, model)),
    "make_fx": (TRACES, lambda model, inputs: make_fx(model)(*inputs.values())),
    "apply": (TRACES, lambda *_: fastac.graph.apply(torch.fx.symbolic_trace(torch.nn.Tanh()))),
    "partitioner": (TRACES, lambda *_: fastac.graph.partitioner()),
    "mark_saved": (
        TRACES,
        lambda *_: fastac.graph.mark_saved(torch.fx.symbolic_trace(torch.nn.Tanh()), num_fwd_outputs=1),
    ),
}
"""A call -> the feature that it needs."""


def test_on_a_torch_that_is_too_old() -> None:
    """Builds on the way to a release count as it."""
    code = """if True:
        import torch, fastac
        for torch.__version__ in ("2.8.0", "2.9.0a0+git1234567"):
            try:
                fastac.enable
            except Exception as error:
                print(error)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert "needs torch 2.9 or newer; this is torch 2.8.0" in done.stdout


@pytest.mark.parametrize("call", CALLS)
def test_on_an_old_torch(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    feature, function = CALLS[call]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.9.1")
        model, inputs = stack(), stack_inputs()
        fastac.enable(model, blocks="blocks")
        assert support.executions_of(model, inputs) == 4
        with pytest.raises(Exception, match=r"torch 2\.13 or newer; this is torch 2\.9\.1\. ") as raised:
            function(model, inputs)
    assert f"{feature} needs" in " ".join(str(raised.value).split())


def test_compiled_blocks_on_an_old_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have torch's inductor: ours needs a newer torch."""
    backends = []

    def compiled(function: Any, backend: Any = None) -> Any:
        backends.append(backend)
        return functools.partial(function)

    monkeypatch.setattr(torch, "compile", compiled)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.9.1")
        for options in ({}, {"backend": None}):
            backends.clear()
            fastac.compile(stack(), blocks="blocks", **options)
            assert backends[-2:] == ["inductor"] * 2  # of the blocks


@pytest.mark.parametrize("host", ["blocks", "diffusers"])
def test_full_checkpointing_stays_in_a_compiled_model(host: str) -> None:
    """Before torch 2.12 dynamo takes any trace for an export, in which nothing is checkpointed."""
    torch._dynamo.reset()
    model = stack() if host == "blocks" else diffuser()
    fastac.enable(model, "full", blocks="blocks" if host == "blocks" else None)
    model.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert support.executions_of(model, stack_inputs()) == 8
