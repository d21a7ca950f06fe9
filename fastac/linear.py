"""Linear modules whose outputs are saved: found by name, known by module hooks while they run.

A hook tells the open scope which Linear module begins; the next product that passes `fastac.interception` is its
output. Below autograd, as with attention: what autograd sees of a replayed module is what it saw in the forward.
The hooks stay on a module until `take_off`. Without an open scope, or under another policy, they do nothing.
"""

from __future__ import annotations

import fnmatch
import types
import weakref
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from fastac import census, interception
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.policy import Policy
from fastac.scopes import Scope, thread
from fastac.tape import Record


class Watched(dict[int, str]):
    """Linear modules of a block, by id, with their names in it: of several names of one, the first."""

    def __init__(
        self,
        modules: Mapping[str, torch.nn.Linear] = types.MappingProxyType({}),
        block: torch.nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.modules: list[weakref.ref[torch.nn.Linear]] = []
        self._places: list[tuple[weakref.ref[torch.nn.Module], str, weakref.ref[torch.nn.Linear], str]] = []
        for name, module in modules.items():
            reference = weakref.ref(module)
            if self.setdefault(id(module), name) == name:
                self.modules.append(reference)
            parent, _, own = name.rpartition(".")
            if block is not None and name:
                self._places.append((weakref.ref(block.get_submodule(parent)), own, reference, name))

    def exchanged(self) -> str | None:
        """The name of a module that is another one by now: replaced, or wrapped by an adapter."""
        for parent, own, reference, name in self._places:
            holder, module = parent(), reference()
            if holder is None or module is None or holder._modules.get(own) is not module:
                return name
        return None


_found: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple[str, ...], Watched]] = weakref.WeakKeyDictionary()


def watched(function: Any, policy: Policy, by_name: bool = True) -> Watched:
    """The Linear modules of a block whose outputs a policy saves, by id, with their names in the block.

    They get hooks where they have none. Raises FastacError for a function that is no block, and for a name that is
    wrong for a block that `enable` did not see: there it must be right for one of the blocks. PolicyNotAppliedError
    when one of them was exchanged. by_name: whether the user named them; else they are looked for anew then.
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
    if found is not None and (name := found.exchanged()) is not None:
        if by_name:
            raise PolicyNotAppliedError(
                f"{policy}: the Linear module {name!r} of {census.describe(function)} was exchanged since its first "
                f"step, so its output is not saved. Call fastac.enable again after a model was changed."
            )
        by_names.clear()
        found = None
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


def was_exchanged(function: Any, policy: Policy) -> bool:
    """Whether a Linear module of a block is another one than when this policy was first used for it."""
    block = census.block_of(function)
    found = _found.get(block, {}).get(tuple(policy.linear)) if block is not None else None
    return found is not None and found.exchanged() is not None


def linear_modules(block: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The Linear modules of a block, by their names in it; one that has several is there several times."""
    modules = block.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, torch.nn.Linear)}


def _named(block: torch.nn.Module, policy: Policy) -> Watched:
    modules = linear_modules(block)
    names = [name for name in modules if any(fnmatch.fnmatchcase(name, pattern) for pattern in policy.linear)]
    record = census.block_record(block)
    if record is None or not record.name:
        check_names({block: policy})
    found = Watched({name: modules[name] for name in names}, block)
    watch_again(found)
    return found


def watch_again(linears: Watched) -> list[RemovableHandle]:
    """Put hooks on those that have none, or none any more. Returns what takes them off again."""
    handles = []
    for reference in linears.modules:
        module = reference()
        if module is not None and _begin not in module._forward_pre_hooks.values():
            after = module.register_forward_hook(_end, always_call=True)
            handles += [module.register_forward_pre_hook(_begin), after]
    return handles


