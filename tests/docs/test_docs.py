"""Documents that are made from code are as the code makes them, their code runs, and what they point to is there."""

from __future__ import annotations

import dataclasses
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from fastac.engine import releases
from fastac.registry import AttentionOp
from tests import pairs
from tests.backends import packages
from tests.support import code_blocks

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")])
GUIDE = ROOT / "docs" / "adding_a_backend.md"
GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))


@pytest.mark.parametrize("name", GENERATE["QUICK"])
def test_made_documents_are_not_stale(name: str) -> None:
    """Tables of models are compared line by line, where tests/models/test_parity.py trains these."""
    assert GENERATE["QUICK"][name]() == (ROOT / name).read_text(encoding="utf-8"), "run python docs/generate.py"


def test_what_was_not_measured_leaves_its_cell_empty() -> None:
    """A way that did not run says why. A column without any figure is left out, and "peak" has none here."""
    measured = [
        {"way": "full", "problem": "", "seconds": [3.0, 1.0, 1.5]},
        {"way": "none", "problem": "out of\nmemory"},
    ]
    columns = {"held": ("held_bytes", ".0f", 1), "seconds": ("seconds", ".1f", 1), "peak": ("peak_bytes", ".0f", 1)}
    table = GENERATE["_gpu_table"]([*measured, {"way": "plan", "problem": "", "held_bytes": 4, "seconds": []}], columns)
    assert table.splitlines()[2:] == ["| full |  | 1.5 |", "| none | out of memory |  |", "| plan | 4 |  |"]


def test_every_made_document_is_looked_at() -> None:
    documents = [path for path in DOCUMENTS if "Written by docs/generate.py" in path.read_text(encoding="utf-8")]
    assert {path.relative_to(ROOT).as_posix() for path in documents} == set(GENERATE["DOCUMENTS"])


def test_every_library_with_a_parity_test_is_named() -> None:
    """One whose test files docs/generate.py does not know would be left out."""
    assert {Path(name).stem for names in GENERATE["TESTS"].values() for name in names} >= set(packages.LIBRARIES)


def test_the_releases_that_documents_name_are_those_of_the_table() -> None:
    """And every pair was exact, with half the kernels of plain checkpointing, when docs/versions.md was written."""
    readme, document = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/versions.md"))
    readme = " ".join(readme.split())  # wherever a line ends
    later = set(releases.FIRST_TORCH.values()) - {releases.FIRST_TORCH[releases.ENGINE]}
    assert f"torch {releases.FIRST_TORCH[releases.ENGINE]} or newer" in readme
    assert [f"need torch {one}: [docs/versions.md]" in readme for one in later] == [True]
    lines = document.splitlines()
    for feature, first in releases.FIRST_TORCH.items():
        assert f"| {feature} | {first} |" in lines, "run python -m hunts.versions --all --write"
    for torch, diffusers in pairs.DIFFUSERS.items():
        saved = 4 if releases.is_at_least(releases.FIRST_TORCH[releases.COMPILED_MODELS], torch) else "refused"
        assert any(line.startswith(f"| {torch} | {diffusers} | 8 | 4 | yes | 8 | {saved} |") for line in lines), torch


@pytest.mark.slow
def test_a_backend_is_added_as_the_guide_says(tmp_path: Path) -> None:
    """All of its Python, one after the other, is a test file that passes."""
    blocks = code_blocks(GUIDE, "python")
    (tmp_path / "test_guide.py").write_text("\n\n".join(blocks), encoding="utf-8")
    options = ["-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "--config-file", str(ROOT / "pyproject.toml")]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path / "test_guide.py")],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    passed = re.search(r"(\d+) passed", ran.stdout)
    assert int(passed[1]) == 8, "test_op, test_flops, test_function and the parity tests of two cases"
    assert "skipped" not in ran.stdout


def test_the_guide_explains_every_field_of_a_row() -> None:
    explained = {
        name
        for cell in re.findall(r"^\| (`[^|]*) \|", GUIDE.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for name in re.findall(r"`(\w+)`", cell)
    }
    assert explained == {field.name for field in dataclasses.fields(AttentionOp)}


@pytest.mark.parametrize("document", [GUIDE, ROOT / "README.md"], ids=lambda path: path.name)
def test_the_group_that_documents_name_is_the_one_that_is_read(document: Path) -> None:
    """By tests/test_plugins.py, too."""
    assert code_blocks(document, "toml") == [
        '[project.entry-points."fastac.backends"]\nmy_kernels = "my_kernels.fastac_rows"\n'
    ]


def prose(document: Path) -> str:
    return re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(document: Path) -> set[str]:
    """Those that GitHub gives the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", prose(document), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_lines_are_short(document: Path) -> None:
    """For those who read them raw. Tables, code, and lines that are one link may be longer."""
    lines = [line for line in prose(document).splitlines() if not re.match(r"\||!?\[[^]]*\]\(\S+\)$", line)]
    assert not [line for line in lines if len(line) > 100]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_what_a_document_links_to_exists(document: Path) -> None:
    missing = []
    for path, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]+))?\)", document.read_text(encoding="utf-8")):
        target = document.parent / path if path else document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(f"{path}#{anchor}")
    assert not missing


def test_the_tests_of_hazards_are_where_their_table_says() -> None:
    """And every row names one."""
    lines = (ROOT / "docs" / "hazards.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if line.startswith("|") and not line.startswith(("| what could go wrong", "|--"))]
    assert rows
    for row in rows:
        tests = re.findall(r"`(test_\w+)[^`]*`(?:\]\((.*?)\))?", row)
        assert tests, row
        for name, path in tests:
            file = ROOT / "docs" / (path or "../tests/engine/test_hazards.py")
            assert f"def {name}(" in file.read_text(encoding="utf-8"), name
