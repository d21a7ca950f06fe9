"""Reads in the code of a model which of its module lists it runs through gradient checkpointing."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterator

import torch

LISTS = (torch.nn.ModuleList, torch.nn.Sequential, torch.nn.ModuleDict)
"""What blocks stand in."""

FUNCTION = "_gradient_checkpointing_func"
"""What models of diffusers call for each block."""


def checkpointed_lists(module: torch.nn.Module) -> dict[str, torch.nn.Module] | None:
    """The module lists, by name, over which a module loops when it checkpoints; some may have no members.

    None where a loop is over something else, and so not understood; a list may also be None in this module.
    """
    lists = dict(_lists_in(module))
    found: dict[str, torch.nn.Module] = {}
    for names in (names for cls in type(module).__mro__ for names in loops_of(cls)):
        looped = {name: inner for name, inner in lists.items() if name.partition(".")[0] in names}
        # Not getattr: diffusers looks a name that is no attribute up in the configuration.
        absent = any(name in own and own[name] is None for own in (vars(module), module._modules) for name in names)
        if not looped and not absent:
            return None
        found |= looped
    return found


def _lists_in(module: torch.nn.Module, prefix: str = "") -> Iterator[tuple[str, torch.nn.Module]]:
    """The lists that are attributes of a module, or members of dicts that are; else such a dict counts as one."""
    for name, inner in module.named_children():
        inside = list(_lists_in(inner, f"{prefix}{name}.")) if isinstance(inner, torch.nn.ModuleDict) else []
        yield from inside
        if isinstance(inner, LISTS) and not inside:
            yield prefix + name, inner


@functools.cache
def loops_of(cls: type) -> tuple[frozenset[str], ...]:
    """For each call of the checkpointing function in a class, the names in what the loop around it runs over.

    None of them, where there is no loop, or no source.
    """
    methods = [inspect.unwrap(value) for value in vars(cls).values() if inspect.isfunction(value)]
    found: list[frozenset[str]] = []
    for method in methods:
        if FUNCTION in method.__code__.co_names:
            try:
                found += _loops_in(ast.parse(textwrap.dedent(inspect.getsource(method))))
            except (OSError, SyntaxError):  # it came without a file, or from one that is another now
                found.append(frozenset())
    return tuple(found)


def _loops_in(node: ast.AST, looped: frozenset[str] = frozenset()) -> Iterator[frozenset[str]]:
    if isinstance(node, ast.For):
        # A variable is taken for the list that it is named after.
        inner = list(ast.walk(node.iter))
        looped = frozenset(
            [name.attr for name in inner if isinstance(name, ast.Attribute)]
            + [name.id for name in inner if isinstance(name, ast.Name)]
        )
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == FUNCTION:
        yield looped
    for child in ast.iter_child_nodes(node):
        yield from _loops_in(child, looped)
