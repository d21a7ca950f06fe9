"""fastac.verify where kernels give other numbers in every run: by deterministic kernels, or within the noise."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F

import fastac
from fastac import FastacError
from fastac.verification import noise, ways
from tests import support
from tests.hook.hosts import Diffuser, diffuser
from tests.marks import NEEDS_COMPILED_MODELS
from tests.support import AttentionBlock, cells_of, stack_inputs

# Deterministic kernels, where there are some


MISSING = "kernel_cuda does not have a deterministic implementation"


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


class Kernel(torch.autograd.Function):
    """Its backward is noisy, unless torch is asked for deterministic algorithms. What else holds: `noisy`."""

    generator = torch.Generator()
    share, elements, size, refuses, error, ignores = 1.0, 1.0, 1e-6, "", RuntimeError, False

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        if torch.get_deterministic_debug_mode() < 2 or Kernel.ignores:
            is_hit = torch.rand((), generator=Kernel.generator) < Kernel.share
            noise, among = (torch.rand(gradient.shape, generator=Kernel.generator) for _ in range(2))
            return gradient * (1 + Kernel.size * is_hit * noise * (among < Kernel.elements))
        if Kernel.refuses:
            raise Kernel.error(Kernel.refuses)
        return gradient.clone()


@pytest.fixture(autouse=True)
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Says how the kernel is noisy, in this test.

    share: of the calls. elements: a share of the numbers of one. size: of the noise, relative to a number.
    refuses: the message of the error with which it has no deterministic algorithm. ignores: that it is asked for one.
    """

    def change(seed: int = 0, **values: Any) -> None:
        Kernel.generator.manual_seed(seed)
        for name, value in values.items():
            monkeypatch.setattr(Kernel, name, value)

    change()
    return change


class Block(AttentionBlock):
    """A block that begins with the kernel. other_gain: by which it multiplies when it is run again.

    of: only if the forward was observed (the "first" region), or only if it was not ("later").
    """

    other_gain, of, was_observed, is_noisy = 1.0, "", False, True

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        gain = 1.0
        if not in_backward():
            self.was_observed = torch._C._len_torch_dispatch_stack() > 0
        elif self.of in ("", "first" if self.was_observed else "later"):
            gain = self.other_gain
        video = Kernel.apply(video) if self.is_noisy else video
        return (super().forward(video, text).tanh() * gain).tanh()


WAYS: dict[str, dict[str, Any]] = {
    "attn_only": {"policy": "attn_only"},
    "offload": {"policy": fastac.Policy("attn_only", offload=True)},
    "full": {"policy": "full"},
    "per block": {"per_block": True},
}


def noisy() -> Diffuser:
    model = diffuser()
    torch.manual_seed(0)
    model.blocks = torch.nn.ModuleList(Block() for _ in model.blocks)
    return model


def verify_blocks(other_gain: float = 1.0, of: str = "", **options: Any) -> fastac.Verification:
    model = noisy()
    for block in model.blocks:
        block.other_gain, block.of = other_gain, of
    fastac.enable(model, determinism_check="none")
    return fastac.verify(model, **stack_inputs(), **options)


def modes() -> tuple[Any, ...]:
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    of_compiler = getattr(torch._inductor.config, "deterministic", None)  # since 2.10
    return torch.get_deterministic_debug_mode(), fill, of_compiler


@pytest.mark.parametrize(
    ("way", "mode", "size"),
    [*((way, "default", 1e-6) for way in WAYS), ("attn_only", "warn", 1e-6), ("attn_only", "default", 0.5)],
)
def test_deterministic_kernels_are_compared_bitwise(way: str, mode: str, size: float, kernel: Any) -> None:
    """However large the noise is. Afterwards torch's switches are the user's, also when a fault was found."""
    kernel(size=size)
    torch.set_deterministic_debug_mode(mode)
    before = modes()
    try:
        result = verify_blocks(**WAYS[way])
        assert (result.different, result.deterministic, result.noise) == ((), True, 0.0)
        assert cells_of(str(result))["outputs and gradients"][-1] == "bitwise, deterministic kernels"
        assert "attention ops compared" not in str(result), "they are those of training"
        with pytest.raises(FastacError, match="outputs and gradients differ"):
            verify_blocks(other_gain=1 + 1e-6, **WAYS[way])
        assert modes() == before
    finally:
        torch.set_deterministic_debug_mode("default")


@pytest.mark.parametrize(
    ("way", "of", "refuses"),
    [  # each pair of them
        ("attn_only", "first", ""),
        ("attn_only", "later", MISSING),
        ("offload", "first", MISSING),
        ("offload", "later", ""),
        ("per block", "first", ""),
        ("per block", "later", MISSING),
    ],
)
def test_a_fault_of_the_first_or_of_later_steps_is_seen(way: str, of: str, refuses: str, kernel: Any) -> None:
    kernel(refuses=refuses)
    with pytest.raises(FastacError, match="outputs and gradients differ"):
        verify_blocks(other_gain=1.03, of=of, **WAYS[way])


