"""Errors of fastac, and what their messages are made of: a rank, a module's class, bytes, the name that was meant."""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable
from fractions import Fraction

import torch

_ENGINES = ("FSDP", "DDP", "Replicate")
"""Prefixes that `fully_shard` and `replicate` give to the name of a module's class."""

_NO_MEMORY = (
    "out of memory",
    "allocate memory",
    "cpuallocator",
    "alloc_failed",
    "bad_alloc",
    "allocation failed",
    "not enough memory",
)
"""What errors of torch and of libraries of kernels say if memory runs out."""


def rank() -> str:
    """The rank of this process, as "rank 0 of 2"; "" if there is one process."""
    dist = sys.modules.get("torch.distributed")  # if it is not loaded, there is one process
    if dist is None or not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1:
        return ""
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


def class_name(module: object) -> str:
    """The name of a module's class, without the class that FSDP2 derives from it (FSDPWanTransformerBlock)."""
    return class_before(module).__name__


def class_before(module: object) -> type:
    """The class of a module, before FSDP2 or `replicate` derived another class from it."""
    cls = module if isinstance(module, type) else type(module)
    while len(cls.__bases__) == 2 and cls.__name__.removesuffix(cls.__bases__[1].__name__) in _ENGINES:
        cls = cls.__bases__[1]
    return cls


def readable_bytes(count: int) -> str:
    """A number of bytes for people, in powers of 1024."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def parse_bytes(text: str | int) -> int:
    """A number of bytes: "24GiB" (24 * 2**30), "24 GB" (24 * 10**9), "1.5GiB", or a number. Raises FastacError."""
    if isinstance(text, int) and not isinstance(text, bool) and text >= 0:
        return text
    if text == "0":  # the unit does not matter
        return 0
    # Decimals need a prefix: "1.5GiB" is a number of bytes, "1.5B" is not.
    pattern = r"\s*([0-9]+(?:\.[0-9]+(?=\s*[kmgt]))?)\s*(?:([kmgt])(i?))?b\s*"
    match = re.fullmatch(pattern, text.lower()) if isinstance(text, str) else None
    if match is None:
        raise FastacError(
            f'{text!r}: expected bytes with their unit, as in "512MiB", "24GiB" (2**30 each) or "24GB" (10**9); in '
            f"Python a whole number needs no unit"
        )
    number, prefix, binary = match.groups()
    return int(Fraction(number) * (1024 if binary else 1000) ** " kmgt".index(prefix or " "))


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """The text ' Did you mean "attn_only"?' with the choice that is closest to an unknown name; "" if none is."""
    lowered = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(name.lower(), lowered, n=1)
    return f' Did you mean "{lowered[close[0]]}"?' if close else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory could not be allocated, on an accelerator or on the CPU."""
    said = str(error).lower()
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(words in said for words in _NO_MEMORY)


class FastacError(RuntimeError):
    """Base of every error that fastac raises on purpose.

    Its message begins with the rank, if there are several processes, and with the block whose recompute raised it.
    """

    def __init__(self, message: str, block: str = "") -> None:
        super().__init__(message)
        self.rank = rank()
        self.block = block

    def __str__(self) -> str:
        message = RuntimeError.__str__(self)  # not super(): a subclass that is also a KeyError would quote the message
        return ": ".join(filter(None, (self.rank, self.block, message)))


class NothingFitsError(FastacError, torch.OutOfMemoryError):
    """A training step takes more memory than there is. It is torch's error, too, for those who catch that."""


class UnsupportedBackendError(FastacError):
    """The attention backend in use has no output that can be saved, or does not train."""


class PolicyNotAppliedError(FastacError):
    """An attention call that the policy saves was not saved."""


class CompiledPolicyNotAppliedError(PolicyNotAppliedError, IndexError):
    """A PolicyNotAppliedError that is raised while torch.compile traces a region.

    dynamo wraps errors of a compiler into BackendCompilerFailed, except for IndexError (torch 2.13). With this second
    base, `except PolicyNotAppliedError` works for compiled models too.
    """
