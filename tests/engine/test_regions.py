"""What a region takes, what saved-tensor hooks around it get, and what it holds: tests/engine/test_hazards.py has what
went wrong once, tests/engine/test_outcomes.py what torch's own checkpoint is exact in."""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import noop_context_fn, set_checkpoint_early_stop

import fastac
from fastac import FastacError
from fastac.engine import recompute, region
from fastac.engine.releases import WHOLE_PRODUCT
from tests import support
from tests.engine.cases import OWN_ALONE, OneAttention, assert_exact, held_bytes, twice
from tests.marks import needs_torch
from tests.support import CPU_ATTENTION, AttentionBlock, assert_region, assert_same, stack, stack_inputs, train_step

# As torch.utils.checkpoint.checkpoint is called


def test_decorator(attention_executions: Counter[str]) -> None:
    class Decorated(AttentionBlock):
        @fastac.checkpoint(policy="attn_only", use_reentrant=False, context_fn=noop_context_fn)
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
            """Of the block."""
            return super().forward(video, text)

    decorated: Any = stack(layers=1, block=Decorated).blocks[0]
    found = train_step(decorated, stack_inputs())
    assert attention_executions == {CPU_ATTENTION: 2}
    assert_same(found, train_step(stack(layers=1).blocks[0], stack_inputs()))
    assert decorated.forward.__doc__ == "Of the block."
    with pytest.raises(FastacError, match="without a function"):
        fastac.checkpoint(scale=1)


def test_none_inside_a_region_is_part_of_it(attention_executions: Counter[str]) -> None:
    inner = functools.partial(fastac.checkpoint, AttentionBlock(), policy="none")
    assert_region(lambda **inputs: inner(**inputs), stack_inputs(), attention_executions)


@pytest.mark.parametrize("options", [{"use_reentrant": True}, {"context_fn": list}, {"policy": "attention"}], ids=str)
def test_options_that_cannot_be_honoured(options: dict[str, Any]) -> None:
    with pytest.raises(FastacError, match=r"use_reentrant=|context_fn=\.\.\.|'attention'.*attn_only"):
        fastac.checkpoint(AttentionBlock(), **stack_inputs(), **options)


# Saved-tensor hooks around it


def packed(block: Any, call: Any, inputs: support.Tensors, change: Any) -> tuple[support.Tensors, list[torch.Tensor]]:
    """Train a block with hooks around its call, in two backwards. Returns gradients, and what the hooks held."""
    held: list[torch.Tensor] = []
    block.zero_grad()

    def pack(tensor: torch.Tensor) -> int:
        held.append(change(tensor))
        return len(held) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, held.__getitem__):
        return train_step(call, inputs, backward=twice) | support.gradients(support.leaves_of(block, {})), held


