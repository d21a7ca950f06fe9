"""What happened: the attention calls of a model's blocks in their latest forward, as values and as a table."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Collection
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from fastac import census, compiled_graphs, hook, models
from fastac.census import Call
from fastac.collectives import Communication
from fastac.policy import BlockPolicies, saves_nothing
from fastac.ranks import class_name
from fastac.remarks import remarks
from fastac.sizes import readable_bytes


@dataclasses.dataclass(frozen=True)
class ContainerReport:
    """One block container. Calls and bytes are sums over the latest region of each block.

    extra_bytes: of saved_bytes, what only the backward of opaque kernels needs. selection_bytes: beside saved_bytes,
    the choices of sparse attention. blocks_full: how many the policy checkpoints fully, which are not watched.
    blocks_compiled: of blocks_seen, how many stand in a compiled graph. Of these it tells what was decided while the
    graph was traced, for the input sizes of that trace; nothing of them is seen while the graph runs.
    communication: of functional collectives, sums over the latest region of each block. `again` grows in backward.
    writing: collectives that write a buffer of their caller's, which are never saved; FSDP's own are not counted.
    linear_saved, linear_bytes: outputs of Linear modules that are saved, and what they hold beside saved_bytes.
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
    selection_bytes: int = 0
    blocks_full: int = 0
    blocks_compiled: int = 0
    communication: Communication | None = None
    writing: int = 0
    linear_saved: int = 0
    linear_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """Everything that is saved: what attention, Linear modules and collectives returned, and choices."""
        communicated = self.communication.saved_bytes if self.communication is not None else 0
        return self.saved_bytes + self.selection_bytes + self.linear_bytes + communicated


@dataclasses.dataclass(frozen=True)
class Report:
    """What fastac did on a model. active: whether its function is the one the model will call.

    remarks: what of its attention is not as it seems, such as linear attention, and backends that are set in vain.
    """

    model_class: str
    policy: str
    engine: str
    active: bool
    problem: str
    rows: tuple[ContainerReport, ...]
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        state = f"policy {self.policy}, engine {self.engine}" if self.active else "not enabled by fastac.enable"
        table = Table(
            title=f"{self.model_class}: {state}",
            title_justify="left",
            caption="\n".join(filter(None, (self.problem, *self.remarks))) or None,
        )
        headings = ["blocks", "class", "attention calls", "saved", "recomputed", "bytes saved", "ops"]
        communicates = any(row.communication or row.writing for row in self.rows)
        headings += ["collectives"] * communicates
        multiplies = any(row.linear_saved for row in self.rows)
        headings += ["outputs of Linear saved"] * multiplies
        for heading in headings:
            words = heading in ("blocks", "class", "ops", "collectives", "outputs of Linear saved")
            table.add_column(heading, justify="left" if words else "right", no_wrap=True)
        for row in self.rows:
            notes = [f"{row.blocks_full} under full"] * bool(row.blocks_full)
            notes += [f"{row.blocks_seen} seen"] * (row.blocks_seen + row.blocks_full != row.blocks)
            notes += [f"{row.blocks_compiled} as decided when compiled"] * bool(row.blocks_compiled)
            seen = f" ({', '.join(notes)})" if notes else ""
            table.add_row(
                f"{row.container or '(the model)'} x {row.blocks}{seen}",
                row.block_class,
                str(row.attention_calls),
                str(row.saved),
                str(row.recomputed),
                _bytes_of(row),
                "\n".join(row.ops) or "none seen",
                *[_collectives_of(row)] * communicates,
                *[f"{row.linear_saved} ({readable_bytes(row.linear_bytes)})"] * multiplies,
            )
        return render(table)


