"""What random blocks and their uses are written of: lines of Python, and the functions that these call.

In a block, a, b and c are values of shape (batch, tokens, W). In a line, $o, $p and $q are three or fewer of these, $n
is a number of its own, and $policy a policy. A line of a block may need another in `__init__`, after " # init: ".
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fastac.engine import torch_private
from tests import support

W, HEADS = 8, 2

Tensor = torch.Tensor
Table = dict[str, tuple[int, tuple[str, ...]]]
"""Kind of lines -> how often it is chosen, and its lines."""

BLOCK: Table = {
    "plain": (
        10,
        (
            "$o = self.linear$n($p)  # init: self.linear$n = nn.Linear(W, W)",
            "$o = self.norm$n($p)  # init: self.norm$n = nn.LayerNorm(W)",
            "$o = $p + torch.tanh($q)",
            "$o = $p * $q.sigmoid()",
            "$o = F.gelu($p) * self.scale",
            "$o = ($p @ $q.transpose(1, 2)).tanh() @ $p",
            "$o = self.conv$n($p.transpose(1, 2)).transpose(1, 2)  # init: self.conv$n = nn.Conv1d(W, W, 3, padding=1)",
            "$o = self.gru$n($p)[0]  # init: self.gru$n = nn.GRU(W, W, batch_first=True)",
            "$o = self.table$n($p.detach().argmax(-1))  # init: self.table$n = nn.Embedding(W, W)",
            "$o = torch.where($p > 0, $p, $q.exp())",
            "$o = torch.fft.ifft(torch.fft.fft($p, dim=1) * 2, dim=1).real",
            "$o = $p.cumsum(1) / ($q.norm(dim=-1, keepdim=True) + 1)",
            "$o = $p * $p.detach().sum().item()",
            "$o, $p = $p, $q",
        ),
    ),
    "attention": (
        8,
        (
            "$o = attend($p, $q, $q)",
            "$o = attend($p, $p, $q, is_causal=True)",
            "$o = attend($p, $q, $p, attn_mask=causal($p))",
            "$o = attend($p, $q, $p, attn_mask=causal($p).log().to($p.dtype))",
            "$o = drawing($p, $q, $q)",
            "$o = self.heads$n($p, $q, $q, need_weights=False)[0]"
            "  # init: self.heads$n = nn.MultiheadAttention(W, HEADS, batch_first=True)",
            "$o = self.layer$n($p)"
            "  # init: self.layer$n = nn.TransformerEncoderLayer(W, HEADS, 12, 0.0, batch_first=True)",
        ),
    ),
    "kernels": (
        3,
        (
            "$o = kernel('strided', $p, $q, $q)",
            "$o = kernel('expanded', $p, $q, $p)",
            "$o = kernel('drawing', $p, $q, $q)",
            "$o = kernel('returns_value', $p, $p, $q)",
            "$o = kernel('returns_part_of_value', $p, $q, $q * 1)",
            "$o = kernel('writes_query', $p * 1, $q, $q)",
            "$o = kernel('nested', $p, $q, $p)",
            "try: $o = kernel('refusing', $p, $q, $q)\nexcept NotImplementedError: $o = attend($p, $q, $q)",
            "self.calls$n += 1; $o = kernel('other_statistics', $p, $q, $q, self.calls$n)  # init: self.calls$n = 0",
            "$o = kernel('without_a_row', $p, $q, $q)",
        ),
    ),
    "views": (
        5,
        (
            "$o = $p.transpose(0, 1).contiguous().transpose(0, 1)",
            "$o = torch.cat([one.sin() for one in $p.split([1, W - 1], dim=-1)], dim=-1)",
            "$o = $p[:, :1].expand_as($p) + $q",
            "$o = $p.mean(1, keepdim=True).expand_as($p)",
            "$o = $p.chunk(2, dim=-1)[0].repeat(1, 1, 2)",
            "$o = torch.stack($p.unbind(1)[::-1], dim=1)",
            "$o = $p.view($p.shape)",
            "$o = $p.flatten(1).unflatten(1, (-1, W))",
            "$o = $p.as_strided($p.shape, $p.stride()).cos()",
            "$o = $p.gather(1, $q.sort(dim=1).indices)",
            "$o = $p[:, $q.detach().mean((0, 2)).topk($p.shape[1]).indices]",
        ),
    ),
    "written": (
        5,
        (
            "$p.add_(1)",
            "$p.add_($q)",
            "$p.mul_(0.5)",
            "$p.mul_($q)",
            "$p[:, 0].add_(1)",
            "$p[..., 0] = 0",
            "$p.transpose(0, 1).relu_()",
            "$p.copy_($q)",
            "F.relu($p, inplace=True)",
            "$p.masked_fill_($q > 0, 0)",
            "$o = $p.clone(); $o[:, 1:] = $q[:, 1:]",
            "$o = $p * 1; $o.transpose(1, 2)[0].mul_(2)",
            "$o = $p.exp(); $o.add_(1)",
            "$o = $p.sin(); $o.add_($q).mul_(0.5)",
            "with torch.no_grad(): $p.mul_(0.5)",
            "with torch.no_grad(): torch.sin($p, out=$q)",
        ),
    ),
    "without gradients": (
        2,
        (
            "$o = $p.detach() + $q",
            "$o = $p.detach()",
            "with torch.no_grad(): $o = $p * 2",
            "with torch.inference_mode(): number = attend($p.detach(), $p, $p).sum().item()\n$o = $p * number",
            "with torch.set_grad_enabled(not self.training): $o = F.silu($p)",
        ),
    ),
    "gradients": (
        2,
        (
            "if $p.requires_grad: ($o,) = torch.autograd.grad(F.silu($p).sum(), $p, create_graph=True)",
            "if $p.requires_grad: $o = $q * torch.autograd.grad(attend($p, $q, $q).square().sum(), $p)[0]",
            "if $p.requires_grad: $o = $q * torch.autograd.grad($p.square().sum(), $p, retain_graph=True)[0]",
            "$o = $p + slope(lambda one: attend(one, one, $q).sin(), $p)",
            "leaf = $p.detach().requires_grad_(); leaf.exp().sum().backward(); $o = $p * leaf.grad",
            "$o = torch.vmap(lambda one: one.sin() * 2)($p)",
        ),
    ),
    "functions": (
        3,
        (
            "$o = Product.apply($p, $q)",
            "$o = SavesOutput.apply($p)",
            "$o = WritesSaved.apply($p)",
            "$o = WritesGradient.apply($p)",
            "$o = WritesInput.apply($p * 1)",
            "$o = ReadsTwice.apply($p)",
            "$o = KeepsOnContext.apply($p)",
            "$o = DrawsInBackward.apply($p)",
            "$o = DifferentiatesInBackward.apply($p)",
            "$o, _, _ = ThreeOutputs.apply($p, $q)",
        ),
    ),
    "hooks": (
        2,
        (
            "hook($p, lambda gradient: gradient * 2)",
            "hook($p, lambda gradient: gradient.mul_(2))",
            "$o = $p.sin(); hook($o, lambda gradient: gradient + 1)",
            "if $p.requires_grad: $p.retain_grad()",
            "with copying_hooks(): $o = attend($p.sin(), $q, $q)",
            "$o = in_thread(lambda: $p.sin() * $q)",
        ),
    ),
    "caught": (
        1,
        (
            "with contextlib.suppress(RuntimeError): $o = $p.sin(); $o = $p.cos().view(3)",
            "with run.caught(): $o = $p.sin(); $o = $p.cos().view(3)",
            "if not flag: raise ValueError",
        ),
    ),
    "drawn": (
        3,
        (
            "$o = F.dropout($p, 0.3, self.training)",
            "$o = self.dropout$n($p)  # init: self.dropout$n = nn.Dropout(0.2)",
            "$o = F.dropout($p * 1, 0.3, inplace=True)",
            "$o = F.rrelu($p, training=True)",
            "$o = $p + torch.randn_like($p)",
            "$o = $p * torch.bernoulli($q.detach().sigmoid())",
            "$o = $p[:, torch.randperm($p.shape[1])]",
            "torch.manual_seed(3); $o = F.dropout($p, 0.3)",
            "$o = $p * random.random()",
            "$o = $p[:, numpy.random.permutation($p.shape[1])]",
            "$o = attend($p, $q, $q, dropout_p=0.2)",
            "with torch.random.fork_rng(devices=[]): torch.manual_seed(1); $o = F.dropout($p, 0.3)",
        ),
    ),
    "state": (
        2,
        (
            "self.count$n += 1  # init: self.register_buffer('count$n', torch.zeros(3))",
            "self.count$n += 1; $o = $p * self.count$n.mean()  # init: self.register_buffer('count$n', torch.ones(3))",
            "self.mean$n.mul_(0.9).add_($p.detach().mean((0, 1)), alpha=0.1); $o = $p - self.mean$n"
            "  # init: self.register_buffer('mean$n', torch.zeros(W))",
            "self.mean$n = 0.9 * self.mean$n + 0.1 * $p.detach().mean((0, 1)); $o = $p * self.mean$n"
            "  # init: self.register_buffer('mean$n', torch.ones(W))",
            "$o = $p * self.last$n; self.last$n.copy_($p[0, 0].detach())"
            "  # init: self.register_buffer('last$n', torch.ones(W))",
            "self.last$n.copy_($p[0, 0])  # init: self.register_buffer('last$n', torch.ones(W))",
            "self.calls$n += 1; $o = $p * self.calls$n  # init: self.calls$n = 0",
            "$o = $p + self.kept$n; self.kept$n = $p.detach().mean()  # init: self.kept$n = 0",
            "$o = $p + torch.rand($p.shape, generator=self.generator$n, dtype=$p.dtype)"
            "  # init: self.generator$n = torch.Generator().manual_seed(1)",
            "$o = self.batch$n($p.transpose(1, 2)).transpose(1, 2)  # init: self.batch$n = nn.BatchNorm1d(W)",
            "$o = self.spectral$n($p)"
            "  # init: self.spectral$n = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(W, W))",
            "with torch.no_grad(): self.weight$n.mul_(0.9)\n$o = F.linear($p, self.weight$n)"
            "  # init: self.weight$n = nn.Parameter(torch.eye(W))",
            "$o = F.linear($p, self.weight$n)\nwith torch.no_grad(): self.weight$n.mul_(0.9)"
            "  # init: self.weight$n = nn.Parameter(torch.eye(W))",
        ),
    ),
}

ORDERED = (
    "if flag == 'write': self.mean$n.lerp_($p.detach().mean((0, 1)), 0.5)\n$o = $p - self.mean$n"
    "  # init: self.register_buffer('mean$n', torch.zeros(W))",
    "$o = $p + self.last$n.sin()\nif flag == 'write': self.last$n.copy_($p[0, 0].detach())"
    "  # init: self.register_buffer('last$n', torch.ones(W))",
    "$o = attend($p, $p + self.code$n, $q)\nif flag == 'data': self.code$n.data.mul_(0.9).add_($q[0, 0].detach())"
    "  # init: self.register_buffer('code$n', torch.ones(W))",
    "if flag == 'data': self.scale$n.data.mul_(0.9)\n$o = $p * self.scale$n.exp()"
    "  # init: self.register_buffer('scale$n', torch.ones(1))",
    "$o = $p / self.largest$n\nif flag == 'replace': self.largest$n = $q.detach().abs().max() + 1"
    "  # init: self.register_buffer('largest$n', torch.ones(()))",
    "$o = attend($p, $q, self.past$n)\nif flag == 'replace': self.past$n = $q.detach().repeat(1, 1, 2)[..., ::2]"
    "  # init: self.register_buffer('past$n', torch.ones(2, 6, W))",
    "if flag == 'replace': self.row$n = $p.detach()[0, 0].clone()\nif flag == 'write': self.row$n.add_(0.5)"
    "\n$o = $p * self.row$n.cos()  # init: self.register_buffer('row$n', torch.ones(W))",
    "if flag == 'write': self.none$n = torch.ones(()) if self.none$n is None else self.none$n + 1"
    "\n$o = $p * (self.none$n or 0.5)  # init: self.register_buffer('none$n', None)",
    "if flag != 'read' and not hasattr(self, 'made$n'): self.register_buffer('made$n', torch.zeros(()))"
    "\nif flag == 'write': self.made$n += 1\n$o = $p / (2 + getattr(self, 'made$n', 1))",
    "if flag == 'replace': self._buffers.pop('gone$n', None)\n$o = $p * self._buffers.get('gone$n', 2)"
    "  # init: self.register_buffer('gone$n', torch.ones(W))",
    "$o = self.batch$n($p.transpose(1, 2)).transpose(1, 2)  # init: self.batch$n = nn.BatchNorm1d(W)",
    "$o = self.dropout$n($p)  # init: self.dropout$n = nn.Dropout(0.2)",
    "$o = self.spectral$n($p)"
    "  # init: self.spectral$n = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(W, W))",
    "$o = run.region($policy, self.inner$n, $p, flag)  # init: self.inner$n = Counting()",
    "$o = run.region($policy, lambda one: counted(self, 'own$n', one, flag), $p)",
    "$o = run.torch_region(self.inner$n, $p, flag)  # init: self.inner$n = Counting()",
)
"""Buffers that one call reads, and another one writes: the argument `flag` of a call says what it does."""

MODES = ("read", "read", "write", "write", "data", "replace")
ORDERS = (
    *("run.loss(outs).backward()",) * 3,
    "for one in outs: run.loss(one).backward()",
    "for one in reversed(outs): run.loss(one).backward()",
    "run.loss(outs[:1]).backward(); run.loss(outs[1:]).backward()",
    "loss = run.loss(outs[-1]); loss.backward(retain_graph=True); run.loss(outs[0]).backward(); loss.backward()",
    "run.loss(outs).backward(retain_graph=True); run.loss(outs).backward()",
    "run.loss(outs[1:]).backward()",
)
"""The backwards of a step of several calls, whose outputs are `outs`."""

PARTS = (
    "a, b, c = run.region($policy, self.part$n, a, b, c)",
    "a, b, c = run.region($policy, lambda *values: self.part$n(*values), a, b, c)",
    "a, b, _ = run.region($policy, self.part$n, a, b, c)",
    "c = run.region($policy, self.part$n, a, b, c)[1]",
    "a, b, c = run.torch_region(self.part$n, a, b, c)",
    "a, b, c = run.torch_region(self.part$n, a, b, c, use_reentrant=True)",
    "for _ in range(2): a, b, c = self.part$n(a, b, c)",
    "if flag: a, b, c = self.part$n(a, b, c)",
    "if torch.rand(()) < 0.5: a, b, c = self.part$n(a, b, c)",
    "if random.random() < 0.5: a, b, c = self.part$n(a, b, c)",
    "if a.detach().sum() > 0: a, b, c = self.part$n(a, b, c)",
    "with torch.no_grad(): a, b, c = self.part$n(a, b, c)",
    "with torch.autocast('cpu', torch.bfloat16): a, b, c = [one.to(a.dtype) for one in self.part$n(a, b, c)]",
    "with torch.autocast('cpu', enabled=False): a, b, c = self.part$n(a, b, c)",
    "with copying_hooks(): a, b, c = self.part$n(a, b, c)",
    "with run.caught(): a, b, c = self.part$n(a, b, c)",
    "a, b, c = in_thread(lambda: self.part$n(a, b, c))",
)
"""How a block calls a part of itself, which is a method of random lines."""

RETURNS = (
    "return a",
    "return a, b",
    "return [a, (b, c)]",
    "return {'first': a, 'rest': [b, None, 3]}",
    "return Output(a, b)",
    "return a, x",
    "return a, a",
    "return a[:, 1:], a[:, :1]",
    "return a.detach(), b",
    "return a.mean(1), x.shape[0]",
)

# What is done with the block. x, y and z are inputs; `leaves` are those that they come from; `out` is what it returned.

INPUTS = (
    "x, y, z = leaves = run.leaves($tokens)",
    "x, y, z = leaves = run.leaves($tokens); x = x * 1",
    *("x, y, z = leaves = run.leaves($tokens); x, y = x * 1, y * 1",) * 6,
    "x, y, z = leaves = run.leaves($tokens); x = x.transpose(1, 2).contiguous().transpose(1, 2)",
    "x, y, z = leaves = run.leaves($tokens, 'y')",
    "x, y, z = leaves = run.leaves($tokens, 'z')",
    "x, y, z = leaves = run.leaves($tokens, '')",
    "x, y, z = leaves = run.leaves($tokens); x = y = x * 1",
    "x, y, z = leaves = run.leaves($tokens); x = x * 1; y = x[:, :]",
)

PREPARATIONS = (
    "block.eval()",
    "block.requires_grad_(False)",
    "for one in list(block.parameters())[::2]: one.requires_grad_(False)",
    "block = run.module(copy.deepcopy(block))",
    "for one in block.modules(): one.register_full_backward_hook(lambda module, given, taken: doubled(given))",
    "block.register_forward_hook(lambda module, args, out: tuple(one * 2 for one in tensors(out)))",
    "block.register_forward_pre_hook(lambda module, args: (args[0].sin(), *args[1:]))",
    "for one in block.parameters(): one.register_hook(lambda gradient: gradient * 3)",
    "for one in block.parameters(): one.register_post_accumulate_grad_hook(step)",
)

CALLS = (
    *("out = run.checkpoint(block, x, y)",) * 6,
    "out = run.checkpoint(block, x, y, more={'z': [z]})",
    "out = run.checkpoint(block, x, y=y, more=(None, z), flag=False)",
    "out = run.checkpoint(block.forward, x, y, z)",
    "out = run.checkpoint(lambda: block(x, y))",
    "out = run.checkpoint(functools.partial(block, flag=False), x, y)",
    "out = run.checkpoint(block, run.checkpoint(lambda x: x.sin() + y, x), y)",
    "out = run.checkpoint(block, x, y); out = run.checkpoint(block, x, out, flag=False)",
    "with torch.autocast('cpu', torch.bfloat16): out = run.checkpoint(block, x, y)",
    "with copying_hooks(): out = run.checkpoint(block, x, y)",
    "with set_checkpoint_early_stop(False): out = run.checkpoint(block, x, y)",
    "out = run.torch_region(lambda x, y: run.checkpoint(block, x, y), x, y)",
    "out = run.region('full', lambda x, y: run.checkpoint(block, x, y), x, y)",
    "with torch.no_grad(): out = run.keep(run.checkpoint(block, x, y))\nout = run.checkpoint(block, x, y)",
    "earlier = run.checkpoint(block, y, z); out = [run.checkpoint(block, x, y), earlier]",
    "out = run.checkpoint(block, x, y); out = [out, run.checkpoint(block, x, y, flag=False)]",
)

CHANGES = (
    "torch.rand(3)",
    "torch.manual_seed(9); random.seed(9); numpy.random.seed(9)",
    "with torch.no_grad(): x.add_(1)",
    "with torch.no_grad(): z.add_(1)",
    "x.add_(1)",
    "tensors(out)[0].mul_(2)",
    "with torch.no_grad(): tensors(out)[0].mul_(2)",
    "tensors(out)[-1].add_(1)",
    "block.train(not block.training)",
    "block.requires_grad_(False)",
    "block.scale = 3.0",
    "with torch.no_grad(): [one.mul_(1.5) for one in list(block.parameters())[:1]]",
    "with torch.no_grad(): [one.mul_(1.5) for one in list(block.parameters())[-1:]]",
    "for one in block.buffers(): one.add_(1)",
    "copy.deepcopy(block)",
    "with torch.no_grad(): run.keep(block(x, y))",
    "run.checkpoint(block, y, x)",
    "del x, y, z; gc.collect()",
)
"""Between forward and backward."""

BACKWARDS = (
    *("run.loss(out).backward()",) * 4,
    "loss = run.loss(out); loss.backward(retain_graph=True); loss.backward()",
    "loss = run.loss(out); loss.backward(); loss.backward()",
    "run.grad(tensors(out)[0], retain_graph=True); run.loss(out).backward()",
    "for one in tensors(out): one.requires_grad and run.loss(one).backward(retain_graph=True)",
    "run.loss(tensors(out)[-1]).backward()",
    "run.loss(tensors(out)[0]).backward()",
    "in_thread(run.loss(out).backward)",
    "run.loss(out).backward(inputs=[one for one in leaves if one.requires_grad][:1])",
    "run.grad(out)",
    "run.grad(out, retain_graph=True); run.grad(out)",
    "run.loss([one.square() for one in run.grad(out, create_graph=True)]).backward()",
    "interrupted(run.loss(out), block); run.loss(out).backward()",
    "with copying_hooks(): run.loss(out).backward()",
    "with torch.autocast('cpu', torch.bfloat16): run.loss(out).backward()",
    "torch.autograd.backward([one.sum() for one in tensors(out) if one.requires_grad])",
    "del out",
)

ENDS = ("pass", "run.optimize()", "run.zero_gradients()")

STATE = ("register_buffer", "calls", "kept", "generator=", "Batch", "spectral", "self.weight")
DRAWN_OUTSIDE_TORCH = ("random.random", "numpy.random.permutation")
INNER_GRADIENTS = ("autograd.grad(", "slope(", "leaf")
DRAWN = ("dropout", "rrelu", "rand", "bernoulli", "manual_seed", "drawing", "Draws")
"""Words of lines that change a state of the block, run it again inside its forward, or draw random numbers."""


# What the lines call


@dataclasses.dataclass
class Output:
    first: Tensor
    second: Tensor


def tensors(value: Any) -> list[Tensor]:
    """The tensors in a value, in their order."""
    value = vars(value) if isinstance(value, Output) else value
    return list(support.flat_tensors(value, "").values())


class Counting(torch.nn.Module):
    """Counts its calls in a buffer that the first of them makes."""

    def forward(self, x: Tensor, flag: str) -> Tensor:
        return counted(self, "count", x, flag)


def counted(module: torch.nn.Module, name: str, x: Tensor, flag: str) -> Tensor:
    if flag != "read":
        if not hasattr(module, name):
            module.register_buffer(name, torch.zeros(()))
        module.get_buffer(name).add_(1)
    return x.sin() * getattr(module, name, 0.5)


def attend(*tokens: Tensor, **options: Any) -> Tensor:
    heads = [one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in tokens]
    return F.scaled_dot_product_attention(*heads, **options).transpose(1, 2).flatten(2)


def drawing(*tokens: Tensor) -> Tensor:
    """Attention with dropout, which can be saved."""
    attention = support.custom_attention("hostile_drawing", "dropout", "dropout_p")
    heads = [one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in tokens]
    return attention(*heads, 0.3).transpose(1, 2).flatten(2)


KERNELS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "strided": lambda out, *_: (out.transpose(1, 2).contiguous().transpose(1, 2),),
    "expanded": lambda out, *_: (out.mean(-2, keepdim=True).expand_as(out),),
    "drawing": lambda out, *_: (F.dropout(out, 0.3),),
    "returns_value": lambda out, query, key, value, _: (value,),
    "returns_part_of_value": lambda out, query, key, value, _: (value[..., :1].expand_as(value),),
    "writes_query": lambda out, query, *_: (out + query.mul_(0.5),),
    "nested": lambda out, *tensors: (F.scaled_dot_product_attention(*tensors[:3]),),
    "other_statistics": lambda out, query, key, value, count: (out, torch.ones((1,) * (1 + count % 3))),
    "without_a_row": lambda out, *_: (out,),
}
"""What an attention op of the tests' own returns of the output that it computed, its inputs and a number."""


