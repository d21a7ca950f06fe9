"""Recognizes attention that no row covers: by the name of an op or a Function, or by the data flow of small ops."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastac.engine import torch_private
from fastac.registry.torch_private import Op, arguments_of, qualified_name

_ATTENTION = re.compile(r"(?<![a-z])(flash_?)?(attn|attention|sdpa|f?mha)(?![a-z])")
_FORWARD = re.compile(r"(^|_)(fwd|forward|func)(_|$)")
_NOT_A_FORWARD = re.compile(r"backward|bwd|_grad|mask|bias")
_ATTENTION_OR_FLASH = re.compile(_ATTENTION.pattern + "|flash")
_BESIDE_ATTENTION = re.compile(
    r"mask|norm|rope|rotary|gate|embed|all_?to_?all|a2a|scatter|gather|split|reduce|proj|input|output|bias"
)
_MATRIX_PRODUCTS = ("aten::bmm", "aten::baddbmm")
_JOINS = ("aten::cat", "aten::copy_")
_COPIES = ("aten::_to_copy", "aten::clone", "aten::native_dropout", "aten::_unsafe_view", "aten::expand")


def coarse_numbers(coarse: Iterable[int]) -> set[int]:
    """Numbers of keys of the coarse attention that sparse attention chooses its blocks by. It may be recomputed.

    coarse: numbers of blocks of the region's sparse calls. One key may also stand for two or four of them: some
    kernels divide their blocks.
    """
    return {blocks // times for blocks in coarse for times in (1, 2, 4) if blocks % times == 0}


def says_attention(name: str) -> bool:
    """Whether a name has attention among its words, and none of a mask, a bias or a backward."""
    return bool(_ATTENTION.search(name.lower())) and _NOT_A_FORWARD.search(name.lower()) is None


def names_attention_kernel(name: str) -> bool:
    """Whether a Function of that name, in words, may run an attention kernel, rather than something beside one.

    The last word decides: GatedAttention is an attention, AttentionGate a gate.
    """
    name = name.lower().partition("_with_")[0]
    found = list(_ATTENTION_OR_FLASH.finditer(name))
    return bool(found) and "generated" not in name and _BESIDE_ATTENTION.search(name, found[-1].end()) is None


def looks_like_attention_forward(name: str, args: Iterable[Any]) -> bool:
    """Whether an op without a row seems to be an attention forward: by its name, and three tensors of 3 or 4 dims.

    name: with its namespace, which alone may say attention: flash_attn_3::fwd, xformers_flash::flash_fwd.
    """
    tensors = [value for value in args if isinstance(value, torch.Tensor)][:3]
    namespace, _, own = name.lower().rpartition("::")
    library = _ATTENTION.search(namespace) or "flash" in namespace
    return (
        len(tensors) == 3
        and all(tensor.is_floating_point() and tensor.dim() in (3, 4) for tensor in tensors)
        and (says_attention(own) or (bool(library and _FORWARD.search(own)) and _NOT_A_FORWARD.search(own) is None))
    )


def suggested_row(op: Op) -> str:
    """The line that registers a row for an op, as far as its schema tells: the layout is the user's to check."""
    namespace, _, name = qualified_name(op).partition(".")[0].partition("::")
    names = [argument.name for argument in arguments_of(op)]
    drawing = [name for name in names if "dropout" in name or name == "p"]
    return (
        f'fastac.register(fastac.AttentionOp(backend="mine", namespace="{namespace}", name="{name}", '
        f'key="{[*names, "key"][1]}", layout="bshd", dropout={repr(drawing[0]) if drawing else None}))'
    )


class SoftmaxAttention:
    """Finds attention written out as matrix product, softmax, matrix product, by following storages.

    The product of two activations gives scores, their softmax gives probabilities, and the product of these with the
    values is one attention call that ran as small ops. Another softmax (a gate, a router) is ignored, and so is a
    product with a weight.
    """

    def __init__(self, inputs: Iterable[torch.Tensor] = ()) -> None:
        self.products = 0  # of two activations
        self._kinds: dict[int, tuple[StorageWeakRef, str]] = {}
        for tensor in inputs:
            if torch_private.has_storage(tensor):
                self._mark(tensor, "input")

    def _kind(self, tensor: torch.Tensor) -> str | None:
        found = self._kinds.get(StorageWeakRef(tensor.untyped_storage()).cdata)
        return found[1] if found else None

    def _mark(self, tensor: torch.Tensor, kind: str) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._kinds[reference.cdata] = (reference, kind)

    def follow(self, op: torch._ops.OpOverload, args: Iterable[Any], outputs: Any) -> int | None:
        """Take note of one op. Returns the number of keys of the attention that it completes, if any."""
        output = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
        if not isinstance(output, torch.Tensor) or not torch_private.has_storage(output):
            return None
        name = op._schema.name
        flat = [one for a in args for one in (a if isinstance(a, (list, tuple)) else (a,))]
        tensors = [one for one in flat if isinstance(one, torch.Tensor) and torch_private.has_storage(one)]
        for tensor in tensors:
            # Views of inputs look like leaves in the forward of an autograd.Function; others cannot tell their graph.
            if tensor._is_view() or self._kind(tensor) is not None:
                continue
            if isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
                self._mark(tensor, "weight")
        marked = [(tensor, kind) for tensor in tensors if (kind := self._kind(tensor))]
        kinds = {kind: tensor for tensor, kind in marked}
        if name in _MATRIX_PRODUCTS:
            if "probabilities" in kinds:
                return int(kinds["probabilities"].shape[-1])
            if "weight" not in kinds:
                self.products += 1
                self._mark(output, "scores")
        elif name == "aten::_softmax":
            if "scores" in kinds:
                self._mark(output, "probabilities")
        elif name in _JOINS:  # with sinks, or chunk by chunk
            for kind in kinds.keys() & {"scores", "probabilities"}:
                self._mark(output, kind)
        elif marked and (name in _COPIES or torch.Tag.pointwise in op.tags):
            tensor, kind = max(marked, key=lambda pair: pair[0].numel())
            if output.numel() == tensor.numel() and kind != "input" and (kind != "weight" or len(tensors) == 1):
                self._mark(output, kind)
        return None
