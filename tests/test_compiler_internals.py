"""Private names of torch's compiler: a name that went away is noticed, and nothing is used that is not named."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
import torch._functorch.config

from fastac.compile import torch_private
from fastac.engine import torch_private


def test_this_torch_has_every_name() -> None:
    assert torch_private.missing(torch_private._REQUIRED) == []


def test_a_name_that_is_not_there_is_reported() -> None:
    absent = ["_no_module.at_all", "_functorch.partitioners._gone"]
    assert torch_private.missing(["_functorch.config.activation_memory_budget", *absent]) == absent


def test_every_name_in_use_is_required_and_every_required_one_used() -> None:
    module = ast.parse(Path(torch_private.__file__).read_text())
    used = {
        call.args[0].value
        for call in ast.walk(module)
        if isinstance(call, ast.Call)
        and getattr(call.func, "id", "") == "_of"
        and isinstance(call.args[0], ast.Constant)
    }
    assert used == set(torch_private._REQUIRED)


def test_using_one_that_went_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.fx.traceback, "current_meta")
    said = r"fastac needs torch\.fx\.traceback\.current_meta, which torch .* seen in torch 2\.13"
    with pytest.raises(ImportError, match=said):
        torch_private.memory_budget()


def test_outside_any_compilation() -> None:
    assert torch_private.memory_budget() == (1.0, "torch._functorch.config.activation_memory_budget")
    assert torch_private.compile_id() is None
    assert torch_private.compiled_function() is None
    assert torch_private.module_stack() == []
    assert not torch_private.in_recompute()
    assert torch_private.running_node() is None
    assert torch_private.graph_being_traced() is None


def test_compilations_and_resets_are_counted() -> None:
    done = []
    compilations = torch_private.Compilations(lambda: done.append(True))
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
