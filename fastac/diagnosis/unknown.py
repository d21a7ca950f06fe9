"""What fastac does not know: ops and Functions that a region runs again, and rows that match no op.

Names have gaps: an attention with a neutral name is not recognized. It is in the list that this module makes.
"""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterable, Mapping

from fastac import backends, registry
from fastac.backends import opaque, plugins
from fastac.diagnosis.autograd_graph import Shapes
from fastac.diagnosis.recognition import has_attention_inputs
from fastac.engine import kinds, torch_private
from fastac.engine.tape import Tape
from fastac.registry import OPAQUE_NAMESPACE, AttentionOp, Row
from fastac.registry.torch_private import Op, name_of, op_names

logger = logging.getLogger("fastac")


def unknown_calls(where: str, functions: Iterable[type], ops: Mapping[Op, str]) -> list[str]:
    """Names of ops and autograd.Functions that a region runs again and that fastac does not know.

    Each is logged once, at level INFO.

    Args:
        where: the region's block.
        functions: the Functions.
        ops: the ops, with the module in the block that called each.
    """
    places = {name_of(op): f"in {where}.{at}" for op, at in ops.items()}
    places |= {function.__name__: f"of {function.__module__}, in {where}" for function in functions}
    for name, place in places.items():
        if kinds.is_first(f"unknown {name}"):
            logger.info("%s (%s) runs again in recompute: it has no row, and is not torch's", name, place.rstrip("."))
    return list(places)


def check_rows(foreign: Mapping[type, Shapes], tape: Tape) -> None:
    """Warn, once, of rows and Functions that match nothing, and of ops whose calls do not arrive where they should.

    Only rows and Functions of the user or of a plugin are looked at.

    Args:
        foreign: the Functions of a region that fastac does not know.
        tape: the tape of its forward.
    """
    # fastac's own rows are for many libraries, and most of these are not installed.
    loaded = [plugin for plugin in plugins.installed() if not plugin.problem]
    of_plugins = [row for plugin in loaded for row in plugin.rows]
    rows = [row for row in registry.rows() if isinstance(row, AttentionOp) and row.namespace != OPAQUE_NAMESPACE]
    rows = [row for row in rows if row not in backends.ROWS]
    bound = [op for op in registry.present_ops() if op.row in rows] if rows else []
    problems = [_unmatched(row, row in of_plugins) for row in rows if not any(op.row == row for op in bound)]
    problems += [opaque.missing(function) for plugin in loaded for function in plugin.functions]
    arrived = kinds.ops_called() | {op.qualified_name for op, _ in tape.attention_calls}
    waiting = [op for op in bound if op.differentiates and op.qualified_name not in arrived]
    # The autograd kernel of a torch.library.custom_op calls the op, so its calls arrive.
    waiting = [op for op in waiting if not torch_private.is_custom_op(name_of(op.op))]
    for op in waiting:
        for function, shapes in foreign.items():
            if has_attention_inputs(shapes):
                problems.append(
                    f"{op.name} has a row, and none of its calls arrived, while {function.__qualname__} of "
                    f"{function.__module__} runs again. If the op's autograd kernel applies that Function, and the "
                    f"Function launches the kernel itself: let it call the op (torch.library.register_autograd does)."
                )
    for problem in filter(None, problems):
        if kinds.is_first(problem):
            logger.warning("%s", problem)


def _unmatched(row: Row, is_of_plugin: bool) -> str:
    """A sentence on a row that matches no op; "" if a plugin's library may not be loaded."""
    names: dict[str, list[str]] = {}
    for qualified in op_names():
        namespace, _, name = qualified.partition(".")[0].partition("::")
        names.setdefault(namespace, []).append(name)
    there = [name for space, ops in names.items() if re.fullmatch(row.namespace, space) for name in ops]
    if not there and is_of_plugin:
        return ""
    close = difflib.get_close_matches(row.name, there, 1) or difflib.get_close_matches(row.namespace, names, 1)
    meant = f" Did you mean {close[0]!r}?" if close else " Was its library imported?" if not there else ""
    what = f"its namespace has no op {row.name!r}" if there else f"no op has the namespace {row.namespace!r}"
    return f"The row for {row.namespace}::{row.name} matches no op: {what}.{meant}"
