"""Private names of torch that fastac.graph uses: one that went away is noticed at import, none is used unprobed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fastac.engine import torch_private
from fastac.graph import internals


def test_this_torch_has_every_name() -> None:
    assert torch_private.missing(internals._REQUIRED) == []


@pytest.mark.parametrize("name", internals._REQUIRED)
def test_each_name_is_looked_up(name: str) -> None:
    assert torch_private.missing([f"{name}_gone"]) == [f"{name}_gone"]


def test_every_private_name_in_use_is_required() -> None:
    module = ast.parse(Path(internals.__file__).read_text())
    names = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Attribute):
            names.add(ast.unparse(node))
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    private = {
        name.removeprefix("torch.")
        for name in names
        if name.startswith("torch.") and any(part[0] == "_" != part[1] for part in name.split("."))
    }
    required = (*internals._REQUIRED, *internals.SCHEDULER)
    known = {full.rsplit(".", count)[0] for full in required for count in range(full.count(".") + 1)}
    elsewhere = {"_ops.OpOverload", "_dynamo.config.patch"}  # as the engine uses it; a function of every config module
    pytree = {f"utils._pytree.{n}" for n in ("keystr", "tree_flatten", "tree_flatten_with_path", "tree_unflatten")}
    assert private - known - elsewhere - pytree - {"_ops"} == set()
    assert torch_private.missing(pytree | {"_dynamo.config.patch"}) == []


def test_the_scheduler_is_looked_up_where_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_private.missing(internals.SCHEDULER) == []
    for name in internals.SCHEDULER:
        assert torch_private.missing([f"{name}_gone"]) == [f"{name}_gone"]
    monkeypatch.setattr(internals, "SCHEDULER", ("_inductor.gone",))
    internals._require_scheduler.cache_clear()
    with pytest.raises(ImportError, match=r"fastac\.graph\.compile needs torch\._inductor\.gone"):
        internals._require_scheduler()


def test_import_without_one_of_them_names_it() -> None:
    code = "import torch, fastac; del torch._C._DisableAutocast; import fastac.graph"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: fastac.graph needs torch._C._DisableAutocast")
    assert torch.__version__ in last


def test_the_options_of_inductor_have_the_defaults_that_undo_recomputation() -> None:
    """Should torch turn one of them off by itself, fastac need not."""
    assert torch._inductor.config.reorder_for_locality is True
    assert torch._inductor.config.reorder_for_peak_memory is True


def test_the_engine_is_as_before_after_a_trace() -> None:
    before = torch.autograd.graph._engine_run_backward, torch.autograd._engine_run_backward
    with internals.tracing(internals.fake_mode(), {}):
        assert torch.autograd._engine_run_backward is not before[1]
    with pytest.raises(ZeroDivisionError), internals.tracing(internals.fake_mode(), {}):
        raise ZeroDivisionError
    assert (torch.autograd.graph._engine_run_backward, torch.autograd._engine_run_backward) == before
