"""One file per attention library: rows, and at most one small adapter. Importing this package registers them.

It gives what is asked about the backends that modules of a model use.
"""

from fastac import registry
from fastac.backends import (
    collectives,
    diffusers,
    fastvideo,
    flash_attn_2,
    flash_attn_3,
    flash_attn_4,
    flex,
    opaque,
    sage,
    sdpa,
    varlen,
    xformers,
)
from fastac.backends.diffusers import backend_uses as backend_uses
from fastac.backends.diffusers import check_backends as check_backends
from fastac.backends.diffusers import ignored_backends as ignored_backends
from fastac.engine.process import process

LIBRARIES = (
    sdpa.LIBRARY,
    varlen.LIBRARY,
    flex.LIBRARY,
    flash_attn_2.LIBRARY,
    flash_attn_3.LIBRARY,
    flash_attn_4.LIBRARY,
    xformers.LIBRARY,
    *fastvideo.LIBRARIES,
    sage.LIBRARY,
)
"""The libraries in `fastac backends` and docs/backends.md, in their order."""

# flash_attn_4 is not among them: its kernels are no ops, so it has Functions and no rows.
_attention = (sdpa, varlen, flex, flash_attn_2, flash_attn_3, xformers, fastvideo, sage, diffusers)
ROWS = tuple(row for file in (*_attention, collectives) for row in file.ROWS)
registry.register(*ROWS)
# This imports no library: a Function becomes visible once its module is loaded.
opaque.know(*flash_attn_4.FUNCTIONS, *fastvideo.FUNCTIONS)
process.settings["diffusers' attention_backend was"] = diffusers.default_backend
