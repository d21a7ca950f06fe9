"""report: what fastac saved and recomputed in the latest forward of each block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from fastac.backends import ignored_backends
from fastac.compiled import graphs
from fastac.diagnosis.tables import new_table, render, wrapped
from fastac.engine.blocks import BlockState, known_state
from fastac.engine.results import Call, Communication
from fastac.errors import FastacError, class_name, readable_bytes
from fastac.hook import Enabled, enabled_on
from fastac.models.blocks import Blocks, block_lists, by_list, check_module
from fastac.policy import BlockPolicies
from fastac.verification.recompute import RecomputeProfile, latest


@dataclasses.dataclass(frozen=True)
class Offloaded:
    """Bytes that blocks with offload hold, and the copies of their latest regions: backward makes more of them."""

    host_bytes: int
    device_bytes: int
    copies: int
    """The copies of one region in one direction count as one."""
    waited_bytes: tuple[int, ...]
    """Bytes of each copy that the device waited for."""

    def __str__(self) -> str:
        host, device, waited = map(readable_bytes, (self.host_bytes, self.device_bytes, sum(self.waited_bytes)))
        waited = f"{len(self.waited_bytes)} of {self.copies} copies waited for ({waited})"
        return f"{host} on the host\n{device} on the device\n{waited}"


def offloaded_by(modules: Iterable[torch.nn.Module]) -> Offloaded | None:
    """Sums over the latest regions of some modules; None if none of them offloaded. Waits for the device."""
    moved = [state.transfers for state in block_states(modules) if state.transfers is not None]
    if not moved:
        return None
    waited = tuple(size for transfers in moved for size in transfers.waited_bytes())
    sizes = zip(*((part.host_bytes, part.device_bytes, part.copies) for part in moved), strict=True)
    host, device, copies = map(sum, sizes)
    return Offloaded(host, device, copies, waited)


def block_states(modules: Iterable[torch.nn.Module]) -> list[BlockState]:
    """The states of modules. A module has one if a region of it was seen or `enable` named it."""
    return [state for module in modules if (state := known_state(module)) is not None]


@dataclasses.dataclass(frozen=True)
class ContainerReport:
    """One block container. Calls and bytes are sums over the latest region of each block.

    Nothing is seen of a block while a graph of torch.compile runs it. It counts as was decided while the graph was
    traced, for the input sizes of that trace.
    """

    container: str
    block_class: str
    blocks: int
    blocks_seen: int
    attention_calls: int
    saved: int
    recomputed: int
    ops: tuple[str, ...]
    saved_bytes: int
    extra_bytes: int = 0
    """The part of saved_bytes that only the backward of opaque kernels needs."""
    choice_bytes: int = 0
    """Bytes of saved choices of sparse attention; not in saved_bytes."""
    blocks_full: int = 0
    """Blocks that the policy checkpoints fully. They are not watched."""
    blocks_none: int = 0
    """Blocks that the policy does not checkpoint."""
    is_watched: bool = True
    """Whether the policy saves something in some block."""
    blocks_compiled: int = 0
    """The part of blocks_seen that is in a compiled graph."""
    communication: Communication | None = None
    """Functional collectives. `again` is complete after backward."""
    writing: int = 0
    """Collectives that write into a buffer of their caller: they are never saved. FSDP's own are not counted."""
    linear_saved: int = 0
    """Outputs of Linear modules that are saved."""
    linear_bytes: int = 0
    """Bytes of these outputs; not in saved_bytes."""
    offloaded: Offloaded | None = None
    flops: int = 0
    """FLOPs of the forwards of blocks that save something; 0 if they were not seen."""
    saved_flops: int = 0
    """The part of `flops` that belongs to saved attention."""
    unknown: tuple[str, ...] = ()
    """Ops and autograd.Functions that run again in recompute and that fastac does not know."""

    @property
    def held_bytes(self) -> int:
        """Everything that is saved: outputs of attention, Linear modules and collectives, and choices."""
        communicated = self.communication.saved_bytes if self.communication is not None else 0
        return self.saved_bytes + self.choice_bytes + self.linear_bytes + communicated


def _blocks_of(row: ContainerReport) -> str:
    unwatched = row.blocks_full + row.blocks_none
    notes = [f"{row.blocks_full} under full"] * bool(row.blocks_full)
    notes += [f"{row.blocks_none} not checkpointed"] * bool(row.blocks_none)
    notes += [f"{row.blocks_seen} seen"] * (row.is_watched and row.blocks_seen + unwatched != row.blocks)
    notes += [f"{row.blocks_compiled} as decided when compiled"] * bool(row.blocks_compiled)
    return f"{row.container or '(the model)'} x {row.blocks}" + (f" ({', '.join(notes)})" if notes else "")


