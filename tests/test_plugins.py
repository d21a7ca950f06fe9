"""Plugins: real packages, built and installed, that bring rows by their entry points; and those that are broken.

Every run is a process of its own: a package is found where Python looks for packages, and rows stay for the process.
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

from fastac.engine import interception, opaque
from fastac.backends import plugins

ROOT = Path(__file__).resolve().parents[1]

KERNEL = '''
"""An attention kernel as an op, and the same kernel that only an autograd.Function knows. Both count executions."""

import torch

executions = {"op": 0, "opaque": 0}


def attend(query, key, value, counted):
    executions[counted] += 1
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def gradients(grad, query, key, value, output, statistics):
    scale = query.shape[-1] ** -0.5
    probabilities = (query @ key.transpose(-1, -2) * scale - statistics[..., None]).exp()
    scores = probabilities * (grad @ value.transpose(-1, -2) - (grad * output).sum(-1, keepdim=True)) * scale
    return scores @ key, scores.transpose(-1, -2) @ query, probabilities.transpose(-1, -2) @ grad


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
        return gradients(grad, *ctx.saved_tensors)


class OpaqueAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value):
        output, statistics = attend(query, key, value, "opaque")
        ctx.save_for_backward(query, key, value, output, statistics)
        return output

    @staticmethod
    def backward(ctx, grad):
        return gradients(grad, *ctx.saved_tensors)
'''

GOOD = {
    "attention_plugin/__init__.py": "",
    "attention_plugin/kernel.py": KERNEL,
    "attention_plugin/fastac_rows.py": """
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
    "attention_plugin/more_rows.py": """
        import time

        import attention_plugin.kernel
        import fastac
        from fastac import AttentionOp

        def row(name):
            return AttentionOp(backend="more", namespace="attention_plugin", name=name)

        TWO = [row("second"), row("third")]

        def slowly():
            fastac.interception.install()  # as by a plugin that enables fastac while it is loaded
            time.sleep(0.5)
            yield row("fourth")
    """,
}
GOOD_ENTRY_POINTS = {
    "a_module": "attention_plugin.fastac_rows",
    "an_iterable": "attention_plugin.more_rows:TWO",
    "a_function": "attention_plugin.more_rows:slowly",
}

BROKEN = {
    "broken_plugin/__init__.py": """
        from fastac import AttentionOp

        def row(name, **options):
            return AttentionOp(backend="broken", namespace="broken_plugin", name=name, **options)
    """,
    "broken_plugin/no_import.py": "import a_library_that_was_uninstalled",
    "broken_plugin/exits.py": "raise SystemExit('no GPU')",
    "broken_plugin/empty.py": "",
    "broken_plugin/rows.py": """
        import torch
        from broken_plugin import row
        from fastac import AttentionOp, OpaqueFunction

        NUMBER = 3
        TEXTS = (row("before_a_text"), "text")
        DUPLICATE = (
            row("before_a_duplicate"), AttentionOp(backend="mine", namespace="aten", name="_flash_attention_forward")
        )
        MALFORMED = (row("before_a_malformed_one"), row("malformed", layout="sideways"))
        FUNCTION = (
            row("before_a_function"), OpaqueFunction(backend="broken", module="x", name="F", layout="sideways")
        )
        NO_TEXT = (row("before_no_text"), AttentionOp(backend="broken", namespace=None, name="no_text"))
        NO_NAME = (row("before_no_name"), OpaqueFunction(backend="broken", module="x", name=None))
        PATTERN = (row("before_a_pattern"), OpaqueFunction(backend="broken", module="(", name="F"))

        library = torch.library.Library("broken_plugin", "DEF")
        library.define("writes(Tensor query, Tensor key, Tensor value, Tensor(a!) out) -> Tensor")
        WRITES = (row("before_one_that_writes"), row("writes", dropout=None))

        def raises():
            yield row("before_it_raises")
            raise KeyError("of its own")
    """,
}
BROKEN_ENTRY_POINTS = {
    "no_import": "broken_plugin.no_import",
    "exits": "broken_plugin.exits",
    "empty": "broken_plugin.empty",
    "no_attribute": "broken_plugin.rows:ROWS_AND_ROWS",
    "number": "broken_plugin.rows:NUMBER",
    "texts": "broken_plugin.rows:TEXTS",
    "duplicate": "broken_plugin.rows:DUPLICATE",
    "malformed": "broken_plugin.rows:MALFORMED",
    "function": "broken_plugin.rows:FUNCTION",
    "pattern": "broken_plugin.rows:PATTERN",
    "no_text": "broken_plugin.rows:NO_TEXT",
    "no_name": "broken_plugin.rows:NO_NAME",
    "writes": "broken_plugin.rows:WRITES",
    "raises": "broken_plugin.rows:raises",
}
REASONS = {
    "no_import": "ModuleNotFoundError: No module named 'a_library_that_was_uninstalled'",
    "exits": "SystemExit: no GPU",
    "empty": "neither ROWS nor FUNCTIONS",
    "no_attribute": "has no attribute 'ROWS_AND_ROWS'",
    "number": "'int' object is not iterable",
    "texts": "expected a fastac.AttentionOp, got str",
    "duplicate": "there is a row for aten::_flash_attention_forward already",
    "malformed": "layout 'sideways'",
    "function": "layout 'sideways'",
    "pattern": "is no regular expression",
    "no_text": "namespace is no text",
    "no_name": "name is no text",
    "writes": "writes its argument 'out'",
    "raises": "KeyError: 'of its own'",
}

