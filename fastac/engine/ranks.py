"""Several processes: what all must agree on, because an error on one alone hangs the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fastac.errors import rank

Result = TypeVar("Result")

_CONNECTION = ("DistBackendError", "DistNetworkError", "RuntimeError")
"""Errors that torch raises on a rank that waits for another one that does not come."""


class OtherRankFailed(Exception):  # noqa: N818 it carries the error of another rank
    """Another rank raised."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind  # name of the class that the other rank raised


class Group:
    """Ranks that run the same function. A finding of one counts for all.

    It is a process group of its own: a failure may have left ranks inside a collective of the training's groups.
    """

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if rank() and dist.get_backend() != "fake" else None

    @property
    def is_one_process(self) -> bool:
        """Whether there are no other ranks."""
        return self._group is None

    def any(self, flag: bool) -> bool:
        """Whether a flag is set on any rank. Every rank must call it. Raises OtherRankFailed if another rank failed."""
        return any(self._exchange(flag))

    def agree(self, value: Any) -> bool:
        """Whether all ranks have the same value. Every rank must call it. Raises OtherRankFailed, as `any` does."""
        return all(other == value for other in self._exchange(value))

    def run(self, function: Callable[[], Result]) -> Result:
        """Call a function on every rank. An error on one rank is raised on all: OtherRankFailed on the others."""
        if self._group is None:
            return function()
        try:
            result = function()
            self._exchange(False)
            return result
        except OtherRankFailed:
            raise
        except Exception as error:
            self._report(error)
            raise
        finally:
            dist.destroy_process_group(self._group)

    def _report(self, error: Exception) -> None:
        """Tell the others of an error. If it only says that another rank is missing, raise the error of that rank."""
        kind, text = type(error).__name__, str(error)
        own = (kind, text if text.startswith(rank()) else f"{rank()}: {kind}: {text}")
        failed = [other for other in self._exchange(own) if isinstance(other, tuple) and other != own]
        causes = [other for other in failed if other[0] not in _CONNECTION]
        if kind in _CONNECTION and causes:
            raise OtherRankFailed(*causes[0]) from error

    def _exchange(self, mine: Any) -> list[Any]:
        """The values of all ranks. An error travels as a tuple: its kind and its message."""
        if self._group is None:
            return [mine]
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, mine, group=self._group)
        failed = next((one for one in everyone if isinstance(one, tuple)), None)
        if failed is not None and not isinstance(mine, tuple):
            raise OtherRankFailed(*failed)
        return everyone
