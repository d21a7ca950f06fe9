"""Values of small tensors in a simulation without data: masks, indices, and results computed from them.

Some models ask for values: how many tokens a mask leaves, at which places. Fake tensors have none. So an operation
whose inputs are all small inputs of the model, or constants, is computed on real tensors as well, on the CPU.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fastac.diagnosis.autograd_graph import tensors_of
from fastac.engine import torch_private
from fastac.engine.torch_private import tree_map

LARGEST = 2**20
"""The most numbers in a tensor whose values are known."""

CONSTANTS = ("arange", "full", "linspace", "ones", "scalar_tensor", "zeros")
"""Operations of aten without tensor arguments: their output is known."""

LIKE = ("full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zeros_like")
"""Operations of aten that take only the shape from a tensor: their output is known for any tensor."""


class KnownValues:
    """Fake tensors whose values are known."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self._values: Any = WeakTensorKeyDictionary()

    def learn(self, fake: torch.Tensor, value: torch.Tensor) -> None:
        """Record the values of a tensor, so that results computed from it are known, too."""
        if value.numel() <= LARGEST:
            with torch_private.without_modes():
                # A copy: in-place operations of the model change it, and must not change the user's tensor.
                self._values[fake] = value.to("cpu", copy=True)

    @contextlib.contextmanager
    def readable(self) -> Iterator[None]:
        """Hide from transformers that a tensor is fake if its values are known.

        transformers 5 takes a fake tensor for a trace (`is_tracing`). It then builds causal masks that training skips.
        """
        # The open pull request 48975 of transformers asks in its place whether torch.export runs. Then this may go.
        utils: Any = sys.modules.get("transformers.utils.import_utils")
        original = getattr(utils, "is_fake_tensor", None)
        if original is not None:
            utils.is_fake_tensor = lambda value: original(value) and value not in self._values
        try:
            yield
        finally:
            if original is not None:
                utils.is_fake_tensor = original

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operation on fake tensors, and on their values if all of these are known."""
        is_known = self._is_known(func, args, kwargs)
        try:
            outputs = _run(func, args, kwargs)
        except torch_private.NEEDS_VALUES:
            # The shape of the output depends on values. Indexing features by a mask needs only those of the mask.
            if func is torch.ops.aten.index.Tensor:
                return func(args[0], [place for index in args[1] for place in self._places(index)])
            if not is_known:
                raise
            device = tensors_of((args, kwargs))[0].device
            return tree_map(partial(self._faked, device), self._computed(func, args, kwargs))
        if is_known and all(tensor.numel() <= LARGEST for tensor in tensors_of(outputs)):
            try:
                computed = self._computed(func, args, kwargs)
            except RuntimeError:  # only CUDA has a kernel: the values stay unknown
                return outputs
            for fake, value in zip(tensors_of(outputs), tensors_of(computed), strict=True):
                self._values[fake] = value
        elif isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            # Unknown values were written into one of these tensors: what was known of it is stale.
            for tensor in tensors_of((args, kwargs)):
                self._values.pop(tensor, None)
        return outputs

    def _places(self, index: torch.Tensor | None) -> Iterable[torch.Tensor | None]:
        """What indexes in the place of one index: for a mask, the places that it leaves in each of its dimensions."""
        if index is None or index.dtype is not torch.bool:
            return [index]
        places: torch.Tensor = self.run(torch.ops.aten.nonzero.default, (index,), {})
        return places.unbind(1)

    def _is_known(self, func: Any, args: Any, kwargs: Any) -> bool:
        name = getattr(getattr(func, "overloadpacket", None), "__name__", "")
        if name in LIKE:
            return True
        if "empty" in name:  # its output has no values, whatever tensor it is made like
            return False
        tensors = tensors_of((args, kwargs))
        return all(tensor in self._values for tensor in tensors) and (bool(tensors) or name in CONSTANTS)

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The outputs of an operation on the known values, on the CPU."""

        def value(argument: Any) -> Any:
            if not isinstance(argument, torch.Tensor):
                return torch.device("cpu") if isinstance(argument, torch.device) else argument
            values = self._values.get(argument)
            # Without known values the operation is one of LIKE: it reads only the shape.
            return torch.empty(argument.shape, dtype=argument.dtype) if values is None else values

        with torch_private.without_modes():
            return func(*tree_map(value, args), **tree_map(value, kwargs))

    def _faked(self, device: torch.device, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        with self.mode:
            fake = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
        self.learn(fake, value)
        return fake


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    dtype = args[0].dtype if args and isinstance(args[0], torch.Tensor) else None
    if str(func) != "aten._grouped_mm.default" or dtype is torch.bfloat16:
        return func(*args, **kwargs)
    # Its kernels fall back to other dtypes since pytorch#162059, but its fake kernel still refuses all but bf16 (torch
    # 2.9 to 2.15; see issue pytorch#159547). Once the fake kernel takes fp16 and fp32, this function may go.
    rounded = tree_map(lambda leaf: leaf.bfloat16() if getattr(leaf, "dtype", None) is dtype else leaf, args)
    return func(*rounded, **kwargs).to(dtype)
