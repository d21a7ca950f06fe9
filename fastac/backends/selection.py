"""What sparse attention chooses its blocks with: VSA, VMoBA, SLA, NABLA, LongCat, and routers of experts as well.

argsort ends in sort.
"""

from functools import partial

from fastac.rows import SelectionOp

_row = partial(SelectionOp, namespace="aten")

ROWS = (_row(name="topk", keeps_values=False), _row(name="sort", keeps_values=True))