def _bytes_of(row: ContainerReport) -> str:
    notes = [(row.extra_bytes, "of it extra"), (row.choice_bytes, "choices")]
    parts = [f"{readable_bytes(count)} {note}" for count, note in notes if count]
    return readable_bytes(row.saved_bytes) + (f" ({', '.join(parts)})" if parts else "")


def _collectives_of(row: ContainerReport) -> str:
    lines = []
    if (counts := row.communication) is not None:
        lines.append(f"{counts.issued} in forward ({readable_bytes(counts.issued_bytes)})")
        lines.append(f"{counts.saved} of them saved ({readable_bytes(counts.saved_bytes)})")
        lines.append(f"{counts.again} issued again in backward ({readable_bytes(counts.again_bytes)})")
    if row.writing:
        lines.append(f"{row.writing} more write a buffer: never saved, issued again")
    return "\n".join(lines)


def _linear_of(row: ContainerReport) -> str:
    return f"{row.linear_saved} ({readable_bytes(row.linear_bytes)})" if row.linear_saved else ""


_FACTS: dict[str, Callable[[ContainerReport], object]] = {
    "blocks": _blocks_of,
    "class": lambda row: row.block_class,
    "attention calls": lambda row: f"{row.attention_calls}: {row.saved} saved, {row.recomputed} recomputed",
    "bytes saved": _bytes_of,
    "ops": lambda row: "\n".join(row.ops) or "none seen",
    "collectives": _collectives_of,
    "outputs of Linear saved": _linear_of,
    "offloaded": lambda row: row.offloaded or "",
    "unknown, run again": lambda row: f"{len(row.unknown)}: {', '.join(row.unknown)}" if row.unknown else "",
}
"""The lines of a report's table for one container: name -> text. A line with an empty text is left out."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What fastac saved and recomputed in a model."""

    model_class: str
    policy: str
    active: bool
    """Whether the model calls fastac for its blocks."""
    problem: str
    rows: tuple[ContainerReport, ...]
    remarks: tuple[str, ...] = ()
    """Unexpected facts of the model's attention, for example a backend that is set and has no effect."""
    recompute: RecomputeProfile | None = None
    """What recompute ran in the latest `verify` of the model."""

    def __str__(self) -> str:
        table = new_table(show_header=False)
        for row in self.rows:
            for name, fact in _FACTS.items():
                if text := str(fact(row)):
                    table.add_row(name, text)
            table.add_section()
        state = f"policy {self.policy}" + ("" if self.active else ", not active")
        state = state if self.active or self.policy != "none" else "not enabled by fastac.enable"
        below = map(wrapped, (self.problem, *self.remarks, self.summary))
        lines = wrapped(f"{self.model_class}: {state}"), render(table), *below, str(self.recompute or "")
        return "\n".join(filter(None, lines))

    @property
    def summary(self) -> str:
        """One line to paste into a log or an issue; "" if no attention is saved, or `enable` is undone."""
        names = ("attention_calls", "saved", "saved_bytes", "flops", "saved_flops")
        calls, saved, held, flops, avoided = (sum(getattr(row, name) for row in self.rows) for name in names)
        share = f", {avoided / flops:.0%} of the FLOPs that full recomputes in these blocks" if flops else ""
        line = f"fastac {self.policy}: {saved} of {calls} attention forwards are not run again{share}"
        return f"{line}; {readable_bytes(held)} held for them" if saved and self.active else ""


def report(model: torch.nn.Module) -> Report:
    """What fastac saved and recomputed in the latest forward of each of a model's blocks.

    Args:
        model: a model given to `fastac.enable`, or a model that calls `fastac.checkpoint` itself.

    Returns:
        Values, and a table when printed. Blocks in a graph of torch.compile count as decided while it was traced.

    Raises:
        FastacError: the argument is not a module.

    Example:
        >>> print(fastac.report(transformer))
    """
    model = check_whole(model, "report")
    enabled = enabled_on(model)
    # Rows of an enabled model are the modules that it calls fastac for, which may be parts of the blocks.
    lists = block_lists(model) if enabled is None else by_list(enabled.host.blocks_called())
    in_graphs = decided_calls(model)
    rows = tuple(_container_report(name, blocks, enabled, in_graphs) for name, blocks in lists.items())
    names = [name for blocks in lists.values() for name in blocks]
    plans = [] if enabled is None or enabled.planner is None else enabled.planner.in_words()
    return Report(
        model_class=class_name(model),
        policy="none" if enabled is None else enabled.policy_name,
        active=enabled is not None and enabled.host.is_active,
        problem=_problem(model, enabled, any(row.blocks_seen for row in rows)),
        rows=rows,
        remarks=(*plans, *ignored_backends(model, names)),
        recompute=latest.get(model),
    )


