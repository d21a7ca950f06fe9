"""A dispatch mode that sees every op of a region: attention without a row, where it is called, why it is not saved."""

from __future__ import annotations

import dataclasses
import functools
import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastac import registry
from fastac.backends import backend_uses
from fastac.diagnosis.autograd_graph import GENERATED, leads_to, tensors_of
from fastac.diagnosis.every_step import small_ops
from fastac.diagnosis.recognition import (
    SoftmaxAttention,
    coarse_numbers,
    is_called_by_fsdp,
    looks_like_attention_forward,
    no_attention,
    suggested_row,
    writes_its_buffer,
)
from fastac.engine import torch_private
from fastac.engine.process import process
from fastac.engine.tape import Tape
from fastac.registry import BoundOp, flops
from fastac.registry.torch_private import Op, is_from_torch, name_of, qualified_name

logger = logging.getLogger("fastac")


@dataclasses.dataclass
class SmallOps:
    """An attention call that ran as small ops."""

    module: str  # its name in the block
    keys: int
    cause: str  # "" if it does not show


class PassThrough(TorchDispatchMode):
    """A mode that does nothing, for the recompute of a region that was observed.

    Some functions of torch take another path while any mode is open, such as ctc_loss. Compiled code inside stays
    compiled, and its ops reach the tape without the mode.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let dynamo compile as without the mode."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch_private.call_under_mode(func, args, kwargs or {})


class Observer(PassThrough):
    """Watches a run of a region's function for attention that no tape could record. It changes nothing."""

    def __init__(self, module: torch.nn.Module | None, inputs: Any, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        # Sentences on attention that the tape could not record, by the op that ran it.
        self.findings: dict[object, str] = {}
        # Attention that ran as small ops. Not all of it is a problem, which shows at the end.
        self.small: list[SmallOps] = []
        # Attention modules that ran, and in which no attention was seen.
        self.silent: list[str] = []
        # Ops that are not torch's and have no row, with the module that called each.
        self.foreign: dict[Op, str] = {}
        # The ops that ran, by the name that torch.library gives their autograd nodes.
        self.ops: set[str] = set()
        # Number of collectives that wrote a buffer, except FSDP's own.
        self.writing = 0
        # FLOPs of all ops, and of the attention that the policy saves.
        self.flops = self.saved_flops = 0
        self._coarse: list[int] = []
        self._module = module
        tensors = tensors_of(inputs)
        self._roots = [*(module.parameters() if module is not None else ()), *tensors]
        self._softmax_attention = SoftmaxAttention(tensors)
        self._thread = 0
        self._handles: list[Any] = []
        # Names of the modules that run now, and how many attention calls had been seen before each.
        self._modules: list[tuple[str, int]] = []
        # What the last addition added: perhaps a mask, to scores.
        self._added: Any = None

    def __enter__(self) -> Observer:
        self._thread = threading.get_ident()
        if self._module is not None:
            self._follow_modules(self._module)
        process.listeners.append(self._outside)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        process.listeners.remove(self._outside)
        while self._handles:
            self._handles.pop().remove()
        self._added, self._roots = None, []  # these hold tensors

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = super().__torch_dispatch__(func, types, args, kwargs)
        self._observe(func, args, outputs, kwargs or {})
        return outputs

    def problems(self, where: str) -> list[str]:
        """Sentences on attention that the tape could not record. where: the region's block."""
        coarse = coarse_numbers(self._coarse)
        problems = [
            small_ops(f"{where}.{call.module}".rstrip("."), call.keys, call.cause)
            for call in self.small
            if call.keys not in coarse
        ]
        problems += self.findings.values()
        # A silent module may be one whose attention was named above, so it is named only if nothing else was found.
        return problems or [
            f"{where}.{name}: ran, and no attention call was seen: its kernel is called past the dispatcher. If it is "
            f"an autograd.Function: fastac.make_visible(TheFunction, layout=...). Else: docs/adding_a_backend.md"
            for name in self.silent
        ]

    def _follow_modules(self, module: torch.nn.Module) -> None:
        """Note which module runs, and attention modules in which no attention is seen."""
        attention = {use.module for use in backend_uses(module)}
        for name, inner in module.named_modules():
            if inner is not module:
                enter, leave = functools.partial(self._enter, name), functools.partial(self._leave, name in attention)
                self._handles.append(inner.register_forward_pre_hook(enter))
                self._handles.append(inner.register_forward_hook(leave, always_call=True))

    def _enter(self, name: str, *_: Any) -> None:
        self._modules.append((name, self._seen()))

    def _leave(self, is_attention: bool, *_: Any) -> None:
        if self._modules:
            name, before = self._modules.pop()
            if is_attention and before == self._seen():
                self.silent.append(name)

    def _seen(self) -> int:
        recorded = len(self.tape.attention_calls) + len(self.tape.decomposed)
        return recorded + len(self.small) + len(self.findings) + self._softmax_attention.products

    @property
    def _running(self) -> str:
        """Name in the block of the module that runs."""
        return self._modules[-1][0] if self._modules else ""

    def _observe(self, op: Any, args: Sequence[Any], outputs: Any, kwargs: Mapping[str, Any]) -> None:
        """Take note of one op that has just run."""
        is_abstract = torch_private.is_abstract(args)
        # None in a trace: a number would fix its sizes.
        count = 0 if is_abstract else flops.counted(op, args, kwargs, outputs)
        self.flops += count
        if isinstance(op, torch._ops.OpOverload):
            self.ops.add(GENERATED + str(op).replace(".", "_"))
        bound = registry.classify(op)
        if bound is None:
            self._recognize(op, args, outputs, kwargs)
        elif bound.kind == "other":
            return
        elif bound.qualified_name not in process.installed:
            process.modules = None  # so that the next region looks for ops, also if no module was loaded
            if bound.is_attention and self.tape.policy.saves(bound.keys(args, kwargs)):
                self.findings[op] = f"the library of {bound.name} was loaded just now: import it before"
        elif bound.is_attention:
            self.saved_flops += count if count and self.tape.policy.saves(bound.keys(args, kwargs)) else 0
            self._coarse.append(bound.coarse_keys(args, kwargs))
            arrived = {call.qualified_name for call, _ in self.tape.attention_calls}
            if not is_abstract and bound.qualified_name not in arrived:
                taken = "another package took its BackendSelect key since"
                self.findings[op] = f"{bound.name} was called, and fastac did not get the call: {taken}"
        elif bound.kind == "decomposition":
            self._note_small(bound.keys(args, kwargs), self._why_decomposed(args[0]))
        elif bound.kind == "choice":
            self._softmax_attention.follow(op, args, outputs)

    def _recognize(self, op: Any, args: Sequence[Any], outputs: Any, kwargs: Mapping[str, Any]) -> None:
        """Take note of an op without a row."""
        is_overload, name = isinstance(op, torch._ops.OpOverload), name_of(op)
        # A composite op only calls others, which are dispatched in turn. Modes see it only under inference mode.
        if looks_like_attention_forward(op, args, kwargs) and not (
            is_overload and torch_private.is_composite(qualified_name(op))
        ):
            self.findings[op] = (
                f"{qualified_name(op)} looks like an attention forward and has no row. If it is one: "
                f"{suggested_row(op, args, kwargs)}. If not: {no_attention(*name.split('::'))}"
            )
        elif is_overload and writes_its_buffer(op):
            self.writing += not is_called_by_fsdp()
        elif is_overload:
            self._follow(op, name, args, outputs)

    def _follow(self, op: torch._ops.OpOverload, name: str, args: Sequence[Any], outputs: Any) -> None:
        """Follow the data of an op that may be part of an attention which is written out."""
        if not is_from_torch(op):
            self.foreign.setdefault(op, self._running)
        keys = self._softmax_attention.follow(op, args, outputs)
        if keys is not None:
            self._note_small(keys, "it is written out as matrix products and a softmax")
        elif name in ("aten::add", "aten::add_"):
            self._added = args[1]
        elif ("dropout" in name or "bernoulli" in name) and self.small and not self.small[-1].cause:
            self.small[-1].cause = "it drops out (dropout > 0), which no fused kernel here does: train with dropout 0"

    def _note_small(self, keys: int, cause: str) -> None:
        if self.tape.policy.saves(keys):
            self.small.append(SmallOps(self._running, keys, cause))

    def _why_decomposed(self, scores: torch.Tensor) -> str:
        """Why torch took no fused kernel; "" if that shows in the next ops, or not at all."""
        cuda: Any = torch.backends.cuda
        if not (cuda.flash_sdp_enabled() or cuda.mem_efficient_sdp_enabled() or cuda.cudnn_sdp_enabled()):
            return 'the math kernel is forced (SDPBackend.MATH, backend "_native_math" or torch.backends)'
        mask = self._added
        if isinstance(mask, torch.Tensor) and mask.shape[-2:] == scores.shape[-2:] and mask.requires_grad:
            return (
                'its mask requires grad, as a position bias that is trained: policy="full" trains it. If it is not to '
                "be trained, detach or freeze it"
            )
        return ""

    def _outside(self, op: BoundOp, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Listener: an attention runs outside the region, in the kernel of another op, or in another thread."""
        elsewhere = threading.get_ident() != self._thread and leads_to(args, self._roots)
        if elsewhere and self.tape.policy.saves(op.keys(args, kwargs)):
            self.findings[op] = (
                f"{op.name} was called in another thread, where no region is open: call it in the block's own"
            )