@pytest.mark.parametrize(
    "change", [lambda tensor: tensor, torch.Tensor.contiguous, torch.clone], ids=["itself", "contiguous", "copy"]
)
@pytest.mark.parametrize("respect", [True, False])
def test_saved_tensors_hooks_around_it(respect: bool, change: Any, attention_executions: Counter[str]) -> None:
    """They get what is saved where the call asks for that: at any step, for a second backward, with a region inside."""
    block, inputs = stack(layers=1).blocks[0], stack_inputs()
    checkpoint = functools.partial(fastac.checkpoint, respect_saved_tensors_hooks=respect)
    inner = functools.partial(checkpoint, block)
    around = functools.partial(fastac.checkpoint, lambda **args: inner(**args), policy=OWN_ALONE)
    expected = train_step(block, inputs, backward=twice)
    for call in (inner, functools.partial(checkpoint, lambda **args: inner(**args)), around):
        for _ in range(2):
            attention_executions.clear()
            found, held = packed(block, call, inputs, change)
            assert_same(found, expected)
            assert attention_executions == {CPU_ATTENTION: 2}
            outputs = [one for one in held if one.shape == (1, 2, support.VIDEO_TOKENS, support.WIDTH // 2)]
            assert len(outputs) == (2 if respect and call is not around else 0)


def test_hooks_that_keep_the_tensor_get_a_copy() -> None:
    """A forward that autograd does not follow may write into what was saved, and so does each recompute."""
    block: Any = stack(layers=1, block=lambda: OneAttention(change=lambda output: output.mul_(2))).blocks[0]
    inputs = {name: one.detach() for name, one in stack_inputs().items()}
    block.qkv.requires_grad_(False)
    call = functools.partial(fastac.checkpoint, block, respect_saved_tensors_hooks=True)
    found, _ = packed(block, call, inputs, lambda tensor: tensor)
    assert_same(found, train_step(block, inputs, backward=twice))


def to_bf16(tensor: torch.Tensor) -> Any:
    """Of an input of a block."""
    return tensor.bfloat16() if tensor.dim() == 3 else tensor


class Rounded:
    """Packs to whole numbers of a scale."""

    def __call__(self, tensor: torch.Tensor) -> Any:
        return (tensor * 64).round() / 64 if tensor.dim() == 3 else tensor


@pytest.mark.parametrize("policy", ["full", "attn_only"])
@pytest.mark.parametrize(("pack", "name"), [(to_bf16, "to_bf16"), (Rounded(), "Rounded")], ids=["bf16", "rounded"])
def test_lossy_hooks_around_it_are_named(pack: Any, name: str, policy: str) -> None:
    """They change what recompute begins with, on purpose. The error says how to go on, and hooks without loss do."""

    def step(pack: Any, **options: Any) -> None:
        model = stack()
        fastac.enable(model, policy, blocks="blocks", **options)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed.float()):
            loss = support.loss_of(model(**stack_inputs()))
        loss.backward()

    with pytest.raises(FastacError, match=rf'saved_tensors_hooks \({name}\) .*determinism_check="none"') as raised:
        step(pack)
    assert len(str(raised.value).splitlines()) <= 5
    step(pack, determinism_check="none")
    step(torch.clone)


# What ops return, and raise

RETURNS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "Tensor": lambda output, statistics: output,
    "Tensor[]": lambda output, statistics: [output, statistics],
    "(Tensor, int, Tensor)": lambda output, statistics: (output, 3, statistics),
    "(Tensor, Tensor)": lambda output, statistics: (F.pad(output, (0, 8))[..., :-8], statistics),
}
"""The last is a slice of a larger buffer, of a kernel that pads the head dim."""


@pytest.mark.parametrize("returns", RETURNS)
def test_output_structure(returns: str, attention_executions: Counter[str]) -> None:
    """A replayed call returns what the kernel returned: its structure, numbers in it, and strides."""
    name = f"returns_{list(RETURNS).index(returns)}"

    def kernel(*heads: torch.Tensor) -> Any:
        support.executions[name] += 1
        return RETURNS[returns](*support.attention_math(*heads))

    library = support.define_op(f"{name}(Tensor query, Tensor key, Tensor value) -> {returns}", kernel)
    support.register_row(name)
    seen = []

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *heads: torch.Tensor) -> torch.Tensor:
            found = getattr(torch.ops.fastac_tests, name)(*heads)
            output, *others = [found] if returns == "Tensor" else found
            seen.append([type(found), output.stride(), *map(type, others)])
            ctx.save_for_backward(*heads, output, support.attention_math(*heads)[1])
            return output.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return support.attention_math_backward(grad, *ctx.saved_tensors)

    assert_exact(lambda: OneAttention(Attention.apply), attention_executions)
    assert all(one == seen[0] for one in seen)
    library._destroy()


