"""Takes guards out of a copy of the package, one at a time, and says which test fails.

A guard is an `if` whose body only raises, returns, continues or warns. One that survives has lost its last test, or it
saves time alone, or no test comes to it. Those of older releases of torch are left out.

    python -m hunts.guards --seed 1 --count 20
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]

TESTS = {
    "engine": ("tests/engine", "tests/ways", "tests/hook", "tests/compiled", "tests/distributed", "hunts"),
    "diagnosis": ("tests/diagnosis", "tests/hook", "tests/compiled", "tests/engine", "tests/ways", "tests/distributed"),
    "verification": ("tests/verification", "tests/compiled", "tests/distributed", "tests/cli"),
    "planning": ("tests/planning", "tests/cli", "tests/distributed", "tests/compiled", "tests/docs"),
}
"""Room of the package -> the tests that may see it, those that see most first."""


class Guard(NamedTuple):
    file: Path  # in the package's repository
    condition: ast.expr

    @property
    def room(self) -> str:
        return self.file.parts[1]

    def __str__(self) -> str:
        return f"{self.file}:{self.condition.lineno}: if {ast.unparse(self.condition)}"

    def taken_out(self, text: str) -> str:
        """The text of its file, where the condition is still evaluated, and never true."""
        lines = text.splitlines(keepends=True)
        starts = [sum(map(len, lines[:number])) for number in range(len(lines))]
        first = starts[self.condition.lineno - 1] + self.condition.col_offset
        last = starts[self.condition.end_lineno - 1] + self.condition.end_col_offset
        return f"{text[:first]}({text[first:last]}) and False{text[last:]}"


def guards() -> Iterator[Guard]:
    for room in TESTS:
        for path in sorted((ROOT / "fastac" / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                is_guard = isinstance(node, ast.If) and all(map(ends_or_warns, node.body))
                if is_guard and "releases." not in ast.unparse(node.test):
                    yield Guard(path.relative_to(ROOT), node.test)


def ends_or_warns(statement: ast.stmt) -> bool:
    called = statement.value.func if isinstance(getattr(statement, "value", None), ast.Call) else None
    warns = isinstance(statement, ast.Expr) and called is not None and "warn" in ast.unparse(called)
    return warns or isinstance(statement, (ast.Raise, ast.Return, ast.Continue))


def first_failure(copy: Path, *tests: str) -> str:
    """The first test that fails, or ""."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "2", "-m", "not soak", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *tests], cwd=copy, env=environment, text=True, capture_output=True, check=False)
    failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", done.stdout, flags=re.MULTILINE)
    return failed[1] if failed is not None else (done.stdout + done.stderr)[-300:] if done.returncode else ""


def verdict(copy: Path, guard: Guard) -> str:
    changed = copy / guard.file
    text = changed.read_text(encoding="utf-8")
    changed.write_text(guard.taken_out(text), encoding="utf-8")
    failed = first_failure(copy, *TESTS[guard.room])
    changed.write_text(text, encoding="utf-8")
    if failed and first_failure(copy, failed):
        return f"NOT KNOWN, as this fails with it, too: {failed}"
    return f"killed by {failed}" if failed else "SURVIVED"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hunts.guards", description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="%(default)s if not given")
    parser.add_argument("--count", type=int, default=10, help="how many; %(default)s if not given")
    arguments = parser.parse_args()
    chosen = random.Random(arguments.seed).sample(list(guards()), arguments.count)
    survived = 0
    with tempfile.TemporaryDirectory(prefix="fastac-guards-") as folder:
        copy = Path(folder, "fastac")
        shutil.copytree(ROOT, copy, symlinks=True, ignore=shutil.ignore_patterns(".*", "__pycache__"))
        for guard in chosen:
            found = verdict(copy, guard)
            survived += not found.startswith("killed")
            print(f"{guard}: {found}", flush=True)
    sys.exit(survived > 0)


if __name__ == "__main__":
    main()
