"""Models that are inside DistributedDataParallel, torch.compile's OptimizedModule or a PeftModel: enable takes those.

What a wrapped training computes is compared with the same wrapped training without fastac.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import peft
import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import fastac
from tests import support
from tests.compiler import reset
from tests.model_state import state_of
from tests.ways.recipes import (
    ATTENTION,
    WAN,
    Run,
    adamw,
    assert_exact_and_saved,
    batches,
    build,
)

Wrap = Callable[[torch.nn.Module], torch.nn.Module]


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """One process that is a group by itself."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def with_adapter(model: torch.nn.Module) -> torch.nn.Module:
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_dropout=0.3, target_modules=["to_q", "to_v"]))
    support.fill_zeros(wrapped)
    return wrapped


def compiled(model: torch.nn.Module) -> torch.nn.Module:
    reset()
    return torch.compile(model, backend="aot_eager")


def in_parallel(model: torch.nn.Module) -> torch.nn.Module:
    """As scripts with a part that trains in some steps alone have it."""
    return DistributedDataParallel(model, find_unused_parameters=True)


def static(model: torch.nn.Module) -> torch.nn.Module:
    return DistributedDataParallel(model, static_graph=True)


def assert_wrapped_training_is_exact(wrap: Wrap, order: str = "before", with_full: bool = True) -> None:
    """Two steps under fastac and one after `disable`, which takes the wrapper, too.

    order: of wrapping, against fastac.enable, which takes the wrapper where there is one.
    """

    def recipe(run: Run) -> None:
        model, batch = build()
        if order == "after":
            run.enable(model)
        wrapped = wrap(model)
        inside = state_of(model)
        if order == "before":
            run.enable(wrapped)
        optimizer = adamw(wrapped)
        for number, one in enumerate(batches(batch, 3)):
            if number == 2:
                report = fastac.report(wrapped)
                assert (report.model_class, report.active) == (WAN, run.policy is not None)
                fastac.disable(wrapped)
                assert not fastac.report(wrapped).active
                assert order == "after" or state_of(model) == inside
            run.step(wrapped, one, optimizer=optimizer)

    blocks = ATTENTION[WAN].in_blocks
    assert_exact_and_saved(recipe, again=[blocks, blocks, 0], with_full=with_full)


@pytest.mark.parametrize(
    ("wrap", "order"),
    [(in_parallel, "before"), (static, "after"), (with_adapter, "before")],
    ids=["DDP", "DDP with a static graph", "peft"],
)
def test_eager_wrappers(wrap: Wrap, order: str, process_group: None) -> None:
    assert_wrapped_training_is_exact(wrap, order)


@pytest.mark.slow
def test_a_compiled_model_in_parallel(process_group: None) -> None:
    """The compiler builds the saving into its graph: exact from the first step on, and counted at the kernel."""
    assert_wrapped_training_is_exact(lambda model: in_parallel(compiled(model)), with_full=False)


def test_blocks_have_the_names_of_the_model_inside(process_group: None) -> None:
    """In policies per block, in reports and in errors; and `verify` takes the wrapper, too."""
    model, batch = build()
    wrapped = in_parallel(with_adapter(model))
    fastac.enable(wrapped, {"blocks.0": "full", "*": "attn_only"})
    wrapped(**batch)[0].sum().backward()
    (row,) = fastac.report(wrapped).rows
    assert (row.container, row.blocks, row.saved) == ("blocks", 2, 2)
    with pytest.raises(fastac.FastacError, match=r"module\.blocks\.0"):
        fastac.enable(wrapped, {"module.blocks.0": "full", "*": "attn_only"})
    found = fastac.verify(wrapped, **batch)
    assert (found.subject, found.different, found.saved) == (WAN, (), 2)
