"""What fastac raises. A message says what was asked, where, what was seen, and what to do."""


class FastacError(RuntimeError):
    """Base of every error that fastac raises on purpose."""


class UnsupportedBackendError(FastacError):
    """The attention backend in use has no output that could be saved, or does not train."""


class PolicyNotAppliedError(FastacError):
    """An attention call that the policy saves was not saved."""


class CompiledPolicyNotAppliedError(PolicyNotAppliedError, IndexError):
    """The same, found while torch.compile traces a region.

    dynamo wraps what a backend raises into BackendCompilerFailed and lets IndexError alone pass as it is
    (torch 2.13); with this second base `except PolicyNotAppliedError` works for compiled models too.
    """
