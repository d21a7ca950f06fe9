"""Every transformer of diffusers is in the catalogue, or is known to be none for video: a new release shows up here."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from types import ModuleType

import diffusers.models.transformers
from diffusers import ModelMixin

from fastac.models import MODELS
from tests.marks import needs_diffusers
from tests.models.tiny import TINY

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
    assert {name.partition(":")[0] for name in TINY} == set(MODELS)


@needs_diffusers("0.42")
def test_every_transformer_of_diffusers_is_known() -> None:
    defined = set(transformers_of(diffusers.models.transformers))
    catalogue = {name.partition(":")[0] for name in TINY}
    others = {name for name in defined if NO_VIDEO.search(name)} | NO_CHECKPOINTING
    assert not defined - catalogue - others, "new: add a row in fastac/models and a tiny model, or a name here"
    assert not catalogue - defined, "gone from diffusers: take its row away"
    assert not catalogue & others, "has a row: take its name away here"
