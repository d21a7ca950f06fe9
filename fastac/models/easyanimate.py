"""EasyAnimate: joint attention over video and text, with weights of its own for the text in the first blocks alone."""

from collections.abc import Mapping
from typing import Any

from fastac.models.row import ModelRow
from fastac.models.videos import Compression, Video, inputs_of_text_to_video


def _inputs_of_video(config: Mapping[str, Any], video: Video) -> dict[str, Any]:
    return inputs_of_text_to_video(config, video, text_width=config["text_embed_dim"], times=video.dtype)


ROWS = (
    ModelRow(
        class_name="EasyAnimateTransformer3DModel",
        containers=("transformer_blocks",),
        video_inputs=_inputs_of_video,
        default_video=Video(frames=49, height=512, width=512, text_tokens=256, compression=Compression(4, 8, 8)),
    ),
)
