"""Private names of torch's compiler: a name that went away is noticed; what dynamo does is counted."""

from __future__ import annotations

import threading

import torch
from torch._C._dynamo.eval_frame import set_guard_complete_hook

from fastac.compile.torch_private import CompiledCalls


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
