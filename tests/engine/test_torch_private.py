"""Private names of torch: one that went away is named by the error at import, and nothing is patched without need."""

from __future__ import annotations

import subprocess
import sys

import torch

from fastac.engine import region


def test_import_without_a_private_name_of_torch_names_it() -> None:
    code = "import torch; del torch._C._dispatch_keyset_full_after; import fastac; fastac.enable"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: fastac needs torch._C._dispatch_keyset_full_after")
    assert torch.__version__ in last


UNTOUCHED = """
attend = torch.nn.functional.scaled_dot_product_attention
fastac.checkpoint(attend, *[torch.ones(1, 1, 2, 2, requires_grad=True)] * 3).sum().backward()
assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::addmm", "BackendSelect")
"""
"""A product of a process whose policies save none is as fast as before."""


def test_import_takes_a_replaced_checkpoint() -> None:
    """Trainers give torch's checkpoint a default, by a function in its place."""
    replaced = "checkpointing.checkpoint = functools.partial(checkpointing.checkpoint, use_reentrant=False)"
    code = f"import functools, torch, torch.utils.checkpoint as checkpointing; {replaced}; import fastac\n{UNTOUCHED}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hooks_have_the_names_of_torch_s() -> None:
    """By these a region knows torch's checkpoint around it, and diagnosis fastac's from the user's hooks."""
    hooks = region.Region._checkpoint_hook, region._Recompute._recomputation_hook
    for hook, name in zip(hooks, ("_checkpoint_hook", "_recomputation_hook"), strict=True):
        theirs = getattr(torch.utils.checkpoint, name)
        assert theirs.__name__ in hook.__qualname__
        assert issubclass(theirs, torch.autograd.graph.saved_tensors_hooks)
