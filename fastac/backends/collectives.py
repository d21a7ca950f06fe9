"""torch's functional collectives (torch 2.13): what saves communication in recompute, and what must not be saved.

By what an op does, not by its namespace. FSDP by parametrization (SimpleFSDP) gathers parameters with the same op that
sequence parallelism gathers activations with: saving it pins the unsharded weights. The ops of `c10d::`, and those that
end in `_` or `_out`, write a buffer of the caller's: replaying them would leave it unwritten.
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
    *(Row(namespace="_c10d_functional", name=name, kind="exchange") for name in _EXCHANGES),
    *(Row(namespace="_c10d_functional", name=name, kind="gather") for name in _GATHERS),
    Row(namespace="_c10d_functional", name="wait_tensor", kind="wait"),
    # With a derivative: their kernels call those above past the dispatcher.
    Row(namespace="_c10d_functional_autograd", name="all_to_all_single", kind="exchange"),
    Row(namespace="_c10d_functional_autograd", name="reduce_scatter_tensor", kind="exchange"),
    Row(namespace="_c10d_functional_autograd", name="all_gather_into_tensor", kind="gather"),
    Row(
        namespace="_dtensor", name="shard_dim_alltoall", kind="exchange"
    ),  # DTensor's, of one sharded dimension to another
)
