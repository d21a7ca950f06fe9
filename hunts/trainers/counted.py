"""Run a script in this process, and say at its end where torch's CPU attention kernel ran: docs/trainers.md.

accelerate launch -m hunts.trainers.counted SCRIPT [its arguments]
"""

from __future__ import annotations

import runpy
import sys
from collections import Counter
from typing import Any

import torch

from tests.support import CPU_ATTENTION


def main() -> None:
    ran: Counter[str] = Counter()
    kernel = torch.library.get_kernel(CPU_ATTENTION, "CPU")

    def counted(keyset: Any, *args: Any, **kwargs: Any) -> Any:
        in_backward = torch._C._current_graph_task_id() != -1
        where = "in backward" if in_backward else "in forward" if torch.is_grad_enabled() else "without gradients"
        ran[f"{where}, over {args[1].shape[-2]} keys"] += 1
        return kernel.call_boxed(keyset, *args, **kwargs)

    library = torch.library.Library("aten", "IMPL")
    library.impl(CPU_ATTENTION.partition("::")[2], counted, "CPU", with_keyset=True, allow_override=True)
    sys.argv = sys.argv[1:]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    finally:
        for where, count in sorted(ran.items()):
            print(f"attention {where}: {count}", flush=True)


if __name__ == "__main__":
    main()
