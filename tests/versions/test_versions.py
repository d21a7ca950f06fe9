"""python -m tests.versions writes docs/versions.md where everything passed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.versions import __main__ as versions


def test_a_run_that_failed_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example = {"kernels": {"none": 4, "full": 8, "attn_only": 4}, "compiled": {"full": 8, "attn_only": 4}, "exact": {}}
    example |= {"diffusers": "0", "private": 1, "absent": [], "python": "3"}
    failed = ["hook"]
    monkeypatch.setattr(versions, "DOCUMENT", tmp_path / "versions.md")
    monkeypatch.setattr(versions, "run", lambda release, rooms: versions.Result(release, example, {}, failed))
    monkeypatch.setattr(sys, "argv", ["tests.versions", "--all", "--write"])
    with pytest.raises(SystemExit, match="hook"):
        versions.main()
    assert not versions.DOCUMENT.exists()
    failed.clear()
    versions.main()
    assert versions.DOCUMENT.exists()
