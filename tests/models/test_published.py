"""The published configurations that come with fastac, and those that are read from elsewhere."""

from __future__ import annotations

import inspect
import json
import math
import re
from pathlib import Path

import diffusers
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fastac.errors import FastacError
from fastac.models import MODELS
from fastac.models.published import build, load_configuration
from fastac.models.videos import Compression
from tests.models.tiny import TINY

PUBLISHED = {
    "cogvideox-2b": (1_693_783_872, 2, (13, 30, 45)),
    "cogvideox-5b": (5_570_283_072, 5, (13, 30, 45)),
    "hunyuanvideo": (12_821_012_544, 13, (33, 45, 80)),
    "ltx-video-2b": (1_923_385_472, 2, (21, 16, 22)),
    "mochi-1": (10_027_677_744, 10, (28, 30, 53)),
    "wan2.1-t2v-1.3b": (1_418_996_800, 1.3, (21, 30, 52)),
    "wan2.1-t2v-14b": (14_288_491_584, 14, (21, 45, 80)),
    "wan2.2-ti2v-5b": (4_999_787_712, 5, (31, 22, 40)),
}
"""Parameters counted with diffusers 0.42.1; billions of them that the model is published with; and frames, rows and
columns of patches of the default video, worked out by hand from the sizes of the sources."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_files(name: str) -> None:
    """A file says all it should, nothing else, and where its figures were found."""
    path = Path(__file__).resolve().parents[2] / "fastac" / "models" / "configurations" / f"{name}.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    assert set(content) == {"source", "transformer", "compression", "text_tokens", "default"}
    assert set(content["compression"]) == set(content["default"]) == {"frames", "height", "width"}
    assert content["source"].startswith("huggingface/diffusers scripts/convert_")
    configuration = load_configuration(name)
    assert load_configuration(name.upper()) == configuration
    given = {key: value for key, value in content["transformer"].items() if not key.startswith("_")}
    assert given.items() <= dict(configuration.config).items()
    assert given.keys() <= inspect.signature(getattr(diffusers, configuration.row.class_name)).parameters.keys()
    assert configuration.source == content["source"]
    assert configuration.default.text_tokens == content["text_tokens"]
    assert configuration.default.compression == Compression(**content["compression"])
    # what the class alone would have it be is the same, so that a config.json of the same model is read as it is
    assert configuration.default.compression == configuration.row.default_of(configuration.config).compression
    with torch.device("meta"):
        model = build(configuration)
    with FakeTensorMode():
        configuration.inputs(configuration.default)  # it fits
    count, billions, patches = PUBLISHED[name]
    assert configuration.default.tokens(configuration.patch) == math.prod(patches)
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert count / 1e9 == pytest.approx(billions, rel=0.16)  # 2B is the name of 1.69


CLASSES = sorted(MODELS)


@pytest.mark.parametrize("class_name", CLASSES)
def test_what_diffusers_writes(class_name: str, tmp_path: Path) -> None:
    """The config.json that a model saves is read, and what it says is what is built."""
    model = getattr(diffusers, class_name)(**TINY[class_name].config)
    model.save_config(tmp_path)
    configuration = load_configuration(str(tmp_path / "config.json"))
    assert configuration.row is MODELS[class_name]
    assert configuration.source == str(tmp_path / "config.json")
    rebuilt = build(configuration)
    assert rebuilt.training
    assert {name: tensor.shape for name, tensor in rebuilt.state_dict().items()} == {
        name: tensor.shape for name, tensor in model.state_dict().items()
    }


NO_FILES = ("", "nowhere/config.json", "HeliosTransformer3DModel", "../__init__.py")
THERE_ARE = r"There are .*wan2\.1-t2v-1\.3b.*MochiTransformer3DModel"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *((name, None, f"no such name or class, and no JSON file.*{THERE_ARE}") for name in NO_FILES),
        ("broken.json", "{", f"no JSON file.*{THERE_ARE}"),
        ("list.json", "[]", f"cannot make the inputs of None.*{THERE_ARE}"),
        (
            "other.json",
            '{"_class_name": "HeliosTransformer3DModel"}',
            f"inputs of HeliosTransformer3DModel.*{THERE_ARE}",
        ),
        ("odd.json", '{"_class_name": "CogVideoXTransformer3DModel", "sample_height": null}', "no video fits it"),
    ],
)
def test_what_is_no_configuration(name: str, content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        path = tmp_path / name
        path.write_text(content)
        name = str(path)
    with pytest.raises(FastacError, match=f"(?s){re.escape(name)}.*{message}"):
        load_configuration(name)
