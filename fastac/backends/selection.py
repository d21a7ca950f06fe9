"""Ops that choose blocks in sparse attention (VSA, VMoBA, SLA, NABLA, LongCat) and experts in routers.

argsort ends in sort.
"""

from fastac.registry import Row

ROWS = (Row(namespace="aten", name="topk", kind="choice"), Row(namespace="aten", name="sort", kind="choice"))
