"""Private names of torch: a name that went away is noticed at import, and the helpers do what they say."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from fastac.engine import torch_private

ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"


PRIVATE = pytest.mark.parametrize("module", [dispatcher_internals, torch_internals], ids=lambda one: one.__name__)


@PRIVATE
def test_this_torch_has_every_name(module: Any) -> None:
    assert torch_private.missing(module._REQUIRED) == []


def test_a_name_that_is_not_there_is_reported() -> None:
    absent = ["_C._no_such_function", "utils.checkpoint._gone", "_no_module.at_all"]
    assert torch_private.missing(["_C._has_storage", *absent]) == absent


def test_names_are_found_where_they_are() -> None:
    assert torch_private.find("_C._has_storage") is torch._C._has_storage
    assert torch_private.find("version.__version__") == torch.__version__
    assert torch_private.find("_inductor.config.fx_graph_cache") in (True, False)  # of a module that is imported for it


@PRIVATE
def test_every_private_name_in_use_is_required(module: Any) -> None:
    """`_REQUIRED` and the code of the module name the same things."""
    required = module._REQUIRED
    module = ast.parse(Path(module.__file__).read_text())
    imported = {
        alias.asname or alias.name: f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(module)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            root, _, rest = ast.unparse(node).partition(".")
            names.add(f"{imported.get(root, root)}.{rest}")
    private = {name.removeprefix("torch.") for name in names if name.startswith(("torch._C.", "torch._guards."))}
    # An attribute of a name is looked up after it, and a name is looked up by looking up an attribute of it.
    parts = {full.rsplit(".", count)[0] for full in required for count in range(full.count("."))}
    assert private <= parts, f"used, and not probed at import: {sorted(private - parts)}"


@pytest.mark.parametrize(
    "name", ["_C._autograd._get_current_graph_task_keep_graph", "_C._dispatch_get_all_op_names", "_C._has_storage"]
)
def test_import_without_one_of_them_names_it(name: str) -> None:
    owner, _, attribute = name.rpartition(".")
    code = f"import torch; del torch.{owner}.{attribute}; import fastac"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: fastac needs torch." + name)
    assert torch.__version__ in last
    assert "seen in torch 2.13" in last


def test_the_torch_of_the_tests_is_one_it_was_seen_in() -> None:
    assert torch.__version__.startswith(torch_private.SEEN_IN)


# The helpers


def test_an_alias_shares_the_version_counter_below_autograd() -> None:
    seen, bumps = [], []

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            output = x * 2
            with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)):
                seen.append(*torch_private.aliases([output]))
            (before,) = torch_private.versions(seen)
            output.add_(1)
            (after,) = torch_private.versions(seen)
            bumps.append(after - before)
            return output

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
            return grad * 2

    Function.apply(torch.ones(2, requires_grad=True))
    assert bumps == [1]
    assert not seen[0].requires_grad


def test_an_inference_tensor_has_no_version() -> None:
    with torch.inference_mode():
        tensor = torch.ones(2)
    assert torch_private.versions([tensor, 3, torch.ones(2)]) == [None, 0]


def test_stand_ins_are_told_from_data() -> None:
    with FakeTensorMode():
        fake = torch.ones(2)
    assert torch_private.is_abstract([fake, 3])
    assert not torch_private.is_abstract([torch.ones(2), 3])
    assert torch_private.is_fake(fake)
    assert not torch_private.is_fake(torch.ones(2))


def test_a_trace_of_make_fx_is_another_trace() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append((torch_private.in_proxy_trace(), torch_private.in_other_trace()))
        return x + 1

    make_fx(function)(torch.ones(2))
    function(torch.ones(2))
    assert seen == [(True, True), (False, False)]


def test_a_trace_is_seen_by_its_own_thread_alone() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        other = threading.Thread(target=lambda: seen.append(torch_private.in_proxy_trace()))
        other.start()
        other.join()
        return x + 1

    make_fx(function)(torch.ones(2))
    assert seen == [False]


def test_kernels_are_looked_up_by_op_and_key() -> None:
    assert torch_private.has_kernel(ATTENTION, "CPU")
    assert not torch_private.has_kernel("aten::_scaled_dot_product_flash_attention", "CPU")
    assert ATTENTION in torch_private.op_names()


def test_checkpoint_debug_mode_is_seen() -> None:
    assert not torch_private.checkpoint_debug_enabled()
    with torch.utils.checkpoint.set_checkpoint_debug_enabled(True):
        assert torch_private.checkpoint_debug_enabled()


def test_a_function_that_runs_eagerly_is_not_compiled_from_a_graph_break() -> None:
    compiled = []

    def backend(graph: torch.fx.GraphModule, example_inputs: object) -> object:
        compiled.append([node.target for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    engine = types.ModuleType("engine")
    engine.__file__ = "engine.py"
    exec(compile("def eager(x): return x.sin()", "engine.py", "exec"), vars(engine))
    eager = engine.eager
    torch_private.run_eagerly([engine])

    def function(x: torch.Tensor) -> torch.Tensor:
        x = x.cos()
        torch._dynamo.graph_break()
        return [eager][len(compiled) - 1](x)

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(torch.ones(2))
    assert torch.sin not in [target for targets in compiled for target in targets]
