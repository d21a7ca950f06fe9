"""Plugins: installed packages that bring rows by their entry points, and those that are broken.

A package is found where Python looks for packages, and rows stay for the process: a process of its own runs it all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

KERNEL = '''
"""An attention kernel as an op, and the same kernel that only an autograd.Function knows. Both count executions."""

import torch

from tests.support import attention_math, attention_math_backward

executions = {"op": 0, "opaque": 0}


def attend(query, key, value, counted):
    executions[counted] += 1
    return attention_math(query, key, value)


@torch.library.custom_op("attention_plugin::attention", mutates_args=())
def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return attend(query, key, value, "op")


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        output, statistics = attention(query, key, value)
        ctx.save_for_backward(query, key, value, output, statistics)
        return output

    @staticmethod
    def backward(ctx, grad):
        return attention_math_backward(grad, *ctx.saved_tensors)


class OpaqueAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        output, statistics = attend(query, key, value, "opaque")
        ctx.save_for_backward(query, key, value, output, statistics)
        return output

    @staticmethod
    def backward(ctx, grad):
        return attention_math_backward(grad, *ctx.saved_tensors)
'''

GOOD = {
    "__init__.py": "",
    "kernel.py": KERNEL,
    "fastac_rows.py": """
        from fastac import AttentionOp, OpaqueFunction

        ROWS = (
            AttentionOp(
                backend="plugin", namespace="attention_plugin", name="attention", layout="bhsd", dropout=None
            ),
        )
        FUNCTIONS = (
            OpaqueFunction(
                backend="plugin", module="attention_plugin.kernel", name="OpaqueAttention", key="key", layout="bhsd",
                dropout=None,
            ),
        )
    """,
    "more_rows.py": """
        import torch

        import fastac
        from fastac import AttentionOp

        def row(name):
            return AttentionOp(backend="more", namespace="attention_plugin", name=name)

        TWO = [row("second"), row("third")]

        def rows():
            fastac.checkpoint(torch.sin, torch.ones(1, requires_grad=True))  # a plugin that uses fastac itself
            yield row("fourth")
    """,
}
GOOD_ENTRY_POINTS = {
    "a_module": "attention_plugin.fastac_rows",
    "an_iterable": "attention_plugin.more_rows:TWO",
    "a_function": "attention_plugin.more_rows:rows",
}

BROKEN = {
    "__init__.py": """
        from fastac import AttentionOp

        def row(name, **options):
            return AttentionOp(backend="broken", namespace="broken_plugin", name=name, **options)
    """,
    "no_import.py": "import a_library_that_was_uninstalled",
    "exits.py": "raise SystemExit('no GPU')",
    "rows.py": """
        from broken_plugin import row
        from fastac import OpaqueFunction

        TEXTS = (row("before_a_text"), "text")
        FUNCTION = (
            row("before_a_function"), OpaqueFunction(backend="broken", module="x", name="F", layout="sideways")
        )

        def raises():
            yield row("before_it_raises")
            raise KeyError("of its own")
    """,
}
REASONS = {
    "no_import": ("broken_plugin.no_import", "No module named 'a_library_that_was_uninstalled'"),
    "exits": ("broken_plugin.exits", "no GPU"),
    "no_attribute": ("broken_plugin.rows:ROWS_AND_ROWS", "ROWS_AND_ROWS"),
    "texts": ("broken_plugin.rows:TEXTS", "str"),
    "function": ("broken_plugin.rows:FUNCTION", "'sideways'"),
    "raises": ("broken_plugin.rows:raises", "of its own"),
}
"""Entry point -> what it names, and what is said of it. The well-formed rows beside are not registered either."""

PROGRAM = """
    import contextlib
    import io
    import json
    import logging
    import sys

    import fastac

    logged = []
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: logged.append(record.getMessage())
    logging.getLogger("fastac").addHandler(handler)
    early = [name for name in sys.modules if name.partition(".")[0] in ("attention_plugin", "broken_plugin")]

    import torch

    def is_registered(namespace, name):
        try:
            fastac.register(fastac.AttentionOp(backend="mine", namespace=namespace, name=name))
        except fastac.FastacError as error:
            return "already" in str(error)
        return False

    from attention_plugin import kernel

    def step(function, counted, policy):
        torch.manual_seed(0)
        weight = torch.randn(8, 8, requires_grad=True)
        inputs = torch.randn(1, 2, 16, 8, requires_grad=True)

        def block(x):
            return torch.tanh(function(torch.tanh(x @ weight), torch.sin(x), torch.cos(x)))

        kernel.executions[counted] = 0
        output = block(inputs) if policy == "none" else fastac.checkpoint(block, inputs, policy=policy)
        (output * torch.linspace(-1, 1, 8)).sum().backward()
        return kernel.executions[counted], [inputs.grad, weight.grad]

    executions, equal = {}, []
    for function, counted in ((kernel.Attention.apply, "op"), (kernel.OpaqueAttention.apply, "opaque")):
        ran = []
        for policy in ("none", "full", "attn_only", "attn_only"):
            count, found = step(function, counted, policy)
            expected = found if policy == "none" else expected
            ran.append(count)
            equal += [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
        executions[counted] = ran

    from fastac import cli

    said, listed = list(logged), {}
    for options in ([], ["--json"]):
        with contextlib.redirect_stdout(io.StringIO()) as printed, contextlib.suppress(SystemExit):
            cli.main(["backends", *options])
        listed["".join(options)] = printed.getvalue()
    good = {name: is_registered("attention_plugin", name) for name in ("attention", "second", "third", "fourth")}
    before = ("before_a_text", "before_a_function", "before_it_raises")
    broken = [is_registered("broken_plugin", name) for name in before]
    print(json.dumps(dict(
        early=early, executions=executions, equal=all(equal), compared=len(equal), good=good,
        broken=broken, logged=said, table=listed[""], json=listed["--json"],
    )))
"""


def install(folder: Path, package: str, files: Mapping[str, str], entry_points: Mapping[str, str]) -> None:
    """Leave a package and its metadata in a folder, as pip does."""
    metadata = folder / f"{package}-1.5.dist-info"
    for path, text in {
        **{folder / package / name: textwrap.dedent(text) for name, text in files.items()},
        metadata / "METADATA": f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1.5\n",
        metadata / "entry_points.txt": "[fastac.backends]\n"
        + "".join(f"{name} = {value}\n" for name, value in entry_points.items()),
    }.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def run(folder: Path, **environment: str) -> dict[str, Any]:
    ran = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PROGRAM)],
        env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("installed")
    install(folder, "attention_plugin", GOOD, GOOD_ENTRY_POINTS)
    install(folder, "broken_plugin", BROKEN, {name: value for name, (value, _) in REASONS.items()})
    return folder


@pytest.fixture(scope="module")
def result(installed: Path) -> dict[str, Any]:
    return run(installed)


def test_installing_a_plugin_is_enough(result: dict[str, Any]) -> None:
    """Its ops and its Functions are saved. Nothing of it is loaded at `import fastac`."""
    assert result["early"] == []
    assert result["executions"] == {"op": [1, 2, 1, 1], "opaque": [1, 2, 1, 1]}
    assert (result["equal"], result["compared"]) == (True, 16)
    assert all(result["good"].values())


def test_a_broken_plugin_is_named_and_takes_no_other_down(result: dict[str, Any]) -> None:
    """In the log, once, and in the listing of backends."""
    assert result["broken"] == [False] * 3
    assert len(result["logged"]) == len(REASONS)
    for name, (entry_point, reason) in REASONS.items():
        (line,) = (line for line in result["logged"] if f"{name} (broken-plugin 1.5)" in line)
        assert entry_point in line
        assert reason in line
        assert f"{name} (broken-plugin 1.5)" in result["table"]


def test_the_command_line_lists_plugins(result: dict[str, Any]) -> None:
    found = json.loads(result["json"])
    assert {f"{name} (attention-plugin 1.5)" for name in GOOD_ENTRY_POINTS} <= {one["name"] for one in found["plugins"]}
    assert set(found["broken_plugins"]) == {f"{name} (broken-plugin 1.5)" for name in REASONS}
    assert "attention_plugin::attention" in result["table"]


def test_nothing_is_loaded_where_fastac_is_ruled_out(installed: Path) -> None:
    result = run(installed, FASTAC_DISABLE="1")
    assert result["logged"] == []
    assert set(map(tuple, result["executions"].values())) == {(1, 2, 2, 2)}
    assert result["equal"]
