"""One row of the catalogue of models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fastac.models.videos import Video


@dataclasses.dataclass(frozen=True)
class ModelRow:
    """How the inputs of one model class of diffusers follow from a video."""

    class_name: str
    video_inputs: Callable[[Mapping[str, Any], Video], dict[str, Any]]
    """Makes the keyword arguments of one call, as diffusers' pipeline passes them, from a complete configuration (as
    `model.config`) and a video."""
    default_video: Video | Callable[[Mapping[str, Any]], Video]
    """The video that this pipeline makes by default, with the compression of its VAE; or a function of the
    configuration, if it depends on that."""

    def default_of(self, config: Mapping[str, Any]) -> Video:
        """The default video under a configuration."""
        return self.default_video if isinstance(self.default_video, Video) else self.default_video(config)
