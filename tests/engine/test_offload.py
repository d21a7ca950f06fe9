"""Offload: exact, and what waits on the host is not on the device. On a simulated device whose copies are late."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu

import fastac
from fastac import FastacError, Policy
from fastac.engine import host_memory, offload
from fastac.engine.process import Thread, process
from fastac.engine.transport import Copies, Transport
from fastac.verification.report import Offloaded
from tests import support
from tests.engine.cases import twice
from tests.engine.outcomes import CASES, Cases
from tests.engine.simulated import Simulated, simulated
from tests.engine.test_outcomes import expected_of, parameters
from tests.live_bytes import LiveBytes
from tests.support import TEXT_TOKENS, VIDEO_TOKENS, WIDTH, AttentionBlock, Tensors, assert_same, stack, stack_inputs

POLICIES = [
    Policy("full", offload=True),
    Policy("attn_only", offload=True),
    Policy("attn_only", offload="attention", keep=1),
    Policy("attn_only", offload="inputs"),
    Policy("attn_only", min_kv=TEXT_TOKENS + 1, linear=("ffn.2",), offload=True),
]
LAYERS = 5


@pytest.fixture
def device() -> Iterator[Simulated]:
    with simulated() as found:
        yield found
        assert not found.faults


def train(model: Any, backward: Callable[[torch.Tensor], Any] | None = None, **options: Any) -> Tensors:
    return support.train_step(model, stack_inputs(**options), backward=backward)


# Exact


@pytest.mark.parametrize("backward", [None, twice])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_step(policy: Policy, backward: Any, device: Simulated) -> None:
    expected = train(stack(layers=LAYERS), backward)
    model = stack(layers=LAYERS, policy=policy)
    allocated = []
    for _ in range(3):
        assert_same(train(model, backward), expected)
        allocated.append(device.allocated)
    assert 0 < allocated[0] == allocated[-1], "later steps take no more"
    device.release()  # of the last recompute, which no copies followed
    gc.collect()
    assert device.in_use == 0


class Interleaved(torch.nn.Module):
    """Two stacks whose blocks take turns in forward, and come after each other in backward."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.one, self.other = stack(0, layers=LAYERS, policy=policy), stack(1, layers=LAYERS, policy=policy)

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> Any:
        left = right = video
        for one, other in zip(self.one.blocks, self.other.blocks, strict=True):
            left = support.run_checkpointed(one, left, text, policy=self.one.policy)
            right = support.run_checkpointed(other, right, text, policy=self.one.policy)
        return left, right


class Views(torch.nn.Module):
    """Inputs that are views of one memory, transposed, conjugated or changed in place before the block began."""

    def __init__(self, policy: Any) -> None:
        super().__init__()
        self.blocks, self.policy = stack(layers=LAYERS).blocks, policy

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> Any:
        for block in self.blocks:
            both = torch.cat([video, text], 1)
            both.mul_(0.5)
            video, text = both.mT.contiguous().mT.split([VIDEO_TOKENS, TEXT_TOKENS], 1)
            video = support.run_checkpointed(block, video, text, policy=self.policy)
        return video


