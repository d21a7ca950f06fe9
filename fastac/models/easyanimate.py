"""EasyAnimate: joint attention over video and text. Only the first blocks have separate weights for the text."""

from collections.abc import Mapping
from typing import Any

from fastac.models.row import ModelRow
from fastac.models.videos import Compression, Video, inputs_of_text_to_video


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    return inputs_of_text_to_video(config, video, text_width=config["text_embed_dim"], times=video.dtype)


ROWS = (
    ModelRow(
        "EasyAnimateTransformer3DModel",
        video_inputs=_inputs_of_video,
        default_video=Video(frames=49, height=512, width=512, text_tokens=256, compression=Compression(4, 8, 8)),
    ),
)
