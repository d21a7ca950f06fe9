"""fastac.compile: blocks compiled inside their checkpoints, where graphs break and where they do not."""

from __future__ import annotations

import copy
import functools
import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from fastac import FastacError, hook, registry
from fastac.compile.blocks import CompiledForward
from fastac.registry import BackendUse
from fastac.registry import Verdict
from tests import compiler, support
from tests.marks import slow
from tests.support import AttentionBlock, assert_same, relative_error, stack_inputs, train_step

CALLS = 4  # self- and cross-attention in each of two blocks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(autouse=True)
def _fresh_compiler(folder: Path) -> Iterator[None]:
    support.count_cpu_attention()
    support.executions.clear()
    with compiler.fresh(folder):
        yield


class Experts(torch.nn.Module):
    """A mixture of experts, of which the data choose one per token: how many an expert gets, no graph can know."""

    def __init__(self, width: int, experts: int = 3) -> None:
        super().__init__()
        self.router = torch.nn.Linear(width, experts)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(experts))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        flat = tokens.flatten(0, -2)
        share, chosen = self.router(flat).softmax(-1).max(-1)
        found = torch.zeros_like(flat)
        for place, expert in enumerate(self.experts):
            mine = (chosen == place).nonzero().flatten()
            if mine.numel():
                found = found.index_add(0, mine, expert(flat[mine]) * share[mine, None])
        return found.view_as(tokens)


def block_class(breaks: str = "") -> type[AttentionBlock]:
    """A class of its own in every test: what is known of a class goes with it."""

    class Block(AttentionBlock):
        def __init__(self) -> None:
            super().__init__()
            if breaks == "experts":
                self.ffn = Experts(16)  # type: ignore[assignment]

        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            video = super().forward(video, text)
            if breaks == "print":
                print(end="")
            if breaks == "branch":
                video = video * 2 if video.sum().item() > 0 else video * 3
            return torch.tanh(video)

    return Block


class Model(torch.nn.Module):
    def __init__(self, block: Callable[[], torch.nn.Module], layers: int = 2, shared: bool = False) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([block() for _ in range(1 if shared else layers)] * (layers if shared else 1))

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            video = block(video, text)
        return video


def model(breaks: str = "", **options: Any) -> Model:
    block = block_class(breaks)
    torch.manual_seed(0)
    return Model(block, **options)


def hidream() -> tuple[torch.nn.Module, dict[str, Any]]:
    """A tiny HiDream, an image transformer whose blocks hold a mixture of experts, and inputs for it."""
    from diffusers import HiDreamImageTransformer2DModel

    torch.manual_seed(0)
    made = HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        caption_channels=[8, 8],
        text_emb_dim=8,
        axes_dims_rope=(4, 2, 2),  # type: ignore[arg-type]
        max_resolution=(32, 32),
        llama_layers=[0, 1],
    )
    support.fill_zeros(made)
    inputs = {
        "hidden_states": torch.randn(1, 4, 8, 8).requires_grad_(),
        "timesteps": torch.tensor([3]),
        "encoder_hidden_states_t5": torch.randn(1, 4, 8),
        "encoder_hidden_states_llama3": torch.randn(2, 1, 4, 8),
        "pooled_embeds": torch.randn(1, 8),
        "return_dict": False,
    }
    return made.train(), inputs


def executions_of(
    run: Callable[..., Any], inputs: dict[str, Any], reference: support.Tensors, exact: bool
) -> list[int]:
    """Attention kernels in each of three steps, whose gradients must be those of the reference."""
    counted = []
    for _ in range(3):
        support.executions.clear()
        found = train_step(run, inputs)
        counted.append(support.executions.total())
        if exact:
            assert_same(found, reference)
        assert found.keys() == reference.keys()
        assert max(relative_error(found[name], reference[name]) for name in reference) < 1e-5
    return counted


