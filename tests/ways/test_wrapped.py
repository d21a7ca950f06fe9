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
from tests.compiler import fresh_compiler, kernel_folder, reset  # noqa: F401  (two fixtures)
from tests.model_state import state_of
from tests.ways.recipes import (
    ATTENTION,
    COGVIDEOX,
    EACH_COMPILED_MODEL,
    EACH_MODEL,
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


def assert_wrapped_training_is_exact(name: str, wrap: Wrap, order: str = "before", with_full: bool = True) -> None:
    """Two steps under fastac and one after `disable`, which takes the wrapper, too.

    order: of wrapping, against fastac.enable, which takes the wrapper where there is one.
    """

    def recipe(run: Run) -> None:
        model, batch = build(name)
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
                assert (report.model_class, report.active) == (name, run.policy is not None)
                fastac.disable(wrapped)
                assert not fastac.report(wrapped).active
                assert order == "after" or state_of(model) == inside
            run.step(wrapped, one, optimizer=optimizer)

    blocks = ATTENTION[name].in_blocks
    assert_exact_and_saved(recipe, name, again=[blocks, blocks, 0], with_full=with_full)


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("wrap", [in_parallel, static, with_adapter], ids=lambda wrap: wrap.__name__)
@EACH_MODEL
def test_eager_wrappers(name: str, wrap: Wrap, order: str, process_group: None) -> None:
    assert_wrapped_training_is_exact(name, wrap, order)


@EACH_MODEL
def test_adapters_in_parallel(name: str, process_group: None) -> None:
    assert_wrapped_training_is_exact(name, lambda model: in_parallel(with_adapter(model)))


@pytest.mark.slow
@EACH_COMPILED_MODEL
def test_a_compiled_model(name: str) -> None:
    """The compiler builds the saving into its graph: exact from the first step on, and counted at the kernel."""
    assert_wrapped_training_is_exact(name, compiled, with_full=name == COGVIDEOX)


@pytest.mark.slow
def test_a_compiled_model_in_parallel(process_group: None) -> None:
    assert_wrapped_training_is_exact(COGVIDEOX, lambda model: in_parallel(compiled(model)), with_full=False)


@pytest.mark.parametrize("wrap", [in_parallel, with_adapter], ids=lambda wrap: wrap.__name__)
@EACH_MODEL
def test_blocks_have_the_names_of_the_model_inside(name: str, wrap: Wrap, process_group: None) -> None:
    """In policies per block, in reports and in errors."""

    def recipe(run: Run) -> None:
        model, batch = build(name)
        wrapped = wrap(model)
        containers = {row.container: row.blocks for row in fastac.report(model).rows}
        first = {f"{container}.0": "full" for container in containers}
        run.enable(wrapped, first | {"*": "attn_only"})
        optimizer = adamw(wrapped)
        for one in batches(batch, 2):
            run.step(wrapped, one, optimizer=optimizer)
        report = fastac.report(wrapped)
        assert {row.container: row.blocks for row in report.rows} == containers
        if run.policy == "attn_only":
            assert sum(row.saved for row in report.rows) == ATTENTION[name].in_blocks // 2
            with pytest.raises(fastac.FastacError, match=r'"module\.blocks\.0" matches no block'):
                fastac.enable(wrapped, {"module.blocks.0": "full", "*": "attn_only"})

    assert_exact_and_saved(recipe, name, saved_again=ATTENTION[name].in_blocks // 2)


@EACH_MODEL
def test_verify_in_parallel(name: str, process_group: None) -> None:
    model, batch = build(name)
    wrapped = DistributedDataParallel(model)
    found = fastac.verify(wrapped, **batch)
    assert (found.subject, found.different) == (name, ())
    assert found.saved == ATTENTION[name].in_blocks