def check_whole(model: object, call: str) -> torch.nn.Module:
    """The model inside its wrappers, as `check_module`. Raises FastacError also if only a part of it is enabled."""
    module = check_module(model, call)
    parts = [name for name, inner in module.named_modules() if enabled_on(inner) is not None]
    # Figures of the whole model would be those of another policy than the one that trains the part.
    if parts and "" not in parts:
        raise FastacError(
            f"{call}: fastac is enabled on a part of {class_name(module)}, not on the whole of it. Pass that part: "
            f"{call}(model.{parts[0]}, ...)."
        )
    return module


def _container_report(
    container: str, blocks: Blocks, enabled: Enabled | None, in_graphs: Mapping[str, list[Call]]
) -> ContainerReport:
    compiled = {name: in_graphs[name] for name in blocks if name in in_graphs}
    # A graph runs these blocks now. Their latest region is of an earlier, eager step.
    states = block_states(block for name, block in blocks.items() if name not in compiled)
    seen = [state for state in states if state.latest is not None and state.latest.has_graph]
    results: list[Any] = [state.latest for state in seen]
    calls = [call for result in results for call in result.calls]
    calls += [call for decided in compiled.values() for call in decided]
    products = [product for result in results for product in result.products]
    parts = [state.communication for state in seen if state.communication is not None]
    saved = sum(call.saved for call in calls)
    names = []
    # If all blocks have one policy, the heading of the report says it.
    if enabled is not None and isinstance(enabled.policy, BlockPolicies):
        known = blocks.keys() - enabled.host.new_blocks()
        names = [enabled.policy_of(blocks[name]).name for name in known]
    return ContainerReport(
        container=container,
        block_class="|".join(dict.fromkeys(map(class_name, blocks.values()))),
        blocks=len(blocks),
        blocks_seen=len(seen) + len(compiled),
        attention_calls=len(calls),
        saved=saved,
        recomputed=len(calls) - saved,
        ops=tuple(dict.fromkeys(call.op.removesuffix(".default") for call in calls)),
        saved_bytes=sum(call.saved_bytes for call in calls),
        extra_bytes=sum(call.extra_bytes for call in calls),
        choice_bytes=sum(result.choice_bytes for result in results),
        blocks_full=names.count("full"),
        blocks_none=names.count("none"),
        is_watched=enabled is None or enabled.policy.is_selective,
        blocks_compiled=len(compiled),
        communication=sum(parts, Communication()) if parts else None,
        writing=sum(result.writing for result in results),
        linear_saved=len(products),
        linear_bytes=sum(product.saved_bytes for product in products),
        offloaded=offloaded_by(blocks.values()),
        flops=sum(result.flops for result in results),
        saved_flops=sum(result.saved_flops for result in results),
        unknown=tuple(dict.fromkeys(name for result in results for name in result.unknown)),
    )


def decided_calls(model: torch.nn.Module, ids: Collection[str] | None = None) -> dict[str, list[Call]]:
    """By block, the calls that were decided on while a graph of torch.compile was traced.

    ids: the compilations that count. By default, all since the block's latest region outside of graphs.
    """
    enabled = enabled_on(model)
    if enabled is None:
        return {}
    blocks = {}
    for name, block in enabled.blocks.items():
        state = known_state(block) if ids is None else None
        since = -1 if state is None or state.latest is None else state.compilations_seen
        blocks[name] = class_name(block), enabled.policy_of(block), since
    return graphs.decided(blocks, ids)


def _problem(model: torch.nn.Module, enabled: Enabled | None, seen: bool) -> str:
    earlier = ". The table is of the latest step under fastac." if seen else ""
    if enabled is None:
        if seen and not hasattr(model, "enable_gradient_checkpointing"):
            # The model calls fastac.checkpoint itself, which is no problem.
            return ""
        return (
            "fastac.enable(model) was not called, or was undone; under patch_checkpoint the log says what is saved"
            + earlier
        )
    if enabled.host.is_replaced:
        return "gradient checkpointing was enabled again without fastac: nothing is saved" + earlier
    if not enabled.host.is_on:
        return "gradient checkpointing was switched off since fastac.enable" + earlier
    if new := enabled.host.new_blocks():
        return f"not checkpointed, as new since fastac.enable, or with another forward: {', '.join(new)}" + earlier
    if not enabled.policy.is_selective:
        return "this policy saves nothing, and attention calls are not watched under it"
    if not seen and enabled.host.called:
        others = ", ".join(dict.fromkeys(map(class_name, enabled.host.called.values())))
        return f"{class_name(model)} checkpoints other modules than these: {others}"
    return "" if seen else "no forward with gradients was seen yet"
