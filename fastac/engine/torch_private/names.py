"""Finds private names of torch, and says which ones this build of torch lacks."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable

import torch

SEEN_IN = "2.9 to 2.15"
"""Releases of torch that fastac was run with: docs/versions.md."""


def missing(names: Iterable[str]) -> list[str]:
    """Which of some dotted names, relative to `torch`, this build of torch does not have. Imports their modules."""
    absent = []
    for name in names:
        try:
            pkgutil.resolve_name(f"torch.{name}")
        except AttributeError:
            absent.append(name)
    return absent


# All names of the engine are asked for together, before any module of this package uses one: then one error lists all
# that are missing. The reason for each name stands where it is used.
# fmt: off
_DISPATCHER = (
    "_C.DispatchKey.BackendSelect", "_C._AutoDispatchBelowADInplaceOrView", "_C._AutoDispatchBelowAutograd",
    "_C._ExcludeDispatchKeyGuard", "_C._ForceDispatchKeyGuard", "_C._dispatch_get_all_op_names",
    "_C._dispatch_has_kernel_for_dispatch_key", "_C._dispatch_kernel_for_dispatch_key_is_fallthrough",
    "_C._dispatch_keyset_full", "_C._dispatch_keyset_full_after", "_C._dispatch_tls_local_exclude_set",
    "_C._dispatch_tls_local_include_set", "_library.custom_ops.OPDEFS", "_ops.HigherOrderOperator.dispatch",
    "_ops.HigherOrderOperator.py_impl", "_ops._compute_keyset",
)
_DYNAMO = (
    "_C._DisableTorchDispatch", "_C._TorchDispatchModeKey.PROXY", "_C._dynamo.eval_frame._FrameAction.DEFAULT",
    "_C._dynamo.eval_frame._FrameAction.SKIP", "_C._dynamo.eval_frame._FrameExecStrategy",
    "_C._dynamo.eval_frame.set_code_exec_strategy", "_C._dynamo.eval_frame.set_guard_complete_hook",
    "_C._get_dispatch_mode", "_C._get_tracing_state", "_C._len_torch_dispatch_stack",
    "_guards.TracingContext.try_get", "compiler._is_exporting_flag",
)
_TENSORS = (
    "_C.DispatchKey.ADInplaceOrView", "_C._SetExcludeDispatchKeyGuard", "_C._functorch.is_batchedtensor",
    "_C._has_storage", "_C._len_torch_function_stack", "Tensor._nested_tensor_size",
)
_AUTOGRAD = (
    "_C._FunctionBase.dirty_tensors", "_C._FunctionBase.non_differentiable", "_C._FunctionBase.to_save",
    "_C._autograd._get_sequence_nr", "_C._autograd._saved_tensors_hooks_get_disabled_error_message",
    "_C._autograd._top_saved_tensors_default_hooks", "_C._current_autograd_node", "_C._current_graph_task_id",
    "autograd.Variable._execution_engine.queue_callback", "autograd._engine_run_backward",
    "autograd.forward_ad._current_level",
    "utils.checkpoint._checkpoint_debug_enabled", "utils.checkpoint._enable_checkpoint_early_stop",
)
# fmt: on

if absent := missing((*_DISPATCHER, *_DYNAMO, *_TENSORS, *_AUTOGRAD)):
    raise ImportError(
        f"fastac needs {', '.join('torch.' + name for name in absent)}, which torch {torch.__version__} does not "
        f"have. It was seen in torch {SEEN_IN}: install one of these, or a newer fastac."
    )
