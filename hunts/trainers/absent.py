"""Packages that trainers import and no training step uses."""

from __future__ import annotations

from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from tests.backends.flash_on_cpu import substitute


class _Absent(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


def absent(*names: str) -> None:
    """Stand-ins for packages that are not installed and run in no training step: every attribute can be called."""
    import diffusers  # noqa: F401 they look for some of these, and must not find them
    import transformers  # noqa: F401

    for name in names:
        substitute(name).__class__ = _Absent