@pytest.mark.parametrize("make", [Interleaved, Views], ids=lambda one: one.__name__)
@pytest.mark.parametrize("policy", POLICIES[:2], ids=str)
def test_models(policy: Policy, make: Callable[[Any], torch.nn.Module], device: Simulated) -> None:
    torch.manual_seed(0)
    expected = train(make("none"))
    torch.manual_seed(0)
    model = make(policy)
    for _ in range(2):
        assert_same(train(model), expected)
    assert device.allocated > 0


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a region keeps leaves when it ends, whoever holds it."""
    monkeypatch.setattr(offload.torch_private, "is_shared", lambda tensor: False)
    end_forward = offload.Stash.end_forward

    def hold_nothing(stash: offload.Stash) -> None:
        end_forward(stash)
        stash.offload()

    monkeypatch.setattr(offload.Stash, "end_forward", hold_nothing)


@pytest.mark.filterwarnings("ignore")
@parameters(CASES)
def test_outcome(name: str, device: Simulated, at_once: None, attention_executions: Counter[str]) -> None:
    """Cases of tests/engine/test_outcomes.py, with everything on the host between forward and recompute."""
    expected, executions, calls = expected_of(name)
    attention_executions.clear()
    try:
        found = Cases(Policy("attn_only", offload=True)).step(CASES[name])
    except (RuntimeError, FastacError) as error:
        if calls is not None and "saved_tensors_hooks of yours" not in str(error):
            raise
        device.faults.clear()  # what the case changed in place
        return
    assert_same(found, expected)
    assert attention_executions[support.CPU_ATTENTION] == executions


def test_an_input_changed_in_place_is_an_error(device: Simulated) -> None:
    """As without offload, wherever the input is by then."""
    blocks = stack(layers=4).blocks
    for changed in range(4):
        hidden, kept = stack_inputs()["video"], []
        for block in blocks:
            kept.append(hidden := hidden * 1)
            hidden = fastac.checkpoint(block, hidden, stack_inputs()["text"], policy=Policy("full", offload=True))
        counter = kept[changed].detach()
        del kept
        counter.add_(1)
        with pytest.raises(FastacError, match=r"^AttentionBlock: an input \(1, 24, 16\) .* was changed in place"):
            hidden.sum().backward()
    device.faults.clear()


@pytest.mark.filterwarnings("ignore")
def test_saved_tensors_hooks_of_the_caller_are_refused() -> None:
    model = stack(policy=Policy("full", offload=True))
    with save_on_cpu(), pytest.raises(FastacError, match="saved_tensors_hooks of yours"):
        train(model)


# Threads


class Streams(torch.nn.Module):
    """A block of two streams without a common autograd node, which would be locked while its tensors are unpacked."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = AttentionBlock(), AttentionBlock()

    def forward(self, left: torch.Tensor, right: torch.Tensor, text: torch.Tensor) -> Any:
        return self.left(left, text), self.right(right, text)


def streams(policy: Any) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """Blocks, and a loss of each stream."""
    blocks, (left, text) = stack(layers=LAYERS, block=Streams).blocks, stack_inputs().values()
    right = left
    for block in blocks:
        left, right = support.run_checkpointed(block, left, right, text, policy=policy)
    return blocks, left.sum(), right.sum()


def gradients(loss: torch.Tensor, blocks: Any) -> Tensors:
    parameters = dict(blocks.named_parameters())
    found = torch.autograd.grad(loss, [*parameters.values()], retain_graph=True, allow_unused=True)
    return {name: one for name, one in zip(parameters, found, strict=True) if one is not None}


@pytest.mark.parametrize("policy", POLICIES[:4], ids=str)
def test_two_threads_that_recompute_one_region(policy: Policy, device: Simulated, monkeypatch: Any) -> None:
    """Each has memory of its own, and waited for it, whatever the other drops and begins to reload meanwhile."""
    blocks, *losses = streams("none")
    expected = [gradients(one, blocks) for one in losses]
    blocks, left, right = streams(policy)
    others: list[Tensors] = []
    addresses: list[set[int]] = []  # of each reload
    reload = offload.Stash.reload

    def meanwhile() -> None:
        others.append(gradients(right, blocks))
        gradients(right, blocks[3:])  # the last reload of which prefetches for block 2

    def reloading(stash: offload.Stash) -> Any:
        reloaded = reload(stash)
        addresses.append({one.device.data_ptr() for one in reloaded.values()})
        if len(addresses) == 3:  # of block 2, for the left stream
            pool.submit(meanwhile).result(timeout=60)
        return reloaded

    monkeypatch.setattr(offload.Stash, "reload", reloading)
    with ThreadPoolExecutor(1) as pool:
        found = gradients(left, blocks)
    assert_same(found, expected[0])
    assert_same(others[0], expected[1])
    assert addresses[2]
    assert addresses[2].isdisjoint(addresses[5])


