"""Bytes that transformer blocks hold between forward and backward, per policy, against the least they can hold.

The least is computed from shapes alone: the inputs of every block (those that all blocks share count once), and the
output and softmax statistics of every attention call that the policy saves. Measured are the storages alive after
forward that were allocated while a block ran or were given to a block. What the rest of the model holds (patch
embedding, output head, and the last block's output, which is the head's input) is the same under every policy and in
neither figure.

Two meters are read. The first is a dispatch mode with weak references to storages: it knows whose a byte is, but sees
only what ops return, so a copy made below it would be missed. The second is the allocator, through the profiler's
memory events: it misses nothing, but knows only the total of the whole model. The column "unseen" is what the second
has over the first, without the generator state that torch's checkpoint keeps for every block (5,056 bytes on CPU) and
no op returns.

    python benchmarks/held_bytes.py [--check]
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from diffusers import LTXVideoTransformer3DModel, WanTransformer3DModel
from rich.console import Console
from rich.table import Table
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fastac
from common import allocated_bytes, build_model, finish, parser, positive

HEADS, HEAD_DIM = 2, 32
WIDTH = HEADS * HEAD_DIM
FRAMES, HEIGHT, WIDTH_IN_PATCHES = 5, 16, 16
TOKENS = FRAMES * HEIGHT * WIDTH_IN_PATCHES  # above the 1,024 keys where long_attn_only begins to save
TEXT_TOKENS = 128  # below
BATCH = 2


@dataclass(frozen=True)
class Case:
    """A model, its inputs, and what its blocks are given."""

    name: str
    build: Callable[[int, torch.dtype], Any]
    blocks: str  # the attribute that holds the blocks
    inputs: Callable[[torch.dtype], dict[str, Any]]
    shared_bytes: Callable[[int], int]  # inputs that all blocks share, from the size of an element


def build_wan(layers: int, dtype: torch.dtype) -> Any:
    return build_model(
        WanTransformer3DModel,
        dtype,
        patch_size=(1, 2, 2),
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        in_channels=4,
        out_channels=4,
        text_dim=64,
        freq_dim=64,
        ffn_dim=4 * WIDTH,
        num_layers=layers,
        rope_max_seq_len=64,
    )


def wan_inputs(dtype: torch.dtype) -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(BATCH, 4, FRAMES, 2 * HEIGHT, 2 * WIDTH_IN_PATCHES).to(dtype),
        "encoder_hidden_states": torch.randn(BATCH, TEXT_TOKENS, 64).to(dtype),
        "timestep": torch.tensor([500, 300]),
    }


def wan_shared_bytes(size: int) -> int:
    text = BATCH * TEXT_TOKENS * WIDTH
    timestep = BATCH * 6 * WIDTH
    rotary = 2 * TOKENS * HEAD_DIM  # cosine and sine, one for all heads and samples, in the model's dtype
    return (text + timestep + rotary) * size


def build_ltx(layers: int, dtype: torch.dtype) -> Any:
    return build_model(
        LTXVideoTransformer3DModel,
        dtype,
        in_channels=4,
        out_channels=4,
        num_attention_heads=HEADS,
        attention_head_dim=HEAD_DIM,
        cross_attention_dim=WIDTH,
        num_layers=layers,
        caption_channels=64,
    )


def ltx_inputs(dtype: torch.dtype) -> dict[str, Any]:
    mask = torch.ones(BATCH, TEXT_TOKENS)
    mask[:, 100:] = 0
    return {
        "hidden_states": torch.randn(BATCH, TOKENS, 4).to(dtype),
        "encoder_hidden_states": torch.randn(BATCH, TEXT_TOKENS, 64).to(dtype),
        "timestep": torch.tensor([500, 300]),
        "encoder_attention_mask": mask,
        "num_frames": FRAMES,
        "height": HEIGHT,
        "width": WIDTH_IN_PATCHES,
    }


def ltx_shared_bytes(size: int) -> int:
    text = BATCH * TEXT_TOKENS * WIDTH
    mask = BATCH * TEXT_TOKENS
    timestep = BATCH * 6 * WIDTH
    rotary = 2 * BATCH * TOKENS * WIDTH  # cosine and sine, per sample and head, always in fp32
    return (text + mask + timestep) * size + rotary * 4


CASES = (
    Case("Wan", build_wan, "blocks", wan_inputs, wan_shared_bytes),
    Case("LTX", build_ltx, "transformer_blocks", ltx_inputs, ltx_shared_bytes),
)
# Attention calls of a block that are saved: self-attention has TOKENS keys, cross-attention has TEXT_TOKENS.
SAVED_PER_BLOCK = {"full": 0, "long_attn_only": 1, "attn_only": 2}


def least_bytes(case: Case, policy: str, layers: int, dtype: torch.dtype) -> int:
    """Block inputs, and for each saved attention call its output and statistics: one fp32 number per query and head."""
    size = dtype.itemsize
    hidden_states = BATCH * TOKENS * WIDTH * size
    attention = BATCH * TOKENS * WIDTH * size + BATCH * HEADS * TOKENS * 4
    return case.shared_bytes(size) + layers * (hidden_states + SAVED_PER_BLOCK[policy] * attention)


class LiveStorages(TorchDispatchMode):
    """Weak references to every storage that ops return, and which of them are the blocks'.

    A weak reference keeps the address of a dead storage from being given out again, so an address names one storage.
    """

    def __init__(self, outside: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.outside = {tensor.untyped_storage()._cdata for tensor in outside}
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.of_blocks: set[int] = set()
        self.in_block = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        for storage in storages_of(outputs):
            address = storage._cdata
            if address not in self.outside and address not in self.alive:
                self.alive[address] = (StorageWeakRef(storage), storage.nbytes())
                if self.in_block:
                    self.of_blocks.add(address)
        return outputs

    def watch(self, blocks: torch.nn.ModuleList) -> None:
        def enter(block: torch.nn.Module, args: Any, kwargs: Any) -> None:
            self.in_block = True
            self.of_blocks |= {storage._cdata for storage in storages_of((args, kwargs))}

        def leave(block: torch.nn.Module, args: Any, output: Any) -> None:
            self.in_block = False
            if block is blocks[-1]:
                self.of_blocks -= {storage._cdata for storage in storages_of(output)}

        for block in blocks:
            block.register_forward_pre_hook(enter, with_kwargs=True)
            block.register_forward_hook(leave)

    def held(self) -> tuple[int, int]:
        """Bytes alive: those of the blocks, and all."""
        sizes = {address: size for address, (storage, size) in self.alive.items() if not storage.expired()}
        return sum(size for address, size in sizes.items() if address in self.of_blocks), sum(sizes.values())


def storages_of(values: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


@dataclass(frozen=True)
class Row:
    """Bytes of one model under one policy."""

    model: str
    dtype: str
    policy: str
    held_by_blocks: int
    least: int | None  # without checkpointing autograd decides what is held: there is no formula for it
    over_least: float | None
    held_in_total: int
    allocated_in_total: int
    unseen: int

    def is_off(self) -> bool:
        return self.unseen != 0 or self.least not in (None, self.held_by_blocks)


def measure(case: Case, policy: str, layers: int, dtype: torch.dtype) -> Row:
    model = case.build(layers, dtype)
    inputs = case.inputs(dtype)
    if policy != "none":
        fastac.enable(model, policy=policy)

    def forward() -> Any:
        (output,) = model(**inputs, return_dict=False)
        return output

    forward()  # what is built once is built now
    gc.collect()
    allocated = allocated_bytes(forward).held
    gc.collect()
    outside = [*model.parameters(), *model.buffers(), *(x for x in inputs.values() if isinstance(x, torch.Tensor))]
    meter = LiveStorages(outside)
    meter.watch(getattr(model, case.blocks))
    with meter:
        output = forward()
    held_by_blocks, held = meter.held()
    del output
    least = None if policy == "none" else least_bytes(case, policy, layers, dtype)
    generator_states = 0 if policy == "none" else layers * torch.get_rng_state().nbytes
    return Row(
        model=case.name,
        dtype=str(dtype).removeprefix("torch."),
        policy=policy,
        held_by_blocks=held_by_blocks,
        least=least,
        over_least=None if least is None else held_by_blocks / least,
        held_in_total=held,
        allocated_in_total=allocated,
        unseen=allocated - held - generator_states,
    )


def main() -> int:
    arguments = parser(__doc__, "held_bytes_cpu.json", check="a figure is off by a byte")
    arguments.add_argument("--layers", type=positive, default=4, help="blocks per model (default: %(default)s)")
    options = arguments.parse_args()

    rows = [
        measure(case, policy, options.layers, dtype)
        for case in CASES
        for dtype in (torch.float32, torch.bfloat16)
        for policy in ("none", *SAVED_PER_BLOCK)
    ]
    console = Console()
    table = Table(title=f"MiB held after forward: {options.layers} blocks, {TOKENS} tokens, text {TEXT_TOKENS}")
    for heading in ("model", "policy"):
        table.add_column(heading, no_wrap=True)
    for heading in ("blocks", "least", "ratio", "total", "unseen"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        least, ratio = ("", "") if row.least is None else (f"{row.least / 2**20:.2f}", f"{row.over_least:.4f}")
        blocks, total, unseen = (f"{size / 2**20:.2f}" for size in (row.held_by_blocks, row.held_in_total, row.unseen))
        table.add_row(f"{row.model} {row.dtype}", row.policy, blocks, least, ratio, total, unseen)
    console.print(table)
    shapes = {"batch": BATCH, "heads": HEADS, "head_dim": HEAD_DIM, "tokens": TOKENS, "text_tokens": TEXT_TOKENS}
    results = [asdict(row) for row in rows]
    missed = [f"{row.model} {row.dtype} {row.policy}: not to the byte" for row in rows if row.is_off()]
    return finish(options, {"unit": "bytes", "layers": options.layers, **shapes, "results": results}, missed)


if __name__ == "__main__":
    sys.exit(main())
