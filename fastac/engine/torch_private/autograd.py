"""Private names of torch's autograd: the running backward, its nodes, saved tensors, checkpoints, the profiler."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint

_Function = TypeVar("_Function", bound=Callable[..., Any])

COMPILED_NODE = "CompiledFunctionBackward"
"""Name of the autograd node of a compiled graph."""


def in_forward_mode() -> bool:
    """Whether forward-mode AD is on in this process: torch.func.jvp, or the user's dual_level."""
    return torch.autograd.forward_ad._current_level >= 0


def in_backward() -> bool:
    """Whether this thread is inside a backward."""
    return running_backward() != -1


# Gives the id of the backward that runs in this thread; -1 if none does. torch's checkpoint uses it in the same way.
# pytorch#141276 would have made a public function, and was closed.
running_backward: Callable[[], int] = torch._C._current_graph_task_id

# Gives the autograd node whose backward runs in this thread, or None. Bound "for debugging purposes" (pytorch#90867).
running_node: Callable[[], Any] = torch._C._current_autograd_node

# Gives the group of the running backward: several backwards that recompute one forward once (pytorch#166536).
# None without a group; torch 2.9 has none.
graph_exec_group: Callable[[], Any] = getattr(torch._C, "_get_graph_exec_group", lambda: None)


def in_compiled_autograd() -> bool:
    """Whether compiled autograd runs the backward of this thread. It drops callbacks of the engine."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))


# The hooks of a checkpoint are known by two names that must not be changed: `Region._checkpoint_hook` and
# `Recompute._recomputation_hook` of fastac.engine bear the names of torch's two classes in
# torch.utils.checkpoint, whose hooks are functions inside them. torch has no other mark before 2.14. Readers of the
# names are the three functions below, and through them region, tape, offload, opaque, checkpointing, diagnosis and
# planning.


def innermost_checkpoint() -> object:
    """A key for the checkpoint, torch's or fastac's, whose hook packs saved tensors in this thread now, or None."""
    return _packs("_checkpoint_hook")


def in_recompute() -> bool:
    """Whether this thread runs the recompute of a checkpoint, torch's or fastac's."""
    return _packs("_recomputation_hook") is not None


def user_hooks() -> Any:
    """The user's saved-tensor hooks in this thread, (pack, unpack). None inside a checkpoint's, or without any."""
    return None if _packs("_checkpoint_hook", "_recomputation_hook") else _top_hooks()


# Gives the message of torch.autograd.graph.disable_saved_tensors_hooks, or of torch.func.grad; None if hooks are on.
hooks_off: Callable[[], str | None] = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message


def _packs(*names: str) -> object:
    """The pack hook that is open, if its qualified name has one of these names."""
    pack, _ = _top_hooks() or (None, None)
    qualified = getattr(pack, "__qualname__", "")
    return pack if any(name in qualified for name in names) else None


def _top_hooks() -> Any:
    # torch has no public reader. True: also in a thread that traces, where torch hides hooks otherwise.
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def as_checkpoint_hook(hook: _Function) -> _Function:
    """Mark a method as the hook of a checkpoint, so that torch does not take it for the user's."""
    # Since 2.14 checkpoint(respect_saved_tensors_hooks=True) gives what it saves to the user's hooks, and skips hooks
    # with this mark (pytorch#190581; pytorch#191236 makes it the default in stages). `_user_hooks` are those to go to.
    hook._checkpoint_internal, hook._user_hooks = True, None  # type: ignore[attr-defined]
    return hook


# Makes the object by which autograd saves a tensor, for checkpoints outside torch; since 2.13 (pytorch#174333).
# `_Inputs` and the other half of each function below may go when torch 2.12 is no longer supported.
_make_saved_tensor = getattr(torch._C._autograd, "_make_saved_tensor", None)