def test_kernel_that_raises_and_is_caught(attention_executions: Counter[str]) -> None:
    def kernel(*heads: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError("no kernel for this shape")

    library = support.define_op("raises(Tensor query, Tensor key, Tensor value) -> Tensor", kernel)
    support.register_row("raises")

    def with_fallback(*heads: torch.Tensor) -> torch.Tensor:
        try:
            return torch.ops.fastac_tests.raises(*(one.detach() for one in heads))  # type: ignore[no-any-return]
        except NotImplementedError:
            return F.scaled_dot_product_attention(*heads)

    assert_exact(lambda: OneAttention(with_fallback), attention_executions)
    library._destroy()


# Memory

ROW_BYTES = support.VIDEO_TOKENS * 4  # of one float per query
CALL_BYTES = support.WIDTH * ROW_BYTES + 2 * ROW_BYTES  # the output, and statistics per query and head


@pytest.mark.parametrize(("policy", "calls"), [("attn_only", 2), (OWN_ALONE, 1), ("full", 0)], ids=str)
def test_held_bytes_are_those_of_outputs_and_statistics(policy: Any, calls: int) -> None:
    """To the byte. Nothing else of the region lives on after its forward, and nothing after its output is dropped."""
    assert held_bytes(AttentionBlock(), policy) == (calls * CALL_BYTES, 0, 0)


def test_held_bytes_of_outputs_that_nobody_guards() -> None:
    """A copy is kept instead of the output, not in addition."""
    attend = support.custom_attention("held")
    dropout_mask_bytes = 2 * support.VIDEO_TOKENS * ROW_BYTES  # the third output of this op
    expected = CALL_BYTES + dropout_mask_bytes
    assert held_bytes(OneAttention(attend, change=torch.neg), "attn_only") == (expected, 0, 0)


def test_graph_of_a_recompute_goes_with_it() -> None:
    """An output that is kept for a second backward is handed out as a fresh alias: the graph that the recompute builds
    behind it would otherwise live on the tape, with everything that it saved."""
    graphs: list[weakref.ref[Counter[str]]] = []

    def mark(output: torch.Tensor) -> torch.Tensor:
        assert output.grad_fn is not None
        output.grad_fn.metadata["mark"] = alive = Counter()
        graphs.append(weakref.ref(alive))
        return output

    model = stack(layers=1, policy="attn_only", block=lambda: OneAttention(change=mark))
    loss = support.loss_of(model(**stack_inputs()))
    loss.backward(retain_graph=True)
    of_forward, of_recompute = graphs
    assert of_forward() is not None
    assert of_recompute() is None


# Recomputes inside the forward, and in several threads


class TakesItsOwnGradient(AttentionBlock):
    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        own = self._attention(*self.qkv(video).chunk(3, dim=-1))
        (gradient,) = torch.autograd.grad(own.sum(), video, retain_graph=True)
        return super().forward(video + gradient, text)


@pytest.mark.parametrize(
    ("policy", "early_stop"), [("attn_only", True), (OWN_ALONE, True), (OWN_ALONE, False)], ids=str
)
def test_a_gradient_in_the_middle_of_a_forward(policy: Any, early_stop: bool) -> None:
    """It recomputes the region while its forward is not complete: what has no entry yet runs."""
    with set_checkpoint_early_stop(early_stop):
        assert_region(stack(layers=1, block=TakesItsOwnGradient).blocks[0], stack_inputs(), policy=policy)


def test_two_threads_that_recompute_one_region_at_once() -> None:
    """Each output of a block is backpropagated by a thread of its own: each recompute has a position of its own."""
    meet = threading.Barrier(2, timeout=300)

    class Two(AttentionBlock):
        def forward(self, video: torch.Tensor, text: torch.Tensor) -> Any:
            if threading.current_thread() is not threading.main_thread():
                meet.wait()
            own = self._attention(*self.qkv(video).chunk(3, dim=-1))
            return own.sin(), self._attention(self.q(own), *self.kv(text).chunk(2, dim=-1)).sin()

    def gradient(output: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(output.sum(), block.qkv.weight, retain_graph=True)[0]

    block: Any = stack(layers=1, block=Two).blocks[0]
    outputs = fastac.checkpoint(block, *stack_inputs().values())
    expected = list(map(gradient, outputs))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(gradient, outputs))
    torch.testing.assert_close(found, expected)  # threads add up in another order


# What a steady forward costs: the device runs what it runs under torch's checkpoint, and a reader looks at few files


def forward_on_the_device(model: Any, inputs: dict[str, torch.Tensor]) -> list[Any]:
    """Ops of the forward of step 5, in which no values are compared: names, shapes, and bytes that were allocated."""
    for _ in range(5):
        train_step(model, inputs)
    gc.collect()  # not in the middle of it
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as seen:
        model(**inputs)
    ran = [event for event in seen.events() if event.name.startswith("aten::") and event.name != "aten::detach"]
    assert ran
    return [(event.name, event.input_shapes, event.cpu_memory_usage * ("empty" in event.name)) for event in ran]


COPIES_LINEAR = pytest.mark.skipif(not WHOLE_PRODUCT, reason="a Linear output is copied")


@needs_torch("2.12")  # earlier, torch's checkpoint begins with another op
@pytest.mark.parametrize(
    "policy",
    ["full", "attn_only", pytest.param(fastac.Policy("attn_only", linear=("ffn.0",)), marks=COPIES_LINEAR)],
    ids=str,
)
def test_a_steady_forward_runs_what_it_runs_under_torchs_checkpoint(policy: Any) -> None:
    """The same ops, which take the same memory: a view, by detach, takes none."""
    inputs = stack_inputs()
    expected = forward_on_the_device(stack(policy="torch"), inputs)
    assert forward_on_the_device(stack(policy=policy), inputs) == expected


def files_entered(function: Callable[[], Any]) -> set[str]:
    """The files of fastac whose functions a call enters in this thread. A package of torch's private names is one."""
    entered = set()

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename)

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    package = Path(fastac.__file__).parent
    names = [Path(file).relative_to(package) for file in entered if Path(file).is_relative_to(package)]
    return {str(name.parent if name.parent.name == "torch_private" else name) for name in names}


