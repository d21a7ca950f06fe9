"""Several processes: which of them this is, and what they must agree on: an error on one alone hangs the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from fastac.errors import rank

Result = TypeVar("Result")

_CONNECTION = ("DistBackendError", "DistNetworkError", "RuntimeError")
"""What torch raises on a rank that waits for another in vain."""


def count() -> int:
    """How many processes train together; 1 where there is no process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class OtherRankFailed(Exception):  # noqa: N818 it carries another rank's error, and is one of none of ours
    """Another rank raised. message: what it said; kind: the name of the class it raised."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Group:
    """Ranks that run the same function: what one of them finds counts for all.

    They talk in a group of their own: what failed may have left others inside a collective of the training's.
    """

    def __init__(self) -> None:
        several = count() > 1 and dist.get_backend() != "fake"
        self._group = dist.new_group(backend="gloo") if several else None

    def any(self, flag: bool) -> bool:
        """Whether a flag is set on any rank. Every rank must call it. Raises OtherRankFailed where another failed."""
        return any(self._exchange(flag))

    def agree(self, value: Any) -> bool:
        """Whether all ranks have the same value. Every rank must call it, as with `any`."""
        return all(other == value for other in self._exchange(value))

    def run(self, function: Callable[[], Result]) -> Result:
        """Call a function, and raise on every rank what it raised on one: OtherRankFailed on the others."""
        if self._group is None:
            return function()
        try:
            try:
                result = function()
            except OtherRankFailed:
                raise
            except Exception as error:
                self._report(error)
                raise
            self._exchange(False)
            return result
        finally:
            dist.destroy_process_group(self._group)

    def _report(self, error: Exception) -> None:
        """Report to the others what was raised here; where only a rank was missed, raise what that one says."""
        kind, text = type(error).__name__, str(error)
        own = (kind, text if text.startswith(rank()) else f"{rank()}: {kind}: {text}")
        failed = [other for other in self._exchange(own) if isinstance(other, tuple) and other != own]
        causes = [other for other in failed if other[0] not in _CONNECTION]
        if kind in _CONNECTION and causes:
            raise OtherRankFailed(*causes[0]) from error

    def _exchange(self, mine: Any) -> list[Any]:
        if self._group is None:
            return [mine]
        everyone: list[Any] = [None] * count()
        dist.all_gather_object(everyone, mine, group=self._group)
        failed = next((one for one in everyone if isinstance(one, tuple)), None)
        if failed is not None and not isinstance(mine, tuple):
            raise OtherRankFailed(*failed)
        return everyone
