"""What fastac raises. A message says what was asked, where, what was seen, and what to do."""

from fastac import ranks


class FastacError(RuntimeError):
    """Base of every error that fastac raises on purpose. Among several processes its message names the rank."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.rank = ranks.name()

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
