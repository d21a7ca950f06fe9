"""A dispatch mode that sees every op of a region: attention without a row, where it is called, why it is not saved."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fastac import registry
from fastac.backends import backend_uses
from fastac.diagnosis.autograd_graph import GENERATED, leads_to, tensors_of
from fastac.diagnosis.recognition import SoftmaxAttention, coarse_numbers, looks_like_attention_forward, suggested_row
from fastac.engine import flops, kinds, torch_private
from fastac.engine.collectives import is_called_by_fsdp, writes_its_buffer
from fastac.engine.process import process
from fastac.engine.tape import Tape
from fastac.registry import BoundOp
from fastac.registry.torch_private import Op, is_from_torch, name_of


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
    """Watches a region's forward for attention calls without a row. It changes nothing."""

    def __init__(self, module: torch.nn.Module | None, inputs: Any, tape: Tape) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape = tape
        # Attention that ran as small ops.
        self.small: list[SmallOps] = []
        # Ops that look like attention and have no row, with the line of code that registers a row.
        self.unknown: dict[Op, str] = {}
        # Ops that are not torch's and have no row, with the module that called each.
        self.foreign: dict[Op, str] = {}
        # The ops that ran, by the name that torch.library gives their autograd nodes.
        self.ops: set[str] = set()
        # Sentences on attention that was called outside the region.
        self.elsewhere: list[str] = []
        # Attention modules that ran, and in which no attention was seen.
        self.silent: list[str] = []
        # Ops with a row whose library was loaded during this forward.
        self.late: list[str] = []
        # Number of collectives that wrote a buffer, except FSDP's own.
        self.writing = 0
        # FLOPs of all ops, and of the attention that the policy saves.
        self.flops = self.saved_flops = 0
        # Attention ops that were called, to be compared with those that the tape got.
        self._called: list[BoundOp] = []
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
        coarse = coarse_numbers(self._coarse)
        self.small = [call for call in self.small if call.keys not in coarse]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = super().__torch_dispatch__(func, types, args, kwargs)
        self._observe(func, args, outputs, kwargs or {})
        return outputs

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
        found = len(self.small) + len(self.unknown) + len(self.elsewhere) + len(self.late)
        return recorded + found + self._softmax_attention.products

    def _observe(self, op: Any, args: Sequence[Any], outputs: Any, kwargs: Mapping[str, Any]) -> None:
        """Take note of one op that has just run."""
        bound = registry.classify(op)
        if isinstance(op, torch._ops.OpOverload):
            self.ops.add(GENERATED + str(op).replace(".", "_"))
        is_abstract = torch_private.is_abstract(args)
        count = 0 if is_abstract else self._flops_of(op, args, outputs, kwargs)  # a number would fix sizes of a trace
        self.flops += count
        if bound is not None and bound.kind == "other":
            return
        if bound is not None and not bound.number and bound.qualified_name not in process.installed:
            self.late.append(bound.name)
        elif bound is not None and bound.is_attention:
            self.saved_flops += count if count and self.tape.policy.saves(bound.keys(args, kwargs)) else 0
            self._coarse.append(bound.coarse_keys(args, kwargs))
            self._called += [] if is_abstract else [bound]
        elif bound is not None and bound.kind == "decomposition":
            self._note_small(bound.keys(args, kwargs), self._why_decomposed(args[0]))
        elif bound is not None:
            if bound.kind == "choice":
                self._softmax_attention.follow(op, args, outputs)
        elif looks_like_attention_forward(op, args, kwargs) and not _is_composite(op):
            self.unknown[op] = suggested_row(op, args, kwargs)
        elif not isinstance(op, torch._ops.OpOverload):
            return
        elif writes_its_buffer(op):
            self.writing += not is_called_by_fsdp()
        else:
            self._recognize(op, args, outputs)

    def _flops_of(self, op: Any, args: Sequence[Any], outputs: Any, kwargs: Mapping[str, Any]) -> int:
        try:
            return flops.of_call(op, args, kwargs, outputs)
        except Exception as error:  # noqa: BLE001 somebody else's formula costs a figure of the report, not the step
            kinds.warn_once(
                op,
                f"FLOPs of {op}",
                f"fastac.report counts no FLOPs of {op}: its formula in torch.utils.flop_counter.flop_registry raised "
                f"{type(error).__name__}: {error}. Correct that formula.",
            )
            return 0

    def passed_by(self) -> list[str]:
        """Attention ops that were called, and whose call the tape did not get."""
        arrived = {op.qualified_name for op, _ in self.tape.attention_calls}
        return [op.name for op in self._called if op.qualified_name not in arrived]

    def _recognize(self, op: torch._ops.OpOverload, args: Sequence[Any], outputs: Any) -> None:
        name = name_of(op)
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

    @property
    def _running(self) -> str:
        """Name in the block of the module that runs."""
        return self._modules[-1][0] if self._modules else ""

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
            self.elsewhere.append(
                f"{op.name} was called in another thread, where no region is open: call it in the block's own"
            )


def _is_composite(op: Any) -> bool:
    """Whether an op only calls other ops, which are dispatched in turn. Modes see it only under inference mode."""
    return isinstance(op, torch._ops.OpOverload) and torch_private.is_composite(name_of(op))
