"""Every transformer of diffusers is in the catalogue, or is known to be none for video: a new release shows up here."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Iterable
from types import ModuleType

import diffusers.models.transformers
import pytest
from diffusers import ModelMixin

from fastac.models import MODELS
from fastac.models.loops import loops_of

NO_VIDEO = frozenset(
    {
        # images
        "AuraFlowTransformer2DModel",
        "BriaFibo2Transformer2DModel",
        "BriaFiboTransformer2DModel",
        "BriaTransformer2DModel",
        "ChromaTransformer2DModel",
        "CogView3PlusTransformer2DModel",
        "CogView4Transformer2DModel",
        "DiTTransformer2DModel",
        "DreamLiteTransformer2DModel",
        "ErnieImageTransformer2DModel",
        "Flux2Transformer2DModel",
        "Flux3Transformer2DModel",
        "FluxTransformer2DModel",
        "GlmImageTransformer2DModel",
        "HiDreamImageTransformer2DModel",
        "HunyuanDiT2DModel",
        "HunyuanImageTransformer2DModel",
        "Ideogram4Transformer2DModel",
        "JoyImageEditPlusTransformer3DModel",  # its third axis counts images
        "JoyImageEditTransformer3DModel",
        "Krea2Transformer2DModel",
        "LongCatImageTransformer2DModel",
        "Lumina2Transformer2DModel",
        "LuminaNextDiT2DModel",
        "NucleusMoEImageTransformer2DModel",
        "OmniGenTransformer2DModel",
        "OvisImageTransformer2DModel",
        "PRXTransformer2DModel",
        "PixArtTransformer2DModel",
        "PriorTransformer",
        "QwenImage21Transformer2DModel",
        "QwenImageTransformer2DModel",
        "SD3Transformer2DModel",
        "SanaTransformer2DModel",
        "Transformer2DModel",
        "ZImageTransformer2DModel",
        # sound
        "AceStepTransformer1DModel",
        "LongCatAudioDiTTransformer",
        "MiniMaxMusic3RVQDepthDecoder",
        "MiniMaxMusic3Transformer1DModel",
        "StableAudio3DiTModel",
        "StableAudioDiTModel",
        "T5FilmDecoder",
        # proteins
        "RFD4ProteinaTransformer",
    }
)

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


def problems(defined: Iterable[str], catalogue: Iterable[str], others: Iterable[str]) -> list[str]:
    """What is to be done, a sentence for each class, so that catalogue and others name what is defined, once."""
    defined, catalogue, others = set(defined), set(catalogue), set(others)
    return [
        *(
            f"{name} is new: add a row in fastac/models, or its name here"
            for name in sorted(defined - catalogue - others)
        ),
        *(f"{name} is gone from diffusers: take its row away" for name in sorted(catalogue - defined)),
        *(f"{name} is gone from diffusers: take its name away here" for name in sorted(others - defined)),
        *(f"{name} has a row: take its name away here" for name in sorted(catalogue & others)),
    ]


IN_CATALOGUE = {row.class_name for row in MODELS.values()}


def test_every_transformer_of_diffusers_is_known() -> None:
    found = problems(transformers_of(diffusers.models.transformers), IN_CATALOGUE, NO_VIDEO | NO_CHECKPOINTING)
    assert not found, "\n".join(found)


def test_what_can_not_be_checkpointed_still_can_not() -> None:
    defined = transformers_of(diffusers.models.transformers)
    able = [name for name in NO_CHECKPOINTING if defined[name]._supports_gradient_checkpointing]
    assert not able, f"now with gradient checkpointing, add rows in fastac/models: {', '.join(able)}"


def test_the_loops_of_every_class_are_read() -> None:
    """What of a class without a row is checkpointed is read from its code, which must have such loops."""
    unread = [
        name
        for name, model_class in transformers_of(diffusers.models.transformers).items()
        if model_class._supports_gradient_checkpointing and not all(loops_of(model_class) or [frozenset()])
    ]
    assert not unread, f"fastac.models.loops does not understand {', '.join(unread)}"


@pytest.mark.parametrize(
    ("defined", "catalogue", "others", "problem"),
    [
        ({"Wan", "Flux", "New"}, {"Wan"}, {"Flux"}, "New is new: add a row in fastac/models, or its name here"),
        ({"Flux"}, {"Wan"}, {"Flux"}, "Wan is gone from diffusers: take its row away"),
        ({"Wan"}, {"Wan"}, {"Flux"}, "Flux is gone from diffusers: take its name away here"),
        ({"Wan"}, {"Wan"}, {"Wan"}, "Wan has a row: take its name away here"),
    ],
    ids=["new", "row of a class that is gone", "name of a class that is gone", "twice"],
)
def test_a_difference_is_told(defined: set[str], catalogue: set[str], others: set[str], problem: str) -> None:
    assert problems(defined, catalogue, others) == [problem]


def test_a_class_that_diffusers_adds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers.models.transformers import transformer_wan

    class NewTransformer3DModel(ModelMixin):
        pass

    NewTransformer3DModel.__module__ = transformer_wan.__name__
    monkeypatch.setattr(transformer_wan, "NewTransformer3DModel", NewTransformer3DModel, raising=False)
    found = problems(transformers_of(diffusers.models.transformers), IN_CATALOGUE, NO_VIDEO | NO_CHECKPOINTING)
    assert [line.partition(" ")[0] for line in found] == ["NewTransformer3DModel"]
