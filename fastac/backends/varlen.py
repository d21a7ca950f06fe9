"""torch.nn.attention.varlen (torch 2.13). Its variant with an `out` argument writes that argument and has no row."""

from fastac.backends.verdicts import Library, Verdict
from fastac.registry import AttentionOp, Flops

LIBRARY = Library(backend="varlen", name="torch.nn.attention.varlen", verdict=Verdict.SAVABLE, how="its op")

ROWS = (
    AttentionOp(
        backend="varlen",
        namespace="torch_attn",
        name="_varlen_attn",
        layout="thd",
        max_kv="max_k",
        dropout=None,
        flops=Flops(backward="_varlen_attn_backward", offsets=("cu_seq_q", "cu_seq_k")),
    ),
)
