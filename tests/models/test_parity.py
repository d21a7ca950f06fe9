"""Every model of the catalogue trains as without checkpointing, bit for bit, and its attention runs once."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from tests import support
from tests.models import figures
from tests.models.tiny import IMAGES, TINY

ROOT = Path(__file__).resolve().parents[2]
TABLE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("name", TINY)
def test_parity(name: str) -> None:
    """In float32 under `attn_only`. The figures are those of docs/models.md: else run python docs/generate.py."""
    found = figures.measured(name)
    assert found.again == 0
    if torch.__version__ >= (2, 13) and version("diffusers") in TABLE[4]:  # the versions that it was written with
        assert f"| {' | '.join(found.cells())} |" in TABLE


def test_every_line_of_the_table_is_a_model() -> None:
    assert [line.split("`")[1] for line in TABLE if line.startswith("| `")] == list(TINY)


@pytest.mark.parametrize("name", IMAGES)
def test_parity_of_image_models(name: str) -> None:
    assert figures.measured(name).again == 0


@pytest.mark.parametrize("name", TINY)
def test_the_reference_is_sound(name: str) -> None:
    """What parity compares with: nearly every parameter and input has a gradient that is not all zeros."""
    tensors = figures.reference(name).tensors
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    leaves = support.leaves_of(*support.build(name))
    without = [one for one in leaves if f"gradient of {one}" not in tensors or not tensors[f"gradient of {one}"].any()]
    assert len(without) < 0.15 * len(leaves), without
