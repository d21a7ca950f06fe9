"""torch.compile: compiled blocks under checkpointing, checkpointed blocks in a compiled model, and other traces.

Every run begins as after a change of code: dynamo is reset, and nothing that AOT or inductor compiled before is taken
from a cache, because the first step after a compile is where gradients went wrong. Each test fails when its guard in
fastac/tape.py, checkpointing.py, selective.py, diagnosis.py or torch_internals.py is taken out.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch._dynamo
import torch._functorch.config
import torch._inductor.config
import torch.nn.functional as F
from torch._dynamo.utils import counters, get_compilation_metrics
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

import fastac
from fastac import FastacError, PolicyNotAppliedError
from fastac.models import MODELS
from fastac.policy import resolve_blocks
from tests import support
from tests.marks import slow
from tests.support import CPU_ATTENTION, AttentionBlock, assert_same, relative_error, stack, stack_inputs, train_step

INDUCTOR_WHEN_SLOW = pytest.mark.parametrize("backend", ["aot_eager", *slow("inductor")])
"""Kernels take seconds to make: `make test` makes none here."""

Model = Callable[..., torch.nn.Module]


@pytest.fixture(scope="session")
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Inductor's C++ kernels, for these tests alone: what g++ made of equal source is used again, no graph is."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(autouse=True)
def fresh_compiler(kernel_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing compiled so far, and no cache that would spare dynamo, AOT or inductor a trace."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(kernel_folder))
    inductor = torch._inductor.config.patch(fx_graph_cache=False, fx_graph_remote_cache=False, compile_threads=1)
    autograd = torch._functorch.config.patch(enable_autograd_cache=False, enable_remote_autograd_cache=False)
    reset()
    with inductor, autograd, sdpa_kernel(_cur_sdpa_kernel_backends()):
        yield
    reset()


def reset() -> None:
    """Forget everything that was compiled, and what fake tensors learned: a warm cache hides calls with stand-ins."""
    torch._dynamo.reset()
    FakeTensorMode.cache_clear()
    counters.clear()
    torch._dynamo.utils.clear_compilation_metrics()


class Compiled(NamedTuple):
    """What dynamo did since the last reset. frames: the functions that were compiled, in order."""

    graphs: int
    graph_breaks: int
    frames: tuple[str, ...]


def compiled_so_far() -> Compiled:
    """What dynamo did since the last reset; no function of fastac may be among the compiled frames."""
    metrics = [m for m in get_compilation_metrics() if m.co_filename is not None]
    ours = [f"{m.co_filename}:{m.co_name}" for m in metrics if "/fastac/" in m.co_filename.rpartition("/tests/")[2]]
    assert not ours, f"dynamo compiled functions of fastac: {ours}"
    frames = tuple(str(m.co_name) for m in metrics)
    return Compiled(counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), frames)


def compile_blocks(model: torch.nn.Module, backend: str, dynamic: bool | None = False) -> torch.nn.Module:
    """Compile every block by itself, so that checkpointing stands around compiled code."""
    for block in model.blocks:
        block.compile(backend=backend, dynamic=dynamic)
    return model


def compile_whole(model: torch.nn.Module, backend: str, dynamic: bool | None = False) -> torch.nn.Module:
    """Compile the model in place, so that checkpointing stands inside the traced code."""
    model.compile(backend=backend, dynamic=dynamic)
    return model


WAYS = {"blocks": compile_blocks, "whole": compile_whole}
EACH_WAY = pytest.mark.parametrize("way", WAYS)


class Steps(NamedTuple):
    """Training steps of one model: the tensors of each step, the attention executions of each, what was compiled."""

    tensors: list[support.Tensors]
    executions: list[int]
    compiled: list[Compiled]


def train(model: torch.nn.Module, *inputs: Mapping[str, Any], steps: int = 3) -> Steps:
    """Train on each of the inputs in turn, `steps` times, counting attention kernels that really ran."""
    support.count_cpu_attention()
    found = Steps([], [], [])
    for _ in range(steps):
        for one in inputs:
            support.executions.clear()
            found.tensors.append(train_step(model, one))
            found.executions.append(support.executions.total())
            found.compiled.append(compiled_so_far())
    return found


def assert_exact_and_saved(
    build: Callable[[str], torch.nn.Module],
    *inputs: Mapping[str, Any],
    calls: int,
    looks: int = 0,
    steps: int = 3,
    reference: Steps | None = None,
    same_graphs: bool = False,
) -> Steps:
    """Train build("none") and build("attn_only"), compiling each anew, and compare every step.

    Each step, the first included, must be bitwise the same and run each of the `calls` attention calls once. The first
    `looks` steps may run them twice: a compiled block class gets a second, eager look per size of its inputs.
    Nothing may be compiled in the second round of steps or later. reference: what to compare tensors with up to the
    order of sums, where the two are cut into other graphs. same_graphs: whether dynamo must make as many of both.
    """
    reset()
    expected = train(build("none"), *inputs, steps=steps)
    reset()
    found = train(build("attn_only"), *inputs, steps=steps)
    for step, mine in enumerate(found.tensors):
        try:
            if reference is None:
                assert_same(mine, expected.tensors[step])
            else:
                assert_close(mine, reference.tensors[step])
        except AssertionError as error:
            raise AssertionError(f"step {step}: {error}") from None
    assert set(expected.executions) == {calls}
    assert set(found.executions[looks:]) == {calls}
    assert set(found.executions[:looks]) <= {calls, 2 * calls, calls + calls // 2}
    assert found.compiled[-1] == found.compiled[len(inputs) - 1], "recompiled from step to step"
    assert not same_graphs or found.compiled[-1][:2] == expected.compiled[-1][:2]
    return found


class SmallBlock(torch.nn.Module):
    """One attention, frozen or trained projections, pointwise work behind them: few kernels for g++ to compile."""

    def __init__(self, attend: Callable[..., torch.Tensor] = F.scaled_dot_product_attention) -> None:
        super().__init__()
        self.qkv = torch.nn.Linear(support.WIDTH, 3 * support.WIDTH)
        self.out = torch.nn.Linear(support.WIDTH, support.WIDTH)
        self.ffn = torch.nn.Linear(support.WIDTH, support.WIDTH)
        self.attend = attend

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """video: (batch, tokens, width) -> the same; text is not looked at."""
        query, key, value = self.qkv(video).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4).unbind()
        attended = self.attend(query, key, value).transpose(1, 2).flatten(2)
        return video + F.gelu(self.ffn(video + self.out(attended)))


def small(policy: str, layers: int = 2, **options: Any) -> torch.nn.Module:
    """A stack of SmallBlocks: one attention call per layer."""
    return stack(policy=policy, layers=layers, block=SmallBlock, **options)


class TestCompiledBlocks:
    """Checkpointing around compiled blocks: `compile_repeated_blocks`, `block.compile()`, `torch.compile(block)`."""

    @INDUCTOR_WHEN_SLOW
    def test_the_first_step_after_a_compile_is_exact(self, backend: str) -> None:
        assert_exact_and_saved(lambda policy: compile_blocks(small(policy), backend), small_inputs(), calls=2, looks=1)

    def test_self_and_cross_attention(self) -> None:
        assert_exact_and_saved(
            lambda policy: compile_blocks(stack(policy=policy), "aot_eager"), stack_inputs(), calls=4, looks=1
        )

    @pytest.mark.parametrize(
        ("backend", "dynamic"),
        [("aot_eager", True), pytest.param("inductor", True, marks=pytest.mark.slow), ("aot_eager", None)],
        ids=["aot_eager", "inductor", "dynamic when sizes change"],
    )
    def test_videos_of_two_sizes(self, backend: str, dynamic: bool | None) -> None:
        assert_exact_and_saved(
            lambda policy: compile_blocks(small(policy, layers=1), backend, dynamic),
            small_inputs(tokens=24),
            small_inputs(tokens=40),
            calls=1,
            looks=2,
            steps=2,
            same_graphs=True,
        )

    @INDUCTOR_WHEN_SLOW
    def test_half_precision(self, backend: str) -> None:
        assert_exact_and_saved(
            lambda policy: compile_blocks(small(policy, layers=1, dtype=torch.bfloat16), backend),
            small_inputs(dtype=torch.bfloat16),
            calls=1,
            looks=1,
            steps=2,
        )

    @pytest.mark.parametrize(
        ("backend", "wrapped"),
        [
            ("aot_eager", False),
            *(pytest.param("inductor", wrapped, marks=pytest.mark.slow) for wrapped in (False, True)),
        ],
        ids=["aot_eager", "inductor", "wrapped into an operator"],
    )
    def test_buffers_that_compiled_code_reuses(self, backend: str, wrapped: bool) -> None:
        """Only the feed-forward trains: no backward needs the attention output of block 0, and inductor reuses it."""
        with torch._inductor.config.patch(wrap_inductor_compiled_regions=wrapped):
            assert_exact_and_saved(
                lambda policy: compile_blocks(train_only(small(policy), "ffn"), backend),
                without_gradients(small_inputs()),
                calls=2,
                looks=1,
            )

    @pytest.mark.slow
    def test_inductor_regions_wrapped_into_an_operator(self) -> None:
        """Dispatch modes do not see into the operator; BackendSelect is passed all the same."""
        with torch._inductor.config.patch(wrap_inductor_compiled_regions=True):
            assert_exact_and_saved(
                lambda policy: compile_blocks(small(policy), "inductor"), small_inputs(), calls=2, looks=1
            )

    @INDUCTOR_WHEN_SLOW
    def test_a_compiled_function_inside_an_eager_block(self, backend: str) -> None:
        """Nothing about the block says that it holds compiled code; the graph of its first region does."""

        def build(policy: str) -> torch.nn.Module:
            compiled = torch.compile(attend_and_scale, backend=backend, dynamic=False)
            return train_only(stack(policy=policy, block=lambda: SmallBlock(compiled)), "ffn")

        assert_exact_and_saved(build, without_gradients(small_inputs()), calls=2, looks=1)

    @INDUCTOR_WHEN_SLOW
    def test_kernels_that_run_on_stand_ins_with_data(self, backend: str) -> None:
        """Dynamo may run the real kernel on real tensors of its own while it traces: no call of the region."""
        inputs, found = small_inputs(), []
        with torch._functorch.config.patch(fake_tensor_propagate_real_tensors=True):
            for policy in ("none", "attn_only"):
                reset()
                found.append(train(compile_blocks(small(policy), backend), inputs))
        for mine, theirs in zip(found[1].tensors, found[0].tensors, strict=True):
            assert_same(mine, theirs)
        assert found[1].executions[1:] == [2, 2]

    @pytest.mark.parametrize("replaced", [False, True], ids=["in place", "by another module"])
    def test_a_compiled_part_of_an_eager_block(self, replaced: bool) -> None:
        def build(policy: str) -> torch.nn.Module:
            model = stack(policy=policy)
            torch.manual_seed(0)
            for block in model.blocks:
                block.ffn = FeedForward()
                if replaced:
                    block.ffn = torch.compile(block.ffn, backend="aot_eager", dynamic=False)
                else:
                    block.ffn.compile(backend="aot_eager", dynamic=False)
            return model

        found = assert_exact_and_saved(build, stack_inputs(), calls=4, looks=1)
        assert found.compiled[-1].graphs >= 1
        assert found.compiled[-1].graph_breaks == 0

    @INDUCTOR_WHEN_SLOW
    def test_a_second_backward(self, backend: str) -> None:
        """What was kept is handed out twice, and compiled code may reuse what it is handed."""
        inputs = without_gradients(small_inputs())
        found = []
        with torch._functorch.config.patch(donated_buffer=False):
            for policy in ("none", "attn_only"):
                reset()
                model = compile_blocks(train_only(small(policy), "ffn"), backend)
                found.append([train_step(model, inputs, backward=backward_twice) for _ in range(2)])
        for mine, theirs in zip(found[1], found[0], strict=True):
            assert_same(mine, theirs)

    def test_a_graph_break_inside_a_compiled_block(self) -> None:
        assert_exact_and_saved(
            lambda policy: compile_blocks(
                stack(policy=policy, block=lambda: SmallBlock(attend_and_break)), "aot_eager"
            ),
            small_inputs(),
            calls=2,
            looks=1,
        )

    @pytest.mark.parametrize("wrap", [torch.compile, lambda block, **options: torch.compile(block.forward, **options)])
    def test_a_block_that_was_compiled_by_a_call(self, wrap: Callable[..., Any]) -> None:
        """torch.compile(block) is another module, torch.compile(block.forward) a function."""
        block, inputs = AttentionBlock(), stack_inputs()
        compiled = wrap(block, backend="aot_eager", dynamic=False)

        def step(policy: str) -> support.Tensors:
            block.zero_grad()
            found = train_step(
                lambda **kwargs: support.run_checkpointed(compiled, *kwargs.values(), policy=policy), inputs
            )
            return found | support.gradients(dict(block.named_parameters()))

        expected = step("none")
        reset()
        for _ in range(2):
            assert_same(step("attn_only"), expected)
        assert compiled_so_far()[:2] == (1, 0)

    def test_a_block_compiled_with_its_checkpoint_inside(self) -> None:
        found = assert_exact_and_saved(
            lambda policy: compile_blocks(stack(block=lambda: InnerCheckpoint(policy)), "aot_eager"),
            stack_inputs(),
            calls=4,
        )
        assert found.compiled[-1].graph_breaks == 0

    def test_compiled_blocks_stay_compiled(self) -> None:
        """The second look at a compiled block once made dynamo skip its code for good: every later step was eager."""
        runs = Counter[str]()

        def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                runs["graph"] += 1
                return graph(*args)

            return run

        model = stack(policy="attn_only")
        for block in model.blocks:
            block.compile(backend=backend, dynamic=False)
        for _ in range(3):
            runs.clear()
            train_step(model, stack_inputs())
            assert runs["graph"] == 2 * len(model.blocks)  # forward and recompute
        assert compiled_so_far().graphs == 1


class TestCompiledModels:
    """Checkpointed blocks inside a model that is compiled as a whole."""

    @pytest.mark.parametrize("backend", ["eager", "aot_eager", *slow("inductor")])
    def test_the_first_step_is_exact(self, backend: str) -> None:
        assert_exact_and_saved(lambda policy: compile_whole(small(policy), backend), small_inputs(), calls=2)

    def test_self_and_cross_attention(self) -> None:
        assert_exact_and_saved(lambda policy: compile_whole(stack(policy=policy), "aot_eager"), stack_inputs(), calls=4)

    @INDUCTOR_WHEN_SLOW
    def test_videos_of_two_sizes(self, backend: str) -> None:
        assert_exact_and_saved(
            lambda policy: compile_whole(small(policy, layers=1), backend, True),
            small_inputs(tokens=24),
            small_inputs(tokens=40),
            calls=1,
            steps=2,
            same_graphs=True,
        )

    @INDUCTOR_WHEN_SLOW
    def test_attention_runs_once_where_full_runs_it_twice(self, backend: str) -> None:
        saved = train(compile_whole(small("attn_only"), backend), small_inputs(), steps=2)
        reset()
        full = train(compile_whole(small("full"), backend), small_inputs(), steps=2)
        assert (saved.executions, full.executions) == ([2, 2], [4, 4])

    @INDUCTOR_WHEN_SLOW
    def test_frozen_inputs(self, backend: str) -> None:
        assert_exact_and_saved(
            lambda policy: compile_whole(train_only(small(policy), "ffn"), backend),
            without_gradients(small_inputs()),
            calls=2,
        )

    def test_short_attention_is_recomputed(self) -> None:
        policy = fastac.Policy("attn_only", min_kv=support.TEXT_TOKENS + 1)
        expected = train(compile_whole(stack(), "aot_eager"), stack_inputs(), steps=2)
        reset()
        found = train(compile_whole(stack(policy=policy), "aot_eager"), stack_inputs(), steps=2)
        for mine, theirs in zip(found.tensors, expected.tensors, strict=True):
            assert_same(mine, theirs)
        assert found.executions == [6, 6]

    @pytest.mark.parametrize("stop", ["graph_break", "print"])
    @INDUCTOR_WHEN_SLOW
    def test_a_graph_break_in_a_block(self, backend: str, stop: str, capsys: pytest.CaptureFixture[str]) -> None:
        """The region then runs outside the graph, eagerly and on the tape."""
        attend = attend_and_break if stop == "graph_break" else attend_and_print
        assert_exact_and_saved(
            lambda policy: compile_whole(stack(policy=policy, block=lambda: SmallBlock(attend)), backend),
            small_inputs(),
            calls=2,
            looks=1,
            reference=train(small("none"), small_inputs()),
        )
        if stop == "print":
            assert "attending" in capsys.readouterr().out

    def test_a_graph_break_around_the_blocks(self) -> None:
        assert_exact_and_saved(
            lambda policy: compile_whole(BreakBetween(stack(policy=policy)), "aot_eager"), stack_inputs(), calls=4
        )

    def test_a_second_backward_without_aot(self) -> None:
        """A graph that is not compiled further runs its regions on the tape; torch's contexts serve one backward."""
        expected = train_step(stack(), stack_inputs(), backward=backward_twice)
        model = compile_whole(stack(policy="attn_only"), "eager")
        for _ in range(2):
            assert_same(train_step(model, stack_inputs(), backward=backward_twice), expected)

    def test_policies_per_block(self) -> None:
        model = stack()
        model.policy = resolve_blocks({"0": "full", "*": "attn_only"}, dict(model.blocks.named_children()))
        expected = train(compile_whole(stack(), "aot_eager"), stack_inputs(), steps=2)
        reset()
        found = train(compile_whole(model, "aot_eager"), stack_inputs(), steps=2)
        for mine, theirs in zip(found.tensors, expected.tensors, strict=True):
            assert_same(mine, theirs)
        assert found.executions == [6, 6]


