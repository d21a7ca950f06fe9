"""Attention for any op whose schema says what it takes: CPU kernels for tests, made from the names in the schema.

With these the real schemas and the real autograd formulas of a library run on any machine; only the arithmetic is the
tests' own. As in the real kernels a drawn mask is never kept, but a seed, from which backward draws it again; sums are
in float32 at least, and the statistics stay so.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from tests import support

# The schemas have several names for the same thing.
ONE_NAME = {
    "q": "query",
    "k": "key",
    "v": "value",
    "dout": "grad",
    "dOutput": "grad",
    "grad_out": "grad",
    "grad_out_": "grad",
    "output": "out",
    "attn_bias": "bias",
    "attn_mask": "bias",
    "causal": "is_causal",
    "softmax_scale": "scale",
    "compute_log_sumexp": "compute_logsumexp",
    "cu_seqlens_q": "cum_seq_q",
    "cu_seqlens_k": "cum_seq_k",
    "seqstart_q": "cum_seq_q",
    "seqstart_k": "cum_seq_k",
    "max_seqlen_batch_q": "max_q",
    "max_seqlen_batch_k": "max_k",
    "log_sumexp": "logsumexp",
    "softmax_logsumexp": "logsumexp",
    "softmax_lse": "logsumexp",
    "rng_state": "seed",
    "rng_seed": "seed",
    "philox_seed": "seed",
}


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention over (batch, heads, sequence, dim), as one call was told to do it. Heads of keys may be fewer."""

    scale: float | None = None
    causal: bool = False
    bias: torch.Tensor | None = None
    dropout_p: float = 0.0
    seed: int = 0

    def options(self, query: torch.Tensor, key: torch.Tensor) -> dict[str, Any]:
        """Further arguments of `support.attention_math`."""
        queries, keys = query.shape[-2], key.shape[-2]
        bias, keep = self.bias, None
        if self.causal:
            mask = torch.full((queries, keys), -torch.inf).triu(1 + keys - queries)
            bias = mask if bias is None else bias + mask
        if self.dropout_p:
            drawn = torch.rand(*query.shape[:-1], keys, generator=torch.Generator().manual_seed(self.seed))
            keep = (drawn >= self.dropout_p).float() / (1 - self.dropout_p)
        return {"scale": self.scale, "bias": bias, "keep": keep}

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and logsumexp."""
        tensors = _wide(query), *_for_each_query_head(query, key, value)
        output, logsumexp = support.attention_math(*tensors, **self.options(query, key))
        return output.to(query.dtype), logsumexp

    def backward(self, grad: torch.Tensor, *call: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of query, key, value. call: these, output and logsumexp, used as given: a wrong replay shows."""
        query, key, value, out, logsumexp = call
        tensors = _wide(query), *_for_each_query_head(query, key, value), _wide(out), logsumexp
        grads = support.attention_math_backward(_wide(grad), *tensors, **self.options(query, key))
        return grads[0].to(query.dtype), *(
            one.unflatten(1, (like.shape[1], -1)).sum(2).to(like.dtype)
            for one, like in zip(grads[1:], (key, value), strict=True)
        )


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _for_each_query_head(query: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    return [_wide(tensor).repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in tensors]


def _swap(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(-3, -2)  # tokens and heads; what has no dim has no layout of its own


class Layout:
    """Takes the tensors of one call apart into (batch, heads, sequence, dim), and puts results together again.

    layout: where tokens and heads are in its tensors, when they are not packed: (tokens, heads, dim) with ends given.
    aligned: the statistics are (sequences, heads, longest), padded to a multiple of it; 0 for no padding.
    """

    def __init__(self, call: SimpleNamespace, layout: str, aligned: int = 0) -> None:
        self.ends = call.cum_seq_q, call.cum_seq_k
        self.packed = call.cum_seq_q is not None and call.cum_seq_q.numel() > 0
        self.swapped = layout == "bshd"
        self.batch_of_one = self.packed and call.query.dim() == 4
        self.aligned = aligned

    def _places(self, of_keys: bool) -> list[slice]:
        ends = self.ends[of_keys].tolist()
        return [slice(start, stop) for start, stop in itertools.pairwise(ends)]

    def apart(self, tensor: torch.Tensor, of_keys: bool = False) -> list[torch.Tensor]:
        """One tensor per sequence of a packed batch, else one alone."""
        if not self.packed:
            return [_swap(tensor) if self.swapped else tensor]
        tensor = tensor[0] if self.batch_of_one else tensor
        return [_swap(tensor[place])[None] for place in self._places(of_keys)]

    def statistics_apart(self, tensor: torch.Tensor, queries: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same for (batch, heads, sequence), packed (heads, tokens)."""
        if self.aligned or not self.packed:
            parts = tensor.split(1) if self.packed else [tensor]
            return [part[..., : query.shape[-2]] for part, query in zip(parts, queries, strict=True)]
        tensor = tensor[0] if tensor.dim() == 3 else tensor
        return [tensor[None, :, place] for place in self._places(of_keys=False)]

    def together(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse of `apart`."""
        if not self.packed:
            return _swap(parts[0]) if self.swapped else parts[0]
        whole = torch.cat([_swap(part[0]) for part in parts])
        return whole[None] if self.batch_of_one else whole

    def statistics_together(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse of `statistics_apart`."""
        if self.aligned:
            longest = -(-max(part.shape[-1] for part in parts) // self.aligned) * self.aligned
            padding = [(0, longest - part.shape[-1]) for part in parts]
            padded = [torch.nn.functional.pad(part, pad) for part, pad in zip(parts, padding, strict=True)]
            return torch.cat(padded)
        whole = parts[0] if not self.packed else torch.cat([part[0] for part in parts], dim=-1)
        return whole[None] if self.batch_of_one else whole

    def backward(self, attention: Attention, grad: torch.Tensor, *call: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Gradients of query, key and value of a call: these, output and logsumexp."""
        query, key, value, out, logsumexp = call
        queries = self.apart(query)
        tensors = self.apart(grad), queries, self.apart(key, True), self.apart(value, True), self.apart(out)
        parts = zip(*tensors, self.statistics_apart(logsumexp, queries), strict=True)
        return tuple(map(self.together, zip(*(attention.backward(*part) for part in parts), strict=True)))


def _named(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> SimpleNamespace:
    """A call's arguments by name; what the op does not have is None."""
    names = [argument.name for argument in op._schema.arguments]
    values = {argument.name: argument.default_value for argument in op._schema.arguments}
    values |= dict(zip(names, args, strict=False)) | kwargs
    absent: dict[str, Any] = dict.fromkeys(
        ("bias", "cum_seq_q", "cum_seq_k", "scale", "dropout_p", "is_causal", "custom_mask_type")
    )
    return SimpleNamespace(**absent | {"seed": 0} | {ONE_NAME.get(name, name): value for name, value in values.items()})


def _attention(call: SimpleNamespace, seed: Any) -> Attention:
    return Attention(
        scale=call.scale,
        causal=bool(call.is_causal or call.custom_mask_type),
        bias=call.bias,
        dropout_p=call.dropout_p or 0.0,
        seed=int(seed) if call.dropout_p else 0,  # without dropout it may be anything
    )


def forward_kernel(
    counted_as: str, op: torch._ops.OpOverload, layout: str, returns: Sequence[str] = (), aligned: int = 0
) -> Callable[..., Any]:
    """A kernel for an op that runs an attention forward. It counts itself in `support.executions`.

    returns: out, logsumexp, seed, max_q, max_k or something else, for each of its outputs, where the schema does not
    say; of something else an empty tensor is returned.
    """
    names = returns or [ONE_NAME.get(value.name, value.name) for value in op._schema.returns]
    numbers = [str(value.type) in ("int", "SymInt") for value in op._schema.returns]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        support.executions[counted_as] += 1
        call = _named(op, args, kwargs)
        # As a fused kernel does: takes from the default generator only when it drops out.
        seed = torch.randint(2**31, ()) if call.dropout_p else torch.zeros((), dtype=torch.int64)
        attention, tensors = _attention(call, seed), Layout(call, layout, aligned)
        keys = tensors.apart(call.key, True)
        parts = zip(tensors.apart(call.query), keys, tensors.apart(call.value, True), strict=True)
        outs, statistics = zip(*(attention.forward(*part) for part in parts), strict=True)
        results: dict[str, Any] = {
            "out": tensors.together(outs),
            "logsumexp": tensors.statistics_together(statistics),
            "seed": seed,
            "max_q": max(out.shape[-2] for out in outs),
            "max_k": max(part.shape[-2] for part in keys),
        }
        if not getattr(call, "compute_logsumexp", True):  # as it is where no gradient will be needed
            results["logsumexp"] = torch.empty(0)
        found = [
            int(results.get(name, 0)) if number else results.get(name, torch.empty(0))
            for name, number in zip(names, numbers, strict=True)
        ]
        return tuple(found)

    return kernel


def backward_kernel(op: torch._ops.OpOverload, layout: str, aligned: int = 0) -> Callable[..., Any]:
    """A kernel for an op that runs an attention backward. Writes dq, dk and dv where it gets them.

    Returns these three, and nothing for what else it returns, such as the gradient of a bias, never required here.
    """
    others = len(op._schema.returns) - 3

    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = _named(op, args, kwargs)
        attention, tensors = _attention(call, call.seed), Layout(call, layout, aligned)
        found = tensors.backward(attention, call.grad, call.query, call.key, call.value, call.out, call.logsumexp)
        for written, gradient in zip((getattr(call, name, None) for name in ("dq", "dk", "dv")), found, strict=True):
            if written is not None:
                written.copy_(gradient)
        return (*found, *[None] * others)

    return kernel
