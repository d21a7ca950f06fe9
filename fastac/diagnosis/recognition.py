"""Recognizes attention that no row covers: by the name of an op, or by what small ops do with each other."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastac.engine import torch_private
from fastac.registry.torch_private import arguments_of

_ATTENTION = re.compile(r"(?<![a-z])(flash_?)?(attn|attention|sdpa|f?mha)(?![a-z])")
_FORWARD = re.compile(r"(^|_)(fwd|forward|func)(_|$)")
_NOT_A_FORWARD = re.compile(r"backward|bwd|_grad|mask|bias")
_ATTENTION_OR_FLASH = re.compile(_ATTENTION.pattern + "|flash")
_BESIDE_ATTENTION = re.compile(
    r"mask|norm|rope|rotary|gate|embed|all_?to_?all|a2a|scatter|gather|split|reduce|proj|input|output|bias"
)
MATRIX_PRODUCTS = ("aten::bmm", "aten::baddbmm")
_JOINS = ("aten::cat", "aten::copy_")
_COPIES = ("aten::_to_copy", "aten::clone", "aten::native_dropout", "aten::_unsafe_view", "aten::expand")


def coarse_numbers(coarse: Iterable[int]) -> set[int]:
    """Numbers of keys of the attention over blocks that sparse attention chooses by: it is meant to be recomputed.

    coarse: numbers of blocks of the region's sparse calls. One key may also stand for two or four of them: some
    kernels divide their blocks.
    """
    return {blocks // times for blocks in coarse for times in (1, 2, 4) if blocks % times == 0}


def says_attention(name: str) -> bool:
    """Whether a name has attention among its words, and none that says it is something else about it."""
    return bool(_ATTENTION.search(name.lower())) and _NOT_A_FORWARD.search(name.lower()) is None


def names_attention_kernel(name: str) -> bool:
    """Whether a Function of that name, in words, may run an attention kernel, rather than something beside one.

    What counts is what comes last: GatedAttention is an attention, AttentionGate a gate.
    """
    name = name.lower().partition("_with_")[0]
    found = list(_ATTENTION_OR_FLASH.finditer(name))
    return bool(found) and "generated" not in name and _BESIDE_ATTENTION.search(name, found[-1].end()) is None


def looks_like_attention_forward(name: str, args: Iterable[Any]) -> bool:
    """Whether an op without a row seems to be an attention forward: by its name, and three tensors of 3 or 4 dims.

    name: with its namespace, which may be all that says attention: flash_attn_3::fwd, xformers_flash::flash_fwd.
    """
    tensors = [value for value in args if isinstance(value, torch.Tensor)][:3]
    namespace, _, own = name.lower().rpartition("::")
    library = _ATTENTION.search(namespace) or "flash" in namespace
    return (
        len(tensors) == 3
        and all(tensor.is_floating_point() and tensor.dim() in (3, 4) for tensor in tensors)
        and (says_attention(own) or (bool(library and _FORWARD.search(own)) and _NOT_A_FORWARD.search(own) is None))
    )


class UnknownOp(NamedTuple):
    """An op that seems to be an attention forward and has no row."""

    namespace: str
    name: str

    def suggested_row(self) -> str:
        """The line that registers a row for it, as far as its schema tells: the layout is the user's to check."""
        name = self.name.partition(".")[0]
        op = getattr(getattr(torch.ops, self.namespace), name)
        overloads = op.overloads() if isinstance(op, torch._ops.OpOverloadPacket) else ()
        arguments = arguments_of(getattr(op, overloads[0]) if overloads else op)
        key = arguments[1].name if len(arguments) > 1 else "key"
        drawing = [argument.name for argument in arguments if "dropout" in argument.name or argument.name == "p"]
        return (
            f'fastac.register(fastac.AttentionOp(backend="mine", namespace="{self.namespace}", name="{name}", '
            f'key="{key}", layout="bshd", dropout={repr(drawing[0]) if drawing else None}))'
        )


class SoftmaxAttention:
    """Finds attention written out as matrix product, softmax, matrix product, by following storages.

    Two activations multiplied give scores, a softmax over them gives probabilities, and their product with the values
    is one attention call that ran as small ops. A softmax that is no attention (a gate, a router) is left alone, and
    so is what a product with a weight gives.
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
        """Look at one op. Returns the number of keys of the attention that it completes, if any."""
        output = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
        if not isinstance(output, torch.Tensor) or not torch_private.has_storage(output):
            return None
        name = op._schema.name
        flat = [one for a in args for one in (a if isinstance(a, (list, tuple)) else (a,))]
        tensors = [one for one in flat if isinstance(one, torch.Tensor) and torch_private.has_storage(one)]
        for tensor in tensors:
            # Not a view: in the forward of an autograd.Function those of its inputs look like leaves.
            leaf = isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.requires_grad)
            leaf = leaf and not tensor._is_view()
            if leaf and self._kind(tensor) is None:
                self._mark(tensor, "weight")
        marked = [(tensor, kind) for tensor in tensors if (kind := self._kind(tensor))]
        if name in MATRIX_PRODUCTS:
            for tensor, kind in marked:
                if kind == "probabilities":
                    return int(tensor.shape[-1])
            if all(kind != "weight" for _, kind in marked):
                self.products += 1
                self._mark(output, "scores")
        elif name == "aten::_softmax":
            if any(kind == "scores" for _, kind in marked):
                self._mark(output, "probabilities")
        elif name in _JOINS:  # with sinks, or chunk by chunk
            kinds = [kind for _, kind in marked if kind in ("scores", "probabilities")]
            if kinds:
                self._mark(output, kinds[0])
        elif marked and (name in _COPIES or torch.Tag.pointwise in op.tags):
            tensor, kind = max(marked, key=lambda pair: pair[0].numel())
            if output.numel() == tensor.numel() and kind != "input" and (kind != "weight" or len(tensors) == 1):
                self._mark(output, kind)
        return None
