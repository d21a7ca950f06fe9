"""One row of the catalogue of models."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from fastac.models.videos import Video


@dataclasses.dataclass(frozen=True)
class ModelRow:
    """What fastac knows about one model class of diffusers."""

    class_name: str
    containers: tuple[str, ...]
    """Dotted names of the module lists that hold the blocks."""
    video_inputs: Callable[[Mapping[str, Any], Video], dict[str, Any]] | None = None
    """Makes the keyword arguments of one call, as diffusers' pipeline passes them, from a complete configuration (as
    `model.config`) and a video. None if fastac cannot make inputs for the class."""
    default_video: Video | Callable[[Mapping[str, Any]], Video] | None = None
    """The video that this pipeline makes by default, with the compression of its VAE; or a function of the
    configuration, if it depends on that. A row has both this and `video_inputs`, or neither."""

    def default_of(self, config: Mapping[str, Any]) -> Video:
        """The default video under a configuration."""
        assert self.default_video is not None  # it comes with video_inputs
        return self.default_video if isinstance(self.default_video, Video) else self.default_video(config)
