"""The house of the design, kept: who may import whom, what may reach into torch. ruff asks for docstrings.

And that no test needs a GPU alone.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import COLLECTED, GPU

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fastac"

FLOORS = (
    *("errors", "policy", "registry", "engine", "backends", "diagnosis", "models", "compiled", "checkpointing"),
    *("hosts", "planning", "hook", "verification", "graph", "cli"),
)
"""Modules and folders, from below: what stands here imports from its own floor and from those before it.

A folder stands for its modules. Rows come before the engine that reads them.
"""

CATALOGUES = ("backends", "models")

ENTRY_POINTS = {"__init__", "__main__"}  # of the package: they import what they like

LIBRARIES = re.compile(
    "flash_attn|xformers|fastvideo|vsa|longcat_video|sparse_linear_attention|sageattention|"
    "diffusers|transformers|peft|accelerate|deepspeed|triton"
)
NAME_LIBRARIES = {"hosts", "verification", "planning", "cli", *CATALOGUES}

PRIVATE_BUT_DOCUMENTED = {
    "torch._ops",  # OpOverload, the type of an op: it has no public name
    "torch.utils._python_dispatch",  # TorchDispatchMode, documented under this path
}


def paths() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    """engine, for fastac/engine/tape.py"""
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(PACKAGE)}:{line}"


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(), filename=str(path))))


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of what a file imports, anywhere in it."""
    for node in nodes(path):
        for name in imported_by(node):
            yield node.lineno, name


def imported_by(node: Any) -> list[str]:
    """Dotted names, of a statement."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [f"{node.module}.{alias.name}" for alias in node.names] if isinstance(node, ast.ImportFrom) else []


def floor_of(name: str) -> int:
    """Of a dotted name without `fastac.`, such as engine.tape.Tape."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in FLOORS:
            return FLOORS.index(".".join(parts[:length]))
    raise AssertionError(f"no place in the house: {name}")


def test_the_rooms_are_few() -> None:
    entries = [path for path in PACKAGE.iterdir() if path.name not in ("__pycache__", "__main__.py", "py.typed")]
    assert len(entries) <= 16, "`ls fastac` shows the architecture"


def test_imports_run_only_downward() -> None:
    wrong = [
        f"{where(path, line)} imports {name}"
        for path in paths()
        if room_of(path) not in ENTRY_POINTS
        for line, name in imported(path)
        if name.startswith("fastac.")
        if floor_of(name.removeprefix("fastac.")) > floor_of(".".join(path.relative_to(PACKAGE).with_suffix("").parts))
    ]
    assert not wrong, "not below it:\n" + "\n".join(wrong)


def test_private_names_of_torch_stand_in_modules_named_torch_private() -> None:
    """Or in a folder of this name. There they are probed at import, and given a reason."""
    wrong, used = [], set()
    for path in paths():
        names = list(imported(path))
        names += [(node.lineno, ast.unparse(node)) for node in nodes(path) if isinstance(node, ast.Attribute)]
        for line, name in names:
            if re.match(r"torch\.(.*\.)?_(?!_)", name) is None:
                continue
            documented = [known for known in PRIVATE_BUT_DOCUMENTED if f"{name}.".startswith(f"{known}.")]
            used.update(documented)
            if not documented and "torch_private" not in (path.stem, path.parent.name):
                wrong.append(f"{where(path, line)}: {name}")
    assert not wrong, "belongs into a torch_private module:\n" + "\n".join(wrong)
    assert used == PRIVATE_BUT_DOCUMENTED, "remove from the list what is not used"


def test_only_the_catalogues_know_libraries_by_name() -> None:
    """And what reads them. A message may say who else does something; it decides nothing."""
    wrong = [
        f"{where(path, getattr(node, 'lineno', 0))}: {word}"
        for path in paths()
        if room_of(path) not in NAME_LIBRARIES | ENTRY_POINTS
        for node in nodes(path)
        for word in [getattr(node, field, None) for field in ("id", "attr", "name", "module", "value")]
        if isinstance(word, str) and " " not in word and LIBRARIES.search(word)
    ]
    assert not wrong, "belongs into backends/ or models/:\n" + "\n".join(wrong)


def test_no_class_name_stands_twice() -> None:
    """One name, one meaning; leading underscores do not tell classes apart."""
    names = Counter(node.name.strip("_") for path in paths() for node in nodes(path) if isinstance(node, ast.ClassDef))
    assert max(names.values()) == 1, names.most_common(3)


def test_variables_are_named_by_their_noun() -> None:
    """`for entry in entries`, not `for one in entries`."""
    places = [
        where(path, node.lineno)
        for path in paths()
        for node in nodes(path)
        if (isinstance(node, ast.Name) and node.id == "one") or (isinstance(node, ast.arg) and node.arg == "one")
    ]
    assert not places, "named `one`:\n" + "\n".join(places)


def test_what_runs_on_a_gpu_runs_on_a_cpu_as_well(pytestconfig: pytest.Config) -> None:
    """Every test that is marked `gpu` has a case without the mark, so that a name in it that is gone is seen in CI."""
    cases: dict[bool, set[str]] = {True: set(), False: set()}
    for item in pytestconfig.stash[COLLECTED]:
        cases[item.get_closest_marker("gpu") is not None].add(item.nodeid.partition("[")[0])
    assert not cases[True] - cases[False], "for a GPU alone"
    for name in {name.partition("::")[0] for name in cases[True]}:
        assert GPU in (ROOT / name).read_text(), f"`-m gpu` does not read {name}"


BROUGHT = {"diffusers", "numpy", "pytest", "rich", "torch", "torchgen", "yaml"}
"""Packages that CONTRIBUTING.md asks of a machine with a GPU. torchgen is torch's."""


def local(name: str) -> Path | None:
    """The file of a module of the project, by its dotted name or that of something in it."""
    for parts in (name.split("."), name.split(".")[:-1]):
        for folder in (ROOT, ROOT / "benchmarks"):
            if parts and (file := folder.joinpath(*parts).with_suffix(".py")).is_file():
                return file
    return None


def test_what_runs_on_a_gpu_needs_few_packages() -> None:
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if GPU in file.read_text()]
    files += [ROOT / "benchmarks" / "gpu_wan.py", ROOT / "tests" / "conftest.py"]
    for file in files:  # grows
        for statement in ast.parse(file.read_text()).body:  # what stands in a function is imported where it is called
            for name in imported_by(statement):
                package, its_file = name.partition(".")[0], local(name)
                if its_file is not None and its_file not in files:
                    files.append(its_file)
                known = its_file is not None or package in {*BROUGHT, *sys.stdlib_module_names, "fastac", "tests"}
                assert known, f"{file.relative_to(ROOT)}:{statement.lineno} imports {name}"
