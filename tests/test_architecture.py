"""The house of the design, kept: who may import whom, what may reach into torch, how long a module may be."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "fastac"

ORDER = (
    "ranks",
    "errors",
    "sizes",
    "budget",
    "probing",
    "dispatcher_internals",
    "torch_internals",
    "compiler_internals",
    "inductor_internals",
    "compiled_flex",
    "preservation",
    "rows",
    "registry",
    "flops",
    "partitioner",
    "checkpoint_wrappers",
    "policy",
    "recognition",
    "decisions",
    "selection",
    "entries",
    "choices",
    "collectives",
    "scopes",
    "tape",
    "replay",
    "interception",
    "packing",
    "opaque",
    "plugins",
    "census",
    "linear",
    "survey",
    "shares",
    "autograd_graph",
    "compiled_graphs",
    "observation",
    "diagnosis",
    "explanation",
    "preflight",
    "selective",
    "traced_regions",
    "annotation",
    "regions",
    "checkpointing",
    "block_selection",
    "block_forward",
    "remarks",
    "hook",
    "compiling",
    "graph",
    "reporting",
    "comparison",
    "outcome",
    "verification",
    "known_values",
    "events",
    "simulation",
    "timeline",
    "plans",
    "subjects",
    "forecast",
    "planning",
    "video_planning",
    "plotting",
    "plan_command",
    "checks",
    "machine",
    "measurements",
    "measuring",
    "benching",
    "bench_command",
    "cli",
)
"""A module imports only from the ones before it. A module that is added gets a place here."""

GRAPH = (
    "torch_private",
    "nodes",
    "tracing",
    "passes",
    "application",
    "saved_values",
    "partitioning",
    "round_trip",
)
"""The same for what is in fastac/graph/, the one folder of the engine, which stands in ORDER as a whole."""

CATALOGUES = {"backends": {"errors", "rows", "registry", "opaque"}, "models": {"errors", "ranks"}}
"""Folder -> what of the engine its files may import, besides each other."""

ENTRY_POINTS = {"__init__", "__main__"}  # import what they like
MAY_READ_CATALOGUES = set(ORDER[ORDER.index("block_selection") :]) - {"comparison"}

LIBRARIES = (
    "flash_attn",
    "xformers",
    "fastvideo",
    "fastvideo_kernel",
    "vsa",
    "longcat_video",
    "sparse_linear_attention",
    "sageattention",
    "diffusers",
    "transformers",
    "peft",
    "accelerate",
    "deepspeed",
    "triton",
)
MAY_NAME_LIBRARIES = ("hook", "verification", "machine", "cli", "backends", "models")

PRIVATE_BUT_DOCUMENTED = {
    "torch._ops",  # OpOverload, the type of an op: it has no public name
    "torch.utils._python_dispatch",  # TorchDispatchMode, documented under this path
}
PRIVATE = ("dispatcher_internals", "torch_internals", "compiler_internals", "inductor_internals", "graph.torch_private")
"""Modules that hold what is private in torch, probed there."""

LONGEST = 340


def paths() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    """backends.sdpa, for fastac/backends/sdpa.py"""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), filename=str(path))


MODULES = pytest.mark.parametrize("path", paths(), ids=name_of)


def imported(path: Path) -> set[str]:
    """Modules of fastac that a file imports, anywhere in it, relative to the package."""
    found = set()
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            # `from fastac import census` imports the module fastac.census
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        found |= {name.removeprefix("fastac.") for name in names if name == "fastac" or name.startswith("fastac.")}
    return found


def test_every_engine_module_has_a_place_in_the_order() -> None:
    engine = {path.stem for path in PACKAGE.glob("*.py")} - ENTRY_POINTS
    assert engine <= set(ORDER), f"not in the order of the design: {sorted(engine - set(ORDER))}"


@MODULES
def test_imports_run_only_downward(path: Path) -> None:
    module = name_of(path)
    if module in ENTRY_POINTS:
        return
    folder = module.partition(".")[0]
    for name in imported(path):
        target = name.partition(".")[0]
        if folder in CATALOGUES:
            allowed = target == folder or target in CATALOGUES[folder]
        elif target in CATALOGUES:
            allowed = module in MAY_READ_CATALOGUES
        else:
            allowed = target in ORDER[: ORDER.index(folder)]
            if target == folder == "graph":
                inner = module.partition(".")[2]
                allowed = inner in ENTRY_POINTS or name.split(".")[1] in GRAPH[: GRAPH.index(inner)]
        assert allowed, f"fastac.{module} imports fastac.{name}, which is not below it"


def private_names_of_torch(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every private thing of torch that a file imports or reaches by attribute."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        else:
            continue
        for name in names:
            root, *parts = name.split(".")
            if root == "torch" and any(part.startswith("_") and not part.startswith("__") for part in parts):
                yield node.lineno, name


@MODULES
def test_private_names_of_torch_stand_in_one_module(path: Path) -> None:
    if name_of(path) in PRIVATE:
        return
    found = [
        f"{path.name}:{line}: {name}"
        for line, name in private_names_of_torch(path)
        if not any(name == allowed or name.startswith(allowed + ".") for allowed in PRIVATE_BUT_DOCUMENTED)
    ]
    assert not found, "belongs into an internals module, where it is named and probed: " + ", ".join(found)


def test_allowed_private_names_are_used() -> None:
    used = {name for path in paths() for _, name in private_names_of_torch(path)}
    unused = {allowed for allowed in PRIVATE_BUT_DOCUMENTED if not any(name.startswith(allowed) for name in used)}
    assert not unused, f"take off the list: {unused}"


@MODULES
def test_no_error_is_swallowed(path: Path) -> None:
    """Catching everything is right only where it is raised again, as an error that says what was going on."""
    for node in ast.walk(tree(path)):
        if not isinstance(node, ast.ExceptHandler) or isinstance(node.body[-1], ast.Raise):
            continue
        caught = {ast.unparse(part) for part in ast.walk(node.type)} if node.type else {"everything"}
        assert not caught & {"everything", "Exception", "BaseException"}, f"{path.name}:{node.lineno} catches {caught}"


@MODULES
def test_what_is_public_has_a_docstring(path: Path) -> None:
    missing = [] if ast.get_docstring(tree(path)) else ["the module"]
    public = [(node, "") for node in tree(path).body]
    for node, outer in public:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)) and not node.name.startswith("_"):
            if not ast.get_docstring(node) and not _takes_over(node, outer):
                missing.append(f"{outer}{node.name} (line {node.lineno})")
            if isinstance(node, ast.ClassDef):
                public.extend((inner, f"{node.name}.") for inner in node.body)
    assert not missing, f"{path.name}: no docstring: {', '.join(missing)}"


def _takes_over(node: ast.AST, outer: str) -> bool:
    """Whether a method is documented where its base class or torch defines it."""
    inherited = {"call", "decomposed", "ignore_compile_internals"}
    return bool(outer) and isinstance(node, ast.FunctionDef) and node.name in inherited


@MODULES
def test_modules_are_short(path: Path) -> None:
    lines = len(path.read_text().splitlines())
    assert lines <= LONGEST, f"{path.name} has {lines} lines: find what can stand on its own"


def code_words(path: Path) -> Iterator[tuple[int, str]]:
    """Every name, attribute, import and string of a file that is not a docstring."""
    docstrings = set()
    for node in ast.walk(tree(path)):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            docstrings |= {id(s.value) for s in body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias):
            yield node.lineno, node.name
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.module or ""
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            is_prose = " " in node.value  # a message may say who else does something; it decides nothing
            if not is_prose:
                yield node.lineno, node.value


@MODULES
def test_the_engine_knows_no_library_by_name(path: Path) -> None:
    module = name_of(path)
    if module.partition(".")[0] in MAY_NAME_LIBRARIES or module == "__init__":
        return
    found = [f"{path.name}:{line}: {word}" for line, word in code_words(path) if any(lib in word for lib in LIBRARIES)]
    assert not found, "belongs into backends/ or models/: " + ", ".join(found)
