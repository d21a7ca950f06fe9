"""Private names of torch's compiler: a name that went away is noticed; what dynamo does is counted."""

from __future__ import annotations

import threading

import pytest
import torch
from torch._C._dynamo.eval_frame import set_guard_complete_hook

import fastac
from fastac.compile import torch_private
from fastac.compile.torch_private import CompiledCalls, compilations
from fastac.engine import torch_private as probing


def test_this_torch_has_every_name() -> None:
    names = [*torch_private.AT_IMPORT, *torch_private.DYNAMO, *torch_private.INDUCTOR]
    assert probing.missing(names) == []
    assert probing.missing([name + "x" for name in names]) == [name + "x" for name in names]


def test_a_compiler_that_lacks_something_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "INDUCTOR", ("_inductor.gone",))
    with pytest.raises(ImportError, match=r"torch\._inductor\.gone"):
        fastac.compile_attention(torch.nn.functional.scaled_dot_product_attention)


def test_compilations_and_resets_are_counted() -> None:
    torch._dynamo.reset()
    before, resets = compilations.look(), compilations.resets
    assert compilations.look() == before
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert compilations.look() == before + 1
    assert compilations.resets == resets
    torch._dynamo.reset()
    assert compilations.look() > before + 1
    assert compilations.resets == resets + 1


def test_compiled_calls_are_counted_in_their_thread() -> None:
    """Whatever else is compiled meanwhile, and whoever else listens to dynamo."""
    compiled = torch.compile(lambda x: x.sin(), backend="eager")
    tensor, seen = torch.ones(3), []

    def theirs(hit: bool) -> bool:
        seen.append(hit)
        return hit

    before = set_guard_complete_hook(theirs)
    try:
        with CompiledCalls() as outer:
            compiled(tensor)
            with CompiledCalls() as inner:
                compiled(tensor)
                other = threading.Thread(target=compiled, args=(tensor,))
                other.start()
                other.join()
                tensor.sin()
            compiled(tensor)
        compiled(tensor)
        assert (outer.count, inner.count) == (3, 1)
        assert len(seen) == 4, "the first call finds nothing to look at"
        assert set_guard_complete_hook(theirs) is theirs
    finally:
        set_guard_complete_hook(before)
