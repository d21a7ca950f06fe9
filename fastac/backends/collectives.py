"""What is saved beside attention: torch's functional collectives (torch 2.13), and choices of blocks and of experts.

Recompute does not communicate again. Ops are sorted by what they do, not by namespace. Gathers are not saved:
SimpleFSDP gathers parameters with the same op that sequence parallelism uses for activations, and saving it would keep
unsharded weights alive. Ops of `c10d::`, and those that end in `_` or `_out`, have no row: they write a buffer of the
caller, which a replay would not write.
"""

from fastac.registry import Row

_EXCHANGES = (
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all_single",
    "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced",
)
_GATHERS = ("all_gather_into_tensor", "all_gather_into_tensor_coalesced", "broadcast")

ROWS = (
    # Sparse attention (VSA, VMoBA, SLA, NABLA, LongCat) and routers choose by these; argsort ends in sort. Scores may
    # differ in their last bits in recompute. Another choice of blocks would meet outputs that were saved for the first
    # choice, and gradients would be wrong.
    Row(namespace="aten", name="topk", kind="choice"),
    Row(namespace="aten", name="sort", kind="choice"),
    *(Row(namespace="_c10d_functional", name=name, kind="exchange") for name in _EXCHANGES),
    *(Row(namespace="_c10d_functional", name=name, kind="gather") for name in _GATHERS),
    # Its result is an alias of its input, so saving it would save nothing more.
    Row(namespace="_c10d_functional", name="wait_tensor", kind="wait"),
    # Differentiable variants. Their kernels call the ops above without the dispatcher.
    Row(namespace="_c10d_functional_autograd", name="all_to_all_single", kind="exchange"),
    Row(namespace="_c10d_functional_autograd", name="reduce_scatter_tensor", kind="exchange"),
    Row(namespace="_c10d_functional_autograd", name="all_gather_into_tensor", kind="gather"),
    # It moves a shard to another dimension, so it returns no more than its input.
    Row(namespace="_dtensor", name="shard_dim_alltoall", kind="exchange"),
)
