"""Ops that choose blocks in sparse attention (VSA, VMoBA, SLA, NABLA, LongCat) and experts in routers.

argsort ends in sort.
"""

from fastac.registry import Row

# Scores may differ in their last bits in recompute. Another choice of blocks would meet outputs that were saved for
# the first choice, and gradients would be wrong.
ROWS = (Row(namespace="aten", name="topk", kind="choice"), Row(namespace="aten", name="sort", kind="choice"))
