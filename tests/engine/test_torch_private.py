"""Private names of torch: one that went away is named by the error at import, and nothing is patched without need."""

from __future__ import annotations

import subprocess
import sys

import torch


def test_import_without_a_private_name_of_torch_names_it() -> None:
    code = "import torch; del torch._C._dispatch_keyset_full_after; import fastac; fastac.enable"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: fastac needs torch._C._dispatch_keyset_full_after")
    assert torch.__version__ in last


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
