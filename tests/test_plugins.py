"""Plugins: installed packages that bring rows by their entry points, and those that are broken."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

import fastac
from fastac import FastacError, cli
from fastac.backends import plugins
from tests import support
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


@pytest.mark.usefixtures("rows_as_before", "functions_as_before")
def test_installing_a_plugin_is_enough_and_a_broken_one_takes_no_other_down(
    installed: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its ops and its Functions are saved. A broken one is named once in the log, and in the list of backends."""
    monkeypatch.syspath_prepend(installed)
    for name, value in {"_plugins": [], "_begun": False, "_done": False}.items():
        monkeypatch.setattr(plugins, name, value)
    with caplog.at_level(logging.ERROR, "fastac"):
        plugins.prepare()
        kernel = importlib.import_module("attention_plugin.kernel")
        for attend in (kernel.attend, lambda *tensors: kernel.OpaqueAttention.apply(*tensors)):
            assert_exact(lambda attend=attend: AttentionBlock(attend=attend), support.executions)
            assert support.executions.total() == 4
    assert is_registered("fastac_tests", "of_a_plugin")
    assert all(is_registered("attention_plugin", name) for name in ("second", "third", "fourth"))
    before = ("before_a_text", "before_a_function", "before_it_raises")
    assert not any(is_registered("broken_plugin", name) for name in before)

    assert cli.main(["backends"]) == 0
    table = capsys.readouterr().out
    assert "fastac_tests::of_a_plugin" in table
    assert cli.main(["backends", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    names = {one["name"] for one in listed["plugins"]}
    assert {f"{name} (attention-plugin 1.5)" for name in GOOD_ENTRY_POINTS} <= names
    assert set(listed["broken_plugins"]) == {f"{name} (broken-plugin 1.5)" for name in REASONS}
    assert len(caplog.records) == len(REASONS)
    for name, (entry_point, reason) in REASONS.items():
        (line,) = (line for line in caplog.messages if f"{name} (broken-plugin 1.5)" in line)
        assert entry_point in line
        assert reason in line
        assert f"{name} (broken-plugin 1.5)" in table


def test_nothing_is_loaded_at_import_or_where_fastac_is_ruled_out(installed: Path) -> None:
    code = (
        "import sys, torch, fastac\n"
        "fastac.checkpoint(torch.sin, torch.ones(1, requires_grad=True))\n"
        "print([name for name in sys.modules if '_plugin' in name])"
    )
    path = os.pathsep.join((str(installed), str(ROOT)))
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"FASTAC_DISABLE": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "[]\n"


@pytest.mark.usefixtures("rows_as_before", "functions_as_before")
def test_an_interrupted_load_goes_on(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in a slow plugin: the next use of fastac loads it, and those that are left."""
    monkeypatch.syspath_prepend(installed)
    for name, value in {"_plugins": [], "_begun": False, "_done": False}.items():
        monkeypatch.setattr(plugins, name, value)
    read, asked = plugins._read, []

    def interrupted(entry_point: importlib.metadata.EntryPoint) -> list[object]:
        asked.append(entry_point.name)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return read(entry_point)

    monkeypatch.setattr(plugins, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        plugins.prepare()
    plugins.prepare()
    assert {plugin.name for plugin in plugins.installed()} >= {*GOOD_ENTRY_POINTS, *REASONS}
    assert len(asked) == len(plugins.installed()) + 1
    assert is_registered("fastac_tests", "of_a_plugin")
