"""Linear modules whose outputs are saved: found by name, known by module hooks while they run.

A hook tells the open scope which Linear module begins; the next product that passes `fastac.interception` is its
output. Below autograd, as with attention: what autograd sees of a replayed module is what it saw in the forward.
The hooks stay on a module until `take_off`. Without an open scope, or under another policy, they do nothing.
"""

from __future__ import annotations

import fnmatch
import types
import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fastac import census, interception
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.policy import Policy
from fastac.scopes import thread


class Watched(dict[int, str]):
    """Linear modules of a block, by id, with their names in it."""

    def __init__(self, modules: Mapping[str, torch.nn.Linear] = types.MappingProxyType({})) -> None:
        super().__init__({id(module): name for name, module in modules.items()})
        self.modules = [weakref.ref(module) for module in modules.values()]


_found: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple[str, ...], Watched]] = weakref.WeakKeyDictionary()


def watched(function: Any, policy: Policy) -> Watched:
    """The Linear modules of a block whose outputs a policy saves, by id, with their names in the block.

    They get hooks where they have none. Raises FastacError for a function that is no block, and for a name that is
    wrong for a block that `enable` did not see: there it must be right for one of the blocks.
    """
    block = census.block_of(function)
    if block is None:
        raise FastacError(
            f"{policy}: linear=... names Linear modules inside a block, and {census.describe(function)} is no module. "
            f'Checkpoint the block itself, or use a policy without linear=..., such as "attn_only".'
        )
    by_names = _found.setdefault(block, {})
    names = tuple(policy.linear)
    found = by_names.get(names)
    if found is None:
        interception.install_linear()
        found = by_names[names] = _named(block, policy)
    return found


def check_names(policies: Mapping[torch.nn.Module, Policy]) -> None:
    """Raise FastacError for a name in the policies of blocks that is right for none of them."""
    for policy in dict.fromkeys(policies.values()):
        names = [name for block, mine in policies.items() if mine == policy for name in linear_modules(block)]
        for pattern in policy.linear:
            if not fnmatch.filter(names, pattern) and not policy.is_budget:
                raise FastacError(
                    f"{policy}: {pattern!r} names no Linear module of the blocks. Their Linear modules are "
                    f"{', '.join(dict.fromkeys(names)) or 'none'}."
                )


def linear_modules(block: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The Linear modules of a block, by their names in it."""
    return {name: module for name, module in block.named_modules() if isinstance(module, torch.nn.Linear)}


def _named(block: torch.nn.Module, policy: Policy) -> Watched:
    modules = linear_modules(block)
    names = [name for name in modules if any(fnmatch.fnmatchcase(name, pattern) for pattern in policy.linear)]
    record = census.block_record(block)
    if record is None or not record.name:
        check_names({block: policy})
    found = Watched({name: modules[name] for name in names})
    watch_again(found)
    return found


def watch_again(linears: Watched) -> list[RemovableHandle]:
    """Put hooks on those that have none, or none any more. Returns what takes them off again."""
    handles = []
    for reference in linears.modules:
        module = reference()
        if module is not None and _begin not in module._forward_pre_hooks.values():
            handles += [module.register_forward_pre_hook(_begin), module.register_forward_hook(_end)]
    return handles


def take_off(model: torch.nn.Module) -> None:
    """Take the hooks off every Linear module of a model, and look for them anew when they are needed again."""
    for module in model.modules():
        _found.pop(module, None)
        if isinstance(module, torch.nn.Linear):
            for hooks, mine in ((module._forward_pre_hooks, _begin), (module._forward_hooks, _end)):
                for key in [key for key, hook in hooks.items() if hook is mine]:
                    del hooks[key]


def _begin(module: torch.nn.Linear, args: Any) -> None:
    if torch.compiler.is_dynamo_compiling():
        return
    scope = thread.scope
    if scope is not None:
        scope.begin_linear(module)


def _end(module: torch.nn.Linear, args: Any, output: Any) -> None:
    """Raise PolicyNotAppliedError when the module ran no product that could be seen."""
    if torch.compiler.is_dynamo_compiling():
        return
    scope = thread.scope
    if scope is not None and scope.linear is not None:
        name, scope.linear = scope.linear, None
        scope.no_product(module, name)


def _refuse_exchanged(function: Any, policy: Policy) -> None:
    block = census.block_of(function)
    if block is None:
        return
    modules = dict(block.named_modules())
    for key, name in watched(function, policy).items():
        if id(modules.get(name)) != key:
            raise PolicyNotAppliedError(
                f"{policy}: the Linear module {name!r} of {census.describe(function)} was exchanged since its first "
                f"step, so its output is not saved. Call fastac.enable again after a model was changed."
            )


def judge(
    function: Any, policy: Policy, products: Collection[str], before: Collection[str], compiled: bool = False
) -> None:
    """Raise PolicyNotAppliedError when outputs of Linear modules that the policy saves were not saved.

    products: the modules whose outputs are on the tape. before: those of an earlier region of this kind.
    """
    where = census.describe(function)
    if compiled:
        raise PolicyNotAppliedError(
            f"{policy}: {where} is compiled, or runs compiled code, in which no Linear module can be told from others. "
            f'Use a policy of attention there, such as "long_attn_only" or Policy.budget(..., linear=False).'
        )
    if policy.is_budget:
        return
    _refuse_exchanged(function, policy)
    missing = [name for name in dict.fromkeys(before) if name not in products]
    if missing or len(products) < len(before):
        raise PolicyNotAppliedError(
            f"{policy}: {where} saved the outputs of {len(products)} Linear modules, and {len(before)} before on "
            f"inputs of these shapes ({', '.join(missing) or 'some are called less often'}). They were exchanged "
            f"since, or the block took another path. Call fastac.enable again after a model was changed."
        )
    block = census.block_of(function)
    names = linear_modules(block) if block is not None else {}
    for pattern in policy.linear:
        if fnmatch.filter(names, pattern) and not fnmatch.filter(products, pattern):
            raise PolicyNotAppliedError(
                f"{policy}: no Linear module {pattern!r} of {where} was called, so none of their outputs is saved. "
                f"Called were {', '.join(products) or 'none of those that are named'}. Leave it out, or see whether "
                f"the model computes with its weight in another way (fused projections)."
            )
