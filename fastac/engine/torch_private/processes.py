"""Private names of torch for several processes: the store of all ranks. torch has no public way to ask for it."""

from __future__ import annotations

from typing import Any

import torch


def default_store() -> Any:
    """The store with which torch.distributed was initialized: all ranks see what one of them sets."""
    # The caller of init_process_group need not have a store of its own, and torch gives none out publicly.
    return torch.distributed.distributed_c10d._get_default_store()
