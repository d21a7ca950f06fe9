"""One row of the catalogue of models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fastac.models.videos import Video


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelRow:
    """What fastac knows about one model class of diffusers.

    containers: dotted names of the module lists whose members the model checkpoints one by one.
    video_inputs: makes the keyword arguments of one call from a whole configuration, such as `model.config`, and a
    video, as the pipeline of diffusers calls the model. default_video: the video that this pipeline makes when asked
    for nothing else, with the compression of its VAE. Both or neither of them.
    """

    class_name: str
    containers: tuple[str, ...]
    video_inputs: Callable[[Mapping[str, Any], Video], dict[str, Any]] | None = None
    default_video: Callable[[Mapping[str, Any]], Video] | None = None

    @property
    def is_available(self) -> bool:
        """Whether the installed diffusers has the class."""
        import diffusers

        return hasattr(diffusers, self.class_name)
