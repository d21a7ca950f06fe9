"""fastac where diffusers is not installed: in a process that cannot import it, nor einops."""

from __future__ import annotations

import subprocess
import sys

import pytest

STEPS = """if True:
    import sys, torch
    sys.modules |= {"diffusers": None, "einops": None}
    import fastac
    from fastac import cli

    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    layer.processor = print  # as attention modules of diffusers have one
    model = torch.nn.TransformerEncoder(layer, 2)
    x = torch.randn(1, 16, 8, requires_grad=True)
    fastac.enable(model, blocks="layers")
    model(x).sum().backward()
    print(sum(row.saved for row in fastac.report(model).rows))
    print(fastac.verify(model, x).saved)
    print(len(fastac.plan(model, {"src": x}, blocks="layers").policies) > 3)
    assert cli.main(["backends"]) == 0
    assert cli.main(["plan", "wan2.1-t2v-1.3b", "--frames", "5", "--height", "64", "--width", "64"]) == 1
"""


@pytest.mark.slow
def test_enable_verify_report_plan_and_the_commands() -> None:
    done = subprocess.run([sys.executable, "-c", STEPS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:3] == ["2", "2", "True"]
    assert "pip install 'diffusers>=0.33'" in done.stderr
