"""What the server that ranks come from has loaded. Nothing here may start a thread, and no model is built."""

from diffusers import (  # noqa: F401
    CogVideoXTransformer3DModel,
    HunyuanVideoTransformer3DModel,
    LTXVideoTransformer3DModel,
    WanTransformer3DModel,
)

import fastac  # noqa: F401
from tests import support  # noqa: F401
