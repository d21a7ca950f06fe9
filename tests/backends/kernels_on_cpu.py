"""Attention for any op whose schema says what it takes: CPU kernels for tests, made from the names in the schema.

As in the real kernels a drawn mask is never kept, but a seed, from which backward draws it again; sums are in float32
at least, and the statistics stay so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
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
    "lse": "logsumexp",
    "rng_state": "seed",
    "rng_seed": "seed",
    "philox_seed": "seed",
}


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _swap(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(-3, -2)  # tokens and heads; what has no dim has no layout of its own


class Call:
    """One call of an attention op. Taken apart into (batch, heads, sequence, dim), and results put together again.

    arguments: by any of their names; what the op does not have is None. Heads of keys may be fewer.
    layout: where tokens and heads are in its tensors, when they are not packed: (tokens, heads, dim) with ends given.
    aligned: the statistics are (sequences, heads, longest), padded to a multiple of it; 0 for no padding.
    """

    def __init__(self, arguments: Mapping[str, Any], layout: str, aligned: int = 0) -> None:
        self.given = {ONE_NAME.get(name, name): value for name, value in arguments.items()}
        self.ends = self["cum_seq_q"], self["cum_seq_k"]
        self.packed = self["cum_seq_q"] is not None and self["cum_seq_q"].numel() > 0
        self.swapped = layout == "bshd"
        self.batch_of_one = self.packed and self["query"].dim() == 4
        self.aligned = aligned

    def __getitem__(self, name: str) -> Any:
        return self.given.get(name)

    def forward(self) -> dict[str, Any]:
        """What an op may return, by name."""
        # As a fused kernel does: takes from the default generator only when it drops out.
        seed = torch.randint(2**31, ()) if self["dropout_p"] else torch.zeros((), dtype=torch.int64)
        queries, keys, values = self._parts()
        parts = [self._with_options(*part, seed) for part in zip(queries, keys, values, strict=True)]
        found = [support.attention_math(*tensors, **options) for tensors, options in parts]
        return {
            "out": self._together([one.to(self["query"].dtype) for one, _ in found]),
            "logsumexp": self._statistics_together([one for _, one in found]),
            "seed": seed,
            "philox_offset": torch.zeros_like(seed),
            "max_q": max(one.shape[-2] for one in queries),
            "max_k": max(one.shape[-2] for one in keys),
        }

    def backward(self) -> tuple[torch.Tensor, ...]:
        """Gradients of query, key, value. Output and logsumexp are used as given: a wrong replay shows in them."""
        queries, keys, values = self._parts()
        others = self._apart("grad"), self._apart("out"), self._statistics_apart(queries)
        found = []
        for query, key, value, grad, out, statistics in zip(queries, keys, values, *others, strict=True):
            tensors, options = self._with_options(query, key, value, self["seed"])
            grads = support.attention_math_backward(_wide(grad), *tensors, _wide(out), statistics, **options)
            likes = zip(grads, (query, key, value), strict=True)
            found.append([one.unflatten(1, (like.shape[1], -1)).sum(2).to(like.dtype) for one, like in likes])
        return tuple(self._together(grads) for grads in zip(*found, strict=True))

    def _with_options(self, query: Any, key: Any, value: Any, seed: Any) -> tuple[list[Any], dict[str, Any]]:
        queries, keys = query.shape[-2], key.shape[-2]
        wide = [_wide(one).repeat_interleave(query.shape[1] // one.shape[1], 1) for one in (query, key, value)]
        bias, keep = self["bias"], None
        if self["is_causal"] or self["custom_mask_type"]:
            mask = torch.full((queries, keys), -torch.inf).triu(1 + keys - queries)
            bias = mask if bias is None else bias + mask
        if self["dropout_p"]:
            drawn = torch.rand(*query.shape[:-1], keys, generator=torch.Generator().manual_seed(int(seed)))
            keep = (drawn >= self["dropout_p"]).float() / (1 - self["dropout_p"])
        return wide, {"scale": self["scale"], "bias": bias, "keep": keep}

    def _places(self, of_keys: bool) -> list[slice]:
        return [slice(start, stop) for start, stop in itertools.pairwise(self.ends[of_keys].tolist())]

    def _parts(self) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
        return self._apart("query"), self._apart("key", True), self._apart("value", True)

    def _apart(self, name: str, of_keys: bool = False) -> list[torch.Tensor]:
        """One tensor per sequence of a packed batch, else one alone."""
        tensor: torch.Tensor = self[name]
        if not self.packed:
            return [_swap(tensor) if self.swapped else tensor]
        tensor = tensor[0] if self.batch_of_one else tensor
        return [_swap(tensor[place])[None] for place in self._places(of_keys)]

    def _statistics_apart(self, queries: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same for (batch, heads, sequence), packed (heads, tokens)."""
        tensor: torch.Tensor = self["logsumexp"]
        if self.aligned or not self.packed:
            parts = tensor.split(1) if self.packed else [tensor]
            return [part[..., : query.shape[-2]] for part, query in zip(parts, queries, strict=True)]
        tensor = tensor[0] if tensor.dim() == 3 else tensor
        return [tensor[None, :, place] for place in self._places(of_keys=False)]

    def _together(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if not self.packed:
            return _swap(parts[0]) if self.swapped else parts[0]
        whole = torch.cat([_swap(part[0]) for part in parts])
        return whole[None] if self.batch_of_one else whole

    def _statistics_together(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        if self.aligned:
            longest = -(-max(part.shape[-1] for part in parts) // self.aligned) * self.aligned
            return torch.cat([torch.nn.functional.pad(part, (0, longest - part.shape[-1])) for part in parts])
        whole = parts[0] if not self.packed else torch.cat([part[0] for part in parts], dim=-1)
        return whole[None] if self.batch_of_one else whole


def _named(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    arguments = op._schema.arguments
    given = dict(zip([argument.name for argument in arguments], args, strict=False))
    return {argument.name: argument.default_value for argument in arguments} | given | dict(kwargs)


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
        call = Call(_named(op, args, kwargs), layout, aligned)
        results = call.forward()
        if call["compute_logsumexp"] is False:  # where no gradient will be needed
            results["logsumexp"] = torch.empty(0)
        return tuple(
            int(results.get(name, 0)) if number else results.get(name, torch.empty(0))
            for name, number in zip(names, numbers, strict=True)
        )

    return kernel


def backward_kernel(op: torch._ops.OpOverload, layout: str, aligned: int = 0) -> Callable[..., Any]:
    """A kernel for an op that runs an attention backward. Writes dq, dk and dv where it gets them.

    Returns these three, and nothing for what else it returns, such as the gradient of a bias, never required here.
    """
    others = len(op._schema.returns) - 3

    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = Call(_named(op, args, kwargs), layout, aligned)
        found = call.backward()
        for written, gradient in zip((call[name] for name in ("dq", "dk", "dv")), found, strict=True):
            if written is not None:
                written.copy_(gradient)
        return (*found, *[None] * others)

    return kernel
