"""What sparse attention chooses its blocks with: VSA, VMoBA, SLA, NABLA, LongCat, and routers of experts as well.

argsort ends in sort.
"""

from fastac.registry import Row

ROWS = (Row(namespace="aten", name="topk", kind="choice"), Row(namespace="aten", name="sort", kind="choice"))