class TestWithDiffusers:
    """The same on diffusers' models, which write in place (rotary embedding) and have their own call to compile."""

    @pytest.mark.parametrize(
        ("class_name", "way"),
        [
            ("WanTransformer3DModel", "compile_repeated_blocks"),
            pytest.param("WanTransformer3DModel", "compile_repeated_blocks before", marks=pytest.mark.slow),
            pytest.param("WanTransformer3DModel", "compile", marks=pytest.mark.slow),
            pytest.param("WanTransformer3DModel", "inside", marks=pytest.mark.slow),
            pytest.param("LTXVideoTransformer3DModel", "compile_repeated_blocks", marks=pytest.mark.slow),
            pytest.param("LTXVideoTransformer3DModel", "compile", marks=pytest.mark.slow),
            pytest.param("HunyuanVideoTransformer3DModel", "compile_repeated_blocks before", marks=pytest.mark.slow),
            pytest.param("HunyuanVideoTransformer3DModel", "compile", marks=pytest.mark.slow),
        ],
    )
    def test_aot_eager(self, class_name: str, way: str) -> None:
        self.compare(class_name, way, "aot_eager")

    @pytest.mark.slow
    @pytest.mark.parametrize("way", ["compile_repeated_blocks", "compile"])
    def test_inductor(self, way: str) -> None:
        self.compare("WanTransformer3DModel", way, "inductor")

    def compare(self, class_name: str, way: str, backend: str) -> None:
        """Compiled training without checkpointing against attn_only: equal, with as many graphs and no break."""
        models = {}

        def build(policy: str) -> torch.nn.Module:
            model = models[policy] = support.build(class_name)[0]
            method, _, before = way.partition(" ")
            if method == "inside":
                for index, block in enumerate(model.blocks):
                    model.blocks[index] = CheckpointedBlock(block, policy)
                    model.blocks[index].compile(backend=backend, dynamic=False)
                return model
            if before:
                getattr(model, method)(backend=backend, dynamic=False)
            if policy != "none":
                fastac.enable(model, policy)
            if not before:
                getattr(model, method)(backend=backend, dynamic=False)
            return model

        model, inputs = support.build(class_name)
        whole = way in ("compile", "inside")
        # Inductor fuses what is kept otherwise than what is computed again.
        reference = train(model, inputs, steps=2) if whole and backend == "inductor" else None
        outside = 1 if class_name.startswith("Hunyuan") else 0  # its token refiner is not checkpointed
        found = assert_exact_and_saved(
            build, inputs, calls=4 + outside, looks=0 if whole else 1, steps=2, reference=reference, same_graphs=True
        )
        assert found.compiled[-1].graphs > 0
        assert found.compiled[-1].graph_breaks == 0
        if way == "inside":  # and nothing is enabled
            return
        report = fastac.report(models["attn_only"])
        assert report.active
        assert sum(row.saved for row in report.rows) == 4
        assert sum(row.blocks_compiled for row in report.rows) == (
            sum(row.blocks for row in report.rows) if whole else 0
        )
        eager, _ = support.build(class_name)
        fastac.enable(eager)
        train_step(eager, inputs)
        for mine, theirs in zip(report.rows, fastac.report(eager).rows, strict=True):
            assert mine.saved_bytes == theirs.saved_bytes

    @pytest.mark.slow
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    @pytest.mark.parametrize("lora", [False, True], ids=["ffn", "ffn_lora"])
    @pytest.mark.parametrize("class_name", ["WanTransformer3DModel", "CogVideoXTransformer3DModel"])
    def test_frozen_inputs(self, class_name: str, lora: bool, backend: str) -> None:
        """Fine-tuning of the feed-forward alone: what enters the first block needs no gradient."""

        def build(policy: str) -> torch.nn.Module:
            model, _, _ = feed_forward_training(class_name, lora)
            if policy != "none":
                fastac.enable(model, policy)
            for block in model.blocks if hasattr(model, "blocks") else model.transformer_blocks:
                block.compile(backend=backend, dynamic=False)
            return model

        _, inputs, calls = feed_forward_training(class_name, lora)
        assert_exact_and_saved(build, inputs, calls=calls, looks=1, steps=2)


