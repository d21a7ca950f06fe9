"""Private names of torch's compiler: a name that went away is noticed, and nothing is used that is not named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch._functorch.config

from fastac import compiler_internals, probing, torch_internals


def test_this_torch_has_every_name() -> None:
    assert probing.missing(compiler_internals._REQUIRED) == []


def test_a_name_that_is_not_there_is_reported() -> None:
    absent = ["_no_module.at_all", "_functorch.partitioners._gone"]
    assert probing.missing(["_functorch.config.activation_memory_budget", *absent]) == absent


def test_every_name_in_use_is_required_and_every_required_one_used() -> None:
    module = ast.parse(Path(compiler_internals.__file__).read_text())
    used = {
        call.args[0].value
        for call in ast.walk(module)
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "_of"
        and isinstance(call.args[0], ast.Constant)
    }
    assert used == set(compiler_internals._REQUIRED)


def test_using_one_that_went_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.fx.traceback, "current_meta")
    said = r"fastac needs torch\.fx\.traceback\.current_meta, which torch .* seen in torch 2\.13"
    with pytest.raises(ImportError, match=said):
        compiler_internals.memory_budget()


def test_outside_any_compilation() -> None:
    assert compiler_internals.memory_budget() == (1.0, "torch._functorch.config.activation_memory_budget")
    assert compiler_internals.compile_id() is None
    assert compiler_internals.compiled_function() is None
    assert compiler_internals.module_stack() == []
    assert not torch_internals.in_recompute()
    assert compiler_internals.running_node() is None
    assert compiler_internals.graph_being_traced() is None


def test_compilations_and_resets_are_counted() -> None:
    done = []
    compilations = compiler_internals.Compilations(lambda: done.append(True))
    torch._dynamo.reset()
    before = compilations.look()
    assert compilations.look() == before
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert compilations.look() == before + 1
    assert done == [True]
    assert compilations.resets == 1
    torch._dynamo.reset()
    assert compilations.look() > before + 1
    assert compilations.resets == 2
    torch._dynamo.reset()
