"""CPU kernels for the aten attention ops that torch implements for other devices only.

With these the real schemas and the real autograd formulas of torch run on any machine; only the arithmetic is the
tests' own. One forward and one backward serve all ops: arguments and results are read by their names in the schema.
As in the real kernels a drawn mask is never kept, but a seed, from which backward draws it again.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from tests import support

# Op -> where tokens and heads are in its tensors, when they are not packed: (tokens, heads, dim) with ends given.
FORWARD = {
    "_scaled_dot_product_flash_attention": "bhsd",
    "_scaled_dot_product_flash_attention.quantized": "bhsd",
    "_scaled_dot_product_efficient_attention": "bhsd",
    "_scaled_dot_product_cudnn_attention": "bhsd",
    "_scaled_dot_product_fused_attention_overrideable": "bhsd",
    "_scaled_dot_product_attention_math_for_mps": "bhsd",
    "_flash_attention_forward": "bshd",
    "_flash_attention_forward.quantized": "bshd",
    "_efficient_attention_forward": "bshd",
    "_cudnn_attention_forward": "bhsd",
}
BACKWARD = {
    "_scaled_dot_product_flash_attention_backward": "bhsd",
    "_scaled_dot_product_efficient_attention_backward": "bhsd",
    "_scaled_dot_product_cudnn_attention_backward": "bhsd",
    "_scaled_dot_product_fused_attention_overrideable_backward": "bhsd",
    "_flash_attention_backward": "bshd",
    "_efficient_attention_backward": "bshd",
    "_cudnn_attention_backward": "bhsd",
}

# The schemas have several names for the same thing.
ONE_NAME = {
    "grad_out": "grad",
    "grad_out_": "grad",
    "output": "out",
    "attn_bias": "bias",
    "attn_mask": "bias",
    "custom_mask_type": "is_causal",
    "compute_log_sumexp": "compute_logsumexp",
    "cu_seqlens_q": "cum_seq_q",
    "cu_seqlens_k": "cum_seq_k",
    "max_seqlen_batch_q": "max_q",
    "max_seqlen_batch_k": "max_k",
    "log_sumexp": "logsumexp",
    "softmax_logsumexp": "logsumexp",
    "rng_state": "seed",
    "philox_seed": "seed",
}


@dataclasses.dataclass(frozen=True)
class Attention:
    """Attention over (batch, heads, sequence, dim), as one call was told to do it."""

    scale: float | None
    causal: bool
    bias: torch.Tensor | None
    dropout_p: float
    seed: int

    def scores(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        scores = query @ key.transpose(-1, -2) * self.scale_of(query)
        if self.bias is not None:
            scores = scores + self.bias
        if self.causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), float("-inf"))
        return scores

    def scale_of(self, query: torch.Tensor) -> float:
        return query.shape[-1] ** -0.5 if self.scale is None else self.scale

    def kept(self, scores: torch.Tensor) -> torch.Tensor:
        """What dropout leaves of the probabilities, as factors."""
        if not self.dropout_p:
            return torch.ones_like(scores)
        drawn = torch.rand(scores.shape, generator=torch.Generator().manual_seed(self.seed))
        return (drawn >= self.dropout_p).to(scores.dtype) / (1 - self.dropout_p)

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output and logsumexp."""
        scores = self.scores(query, key)
        logsumexp = scores.logsumexp(-1)
        return ((scores - logsumexp[..., None]).exp() * self.kept(scores)) @ value, logsumexp

    def backward(
        self,
        grad: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of query, key, value. Output and logsumexp are used as given: a wrong replay shows in them."""
        scores = self.scores(query, key)
        probabilities = (scores - logsumexp[..., None]).exp()
        keep = self.kept(scores)
        grad_probabilities = (grad @ value.transpose(-1, -2)) * keep
        grad_scores = probabilities * (grad_probabilities - (grad * out).sum(-1, keepdim=True)) * self.scale_of(query)
        grad_key = grad_scores.transpose(-1, -2) @ query
        return grad_scores @ key, grad_key, (probabilities * keep).transpose(-1, -2) @ grad


def _swap(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(-3, -2)  # tokens and heads; what has no dim has no layout of its own


class Layout:
    """Takes the tensors of one call apart into (batch, heads, sequence, dim), and puts results together again."""

    def __init__(self, call: SimpleNamespace, layout: str) -> None:
        self.ends = call.cum_seq_q, call.cum_seq_k
        self.packed = call.cum_seq_q is not None and call.cum_seq_q.numel() > 0
        self.swapped = layout == "bshd"
        self.batch_of_one = self.packed and call.query.dim() == 4

    def _places(self, of_keys: bool) -> list[slice]:
        ends = self.ends[of_keys].tolist()
        return [slice(start, stop) for start, stop in itertools.pairwise(ends)]

    def apart(self, tensor: torch.Tensor, of_keys: bool = False) -> list[torch.Tensor]:
        """One tensor per sequence of a packed batch, else one alone."""
        if not self.packed:
            return [_swap(tensor) if self.swapped else tensor]
        tensor = tensor[0] if self.batch_of_one else tensor
        return [_swap(tensor[place])[None] for place in self._places(of_keys)]

    def statistics_apart(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The same for (batch, heads, sequence), packed (heads, tokens)."""
        if not self.packed:
            return [tensor]
        tensor = tensor[0] if self.batch_of_one else tensor
        return [tensor[None, :, place] for place in self._places(of_keys=False)]

    def together(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse of `apart`."""
        if not self.packed:
            return _swap(parts[0]) if self.swapped else parts[0]
        whole = torch.cat([_swap(part[0]) for part in parts])
        return whole[None] if self.batch_of_one else whole

    def statistics_together(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """The inverse of `statistics_apart`."""
        whole = parts[0] if not self.packed else torch.cat([part[0] for part in parts], dim=-1)
        return whole[None] if self.batch_of_one else whole


def _named(op: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> SimpleNamespace:
    """A call's arguments by name; what the op does not have is None."""
    names = [argument.name for argument in op._schema.arguments]
    values = {argument.name: argument.default_value for argument in op._schema.arguments}
    values |= dict(zip(names, args, strict=False)) | kwargs
    absent = dict.fromkeys(("bias", "cum_seq_q", "cum_seq_k", "scale", "dropout_p", "is_causal"))
    return SimpleNamespace(**absent | {ONE_NAME.get(name, name): value for name, value in values.items()})


def _attention(call: SimpleNamespace, seed: torch.Tensor) -> Attention:
    return Attention(call.scale, bool(call.is_causal), call.bias, call.dropout_p or 0.0, int(seed))


def _forward(name: str, op: torch._ops.OpOverload, layout: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        support.executions[f"aten::{name}"] += 1
        call = _named(op, args, kwargs)
        assert getattr(call, "compute_logsumexp", True), "torch computes them whenever a gradient will be needed"
        # As a fused kernel does: takes from the default generator only when it drops out.
        seed = torch.randint(2**31, ()) if call.dropout_p else torch.zeros((), dtype=torch.int64)
        attention, tensors = _attention(call, seed), Layout(call, layout)
        parts = zip(
            tensors.apart(call.query), tensors.apart(call.key, True), tensors.apart(call.value, True), strict=True
        )
        outs, statistics = zip(*(attention.forward(*part) for part in parts), strict=True)
        results = {
            "out": tensors.together(outs),
            "logsumexp": tensors.statistics_together(statistics),
            "seed": seed,
            "max_q": max(out.shape[-2] for out in outs),
            "max_k": max(part.shape[-2] for part in tensors.apart(call.key, True)),
        }
        names = [ONE_NAME.get(value.name, value.name) for value in op._schema.returns]
        if not any(names):  # _scaled_dot_product_attention_math_for_mps
            return results["out"], results["logsumexp"]
        return tuple(results.get(name, torch.empty(0)) for name in names)

    return kernel


def _backward(_: str, op: torch._ops.OpOverload, layout: str) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = _named(op, args, kwargs)
        attention, tensors = _attention(call, call.seed), Layout(call, layout)
        parts = zip(
            *(tensors.apart(value) for value in (call.grad, call.query)),
            *(tensors.apart(value, True) for value in (call.key, call.value)),
            tensors.apart(call.out),
            tensors.statistics_apart(call.logsumexp),
            strict=True,
        )
        gradients = zip(*(attention.backward(*part) for part in parts), strict=True)
        found = [tensors.together(gradient) for gradient in gradients]
        return (*found, *[None] * (len(op._schema.returns) - 3))  # of the bias, which never requires grad here

    return kernel


@contextmanager
def registered() -> Iterator[None]:
    """The ops above have CPU kernels inside. Forwards count themselves in `support.executions`, as `aten::<name>`."""
    library = torch.library.Library("aten", "IMPL")
    for ops, kernel in ((FORWARD, _forward), (BACKWARD, _backward)):
        for name, layout in ops.items():
            packet, _, overload = name.partition(".")
            op = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(name, kernel(name, op, layout), "CPU")
    try:
        yield
    finally:
        library._destroy()
