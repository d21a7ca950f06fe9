"""What a release of torch does not have is one error, where it is used: on any torch, told that it is an old one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import fastac
from tests import support
from tests.hook.hosts import diffuser
from tests.support import stack, stack_inputs

COMPILED_MODELS = "a checkpoint inside compiled code (torch.compile of a whole model)"
FLEX = "flex_attention that fastac.compile or compile_attention compiles"
TRACES = "a traced graph (fastac.graph)"
CALLS = {
    "torch.compile(model, backend='aot_eager')(x)": COMPILED_MODELS,
    "on_fakes()": COMPILED_MODELS,
    "fastac.compile_attention(attend)": FLEX,
    "fastac.graph.trace(lambda: None, model)": TRACES,
    "make_fx(model)(x)": TRACES,
    "fastac.graph.apply(graph)": TRACES,
    "fastac.graph.partitioner()": TRACES,
    "fastac.graph.mark_saved(graph, num_fwd_outputs=1)": TRACES,
}
"""A call -> the feature that it needs."""

STEPS = """if True:
    import sys, torch
    torch.__version__ = "2.9.1"
    import fastac, fastac.graph
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    attend = torch.nn.functional.scaled_dot_product_attention

    class Block(torch.nn.Module):
        def forward(self, x):
            return torch.tanh(attend(x, x, x))

    model = torch.nn.Sequential(Block(), Block())
    fastac.enable(model, blocks=[model[0], model[1]])
    x = torch.randn(1, 2, 16, 8, requires_grad=True)
    model(x).sum().backward()
    for given in ({}, {"backend": None}):
        ready = sys.modules["fastac.compiled.blocks"]._ready(given)
        assert ready["backend"] == "inductor", "ours needs a newer torch"

    def on_fakes():
        mode = FakeTensorMode()
        fake = mode.from_tensor(x.detach().requires_grad_())
        with mode:
            return fastac.checkpoint(model[0], fake)

    graph = torch.fx.symbolic_trace(torch.nn.Tanh())
    for call in sys.argv[1:]:
        try:
            eval(call)
            print("nothing")
        except Exception as error:
            print(" ".join(str(error).split()))
"""


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


@pytest.mark.slow
def test_on_an_old_torch() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS, *CALLS], capture_output=True, text=True, check=True)
    for (call, feature), said in zip(CALLS.items(), done.stdout.splitlines(), strict=True):
        assert f"{feature} needs torch 2.13 or newer; this is torch 2.9.1. " in said, f"{call}: {said}"


@pytest.mark.parametrize("host", ["blocks", "diffusers"])
def test_full_checkpointing_stays_in_a_compiled_model(host: str) -> None:
    """Before torch 2.12 dynamo takes any trace for an export, in which nothing is checkpointed."""
    torch._dynamo.reset()
    model = stack() if host == "blocks" else diffuser()
    fastac.enable(model, "full", blocks="blocks" if host == "blocks" else None)
    model.compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        assert support.executions_of(model, stack_inputs()) == 8
