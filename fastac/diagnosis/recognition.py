"""Recognizes attention that no row covers: by the name of an op or a Function, or by the data flow of small ops."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from fastac.engine import torch_private
from fastac.engine.beginning import tensors_in
from fastac.registry.torch_private import Op, arguments_of, name_of

# An op without a row says only by its name what it computes. The words are those of kernels and Functions of the
# libraries that fastac's rows and tests name.
_ATTENTION = re.compile(r".*(attn|attention)$|(f?mha|f?mla|sdpa)\d*$|(fna\d?|na[123])d?$|fa[234]$")
"""A word for attention: selfattention, sdpa, or natten's fna."""
_LIBRARY = re.compile(r"flash|sage|fa[234]|fna")
"""A library of attention kernels. Its word alone names an attention, as in flash_fwd."""
_FORWARD = re.compile(r"fwd|forward|func")
_BACKWARD = re.compile(r"backward|bwd|grad$")
_MASK = re.compile(r"masks?$")
_BESIDE_ATTENTION = re.compile(
    r"mask(?!ed)|norm|rope|rotary|gate|gating|embed|scatter|gather|split|reduce|proj|input|output|bias|pool|modul|resid|drop|"
    r"mlp|conv|lu$|lora|adaln|sigmoid|tanh|quant|unpack|permut|transpose|layout|reshape|cache|loss|entropy|score|logit|"
    r"weight|softmax|merge|combine|concat|router|expert|index|select|topk|sample|partition|order|metadata|config|"
    r"^(a2a|out|scale|shift|add|mul|sum|ffn?|fft|act|cast|cat|pack|pad|copy|map|stat|prob|plan|ln|rms|ada|moe|linear|"
    r"roll)s?$"
)
"""A word for something beside attention. "All to all" is found otherwise: none of its three words says so."""
_KEYS = re.compile(r"(k|keys?|kv|qkv)(_|$)|packed_qkv|xk$")
"""A parameter that holds keys."""
_MATRIX_PRODUCTS = ("aten::bmm", "aten::baddbmm")
_LINEAR_PRODUCTS = ("aten::mm", "aten::addmm")
_JOINS = ("aten::cat", "aten::copy_")
_PICKS = ("aten::gather", "aten::index", "aten::index_select", "aten::constant_pad_nd", "aten::topk", "aten::scatter")
_COPIES = ("aten::_to_copy", "aten::clone", "aten::native_dropout", "aten::_unsafe_view", "aten::expand")

_POINT_TO_POINT = ("batch_p2p_ops", "irecv", "isend")
# These ops of c10d take no tensor of the caller, or only read it.
_NOT_COUNTED = ("barrier", "monitored_barrier_", "check_for_nan")

Shape = Sequence[Any]
"""The shape of a tensor. A nested tensor has the shapes of its parts."""