@pytest.mark.parametrize(("way", "number"), [*((way, 0) for way in WAYS), ("attn_only", 1), ("per block", 1)])
def test_a_fault_of_a_single_run(way: str, number: int) -> None:
    """As of a race: of the first run of the policy, or of the second."""
    model, recomputed = diffuser(), itertools.count()

    def change(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * 1.5 if in_backward() and next(recomputed) == number else output

    model.blocks[0].ffn[1].register_forward_hook(change)
    fastac.enable(model, determinism_check="none")
    with pytest.raises(FastacError, match="outputs and gradients differ"):
        fastac.verify(model, **stack_inputs(), **WAYS[way])


def test_a_fault_of_kernels_that_are_not_deterministic() -> None:
    """Those of training, which deterministic ones replace."""
    model = noisy()

    def change(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        is_other = in_backward() and not torch.are_deterministic_algorithms_enabled()
        return output * 1.5 if is_other else output

    for block in model.blocks:
        block.ffn[1].register_forward_hook(change)
    fastac.enable(model, determinism_check="none")
    with pytest.raises(FastacError, match="training's own kernels were compared"):
        fastac.verify(model, **stack_inputs())


CUBLAS = (
    "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or ..., but this "
    "operation is not deterministic because it uses CuBLAS and you have CUDA >= 10.2. To enable deterministic behavior "
    "in this case, you must set an environment variable before running your PyTorch application: "
    "CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8."
)


@pytest.mark.parametrize(
    ("way", "refuses", "remark"),
    [
        ("attn_only", f"{MISSING}, but you set ...", f"No deterministic kernels: {MISSING}"),
        ("per block", f"{MISSING}, but you set ...", f"No deterministic kernels: {MISSING}"),
        ("offload", CUBLAS, "start Python with CUBLAS_WORKSPACE_CONFIG=:4096:8"),
        ("full", "No available kernel. Aborting execution.", "No available kernel"),  # SDPA with cuDNN alone
    ],
    ids=str,
)
def test_without_a_deterministic_kernel_noise_is_measured(way: str, refuses: str, remark: str, kernel: Any) -> None:
    kernel(refuses=refuses)
    result = verify_blocks(**WAYS[way])
    assert result.different
    assert not result.deterministic
    assert 4 <= result.runs <= 12
    assert 0 < result.noise < 1e-5
    assert f"within the noise of {result.runs} runs (" in cells_of(str(result))["outputs and gradients"][-1]
    assert remark in str(result).splitlines()[-1]


@pytest.mark.parametrize("trials", [3, pytest.param(1000, marks=(pytest.mark.soak, pytest.mark.timeout(3600)))])
@pytest.mark.parametrize(
    ("gain", "noise"),
    [
        (1.03, {"size": 2**-8}),  # as of kernels that round to bf16
        (1.03, {"size": 2**-8, "elements": 1e-2}),
        (1.03, {"size": 2**-8, "elements": 1e-4}),
        (2.0, {"share": 0.02}),
        (2.0, {"share": 0.2, "size": 1e-2}),
        (2.0, {"share": 0.5}),
        (2.0, {"size": 0.1}),
    ],
    ids=str,
)
def test_noise_that_is_rare_or_large(gain: float, noise: dict[str, float], trials: int, kernel: Any) -> None:
    """Few false alarms, and none in a few trials; what is wrong is always found."""
    alarms = 0
    for seed in range(trials):
        kernel(seed, ignores=True, **noise)
        try:
            verify_blocks()
        except FastacError:
            alarms += 1
        if seed % 5 == 0:
            with pytest.raises(FastacError, match="outputs and gradients differ"):
                verify_blocks(other_gain=gain)
    assert alarms <= trials // 300


def test_an_error_of_fastac_is_no_missing_kernel(kernel: Any) -> None:
    kernel(refuses="lost", error=FastacError)
    with pytest.raises(FastacError, match="lost"):
        verify_blocks()


def test_the_remark_is_of_any_block(kernel: Any) -> None:
    kernel(refuses=MISSING)
    model = noisy()
    model.blocks[0].is_noisy = False
    assert MISSING in str(fastac.verify(model, **stack_inputs(), per_block=True)).splitlines()[-1]


def test_a_reference_that_loses_results_is_no_proof() -> None:
    """A gradient is NaN in the run after the first three and the two with deterministic kernels."""
    runs = itertools.count()

    class Loses(AttentionBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            if not in_backward():
                number = next(runs)
                video.register_hook(lambda gradient: gradient * (math.nan if number == 5 else 1 + number * 1e-6))
            return super().forward(video, text)

    with pytest.raises(FastacError, match="1 of 23 outputs and gradients differ"):
        fastac.verify(Loses(), **stack_inputs())


@NEEDS_COMPILED_MODELS
def test_a_model_that_is_compiled_as_a_whole() -> None:
    """Its kernel is noisy in some calls."""
    calls = torch.Generator().manual_seed(0)

    @torch.library.custom_op("fastac_tests::rounds", mutates_args=())
    def rounds(gradient: torch.Tensor) -> torch.Tensor:
        is_noisy = torch.rand((), generator=calls) < 0.2
        return gradient * (1 + 1e-6 * is_noisy * torch.rand(gradient.shape, generator=calls))

    @torch.library.custom_op("fastac_tests::noisy", mutates_args=())
    def noisy(hidden: torch.Tensor) -> torch.Tensor:
        return hidden.clone()

    rounds.register_fake(torch.empty_like)
    noisy.register_fake(torch.empty_like)
    noisy.register_autograd(lambda ctx, gradient: rounds(gradient))
    model = support.stack(
        block=lambda: AttentionBlock(attend=lambda q, k, v: F.scaled_dot_product_attention(noisy(q), k, v))
    )
    fastac.enable(model, blocks="blocks")
    model.compile(backend="aot_eager")
    for _ in range(2):
        result = fastac.verify(model, **stack_inputs())
        assert not result.broken
        assert cells_of(str(result))["outputs and gradients"][-1] == "within what compiling none changes by itself"


def test_other_attention_kernels_than_in_training_are_named() -> None:
    """As SDPA takes flash attention for cuDNN's."""
    training, compared = (support.custom_attention(f"verify_{name}") for name in ("training", "compared"))

    def attend(*tensors: torch.Tensor) -> torch.Tensor:
        return (compared if torch.are_deterministic_algorithms_enabled() else training)(*tensors)

    model = noisy()
    for block in model.blocks:
        block.attend = attend
    result = fastac.verify(model, **stack_inputs())
    assert result.deterministic
    assert result.kernels == (f"{support.NAMESPACE}::verify_training",)
    assert result.compared_kernels == (f"{support.NAMESPACE}::verify_compared",)
    cells = cells_of(str(result))["attention ops compared"]
    assert cells == [*result.compared_kernels * 2, f"in training: {result.kernels[0]}"]


@pytest.mark.parametrize(
    ("first", "second", "distance"),
    [
        (torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]), 0.5 / math.hypot(3, 4.5)),
        (torch.tensor([3 + 4j]), torch.tensor([3 + 4.5j]), 0.5 / math.hypot(3, 4.5)),
        (torch.tensor([1j]), torch.tensor([2j]), 0.5),
        (torch.tensor([math.inf, 4.0], dtype=torch.float64), torch.tensor([math.inf, 2.0], dtype=torch.float64), 0.5),
        (torch.tensor([math.inf]), torch.tensor([-math.inf]), math.inf),
        (torch.tensor([math.inf]), torch.tensor([math.nan]), math.inf),
        (torch.tensor([math.inf]), torch.tensor([1.0]), math.inf),
        (torch.ones(1), torch.ones(2), math.inf),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1]), torch.finfo(torch.float64).eps),
        (torch.tensor([0.0, 4.0]).to_sparse(), torch.tensor([0.0, 2.0]).to_sparse(), 0.5),
    ],
)
def test_distances(first: torch.Tensor, second: torch.Tensor, distance: float) -> None:
    for one, other in ((first, second), (second, first)):
        assert noise.distances({"": one}, {"": other})[""] == pytest.approx(distance)
        assert noise.distances({"": one}, {"": one.clone()})[""] == 0


