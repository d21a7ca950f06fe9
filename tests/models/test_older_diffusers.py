"""Older diffusers: four families of models train, each release in a process of its own; and hooks as they were."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import types
from typing import Any

import pytest
from diffusers.hooks import HookRegistry, ModelHook, hooks

import fastac
from tests import support
from tests.backends import packages
from tests.backends.groups import REQUIRED, ROOT, not_here
from tests.versions.environments import FAMILIES


@pytest.mark.slow
@pytest.mark.parametrize("case", packages.DIFFUSERS)
def test_parity(case: str) -> None:
    if absent := not_here([case], REQUIRED):
        pytest.skip(absent[0])
    (name,) = packages.DIFFUSERS[case]
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-k", FAMILIES]
    environment = {**os.environ, "PYTHONPATH": str(packages.place(name))}
    command.append("tests/models/test_parity.py")
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert f"diffusers {packages.PACKAGES[name].version} has no WanAnimate2" in done.stdout, "another one ran"
    for family in ("Wan", "LTXVideo", "HunyuanVideo", "CogVideoX"):
        assert f"test_parity.py::test_parity[{family}Transformer3DModel]" in done.stdout, done.stdout


def around(hook: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    return hook.fn_ref.original_forward(*args, **kwargs)


@pytest.mark.parametrize("kind", [ModelHook, type("Around", (ModelHook,), {"new_forward": around})])
def test_hooks_after_enable(kind: type[ModelHook], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before 0.40 say of no forward that they are around it."""

    older = types.SimpleNamespace(partial=functools.partial)
    older.update_wrapper = lambda wrapper, wrapped: functools.update_wrapper(wrapper, wrapper.func)
    monkeypatch.setattr(hooks, "functools", older)
    model, inputs = support.stack(), support.stack_inputs()
    block: Any = model.blocks[0]
    expected = support.train_step(model, inputs)
    fastac.enable(model, blocks="blocks")
    for name in ("inner", "outer"):
        HookRegistry.check_if_exists_or_initialize(block).register_hook(kind(), name)
    support.assert_same(support.train_step(model, inputs), expected)
    with pytest.raises(fastac.FastacError, match="wrapped since"):
        fastac.disable(model)
    block.forward = type(block).forward.__get__(block)  # which the hooks are not around
    with pytest.raises(fastac.FastacError, match="replaced since"):
        support.train_step(model, inputs)
