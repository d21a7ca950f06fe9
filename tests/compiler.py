"""torch.compile in tests: a compiler that has forgotten everything, and what it did since.

Every run begins as after a change of code: dynamo is reset, and nothing that AOT or inductor compiled before is taken
from a cache, because the first step after a compile is where gradients went wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
from torch._dynamo.utils import counters, get_compilation_metrics
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel

import fastac


def reset() -> None:
    """Forget everything that was compiled, and what fake tensors learned: a warm cache hides calls with fakes."""
    torch._dynamo.reset()
    FakeTensorMode.cache_clear()
    counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()


@contextmanager
def fresh(folder: Path) -> Iterator[None]:
    """Inside, nothing that was compiled before is used, and inductor keeps its files in a folder."""
    inductor = torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, compile_threads=1)
    autograd = torch._functorch.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False)
    reset()
    with (
        pytest.MonkeyPatch.context() as patch,
        inductor,
        autograd,
        sdpa_kernel(_cur_sdpa_kernel_backends()),
    ):
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
        yield
    reset()


def unfused(backend: str = "inductor") -> Any:
    """Inside, or in what this decorates, inductor's code calls torch's own ops: g++ compiles few kernels, or none.

    With another backend it changes nothing, as torch 2.9 has no such option.
    """
    return torch._inductor.config.patch(fallback_by_default=True) if backend == "inductor" else nullcontext()


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inductor's C++ kernels: what g++ made of equal source is used again, no graph is."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(autouse=True)
def fresh_compiler(kernel_folder: Path) -> Iterator[None]:
    """For modules that import it, and `kernel_folder`: every test begins with a compiler that knows nothing."""
    with fresh(kernel_folder):
        yield


class Compiled(NamedTuple):
    """What dynamo did since the last reset."""

    graphs: int
    graph_breaks: int  # places where graphs broke


def compiled_so_far() -> Compiled:
    """What dynamo did since the last reset; no function of fastac may be among the compiled frames."""
    metrics = [m for m in get_compilation_metrics() if m.co_filename is not None]
    ours = [f"{m.co_filename}:{m.co_name}" for m in metrics if m.co_filename.startswith(fastac.__path__[0] + "/")]
    assert not ours, f"dynamo compiled functions of fastac: {ours}"
    return Compiled(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
