"""Plugins: installed packages that bring rows by their entry points, and those that are broken."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import fastac
from fastac import FastacError, cli
from tests import support
from tests.distributed import ranks
from tests.distributed.steps import logged
from tests.engine.cases import assert_exact
from tests.support import AttentionBlock

ROOT = Path(__file__).resolve().parents[1]

GOOD = {
    "__init__.py": "",
    "kernel.py": '''
        """An attention op, and a kernel that only an autograd.Function knows. Both count executions."""

        import torch

        from tests import support

        attend = support.attention_function(support.define_attention_op("of_a_plugin"))


        class OpaqueAttention(torch.autograd.Function):
            @staticmethod
            def forward(ctx, query, key, value):
                support.executions["opaque"] += 1
                output, statistics = support.attention_math(query, key, value)
                ctx.save_for_backward(query, key, value, output, statistics)
                return output

            @staticmethod
            def backward(ctx, grad):
                return support.attention_math_backward(grad, *ctx.saved_tensors)
    ''',
    "fastac_rows.py": """
        from fastac import AttentionOp, OpaqueFunction

        options = {"backend": "plugin", "layout": "bhsd", "dropout": None}
        ROWS = (AttentionOp(namespace="fastac_tests", name="of_a_plugin", **options),)
        FUNCTIONS = (OpaqueFunction(module="attention_plugin.kernel", name="OpaqueAttention", key="key", **options),)
    """,
    "more_rows.py": """
        import torch

        import fastac
        from fastac import AttentionOp

        def row(name):
            return AttentionOp(backend="more", namespace="attention_plugin", name=name)

        TWO = [row("second"), row("third")]
        calls = []

        def rows():
            calls.append("rows")
            fastac.checkpoint(torch.sin, torch.ones(1, requires_grad=True))  # a plugin that uses fastac itself
            yield row("fourth")

        def interrupted():
            calls.append("interrupted")
            if calls.count("interrupted") == 1:
                raise KeyboardInterrupt
            return [row("fifth")]
    """,
}
GOOD_ENTRY_POINTS = {
    "a_function": "attention_plugin.more_rows:rows",
    "a_slow_function": "attention_plugin.more_rows:interrupted",
    "an_iterable": "attention_plugin.more_rows:TWO",
    "module": "attention_plugin.fastac_rows",
}
"""Loaded in the order of these names."""

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
"""Entry point -> its value, and the reason in the message. The well-formed rows beside are not registered either."""


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


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    install(tmp_path, "attention_plugin", GOOD, GOOD_ENTRY_POINTS)
    install(tmp_path, "broken_plugin", BROKEN, {name: value for name, (value, _) in REASONS.items()})
    return tmp_path


def is_registered(namespace: str, name: str) -> bool:
    try:
        fastac.register(fastac.AttentionOp(backend="mine", namespace=namespace, name=name))
    except FastacError as error:
        return "another row" in str(error)
    return False


def printed(*arguments: str) -> str:
    """What `python -m fastac backends` prints."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert cli.main(["backends", *arguments]) == 0
    return output.getvalue()


def use_plugins(folder: str) -> None:
    """In a process that has not used fastac. A plugin is interrupted; the next use loads it and those that are left."""
    sys.path.insert(0, folder)
    with logged(logging.WARNING) as messages:
        with pytest.raises(KeyboardInterrupt):
            fastac.checkpoint(torch.sin, torch.ones(1, requires_grad=True))
        fastac.checkpoint(torch.sin, torch.ones(1, requires_grad=True))
        assert importlib.import_module("attention_plugin.more_rows").calls == ["rows", "interrupted", "interrupted"]
        kernel = importlib.import_module("attention_plugin.kernel")
        for attend in (kernel.attend, lambda *tensors: kernel.OpaqueAttention.apply(*tensors)):
            assert_exact(lambda attend=attend: AttentionBlock(attend=attend), support.executions)
            assert support.executions.total() == 4
    assert is_registered("fastac_tests", "of_a_plugin")
    assert all(is_registered("attention_plugin", name) for name in ("second", "third", "fourth", "fifth"))
    before = ("before_a_text", "before_a_function", "before_it_raises")
    assert not any(is_registered("broken_plugin", name) for name in before)

    table, listed = printed(), json.loads(printed("--json"))
    assert "fastac_tests::of_a_plugin" in table
    assert {f"{name} (attention-plugin 1.5)" for name in GOOD_ENTRY_POINTS} <= {
        one["name"] for one in listed["plugins"]
    }
    assert set(listed["broken_plugins"]) == {f"{name} (broken-plugin 1.5)" for name in REASONS}
    assert len(messages) == len(REASONS)
    for name, (entry_point, reason) in REASONS.items():
        (line,) = (line for line in messages if f"{name} (broken-plugin 1.5)" in line)
        assert entry_point in line
        assert reason in line
        assert f"{name} (broken-plugin 1.5)" in table


def test_installing_a_plugin_is_enough_and_a_broken_one_takes_no_other_down(installed: Path) -> None:
    """Its ops and its Functions are saved. A broken one is named once in the log, and in the list of backends."""
    ranks.results(ranks.outcomes(use_plugins, str(installed), world=1))


def test_nothing_is_loaded_at_import_or_where_fastac_is_ruled_out(installed: Path) -> None:
    code = (
        "import sys, torch, fastac\n"
        "fastac.checkpoint(torch.sin, torch.ones(1, requires_grad=True))\n"
        "print([name for name in sys.modules if '_plugin' in name])"
    )
    environment = os.environ | {"FASTAC_DISABLE": "1", "PYTHONPATH": os.pathsep.join((str(installed), str(ROOT)))}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "[]\n"
