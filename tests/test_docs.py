"""Documents that are made from code are as the code makes them, and what documents point to is there."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_support_matrix_is_not_stale() -> None:
    """It is made in the state of a fresh process: rows that other tests register are left out."""
    import subprocess
    import sys

    script = "import runpy; print(runpy.run_path('docs/generate.py')['support'](), end='')"
    made = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert made == generator().SUPPORT.read_text(encoding="utf-8"), "run: python docs/generate.py"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_links_to_exist(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)\)", document.read_text(encoding="utf-8"))
    missing = [link for link in links if not (document.parent / link).exists()]
    assert not missing
