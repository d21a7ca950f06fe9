"""One step of a function, as autograd sees it, and the modes under which it must be the same."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from fastac.backends.plugins import prepare
from fastac.diagnosis.observer import Observer, PassThrough
from fastac.engine.tape import Tape
from fastac.policy import resolve
from tests.support import run_checkpointed, written_out
from tests.torch_data import churn, dense, fresh, same_bits

Found = dict[str, Any]
"""What a step left: tensors and descriptions, by name."""

Mode = Callable[[Any], AbstractContextManager[Any]]
"""Made of the inputs of a function, to be open while it runs."""


def nothing(inputs: Any) -> AbstractContextManager[Any]:
    return contextlib.nullcontext()


def pass_through(inputs: Any) -> AbstractContextManager[Any]:
    return PassThrough()  # type: ignore[no-untyped-call]


prepare_once = functools.cache(prepare)


@contextlib.contextmanager
def observer(inputs: Any) -> Iterator[None]:
    """What is open in the first region of a kind."""
    prepare_once()
    tape = Tape(resolve("attn_only"), True, [])
    with tape, Observer(None, inputs, tape):
        yield


MODES: dict[str, Mode] = {"PassThrough": pass_through, "Observer": observer}


def step(function: Callable[..., Any], values: Any, mode: Mode = nothing) -> Found | Exception:
    """A forward of function(*args, **kwargs) while the mode is open, and a backward. values: (args, kwargs)."""
    saved: list[tuple[torch.Tensor, int | None]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append((tensor, version_of(tensor)))  # no op, which the mode would see
        return tensor

    def forward(*args: Any, **kwargs: Any) -> Any:
        with saved_tensors_hooks(pack, lambda tensor: tensor), mode((args, kwargs)):
            return function(*args, **kwargs)

    def describe_saved() -> Found:
        writes = [None if then is None else tensor._version - then for tensor, then in saved]
        # Not at which version: a kernel of torch that fills a new tensor counts that, except under a mode.
        found = tensors_by_name("saved", [tensor for tensor, _ in saved], has_versions=False)
        return found | {"writes after it was saved": writes}

    return _outcome(forward, values, describe_saved)


def regions(function: Callable[..., Any], values: Any, policy: str) -> Iterator[Found | Exception]:
    """The same of two regions, which pack no tensor outside. Under a policy of fastac the first is observed."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return run_checkpointed(function, *args, policy=policy, **kwargs)

    for _ in range(2):
        yield _outcome(forward, values, dict)


def _outcome(forward: Callable[..., Any], values: Any, describe_saved: Callable[[], Found]) -> Found | Exception:
    try:
        torch.default_generator.manual_seed(0)  # torch.manual_seed takes as long as most ops
        return _trained(forward, values, describe_saved)
    except Exception as error:
        return error.with_traceback(None)


def _trained(forward: Callable[..., Any], values: Any, describe_saved: Callable[[], Found]) -> Found:
    leaves, structure = tree_flatten(fresh(values))
    args, kwargs = tree_unflatten(leaves, structure)
    outputs = tree_leaves(forward(*args, **kwargs))
    tensors = [one for one in outputs if isinstance(one, torch.Tensor)]
    roots = [one for one in tensors if one.requires_grad]
    found = {
        "generator": torch.get_rng_state(),
        "other outputs": [repr(one) for one in outputs if not isinstance(one, torch.Tensor)],
        "graph": nodes_of(roots),
        **tensors_by_name("output", tensors),
        **tensors_by_name("input", leaves),
        **describe_saved(),
    }
    trained = [one for one in leaves if isinstance(one, torch.Tensor) and one.requires_grad]
    if roots and trained:
        roots = [dense(one) for one in roots]
        gradients = torch.autograd.grad(roots, trained, [torch.randn_like(one) for one in roots], allow_unused=True)
        found |= tensors_by_name("gradient", gradients)
    return found


def tensors_by_name(name: str, values: Any, has_versions: bool = True) -> Found:
    """Copies of tensors, and what is known of each beside its values."""
    found: Found = {}
    for number, one in enumerate(values):
        if isinstance(one, torch.Tensor):
            strided = one.layout is torch.strided
            found[f"{name} {number}"] = dense(one.detach()).clone()
            found[f"{name} {number} is"] = {
                "shape": one.shape,
                "dtype": one.dtype,
                "layout": one.layout,
                "stride": one.stride() if strided else None,
                "offset": one.storage_offset() if strided else None,
                "version": version_of(one) if has_versions else None,
                "requires grad": one.requires_grad,
                "a leaf": one.is_leaf,
                "a view": one._is_view(),
                "conjugate": one.is_conj(),
                "negative": one.is_neg(),
                "an inference tensor": one.is_inference(),
            }
        else:
            found[f"{name} {number} is"] = type(one).__name__
    return found


def version_of(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def nodes_of(roots: list[torch.Tensor]) -> list[str]:
    """Names of all nodes of a graph, in the order of a walk through it."""
    names, seen, left = [], set(), [one.grad_fn for one in roots]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names.append(node.name().replace("ReshapeAlias", "View"))  # while a mode is open, reshape calls view
            left += [following for following, _ in node.next_functions]
    return names


def differences(found: Found | Exception, expected: Found | Exception) -> list[str]:
    """What differs between two steps."""
    if isinstance(found, Exception) or isinstance(expected, Exception):
        same = type(found) is type(expected) and str(found) == str(expected)
        return [] if same else [f"{_brief(found)}, not {_brief(expected)}"]
    different = []
    for name in [*expected, *(found.keys() - expected.keys())]:
        one, other = found.get(name), expected.get(name)
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
            different += [] if same_bits(one, other) else [name]
        elif isinstance(one, dict) and isinstance(other, dict):
            different += [f"{name} {key}: {one[key]}, not {other[key]}" for key in other if one[key] != other[key]]
        elif type(one) is not type(other) or one != other:
            different.append(f"{name}: {one}, not {other}")
    return different


def _brief(found: Found | Exception) -> str:
    return repr(found)[:200] if isinstance(found, Exception) else "no error"


def changed_by(modes: dict[str, Mode], function: Callable[..., Any], values: Any) -> dict[str, list[str]] | None:
    """What differs under each of some modes; None where steps without a mode differ among themselves."""
    expected = step(function, values)
    if differences(step(function, values), expected):
        return None
    changed = {}
    for name, mode in modes.items():
        changed[name] = differences(step(function, values, mode), expected)
        if changed[name] and any(differences(step(function, values), expected) for _ in range(50) if churn()):
            return None
    return changed


# Attention that no op shows


class PastTheDispatcher(torch.autograd.Function):
    """Attention by numpy: no op of torch, as a kernel behind ctypes or pybind. Its name does not say attention."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(q, k, v)
        a, b, c = (t.detach().numpy() for t in (q, k, v))
        weights = np.exp(np.einsum("bhqd,bhkd->bhqk", a, b) * a.shape[-1] ** -0.5)
        return torch.from_numpy(np.einsum("bhqk,bhkd->bhqd", weights / weights.sum(-1, keepdims=True), c))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            return torch.autograd.grad(written_out(*leaves), leaves, grad)


class HiddenAttention(PastTheDispatcher):
    """The same, but its name says attention."""