TRAIN = """
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
    from attention_plugin import kernel

    def step(function, counted, policy, engine):
        torch.manual_seed(0)
        weight = torch.randn(8, 8, requires_grad=True)
        inputs = torch.randn(1, 2, 16, 8, requires_grad=True)

        def block(x):
            return torch.tanh(function(torch.tanh(x @ weight), torch.sin(x), torch.cos(x)))

        kernel.executions[counted] = 0
        if policy == "none":
            output = block(inputs)
        else:
            output = fastac.checkpoint(block, inputs, policy=policy, engine=engine)
        (output * torch.linspace(-1, 1, 8)).sum().backward()
        return kernel.executions[counted], [inputs.grad, weight.grad]

    executions, equal = {}, []
    for function, counted in ((kernel.Attention.apply, "op"), (kernel.OpaqueAttention.apply, "opaque")):
        none, expected = step(function, counted, "none", "tape")
        for engine in ("tape", "sac"):
            ran = [none]
            for policy in ("full", "attn_only", "attn_only"):
                count, found = step(function, counted, policy, engine)
                ran.append(count)
                equal += [torch.equal(a, b) for a, b in zip(found, expected, strict=True)]
            executions[f"{counted} {engine}"] = ran
    rows = [row.name for row in fastac.registry.rows() if row.namespace in ("attention_plugin", "broken_plugin")]
    print(json.dumps({
        "early": early, "executions": executions, "equal": all(equal), "compared": len(equal), "rows": rows,
        "logged": list(logged), "broken": fastac.plugins.broken(),
    }))
"""

ENGINES = ("tape", "sac")
ROWS = ["attention", "second", "third", "fourth"]
"""Those of the good plugins. Nothing of a broken one is registered, not even the rows that are well-formed."""


def install(folder: Path, distribution: str, files: Mapping[str, str], entry_points: Mapping[str, str]) -> Path:
    """Build a wheel of a package with entry points and install it. Returns the folder it is in."""
    source, target = folder / "source", folder / "installed"
    package = next(iter(files)).partition("/")[0]
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(textwrap.dedent(text), encoding="utf-8")
    (source / "pyproject.toml").write_text(
        textwrap.dedent(f"""
            [build-system]
            requires = ["setuptools"]
            build-backend = "setuptools.build_meta"

            [project]
            name = "{distribution}"
            version = "1.5"

            [tool.setuptools]
            packages = ["{package}"]

            [project.entry-points."fastac.backends"]
        """)
        + "".join(f'{name} = "{value}"\n' for name, value in entry_points.items()),
        encoding="utf-8",
    )
    run_python("-m", "build", "--no-isolation", "--wheel", "--outdir", folder, source)
    (wheel,) = folder.glob("*.whl")
    quiet = ("--quiet", "--disable-pip-version-check")
    run_python("-m", "pip", "install", *quiet, "--no-deps", "--no-index", "--target", target, wheel)
    return target


def run_python(*arguments: object, paths: tuple[Path, ...] = (), **environment: str) -> str:
    """Run this Python in a process of its own, with more folders to import from. Returns what it printed."""
    ran = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=os.environ | environment | {"PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT)))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def train(*paths: Path, **environment: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run_python("-c", textwrap.dedent(TRAIN), paths=paths, **environment))
    return result


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("good"), "attention-plugin", GOOD, GOOD_ENTRY_POINTS)


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install(tmp_path_factory.mktemp("broken"), "broken-plugin", BROKEN, BROKEN_ENTRY_POINTS)


