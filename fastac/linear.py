"""Linear modules whose outputs are saved: found by name, known by module hooks while they run.

A hook tells the open scope which Linear module begins; the next product that passes `fastac.interception` is its
output. Below autograd, as with attention: what autograd sees of a replayed module is what it saw in the forward.
The hooks stay on a module until `take_off`. Without an open scope, or under another policy, they do nothing.
"""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.hooks import RemovableHandle

from fastac import census, interception
from fastac.errors import FastacError, PolicyNotAppliedError
from fastac.policy import Policy
from fastac.scopes import Expected, Scope, thread
from fastac.tape import Record


class Watched(dict[int, str]):
    """Linear modules of a block, by id, with their names in it: of several names of one, the first.

    patterns: what their names match. hooked: whether they have got their hooks.
    """

    def __init__(self, block: torch.nn.Module | None = None, patterns: Sequence[str] = ()) -> None:
        super().__init__()
        self.patterns = patterns
        self.hooked = False
        self.modules: dict[str, weakref.ref[torch.nn.Linear]] = {}
        if block is not None:
            for name, module in matching(block, patterns).items():
                self.modules[name] = weakref.ref(module)
                self.setdefault(id(module), name)
            self._look_at(block)

    def _look_at(self, block: torch.nn.Module) -> None:
        self._sizes = [(weakref.ref(module), len(module._modules)) for module in block.modules()]
        self._links = [
            (weakref.ref(module), name, weakref.ref(child))
            for module in block.modules()
            for name, child in module._modules.items()
            if child is not None
        ]

    def _looks_the_same(self) -> bool:
        for holder, size in self._sizes:
            module = holder()
            if module is None or len(module._modules) != size:
                return False
        for holder, name, reference in self._links:
            module, child = holder(), reference()
            if module is None or child is None or module._modules.get(name) is not child:
                return False
        return True

    def exchanged(self, block: torch.nn.Module) -> str | None:
        """The name of a module that is another one by now: replaced, wrapped by an adapter, gone, or new."""
        if self._looks_the_same():
            return None
        found = matching(block, self.patterns)
        for name in {**self.modules, **found}:
            if name not in found or name not in self.modules or self.modules[name]() is not found[name]:
                return name
        self._look_at(block)  # what changed is no concern of the patterns
        return None


_found: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple[str, ...], Watched]] = weakref.WeakKeyDictionary()


def watched(function: Any, policy: Policy) -> Watched:
    """The Linear modules of a block whose outputs a policy saves, by id, with their names in the block.

    They get hooks where they have none. Raises FastacError for a function that is no block, and for a name that is
    wrong for a block that `enable` did not see: there it must be right for one of the blocks. PolicyNotAppliedError
    when one of them was exchanged.
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
    if found is not None and (name := found.exchanged(block)) is not None:
        raise PolicyNotAppliedError(
            f"{policy}: the Linear module {name!r} of {census.describe(function)} was exchanged, or added, since "
            f"fastac.enable or its first step, so its output is not saved. Call fastac.enable again after a model "
            f"was changed."
        )
    if found is None:
        record = census.block_record(block)
        if record is None or not record.name:
            check_names({block: policy})
        found = by_names[names] = Watched(block, names)
    if not found.hooked:
        interception.install_linear()
        watch_again(found)
        found.hooked = True
    return found


def expect(policies: Mapping[torch.nn.Module, Policy]) -> None:
    """Remember which modules of blocks the policies name now: a step that finds others is an error."""
    for block, policy in policies.items():
        if policy.linear:
            _found.setdefault(block, {})[tuple(policy.linear)] = Watched(block, tuple(policy.linear))


def check_names(policies: Mapping[torch.nn.Module, Policy]) -> None:
    """Raise FastacError for a name in the policies of blocks that is right for none of them."""
    for policy in dict.fromkeys(policies.values()):
        names = [name for block, mine in policies.items() if mine == policy for name in linear_modules(block)]
        for pattern in policy.linear:
            if not fnmatch.filter(names, pattern):
                raise FastacError(
                    f"{policy}: {pattern!r} names no Linear module of the blocks. Their Linear modules are "
                    f"{', '.join(dict.fromkeys(names)) or 'none'}."
                )


def linear_modules(block: torch.nn.Module) -> dict[str, torch.nn.Linear]:
    """The Linear modules of a block, by their names in it; one that has several is there several times."""
    modules = block.named_modules(remove_duplicate=False)
    return {name: module for name, module in modules if isinstance(module, torch.nn.Linear)}


def matching(block: torch.nn.Module, patterns: Sequence[str]) -> dict[str, torch.nn.Linear]:
    """The Linear modules of a block whose names match one of some patterns."""
    return {
        name: module
        for name, module in linear_modules(block).items()
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    }


def watch_again(linears: Watched) -> list[RemovableHandle]:
    """Put hooks on those that have none, or none any more. Returns what takes them off again."""
    handles = []
    for reference in linears.modules.values():
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


def _expected(module: torch.nn.Linear, args: Any) -> Expected | None:
    """How the product of a module looks that may run others before it: that of its weight (rows, inputs, outputs).

    rows: where the weight is computed, None elsewhere: a class may leave some out. None for all other modules, and
    where ranks hold parts, which have other shapes.
    """
    computed = is_parametrized(module)
    if not computed and type(module).forward is torch.nn.Linear.forward:
        return None
    if not args or not isinstance(args[0], torch.Tensor) or hasattr(args[0], "to_local"):
        return None
    if any(hasattr(parameter, "to_local") for parameter in module.parameters()):
        return None
    return args[0].shape[:-1].numel() if computed else None, module.in_features, module.out_features


def refuse_compiled(function: Any, policy: Policy) -> None:
    """Raise PolicyNotAppliedError for a policy of Linear modules where they can not be seen."""
    raise PolicyNotAppliedError(
        f"{policy}: {census.describe(function)} is compiled, or runs compiled code, in which no Linear module can be "
        f'told from others. Use a policy of attention there, such as "long_attn_only" or '
        f"plan.within(..., linear=False)."
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
    called = set(products)
    for pattern in policy.linear:
        names = {named[id(modules[name])] for name in fnmatch.filter(modules, pattern)}
        if names and not names & called:
            raise PolicyNotAppliedError(
                f"{policy}: no Linear module {pattern!r} of {where} was called, so none of their outputs is saved. "
                f"Called were {', '.join(products) or 'none of those that are named'}. Leave it out, or see whether "
                f"the model computes with its weight in another way (fused projections)."
            )
    reached = {id(variable) for node in nodes if (variable := getattr(node, "variable", None)) is not None}
    weights = {name: id(module._parameters.get("weight")) for name, module in modules.items()}
    names = set(named.values()) - called
    reached -= {weight for name, weight in weights.items() if name not in names}  # tied
    if unseen := [name for name in named.values() if name in names and weights[name] in reached]:
        raise PolicyNotAppliedError(
            f"{policy}: {where} computes with the weight of the Linear module {unseen[0]!r}, and did not call the "
            f"module in this thread, so its output is not saved. Call module(x), not module.forward(x) or its weight, "
            f"or name the modules that are to be saved without it."
        )
