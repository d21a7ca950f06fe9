"""One file per attention library: rows, and at most one small adapter. Importing this package registers them."""

from fastac import registry
from fastac.backends import diffusers, sdpa

registry.register(*sdpa.ROWS)
registry.register_reader(diffusers.backend_uses)
