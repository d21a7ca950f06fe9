"""Ranks that use the same values, by torch's store.

Unlike a collective, it leaves nothing behind if a rank does not come.
"""

from __future__ import annotations

import hashlib
import json
import logging
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fastac.engine import torch_private
from fastac.errors import rank

logger = logging.getLogger("fastac")

WAIT = timedelta(minutes=5)
"""How long a rank waits for the others, which may read data or compile meanwhile."""


class Ranks:
    """All ranks of this process's group. subject: what they talk about; all use the same words."""

    def __init__(self, subject: str) -> None:
        self.subject = subject
        # torch's "fake" backend simulates ranks that do not exist: nobody would answer.
        self._communicates = bool(rank()) and dist.get_backend() != "fake"

    def of_all(self, what: str, value: Any) -> list[Any]:
        """The value of each rank; this rank's own alone if not all of them come: then it asks no more."""
        if not self._communicates:
            return [value]
        store = torch_private.default_store()
        keys = [f"fastac/{self.subject} {what}/{number}" for number in range(dist.get_world_size())]
        try:
            store.set(keys[dist.get_rank()], json.dumps(value))
            store.wait(keys, WAIT)
            return [json.loads(store.get(key)) for key in keys]
        except (RuntimeError, ValueError) as error:
            self._communicates = False
            problem = str(error).partition("\n")[0]
            logger.warning('policy "auto": not all ranks came to compare their %s: %s', what, problem)
            return [value]

    def first(self, what: str, value: Any) -> Any:
        """The value of the rank that was the first to call this with the same words. It waits for nobody."""
        if not self._communicates:
            return value
        name = hashlib.sha256(what.encode()).hexdigest()
        key = f"fastac/{self.subject} {name}"
        return json.loads(torch_private.default_store().compare_set(key, "", json.dumps(value)))
