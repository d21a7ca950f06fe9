"""engine="sac": where torch's selective checkpointing gives up, fastac's own error says what to do."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastac
from tests import support


def twice(loss: torch.Tensor, block: torch.nn.Module) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def gradients_twice(loss: torch.Tensor, block: torch.nn.Module) -> None:
    parameters = list(block.parameters())
    torch.autograd.grad(loss, parameters, retain_graph=True)
    torch.autograd.grad(loss, parameters)


def once(loss: torch.Tensor, block: torch.nn.Module) -> None:
    loss.backward()


def after_a_switch(loss: torch.Tensor, block: Any) -> None:
    block.attend = lambda q, k, v: F.scaled_dot_product_attention(F.scaled_dot_product_attention(q, k, v), k, v)
    loss.backward()


def doubled_in_place(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Legal without checkpointing: this kernel's backward keeps a copy of the output."""
    return support.custom_attention("doubled_in_place")(query, key, value).mul_(2)


@pytest.mark.parametrize(
    ("attend", "backward", "message"),
    [
        (F.scaled_dot_product_attention, twice, "backpropagated already.*retain_graph=True works"),
        (F.scaled_dot_product_attention, gradients_twice, "backpropagated already"),
        (doubled_in_place, once, "was changed in place"),
        (F.scaled_dot_product_attention, after_a_switch, "made a call that the forward did not.*took another path"),
    ],
)
def test_what_torch_gives_up_on_is_explained(
    attend: Callable[..., Any], backward: Callable[..., Any], message: str
) -> None:
    inputs = support.stack_inputs()
    for engine in ("none", "sac"):
        torch.manual_seed(0)
        block = support.AttentionBlock(attend=attend)
        policy = "none" if engine == "none" else "attn_only"
        loss = support.loss_of(support.run_checkpointed(block, *inputs.values(), policy=policy, engine="sac"))
        if engine == "none":
            backward(loss, block)
            continue
        with pytest.raises(fastac.FastacError, match=message) as raised:
            backward(loss, block)
        assert isinstance(raised.value.__cause__, RuntimeError), "torch's own error is there to read"


def test_an_error_of_the_block_s_own_in_recompute_passes_as_it_is() -> None:
    block = support.AttentionBlock()
    loss = support.loss_of(fastac.checkpoint(block, *support.stack_inputs().values(), engine="sac"))
    block.ffn[0].weight.data = torch.zeros(3, 3)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as raised:
        loss.backward()
    assert not isinstance(raised.value, fastac.FastacError)


def test_a_weight_that_autocast_has_in_its_cache(attention_executions: Counter[str]) -> None:
    """Its second use in the forward makes no cast, and one in its recompute."""
    block, inputs = support.AttentionBlock(), support.stack_inputs()

    def step(checkpoint: Callable[..., Any]) -> support.Tensors:
        def twice_under_autocast(video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return checkpoint(block, checkpoint(block, video, text), text)

        attention_executions.clear()
        block.zero_grad()
        found = support.train_step(twice_under_autocast, inputs)
        return found | support.gradients(support.leaves_of(block, {}))

    expected = step(lambda function, *args: function(*args))
    support.assert_same(step(functools.partial(fastac.checkpoint, engine="sac")), expected)
    assert attention_executions == {support.CPU_ATTENTION: 4}