class TestNothingSavable:
    """Attention that runs as small ops is an error on the first step and on every later one, never silence."""

    @staticmethod
    def dropout(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)

    @staticmethod
    def math(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(query, key, value)

    @staticmethod
    def written_out(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).softmax(-1) @ value

    @staticmethod
    def wide_value(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, torch.cat([value, value], -1))[..., : value.shape[-1]]

    @staticmethod
    def three_dimensions(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        flat = [t.flatten(0, 1) for t in (query, key, value)]
        return F.scaled_dot_product_attention(*flat).unflatten(0, query.shape[:2])

    class Bias(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = torch.nn.Parameter(torch.zeros(1, 1))

        def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=self.bias)

    CAUSES = ("dropout", "written_out", "math", "wide_value", "three_dimensions", "Bias")

    def blocks(self, cause: str) -> torch.nn.Module:
        """A stack whose attention is decomposed."""
        attend = self.Bias() if cause == "Bias" else getattr(self, cause)
        return stack(policy="attn_only", block=lambda: SmallBlock(attend))

    @EACH_WAY
    @pytest.mark.parametrize(
        ("cause", "backend"),
        [
            *[(cause, "aot_eager") for cause in CAUSES[:2]],
            *[pytest.param(cause, "aot_eager", marks=pytest.mark.slow) for cause in CAUSES[2:]],
            *[(cause, "eager") for cause in CAUSES[:2]],
            *[pytest.param(cause, "inductor", marks=pytest.mark.slow) for cause in CAUSES[:2]],
        ],
    )
    def test_it_is_an_error_on_every_call(self, cause: str, way: str, backend: str) -> None:
        model = WAYS[way](self.blocks(cause), backend)
        switches = _cur_sdpa_kernel_backends()
        for _ in range(2):
            with pytest.raises(PolicyNotAppliedError, match="attention"):
                model(**small_inputs())
        assert _cur_sdpa_kernel_backends() == switches  # `with sdpa_kernel(...)` is part of the graph that failed

    @EACH_WAY
    def test_one_attention_among_others(self, way: str) -> None:
        """The second attention of the second block."""

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            to_text = key.shape[-2] == support.TEXT_TOKENS
            return (self.written_out if to_text else F.scaled_dot_product_attention)(query, key, value)

        model = stack(policy="attn_only")
        model.blocks[1].attend = attend
        WAYS[way](model, "aot_eager")
        for _ in range(2):
            with pytest.raises(PolicyNotAppliedError, match="attention"):
                model(**stack_inputs())

    @EACH_WAY
    def test_the_model_trains_again_once_the_cause_is_mended(self, way: str) -> None:
        model = WAYS[way](self.blocks("dropout"), "aot_eager")
        with pytest.raises(PolicyNotAppliedError):
            model(**small_inputs())
        for block in model.blocks:
            block.attend = F.scaled_dot_product_attention
        expected = train(small("none"), small_inputs(), steps=2)
        found = train(model, small_inputs(), steps=2)
        for mine, theirs in zip(found.tensors, expected.tensors, strict=True):
            assert_close(mine, theirs)
        assert found.executions[-1] == 2

    @EACH_WAY
    def test_full_has_nothing_against_it(self, way: str) -> None:
        model = self.blocks("written_out")
        model.policy = "full"
        train_step(WAYS[way](model, "aot_eager"), small_inputs())

    @EACH_WAY
    def test_short_attention_that_is_to_be_recomputed_may_decompose(self, way: str) -> None:
        model = self.blocks("dropout")
        model.policy = fastac.Policy("attn_only", min_kv=support.VIDEO_TOKENS + 1)
        train_step(WAYS[way](model, "aot_eager"), small_inputs())

    @INDUCTOR_WHEN_SLOW
    def test_a_graph_break_does_not_hide_it(self, backend: str) -> None:
        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return self.written_out(query, key, value)

        model = compile_whole(stack(policy="attn_only", block=lambda: SmallBlock(attend)), backend)
        for _ in range(2):
            with pytest.raises(PolicyNotAppliedError, match="attention"):
                model(**small_inputs())

    @pytest.mark.slow
    def test_a_kernel_called_past_the_dispatcher(self) -> None:
        """Inductor's C++ wrapper calls the attention kernel directly: no operator is called, nothing can be kept."""
        with torch._inductor.config.patch(cpp_wrapper=True):
            model = compile_blocks(small("attn_only", layers=1), "inductor")
            for _ in range(2):
                with pytest.raises(PolicyNotAppliedError, match=r"cpp_wrapper"):
                    model(**small_inputs())


class TestSwitching:
    """enable, disable, another policy or engine on a model that is compiled, in any order."""

    @pytest.mark.parametrize("way", ["blocks", *slow("whole")])
    def test_policies_on_a_compiled_model(self, way: str) -> None:
        """A policy is read while the model is traced: with another one, what was compiled before must not serve."""
        model, inputs = wan(layers=1)
        WAYS[way](model, "aot_eager")
        expected = train(model, inputs, steps=1).tensors[0]
        text = inputs["encoder_hidden_states"].shape[1]
        wanted = {"attn_only": 2, "full": 4, fastac.Policy("attn_only", min_kv=text + 1): 3}
        for policy, executions in [*wanted.items(), *wanted.items()]:
            fastac.enable(model, policy)
            found = train(model, inputs, steps=2)
            for tensors in found.tensors:
                assert_same(tensors, expected)
            assert found.executions[-1] == executions, policy
        assert compiled_so_far().graphs <= 1 + len(wanted)

        fastac.disable(model)
        found = train(model, inputs, steps=1)
        assert_same(found.tensors[0], expected)
        assert found.executions == [2]
        assert not fastac.report(model).active

    @pytest.mark.parametrize("way", ["blocks", *slow("whole", "inside another module")])
    @pytest.mark.parametrize("compiled_before", [False, True], ids=["new", "compiled before"])
    def test_gradient_checkpointing_enabled_again_without_fastac(self, way: str, compiled_before: bool) -> None:
        """Inside another module the model's own hook is a part of what is traced."""
        model, inputs = wan(layers=1)
        fastac.enable(model)
        called = model
        if way == "inside another module":
            called = compile_whole(Around(model), "aot_eager")
        else:
            WAYS[way](model, "aot_eager")
        if compiled_before:
            train_step(called, inputs)
        model.enable_gradient_checkpointing()
        for _ in range(2):
            with pytest.raises(PolicyNotAppliedError, match="without fastac"):
                called(**inputs)

    @pytest.mark.parametrize("known", [False, True], ids=["new", "trained before"])
    def test_torch_sac_around_compiled_blocks_is_refused(self, known: bool) -> None:
        """It has no guard for reused buffers. That the class is known from eager training is no way around."""
        model = stack(policy="attn_only", engine="sac")
        if known:
            train_step(model, stack_inputs())
        compile_blocks(model, "aot_eager")
        for _ in range(2):
            with pytest.raises(FastacError, match="sac"):
                model(**stack_inputs())

    def test_torch_sac_around_a_compiled_function_is_refused(self) -> None:
        """The same hazard where nothing about the block says that it holds compiled code."""
        compiled = torch.compile(attend_and_scale, backend="inductor", dynamic=False)
        model = stack(policy="attn_only", engine="sac", block=lambda: SmallBlock(compiled))
        with pytest.raises(FastacError, match="sac"):
            train_step(train_only(model, "ffn"), without_gradients(small_inputs()))

    def test_torch_sac_in_a_compiled_model(self) -> None:
        """The engine is for eager regions: a trace has its own, whatever was asked."""
        assert_exact_and_saved(
            lambda policy: compile_whole(stack(policy=policy, engine="sac"), "aot_eager"), stack_inputs(), calls=4
        )

    @EACH_WAY
    def test_no_grad_and_eval(self, way: str) -> None:
        model = WAYS[way](stack(policy="attn_only"), "aot_eager")
        inputs = stack_inputs()
        expected = stack()(**inputs)
        with torch.no_grad():
            assert relative_error(model(**inputs), expected.detach()) < 1e-5
        model.eval()
        found = train(model, inputs)
        assert found.executions[-1] == 4


class TestNumberOfGraphs:
    @EACH_WAY
    @pytest.mark.parametrize("policy", ["attn_only", *slow("full")])
    def test_fastac_adds_no_graph_and_no_break(self, way: str, policy: str) -> None:
        counted = {}
        for one in ("none", policy):
            reset()
            steps = train(WAYS[way](stack(policy=one), "aot_eager"), stack_inputs())
            assert steps.compiled[-1] == steps.compiled[0], "recompiled from step to step"
            counted[one] = steps.compiled[-1][:2]
        assert counted[policy] == counted["none"] == (1, 0)

    @pytest.mark.parametrize("policy", ["full", "attn_only"])
    def test_blocks_that_were_named_are_in_the_graph(self, policy: str) -> None:
        model = stack(policy="none")
        fastac.enable(model, policy, blocks="blocks")
        train(compile_whole(model, "aot_eager"), stack_inputs(), steps=1)
        assert compiled_so_far()[:2] == (1, 0)

    def test_the_whole_model_is_one_graph(self) -> None:
        model = stack(policy="attn_only")
        model.compile(backend="aot_eager", fullgraph=True)
        train_step(model, stack_inputs())

    def test_no_code_of_fastac_is_compiled_in_a_second_look(self) -> None:
        """After a graph break dynamo compiles whatever is called; the error's way runs through most of fastac."""

        def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)

        model = compile_whole(stack(policy="attn_only", block=lambda: AttentionBlock(attend=attend)), "aot_eager")
        with pytest.raises(PolicyNotAppliedError, match="dropout_p"):
            model(**stack_inputs())
        compiled_so_far()


class TestOtherTraces:
    def test_compiled_autograd(self) -> None:
        """The backward is traced into a graph, which unpacks saved tensors (and so recomputes) when it runs."""
        expected = train(stack(layers=1), stack_inputs(), steps=1).tensors[0]
        model = stack(layers=1, policy="attn_only")
        for _ in range(2):
            with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
                support.executions.clear()
                found = train_step(model, stack_inputs())
            assert_same(found, expected)
            assert support.executions.total() == 2

    def test_a_training_step_on_fake_tensors(self) -> None:
        model, inputs = support.build("WanTransformer3DModel")
        mode = FakeTensorMode()
        fake = to_fake(copy.deepcopy(model), mode)
        fastac.enable(fake)
        arguments = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in inputs.items()}
        with mode:
            for _ in range(2):
                fake(**arguments)[0].sum().backward()
                assert all(p.grad is not None and p.grad.shape == p.shape for p in fake.parameters())
        fastac.enable(model)
        assert_same(train_step(model, inputs), train_step(support.build("WanTransformer3DModel")[0], inputs))

    def test_fake_tensors_that_are_no_argument(self) -> None:
        """From the second equal call on, a fake tensor's cache answers, and no call comes by the tape."""
        mode = FakeTensorMode()
        block = to_fake(AttentionBlock(), mode)
        inputs = [mode.from_tensor(value.detach()) for value in stack_inputs().values()]
        with mode:
            for _ in range(3):
                fastac.checkpoint(lambda: block(*inputs)).sum().backward()
        assert all(parameter.grad is not None for parameter in block.parameters())

    @pytest.mark.parametrize("by_name", [False, True], ids=["positional", "by name"])
    @pytest.mark.parametrize(("policy", "calls"), [("none", 2), ("full", 4), ("attn_only", 2)])
    def test_planning_on_fake_tensors_sees_the_policy(self, policy: str, calls: int, by_name: bool) -> None:
        """Calls and bytes are planned without data: there, too, attention is called again under full only."""
        mode, counting = FakeTensorMode(), CountAttention()
        mode.cache_enabled = False  # a call that the cache answers reaches no kernel
        block = to_fake(AttentionBlock(), mode)
        inputs = {name: mode.from_tensor(value.detach()) for name, value in stack_inputs().items()}
        with mode, counting:
            for _ in range(2):
                counting.calls = 0
                args, kwargs = ((), inputs) if by_name else (tuple(inputs.values()), {})
                support.run_checkpointed(block, *args, policy=policy, **kwargs).sum().backward()
                assert counting.calls == calls

    @pytest.mark.parametrize("strict", [True, False], ids=["strict", "not strict"])
    def test_export_holds_no_checkpoint(self, strict: bool) -> None:
        model, inputs = support.build("WanTransformer3DModel")
        fastac.enable(model)
        arguments = {k: v for k, v in inputs.items() if isinstance(v, torch.Tensor)} | {"return_dict": False}
        program = torch.export.export(model, (), arguments, strict=strict)
        names = {str(node.target) for node in program.graph.nodes}
        assert not [name for name in names if "checkpoint" in name]
        assert any("scaled_dot_product_attention" in name for name in names)
        assert_same(
            support.flat_tensors(program.module()(**arguments), "output"),
            support.flat_tensors(model(**arguments), "output"),
        )

    @pytest.mark.parametrize("policy", ["attn_only", "full"])
    def test_make_fx_traces_the_region_as_it_is(self, policy: str) -> None:
        """A recompute in such a graph would be nothing but more of the same operators."""
        inputs = stack_inputs()
        parameters = dict(stack().named_parameters())

        def gradients_under(policy: str) -> Callable[..., Any]:
            model = stack(policy=policy)

            def gradients(parameters: Any, video: torch.Tensor, text: torch.Tensor) -> Any:
                output = torch.func.functional_call(model, parameters, (video, text))
                return torch.autograd.grad(output.square().sum(), list(parameters.values()))

            return gradients

        graphs = [make_fx(gradients_under(one))(parameters, *inputs.values()) for one in ("none", policy)]
        plain, traced = (Counter(str(node.target) for node in graph.graph.nodes) for graph in graphs)
        assert traced == plain
        assert traced[f"{CPU_ATTENTION.replace('::', '.')}.default"] == 4
        expected = gradients_under("none")(parameters, *inputs.values())
        for mine, theirs in zip(graphs[1](parameters, *inputs.values()), expected, strict=True):
            assert relative_error(mine.detach(), theirs.detach()) < 1e-6

    @pytest.mark.parametrize("policy", ["attn_only", *slow("full")])
    def test_make_fx_does_not_spoil_a_later_compile(self, policy: str) -> None:
        """torch's own selective checkpointing under make_fx leaves metadata behind that a later compile dies of."""
        inputs = stack_inputs()

        def loss(video: torch.Tensor, text: torch.Tensor) -> Any:
            output = stack(policy=policy)(video, text)
            return torch.autograd.grad(output.square().sum(), video)

        make_fx(loss)(*inputs.values())
        assert_exact_and_saved(
            lambda policy: compile_whole(stack(policy=policy), "aot_eager"), inputs, calls=4, steps=1
        )