class _Inputs(torch.autograd.Function):
    """Saves tensors as autograd does, in a node that is part of no graph."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        """Save the tensors."""
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        """Never called."""
        raise AssertionError


def save(values: Iterable[Any]) -> Any:
    """Save values for `unpack`. Tensors are saved as autograd does: in-place changes are noticed."""
    if _make_saved_tensor is not None:
        return [_make_saved_tensor(value, is_output=False) if _is_saved(value) else value for value in values]
    values = list(values)
    anchor = torch.empty(0, requires_grad=True)
    output: Any = _Inputs.apply(anchor, *filter(_is_saved, values))  # type: ignore[no-untyped-call]
    # `output` is the only reference to the node, and so to the tensors: they are freed with what `save` returns.
    return output, [_Inputs if _is_saved(value) else value for value in values]


def _is_saved(value: Any) -> bool:
    """Whether autograd saves a value: a tensor that was not made in inference mode."""
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return False
    # Before torch 2.13 a Function saves them, which takes no strided nested tensor.
    return _make_saved_tensor is not None or not value.is_nested or value.layout is not torch.strided


def unpack(saved: Any) -> list[Any]:
    """The values that `save` was given."""
    if _make_saved_tensor is not None:
        return [item.unpack() if isinstance(item, torch._C._autograd.SavedTensor) else item for item in saved]
    output, values = saved
    tensors = iter(output.grad_fn.saved_tensors)
    return [next(tensors) if value is _Inputs else value for value in values]


def register_hooks(saved: Any, values: Iterable[Any], pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> None:
    """Replace each saved tensor by pack(tensor), unless that is the tensor. values: as `save` was given them."""
    if _make_saved_tensor is None:
        output, _ = saved
        saved = output.grad_fn._raw_saved_tensors
    saved = (item for item in saved if isinstance(item, torch._C._autograd.SavedTensor))
    for value in filter(_is_saved, values):
        saved_tensor, packed = next(saved), pack(value)
        if packed is not value:
            saved_tensor.register_hooks(lambda _, packed=packed: packed, unpack)


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Call a function when the backward that runs in this thread ends, unless it raises."""
    # torch 2.15 has torch.autograd.graph.queue_callback (pytorch#193958), which does the same.
    torch.autograd.Variable._execution_engine.queue_callback(function)


def on_backward_error(function: Callable[[BaseException], None]) -> None:
    """Call a function with every error that a backward of this process raises. It stays: call this once.

    Kernels of a backward run below Python, where no hook of autograd's sees them fail.
    """
    # torch's tracer replaces the same function (torch.compiler._patch_engine_backward, pytorch#181012). Both modules
    # have it under their own name.
    run = torch.autograd.graph._engine_run_backward

    @functools.wraps(run)
    def watched(*args: Any, **kwargs: Any) -> Any:
        try:
            return run(*args, **kwargs)
        except Exception as error:
            function(error)
            raise

    for module in (torch.autograd, torch.autograd.graph):
        module._engine_run_backward = watched  # type: ignore[attr-defined]


# torch.utils.checkpoint has functions that set these two switches, and none that reads them.


def early_stop(default: bool) -> bool:
    """Whether a recompute ends with the last tensor that is needed: as `default` says, unless torch's switch is set."""
    return default if (switch := torch.utils.checkpoint._enable_checkpoint_early_stop) is None else switch


def in_debug_mode(default: bool) -> bool:
    """Whether torch.utils.checkpoint's debug mode is on: as `default` says, unless torch's switch is set."""
    return default if (switch := torch.utils.checkpoint._checkpoint_debug_enabled) is None else switch


def profiler(**options: Any) -> torch.profiler.profile:
    """torch's profiler, which logs no start and stop: libkineto reads the level at the first profile of a process."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    return torch.profiler.profile(**options)


def profiled_events(profiled: torch.profiler.profile) -> list[Any]:
    """Events of a profiler, each before those inside it."""
    # profile.events() first makes a Python object of each event, and a tree of all of them (pytorch#132713).
    events: Iterable[Any] = profiled.profiler.kineto_results.events()  # type: ignore[union-attr]
    return sorted(events, key=lambda event: (event.start_ns(), -event.end_ns()))


def given_to(context: Any) -> tuple[tuple[Any, ...], ...]:
    """Arguments that an autograd.Function gave to save_for_backward, mark_non_differentiable and mark_dirty."""
    return tuple(tuple(values or ()) for values in (context.to_save, context.non_differentiable, context.dirty_tensors))


def without_base(value: Any) -> Any:
    """A view made in the forward of a Function, without its base and graph; any other value as it is."""
    is_view = isinstance(value, torch.Tensor) and value._base is not None and value.grad_fn is None
    return value.data if is_view else value


def function_of(node: Any) -> type | None:
    """The autograd.Function that a node of the graph belongs to; None for a node of torch's own."""
    # torch makes a class of nodes for each Function. This attribute leads back.
    return getattr(node, "_forward_cls", None)


def newest_node() -> int:
    """The sequence number of the newest autograd node of this thread.

    In an attention call that is the node of the call, or of the autograd.Function whose forward makes the call: both
    are made before the kernel runs.
    """
    # Since 2.15 torch.autograd.graph.node_creation_hook (pytorch#189284) hands over each node when it is made. Numbers
    # cost one call for each attention call, a hook one for each node of the block.
    return torch._C._autograd._get_sequence_nr() - 1


def sequence_number(node: Any) -> int:
    """The place of an autograd node among those that its thread made."""
    return int(node._sequence_nr())


def input_shapes(node: Any) -> list[torch.Size | None]:
    """Shapes of the inputs of an autograd node; None for an input that needs no gradient or is not a tensor."""
    return [None if fn is None else fn._input_metadata[place].shape for fn, place in node.next_functions]
