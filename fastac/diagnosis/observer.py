"""Watches the first region of a kind: attention that no row covers, where it is called, and why it cannot be saved."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import enable_reentrant_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from fastac import registry
from fastac.backends import availability
from fastac.compile.torch_private import CompiledCalls
from fastac.diagnosis.autograd_graph import graph_roots, leads_to, tensors_of
from fastac.diagnosis.recognition import (
    MATRIX_PRODUCTS,
    SoftmaxAttention,
    UnknownOp,
    coarse_numbers,
    looks_like_attention_forward,
)
from fastac.engine import flops, kinds, torch_private
from fastac.engine.collectives import is_called_by_fsdp, writes_its_buffer
from fastac.engine.tape import Tape, engine
from fastac.engine.torch_private import is_of_torch, qualified_name
from fastac.policy import Policy
from fastac.registry import BoundOp

_CASTING = [device for device in ("cpu", "cuda", "xpu", "mps", "hpu") if torch.amp.is_autocast_available(device)]
"""Types of device that autocast can be on for."""


@dataclasses.dataclass
class SmallOps:
    """An attention call that ran as small ops. module: qualified in the block; cause: why, as far as it shows."""

    module: str
    keys: int
    cause: str


class Observer(TorchDispatchMode):
    """Watches a region's forward for attention calls that no row covers. It changes nothing.

    Compiled code inside keeps running compiled, and reaches the tape by itself. What was found stands in its fields:
    small: attention that ran as small ops. unknown: ops that look like attention and have no row. elsewhere: sentences
    on attention that was called where no region is open. silent: attention modules that ran without any attention that
    can be seen. late: ops that have a row, and whose library was loaded by this very forward. writing: how many
    collectives wrote a buffer, but for FSDP's own.
    """

    supports_higher_order_operators = True

    def __init__(self, module: torch.nn.Module | None, inputs: Any, policy: Policy, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.policy = policy
        self.tape = tape
        self.small: list[SmallOps] = []
        self.unknown: list[UnknownOp] = []
        self.elsewhere: list[str] = []
        self.silent: list[str] = []
        self.late: list[str] = []
        self.writing = 0
        self.flops = self.saved_flops = 0  # of all ops, and of the attention that the policy saves
        self.compiled_calls = CompiledCalls()
        self._called: list[BoundOp] = []
        self._module = module
        parameters = list(module.parameters()) if module is not None else []
        tensors = tensors_of(inputs)
        self._softmax_attention = SoftmaxAttention(tensors)
        self._roots = graph_roots([*parameters, *tensors])
        self._coarse: list[int] = []
        self._thread = 0
        self._handles: list[Any] = []
        self._modules: list[str] = []  # names of those that run now
        self._sum: Sequence[Any] = ()  # what was added last: scores and mask, perhaps
        self._head_dim = 0  # over which scores were summed up last

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let dynamo compile as without the mode."""
        return True

    def __enter__(self) -> Observer:
        self._thread = threading.get_ident()
        if self._module is not None:
            self._follow_modules(self._module)
        engine.listeners.append(self._outside)
        self.compiled_calls.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        engine.listeners.remove(self._outside)
        self.compiled_calls.__exit__(*exception)
        while self._handles:
            self._handles.pop().remove()
        self._sum, self._roots = (), {}  # they hold tensors
        coarse = coarse_numbers(self._coarse)
        self.small = [one for one in self.small if one.keys not in coarse]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _autocast_as_called(func):
            outputs = func(*args, **(kwargs or {}))
        self.observe(func, args, outputs, kwargs or {})
        return outputs

    def _follow_modules(self, module: torch.nn.Module) -> None:
        """Know which module runs, and notice an attention module that computes no attention anybody can see."""
        attention = {use.module for use in availability.backend_uses(module)}
        for name, inner in module.named_modules():
            if inner is not module:
                enter, leave = self._hooks(name, name in attention)
                self._handles.append(inner.register_forward_pre_hook(enter))
                self._handles.append(inner.register_forward_hook(leave, always_call=True))

    def _hooks(self, name: str, attention: bool) -> tuple[Callable[..., None], Callable[..., None]]:
        before: list[int] = []

        def enter(_: torch.nn.Module, __: Any) -> None:
            self._modules.append(name)
            before.append(self._seen())

        def leave(_: torch.nn.Module, __: Any, ___: Any) -> None:
            if self._modules:
                self._modules.pop()
            if before and before.pop() == self._seen() and attention:
                self.silent.append(name)

        return enter, leave

    def _seen(self) -> int:
        recorded = len(self.tape.made) + len(self.tape.decomposed)
        found = len(self.small) + len(self.unknown) + len(self.elsewhere) + len(self.late)
        return recorded + found + self._softmax_attention.products

    def observe(self, op: Any, args: Sequence[Any], outputs: Any, kwargs: Mapping[str, Any]) -> None:
        """Take note of one op that has just run."""
        bound = registry.classify(op)
        is_abstract = torch_private.is_abstract(args)
        count = 0 if is_abstract else self._flops_of(op, args, outputs, kwargs)  # a number would fix sizes of a trace
        self.flops += count
        if bound is not None and not bound.number:
            self.late.append(bound.name)
        elif bound is not None and bound.is_attention:
            self.saved_flops += count if count and self.policy.saves(bound.keys(args, kwargs)) else 0
            self._coarse.append(bound.coarse_keys(args, kwargs))
            self._called += [] if is_abstract else [bound]
        elif bound is not None and bound.kind == "decomposition":
            self._note_small(bound.keys(args, kwargs), self._why_decomposed(args[0]))
        elif bound is not None:
            return
        elif not isinstance(op, torch._ops.OpOverload):
            if looks_like_attention_forward(op.name(), args):
                self.unknown.append(UnknownOp("higher_order", op.name()))
        elif writes_its_buffer(op):
            self.writing += not is_called_by_fsdp()
        else:
            self._recognize(op, args, outputs)

    def _flops_of(self, op: Any, args: Sequence[Any], outputs: Any, kwargs: Mapping[str, Any]) -> int:
        try:
            return flops.of_call(op, args, kwargs, outputs)
        except Exception as error:  # noqa: BLE001 of a formula of somebody else's: it costs a figure of the report, not the step
            kinds.warn_once(
                op,
                f"FLOPs of {op}",
                f"fastac.report counts no FLOPs of {op}: its formula in torch.utils.flop_counter.flop_registry raised "
                f"{type(error).__name__}: {error}. Correct that formula.",
            )
            return 0

    def passed_by(self) -> list[str]:
        """Attention ops that were called and did not arrive at the region."""
        arrived = {op.qualified_name for op, _ in self.tape.made}
        return list(dict.fromkeys(op.name for op in self._called if op.qualified_name not in arrived))

    def _recognize(self, op: torch._ops.OpOverload, args: Sequence[Any], outputs: Any) -> None:
        name = qualified_name(op).partition(".")[0]
        keys = self._softmax_attention.follow(op, args, outputs)
        if keys is not None:
            self._note_small(keys, "it is written out as matrix products and a softmax")
        elif looks_like_attention_forward(name, args) and not torch_private.is_composite(name):
            self.unknown.append(UnknownOp(*name.split("::")))
        elif name in ("aten::add", "aten::add_"):
            self._sum = args
        elif name in MATRIX_PRODUCTS:
            query, value = args[-2:]
            if self.small and not self.small[-1].cause and value.shape[-1] != self._head_dim:
                self.small[
                    -1
                ].cause = f"its value has head dim {value.shape[-1]} where query and key have {self._head_dim}"
            self._head_dim = query.shape[-1]
        elif self.small and not self.small[-1].cause and ("dropout" in name or "bernoulli" in name):
            self.small[-1].cause = "it drops out (dropout > 0), which no fused kernel here does: train with dropout 0"

    def _note_small(self, keys: int, cause: str) -> None:
        if self.policy.saves(keys):
            self.small.append(SmallOps(self._modules[-1] if self._modules else "", keys, cause))

    def _why_decomposed(self, scores: torch.Tensor) -> str:
        """Why torch took no fused kernel; "" where that shows in what runs next, or not at all."""
        if not any(
            enabled()  # type: ignore[no-untyped-call]
            for enabled in (
                torch.backends.cuda.flash_sdp_enabled,
                torch.backends.cuda.mem_efficient_sdp_enabled,
                torch.backends.cuda.cudnn_sdp_enabled,
            )
        ):
            return 'the math kernel is forced (SDPBackend.MATH, backend "_native_math" or torch.backends)'
        mask = next((one for one in self._sum[1:2] if isinstance(one, torch.Tensor)), None)
        if mask is not None and mask.requires_grad and mask.shape[-2:] == scores.shape[-2:]:
            return "its mask requires grad: detach it, or keep it out of training"
        if mask is not None and mask.dim() not in (2, 4) and mask.shape[-2:] == scores.shape[-2:]:
            return f"its mask has {mask.dim()} dimensions: pass 2 or 4"
        if scores.dim() != 4:
            return f"its query has {scores.dim()} dimensions: pass (batch, heads, sequence, head dim)"
        return ""

    def _outside(self, op: BoundOp, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """An attention ran where no region is open: in the kernel of another op, or in another thread."""
        elsewhere = threading.get_ident() != self._thread and leads_to(args, self._roots)
        if elsewhere and self.policy.saves(op.keys(args, kwargs)):
            self.elsewhere.append(
                f"{op.name} was called in another thread, where no region is open: call it in the block's own"
            )


def _autocast_as_called(op: Any) -> contextlib.AbstractContextManager[Any]:
    """Autocast for the kernel of an op as it was on where the op was called.

    Under a mode torch leaves autocast out, also for kernels in Python that would run under it without the mode. Ops of
    torch's own never do: their inputs were cast before.
    """
    if is_of_torch(op):
        return contextlib.nullcontext()
    with enable_reentrant_dispatch():
        devices = [device for device in _CASTING if torch.is_autocast_enabled(device)]
    stack = contextlib.ExitStack()
    for device in devices:
        stack.enter_context(torch.autocast(device))  # in the dtype that is set
    return stack