class TestGraphBreaks:
    """Attention runs once a step from the second on; before that once more, for the census of the block class."""

    @pytest.mark.parametrize("breaks", ["experts", *slow("", "print", "branch")])
    @pytest.mark.parametrize("backend", ["aot_eager", *slow("inductor")])
    def test_attention_is_saved_and_the_rest_compiled(self, breaks: str, backend: str) -> None:
        reference = train_step(model(breaks), stack_inputs())
        broken = model(breaks)
        fastac.compile(broken, blocks="blocks", backend=backend)
        counted = executions_of(broken, stack_inputs(), reference, exact=backend == "aot_eager")
        assert counted == [CALLS + 2, CALLS, CALLS]
        assert compiler.graphs() >= 1
        assert bool(compiler.graph_breaks()) == bool(breaks)

    @pytest.mark.slow
    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_the_experts_of_hidream(self, backend: str) -> None:
        built, inputs = hidream()
        reference = train_step(built, inputs)
        built, inputs = hidream()
        made = fastac.compile(built, backend=backend)
        assert made.blocks == {"HiDreamBlock": 2}
        counted = executions_of(built, inputs, reference, exact=backend == "aot_eager")
        assert counted[1:] == [2, 2]
        assert compiler.graphs() > 2
        assert compiler.graph_breaks() > 0

    def test_a_checkpoint_inside_compiled_code_is_given_up(self, caplog: pytest.LogCaptureFixture) -> None:
        """What plain torch does, and what a user hears who compiles a block after fastac.enable."""
        plain = model("experts")
        for block in plain.blocks:
            block.forward = functools.partial(torch_checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
        plain.compile(backend="aot_eager")
        reference = train_step(plain, stack_inputs())
        assert support.executions.total() == 2 * CALLS
        assert compiler.graphs() == 0

        inside = model("experts")
        fastac.enable(inside, blocks="blocks")
        for block in inside.blocks:
            block.compile(backend="aot_eager")
        with caplog.at_level(logging.WARNING, logger="fastac"):
            assert executions_of(inside, stack_inputs(), reference, exact=True)[1:] == [CALLS, CALLS]
        assert compiler.graphs() == 0
        assert "Block: runs eagerly, though torch.compile was applied to what calls it" in caplog.text

    def test_no_alarm_where_nothing_is_given_up(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, logger="fastac"):
            for breaks in ("", "print"):
                compiled = model(breaks)
                fastac.compile(compiled, blocks="blocks", backend="aot_eager")
                train_step(compiled, stack_inputs())
            whole = model()
            fastac.enable(whole, blocks="blocks")
            train_step(torch.compile(whole, backend="aot_eager"), stack_inputs())
        assert "eagerly" not in caplog.text


class TestWhatItDoes:
    def test_it_says_what_it_did(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, logger="fastac"):
            made = fastac.compile(model(), "long_attn_only", blocks="blocks")
        assert str(made) == (
            "Model: Block x 2 compiled by inductor, each inside its own checkpoint (policy long_attn_only), so that a "
            "graph break costs no saved attention. flex_attention is compiled apart from what is around it, so that it "
            "can be saved."
        )
        assert str(made) in caplog.text
        full = fastac.compile(model(), "full", blocks="blocks", backend="aot_eager")
        assert str(full) == "Model: Block x 2 compiled by aot_eager, each inside its own checkpoint (policy full)."

    def test_a_second_call_compiles_nothing_again(self) -> None:
        twice = model()
        first = fastac.compile(twice, blocks="blocks", backend="aot_eager")
        train_step(twice, stack_inputs())
        graphs = compiler.graphs()
        assert fastac.compile(twice, blocks="blocks", backend="aot_eager") == first
        train_step(twice, stack_inputs())
        assert compiler.graphs() == graphs

    def test_other_options_compile_again(self) -> None:
        built, _ = hidream()
        for options in ({"backend": "aot_eager"}, {"backend": "eager"}, {"backend": "eager"}):
            assert fastac.compile(built, **options).before == ()
        named = model()
        for backend in ("aot_eager", "eager"):
            fastac.compile(named, blocks="blocks", backend=backend)
            forward = named.blocks[0].forward.args[0].before
            assert isinstance(forward, CompiledForward)
            assert forward.options == {"backend": backend}
            assert not isinstance(forward._torchdynamo_orig_callable, CompiledForward)

    def test_blocks_that_are_compiled_stay_so(self) -> None:
        built, _ = hidream()
        block = built.get_submodule("double_stream_blocks.0")
        block.compile(backend="eager")
        theirs = block._compiled_call_impl
        made = fastac.compile(built, backend="aot_eager")
        assert made.before == ("double_stream_blocks.0",)
        assert "double_stream_blocks.0 had been compiled before and stayed so, with the options they had" in str(made)
        assert made.blocks == {"HiDreamBlock": 1}  # the other one
        assert block._compiled_call_impl is theirs
        assert built.get_submodule("single_stream_blocks.0")._compiled_call_impl is not None

        named = model()
        named.blocks[0] = torch.compile(named.blocks[0], backend="eager")  # type: ignore[assignment]
        assert fastac.compile(named, blocks="blocks", backend="aot_eager").before == ("blocks.0",)

    def test_a_shared_block_is_one(self) -> None:
        reference = train_step(model(shared=True), stack_inputs())
        shared = model(shared=True)
        assert fastac.compile(shared, blocks="blocks", backend="aot_eager").blocks == {"Block": 1}
        assert executions_of(shared, stack_inputs(), reference, exact=True)[1:] == [CALLS, CALLS]

    def test_disabled_it_is_compiled_still(self) -> None:
        for built, inputs, blocks in ((model(), stack_inputs(), "blocks"), (*hidream(), None)):
            compiler.reset()
            keys = list(built.state_dict())
            reference = train_step(built, inputs)
            fastac.compile(built, blocks=blocks, backend="aot_eager")
            assert list(built.state_dict()) == keys
            fastac.disable(built)
            support.executions.clear()
            assert_same(train_step(built, inputs), reference)
            assert support.executions.total() == (CALLS if blocks else 2), "nothing is recomputed"
            assert compiler.graphs() >= 1
            assert hook.setting_of(built) is None

    @pytest.mark.parametrize("how", ["deepcopy", "pickle"])
    def test_a_copy_has_its_own_weights(self, how: str) -> None:
        """A compiled function is bound to the block it was made of: a copy must not call it."""
        built = Model(AttentionBlock)
        fastac.compile(built, blocks="blocks", backend="aot_eager")
        before = train_step(built, stack_inputs())
        if how == "deepcopy":
            copied = copy.deepcopy(built)
        else:
            file = io.BytesIO()
            torch.save(built, file)
            file.seek(0)
            copied = torch.load(file, weights_only=False)
        assert_same(train_step(copied, stack_inputs()), before)
        support.executions.clear()
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
        changed = train_step(copied, stack_inputs())
        assert support.executions.total() == CALLS, "it is checkpointed, and attention is saved"
        assert not torch.equal(changed["output"], before["output"])
        assert_same(train_step(built, stack_inputs()), before)

    def test_policies(self) -> None:
        reference = train_step(model(), stack_inputs())
        for policy, calls in (("full", 2 * CALLS), ({"blocks.0": "full", "*": "attn_only"}, 6)):
            compiler.reset()
            built = model()
            made = fastac.compile(built, policy, blocks="blocks", backend="aot_eager")  # type: ignore[arg-type]
            assert ("mixed" in str(made)) == isinstance(policy, dict)
            assert executions_of(built, stack_inputs(), reference, exact=True)[1:] == [calls, calls]

    def test_what_only_eager_mode_shows_stays_eager(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A kernel that make_visible made visible is recomputed in compiled code."""
        built = model()
        opaque = built.blocks[0]

        def reader(module: torch.nn.Module) -> Iterator[BackendUse]:
            if opaque in module.modules():
                yield BackendUse("" if module is opaque else "blocks.0", "theirs", Verdict.OPAQUE, family="sdpa")

        monkeypatch.setattr(registry, "_readers", [reader])
        made = fastac.compile(built, blocks="blocks", backend="aot_eager")
        assert made.blocks == {"Block": 1}
        assert made.eager == ("blocks.0",)
        assert "blocks.0 stayed eager: in compiled code their attention kernel could not be seen." in str(made)
        assert not isinstance(built.blocks[0].forward.args[0].before, CompiledForward)
        assert isinstance(built.blocks[1].forward.args[0].before, CompiledForward)


def compiled_whole() -> Model:
    built = model()
    built.compile(backend="eager")
    return built


def compiled_block() -> Model:
    built = model()
    built.blocks[1].compile(backend="eager")
    return built


REFUSED: list[tuple[Callable[[], Any], dict[str, Any], str]] = [
    (lambda: 3, {}, "compile: expected a model, got int"),
    (model, {}, "has no enable_gradient_checkpointing"),
    (model, {"blocks": "layers"}, "has no such module"),
    (model, {"blocks": "blocks", "policy": "most"}, "no such policy"),
    (
        model,
        {"blocks": "blocks", "engine": "sac"},
        r"compile\(engine=...\): torch's selective",
    ),
    (model, {"blocks": "blocks", "disable": True}, r"compile\(disable=...\): torch.compile has no such option"),
    (model, {"blocks": "blocks", "max_autotune": True}, r"no such option.*inductor's configuration go into options="),
    (model, {"blocks": "blocks", "backend": "nonsense"}, "torch.compile does not take these options: Invalid backend"),
    (model, {"blocks": "blocks", "mode": "nonsense"}, "torch.compile does not take these options"),
    (model, {"blocks": "blocks", "options": {"nonsense": 1}}, r"Unexpected optimization option nonsense$"),
    (model, {"blocks": "blocks", "mode": "default", "options": {"max_autotune": True}}, "either mode or options"),
    (
        compiled_whole,
        {"blocks": "blocks"},
        "compile: Model is compiled as a whole already. Take out",
    ),
    (lambda: torch.compile(model()), {"blocks": "blocks"}, "compile: Model is compiled as a whole already"),
    (compiled_block, {"blocks": "blocks"}, "a Block is compiled already, and would have its checkpoint inside"),
]


@pytest.mark.parametrize(("build", "options", "message"), REFUSED, ids=[message[:40] for *_, message in REFUSED])
def test_refused_with_the_model_as_it_was(build: Callable[[], Any], options: dict[str, Any], message: str) -> None:
    built = build()
    modules = list(built.modules()) if isinstance(built, torch.nn.Module) else []
    before = [(vars(module).copy(), module._compiled_call_impl) for module in modules]
    with pytest.raises(FastacError, match=message):
        fastac.compile(built, **options)
    assert [(vars(module), module._compiled_call_impl) for module in modules] == before


def test_diffusers_models_that_are_compiled_as_a_whole() -> None:
    built, _ = hidream()
    built.compile(backend="eager")
    with pytest.raises(FastacError, match="compiled as a whole"):
        fastac.compile(built)
    assert hook.enabled_function(built) is None


@pytest.mark.parametrize("named", [True, *slow(False)])
def test_verify_takes_a_model_that_is_compiled_as_a_whole(named: bool) -> None:
    """What its regions saved can not be counted there; that no kernel ran again can."""
    built, inputs = (model(), stack_inputs()) if named else support.build("WanTransformer3DModel")
    whole = torch.compile(built, backend="aot_eager", fullgraph=True)
    fastac.enable(whole, blocks="blocks" if named else None)
    found = fastac.verify(whole, **inputs)
    assert found.policy_executions == (4, 0)
    fastac.disable(whole)


def test_verify_counts_what_was_decided_in_a_graph() -> None:
    model, inputs = support.build("WanTransformer3DModel")
    long_only = fastac.Policy("attn_only", min_kv=100)
    fastac.enable(model, long_only)
    model.compile(backend="aot_eager")
    found = fastac.verify(model, policy=long_only, **inputs)
    assert (found.saved, found.recomputed, found.allowed_again, found.policy_executions) == (2, 2, 2, (4, 2))
    assert found.saved_bytes == sum(row.saved_bytes for row in fastac.report(model).rows) > 0


@pytest.mark.slow
def test_verify_allows_for_what_inductor_rounds() -> None:
    """With checkpointing it fuses another graph than without."""
    model, inputs = support.build("WanTransformer3DModel")
    fastac.enable(model)
    model.compile()
    found = fastac.verify(model, **inputs)
    assert found.different
    assert not found.broken
    assert found.saved == 4


@pytest.mark.slow
def test_short_attention_recomputed_in_code_of_inductor() -> None:
    """With vector instructions inductor for CPUs (torch 2.13) gets a sum of Wan's wrong here, also without fastac."""
    model, inputs = support.build("WanTransformer3DModel")
    expected = train_step(model, inputs)
    fastac.enable(model, fastac.Policy("attn_only", min_kv=100))
    model.compile(dynamic=False)
    with torch._inductor.config.patch({"cpp.simdlen": 1}):
        found = train_step(model, inputs)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert support.relative_error(tensor, expected[name]) < 1e-4, name


def test_verify_takes_a_model_whose_blocks_are_compiled() -> None:
    built = model("experts")
    fastac.compile(built, blocks="blocks", backend="aot_eager")
    assert fastac.verify(built, **stack_inputs()).saved == CALLS
