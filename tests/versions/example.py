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
from diffusers import WanTransformer3DModel

import fastac
from fastac.engine.torch_private import missing
from tests import support


def model_and_inputs() -> tuple[Any, dict[str, torch.Tensor]]:
    """Two blocks of two attention calls."""
    torch.manual_seed(0)
    model = WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, text_dim=8, freq_dim=8, ffn_dim=16, num_layers=2
    ).train()
    inputs = {
        "hidden_states": torch.randn(1, 16, 2, 8, 8, requires_grad=True),
        "timestep": torch.tensor([500]),
        "encoder_hidden_states": torch.randn(1, 6, 8, requires_grad=True),
    }
    return model, inputs


def step(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[int, list[torch.Tensor | None]]:
    """Attention kernels of the second of two steps, and its output and gradients."""
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        leaves = {name: value.detach().requires_grad_(value.requires_grad) for name, value in inputs.items()}
        support.executions.clear()
        (output,) = model(**leaves, return_dict=False)
        output.square().mean().backward()
    return support.executions.total(), [output, *[value.grad for value in (*model.parameters(), *leaves.values())]]


def equal(found: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> bool:
    """Bit for bit, and a gradient where there is one."""
    pairs = list(zip(found, expected, strict=True))
    return all((a is None and b is None) or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def compiled_as_a_whole(policy: str) -> int | str:
    """Kernels of a step; or that it is refused, with the release that is needed."""
    torch._dynamo.reset()
    model, inputs = model_and_inputs()
    fastac.enable(model, policy)
    model.compile(backend="aot_eager")
    try:
        return step(model, inputs)[0]
    except Exception as error:
        if "needs torch" not in str(error):
            raise
        return "refused"


def private_names() -> tuple[int, list[str]]:
    """How many private names of torch fastac has, and which of them this torch does not."""
    found = set()
    for path in Path(fastac.__file__).parent.rglob("torch_private.py"):
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
    model, inputs = model_and_inputs()
    none, expected = step(model, inputs)
    kernels: dict[str, int] = {"none": none}
    exact: dict[str, bool] = {}
    ways: dict[str, Callable[[], None]] = {
        "full": model.enable_gradient_checkpointing,
        "attn_only": lambda: fastac.enable(model, policy="attn_only"),
    }
    for way, switch_on in ways.items():
        switch_on()
        kernels[way], found = step(model, inputs)
        exact[way] = equal(found, expected)
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