@pytest.mark.parametrize("policy", POLICIES[:2], ids=str)
def test_a_thread_recomputes_what_leaves_the_device(policy: Policy, device: Simulated, monkeypatch: Any) -> None:
    """Its copies come after those to the host, which the forward of another thread has just begun."""
    blocks, loss, _ = streams("none")
    expected, found = gradients(loss, blocks), []
    blocks, loss, _ = streams(policy)

    def setting(storage: offload.StashedStorage, name: str, value: Any) -> None:
        object.__setattr__(storage, name, value)
        if name == "device" and value is None and not found:
            found.append(pool.submit(gradients, loss, blocks).result(timeout=60))

    monkeypatch.setattr(offload.StashedStorage, "__setattr__", setting)
    with ThreadPoolExecutor(1) as pool:
        streams(policy)
    assert_same(found[0], expected)


# Where memory is


class Memory(LiveBytes):
    """Bytes of the device, after a forward and at the most."""

    def step(self, model: Any) -> tuple[int, int]:
        inputs = stack_inputs()
        gc.collect()
        before = self.now
        with self:
            loss = model(**inputs).sum()
        held = self.now - before
        with self:
            loss.backward()
        model.zero_grad()
        return held, self.peak - before


INPUT, TEXT = VIDEO_TOKENS * WIDTH * 4, TEXT_TOKENS * WIDTH * 4
ATTENTION = 2 * (INPUT + VIDEO_TOKENS * 2 * 4)
"""Bytes of a block's input, of the text, and of the outputs of its two attentions with their logsumexps."""


class Leading(torch.nn.Module):
    """Blocks after an op, so that the caller does not hold the input of the first one."""

    def __init__(self, policy: Any, layers: int, block: Callable[[], torch.nn.Module] = AttentionBlock) -> None:
        super().__init__()
        self.blocks, self.policy = stack(layers=layers, block=block).blocks, policy

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        video, text = video.sin(), text.sin()
        policies = self.policy if isinstance(self.policy, list) else [self.policy] * len(self.blocks)
        for block, policy in zip(self.blocks, policies, strict=True):
            video = support.run_checkpointed(block, video, text, policy=policy)
        return video


def memory(policy: Any, layers: int = 4) -> tuple[int, int]:
    model = Leading(policy, layers).requires_grad_(False)  # gradients would be most of the peak
    model(**stack_inputs()).sum().backward()
    return Memory([*model.parameters()]).step(model)


@pytest.mark.parametrize(
    ("policy", "blocks"),
    [
        (Policy("full", offload=True), 2 * INPUT),
        (Policy("attn_only", offload=True), 2 * (INPUT + ATTENTION)),
        (Policy("attn_only", offload=True, keep=3), 3 * (INPUT + ATTENTION)),
        (Policy("attn_only", offload="inputs"), 2 * INPUT + 4 * ATTENTION),
        (Policy("attn_only", offload="attention"), 4 * INPUT + 2 * ATTENTION),
    ],
    ids=str,
)
def test_bytes_on_the_device(policy: Policy, blocks: int) -> None:
    """After a forward those of the last blocks, of the text and the loss: of no other block, however many there are."""
    with simulated(late=False) as device:
        held, peak = memory(policy)
        assert held == blocks + TEXT + 4
        if policy == Policy("attn_only", offload=True):
            assert memory(policy, 6) == (held, peak)
    assert device.in_use == 0


def test_the_last_blocks_may_stay() -> None:
    """All before them leave, also the one right before them, and its copies come back while the next block runs."""
    policies = [Policy("attn_only", offload=True, keep=1)] * 2 + [Policy("attn_only")] * 2
    with simulated(late=False):
        held, _ = memory(policies)
    assert held == 2 * (INPUT + ATTENTION) + TEXT + 4
    model, calls = Leading(policies, 4), itertools.count()
    for block in model.blocks:
        block.register_forward_pre_hook(lambda *_: setattr(device, "now", next(calls)))
    with simulated() as device:
        device.clock = lambda: device.now  # type: ignore[attr-defined]
        train(model)
    assert len(device.lasted) == 4
    assert all(device.lasted), "none was waited for in the block in which it began"


def test_late_copies_hold_no_more_than_what_is_under_way() -> None:
    """Two regions on their way to the host, and one on its way back."""
    with simulated() as device:
        late = memory(Policy("full", offload=True))
    with simulated(late=False):
        prompt = memory(Policy("full", offload=True))
    assert not device.faults
    assert late[0] - prompt[0] <= 2 * INPUT
    assert late[1] - prompt[1] <= 2 * INPUT


