"""SageAttention: kernels for inference. Release 2 has ops, which are refused; release 1.0.6 has none that could be.

The ops of release 2, which is on no package index, are defined here. The Triton kernels of 1.0.6 are the real ones.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.backends import packages

packages.use("sage")

from tests.backends import triton_on_cpu

triton_on_cpu.takes_for_cuda("sageattention")

from sageattention.core import sageattn

from fastac.backends import sage
from tests import support
from tests.backends.parity import Parity
from tests.support import assert_same, train_step

SCHEMA = (
    "(Tensor query, Tensor key, Tensor value, Tensor(a!) output, Tensor query_scale, Tensor key_scale{extra}, "
    "int tensor_layout, int is_causal, int qk_quant_gran, float sm_scale, int return_lse) -> Tensor"
)
OPS = {
    "sageattention::qk_int8_sv_f16_accum_f16_attn": 0,
    "sageattention::qk_int8_sv_f16_accum_f32_attn": 0,
    "sageattention::qk_int8_sv_f16_accum_f16_attn_inst_buf": 0,
    "sageattention::qk_int8_sv_f16_accum_f16_fuse_v_mean_attn": 1,
    "sageattention_sm89::qk_int8_sv_f8_accum_f32_fuse_v_scale_attn": 1,
    "sageattention_sm89::qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf": 1,
    "sageattention_sm89::qk_int8_sv_f8_accum_f16_fuse_v_scale_attn_inst_buf": 1,
    "sageattention_sm89::qk_int8_sv_f8_accum_f32_fuse_v_scale_fuse_v_mean_attn": 2,
    "sageattention_sm90::qk_int8_sv_f8_accum_f32_attn_inst_buf": 0,
    "sageattention_sm90::qk_int8_sv_f8_accum_f32_fuse_v_scale_attn_inst_buf": 1,
}
"""Op of release 2.2 -> how many scales and means of the values it takes."""


def _define(name: str, extra: int) -> Any:
    def kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor, *_: Any) -> Any:
        output.copy_(support.attention_math(query.float(), key.float(), value)[0])
        return torch.empty(0)

    schema = SCHEMA.format(extra="".join(f", Tensor value_{i}" for i in range(extra)))
    return torch.library.custom_op(name, kernel, mutates_args=("output",), schema=schema)


DEFINED = {name: _define(name, extra) for name, extra in OPS.items()}


def refused(name: str) -> Any:
    def function(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """As the library does it: quantized, into an output of its own that no gradient leads through."""
        output, scale = torch.empty_like(query), torch.ones(1)
        quantized = [tensor.mul(16).to(torch.int8) for tensor in (query, key)]
        options = *[scale] * OPS[name], 1, 0, 2, query.shape[-1] ** -0.5, 0
        DEFINED[name](*quantized, value, output, scale, scale, *options)
        return output

    function.__name__ = name.partition("::")[2]
    return function


class TestSage(Parity):
    rows = sage.ROWS
    refused = tuple(map(refused, OPS))


class Block(torch.nn.Module):
    """Attention by release 1, with one head of 64 dimensions. fastac knows what is attention's by the name."""

    def __init__(self) -> None:
        super().__init__()
        self.attn_qkv, self.attn_out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        query, key, value = (tensor[:, None].contiguous() for tensor in self.attn_qkv(video).chunk(3, -1))
        return video + self.attn_out(sageattn(query, key, value)[:, 0])


def test_release_1_shows_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Plain functions that launch Triton, no op and no autograd.Function: what fastac sees is what gets no gradient."""
    found = {"video": torch.randn(2, 64, 64, requires_grad=True), "text": torch.empty(0)}
    reference = train_step(support.stack(layers=1, block=Block), found)
    assert "gradient of blocks.0.attn_out.weight" in reference
    assert "gradient of blocks.0.attn_qkv.weight" not in reference
    assert_same(train_step(support.stack(layers=1, block=Block, policy="attn_only"), found), reference)
    assert any("attn_qkv.weight" in record.getMessage() for record in caplog.records)
