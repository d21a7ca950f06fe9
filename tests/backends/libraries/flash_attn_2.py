"""flash-attn 2.8.3.post2: its real Python layer and ops, also as builds from the hub have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fastac.backends import flash_attn_2
from tests.backends import flash_on_cpu, packages
from tests.backends.parity import LENGTHS, Case, Parity, swapped

packages.use("flash_attn_2")
library = flash_on_cpu.flash_attn_2()

NAMESPACES = {"flash_attn": library} | {
    namespace: flash_on_cpu.hub_build(namespace)
    for namespace in ("_flash_attn2_a005f70", "_flash_attn_9e27194", "_flash_attn_2_1a2b3c4_dirty")
}


def dense(build: Any) -> Callable[..., torch.Tensor]:
    return swapped(lambda q, k, v, p: build.flash_attn_func(q, k, v, dropout_p=p))


def packed(build: Any) -> Callable[..., torch.Tensor]:
    return lambda q, k, v, p: build.flash_attn_varlen_func(q, k, v, **LENGTHS, dropout_p=p)


@swapped
def kv_packed(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float) -> torch.Tensor:
    found: torch.Tensor = library.flash_attn_kvpacked_func(query, torch.stack([key, value], dim=2), dropout_p=dropout_p)
    return found


class TestFlashAttn2(Parity):
    cases = (
        *(
            Case(f"{namespace}::_flash_attn_forward", dense(build), way=namespace, heads=6, kv_heads=2, drops=True)
            for namespace, build in NAMESPACES.items()
        ),
        *(
            Case(f"{namespace}::_flash_attn_varlen_forward", packed(build), way=namespace, packed=True, drops=True)
            for namespace, build in NAMESPACES.items()
        ),
        Case("flash_attn::_flash_attn_forward", kv_packed, way="kvpacked", drops=True),
    )
    rows = flash_attn_2.ROWS
