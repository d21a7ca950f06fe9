"""The errors that fastac raises, and words that messages use: of a rank, a module's class, a number of bytes."""

from __future__ import annotations

import sys

_ENGINES = ("FSDP", "DDP", "Replicate")
"""What `fully_shard` and `replicate` put before the name of a module's class."""


def rank() -> str:
    """Which of several processes this is, as "rank 0 of 2"; "" where there is one."""
    dist = sys.modules.get("torch.distributed")  # where nobody has loaded it, there is one
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return ""
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


def class_name(module: object) -> str:
    """The name of a module's class: of its own, where FSDP2 has derived one from it (FSDPWanTransformerBlock)."""
    kind = module if isinstance(module, type) else type(module)
    while len(kind.__bases__) == 2 and kind.__name__.removesuffix(kind.__bases__[1].__name__) in _ENGINES:
        kind = kind.__bases__[1]
    return kind.__name__


def readable_bytes(count: int) -> str:
    """A number of bytes for people, in powers of 1024."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated, on an accelerator or on the CPU."""
    return isinstance(error, MemoryError) or any(word in str(error).lower() for word in ("out of memory", "alloc"))


class FastacError(RuntimeError):
    """Base of every error that fastac raises on purpose. Among several processes its message names the rank."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.rank = rank()

    def __str__(self) -> str:
        return f"{self.rank}: {super().__str__()}" if self.rank else super().__str__()


class UnsupportedBackendError(FastacError):
    """The attention backend in use has no output that could be saved, or does not train."""


class PolicyNotAppliedError(FastacError):
    """An attention call that the policy saves was not saved."""


class CompiledPolicyNotAppliedError(PolicyNotAppliedError, IndexError):
    """The same, found while torch.compile traces a region.

    dynamo wraps what a backend raises into BackendCompilerFailed and lets IndexError alone pass as it is
    (torch 2.13); with this second base `except PolicyNotAppliedError` works for compiled models too.
    """
