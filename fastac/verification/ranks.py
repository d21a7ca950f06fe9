"""The ranks that verify: all take the same steps, because an error on only one of them hangs the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fastac.errors import rank

Result = TypeVar("Result")

_CONNECTION = ("DistBackendError", "DistNetworkError", "RuntimeError")
"""Errors that torch raises on a rank that waits for a rank that does not come."""


class OtherRankFailed(Exception):  # noqa: N818 it carries the error of another rank
    """Another rank raised. error_name: name of the class of its error."""

    def __init__(self, error_name: str, message: str) -> None:
        super().__init__(message)
        self.error_name = error_name


class Group:
    """Ranks that run the same function. What one of them finds counts for all.

    It is a process group of its own: a failure may have left ranks inside a collective of the training's groups.
    """

    def __init__(self) -> None:
        # torch's "fake" backend simulates ranks that do not exist: nobody would answer.
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
        """Send an error to the others. If it only says that another rank is missing, raise the error of that rank."""
        error_name, text = type(error).__name__, str(error)
        sent = (error_name, text if text.startswith(rank()) else f"{rank()}: {error_name}: {text}")
        received = [value for value in self._exchange(sent) if isinstance(value, tuple) and value != sent]
        # If one rank fails, the ranks that wait for it fail by a lost connection: that is not the error to read.
        causes = [value for value in received if value[0] not in _CONNECTION]
        if error_name in _CONNECTION and causes:
            raise OtherRankFailed(*causes[0]) from error

    def _exchange(self, sent: Any) -> list[Any]:
        """The values of all ranks. An error is sent as a tuple: the name of its class, and its message."""
        if self._group is None:
            return [sent]
        received: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(received, sent, group=self._group)
        failed = next((value for value in received if isinstance(value, tuple)), None)
        if failed is not None and not isinstance(sent, tuple):
            raise OtherRankFailed(*failed)
        return received
