"""Offload: exact, and what waits on the host is not on the device. On a simulated device whose copies are late."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import save_on_cpu

import fastac
from fastac import FastacError, Policy
from fastac.engine import offload
from fastac.engine.transport import Copies, Transport
from tests import support
from tests.engine.cases import twice
from tests.engine.simulated import Simulated, simulated
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
READ = "aten::_local_scalar_dense"


@pytest.fixture
def device() -> Iterator[Simulated]:
    with simulated() as found:
        yield found
        assert not found.faults


def train(model: Any, backward: Callable[[torch.Tensor], Any] | None = None, **options: Any) -> Tensors:
    return support.train_step(model, stack_inputs(**options), backward=backward)


# Exact


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


MADE = [(policy, make) for policy in POLICIES[:2] for make in (Interleaved, Views)]


def plain(policy: Any) -> Any:
    return stack(layers=LAYERS, policy=policy)


@pytest.mark.parametrize("backward", [None, twice])
@pytest.mark.parametrize(("policy", "make"), [*MADE, *[(policy, plain) for policy in POLICIES]])
def test_a_step(make: Callable[[Any], Any], policy: Policy, backward: Any, device: Simulated) -> None:
    expected = train(make("none"), backward)
    model = make(policy)
    allocated = []
    for _ in range(3):
        assert_same(train(model, backward), expected)
        allocated.append(device.allocated)
    assert 0 < allocated[0] == allocated[-1], "later steps take no more"
    device.release()  # of the last recompute, which no copies followed
    gc.collect()
    assert device.in_use == 0


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
def test_two_threads_that_recompute_one_region(policy: Policy, device: Simulated) -> None:
    """Each has memory of its own, and waited for it, whatever the other drops and begins to reload meanwhile."""
    blocks, *losses = streams("none")
    expected = [gradients(one, blocks) for one in losses]
    blocks, left, right = streams(policy)
    others: list[Tensors] = []
    addresses: list[set[int]] = []  # of the inputs of block 2 in each recompute

    def meanwhile() -> None:
        others.append(gradients(right, blocks))
        gradients(right, blocks[3:])  # the last reload of which prefetches for block 2

    def recomputing(_: Any, args: Any) -> None:
        addresses.append({one.data_ptr() for one in args[:2]})
        if len(addresses) == 1:
            pool.submit(meanwhile).result(timeout=300)

    blocks[2].register_forward_pre_hook(recomputing)
    with ThreadPoolExecutor(1) as pool:
        found = gradients(left, blocks)
    assert_same(found, expected[0])
    assert_same(others[0], expected[1])
    assert policy.offload == "attention" or addresses[0].isdisjoint(addresses[1])


@pytest.mark.parametrize("policy", POLICIES[:2], ids=str)
def test_a_thread_recomputes_what_leaves_the_device(policy: Policy, device: Simulated, monkeypatch: Any) -> None:
    """Its copies come after those to the host, which the forward of another thread has just begun."""
    blocks, loss, _ = streams("none")
    expected, found = gradients(loss, blocks), []
    blocks, loss, _ = streams(policy)

    def setting(storage: offload.StashedStorage, name: str, value: Any) -> None:
        object.__setattr__(storage, name, value)
        if name == "device" and value is None and not found:
            found.append(pool.submit(gradients, loss, blocks).result(timeout=300))

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
    """All before them leave, also the one right before them."""
    policies = [Policy("attn_only", offload=True, keep=1)] * 2 + [Policy("attn_only")] * 2
    with simulated(late=False):
        held, _ = memory(policies)
    assert held == 2 * (INPUT + ATTENTION) + TEXT + 4


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
        assert dataclasses.astuple(row.offloaded) == (2 * INPUT, 2 * INPUT + TEXT, 4, (INPUT,) * (waited // 2))
        assert "3.0 KiB on the host" in str(fastac.report(model))


def test_a_cpu_waits_for_its_copies() -> None:
    model = Leading(Policy("full", offload=True), 3, lambda: AttentionBlock(attend=lambda query, *_: query))
    video = torch.ones(1, 2**15, 16, requires_grad=True)
    model(video, stack_inputs()["text"]).sum().backward()
    (row,) = fastac.report(model).rows
    assert row.offloaded.waited_bytes == (2**21,)


@pytest.mark.parametrize("policy", POLICIES[:2], ids=str)
def test_late_copies(policy: Policy, device: Simulated) -> None:
    """Two blocks stay, two more are on their way to the host, and one is on its way back. Most copies last while a
    product is computed, and nobody reads a number, for which the host would wait."""
    assert memory(Policy(policy.name), 12)[1] - memory(policy, 12)[1] > 4 * INPUT
    model, inputs = Leading(policy, 12), stack_inputs()
    for _ in range(4):  # the last of which compares no values
        with support.counting("aten::mm", "aten::addmm") as products, support.counting(READ) as reads:
            device.clock = products.total
            device.lasted.clear()
            model(**inputs).sum().backward()
    assert sum(map(bool, device.lasted)) > len(device.lasted) / 2
    assert not reads.total()


# The guards, taken out


begin = Transport.begin
GUARDS: dict[str, tuple[Any, str, Any]] = {
    "no wait": (Copies, "wait", lambda copies: None),
    # What comes back does not wait for having left.
    "no order": (Transport, "begin", lambda self, pairs, to_host, after, moved: begin(self, pairs, to_host, (), moved)),
    "freed early": (Copies, "__post_init__", lambda copies: setattr(copies, "device", [])),
    "handed out early": (Copies, "__post_init__", lambda copies: setattr(copies, "host", [])),
}
"""Each taken out: whose attribute, and what stands there then."""


def test_host_memory_is_not_handed_out_while_it_is_written(device: Simulated) -> None:
    """Of a forward that no backward follows: its copies are late, and its memory is free."""
    expected = train(stack(layers=LAYERS))
    model = stack(layers=LAYERS, policy=Policy("attn_only", offload=True))
    model(**stack_inputs())
    assert_same(train(model), expected)


@pytest.mark.parametrize("guard", GUARDS)
def test_a_step_without_a_guard(guard: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, model = train(stack(layers=LAYERS)), stack(layers=LAYERS, policy=Policy("attn_only", offload=True))
    monkeypatch.setattr(*GUARDS[guard])
    with simulated() as device, contextlib.suppress(FastacError):  # which may come first
        if guard == "handed out early":
            model(**stack_inputs())
        found = train(model)
        assert device.faults or any(not torch.equal(found[name], one) for name, one in expected.items())


def test_one_region_is_prefetched(device: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where backward wants other regions next than those before in the forward, these do not pile up on the device."""
    reloaded: list[weakref.ref[Any]] = []
    device_memory = device.device_memory

    def noting(size: int) -> torch.Tensor:
        memory = device_memory(size)
        reloaded.append(weakref.ref(memory.untyped_storage()))
        return memory

    monkeypatch.setattr(device, "device_memory", noting)
    left, right = Interleaved(Policy("full", offload=True))(**stack_inputs())
    right.sum().backward()
    assert reloaded
    assert sum(one() is not None for one in reloaded) <= 1
    left.sum().backward()


