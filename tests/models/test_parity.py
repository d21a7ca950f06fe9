"""Every model of the catalogue trains as without checkpointing, bit for bit, and its attention runs once."""

from __future__ import annotations

import importlib
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from types import ModuleType
from typing import Any

import diffusers.models.transformers
import pytest
import torch
from diffusers import ModelMixin

import fastac
from fastac.models import MODELS
from tests import support
from tests.backends import packages
from tests.backends.groups import REQUIRED, ROOT, not_here
from tests.marks import needs_diffusers
from tests.models import figures
from tests.models.tiny import IMAGES, TINY
from tests.pairs import FAMILIES
from tests.support import executions_of, train_step

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


# Older diffusers: four families of models, each release in a process of its own


@pytest.mark.slow
@pytest.mark.parametrize("case", packages.DIFFUSERS)
def test_older_diffusers(case: str) -> None:
    if absent := not_here([case], REQUIRED):
        pytest.skip(absent[0])
    (name,) = packages.DIFFUSERS[case]
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider", "-k", FAMILIES]
    environment = {**os.environ, "PYTHONPATH": str(packages.place(name))}
    command.append("tests/models/test_parity.py::test_parity")
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stdout
    assert f"diffusers {packages.PACKAGES[name].version} has no WanAnimate2" in done.stdout, "another one ran"
    for family in ("Wan", "LTXVideo", "HunyuanVideo", "CogVideoX"):
        assert f"test_parity.py::test_parity[{family}Transformer3DModel]" in done.stdout, done.stdout


# Every transformer of diffusers is in the catalogue, or known to be none for video: a new release shows up here

NO_VIDEO = re.compile("[12]D|Image|Audio|Music|Protein|PriorTransformer|T5FilmDecoder")
"""In the names of classes for images, sound and proteins."""

NO_CHECKPOINTING = frozenset({"SanaWMLTX2RefinerTransformer3DModel", "TransformerTemporalModel"})
"""For video, but diffusers has no gradient checkpointing for them."""


def transformers_of(package: ModuleType) -> dict[str, type]:
    """Every model class that a module of a package defines, by name."""
    found = {}
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        module = importlib.import_module(info.name)
        for name, value in vars(module).items():
            if inspect.isclass(value) and issubclass(value, ModelMixin) and value.__module__ == module.__name__:
                found[name] = value
    return found


def test_every_row_has_a_tiny_model() -> None:
    assert {name.partition(":")[0] for name in TINY} >= set(MODELS)


@needs_diffusers("0.42")
def test_every_transformer_of_diffusers_is_known() -> None:
    defined = set(transformers_of(diffusers.models.transformers))
    catalogue = {name.partition(":")[0] for name in TINY}
    others = {name for name in defined if NO_VIDEO.search(name)} | NO_CHECKPOINTING
    assert not defined - catalogue - others, "new: add a tiny model, or a name here"
    assert not catalogue - defined, "gone from diffusers: take it away"
    assert not catalogue & others, "has a tiny model: take its name away here"


# What single models do unlike the others: how they call their blocks, and how often their blocks attend


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        # Between video and sound, where there is sound.
        ("LTX2VideoTransformer3DModel", ({}, 12), ({"isolate_modalities": True}, 8)),
        ("Kandinsky6Transformer3DModel", ({"audio_hidden_states": None}, 6), ({}, 14)),
        # Temporal blocks can be switched off.
        ("LatteTransformer3DModel", ({}, 6), ({"enable_temporal_attentions": False}, 4)),
        # In every second block; without a camera that attends once less.
        ("SanaWMTransformer3DModel", ({}, 8), ({"camera_conditions": None}, 6)),
    ],
)
def test_blocks_that_attend_now_and_then(name: str, first: Any, second: Any) -> None:
    """In steps of one model: all that was to be saved is saved, and nothing is amiss.

    first, second: what is changed in the inputs, and attention calls of the forward.
    """
    changes = {"num_layers": 4} if name.startswith("Sana") else {}
    model, _ = support.build(name, **changes)
    fastac.enable(model)
    for changed, forward in (first, second, first):
        plain, inputs = support.build(name, **changes)
        inputs = {key: value for key, value in (inputs | changed).items() if value is not None}
        assert executions_of(model, inputs, train_step(plain, inputs)) == forward


def test_a_backend_that_is_set_and_ignored(attention_executions: Counter[str]) -> None:
    """CogVideoX: set_attention_backend changes nothing for it, and scaled_dot_product_attention runs, and is saved."""
    model, inputs = support.build("CogVideoXTransformer3DModel")
    fastac.enable(model)
    assert fastac.report(model).remarks == ()
    fastac.disable(model)
    model.set_attention_backend("_native_math")  # which could not be saved, if it were used
    support.assert_model(model, inputs, attention_executions)
    (remark,) = fastac.report(model).remarks
    assert "_native_math" in remark
    assert "CogVideoXAttnProcessor2_0" in remark
    model, _ = support.build("WanTransformer3DModel")
    model.set_attention_backend("_native_flash")
    fastac.enable(model)
    assert fastac.report(model).remarks == ()
