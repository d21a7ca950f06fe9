"""Fingerprints of single tensors: what they cost and what they tell apart."""

from __future__ import annotations

import pytest
import torch

import fastac
from fastac import FastacError
from fastac.cli.measuring import allocated_bytes
from fastac.engine import comparison, region
from fastac.engine.comparison import fingerprint, relative_difference


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    first, second = fingerprint(one), fingerprint(other)
    assert first is not None
    assert second is not None
    return relative_difference(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.int64])
def test_makes_no_copy(dtype: torch.dtype) -> None:
    """The step whose values are compared has the peak of any other: nothing of a tensor's size is allocated.

    On a CPU torch adds up narrower types as copies, of one tensor at a time.
    """
    tensor = torch.ones(4, 1024, 512, dtype=dtype)
    assert allocated_bytes(lambda: fingerprint(tensor)).peak < 2**20 < tensor.nbytes


def test_whole_numbers_are_added_up_exactly() -> None:
    one = torch.full((3, 5000), 2**31)
    other = one.clone()
    other[1, 17] += 1
    large = torch.tensor([2**60, 5, 7])
    for first, second in ((one, other), (large, large + torch.tensor([0, 1, 0]))):
        assert difference(first, first.clone()) == 0
        assert difference(first, second) == float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_that_change_places_are_seen(dtype: torch.dtype) -> None:
    tensor = torch.randn(2, 600, 300, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert difference(tensor, tensor.clone()) == 0
    assert difference(tensor, tensor.flip(1)) > 0.05
    assert difference(tensor, tensor.flip(2)) > 0.05


@pytest.mark.parametrize(
    "tensor",
    [torch.ones(0, 3, dtype=torch.bfloat16), torch.ones(5, device="meta"), torch.ones(4, 4).to_sparse()],
    ids=["empty", "meta", "sparse"],
)
def test_without_values_there_is_none(tensor: torch.Tensor) -> None:
    assert fingerprint(tensor) is None


def test_a_conjugate_is_its_values() -> None:
    tensor = torch.randn(30, 20, dtype=torch.complex64, generator=torch.Generator().manual_seed(0))
    assert difference(tensor.conj(), tensor.conj_physical()) == 0
    assert difference(tensor.conj(), tensor) > 0.01


def test_an_accelerator_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers that are tensors, as on a device, are read when the next region begins, and raise once."""

    def on_a_device(tensor: torch.Tensor) -> comparison.Fingerprint | None:
        found = fingerprint(tensor)
        return found and found._replace(sums=[*map(torch.tensor, found.sums)], norm=torch.tensor(found.norm))

    for module in (comparison, region):
        monkeypatch.setattr(module, "fingerprint", on_a_device)
    scale = [2.0]

    def forward() -> torch.Tensor:
        return fastac.checkpoint(lambda one: (one * scale[0]).sin(), torch.ones(4, requires_grad=True), policy="full")

    output = forward()
    scale[0] = 1.0
    output.sum().backward()
    with pytest.raises(FastacError, match="does not compute what the forward did"):
        forward()
    forward().sum().backward()
    forward()
