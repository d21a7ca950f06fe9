"""Looks up what is private in torch before fastac relies on it: what went away is an error that names it.

The names stand in the modules that use them: `torch_internals` for the dispatcher and autograd, `compiler_internals`
and `inductor_internals` for the compiler, `graph.torch_private` for traces.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Iterable
from typing import Any

import torch

SEEN_IN = ("2.13",)
"""Versions of torch in which all names were found."""


def find(name: str) -> Any:
    """What a dotted name, relative to `torch`, stands for. Modules that nobody imported so far are imported.

    Raises AttributeError where torch has it not.
    """
    parts = name.split(".")
    for length in range(len(parts) - 1, 0, -1):
        try:
            module = importlib.import_module(".".join(["torch", *parts[:length]]))
        except ModuleNotFoundError:
            continue
        return operator.attrgetter(".".join(parts[length:]))(module)
    return operator.attrgetter(name)(torch)


def missing(names: Iterable[str]) -> list[str]:
    """Names, relative to `torch`, that this build of torch does not have."""
    absent = []
    for name in names:
        try:
            find(name)
        except AttributeError:
            absent.append(name)
    return absent


def require(names: Iterable[str], user: str = "fastac") -> None:
    """Raise ImportError when this build of torch lacks one of the names."""
    if absent := missing(names):
        raise ImportError(
            f"{user} needs {', '.join('torch.' + name for name in absent)}, which torch {torch.__version__} does not "
            f"have. It was seen in torch {', '.join(SEEN_IN)}: install one of these, or a newer fastac."
        )
