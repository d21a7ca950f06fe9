"""flash-attn 4 on any machine: its real Python layer, its autograd.Functions, with CPU kernels behind them.

The layer compiles its kernels with CUTLASS, whose Python packages are substituted here: whatever is imported from them
is there, and nothing can be run. The two functions that would launch kernels are replaced.
"""

from __future__ import annotations

import functools
import importlib
import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from tests import support
from tests.backends import packages
from tests.backends.kernels_on_cpu import Call
from tests.backends.sparse import bias_of, map_of

KERNEL = "flash_attn.cute._flash_attn_fwd"


class _Anything:
    """Has every attribute. It can be a base class, and a decorator that changes nothing."""

    # Not a MagicMock: that makes a class for each of the thousands of attributes, which takes 2 s.

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (object,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __iter__(self) -> Any:
        return iter(())

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __getitem__ = __mul__ = __or__


class _Substitute(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return getattr(_Anything(), name)


class _Substitutes(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the packages that the kernels are written with."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        found = name.partition(".")[0] in ("cutlass", "cuda", "quack", "tvm_ffi")
        return ModuleSpec(name, self, is_package=True) if found else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Substitute(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@functools.cache
def flash_attn_4() -> Any:
    """Import flash_attn.cute.interface, with CPU kernels."""
    sys.meta_path.insert(0, _Substitutes())
    if "flash_attn" in sys.modules:  # of flash-attn 2: as if both were installed in one place
        sys.modules["flash_attn"].__path__[:0] = [str(packages.place("flash-attn-4") / "flash_attn")]
    return with_kernels(importlib.import_module("flash_attn.cute.interface"))


BACKWARD = ("q", "k", "v", "out", "dout", "lse", "scale", "causal")
"""Arguments of its backward by position; one more is for soft caps."""


def with_kernels(interface: Any, counted_as: str = KERNEL) -> Any:
    """Put CPU kernels into a module with the code of that one. Forwards count themselves in `support.executions`."""

    def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> tuple[Any, ...]:
        support.executions[counted_as] += 1
        found = Call({"q": q, "k": k, "v": v, "bias": _bias(q, k, options)} | options, "bshd").forward()
        return found["out"], found["logsumexp"], None, None, None

    def backward(*args: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        given = dict(zip(BACKWARD, args, strict=False)) | options
        bias = _bias(given["q"], given["k"], options, by_keys=True)
        return Call(given | {"bias": bias}, "bshd").backward()

    interface._flash_attn_fwd, interface._flash_attn_bwd = forward, backward
    return interface


def _bias(q: torch.Tensor, k: torch.Tensor, options: dict[str, Any], by_keys: bool = False) -> torch.Tensor | None:
    """Where blocks are chosen, that of tokens that do not attend. Lists name blocks of keys, or by_keys of queries.

    There are lists of whole blocks, and of others, of which so many keys count.
    """
    if (chosen := options.get("block_sparse_tensors")) is None:
        return None
    query_block, key_block = chosen.block_size
    shape = (q.shape[1] // query_block, k.shape[1] // key_block)
    counts = (torch.arange(key_block) < options["aux_tensors"][0][:, None]).flatten()
    bias = torch.tensor(-torch.inf)
    for number, index, whole in (
        (chosen.full_block_cnt, chosen.full_block_idx, torch.ones_like(counts)),
        (chosen.mask_block_cnt, chosen.mask_block_idx, counts),
    ):
        blocks = map_of(index, number, shape[0] if by_keys else shape[1])
        blocks = blocks.transpose(-1, -2) if by_keys else blocks
        bias = torch.maximum(bias, bias_of(blocks, (query_block, key_block), whole))
    return bias
