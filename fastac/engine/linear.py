"""Linear modules whose outputs are saved: a module hook says which one runs, and the next matmul is its output.

The output is saved below autograd, as attention outputs are. So autograd records the same nodes whether the matmul ran
or was replayed. Hooks stay on a module until `detach`. Without an open scope they do nothing.
"""

from __future__ import annotations

import contextlib
import fnmatch
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized

from fastac.engine import interception
from fastac.engine.blocks import known_state, state_of
from fastac.engine.process import thread
from fastac.engine.tape import Scope
from fastac.errors import FastacError, PolicyNotAppliedError, class_name, did_you_mean
from fastac.policy import Policy, patterns_of

# It is pickled with the module, as its hooks are.
_NAME = "_fastac_linear"
"""Attribute of a Linear module with hooks: its name in its block."""


def check_names(model: torch.nn.Module, policies: Mapping[torch.nn.Module, Policy], are_guessed: bool) -> None:
    """Raise FastacError for a name in a policy that no Linear module of its blocks has.

    Args:
        policies: the policy of each of the model's blocks.
        are_guessed: the model may checkpoint parts of these blocks, or modules around them. A name is accepted then if
            the name of any Linear module ends with it: the first region of each kind checks it.
    """
    for policy in {policy for policy in policies.values() if policy.linear}:
        blocks = [block for block, policy_of_block in policies.items() if policy_of_block == policy]
        inside = dict.fromkeys(name for block in blocks for name in _linear_modules(block))
        names = dict(inside)
        if are_guessed:
            parts = [name.split(".") for name in _linear_modules(model)]
            names |= dict.fromkeys(".".join(path[first:]) for path in parts for first in range(len(path)))
        for pattern in policy.linear:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in names):
                listed = [*inside][:12]
                raise FastacError(
                    f"{policy}: no block of {class_name(model)} under it has a Linear module {pattern!r}."
                    f"{did_you_mean(pattern, [*names, *patterns_of(names)])} Names are those inside a block: "
                    f"{', '.join(listed) or 'it has none'}{', ...' * (len(inside) > len(listed))}."
                )


def attach(block: torch.nn.Module, policy: Policy, is_strict: bool = True) -> None:
    """Put hooks on the Linear modules of a block that a policy names.

    Raises FastacError for a module whose forward is not that of torch.nn.Linear: its matmul cannot be identified. If it
    is not strict, such modules are left out.
    """
    attached = state_of(block).attached
    if not policy.linear or policy.linear in attached:
        return
    named = {name: module for name, module in _linear_modules(block).items() if policy.saves_linear(name)}
    for name, module in named.items():
        if not calls_one_product(module):
            if not is_strict:
                continue
            raise FastacError(
                f"{policy}: the output of {name!r} ({class_name(module)}) cannot be saved: its forward is not that of "
                f"torch.nn.Linear (quantized, fused, parametrized). Leave it out of linear=(...)."
            )
        if _begin not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_begin)
            module.register_forward_hook(_end)
        vars(module)[_NAME] = name
    if named:
        interception.install_linear()
    attached.add(tuple(policy.linear))


@contextlib.contextmanager
def attached(block: torch.nn.Module, policy: Policy) -> Iterator[None]:
    """A context in which a block has the hooks of a policy: `enable` or `disable` may have removed them meanwhile."""
    if policy.linear in state_of(block).attached:
        yield
        return
    attach(block, policy)
    try:
        yield
    finally:
        detach(block)  # the next region of the block attaches what it needs


def calls_one_product(module: torch.nn.Module) -> bool:
    """Whether the next matmul after a module is called is its output: it has the forward of torch.nn.Linear."""
    # Another forward may call several matmuls, or none.
    return type(module).forward is torch.nn.Linear.forward and not is_parametrized(module)


def detach(model: torch.nn.Module) -> None:
    """Remove the hooks from every Linear module of a model."""
    for module in model.modules():
        if (state := known_state(module)) is not None:
            state.key = None  # so that its next region attaches them again
            state.attached.clear()
        if vars(module).pop(_NAME, None) is None:
            continue
        # Not by the handles that register_forward_hook returned: a deep copy of a module has the hooks without handles.
        for hooks, function in ((module._forward_pre_hooks, _begin), (module._forward_hooks, _end)):
            for key in [key for key, hook in hooks.items() if hook is function]:
                del hooks[key]


def check_called(policy: Policy, called: Collection[str], block: torch.nn.Module, where: str) -> None:
    """Raise PolicyNotAppliedError for a name in a policy if the block called no Linear module of that name."""
    for pattern in policy.linear:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in called):
            raise PolicyNotAppliedError(
                f"{policy}: no Linear module {pattern!r} of {where} was called in this thread, so its output is not "
                f"saved. Its Linear modules are {', '.join(_linear_modules(block)) or 'none'}. Call module(x), not "
                f"module.forward(x) or its weight, or leave the name out of linear=(...)."
            )


def _linear_modules(block: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The Linear modules of a block, by name."""
    return {name: module for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)}


def _open_scope() -> Scope | None:
    return None if torch.compiler.is_dynamo_compiling() else thread.scope


def _begin(module: torch.nn.Module, args: Any) -> None:
    """Say to the scope that the next matmul is this module's output."""
    scope = _open_scope()
    if scope is not None and scope.policy.saves_linear(vars(module)[_NAME]):
        scope.product = vars(module)[_NAME]


def _end(module: torch.nn.Module, args: Any, output: Any) -> None:
    """Raise PolicyNotAppliedError if the module called no matmul that could be seen."""
    # The scope forgets the name when the matmul arrives.
    scope = _open_scope()
    if scope is None or scope.product is None:
        return
    if scope.tape.measured is not None:  # it cannot be stored, and need not be
        scope.product = None
        return
    raise PolicyNotAppliedError(
        f"{scope.policy}: the output of the Linear module {scope.product!r} was to be saved, and it called no matmul "
        f"that could be seen (its weight is quantized or a tensor subclass). Leave it out of linear=(...)."
    )
