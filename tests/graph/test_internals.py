"""Private names of torch that fastac.graph uses."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fastac.graph import internals


def test_this_torch_has_every_name() -> None:
    assert internals.missing() == []
    assert torch.__version__.startswith(internals.SEEN_IN)


@pytest.mark.parametrize("name", ["_functorch.partitioners.min_cut_rematerialization_partition"])
def test_import_without_one_of_them_names_it(name: str) -> None:
    owner, _, attribute = name.rpartition(".")
    code = f"import torch, torch._functorch.partitioners; del torch.{owner}.{attribute}; import fastac.graph.internals"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: fastac.graph needs torch." + name)
