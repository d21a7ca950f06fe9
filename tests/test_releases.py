"""What a release of torch does not have is one error, where it is used: on any torch, told that it is an old one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import fastac
from fastac.engine import releases
from tests import support
from tests.hook.hosts import diffuser
from tests.support import stack, stack_inputs

CALLS: dict[str, str] = {
    releases.COMPILED_MODELS: "torch.compile(model, backend='aot_eager')(x)",
    f"{releases.COMPILED_MODELS}, without data": "on_fakes()",
    releases.FLEX: "fastac.compile_attention(attend)",
    releases.TRACES: "fastac.graph.trace(lambda: None, model)",
    f"{releases.TRACES}, of another tracer": "make_fx(model)(x)",
    f"{releases.TRACES}, applied": "fastac.graph.apply(graph)",
    f"{releases.TRACES}, partitioned": "fastac.graph.partitioner()",
    f"{releases.TRACES}, marked": "fastac.graph.mark_saved(graph, num_fwd_outputs=1)",
}
"""Feature, and which way to it -> a call that needs it."""

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
    code = "import torch; torch.__version__ = '2.8.0'; import fastac; fastac.enable"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "needs torch 2.9 or newer; this is torch 2.8.0" in done.stderr


def test_on_an_old_torch() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS, *CALLS.values()], capture_output=True, text=True, check=True)
    for way, said in zip(CALLS, done.stdout.splitlines(), strict=True):
        feature = way.partition(", ")[0]
        first = releases.FIRST_TORCH[feature]
        assert f"{feature} needs torch {first} or newer; this is torch 2.9.1. " in said, f"{way}: {said}"


@pytest.mark.parametrize("host", ["blocks", "diffusers"])
def test_full_checkpointing_stays_in_a_compiled_model(host: str) -> None:
    """Before torch 2.12 dynamo takes any trace for an export, in which nothing is checkpointed."""
    torch._dynamo.reset()
    model = stack() if host == "blocks" else diffuser()
    fastac.enable(model, "full", blocks="blocks" if host == "blocks" else None)
    model.compile(backend="aot_eager", fullgraph=True)
    support.count_cpu_attention()
    for _ in range(2):
        support.executions.clear()
        model(**stack_inputs()).square().sum().backward()
    assert support.executions.total() == 8


def test_builds_on_the_way_to_a_release_count_as_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0a0+git1234567")
    assert releases.is_at_least("2.9")
    assert releases.is_at_least("2.13")
    assert not releases.is_at_least("2.14")