def coarse_numbers(coarse: Iterable[int]) -> set[int]:
    """Numbers of keys of the coarse attention with which sparse attention chooses its blocks. It may be recomputed.

    coarse: numbers of blocks of the region's sparse calls. One key may also stand for two or four blocks: some kernels
    divide their blocks.
    """
    return {blocks // times for blocks in coarse for times in (1, 2, 4) if blocks % times == 0}


def words_of(name: str) -> list[str]:
    """The words of a name in lower case. Underscores, capitals, and the end of "attention" divide them."""
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
    return [word for word in re.split(r"[\W_]+|(?<=attn)|(?<=attention)", name) if word]


def says_attention(name: str) -> bool:
    """Whether a name has attention among its words, and no word for a mask, a bias or a backward."""
    words = words_of(name)
    others = [word for word in words if _MASK.match(word) or _BACKWARD.match(word) or word == "bias"]
    return any(map(_ATTENTION.match, words)) and not others


@functools.lru_cache(10000)
def names_attention_kernel(name: str, library: str = "") -> bool:
    """Whether a Function or an op may run an attention kernel, by its name, rather than something beside attention.

    The words after attention decide: GatedAttention is an attention, AttentionGate a gate.

    library: the namespace of an op. It may say attention for a name that only says that it is a forward.
    """
    words = words_of(name.partition("_with_")[0].partition("With")[0])
    positions = [i for i, word in enumerate(words) if _ATTENTION.match(word)]
    positions = positions or [i for i, word in enumerate(words) if _LIBRARY.match(word)]
    library_words = words_of(library)
    names_library = any(_ATTENTION.match(word) or _LIBRARY.match(word) for word in library_words)
    if (
        not positions
        and names_library
        and any(map(_FORWARD.match, words))
        and not any(map(_BESIDE_ATTENTION.search, library_words))
    ):
        positions = [-1]  # all words come after the namespace
    if not positions or "generated" in words or any(map(_BACKWARD.match, words)):
        return False
    after = words[positions[-1] + 1 :]
    end = next((i for i, word in enumerate(after) if _FORWARD.match(word)), len(after))
    if after[:1] == ["bias"] and any(map(_LIBRARY.match, words)):
        return True  # FlashAttentionBias
    if "to" in after and "all" in after:
        return False
    # The words together as well: capitals make two words of RoPE and LoRA.
    return not any(map(_BESIDE_ATTENTION.search, [*after[:end], "".join(after[:end])]))


def has_attention_inputs(shapes: Sequence[Shape | None], names: Iterable[str] = ()) -> bool:
    """Whether tensors of these shapes may be query, key and value of an attention, or some of the three in one tensor.

    shapes: one for each floating-point tensor of a call, in their order; None if it is not known.
    names: names of the parameters.
    """
    if any("kv" in name for name in names) and any(shape is not None and len(shape) > 1 for shape in shapes):
        return True
    ranks = [None if shape is None else len(shape) for shape in shapes]
    for place in range(len(ranks) - 2):
        three = {rank for rank in ranks[place : place + 3] if rank is not None}
        if len(three) == 1 and 2 <= three.pop() <= 6:
            return True
    if len(shapes) == 2:
        first, second = shapes
        if first is None or second is None:
            return any(rank is not None and rank >= 4 for rank in ranks)
        return len(second) == len(first) + 1 >= 4 and 2 in second[:-1]
    packed = shapes[0] if len(shapes) == 1 else None
    return packed is not None and len(packed) >= 4 and 3 in (packed[:-1] if len(packed) > 4 else packed[1:2])


def looks_like_attention_forward(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an op without a row seems to be an attention forward: by its name, and by its tensors.

    Only the namespace may say attention: flash_attn_3::fwd, xformers_flash::flash_fwd.
    """
    namespace, _, name = name_of(op).partition("::")
    if not names_attention_kernel(name, namespace):
        return False
    tensors = [tensor for tensor in tensors_in([*args, *kwargs.values()]) if tensor.is_floating_point()]
    shapes = [torch_private.shape_of(tensor) for tensor in tensors]
    return has_attention_inputs(shapes, [argument.name for argument in arguments_of(op) if "Tensor" in argument.type])


def advice(names: Sequence[str], shapes: Mapping[str, Shape | None]) -> tuple[str, str]:
    """Options that say where the keys of a call are, and a sentence on what the user must fill in, or "".

    names: names of its parameters. shapes: shapes of the parameters that are tensors; the first is the query.
    """
    key = next((name for name in names if _KEYS.match(name) and name in shapes), "")
    shape, query = shapes.get(key), next(iter(shapes.values()), None)
    is_packed = any("seqlen" in name or name.startswith("cu_") for name in names)
    layout = _layout(key, query or (), shape or (), is_packed)
    missing = []
    if not key:
        missing.append(f"key: which of {', '.join(shapes) or 'its parameters'} holds the keys")
    if not layout:
        seen = "" if shape is None else f", of shape {tuple(shape)}"
        layouts = "bs3hd, t3hd" if "kv" in key else "bshd, bhsd, thd"
        missing.append(f"layout: where the keys{seen}, have their sequence: {layouts}")
    options = f"key={repr(key) if key else '...'}, layout={repr(layout) if layout else '...'}"
    return options, f" ({'; '.join(missing)})" * bool(missing)


def _layout(key: str, query: Shape, keys: Shape, is_packed: bool) -> str:
    """The layout of the keys, if shapes show it: by a sequence of another length, or by a dimension for q, k and v.

    The shapes are empty if they are not known.
    """
    if "kv" in key:
        parts = 3 if "qkv" in key else 2
        shows = len(keys) in (4, 5) and keys[-3] == parts and parts not in keys[:-3]
        return ("t3hd" if len(keys) == 4 else "bs3hd") if shows else ""
    if is_packed and len(keys) == 3:
        return "thd"
    if not len(query) == len(keys) == 4 or query[0] != keys[0]:
        return ""
    other = [place for place in (1, 2) if query[place] != keys[place]]
    # A multiple may also be grouped queries: several heads of queries for each head of keys.
    if len(other) != 1 or query[other[0]] % keys[other[0]] == 0:
        return ""
    return "bshd" if other == [1] else "bhsd"


def suggested_row(op: Op, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """The line that registers a row for an op that was called with these arguments, as far as it can be told."""
    namespace, _, name = name_of(op).partition("::")
    names = [argument.name for argument in arguments_of(op)]
    values = {**dict(zip(names, args, strict=False)), **kwargs}
    options, missing = advice(names, {name: v.shape for name, v in values.items() if isinstance(v, torch.Tensor)})
    drawing = [name for name in names if "dropout" in name or name == "p"]
    if not any(isinstance(value, torch.Tensor) for value in values.values()):
        return "it takes its tensors in a list, and a row cannot name the keys in a list: let it take them one by one"
    return (
        f'fastac.register(fastac.AttentionOp(backend="mine", namespace="{namespace}", name="{name}", {options}, '
        f"dropout={repr(drawing[0]) if drawing else None})){missing}"
    )


def _has_setup_context(function: Any) -> bool:
    return function.setup_context is not torch.autograd.Function.setup_context


def parameters_of(function: type) -> list[str]:
    """Names of the parameters of an autograd.Function's forward, without its context."""
    forward: Any = function.forward  # type: ignore[attr-defined]
    try:
        parameters = list(inspect.signature(forward).parameters.values())[0 if _has_setup_context(function) else 1 :]
    except (TypeError, ValueError):  # it is not a Python function
        return []
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return [parameter.name for parameter in parameters if parameter.kind is positional]


def suggested_visible(function: type, shapes: Sequence[Shape | None]) -> str:
    """The line that makes an autograd.Function visible. shapes: one for each of its tensors; None if not known."""
    if _has_setup_context(function):
        return "write its setup_context and forward as one forward(ctx, ...), and call fastac.make_visible"
    names = parameters_of(function)
    if not names:
        return f"fastac.make_visible({function.__name__}, layout=...) (layout: bshd, bhsd or thd, of its second tensor)"
    options, missing = advice(names, dict(zip(names, shapes, strict=False)))
    return f"fastac.make_visible({function.__name__}, {options}){missing}"


def no_attention(namespace: str, name: str) -> str:
    """The line that says that an op, or a Function of a module, is not an attention."""
    return f'fastac.register(fastac.Row(namespace={namespace!r}, name="{name}", kind="other"))'


def writes_its_buffer(op: torch._ops.OpOverload) -> bool:
    """Whether an op is a collective that writes a buffer of its caller, and so is never saved."""
    # A replay would not write the buffer: gradients were NaN, without an error.
    namespace, _, name = op._schema.name.partition("::")
    if namespace == "c10d":
        return name not in _NOT_COUNTED
    return namespace == "_c10d_functional" and (op._schema.is_mutable or name in _POINT_TO_POINT)


def is_called_by_fsdp() -> bool:
    """Whether FSDP calls this. It gathers and frees parameters by its own rules, also in recompute."""
    # The nearest frame outside torch and fastac belongs to the model. FSDP1 calls the model, so frames beyond it would
    # say FSDP for every collective of the model.
    frame = sys._getframe().f_back
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("torch.distributed.fsdp"):
            return True
        if not module.startswith(("torch.", "fastac.")):
            return False
        frame = frame.f_back
    return False


class SoftmaxAttention:
    """Finds attention written out as matrix product, softmax, matrix product, by following storages.

    The product of two activations gives scores, their softmax gives probabilities, and the product of these with the
    values is one attention call that ran as small ops. Another softmax (a gate, a router) is ignored, and so is a
    product with a weight. Other ops between the two products may pick some of the scores, and may not change their
    shape otherwise. The softmax of changed scores is over their last dimension. So an activation that two products made
    earlier is not taken for scores.
    """

    def __init__(self, inputs: Iterable[torch.Tensor] = ()) -> None:
        # Number of products of two activations.
        self.products = 0
        # Storage -> its mark. The weak reference keeps the address from being given to another storage.
        self._marks: dict[int, tuple[StorageWeakRef, str]] = {}
        for tensor in inputs:
            if torch_private.has_storage(tensor):
                self._mark(tensor, "input")

    def _mark_of(self, tensor: torch.Tensor) -> str | None:
        _, mark = self._marks.get(StorageWeakRef(tensor.untyped_storage()).cdata, (None, None))
        return mark

    def _mark(self, tensor: torch.Tensor, mark: str) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._marks[reference.cdata] = (reference, mark)

    def follow(self, op: torch._ops.OpOverload, args: Iterable[Any], outputs: Any) -> int | None:
        """Take note of one op. Returns the number of keys of the attention that it completes, if any."""
        output = outputs[0] if isinstance(outputs, (tuple, list)) and outputs else outputs
        if not isinstance(output, torch.Tensor) or not torch_private.has_storage(output):
            return None
        name = op._schema.name
        tensors = [tensor for tensor in tensors_in(args) if torch_private.has_storage(tensor)]
        for tensor in tensors:
            # In the forward of an autograd.Function a view of an input looks like a leaf. So a view is not a weight.
            if tensor._is_view() or self._mark_of(tensor) is not None:
                continue
            if isinstance(tensor, torch.nn.Parameter) or (tensor.is_leaf and tensor.requires_grad):
                self._mark(tensor, "weight")
        marked = [(tensor, mark) for tensor in tensors if (mark := self._mark_of(tensor))]
        marks = {mark: tensor for tensor, mark in marked}
        if name in _MATRIX_PRODUCTS:
            if "probabilities" in marks:
                return int(marks["probabilities"].shape[-1])
            if "weight" not in marks:
                self.products += 1
                self._mark(output, "scores")
            else:
                self._carry(marks, name, output)  # scores or probabilities whose heads are mixed
        elif name == "aten::_softmax":
            is_last = list(args)[1] in (-1, output.dim() - 1)
            if "scores" in marks or ("changed scores" in marks and is_last):
                self._mark(output, "probabilities")
        elif name in _JOINS:  # scores joined with sinks, or computed chunk by chunk
            for mark in marks.keys() & _SCORES.keys():
                self._mark(output, mark)
        elif marked and (name in _COPIES or torch.Tag.pointwise in op.tags):
            # Of several marked inputs the largest counts: the others are broadcast (a mask, a scale).
            tensor, mark = max(marked, key=lambda pair: pair[0].numel())
            if output.numel() == tensor.numel() and mark != "input" and (mark != "weight" or len(tensors) == 1):
                self._mark(output, mark)
        else:
            self._carry(marks, name, output)  # padded, gathered, normalized, mixed over heads
        return None

    def _carry(self, marks: Mapping[str, torch.Tensor], name: str, output: torch.Tensor) -> None:
        """Mark the output of an op that takes scores or probabilities."""
        for mark in marks.keys() & _SCORES.keys():
            scores = marks[mark]
            is_product = name in _LINEAR_PRODUCTS or name in _MATRIX_PRODUCTS
            is_pick = name in _PICKS and output.dim() == scores.dim() > 2 and output.is_floating_point()
            if output.shape == scores.shape or (is_product and output.numel() == scores.numel()) or is_pick:
                self._mark(output, _SCORES[mark])


_SCORES = {"scores": "changed scores", "changed scores": "changed scores", "probabilities": "probabilities"}
"""Mark of numbers for pairs of queries and keys -> their mark after an op that is not pointwise."""
