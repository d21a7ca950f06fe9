"""Have fastac save the output of an attention kernel of your own: three ways, two of them tried here.

    python examples/custom_kernel.py

The kernel is written as one for Triton is: a program per block of queries goes over the keys block by block. Its body
is plain PyTorch here, so that it runs on a CPU; a comment marks where the Triton launch would stand.

1. A custom op and a row. torch knows the kernel by a name, and the row tells fastac what is behind that name. The best
   of the three: it works in compiled blocks, too, and the op can be profiled, counted and exported.
2. An autograd.Function and fastac.make_visible, for a kernel that stands in a Function which is to stay as it is. One
   line, in place; in compiled blocks the kernel is recomputed.
3. An entry point. For a package of kernels: who installs it need not call anything. Its pyproject.toml has

       [project.entry-points."fastac.backends"]
       my_kernels = "my_kernels.fastac_rows"

   and the module my_kernels/fastac_rows.py has ROWS as below, and FUNCTIONS in the place of make_visible. That module
   should not import the kernels: fastac finds them once somebody uses them.

A small transformer is trained for a few steps with each kernel: without checkpointing, with full checkpointing and with
attention saved. Losses and all gradients have to be equal to the last bit, and the kernel has to run once per call.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

import fastac

BLOCK = 16
executions: Counter[str] = Counter()

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


# The kernel: softmax attention over tensors of shape (batch, heads, sequence, dim)


def attention_program(
    program: int, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor
) -> None:
    """What one program does: BLOCK queries against all keys, with a running softmax."""
    rows = slice(program * BLOCK, (program + 1) * BLOCK)
    block = query[..., rows, :] * query.shape[-1] ** -0.5
    largest = block.new_full((*block.shape[:-1], 1), -math.inf)
    total, weighted = torch.zeros_like(largest), torch.zeros_like(block)
    for start in range(0, key.shape[-2], BLOCK):
        keys = slice(start, start + BLOCK)
        scores = block @ key[..., keys, :].transpose(-1, -2)
        larger = torch.maximum(largest, scores.amax(-1, keepdim=True))
        weights, rescale = (scores - larger).exp(), (largest - larger).exp()
        total = total * rescale + weights.sum(-1, keepdim=True)
        weighted = weighted * rescale + weights @ value[..., keys, :]
        largest = larger
    output[..., rows, :] = weighted / total
    logsumexp[..., rows] = (largest + total.log()).squeeze(-1)


def attention_forward(query: Tensor, key: Tensor, value: Tensor, counted_as: str) -> tuple[Tensor, Tensor]:
    """Output, and the logsumexp of the scores: the statistics that backward needs."""
    executions[counted_as] += 1
    output, logsumexp = torch.empty_like(query), query.new_empty(query.shape[:-1])
    # Triton: attention_program[(math.ceil(queries / BLOCK), batch * heads)](query, key, value, output, logsumexp)
    for program in range(math.ceil(query.shape[-2] / BLOCK)):
        attention_program(program, query, key, value, output, logsumexp)
    return output, logsumexp


def attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, logsumexp: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value. (A second kernel in Triton; it recomputes probabilities from logsumexp.)"""
    scale = query.shape[-1] ** -0.5
    probabilities = (query @ key.transpose(-1, -2) * scale - logsumexp[..., None]).exp()
    grad_scores = probabilities * (grad @ value.transpose(-1, -2) - (grad * output).sum(-1, keepdim=True)) * scale
    return grad_scores @ key, grad_scores.transpose(-1, -2) @ query, probabilities.transpose(-1, -2) @ grad


# Way 1: a custom op and a row


@torch.library.custom_op("my_kernels::attention_forward", mutates_args=())
def attention_op(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The kernel under a name that the dispatcher knows. It returns all that its backward needs."""
    return attention_forward(query, key, value, "op")


@attention_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(query), query.new_empty(query.shape[:-1])


def keep_for_backward(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def op_backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return attention_backward(grad, *ctx.saved_tensors)


attention_op.register_autograd(op_backward, setup_context=keep_for_backward)

ROWS = (
    fastac.AttentionOp(
        backend="my_kernels",
        namespace="my_kernels",
        name="attention_forward",
        layout="bhsd",  # where the key has its sequence: this is how fastac knows the number of keys
        dropout=None,  # it never draws random numbers
    ),
)
fastac.register(*ROWS)


# Way 2: an autograd.Function, made visible


class Attention(torch.autograd.Function):
    """The kernel as many libraries have it: the dispatcher knows nothing of it."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output, logsumexp = attention_forward(query, key, value, "Function")
        ctx.save_for_backward(query, key, value, output, logsumexp)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return attention_backward(grad, *ctx.saved_tensors)


fastac.make_visible(Attention, key="key", layout="bhsd", dropout=None)


# The trial


class Block(torch.nn.Module):
    """Self-attention and a feed-forward."""

    def __init__(self, attend: Attend, width: int = 32, heads: int = 2) -> None:
        super().__init__()
        self.attend = attend
        self.heads = heads
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(2))
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.out = torch.nn.Linear(width, width)
        self.feed_forward = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        parts = self.qkv(self.norms[0](tokens)).chunk(3, dim=-1)
        query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        tokens = tokens + self.out(self.attend(query, key, value).transpose(1, 2).flatten(2))
        return tokens + self.feed_forward(self.norms[1](tokens))


def train(attend: Attend, policy: str, layers: int = 3, steps: int = 4) -> list[Tensor]:
    """Train from the same start on the same data. Returns the losses and gradients of every step."""
    torch.manual_seed(0)
    blocks = torch.nn.ModuleList(Block(attend) for _ in range(layers))
    optimizer = torch.optim.AdamW(blocks.parameters(), lr=1e-3)
    seen = []
    for _ in range(steps):
        tokens, target = torch.randn(2, 1, 40, 32)
        for block in blocks:
            # In a diffusers model: fastac.enable(transformer, policy=policy), once.
            tokens = block(tokens) if policy == "none" else fastac.checkpoint(block, tokens, policy=policy)
        loss = F.mse_loss(tokens, target)
        optimizer.zero_grad()
        loss.backward()
        seen += [loss.detach(), *(parameter.grad.clone() for parameter in blocks.parameters())]
        optimizer.step()
    return seen


def main() -> int:
    """Print how often the kernels ran. 0 when attention was saved and everything is equal, else 1."""
    ways: dict[str, tuple[str, Attend]] = {
        "custom op + row": ("op", lambda *qkv: attention_op(*qkv)[0]),
        "Function + make_visible": ("Function", Attention.apply),
    }
    print("3 blocks, 4 steps: 12 attention calls")
    print(f"{'way':<24}{'policy':<12}{'kernel runs':>12}  losses and gradients")
    kept = True
    for way, (counted_as, attend) in ways.items():
        for policy, expected in (("none", 12), ("full", 24), ("attn_only", 12)):
            executions.clear()
            seen = train(attend, policy)
            if policy == "none":
                reference = seen
            equal = all(map(torch.equal, seen, reference))
            kept = kept and equal and executions[counted_as] == expected
            print(f"{way:<24}{policy:<12}{executions[counted_as]:>12}  {'equal' if equal else 'DIFFERENT'}")
    print(
        "\nIn a package of kernels, the third way, these two lines of pyproject.toml take the place of fastac.register:"
    )
    print('[project.entry-points."fastac.backends"]\nmy_kernels = "my_kernels.fastac_rows"')
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