def test_a_steady_region_enters_few_files() -> None:
    """Step 3, in which no values are compared. On a CPU backward runs in this thread."""
    model, inputs = stack(policy="attn_only"), stack_inputs()
    for _ in range(3):
        train_step(model, inputs)
    losses: list[torch.Tensor] = []
    forward = files_entered(lambda: losses.append(support.loss_of(model(**inputs))))
    backward = files_entered(lambda: losses[0].backward())
    assert len(forward) <= 11, sorted(forward)
    assert len(backward) <= 7, sorted(backward)


# Private names of torch: one that went away is named at import, and nothing is patched without need


def test_import_without_a_private_name_of_torch_names_it() -> None:
    code = "import torch; del torch._C._dispatch_keyset_full_after; import fastac; fastac.enable"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: fastac needs torch._C._dispatch_keyset_full_after")
    assert torch.__version__ in last


UNTOUCHED = """
attend = torch.nn.functional.scaled_dot_product_attention
fastac.checkpoint(attend, *[torch.ones(1, 1, 2, 2, requires_grad=True)] * 3).sum().backward()
assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::addmm", "BackendSelect")
"""
"""A product of a process whose policies save none is as fast as before."""


def test_import_takes_a_replaced_checkpoint() -> None:
    """Trainers give torch's checkpoint a default, by a function in its place."""
    replaced = "checkpointing.checkpoint = functools.partial(checkpointing.checkpoint, use_reentrant=False)"
    code = f"import functools, torch, torch.utils.checkpoint as checkpointing; {replaced}; import fastac\n{UNTOUCHED}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hooks_have_the_names_of_torch_s() -> None:
    """By these a region knows torch's checkpoint around it, and diagnosis fastac's from the user's hooks."""
    hooks = region.Region._checkpoint_hook, recompute.Recompute._recomputation_hook
    for hook, name in zip(hooks, ("_checkpoint_hook", "_recomputation_hook"), strict=True):
        theirs = getattr(torch.utils.checkpoint, name)
        assert theirs.__name__ in hook.__qualname__
        assert issubclass(theirs, torch.autograd.graph.saved_tensors_hooks)
