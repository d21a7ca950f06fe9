"""What the tests of the commands share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.models.tiny import TINY


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """The arguments for a Wan transformer of three small blocks, and a short video."""
    config = {**TINY["WanTransformer3DModel"].config, "num_layers": 3}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"_class_name": "WanTransformer3DModel", **config}))
    return [str(path), "--frames", "5", "--height", "32", "--width", "48", "--text-tokens", "8"]