def test_installing_a_plugin_is_enough(good: Path) -> None:
    result = train(good)
    assert result["early"] == [], "loaded at `import fastac`"
    assert result["executions"] == {f"{kind} {engine}": [1, 2, 1, 1] for kind in ("op", "opaque") for engine in ENGINES}
    assert (result["equal"], result["compared"]) == (True, 24)
    assert sorted(result["rows"]) == sorted(ROWS)
    assert (result["logged"], result["broken"]) == ([], {})


def test_a_broken_plugin_is_named_and_takes_no_other_down(good: Path, broken: Path) -> None:
    result = train(broken, good)
    assert sorted(result["rows"]) == sorted(ROWS)
    assert set(map(tuple, result["executions"].values())) == {(1, 2, 1, 1)}
    assert result["equal"]
    assert set(result["broken"]) == {f"{name} (broken-plugin 1.5)" for name in REASONS}
    assert len(result["logged"]) == len(REASONS)
    for name, reason in REASONS.items():
        assert reason in result["broken"][f"{name} (broken-plugin 1.5)"]
        (line,) = (line for line in result["logged"] if f"plugin {name} (broken-plugin 1.5)" in line)
        assert BROKEN_ENTRY_POINTS[name] in line
        assert reason in line


def test_nothing_is_loaded_where_fastac_is_ruled_out(good: Path, broken: Path) -> None:
    result = train(broken, good, FASTAC_DISABLE="1")
    assert (result["rows"], result["logged"]) == ([], [])
    assert set(map(tuple, result["executions"].values())) == {(1, 2, 2, 2)}
    assert result["equal"]


def test_threads_wait_for_plugins_that_are_being_loaded(good: Path) -> None:
    script = """
        import threading
        import attention_plugin.kernel
        import fastac

        seen = []

        def first_use():
            fastac.interception.install()
            seen.append(any(row.name == "fourth" for row in fastac.registry.rows()))

        threads = [threading.Thread(target=first_use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(seen, "fastac_opaque::attention_plugin_kernel_OpaqueAttention" in fastac.interception.intercepted())
    """
    assert run_python("-c", textwrap.dedent(script), paths=(good,)).strip() == f"{[True] * 4} True"


def test_an_attention_that_a_broken_plugin_was_for_names_it(broken: Path) -> None:
    script = """
        import fastac
        import torch

        @torch.library.custom_op("no_row::attention_forward", mutates_args=())
        def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return (query @ key.transpose(-1, -2)) @ value

        attention.register_autograd(lambda ctx, grad: (grad, grad, grad))
        inputs = [torch.randn(1, 2, 16, 8, requires_grad=True) for _ in range(3)]
        try:
            fastac.checkpoint(attention, *inputs)
        except fastac.PolicyNotAppliedError as error:
            print(error)
    """
    message = run_python("-c", textwrap.dedent(script), paths=(broken,))
    assert "no_row::attention_forward" in message
    assert "plugin no_import (broken-plugin 1.5)" in message
    assert REASONS["no_import"] in message


def test_plugins_are_loaded_before_functions_are_made_visible() -> None:
    """So that those which a plugin names are made visible in the same installation, not in a later one."""
    listeners = interception.before_installation
    assert listeners.index(plugins.load) < listeners.index(opaque.make_known_visible)


def test_the_command_line_lists_plugins(good: Path, broken: Path) -> None:
    found = json.loads(run_python("-m", "fastac.cli", "backends", "--json", paths=(broken, good)))
    listed = {plugin["name"]: plugin for plugin in found["plugins"]}
    assert set(listed) == {f"{name} (attention-plugin 1.5)" for name in GOOD_ENTRY_POINTS}
    assert listed["a_module (attention-plugin 1.5)"] == {
        "name": "a_module (attention-plugin 1.5)",
        "entry_point": "attention_plugin.fastac_rows",
        "distribution": "attention-plugin",
        "installed": "1.5",
        "backends": ["plugin"],
        # Its kernel is loaded by another of the entry points: listing backends imports no library.
        "ops": ["attention_plugin::attention", "fastac_opaque::attention_plugin_kernel_OpaqueAttention"],
        "verdict": "savable",
        "how": "its ops; made visible when it is loaded: OpaqueAttention",
        "advice": "",
    }
    assert set(found["broken_plugins"]) == {f"{name} (broken-plugin 1.5)" for name in REASONS}
    assert REASONS["exits"] in found["broken_plugins"]["exits (broken-plugin 1.5)"]

    table = run_python("-m", "fastac.cli", "backends", paths=(broken, good))
    assert "attention_plugin::attention" in table
    for name in REASONS:
        assert f"{name} (broken-plugin 1.5)" in table