def report(model: torch.nn.Module) -> Report:
    """What fastac saved and recomputed in the latest forward of each of a model's blocks.

    Of blocks in a graph that torch.compile made it tells what was decided when the graph was traced.
    Raises FastacError for what is no module.
    """
    hook.check_module(model, "report")
    model = models.unwrapped(model)
    rows = []
    setting = hook.setting_of(model)
    policies = setting.policy if setting is not None and isinstance(setting.policy, BlockPolicies) else BlockPolicies()
    containers = hook.containers_of(model)
    in_graphs = decided(model, _since)
    for container in containers:
        compiled = {name: in_graphs[name] for name in container.blocks if name in in_graphs}
        records = {name: census.block_record(block) for name, block in container.blocks.items() if name not in compiled}
        seen = {name: record.latest for name, record in records.items() if record is not None and record.latest}
        calls = [call for latest in seen.values() for call in latest.calls]
        calls += [call for decided in compiled.values() for call in decided]
        saved = sum(call.saved for call in calls)
        products = [product for latest in seen.values() for product in latest.products]
        parts = [record.communication for name in seen if (record := records[name]) is not None]
        rows.append(
            ContainerReport(
                container=container.name,
                block_class=container.block_class,
                blocks=len(container.blocks),
                blocks_seen=len(seen) + len(compiled),
                attention_calls=len(calls),
                saved=saved,
                recomputed=len(calls) - saved,
                ops=tuple(dict.fromkeys(call.op.removesuffix(".default") for call in calls)),
                saved_bytes=sum(call.saved_bytes for call in calls),
                extra_bytes=sum(call.extra_bytes for call in calls),
                selection_bytes=sum(latest.selection_bytes for latest in seen.values()),
                blocks_full=sum(
                    (policy := policies.of(block)) is not None and policy.saves_nothing
                    for block in container.blocks.values()
                ),
                blocks_compiled=len(compiled),
                communication=sum(filter(None, parts), Communication()) if any(parts) else None,
                writing=sum(len(latest.writing) for latest in seen.values()),
                linear_saved=sum(product.saved_bytes > 0 for product in products),
                linear_bytes=sum(product.saved_bytes for product in products),
            )
        )
    return Report(
        model_class=class_name(model),
        policy="none" if setting is None else str(setting.policy),
        engine="none" if setting is None else setting.engine,
        active=setting is not None,
        problem=_problem(model, setting, rows),
        rows=tuple(rows),
        remarks=tuple(remarks(model, containers)),
    )


def decided(
    model: torch.nn.Module, since: Callable[[torch.nn.Module], int], ids: Collection[str] | None = None
) -> dict[str, list[Call]]:
    """The calls of a model's blocks, by name, as they were decided on while a graph was traced.

    since: when what is known of a block otherwise was seen, as compilations count; a trace before that does not count.
    ids: of the compilations that count; by default all.
    """
    setting = hook.setting_of(model)
    if setting is None:
        return {}
    return compiled_graphs.decided(
        {
            name: (container.block_class, setting.policy_of(block), since(block))
            for container in hook.containers_of(model)
            for name, block in container.blocks.items()
        },
        ids,
    )


def _since(block: torch.nn.Module) -> int:
    """When a block's region was last seen, as compilations count; -1 for never under this policy."""
    record = census.block_record(block)
    return -1 if record is None or record.latest is None else record.looked


def _problem(model: torch.nn.Module, setting: Any, rows: list[ContainerReport]) -> str:
    if hook.was_replaced(model):
        return "gradient checkpointing was enabled again without fastac: nothing is saved"
    seen = any(row.blocks_seen for row in rows)
    if setting is None and hook.was_switched_off(model):
        return "gradient checkpointing was switched off since fastac.enable"
    if setting is None:
        calls_checkpoint_itself = seen and not hasattr(model, "enable_gradient_checkpointing")
        return "" if calls_checkpoint_itself else "fastac.enable(model) was not called, or was undone"
    if saves_nothing(setting.policy):
        return "this policy saves nothing, and attention calls are not watched under it"
    if not seen:
        return "no forward with gradients was seen yet"
    return ""


def _bytes_of(row: ContainerReport) -> str:
    notes = [(row.extra_bytes, "of it extra"), (row.selection_bytes, "choices")]
    parts = [f"{readable_bytes(count)} {note}" for count, note in notes if count]
    return readable_bytes(row.saved_bytes) + (f" ({', '.join(parts)})" if parts else "")


def _collectives_of(row: ContainerReport) -> str:
    lines = []
    if (found := row.communication) is not None:
        lines.append(f"{found.issued} in forward ({readable_bytes(found.issued_bytes)})")
        lines.append(f"{found.saved} of them saved ({readable_bytes(found.saved_bytes)})")
        lines.append(f"{found.again} issued again in backward ({readable_bytes(found.again_bytes)})")
    if row.writing:
        lines.append(f"{row.writing} more write a buffer: never saved, issued again")
    return "\n".join(lines) or "none"


def render(table: Table) -> str:
    """A rich table as plain text, as wide as it needs: nothing in it is cut off."""
    text = io.StringIO()
    Console(file=text, width=1000, force_terminal=False, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())
