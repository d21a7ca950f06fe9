"""Private names of torch: one that went away is named by the error at import, and nothing is patched without need."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from typing import Any

import torch

import fastac
from fastac.engine.tape import engine


def test_import_without_a_private_name_of_torch_names_it() -> None:
    code = "import torch; del torch._C._dispatch_keyset_full_after; import fastac; fastac.enable"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: fastac needs torch._C._dispatch_keyset_full_after")
    assert torch.__version__ in last


def test_torchs_checkpoint_may_be_replaced_before() -> None:
    """By what trainers give it a default with."""
    code = """if True:
        import functools, torch, torch.utils.checkpoint as checkpointing
        checkpointing.checkpoint = functools.partial(checkpointing.checkpoint, use_reentrant=False)
        import fastac
        query = torch.randn(1, 2, 6, 4, requires_grad=True)
        fastac.checkpoint(torch.nn.functional.scaled_dot_product_attention, query, query, query).sum().backward()
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nothing_stays_of_a_forward_that_raised() -> None:
    """Without a collection: the batch that did not fit is skipped, and the next one needs its memory."""
    held: list[Any] = []

    def block(x: torch.Tensor) -> None:
        large = torch.tanh(x * 2)
        held.append(weakref.ref(large))
        raise torch.OutOfMemoryError

    gc.disable()
    try:
        try:
            fastac.checkpoint(block, torch.ones(3, requires_grad=True))
        except torch.OutOfMemoryError:  # it is alive here, and so is what it came by
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            assert engine.thread.scope is None
        assert held[0]() is None
    finally:
        gc.enable()


def test_outputs_and_gradients_of_a_kernel_that_is_intercepted() -> None:
    """Compared with a process in which nothing is, and which did not import fastac."""
    code = """if True:
        import sys, torch, torch.nn.functional as F
        if sys.argv[1] == "intercepted":
            import fastac
            fastac.checkpoint(F.scaled_dot_product_attention, *torch.randn(3, 1, 2, 6, 4).requires_grad_())
        torch.set_num_threads(1)
        generator = torch.Generator().manual_seed(0)
        tensors = [torch.randn(1, 2, 6, 4, generator=generator).requires_grad_() for _ in range(3)]
        out = F.scaled_dot_product_attention(*tensors)
        out.square().sum().backward()
        print([t.flatten().tolist() for t in (out, *[t.grad for t in tensors])])
    """
    run = [sys.executable, "-c", code]
    outputs = [subprocess.check_output([*run, how], text=True) for how in ("intercepted", "plain")]
    assert outputs[0] == outputs[1]
