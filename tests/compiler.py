"""torch.compile in tests: a compiler that has forgotten everything, and what it did since."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode


def reset() -> None:
    """Forget everything that was compiled, and what fake tensors learned."""
    torch._dynamo.reset()
    FakeTensorMode.cache_clear()
    counters.clear()


@contextmanager
def fresh(folder: Path) -> Iterator[None]:
    """Inside, nothing that was compiled before is used, and inductor keeps its files in a folder."""
    inductor = torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, compile_threads=1)
    autograd = torch._functorch.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False)
    reset()
    with pytest.MonkeyPatch.context() as patch, inductor, autograd:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield
    reset()


def graphs() -> int:
    """How many graphs were compiled since the last reset."""
    return counters["stats"]["unique_graphs"]


def graph_breaks() -> int:
    """At how many places graphs broke since the last reset."""
    return sum(counters["graph_break"].values())