# fastac bench


@pytest.mark.parametrize(("refuses", "share"), [("", 1.0), (MISSING, 1.0), (MISSING, 0.2)])
def test_bench_has_the_same_rule(refuses: str, share: float, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where noise is rare, and did not hit the runs of the reference."""

    def enabling(other_gain: float) -> Callable[[Any], None]:
        def enable(switch: Any) -> None:
            for block in switch.workload.model.blocks:
                block.other_gain = other_gain
            fastac.enable(switch.workload.model, "attn_only", determinism_check="none")

        return enable

    gains = {"attn_only": 1.0, "wrong": 1.03, "later": 1.0}
    variants = {"none": ways.VARIANTS["none"], **{name: enabling(gain) for name, gain in gains.items()}}
    kernel(refuses=refuses, share=share)
    monkeypatch.setattr(ways, "VARIANTS", variants)
    measured = ways.bench(ways.Workload(noisy(), stack_inputs()), "blocks", rounds=1)
    cells = {name: row[-1] for name, row in cells_of(str(measured)).items()}
    equal = r"bitwise|within the noise of \d+ runs" if refuses else "bitwise, deterministic kernels"
    assert all(re.fullmatch(equal, cells[name]) for name in ("none", "attn_only", "later"))
    assert re.fullmatch(r"\d+ of \d+ differ, by up to 0.0[1-5]\d* of their norm", cells["wrong"])
    assert ("runs of none differ by up to" in str(measured)) == bool(refuses)
