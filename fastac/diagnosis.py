"""A second look at a region that did not record what it should: which attention call it was, where, and why.

Runs the checkpointed function once more, eagerly and watched, and throws the result away. This happens only on the
way to an error, for compiled regions (which can not be watched while they run) once per block class, and where a
block makes other calls than its class did before.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import inspect
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fastac import census, observation, opaque, torch_internals
from fastac.autograd_graph import hidden_functions, nodes_between, tensors_of
from fastac.compile.torch_private import empty_outputs
from fastac.policy import Policy
from fastac.preservation import buffers_preserved, generators_preserved
from fastac.recognition import Decomposed, UnknownOp
from fastac.registry import ResolvedOp
from fastac.scopes import Scope, Tape, run_kernel, thread

logger = logging.getLogger("fastac")


@dataclasses.dataclass
class Attention:
    """One attention call that was seen. cause: why it ran as small ops, "" when it ran as `op`."""

    module: str
    op: str
    keys: int
    cause: str = ""


class _Witness(Scope):
    """Sees the attention calls of one eager run, without recording. compiled: of what otherwise runs compiled."""

    def __init__(self, compiled: bool) -> None:
        super().__init__(Tape())
        self.compiled = compiled
        self.seen: list[Attention] = []
        self.ops: list[ResolvedOp] = []
        self.owners: list[int] = []
        self.modules: list[torch.nn.Module] = []
        self.cause = ""
        self.names: dict[int, str] = {}

    @property
    def where(self) -> str:
        return next((name for module in reversed(self.modules) if (name := self.names.get(id(module)))), "")

    def call(self, resolved: ResolvedOp, keyset: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        owner = torch_internals.newest_node()
        if self.compiled and isinstance(resolved.op, torch._ops.HigherOrderOperator):
            # Eagerly it would take the memory that it is compiled to save, and its numbers do not matter here.
            outputs = empty_outputs(resolved.op, args, kwargs)
        else:
            outputs = run_kernel(resolved, keyset, args, kwargs)
        # Noted when it ran, as on the tape: where a kernel raises, the block may try another.
        self.ops.append(resolved)
        self.owners.append(owner)
        self.seen.append(Attention(self.where, resolved.name, resolved.keys(args, kwargs)))
        return outputs

    def decomposed(self, resolved: ResolvedOp, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        found = Decomposed.from_call(resolved, args, kwargs)
        self.seen.append(Attention(self.where, found.attention, found.keys, self.cause or "no fused kernel took it"))


class _SdpaCalls(TorchFunctionMode):
    """Tells the witness why the scaled_dot_product_attention call that comes next may be decomposed."""

    def __init__(self, witness: _Witness) -> None:
        super().__init__()
        self.witness = witness

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.witness.cause = why_decomposed(*args, **kwargs)
        elif func is torch.nn.functional.multi_head_attention_forward:  # the mode is off inside it
            call = _MULTI_HEAD.bind(*args, **kwargs)
            call.apply_defaults()
            dropout = call.arguments["dropout_p"] if call.arguments["training"] else 0.0
            self.witness.cause = _why_dropout(dropout, call.arguments["query"])
        return func(*args, **kwargs)


_MULTI_HEAD = inspect.signature(torch.nn.functional.multi_head_attention_forward)


def _why_dropout(dropout_p: float, query: torch.Tensor) -> str:
    if dropout_p > 0 and query.device.type == "cpu":
        return f"it drops out (dropout_p={dropout_p}), which no fused CPU kernel does: train with dropout_p=0"
    return ""


def why_decomposed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> str:
    """What about a scaled_dot_product_attention call keeps torch from its fused kernels; "" when nothing is known."""
    cuda = torch.backends.cuda
    switches = (cuda.flash_sdp_enabled, cuda.mem_efficient_sdp_enabled, cuda.cudnn_sdp_enabled)
    if not any(enabled() for enabled in switches):  # type: ignore[no-untyped-call]
        return 'the math kernel is forced (sdpa_kernel(SDPBackend.MATH), backend "_native_math", or torch.backends)'
    if attn_mask is not None and attn_mask.requires_grad:
        return "its mask requires grad: detach it, or keep it out of training"
    if dropout := _why_dropout(dropout_p, query):
        return dropout
    if value.shape[-1] != query.shape[-1]:
        return f"its value has head dim {value.shape[-1]} where query has {query.shape[-1]}"
    if query.dim() != 4:
        return (
            f"its query has {query.dim()} dimensions: pass (batch, heads, sequence, head dim), with batch 1 if need be"
        )
    if attn_mask is not None and attn_mask.dim() not in (2, 4):
        return f"its mask has {attn_mask.dim()} dimensions: pass 2 or 4"
    if any(tensor.stride(-1) != 1 for tensor in (query, key, value)):
        return "query, key or value is not contiguous in its last dimension"
    return ""


@dataclasses.dataclass
class Look:
    """What a second look saw. missed: attention that the policy saves and no row can. late: ops loaded just now.

    elsewhere: sentences on attention that was called where no region is open.
    silent: attention modules that ran without any attention that can be seen. hidden: autograd.Functions that say they
    are attention, and show no op.
    """

    ops: tuple[ResolvedOp, ...]
    missed: list[Attention]
    unknown: list[UnknownOp]
    elsewhere: list[str]
    silent: list[str]
    late: list[str]
    hidden: list[type]


def look_again(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy, compiled: bool = False
) -> Look:
    """Run a region's function eagerly and watched. Generator state and buffers are as before afterwards.

    compiled: it, or a part of it, otherwise runs compiled.
    """
    module = census.module_of(function)
    witness = _Witness(compiled)
    if module is not None:
        witness.names = {id(inner): name for name, inner in module.named_modules()}
    observer = observation.Observer(function, (args, kwargs), policy, lambda: witness.where)
    devices = {tensor.device for tensor in tensors_of((args, kwargs))}
    observer.progress = lambda: len(witness.seen)
    outer, thread.scope = thread.scope, None
    outputs: Any = None
    try:
        with (
            generators_preserved(devices),
            buffers_preserved(module),
            # Nothing of this run may reach the hooks of a checkpoint around the region, which counts what is saved.
            torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, _as_it_is),
            _module_stack(witness, module),
            witness,
            _SdpaCalls(witness),
            observer,
        ):
            outputs = _run_eagerly(function, args, kwargs)
    finally:
        thread.scope = outer
    nodes = nodes_between(outputs, (args, kwargs))
    missed = [attention for attention in witness.seen if attention.cause and policy.saves(attention.keys)]
    missed += [Attention(where, found.attention, found.keys, "it is not one op") for where, found in observer.missed]
    hidden = hidden_functions(nodes, witness.owners, policy)
    return Look(
        tuple(witness.ops), missed, observer.unknown, observer.elsewhere, observer.silent, observer.joined, hidden
    )


def first_look(
    recorded: Sequence[ResolvedOp], missed: Sequence[Decomposed], observer: observation.Observer | None, expected: int
) -> Look:
    """What is known without running the function again, which one rank must not do alone where it communicates.

    expected: how many attention calls it makes at least, by what others of its kind did.
    """
    cause = "no fused kernel took it (it was not looked at more closely: its block communicates with other ranks)"
    small = [Attention("", found.attention, found.keys, cause) for found in missed]
    if observer is None:
        fewer = [
            f"Others of its kind make {expected} attention calls. It was not run again to see which is missing: its "
            f"block communicates with other ranks."
        ] * (len(recorded) < expected)
        return Look(tuple(recorded), small, [], fewer, [], [], [])
    small += [Attention(where, found.attention, found.keys, "it is not one op") for where, found in observer.missed]
    # What it saw elsewhere is its caller's to add, as after a second look.
    return Look(tuple(recorded), small, list(observer.unknown), [], list(observer.silent), list(observer.joined), [])


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def leave_out_compiled_away(look: Look, recorded: Sequence[ResolvedOp], where: str) -> None:
    """What make_visible made visible is so in eager mode only: compiled it is recomputed, which is told."""
    missing = collections.Counter(look.ops) - collections.Counter(recorded)
    for op in [op for op in missing if opaque.is_opaque(op)]:
        logger.warning("%s: %s runs compiled here, where it can not be saved: it is recomputed", where, op.name)
        look.ops = tuple(seen for seen in look.ops if seen is not op)


def _run_eagerly(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call what torch.compile was applied to. A dispatch mode that dynamo heeds would spoil its cache for good."""
    function = getattr(function, "_torchdynamo_orig_callable", function)
    function = getattr(function, "_orig_mod", function)
    module = census.module_of(function)
    modules = list(module.modules()) if module is not None else []
    compiled = [(inner, inner._compiled_call_impl) for inner in modules if inner._compiled_call_impl is not None]
    wrappers: list[tuple[Any, Any]] = [(inner, inner.forward) for inner in modules if "_orig_mod" in inner._modules]
    for inner, _ in compiled:
        inner._compiled_call_impl = None
    for wrapper, _ in wrappers:
        wrapper.forward = wrapper._orig_mod.forward
    try:
        return torch.compiler.disable(_call)(function, args, kwargs)
    finally:
        for inner, call in compiled:
            inner._compiled_call_impl = call
        for wrapper, forward in wrappers:
            wrapper.forward = forward


def _call(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch.compiler.set_stance("force_eager"):  # for compiled functions that are called inside
        return function(*args, **kwargs)


@contextlib.contextmanager
def _module_stack(witness: _Witness, module: torch.nn.Module | None) -> Iterator[None]:
    """Keep the witness told of the module that runs; not by torch's process-wide hooks, on which dynamo guards."""

    def enter(inner: torch.nn.Module, _: Any) -> None:
        witness.modules.append(inner)

    def leave(inner: torch.nn.Module, _: Any, __: Any) -> None:
        if witness.modules:
            witness.modules.pop()

    handles: list[Any] = []
    for inner in module.modules() if module is not None else ():
        handles += [inner.register_forward_pre_hook(enter), inner.register_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