# The host's memory


NEEDED = 8 * 3 * INPUT
"""Bytes that eight ranks keep of five blocks, of which two stay."""
HOSTS: dict[str, tuple[bool, int, dict[str, str]]] = {
    "unknown": (True, 0, {}),
    "too little": (False, NEEDED // 1024 - 1, {"memory.max": "max\n"}),
    "a container": (True, NEEDED, {"memory.max": f"{NEEDED + 1000 - 50}", "memory.current": "1000"}),
    "a small container": (False, NEEDED, {"memory.max": f"{NEEDED + 1000 - 51}", "memory.current": "1000"}),
}
"""Whether that fits, kB that are available, and files of a container, whose caches of files give way."""


def host_with(available: int, files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"memory.stat": "anon 1\nactive_file 20\ninactive_file 30\n", **files}
    files |= {"meminfo": f"MemTotal: {2 * available} kB\nMemAvailable: {available} kB\n"} if available else {}

    def read_text(path: Path) -> str:
        if path.name not in files:
            raise FileNotFoundError(path)
        return files[path.name]

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")


def forward(policy: Policy) -> Callable[..., torch.Tensor]:
    """A function of a batch size: the sum of what an enabled model makes of inputs that nobody else holds."""
    model = stack(layers=LAYERS)
    fastac.enable(model, policy, blocks="blocks")
    model = copy.deepcopy(model)
    return lambda batch=1: model(**{name: value * 1 for name, value in stack_inputs(batch=batch).items()}).sum()


@pytest.mark.parametrize("host", HOSTS)
def test_a_host_without_enough_memory(host: str, device: Simulated, monkeypatch: Any) -> None:
    """Is an error in the first forward, of what all blocks and all ranks of the host are going to keep there."""
    fits, *files = HOSTS[host]
    host_with(*files, monkeypatch)
    with contextlib.nullcontext() if fits else pytest.raises(FastacError, match=r"3 blocks keep .* on 8 ranks"):
        forward(Policy("full", offload=True))().backward()


def test_what_fitted_before_is_allocated_by_now(device: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer videos need the rest alone."""
    run = forward(Policy("full", offload=True))
    host_with(NEEDED // 1024, {}, monkeypatch)
    run().backward()
    run(batch=2).backward()
    host_with(NEEDED // 1024 - 1, {}, monkeypatch)
    with pytest.raises(FastacError, match="are available"):
        run(batch=3)


PINNED = (
    r"^attn_only\(offload=True\): the host has no memory left to pin for .* AttentionStack\.blocks\.\d offloads "
    r'\(RuntimeError: CUDA error: out of memory\).*\n.*offload="attention".* keep='
)


def test_host_memory_that_cannot_be_pinned(device: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is an error of the host's memory: more offload would pin more. The next step works."""
    run, pin = forward(Policy(offload=True)), device.host_memory

    def pin_two_blocks(size: int) -> torch.Tensor:
        if device.in_use > 3 * INPUT:
            raise RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported")
        return pin(size)

    with monkeypatch.context() as patch:
        patch.setattr(device, "host_memory", pin_two_blocks)
        with pytest.raises(FastacError, match=PINNED) as raised:
            run()
    assert str(raised.value.__cause__).startswith("CUDA error: out of memory")
    if sys.version_info >= (3, 11):
        (note,) = raised.value.__notes__
        assert "attention on the host" in note
        assert "would hold" not in note, "on the device"
    run().backward()