def refusing(*_: Any) -> Any:
    raise NotImplementedError


@functools.cache
def _kernel(kind: str) -> tuple[Any, Callable[..., Tensor]]:
    returned = KERNELS.get(kind, refusing)

    def run(query: Tensor, key: Tensor, value: Tensor, count: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        out, statistics = support.attention_math(query, key, value)
        out, *more = returned(out, query, key, value, count)
        return out, statistics, *(more or [torch.ones(1)])

    value, returns = ("Tensor(b) value", "Tensor(b)") if "value" in kind else ("Tensor value", "Tensor")
    library = support.define_op(
        f"hostile_kernel_{kind}(Tensor query, Tensor key, {value}, int n=0) -> ({returns}, Tensor, Tensor)", run
    )
    if kind != "without_a_row":
        support.register_row(f"hostile_kernel_{kind}", "always" if kind == "drawing" else None)
    return library, support.attention_function(getattr(torch.ops.fastac_tests, f"hostile_kernel_{kind}").default)


def kernel(kind: str, *tokens: Tensor | int) -> Tensor:
    """Attention by a kernel that does what those of libraries rarely do."""
    tensors = [one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in tokens[:3]]
    return _kernel(kind)[1](*tensors, *tokens[3:]).transpose(1, 2).flatten(2)


def causal(tokens: Tensor) -> Tensor:
    return torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()


def slope(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """A gradient that is taken of a leaf."""
    with torch.enable_grad():
        leaf = at.detach().requires_grad_()
        return torch.autograd.grad(function(leaf).sum(), leaf)[0]


def in_thread(function: Callable[[], Any]) -> Any:
    """Call a function in another thread. Returns or raises what it does."""
    found: list[Any] = []

    def call() -> None:
        torch.set_num_threads(1)  # of this thread: kernels of more add up in another order
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def hook(tensor: Tensor, function: Callable[[Tensor], Tensor]) -> None:
    if tensor.requires_grad:
        # Asked for its node first: for a view that was written under no_grad, torch 2.13 crashes otherwise.
        assert tensor.grad_fn or tensor.is_leaf
        tensor.register_hook(function)


class InterruptionError(Exception):
    pass


def interrupted(loss: Tensor, block: torch.nn.Module) -> None:
    """A backward that a hook ends."""

    def interrupt(_: Tensor) -> None:
        raise InterruptionError

    handles = [one.register_hook(interrupt) for one in block.parameters() if one.requires_grad]
    with contextlib.suppress(InterruptionError):
        loss.backward(retain_graph=True)
    for handle in handles:
        handle.remove()


def doubled(gradients: Any) -> Any:
    return tuple(None if one is None else one * 2 for one in gradients)


def step(parameter: Tensor) -> None:
    """An optimizer inside backward."""
    with torch.no_grad():
        assert parameter.grad is not None
        parameter.sub_(parameter.grad, alpha=0.01)


def copying_hooks() -> Any:
    """Hooks that keep copies, with the strides of what is saved: kernels may add up in another order for others."""

    def copied(tensor: Tensor) -> Tensor:
        return torch_private.clone(tensor, tensor.stride())

    return torch.autograd.graph.saved_tensors_hooks(lambda one: [copied(one)], lambda held: copied(held[0]))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y, x)
        return x * y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        x, y, _ = ctx.saved_tensors
        return gradient * y, gradient * x


class SavesOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        output = x.exp()
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved_tensors[0]


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return (ctx.saved_tensors[0] + ctx.saved_tensors[0]) * gradient


class WritesSaved(ReadsTwice):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.saved_tensors[0].mul_(2) * gradient


class WritesGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.mul_(2)


class WritesInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2


class KeepsOnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.kept = x.cos()
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.kept * gradient


class DrawsInBackward(ReadsTwice):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        drawn = torch.rand_like(gradient)
        return ctx.saved_tensors[0] * gradient * drawn


class DifferentiatesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return slope(torch.sin, ctx.saved_tensors[0]) * gradient


class ThreeOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Any:
        ctx.save_for_backward(x, y)
        ctx.set_materialize_grads(False)
        largest = x.argmax(-1)
        ctx.mark_non_differentiable(largest)
        return x * y, x.sin(), largest

    @staticmethod
    def backward(ctx: Any, product: Tensor | None, sine: Tensor | None, _: None) -> Any:
        x, y = ctx.saved_tensors
        of_x = None if product is None else product * y
        if sine is not None:
            of_x = sine * x.cos() + (0 if of_x is None else of_x)
        return of_x, None if product is None else product * x
