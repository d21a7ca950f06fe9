"""patch_checkpoint(): fastac in the place of torch's checkpoint, for trainers whose models call that by its name."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastac.checkpoint import checkpoint, prepare
from fastac.diagnosis.autograd_graph import may_run_again
from fastac.engine import torch_private
from fastac.engine.tape import engine
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.policy import Policy, resolve
from fastac.registry import BoundOp

logger = logging.getLogger("fastac")


class patch_checkpoint:  # noqa: N801 called as a function, as torch.set_grad_enabled
    """Let code that calls torch.utils.checkpoint.checkpoint by its name get fastac.checkpoint.

    For trainers whose models checkpoint in their own forward. At once and for good; as a context, until its end. The
    name is replaced in every module that is loaded, so call it after the trainer's imports. What took torch's function
    before in another way (functools.partial, a default argument) keeps it: attention under it is an error.

    Args:
        policy: "attn_only", "long_attn_only" or a fastac.Policy.

    Raises:
        FastacError: it is patched already.
        PolicyNotAppliedError: while patched, attention that the policy saves runs under a checkpoint that is not
            fastac's: torch's function taken before, reentrant, or a library's own.

    Example:
        >>> fastac.patch_checkpoint()
        >>> with fastac.patch_checkpoint("attn_only"):
        ...     train()
    """

    def __init__(self, policy: str | Policy = "attn_only") -> None:
        if torch.utils.checkpoint.checkpoint is not torch_checkpoint:
            raise FastacError(
                "patch_checkpoint: torch.utils.checkpoint.checkpoint is not torch's own any more: another package took "
                "its place, or patch_checkpoint was called before (`with fastac.patch_checkpoint():` ends)."
            )
        self.policy = resolve(policy)
        self._is_on = True
        prepare()

        @functools.wraps(torch_checkpoint)
        def patched(function: Any = None, *args: Any, **kwargs: Any) -> Any:
            if not self._is_on:  # taken while it was
                return torch_checkpoint(function, *args, **kwargs)
            if "context_fn" in kwargs and torch_private.is_abstract(args):
                raise FastacError(
                    "patch_checkpoint: torch.compile makes an operator of what is called by this name. Switch the "
                    "model's own checkpointing off, and use fastac.enable(model, blocks=...) and fastac.compile(model)."
                )
            return checkpoint(function, *args, policy=self.policy, **kwargs)

        self._patched: Callable[..., Any] = patched
        engine.listeners.append(self._refuse)
        replaced = _replace(torch_checkpoint, patched)
        logger.info("patch_checkpoint(%s): replaced %s", self.policy, ", ".join(replaced))

    def __enter__(self) -> patch_checkpoint:
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_on = False
        engine.listeners.remove(self._refuse)
        _replace(self._patched, torch_checkpoint)

    def _refuse(self, op: BoundOp, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise for attention that runs where no region is open, under a checkpoint that is not fastac's."""
        node = torch_private.running_node()
        again = node is not None and (node.name() == torch_private.COMPILED_NODE or not may_run_again(node))
        if not (again or torch_private.innermost_checkpoint()):
            return
        if self.policy.saves(op.keys(args, kwargs)):
            seen = f"in the backward of {node.name()}" if again else "under torch's own checkpoint"
            raise PolicyNotAppliedError(
                f"patch_checkpoint({str(self.policy)!r}): {op.name} over {op.keys(args, kwargs)} keys ran {seen}.\n"
                f"That checkpoint was taken before the name was patched (a functools.partial, a model that was "
                f"switched on or compiled), or is reentrant, a library's own, or fastac's of policy \"full\".\n"
                f"Call patch_checkpoint before it is taken and switch to use_reentrant=False, or switch that "
                f"checkpointing off and use fastac.enable(model, blocks=...).\n"
                f"If it is no checkpoint: fastac.make_visible(TheFunction, layout=...)."
            )


def _replace(old: object, new: object) -> list[str]:
    """Give every module that holds one function another one under the same name. Returns the names."""
    replaced = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "fastac":  # which calls torch's own
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is old:
                vars(module)[attribute] = new
                replaced.append(f"{name}.{attribute}")
    return replaced