# What the tests are made of


def attend_and_scale(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention with pointwise work behind it, into which a compiler may write."""
    return F.gelu(F.scaled_dot_product_attention(query, key, value)) + query


def attend_and_break(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention that dynamo can not put into one graph."""
    torch._dynamo.graph_break()
    return F.scaled_dot_product_attention(query, key, value)


def attend_and_print(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention with what a user leaves behind after debugging."""
    print("attending", tuple(query.shape))
    return F.scaled_dot_product_attention(query, key, value)


def backward_twice(loss: torch.Tensor) -> None:
    """As losses with adaptive weights do."""
    loss.backward(retain_graph=True)
    loss.backward()


class FeedForward(torch.nn.Module):
    """A module with a forward of its own: dynamo does not compile those of torch.nn by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(support.WIDTH, support.WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.linear(hidden))


class InnerCheckpoint(torch.nn.Module):
    """A block that checkpoints itself."""

    def __init__(self, policy: str) -> None:
        super().__init__()
        self.inner = AttentionBlock()
        self.policy = policy

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        return support.run_checkpointed(self.inner, video, text, policy=self.policy)


class CheckpointedBlock(torch.nn.Module):
    """A block with its checkpoint inside."""

    def __init__(self, block: torch.nn.Module, policy: str) -> None:
        super().__init__()
        self.block, self.policy = block, policy

    def forward(self, *args: Any) -> torch.Tensor:
        return self.block(*args) if self.policy == "none" else fastac.checkpoint(self.block, *args, policy=self.policy)


class Around(torch.nn.Module):
    """A module that holds a model, as training scripts have for their loss."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, **inputs: Any) -> torch.Tensor:
        return self.inner(**inputs)[0] * 2


class BreakBetween(torch.nn.Module):
    """A model with graph breaks in its own forward, before and behind the checkpointed blocks."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.inner.blocks:
            torch._dynamo.graph_break()
            video = support.run_checkpointed(block, video, text, policy=self.inner.policy)
        torch._dynamo.graph_break()
        return video * 2


class CountAttention(TorchDispatchMode):
    """Counts calls of the attention op, which on fake tensors no kernel can count."""

    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


def train_only(model: torch.nn.Module, part: str) -> torch.nn.Module:
    """Freeze every parameter whose name does not hold `part`."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
    return model


def without_gradients(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """The same inputs as data: nothing before the first trained parameter needs a gradient."""
    return {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def wan(layers: int) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A tiny Wan model and its inputs."""
    import diffusers

    row = MODELS["WanTransformer3DModel"]
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(**{**row.config, "num_layers": layers}).train()
    support.fill_zeros(model)
    return model, {**row.inputs(), "return_dict": False}


def small_inputs(tokens: int = support.VIDEO_TOKENS, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Inputs of a stack of SmallBlocks, for a video with so many tokens."""
    video = torch.randn(1, tokens, support.WIDTH, generator=torch.Generator().manual_seed(tokens)).to(dtype)
    return {"video": video.requires_grad_(), "text": torch.empty(0)}


COGVIDEOX = {
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "in_channels": 4,
    "out_channels": 4,
    "time_embed_dim": 2,
    "text_embed_dim": 8,
    "num_layers": 2,
    "sample_width": 8,
    "sample_height": 8,
    "sample_frames": 8,
    "patch_size": 2,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 8,
}


def feed_forward_training(class_name: str, lora: bool) -> tuple[torch.nn.Module, dict[str, Any], int]:
    """A model of which only the feed-forward trains (or a LoRA on it), its inputs, its number of attention calls."""
    if class_name == "CogVideoXTransformer3DModel":
        import diffusers

        torch.manual_seed(0)
        model = diffusers.CogVideoXTransformer3DModel(**COGVIDEOX).train()
        support.fill_zeros(model)
        inputs = {
            "hidden_states": torch.randn(1, 2, 4, 8, 8),
            "encoder_hidden_states": torch.randn(1, 8, 8),
            "timestep": torch.tensor([500]),
            "return_dict": False,
        }
        calls = 2
    else:
        model, inputs = support.build(class_name)
        calls = 4
    if lora:
        from peft import LoraConfig

        model.requires_grad_(False)
        torch.manual_seed(0)
        model.add_adapter(LoraConfig(r=2, target_modules=r".*ffn?\.net\.(0\.proj|2)"))
        support.fill_zeros(model)
    else:
        train_only(model, ".ff")
    return model, without_gradients(inputs), calls


def assert_close(found: support.Tensors, expected: support.Tensors) -> None:
    """Equal up to the order of sums, where the two ran different kernels."""
    assert found.keys() == expected.keys()
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    wrong = {name: error for name, error in errors.items() if error > 2e-5}
    assert not wrong, wrong


def to_fake(model: torch.nn.Module, mode: FakeTensorMode) -> torch.nn.Module:
    """Take the data out of a model's parameters and buffers."""
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = torch.nn.Parameter(mode.from_tensor(parameter.detach()))
        for name, buffer in list(module._buffers.items()):
            if buffer is not None:
                module._buffers[name] = mode.from_tensor(buffer)
    return model
