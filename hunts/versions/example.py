"""What README promises, on the torch and diffusers that run this: prints it as JSON.

Kernels count themselves, in the second step of each way.
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fastac
from fastac.engine.torch_private.names import missing
from tests import support

WAN = "WanTransformer3DModel"


def second_step(model: Any, inputs: dict[str, Any]) -> tuple[int, support.Tensors]:
    """Attention kernels of the second of two steps, and its outputs and gradients."""
    support.train_step(model, inputs)
    support.executions.clear()
    tensors = support.train_step(model, inputs)
    return support.executions.total(), tensors


def is_same(found: support.Tensors, expected: support.Tensors) -> bool:
    try:
        support.assert_same(found, expected)
    except AssertionError:
        return False
    return True


def compiled_as_a_whole(policy: str) -> int | str:
    """Kernels of a step; or that it is refused, with the release that is needed."""
    torch._dynamo.reset()
    model, inputs = support.build(WAN)
    fastac.enable(model, policy)
    model.compile(backend="aot_eager")
    try:
        return second_step(model, inputs)[0]
    except Exception as error:
        if "needs torch" not in str(error):
            raise
        return "refused"


def private_names() -> tuple[int, list[str]]:
    """How many private names of torch fastac has, and which of them this torch does not."""
    found = set()
    for path in Path(fastac.__file__).parent.rglob("*.py"):
        if "torch_private" not in (path.stem, path.parent.name):
            continue
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        imported = [alias for node in nodes if isinstance(node, ast.Import) for alias in node.names]
        modules = {alias.asname: alias.name for alias in imported if alias.asname}
        for node in nodes:
            if isinstance(node, ast.Attribute):
                first, _, rest = ast.unparse(node).partition(".")
                found.add(f"{modules.get(first, first)}.{rest}")
            elif isinstance(node, ast.ImportFrom):
                found |= {f"{node.module}.{alias.name}" for alias in node.names}
    private = {name for name in found if name.startswith("torch.") and "._" in name}
    whole = [name for name in private if not any(other.startswith(name + ".") for other in private)]
    return len(whole), missing(sorted(name.removeprefix("torch.") for name in whole))


def main() -> None:
    logging.disable(logging.WARNING)
    support.count_cpu_attention()
    model, inputs = support.build(WAN)  # two blocks of two attention calls
    none, expected = second_step(model, inputs)
    kernels: dict[str, int] = {"none": none}
    exact: dict[str, bool] = {}
    ways: dict[str, Callable[[], None]] = {
        "full": model.enable_gradient_checkpointing,
        "attn_only": lambda: fastac.enable(model, policy="attn_only"),
    }
    for way, switch_on in ways.items():
        switch_on()
        kernels[way], tensors = second_step(model, inputs)
        exact[way] = is_same(tensors, expected)
    names, absent = private_names()
    found = {
        "torch": torch.__version__,
        "diffusers": importlib.metadata.version("diffusers"),
        "python": ".".join(map(str, sys.version_info[:3])),
        "kernels": kernels,
        "exact": exact,
        "compiled": {policy: compiled_as_a_whole(policy) for policy in ("full", "attn_only")},
        "private": names,
        "absent": absent,
    }
    print("RESULT " + json.dumps(found))


if __name__ == "__main__":
    main()
