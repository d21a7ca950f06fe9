"""Values of small tensors beside fake ones: what is known, what follows from it, and when it is forgotten."""

from __future__ import annotations

import pytest
import torch

from fastac.engine import torch_private
from fastac.engine.torch_private import NEEDS_VALUES
from fastac.planning.fake_values import Following, KnownValues


@pytest.fixture
def known() -> KnownValues:
    return KnownValues(torch_private.fake_mode())


def fake(known: KnownValues, value: torch.Tensor, is_known: bool = True) -> torch.Tensor:
    """A tensor without data, of which the values are known or not."""
    found: torch.Tensor = known.mode.from_tensor(value.clone())  # the mode gives one fake for one tensor
    if is_known:
        known.learn(found, value)
    return found


MASK = torch.tensor([[1, 1, 0, 1, 0], [0, 0, 0, 0, 1]])


def test_values_follow_from_inputs(known: KnownValues) -> None:
    """Through several operations, and with constants."""
    mask = fake(known, MASK)
    with known.mode, Following(known):
        counts = mask.sum(dim=1)
        assert counts.tolist() == [3, 1]
        assert int((torch.arange(5) * mask[0]).max()) == 3
        assert int(torch.full((2,), 3).sum() + torch.zeros(1, dtype=torch.int64)) == 6


def test_what_depends_on_a_shape_alone_is_known(known: KnownValues) -> None:
    other = fake(known, MASK, is_known=False)
    with known.mode, Following(known):
        assert (int(torch.zeros_like(other).sum()), int(torch.ones_like(other).sum())) == (0, 10)
        assert int(other.new_full((2, 3), 7).sum()) == 42


def test_places_that_a_mask_leaves(known: KnownValues) -> None:
    """Their number is a shape: of what a mask picks, and of its places."""
    mask, features = fake(known, MASK.bool()), fake(known, torch.randn(2, 5, 7), is_known=False)
    with known.mode, Following(known):
        assert features[mask].shape == (4, 7)
        assert features[:, mask[0]].shape == (2, 3, 7)
        assert mask.nonzero().shape == (4, 2)
        assert [len(places) for places in mask[0].nonzero(as_tuple=True)] == [3]


def test_values_that_depend_on_unknown_ones_are_not_known(known: KnownValues) -> None:
    """Nor those that are changed in place by them."""
    mask, other = fake(known, MASK.clone()), fake(known, MASK, is_known=False)
    with known.mode, Following(known):
        for unknown in (other.sum(), (other + mask).sum()):
            with pytest.raises(NEEDS_VALUES):
                unknown.item()
        assert int(mask.sum()) == 4
        mask += other
        with pytest.raises(NEEDS_VALUES):
            mask.sum().item()


def test_what_is_given_stays_as_it_is(known: KnownValues) -> None:
    """A model that changes its inputs in place changes a copy; views of it follow."""
    value = MASK.clone()
    mask = fake(known, value)
    with known.mode, Following(known):
        row = mask[0]
        mask.add_(1)
        assert int(row.sum()) == 8
    assert torch.equal(value, MASK)
