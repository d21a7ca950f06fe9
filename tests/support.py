"""What the tests share: tiny models, one training step, bitwise comparison, kernels that count their executions.

Nothing here reads fastac's own bookkeeping: an execution is counted by the kernel itself, so a test that counts stays
right when fastac is wrong.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from fastac.models.published import fill_zeros as fill_zeros
from tests.models.tiny import tiny_model

Tensors = dict[str, torch.Tensor]

CPU_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
"""The only fused attention that torch has on the CPU: every unmasked or plainly masked SDPA call here ends in it."""

executions: Counter[str] = Counter()
"""How often each counting kernel ran, by qualified op name. The fixture `attention_executions` empties it."""

_libraries: list[torch.library.Library] = []  # kernels are removed with their Library


def _counted(op: str, device: str, counts: Counter[str], name: str) -> torch.library.Library:
    """Replace an op's kernel for a device by one that counts and calls it, until the library is destroyed."""
    kernel = torch.library.get_kernel(op, device)

    def counted(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return kernel.call_boxed(keyset, *args, **kwargs)

    library = torch.library.Library(op.partition("::")[0], "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(op.partition("::")[2], counted, device, with_keyset=True, allow_override=True)
    return library


@functools.cache
def count_kernel(op: str, device: str) -> None:
    """Count the executions of an op's kernel for a device ("CPU" or "CUDA"), once per process.

    It counts below BackendSelect, where a replayed call never arrives, and holds the GIL: not for collectives.
    """
    _libraries.append(_counted(op, device, executions, op))


@contextmanager
def counting(*ops: str) -> Iterator[Counter[str]]:
    """Count executions of CPU kernels inside, by op: for ops that every test calls often."""
    counts: Counter[str] = Counter()
    libraries = [_counted(op, "CPU", counts, op.removeprefix("aten::")) for op in ops]
    try:
        yield counts
    finally:
        for library in libraries:
            library._destroy()


def count_cpu_attention() -> None:
    count_kernel(CPU_ATTENTION, "CPU")


def code_blocks(document: Path, language: str) -> list[str]:
    text = document.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def cells_of(table: str) -> dict[str, list[str]]:
    """Of a table that a command prints: the first cell of each row -> the others."""
    return {row[0]: row[1:] for line in table.splitlines() if (row := [c.strip() for c in line.split("│")[1:-1]])}


# Models


def build(name: str, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> tuple[Any, dict[str, Any]]:
    """A tiny model, and its keyword arguments for one call that returns a tuple. changes: of its configuration."""
    model, inputs = tiny_model(name, dtype, seed=seed, **changes)
    if "return_dict" in inspect.signature(model.forward).parameters:
        inputs["return_dict"] = False
    return model, inputs


def checkpointed(model: Any, inputs: Mapping[str, Any]) -> list[str]:
    """Names of the modules that a model hands to its gradient checkpointing function, in the order of their calls."""
    names = {module: name for name, module in model.named_modules()}
    called = []

    def function(block: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(names[getattr(block, "__self__", block)])
        return block(*args, **kwargs)

    model.enable_gradient_checkpointing(gradient_checkpointing_func=function)
    model(**inputs)
    return called


def state_of(model: torch.nn.Module) -> dict[str, Any]:
    """What of a model `enable` may touch: a refused call leaves it equal, `disable` makes it equal again.

    Modules, checkpointing attributes, hooks, state-dict keys and training mode, by module name.
    """
    found: dict[str, Any] = {"state dict": list(model.state_dict()), "dict": sorted(vars(model))}
    for name, module in model.named_modules():
        found[name] = (
            id(module),
            module.training,
            module.__dict__.get("gradient_checkpointing", "absent"),
            module.__dict__.get("_gradient_checkpointing_func", "absent"),
            module.__dict__.get("forward", "absent"),
            {
                key: list(hooks.values())
                for key, hooks in vars(module).items()
                if key.endswith("_hooks") and hooks and isinstance(hooks, dict)
            },
        )
    return found


class AttentionBlock(torch.nn.Module):
    """Self-attention over the video, cross-attention to the text, feed-forward: a DiT block without diffusers.

    attend: the attention function, (query, key, value) of shape (batch, heads, sequence, dim) -> output.
    dropout: after each part.
    """

    def __init__(
        self, width: int = 16, heads: int = 2, dropout: float = 0.0, attend: Callable[..., torch.Tensor] | None = None
    ) -> None:
        super().__init__()
        self.heads = heads
        self.attend = attend or F.scaled_dot_product_attention
        self.norms = torch.nn.ModuleList(torch.nn.LayerNorm(width) for _ in range(3))
        self.qkv = torch.nn.Linear(width, 3 * width)
        self.self_out = torch.nn.Linear(width, width)
        self.q = torch.nn.Linear(width, width)
        self.kv = torch.nn.Linear(width, 2 * width)
        self.cross_out = torch.nn.Linear(width, width)
        self.ffn = torch.nn.Sequential(
            torch.nn.Linear(width, 2 * width), torch.nn.GELU(), torch.nn.Linear(2 * width, width)
        )
        self.dropout = torch.nn.Dropout(dropout)

    def _attention(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        split = [t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (query, key, value)]
        return self.attend(*split).transpose(1, 2).flatten(2)

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """video: (batch, tokens, width); text: (batch, text tokens, width) -> like video."""
        own = self._attention(*self.qkv(self.norms[0](video)).chunk(3, dim=-1))
        video = video + self.dropout(self.self_out(own))
        cross = self._attention(self.q(self.norms[1](video)), *self.kv(text).chunk(2, dim=-1))
        video = video + self.dropout(self.cross_out(cross))
        return video + self.dropout(self.ffn(self.norms[2](video)))


class AttentionStack(torch.nn.Module):
    """Blocks called one by one, as models without the diffusers hook call fastac.checkpoint.

    policy: "none" without checkpointing, "torch" for torch's own full checkpointing, else a policy of fastac.
    """

    def __init__(
        self,
        layers: int = 2,
        policy: str | fastac.Policy = "none",
        block: Callable[[], torch.nn.Module] = AttentionBlock,
    ) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(block() for _ in range(layers))
        self.policy = policy

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            video = run_checkpointed(block, video, text, policy=self.policy)
        return video


def run_checkpointed(function: Any, *args: Any, policy: str | fastac.Policy, **kwargs: Any) -> Any:
    """Call a function without checkpointing ("none"), under torch's ("torch"), or under a policy of fastac."""
    if policy == "none":
        return function(*args, **kwargs)
    if policy == "torch":
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    return fastac.checkpoint(function, *args, policy=policy, **kwargs)


VIDEO_TOKENS, TEXT_TOKENS, WIDTH = 24, 6, 16


def stack(seed: int = 0, dtype: torch.dtype = torch.float32, **options: Any) -> AttentionStack:
    """An AttentionStack whose weights depend on the seed alone."""
    torch.manual_seed(seed)
    return AttentionStack(**options).to(dtype)


def stack_inputs(seed: int = 1, dtype: torch.dtype = torch.float32, batch: int = 1) -> dict[str, torch.Tensor]:
    """Inputs of an AttentionBlock or AttentionStack, requiring grad."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "video": torch.randn(batch, VIDEO_TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_(),
        "text": torch.randn(batch, TEXT_TOKENS, WIDTH, generator=generator).to(dtype).requires_grad_(),
    }


# Attention that runs as small ops


def written_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1) @ value


def dropping_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)


def math_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(query, key, value)


# One step, and its comparison


def loss_of(outputs: Any) -> torch.Tensor:
    """A scalar in which every element of every output has a weight of its own."""
    generator = torch.Generator().manual_seed(123)
    flat = flat_tensors(outputs, "output").values()
    floating = [t.float() for t in flat if t.is_floating_point()]
    return torch.stack([(t * torch.randn(t.shape, generator=generator).to(t.device)).sum() for t in floating]).sum()


def flat_tensors(value: Any, name: str) -> Tensors:
    if isinstance(value, torch.Tensor):
        return {name: value}
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (tuple, list)):
        items = enumerate(value)
    return {path: t for key, item in items for path, t in flat_tensors(item, f"{name}.{key}").items()}


def train_step(
    model: Callable[..., Any], inputs: Mapping[str, Any], seed: int = 7, backward: Callable[..., Any] | None = None
) -> Tensors:
    """Forward and backward. Outputs and the gradients of all inputs and parameters, by name; no optimizer step.

    seed: of what the model draws. backward: called with the loss, in the place of `loss.backward()`.
    A parameter without gradient has no entry, so that a gradient that went missing is a difference.
    """
    leaves = leaves_of(model, inputs)
    for tensor in leaves.values():
        tensor.grad = None
    torch.manual_seed(seed)
    outputs = model(**inputs)
    found = {name: t.detach().clone() for name, t in flat_tensors(outputs, "output").items()}
    loss = loss_of(outputs)
    loss.backward() if backward is None else backward(loss)
    return found | gradients(leaves)


def pickled(model: Any) -> Any:
    return pickle.loads(pickle.dumps(model))


def executions_of(model: Callable[..., Any], inputs: Mapping[str, Any], expected: Tensors | None = None) -> int:
    """How many CPU attention kernels a training step runs. expected: its outputs and gradients, bit for bit."""
    count_cpu_attention()
    executions.clear()
    found = train_step(model, inputs)
    if expected is not None:
        assert_same(found, expected)
    return executions[CPU_ATTENTION]


def assert_alike(
    run: Callable[[Any], Tensors],
    counts: Counter[str] | None = None,
    again: int = 0,
    policy: str | fastac.Policy = "attn_only",
    steps: int = 2,
) -> None:
    """`run(policy)` returns what `run("none")` does, bit for bit, and leaves the generator where that does.

    counts: of kernels, of which `again` more run than under "none". steps: in the first a region of its kind is
    watched, in later ones it is not.
    """
    counts = Counter() if counts is None else counts
    counts.clear()
    expected = run("none")
    generator, needed = torch.get_rng_state(), counts.total()
    for _ in range(steps):
        counts.clear()
        assert_same(run(policy), expected)
        assert torch.equal(torch.get_rng_state(), generator)
        assert counts.total() == needed + again


def assert_region(
    region: Callable[..., Any],
    inputs: Mapping[str, Any],
    counts: Counter[str] | None = None,
    again: int = 0,
    policy: str | fastac.Policy = "attn_only",
    **options: Any,
) -> None:
    """A checkpointed function trains as without checkpointing. counts, again: as above. options: of `train_step`."""

    def run(policy: str | fastac.Policy) -> Tensors:
        return train_step(functools.partial(run_checkpointed, region, policy=policy), inputs, **options)

    assert_alike(run, counts, again, policy)


def assert_model(model: Any, inputs: Mapping[str, Any], counts: Counter[str] | None = None, **options: Any) -> None:
    """A model trains as before once it is enabled. options: of `assert_alike`."""

    def run(policy: str | fastac.Policy) -> Tensors:
        if policy != "none":
            fastac.enable(model, policy)
        return train_step(model, inputs)

    assert_alike(run, counts, **options)


def leaves_of(model: Callable[..., Any], inputs: Mapping[str, Any]) -> Tensors:
    leaves = dict(model.named_parameters()) if isinstance(model, torch.nn.Module) else {}
    leaves |= {f"input {name}": t for name, t in flat_tensors(inputs, "inputs").items()}
    return {name: t for name, t in leaves.items() if t.requires_grad}


def gradients(leaves: Tensors) -> Tensors:
    return {f"gradient of {name}": t.grad.clone() for name, t in leaves.items() if t.grad is not None}


def assert_same(found: Tensors, expected: Tensors) -> None:
    """Both hold the same names and, bit for bit, the same values; else an AssertionError with the errors by name."""
    assert found.keys() == expected.keys(), f"missing or too many: {sorted(found.keys() ^ expected.keys())}"
    assert found, "nothing to compare"
    wrong = [
        f"{name}: relative error {relative_error(found[name], expected[name]):.3g}"
        for name in expected
        if not _same_bits(found[name], expected[name])
    ]
    assert not wrong, f"{len(wrong)} of {len(expected)} tensors differ:\n" + "\n".join(wrong[:12])


def _same_bits(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return found.shape == expected.shape and found.dtype == expected.dtype and torch.equal(found, expected)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    if found.shape != expected.shape:
        return float("inf")
    difference = (found.double() - expected.double()).abs().max()
    return float(difference / expected.double().abs().max().clamp_min(1e-30))


# Attention ops of the tests' own

NAMESPACE = "fastac_tests"

_names = itertools.count()


def new_name(prefix: str) -> str:
    """A name that nothing in this process has yet. Random letters could say attention, as "fa4" does."""
    return f"{prefix}_{next(_names)}"


def attention_inputs(queries: int, keys: int, dim: int = 8) -> dict[str, torch.Tensor]:
    """Query, key and value of an attention, (2, 3, sequence, dim), the same at every call."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"query": (2, 3, queries, dim), "key": (2, 3, keys, dim), "value": (2, 3, keys, dim)}
    made = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {name: tensor.requires_grad_() for name, tensor in made.items()}


def attention_math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keep: torch.Tensor | None = None,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention over (..., sequence, dim): output and logsumexp.

    keep: what a dropout leaves of the probabilities, as factors. bias: is added to the scores.
    """
    scores = _scores(query, key, scale, bias)
    statistics = scores.logsumexp(-1)
    probabilities = (scores - statistics[..., None]).exp()
    return (probabilities if keep is None else probabilities * keep) @ value, statistics


def attention_math_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    statistics: torch.Tensor,
    keep: torch.Tensor | None = None,
    scale: float | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key and value from what the forward returned: a wrong output or statistic shows in them."""
    probabilities = (_scores(query, key, scale, bias) - statistics[..., None]).exp()
    kept = 1 if keep is None else keep
    grad_probabilities = grad @ value.transpose(-1, -2) * kept
    grad_scores = probabilities * (grad_probabilities - (grad * output).sum(-1, keepdim=True))
    grad_scores = grad_scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    return grad_scores @ key, grad_scores.transpose(-1, -2) @ query, (probabilities * kept).transpose(-1, -2) @ grad


def _scores(query: torch.Tensor, key: torch.Tensor, scale: float | None, bias: torch.Tensor | None) -> torch.Tensor:
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    return scores if bias is None else scores + bias


KINDS = {
    "plain": "",
    "dropout": ", float dropout_p=0.",
    "writes": ", Tensor(a!)? out=None",
    "always_writes": ", Tensor(a!) out",
    "nested": "",
}
"""What a test's attention op does in addition -> its further arguments.

dropout: draws a mask from the default generator when dropout_p > 0. writes, always_writes: copies the output into
`out`. nested: its kernel calls torch's attention op.
"""


@functools.cache
def custom_attention(name: str, kind: str = "plain", dropout: str | None = None) -> Callable[..., torch.Tensor]:
    """Define the op `fastac_tests::<name>`, register a row for it, return an attend function for AttentionBlock.

    The function takes the further arguments of its kind (of KINDS) by position. Executions are counted in
    `executions["fastac_tests::<name>"]`. A registration stays for the process: every test uses a name of its own.
    dropout: what the row says about random numbers.
    """
    op = define_attention_op(name, kind)
    register_row(name, dropout)
    return attention_function(op)


def define_op(schema: str, kernel: Callable[..., Any]) -> torch.library.Library:
    """Define `fastac_tests::<schema>` with a kernel for the CPU. The op is gone once the library is destroyed."""
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(schema)
    library.impl(schema.partition("(")[0], kernel, "CPU")
    return library


def register_row(name: str, dropout: str | None = None) -> None:
    fastac.register(fastac.AttentionOp(backend="tests", namespace=NAMESPACE, name=name, layout="bhsd", dropout=dropout))


def define_attention_op(name: str, kind: str = "plain") -> torch._ops.OpOverload:
    """The op of `custom_attention` alone, without a row: (output, logsumexp, what dropout kept) on the CPU."""

    def kernel(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, extra: Any = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        executions[f"{NAMESPACE}::{name}"] += 1
        if kind == "nested":
            output, statistics = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)
            return output, statistics, torch.empty(0)
        keep = torch.ones(*query.shape[:-1], key.shape[-2], dtype=query.dtype)
        if kind == "dropout" and extra:
            keep = (torch.rand_like(keep) > extra).to(query.dtype) / (1 - extra)
        output, statistics = attention_math(query, key, value, keep)
        if isinstance(extra, torch.Tensor):
            extra.copy_(output)
        return output, statistics, keep

    arguments = f"Tensor query, Tensor key, Tensor value{KINDS[kind]}"
    _libraries.append(define_op(f"{name}({arguments}) -> (Tensor, Tensor, Tensor)", kernel))
    return getattr(getattr(torch.ops, NAMESPACE), name).default


def attention_function(op: torch._ops.OpOverload) -> Callable[..., torch.Tensor]:
    """An autograd.Function around an op of `define_attention_op`, as a plain function. Its name is not attention's."""

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *extra: Any) -> torch.Tensor:
            output, statistics, keep = op(query, key, value, *extra)
            # A copy, so that a caller may write into the output: the graph does not need it.
            ctx.save_for_backward(query, key, value, output.clone(), statistics, keep)
            ctx.extra = len(extra)
            return output

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            query, key, value, output, statistics, keep = ctx.saved_tensors
            used = keep if keep.numel() else None
            return (*attention_math_backward(grad, query, key, value, output, statistics, used), *[None] * ctx.extra)

    return Kernel.apply
