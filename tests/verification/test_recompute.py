"""What recompute ran, most time first: a hidden kernel that no name shows stands at the top."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastac
from fastac import Policy
from tests import support
from tests.diagnosis.test_hidden_functions import hidden
from tests.diagnosis.test_unknown import make_op

TOKENS, WIDTH = 256, 32


class Block(torch.nn.Module):
    def __init__(self, more: Any) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.more = more

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(hidden).chunk(3, -1))
        attended = F.scaled_dot_product_attention(q, k, v)
        return hidden + (attended if self.more is None else attended + self.more(q, k, v)).transpose(1, 2).flatten(2)


def model_of(more: Any = None) -> Any:
    return torch.nn.Sequential(Block(more), Block(more))


def verified(model: Any, tokens: int = TOKENS, device: str = "cpu", **options: Any) -> Any:
    fastac.enable(model.to(device), "attn_only", blocks=[*model])
    return fastac.verify(model, torch.randn(1, tokens, WIDTH, device=device), **options)


@pytest.mark.parametrize(
    ("name", "device"),
    [("fastac_recompute::fused", "cpu"), ("Fused", "cpu"), pytest.param("Fused", "cuda", marks=pytest.mark.gpu)],
)
def test_a_hidden_kernel_stands_first(name: str, device: str, caplog: pytest.LogCaptureFixture) -> None:
    """In what verify prints, and in the report from then on; a warning, as it takes more than a fifth."""
    model = model_of(hidden(name) if name == "Fused" else make_op(*name.split("::")))
    with caplog.at_level(logging.WARNING, "fastac"):  # over few tokens it takes no longer than the ops around it
        verification = verified(model, tokens=1024, device=device)
    recompute = verification.recompute
    assert recompute.on_device == (device == "cuda")
    first, *others = recompute.shares().items()
    assert first[0] == name
    assert recompute.marks[name] == "unknown"
    assert recompute.marks["aten::linear"] == "known"
    assert sum(share for _, share in others) + first[1] == pytest.approx(1)
    if device == "cpu":  # a GPU may take longer to launch other kernels
        assert first[1] > 0.2
        (line,) = (line for line in caplog.messages if "of recompute" in line)
        assert name in line
    assert str(recompute) in str(verification)
    assert str(recompute) in str(fastac.report(model))


@pytest.mark.usefixtures("rows_as_before")
def test_what_fastac_knows_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Visible, declared to be no attention, or torch's."""
    kernel = make_op("fastac_recompute_other", "fused")
    fastac.register(fastac.Row(namespace="fastac_recompute_other", name="fused", kind="other"))
    with caplog.at_level(logging.WARNING, "fastac"):
        recompute = verified(model_of(kernel)).recompute
        plain = verified(model_of()).recompute
    assert recompute.marks["fastac_recompute_other::fused"] == "known"
    assert set(plain.marks.values()) == {"known"}
    assert not [line for line in caplog.messages if "of recompute" in line]


@pytest.mark.parametrize(
    ("policy", "runs"), [("attn_only", 0), (Policy(min_kv=support.TEXT_TOKENS + 1), 1), ("full", 2)], ids=str
)
def test_only_attention_that_runs_again_is_listed(policy: Any, runs: int) -> None:
    """What the tape answered takes no time of a kernel. The report prints the same table."""
    model = support.stack()
    fastac.enable(model, policy, blocks="blocks")
    verification: Any = fastac.verify(model, **support.stack_inputs())
    recompute = verification.recompute
    assert verification.policy_executions[1] == 2 * runs
    attention = "aten::scaled_dot_product_attention"
    assert recompute.marks.get(attention) == ("known" if runs else None)
    assert (attention in recompute.times) == bool(runs)
    assert recompute.times.keys() == recompute.marks.keys()
    assert str(recompute) in str(fastac.report(model))


def test_a_visible_function_that_the_tape_answers_is_not_listed() -> None:
    answered = hidden("Answered")
    fastac.make_visible(answered.__self__, layout="bhsd", dropout=None)
    recompute = verified(model_of(answered)).recompute
    assert not {"Answered", "aten::scaled_dot_product_attention"} & recompute.marks.keys()


class Around(torch.autograd.Function):
    """Around a known attention and a hidden one."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any) -> Any:
        ctx.save_for_backward(q, k, v)
        attended = F.scaled_dot_product_attention(q, k, v)
        return attended + sum(support.attention_math(q, k, v)[0] for _ in range(4))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        q, k, v = ctx.saved_tensors
        return grad * q, grad * k, grad * v


def test_what_hides_beside_a_saved_attention() -> None:
    """In one Function; a range of the user's, whatever its name, is no op."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("layer::attention"):
            return Around.apply(q, k, v)

    recompute = verified(model_of(attend)).recompute
    assert "layer::attention" not in recompute.marks
    assert recompute.marks["Around"] == "unknown"
