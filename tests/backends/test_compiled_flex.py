"""flex_attention that inductor compiles, alone or in a block: a call of its own there, saved like any other.

On a CPU inductor has no backward of it. Where these tests train, inductor compiles what surrounds the kernels, and the
kernels are plain math (tests/backends/flex_on_cpu.py). One test runs inductor's own forward, and one needs a GPU.
"""

from __future__ import annotations

import functools
import gc
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config
import torch._inductor.config
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import fastac
from fastac import FastacError, PolicyNotAppliedError
from fastac.compile import flex, torch_private
from fastac.engine import torch_private
from tests import compiler, support
from tests.backends import flex_on_cpu
from tests.backends.flex_on_cpu import COMPILED_OP
from tests.marks import quick, slow
from tests.support import relative_error, train_step

TOKENS, WIDTH = 256, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(autouse=True)
def _fresh_compiler(folder: Path) -> Iterator[None]:
    support.executions.clear()
    with compiler.fresh(folder):
        yield


def is_causal(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return query >= key


def nearer_is_better(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return score - (query - key).abs() * 0.1


BIAS = -torch.arange(TOKENS).float() / 10


def biased(score: Any, batch: Any, head: Any, query: Any, key: Any) -> Any:
    return score + BIAS[key]


MASKS = {n: create_block_mask(is_causal, None, None, n, n, device="cpu") for n in (128, TOKENS)}


def masked(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> Any:
    return flex_attention(query, key, value, block_mask=MASKS[query.shape[2]], **options)


def cross(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    """Over half of the keys, and then over all of them."""
    half = key.shape[2] // 2
    return flex_attention(flex_attention(query, key[:, :, :half], value[:, :, :half]).tanh(), key, value)


def twice(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    return flex_attention(flex_attention(query, key, value).tanh(), key, value)


def with_statistics(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
    output, statistics = flex_attention(query, key, value, return_lse=True)
    return output * statistics.sigmoid()[..., None]


ATTENTIONS: dict[str, tuple[Callable[..., Any], int]] = {
    "plain": (flex_attention, 1),
    "block mask": (masked, 1),
    "score mod": (functools.partial(flex_attention, score_mod=nearer_is_better), 1),
    "score mod with a tensor": (functools.partial(flex_attention, score_mod=biased), 1),
    "two of a shape": (twice, 2),
    "two shapes": (cross, 2),
}


def block_class() -> type[torch.nn.Module]:
    """A class of its own in every test: what is known of a class goes with it."""

    class Block(torch.nn.Module):
        def __init__(self, attend: Callable[..., Any] = flex_attention, heads: int = 2, kv_heads: int = 2) -> None:
            super().__init__()
            self.attend, self.heads, self.kv_heads = attend, heads, kv_heads
            self.query = torch.nn.Linear(WIDTH, WIDTH)
            self.key_value = torch.nn.Linear(WIDTH, 2 * WIDTH * kv_heads // heads)
            self.out = torch.nn.Linear(WIDTH, WIDTH)

        def forward(self, video: torch.Tensor) -> torch.Tensor:
            query = self.query(video).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            key_value = self.key_value(video).chunk(2, -1)
            key, value = (t.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for t in key_value)
            return torch.tanh(self.out(self.attend(query, key, value).transpose(1, 2).flatten(2))) + video

    return Block


class Model(torch.nn.Module):
    def __init__(self, block: Callable[[], torch.nn.Module], layers: int = 2) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(block() for _ in range(layers))

    def forward(self, video: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            video = block(video)
        return video


def model(attend: Callable[..., Any] = flex_attention, layers: int = 2, **options: Any) -> Model:
    block = block_class()
    torch.manual_seed(0)
    return Model(functools.partial(block, attend, **options), layers)


def inputs(tokens: int = TOKENS, requires_grad: bool = True) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"video": torch.randn(1, tokens, WIDTH, generator=generator).requires_grad_(requires_grad)}


def eagerly(built: torch.nn.Module, given: dict[str, Any]) -> support.Tensors:
    """A step with flex_attention's own math, uncompiled."""
    with flex_on_cpu.registered():
        found = train_step(built, given)
    compiler.reset()
    support.executions.clear()
    return found


def assert_steps(built: torch.nn.Module, reference: support.Tensors, given: dict[str, Any], calls: int) -> None:
    """Two steps, of which the first follows a compile: gradients of the reference, so many executions in each."""
    for _ in range(2):
        support.executions.clear()
        found = train_step(built, given)
        assert found.keys() == reference.keys()
        assert max(relative_error(found[name], reference[name]) for name in reference) < 1e-5
        assert support.executions == {COMPILED_OP: calls}


@pytest.fixture
def _trains_here() -> Iterator[None]:
    with flex_on_cpu.compiled():
        yield


trains_here = pytest.mark.usefixtures("_trains_here")


@pytest.mark.slow
@trains_here
def test_a_model_of_diffusers_whose_backend_is_flex() -> None:
    """Its self-attention; diffusers gives the text a mask that flex_attention takes as well."""
    built, given = support.build("WanTransformer3DModel")
    reference = train_step(built, given)
    built, given = support.build("WanTransformer3DModel")
    built.set_attention_backend("flex")
    fastac.compile(built)
    assert_steps(built, reference, given, 4)


@trains_here
class TestSaved:
    @pytest.mark.parametrize("name", quick(ATTENTIONS, "plain"))
    def test_in_compiled_blocks(self, name: str) -> None:
        attend, calls = ATTENTIONS[name]
        reference = eagerly(model(attend), inputs())
        built = model(attend)
        fastac.compile(built, blocks="blocks", fullgraph=True)
        assert_steps(built, reference, inputs(), 2 * calls)

    @pytest.mark.slow
    def test_with_fewer_heads_of_keys(self) -> None:
        attend = functools.partial(flex_attention, enable_gqa=True)
        reference = eagerly(model(attend, heads=4, kv_heads=2), inputs())
        built = model(attend, heads=4, kv_heads=2)
        fastac.compile(built, blocks="blocks")
        assert_steps(built, reference, inputs(), 2)

    @pytest.mark.parametrize("name", quick(ATTENTIONS, "block mask"))
    def test_compiled_alone_in_eager_blocks(self, name: str) -> None:
        attend, calls = ATTENTIONS[name]
        reference = eagerly(model(attend), inputs())
        built = model(fastac.compile_attention(attend, fullgraph=True))
        fastac.enable(built, blocks="blocks")
        assert_steps(built, reference, inputs(), 2 * calls)

    def test_compiled_alone_in_compiled_blocks(self) -> None:
        """It becomes a part of the block's graph."""
        reference = eagerly(model(), inputs())
        built = model(fastac.compile_attention(flex_attention))
        fastac.compile(built, blocks="blocks", fullgraph=True)
        assert_steps(built, reference, inputs(), 2)
        assert compiler.graphs() == 1

    @pytest.mark.slow
    @pytest.mark.parametrize("dynamic", [None, False, True])
    def test_videos_of_two_sizes(self, dynamic: bool | None) -> None:
        references = {tokens: eagerly(model(masked), inputs(tokens)) for tokens in (TOKENS, 128)}
        built = model(masked)
        fastac.compile(built, blocks="blocks", dynamic=dynamic)
        for tokens in (TOKENS, 128, TOKENS):
            assert_steps(built, references[tokens], inputs(tokens), 2)

    @pytest.mark.parametrize("dynamic", [None, *slow(True)])
    def test_two_sizes_in_one_block_whose_attention_is_compiled_alone(self, dynamic: bool | None) -> None:
        """Recompute may run other code than the forward did, which was compiled in between for all sizes."""
        attend = fastac.compile_attention(flex_attention, dynamic=dynamic)

        def both(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
            return attend(attend(query, key[:, :, :128], value[:, :, :128]).tanh(), key, value)

        reference = eagerly(model(cross), inputs())
        built = model(both)
        fastac.enable(built, blocks="blocks")
        assert_steps(built, reference, inputs(), 4)

    @pytest.mark.slow
    def test_statistics_that_the_block_uses(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            # On a CPU torch refuses to give them out, which has nothing to do with the kernels of this test.
            flex = torch.nn.attention.flex_attention
            apply = flex._apply_kernel_options
            patch.setattr(flex, "_apply_kernel_options", lambda q, k, v, lse, *rest: apply(q, k, v, False, *rest))
            reference = eagerly(model(with_statistics), inputs())
            built = model(with_statistics)
            fastac.compile(built, blocks="blocks")
            assert_steps(built, reference, inputs(), 2)

    @pytest.mark.slow
    def test_long_attention_alone(self) -> None:
        """Of two calls a block, one is over half of the keys, and recomputed."""
        reference = eagerly(model(cross), inputs())
        built = model(cross)
        fastac.compile(built, fastac.Policy("attn_only", min_kv=TOKENS), blocks="blocks")
        assert_steps(built, reference, inputs(), 4 + 2)

    @pytest.mark.slow
    def test_full_checkpointing(self) -> None:
        reference = eagerly(model(), inputs())
        built = model()
        fastac.compile(built, "full", blocks="blocks")
        assert_steps(built, reference, inputs(), 4)

    def test_where_its_inputs_need_no_gradient(self) -> None:
        """Training the output projection alone."""

        def frozen() -> Model:
            built = model()
            for name, parameter in built.named_parameters():
                parameter.requires_grad_(".out." in name)
            return built

        reference = eagerly(frozen(), inputs(requires_grad=False))
        built = frozen()
        fastac.compile(built, blocks="blocks")
        assert_steps(built, reference, inputs(requires_grad=False), 2)

    @pytest.mark.slow
    def test_two_backwards(self) -> None:
        def backward(loss: torch.Tensor) -> None:
            loss.backward(retain_graph=True)
            loss.backward()

        with flex_on_cpu.registered():
            reference = train_step(model(), inputs(), backward=backward)
        support.executions.clear()
        built = model()
        # A backward that inductor compiled takes the memory of what was saved for it.
        fastac.compile(built, blocks="blocks")
        with torch._functorch.config.patch(donated_buffer=False):
            found = train_step(built, inputs(), backward=backward)
        assert max(relative_error(found[name], reference[name]) for name in reference) < 1e-5
        assert support.executions == {COMPILED_OP: 2}

    @pytest.mark.slow
    def test_in_a_model_that_is_compiled_as_a_whole(self) -> None:
        reference = eagerly(model(), inputs())
        built = model(fastac.compile_attention(flex_attention))
        fastac.enable(built, blocks="blocks")
        whole = torch.compile(built, backend=flex.inductor(), fullgraph=True)
        for _ in range(2):
            support.executions.clear()
            found = train_step(whole, inputs())
            found = {name.replace("_orig_mod.", ""): tensor for name, tensor in found.items()}
            assert max(relative_error(found[name], reference[name]) for name in reference) < 1e-5
            assert support.executions == {COMPILED_OP: 2}

    def test_what_is_held(self) -> None:
        """The output and its statistics, to the byte."""

        def held(policy: str) -> int:
            compiler.reset()
            built = model()
            fastac.compile(built, policy, blocks="blocks")
            train_step(built, inputs())
            output = built(**inputs())
            gc.collect()
            tensors = [found for found in gc.get_objects() if isinstance(found, torch.Tensor)]
            storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if plain(t)}
            del output
            return sum(storages.values())

        def plain(tensor: torch.Tensor) -> bool:
            return type(tensor) is torch.Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)

        held("full")
        statistics = 2 * TOKENS
        assert held("attn_only") - held("full") == 2 * 4 * (TOKENS * WIDTH + statistics)


class TestRefused:
    @pytest.mark.parametrize(
        ("engine", "wrap"),
        [
            ("tape", False),
            ("tape", True),
            *(pytest.param("sac", wrap, marks=pytest.mark.slow) for wrap in (False, True)),
        ],
    )
    @trains_here
    def test_compiled_by_torch_alone(self, engine: str, wrap: bool) -> None:
        """Also where inductor calls what it compiled through an op of its own, which may hold anything."""
        with torch._inductor.config.patch(wrap_inductor_compiled_regions=wrap):
            built = model(torch.compile(flex_attention, options=flex_on_cpu.HIDDEN))
            fastac.enable(built, blocks="blocks", engine=engine)
            with pytest.raises(PolicyNotAppliedError) as error:
                built(**inputs())
        assert "flex_attention is compiled into code of its own here" in str(error.value)
        assert "fastac.compile_attention" in str(error.value)

    @trains_here
    def test_one_of_two_compiled_by_torch_alone(self) -> None:
        theirs = torch.compile(flex_attention, options=flex_on_cpu.HIDDEN)
        ours = fastac.compile_attention(flex_attention)
        built = model(lambda query, key, value: theirs(ours(query, key, value).tanh(), key, value))
        fastac.enable(built, blocks="blocks")
        with pytest.raises(PolicyNotAppliedError, match="1 of 2 reached a registered op"):
            built(**inputs())

    def test_where_its_inputs_need_no_gradient(self) -> None:
        """From the graph that can not be known: nothing in it stands for compiled code."""
        built = model(torch.compile(flex_attention), layers=1)
        for name, parameter in built.named_parameters():
            parameter.requires_grad_(".out." in name)
        with torch.no_grad():
            built(**inputs(requires_grad=False))  # compiled before the region, or in it
        fastac.enable(built, blocks="blocks")
        for _ in range(2):
            with pytest.raises(PolicyNotAppliedError, match="flex_attention is compiled into code of its own"):
                built(**inputs(requires_grad=False))

    @trains_here
    def test_blocks_compiled_by_torch_alone(self) -> None:
        built = model()
        for block in built.blocks:
            block.compile(options=flex_on_cpu.HIDDEN)
        with pytest.raises(PolicyNotAppliedError, match=r"the blocks by fastac.compile\(model\)"):
            fastac.checkpoint(built.blocks[0], **inputs())

    @trains_here
    def test_engine_sac(self) -> None:
        built = model(fastac.compile_attention(flex_attention))
        fastac.enable(built, blocks="blocks", engine="sac")
        with pytest.raises(FastacError, match="around compiled code may keep buffers that the code reuses"):
            built(**inputs())

    def test_options(self) -> None:
        with pytest.raises(FastacError, match=r"compile_attention\(nonsense=...\): torch.compile has no such option"):
            fastac.compile_attention(flex_attention, nonsense=1)
        with pytest.raises(FastacError, match=r"compile_attention\(backend='aot_eager'\): it is about inductor"):
            fastac.compile_attention(flex_attention, backend="aot_eager")


@pytest.mark.parametrize("engine", ["tape", "sac"])
def test_attention_in_wrapped_code_that_torch_compiled(engine: str) -> None:
    """torch's other attention is a call in compiled code, which the tape sees; torch's own modes do not."""
    support.count_cpu_attention()
    attend = torch.nn.functional.scaled_dot_product_attention
    reference = train_step(model(attend), inputs())
    with torch._inductor.config.patch(wrap_inductor_compiled_regions=True):
        built = model(torch.compile(lambda q, k, v: attend(q, k, v).sin().asin()))
        fastac.enable(built, blocks="blocks", engine=engine)
        if engine == "sac":
            with pytest.raises(PolicyNotAppliedError, match="engine sac sees into no kernel"):
                built(**inputs())
            return
        train_step(built, inputs())  # with the census, which runs it once more
        support.executions.clear()
        found = train_step(built, inputs())
    assert support.executions.total() == 2
    assert max(relative_error(found[name], reference[name]) for name in reference) < 1e-4


def real_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Counts the executions of what inductor makes of flex_attention, in place."""
    executed: list[int] = []
    compile_graph = torch_private.compile_graph

    def counted(*given: Any) -> Any:
        kernel = compile_graph(*given)

        def run(tensors: list[Any]) -> Any:
            executed.append(1)
            return kernel(tensors)

        return run

    monkeypatch.setattr(inductor_internals, "compile_graph", counted)
    return executed


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("attend", [flex_attention, masked, functools.partial(flex_attention, score_mod=biased)])
def test_inductors_own_kernel(attend: Any, dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its C++ kernel for the CPU, in blocks whose attention needs no gradient."""

    def frozen() -> Model:
        built = model(attend, layers=1)
        for name, parameter in built.named_parameters():
            parameter.requires_grad_(".out." in name)
        return built

    given = inputs(requires_grad=False)
    reference = train_step(frozen(), given)
    executed = real_kernels(monkeypatch)
    built = frozen()
    fastac.compile(built, blocks="blocks", dynamic=dynamic)
    for _ in range(2):
        executed.clear()
        found = train_step(built, given)
        assert max(relative_error(found[name], reference[name]) for name in reference) < 1e-5
        assert len(executed) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("name", ATTENTIONS)
@pytest.mark.parametrize("way", ["blocks", "alone"])
def test_on_a_gpu(name: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's Triton kernels, forward and backward."""
    attend, calls = ATTENTIONS[name]

    def on_gpu(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Any:
        if name == "block mask":
            return flex_attention(query, key, value, block_mask=mask)
        if name == "score mod with a tensor":
            return flex_attention(query, key, value, score_mod=lambda score, b, h, q, k: score + bias[k])
        return attend(query, key, value)

    mask = create_block_mask(is_causal, None, None, TOKENS, TOKENS, device="cuda")
    bias = BIAS.cuda()
    given = {"video": inputs()["video"].detach().cuda().requires_grad_()}
    reference = train_step(torch.compile(model(on_gpu, heads=1, kv_heads=1).cuda()), given)
    reference = {tensor.replace("_orig_mod.", ""): value for tensor, value in reference.items()}
    executed = real_kernels(monkeypatch)
    if way == "blocks":
        built = model(on_gpu, heads=1, kv_heads=1).cuda()
        fastac.compile(built, blocks="blocks")
    else:
        built = model(fastac.compile_attention(on_gpu), heads=1, kv_heads=1).cuda()
        fastac.enable(built, blocks="blocks")
    for _ in range(2):
        executed.clear()
        found = train_step(built, given)
        assert max(relative_error(found[tensor], reference[tensor]) for tensor in reference) < 1e-2
        assert len(executed) == 2 * calls


@trains_here
def test_no_cache_of_compiled_code_brings_a_call_without_its_kernel() -> None:
    """The code of a block calls a kernel by a number, which means nothing to another process."""
    with (
        torch._inductor.config.patch(fx_graph_cache=True),
        torch._functorch.config.patch(enable_autograd_cache=True),
    ):
        for _ in range(2):
            torch._dynamo.reset()
            flex._kernels.clear()  # as in a new process
            built = model(layers=1)
            fastac.compile(built, blocks="blocks")
            support.executions.clear()
            train_step(built, inputs())
            assert support.executions == {COMPILED_OP: 1}


def test_other_graphs_are_cached_as_they_were() -> None:
    with torch._inductor.config.patch(fx_graph_cache=True), torch._functorch.config.patch(enable_autograd_cache=False):
        for _ in range(2):
            torch._dynamo.reset()
            built = model(torch.nn.functional.scaled_dot_product_attention, layers=1)
            fastac.compile(built, blocks="blocks")
            train_step(built, inputs())
        assert torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"] >= 2  # forward and backward
        assert not torch._dynamo.utils.counters["inductor"]["fxgraph_cache_bypass"]


@trains_here
def test_a_pass_of_the_users_own_runs_as_well() -> None:
    seen: list[str] = []

    def own(graph: torch.fx.Graph) -> None:
        seen.extend(node.name for node in graph.nodes if "flex_attention" in str(node.target))

    options = {"post_grad_custom_pre_pass": [own, flex_on_cpu.backward_apart]}
    built = model(layers=1)
    fastac.compile(built, blocks="blocks", options=options)
    train_step(built, inputs())
    assert seen == ["flex_attention", "flex_attention_backward"]
    assert support.executions == {COMPILED_OP: 1}


def test_what_it_needs_of_the_compiler_is_there() -> None:
    assert torch_private.missing(torch_private.COMPILER) == []
    for name in torch_private.COMPILER:
        assert torch_private.missing([name + "x"]) == [name + "x"]


def test_a_compiler_that_lacks_something_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_private.require.cache_clear()
    monkeypatch.setattr(inductor_internals, "COMPILER", ("_inductor.gone",))
    try:
        with pytest.raises(ImportError, match=r"fastac needs torch._inductor.gone, which torch"):
            fastac.compile_attention(flex_attention)
    finally:
        torch_private.require.cache_clear()


def test_a_call_that_no_op_can_take_is_left_where_it_is() -> None:
    """One with a number that is no size among what it is given. A region then refuses what is hidden."""
    graph = torch.fx.Graph()
    tensors = [graph.placeholder(name) for name in ("query", "key", "value")]
    scale = graph.placeholder("scale")
    for given in tensors:
        given.meta["val"] = torch.empty(1, 1, 8, 8, device="meta")
    scale.meta["val"] = 0.5
    call = graph.call_function(torch_private.FLEX_ATTENTION, (*tensors, None, (), scale, {}))
    graph.output((graph.call_function(operator.getitem, (call, 0)),))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    flex.set_apart(module.graph)
    assert module.graph.find_nodes(op="call_function", target=torch_private.FLEX_ATTENTION)