class OneOp(torch.nn.Module):
    """A block that is one attention, whose output, which is saved, is the next one's input."""

    def forward(self, video: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        heads = video.view(1, VIDEO_TOKENS, 2, -1).transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


def test_a_tensor_goes_once(device: Simulated) -> None:
    """As the output of one block and the input of the next; text, that all have, and what the caller holds, stay."""
    model = Leading(Policy("attn_only", offload=True), 6, OneOp)
    loss = model(**stack_inputs()).sum()
    transfers = [block._fastac_state.transfers for block in model.blocks]
    assert [one.host_bytes for one in transfers] == [INPUT + INPUT // 8] * 4 + [0, 0]
    assert sum(one.device_bytes for one in transfers) == 3 * INPUT + 2 * INPUT // 8 + TEXT
    loss.backward()


def test_an_output_changed_in_place_is_an_error(device: Simulated) -> None:
    """The saved output of a block, which is the next one's input, by the caller."""
    blocks, (hidden, text) = stack(layers=5, block=OneOp).blocks, stack_inputs().values()
    for number, block in enumerate(blocks):
        hidden = fastac.checkpoint(block, hidden, text, policy=Policy(offload="attention"))
        if number == 1:
            hidden.mul_(2)
    assert blocks[1]._fastac_state.transfers.host_bytes > 0
    with pytest.raises(FastacError, match=r"^OneOp: the output of .* was changed in place after it was saved"):
        hidden.sum().backward()


def test_what_several_blocks_share_stays(device: Simulated) -> None:
    """Also when none of them is among the last any more, as in RL."""
    model = Leading(Policy("full", offload=True), 3)
    losses = [model(**stack_inputs(seed)).sum() for seed in (1, 2)]
    assert device.allocated == 4 * INPUT
    torch.stack(losses).sum().backward()


def test_what_the_caller_holds_stays(device: Simulated) -> None:
    model = stack(layers=4)
    hidden, text = stack_inputs().values()
    skips = []
    for block in model.blocks:
        skips.append(hidden := hidden * 1)
        hidden = fastac.checkpoint(block, hidden, text, policy=Policy("full", offload=True))
    assert device.allocated == 0


@pytest.mark.parametrize(("late", "waited"), [(True, 4), (False, 0)])
def test_what_the_device_waited_for_is_reported(late: bool, waited: int) -> None:
    """Of late copies: those to the host before a third began, and those back; of prompt ones none."""
    with simulated(late=late):
        model = Leading(Policy("full", offload=True), 4)
        model(**stack_inputs()).sum().backward()
        (row,) = fastac.report(model).rows
        assert row.offloaded == Offloaded(2 * INPUT, 2 * INPUT + TEXT, 4, (INPUT,) * (waited // 2))
        assert "3.0 KiB on the host" in str(fastac.report(model))


# The guards, taken out


begin = Transport.begin
GUARDS = {
    "no wait": (Copies, "wait", lambda copies: None),
    # What comes back does not wait for having left.
    "no order": (Transport, "begin", lambda self, pairs, to_host, after, moved: begin(self, pairs, to_host, (), moved)),
    "freed early": (Copies, "__post_init__", lambda copies: setattr(copies, "device", [])),
}
"""Each taken out: whose attribute, and what stands there then."""


@pytest.mark.parametrize("guard", GUARDS)
def test_a_step_without_a_guard(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = train(stack(layers=LAYERS))
    monkeypatch.setattr(*GUARDS[guard])
    with simulated() as device, contextlib.suppress(FastacError):  # which may come first
        found = train(stack(layers=LAYERS, policy=Policy("attn_only", offload=True)))
        assert device.faults or any(not torch.equal(found[name], one) for name, one in expected.items())


@pytest.mark.parametrize("guarded", [True, False])
def test_host_memory_is_not_handed_out_while_it_is_written(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a forward that no backward follows: its copies are late, and its memory is free."""
    if not guarded:
        monkeypatch.setattr(Copies, "__post_init__", lambda copies: setattr(copies, "host", []))
    model = stack(layers=LAYERS, policy=Policy("attn_only", offload=True))
    expected = train(stack(layers=LAYERS))
    with simulated() as device:
        model(**stack_inputs())
        assert_same(train(model), expected)
    assert bool(device.faults) != guarded


@pytest.mark.parametrize("guarded", [True, False])
def test_one_region_is_prefetched(guarded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where backward wants other regions next than those before in the forward, these do not pile up on the device."""
    if not guarded:
        monkeypatch.setattr(Thread, "prefetched", property(lambda state: None, lambda *_: None), raising=False)
    stashes: list[Any] = []
    end_forward = offload.Stash.end_forward

    def noting(stash: offload.Stash) -> None:
        end_forward(stash)
        stashes.append(stash.reference)

    monkeypatch.setattr(offload.Stash, "end_forward", noting)
    with simulated(late=False):
        model = Interleaved(Policy("full", offload=True))
        left, right = model(**stack_inputs())
        right.sum().backward()
        prefetched = sum(bool(stash.prefetched) for one in stashes if (stash := one()) is not None)
        left.sum().backward()
    assert (prefetched <= 1) == guarded


# The host's memory


@pytest.mark.parametrize(("ranks", "fits"), [("1", True), ("8", False)])
def test_a_host_without_enough_memory(ranks: str, fits: bool, device: Simulated, monkeypatch: Any) -> None:
    """Is an error in the first forward, of what all blocks and all ranks of the host are going to keep there."""
    model = stack(layers=LAYERS)
    fastac.enable(model, Policy("full", offload=True), blocks="blocks")
    model = copy.deepcopy(model)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    monkeypatch.setattr(process, "host_bytes", 0)
    monkeypatch.setattr(host_memory, "available", lambda: 4 * 3 * INPUT)
    inputs = {name: value * 1 for name, value in stack_inputs().items()}
    with contextlib.nullcontext() if fits else pytest.raises(FastacError, match=r"3 blocks keep .* on 8 ranks"):
        model(**inputs).sum().backward()


def test_host_memory_that_cannot_be_pinned(device: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is an error of the host's memory: more offload would pin more. The next step is exact."""
    expected = train(stack(layers=LAYERS))
    model = stack(layers=LAYERS)
    fastac.enable(model, Policy(offload=True), blocks="blocks")
    pin = device.host_memory

    def pin_two_blocks(size: int) -> torch.Tensor:
        if device.in_use > 3 * INPUT:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")
        return pin(size)

    video = {name: value * 1 for name, value in stack_inputs().items()}
    with monkeypatch.context() as patch:
        patch.setattr(device, "host_memory", pin_two_blocks)
        with pytest.raises(FastacError) as raised:
            model(**video)
    message = str(raised.value)
    assert message.startswith("attn_only(offload=True): the host has no memory left to pin for ")
    for words in (
        "AttentionStack.blocks.",
        "(RuntimeError: CUDA error: out of memory)",
        'offload="attention"',
        "keep=",
    ):
        assert words in message
    assert str(raised.value.__cause__).startswith("CUDA error: out of memory")
    if sys.version_info >= (3, 11):
        (note,) = raised.value.__notes__
        assert "attention on the host" in note
        assert "would hold" not in note, "on the device"
    assert_same(train(model), expected)


def test_what_fitted_before_is_allocated_by_now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer videos need the rest alone."""
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.setattr(process, "host_bytes", 60)
    monkeypatch.setattr(host_memory, "available", lambda: 40)
    host_memory.check_available(100, 1, Policy("full"))
    with pytest.raises(FastacError, match="are available"):
        host_memory.check_available(141, 1, Policy("full"))


def test_available_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's; in a container with a limit no more than that leaves, where caches of files give way."""
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_CONTAINER", tmp_path)
    assert host_memory.available() is None
    (tmp_path / "meminfo").write_text("MemTotal: 900 kB\nMemAvailable: 800 kB\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory.available() == 800 * 1024
    for name, text in {"max": "1000", "current": "700", "stat": "anon 1\nactive_file 20\ninactive_file 30\n"}.items():
        (tmp_path / f"memory.{name}").write_text(text)
    assert host_memory.available() == 350