def take_off(model: torch.nn.Module) -> None:
    """Take the hooks off every Linear module of a model, and look for them anew when they are needed again."""
    for module in model.modules():
        _found.pop(module, None)
        if isinstance(module, torch.nn.Linear):
            for hooks, mine in ((module._forward_pre_hooks, _begin), (module._forward_hooks, _end)):
                for key in [key for key, hook in hooks.items() if hook is mine]:
                    del hooks[key]
                    module._forward_hooks_always_called.pop(key, None)


def _open_scope() -> Scope | None:
    return None if torch.compiler.is_dynamo_compiling() else thread.scope


def _begin(module: torch.nn.Linear, args: Any) -> None:
    scope = _open_scope()
    if scope is not None:
        scope.begin_linear(module, _expected(module, args))


def _end(module: torch.nn.Linear, args: Any, output: Any) -> None:
    """Raise PolicyNotAppliedError when the module ran no product that could be seen."""
    scope = _open_scope()
    name = scope.end_linear() if scope is not None else None
    if scope is not None and name is not None and output is not None:  # which is None when the module has raised
        scope.no_product(module, name)


def _expected(module: torch.nn.Linear, args: Any) -> tuple[int, int, int] | None:
    """How the product of a module looks that may run others before it: that of its weight (rows, inputs, outputs).

    None for all others: what a rank holds of a weight has another shape.
    """
    if type(module).forward is torch.nn.Linear.forward and not is_parametrized(module):
        return None
    if not args or not isinstance(args[0], torch.Tensor):
        return None
    return args[0].shape[:-1].numel(), module.in_features, module.out_features


def refuse_compiled(function: Any, policy: Policy) -> None:
    """Raise PolicyNotAppliedError for a policy of Linear modules where they can not be seen."""
    raise PolicyNotAppliedError(
        f"{policy}: {census.describe(function)} is compiled, or runs compiled code, in which no Linear module can be "
        f'told from others. Use a policy of attention there, such as "long_attn_only" or '
        f"Policy.budget(..., linear=False)."
    )


def judge(function: Any, policy: Policy, record: Record, before: Collection[str], nodes: Iterable[Any]) -> None:
    """Raise PolicyNotAppliedError when outputs of Linear modules that the policy saves were not saved.

    record: what the region did. before: the modules whose outputs an earlier region of this kind saved. nodes: the
    autograd nodes of the region.
    """
    products = record.products
    where = census.describe(function)
    missing = [name for name in dict.fromkeys(before) if name not in products]
    if missing or len(products) < len(before):
        raise PolicyNotAppliedError(
            f"{policy}: {where} saved the outputs of {len(products)} Linear modules, and {len(before)} before on "
            f"inputs of these shapes ({', '.join(missing) or 'some are called less often'}). They were exchanged "
            f"since, or the block took another path. Call fastac.enable again after a model was changed."
        )
    block = census.block_of(function)
    modules = linear_modules(block) if block is not None else {}
    named = watched(function, policy)
    called = record.called_inside.union(products)
    for pattern in policy.linear:
        names = {named[id(modules[name])] for name in fnmatch.filter(modules, pattern)}
        if names and not names & called:
            raise PolicyNotAppliedError(
                f"{policy}: no Linear module {pattern!r} of {where} was called, so none of their outputs is saved. "
                f"Called were {', '.join(products) or 'none of those that are named'}. Leave it out, or see whether "
                f"the model computes with its weight in another way (fused projections)."
            )
    reached = {id(variable) for node in nodes if (variable := getattr(node, "variable", None)) is not None}
    weights = {name: id(modules[name]._parameters.get("weight")) for name in named.values()}
    reached -= {weights[name] for name in called}  # tied
    if unseen := [name for name, weight in weights.items() if weight in reached]:
        raise PolicyNotAppliedError(
            f"{policy}: {where} computes with the weight of the Linear module {unseen[0]!r}, and did not call the "
            f"module in this thread, so its output is not saved. Call module(x), not module.forward(x) or its weight, "
            f"or name the modules that are to be saved without it."
        )
