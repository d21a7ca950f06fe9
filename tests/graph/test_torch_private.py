"""Private names of torch that fastac.graph uses: one that is gone is noticed at import, and none is used unprobed."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._inductor.config

from fastac.engine import torch_private as probing
from fastac.graph import torch_private


def test_this_torch_has_every_name_and_a_missing_one_is_noticed() -> None:
    assert probing.missing(torch_private._REQUIRED) == []
    gone = [f"{name}_gone" for name in torch_private._REQUIRED]
    assert probing.missing(gone) == gone


def test_every_private_name_in_use_is_required() -> None:
    module = ast.parse(Path(torch_private.__file__).read_text())
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
    known = {full.rsplit(".", count)[0] for full in torch_private._REQUIRED for count in range(full.count(".") + 1)}
    elsewhere = {"_ops", "_ops.OpOverload", "_dynamo.config.patch"}
    pytree = {f"utils._pytree.{n}" for n in ("tree_flatten", "tree_flatten_with_path", "tree_unflatten")}
    assert private - known - elsewhere - pytree == set()


def test_import_without_one_of_them_names_it() -> None:
    code = "import torch, fastac; del torch._C._DisableAutocast; import fastac.graph"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: fastac.graph needs torch._C._DisableAutocast")
    assert torch.__version__ in last


def test_the_options_of_inductor_have_the_defaults_that_undo_recomputation() -> None:
    """Should torch turn one of them off by itself, `compile` need not."""
    assert torch._inductor.config.reorder_for_locality is True
    assert torch._inductor.config.reorder_for_peak_memory is True


def test_the_engine_is_as_before_after_a_trace() -> None:
    before = torch.autograd.graph._engine_run_backward, torch.autograd._engine_run_backward
    with torch_private.tracing(torch_private.fake_mode(), {}):
        assert torch.autograd._engine_run_backward is not before[1]
    with pytest.raises(ZeroDivisionError), torch_private.tracing(torch_private.fake_mode(), {}):
        raise ZeroDivisionError
    assert (torch.autograd.graph._engine_run_backward, torch.autograd._engine_run_backward) == before
