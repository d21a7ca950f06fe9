"""report and verify: figures of a model's blocks, and a proof that they are exact on the user's own model."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import io
import math
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fastac import errors, hook, registry
from fastac.backends.availability import ignored_backends
from fastac.backends.plugins import prepare
from fastac.checkpoint import checkpoint
from fastac.compile import graphs
from fastac.diagnosis.autograd_graph import nodes_between
from fastac.diagnosis.eager_look import buffers_preserved
from fastac.engine import wrappers
from fastac.engine.blocks import BlockRecord, forget, known_record
from fastac.engine.calls import Call, Product, RegionResult
from fastac.engine.collectives import Communication
from fastac.engine.generators import generators_preserved
from fastac.engine.kinds import state as kinds
from fastac.engine.ranks import Group, OtherRankFailed
from fastac.engine.tape import engine
from fastac.engine.torch_private import profiled_events, tree_leaves, tree_map
from fastac.errors import FastacError, PolicyNotAppliedError, class_name, readable_bytes
from fastac.models import BlockContainer
from fastac.policy import BlockPolicies, Policy, resolve, saves_nothing


def render(table: Table) -> str:
    """A rich table as plain text, as wide as it needs: nothing in it is cut off."""
    text = io.StringIO()
    Console(file=text, width=1000, force_terminal=False, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


# report


@dataclasses.dataclass(frozen=True)
class Offloaded:
    """Bytes that blocks with offload keep, and the copies of their latest regions: in backward there are more."""

    host_bytes: int
    device_bytes: int
    copies: int
    """The copies of one region in one direction count as one."""
    waited_bytes: tuple[int, ...]
    """Bytes of each copy that the device was idle for."""

    def __str__(self) -> str:
        host, device, waited = map(readable_bytes, (self.host_bytes, self.device_bytes, sum(self.waited_bytes)))
        waited = f"{len(self.waited_bytes)} of {self.copies} copies waited for ({waited})"
        return f"{host} on the host\n{device} on the device\n{waited}"


def offloaded_by(modules: Iterable[torch.nn.Module]) -> Offloaded | None:
    """Sums over the latest regions of some modules; None if none of them offloaded. Waits for the device."""
    moved = [record.transfers for record in _records(modules) if record.transfers is not None]
    if not moved:
        return None
    host, device, copies = zip(*((one.host_bytes, one.device_bytes, one.copies) for one in moved), strict=True)
    waited = tuple(size for one in moved for size in one.waited_bytes())
    return Offloaded(sum(host), sum(device), sum(copies), waited)


def _records(modules: Iterable[torch.nn.Module]) -> list[BlockRecord]:
    return [record for one in modules if (record := known_record(one)) is not None]


@dataclasses.dataclass(frozen=True)
class ContainerReport:
    """One block container. Calls and bytes are sums over the latest region of each block.

    Blocks in a graph of torch.compile count as decided while it was traced, for the input sizes of that trace: nothing
    of them is seen while the graph runs.
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
    """Of saved_bytes, those that only the backward of opaque kernels needs."""
    choice_bytes: int = 0
    """Beside saved_bytes, the choices of sparse attention."""
    blocks_full: int = 0
    """Blocks that the policy checkpoints fully. They are not watched."""
    blocks_none: int = 0
    """Blocks that the policy does not checkpoint."""
    blocks_compiled: int = 0
    """Of blocks_seen, those in a compiled graph."""
    communication: Communication | None = None
    """Functional collectives. `again` grows in backward."""
    writing: int = 0
    """Collectives that write a buffer of their caller's, which are never saved. FSDP's own are not counted."""
    linear_saved: int = 0
    """Outputs of Linear modules that are saved."""
    linear_bytes: int = 0
    """Beside saved_bytes, bytes of these outputs."""
    offloaded: Offloaded | None = None
    flops: int = 0
    """Of the forwards of blocks that save something; 0 where they were not seen."""
    saved_flops: int = 0
    """Of these, of the attention that is saved."""

    @property
    def held_bytes(self) -> int:
        """Everything that is saved: outputs of attention, Linear modules and collectives, and choices."""
        communicated = self.communication.saved_bytes if self.communication is not None else 0
        return self.saved_bytes + self.choice_bytes + self.linear_bytes + communicated


def _blocks_of(row: ContainerReport) -> str:
    unwatched = row.blocks_full + row.blocks_none
    notes = [f"{row.blocks_full} under full"] * bool(row.blocks_full)
    notes += [f"{row.blocks_none} not checkpointed"] * bool(row.blocks_none)
    notes += [f"{row.blocks_seen} seen"] * (row.blocks_seen + unwatched != row.blocks)
    notes += [f"{row.blocks_compiled} as decided when compiled"] * bool(row.blocks_compiled)
    return f"{row.container or '(the model)'} x {row.blocks}" + (f" ({', '.join(notes)})" if notes else "")


def _bytes_of(row: ContainerReport) -> str:
    notes = [(row.extra_bytes, "of it extra"), (row.choice_bytes, "choices")]
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
    return "\n".join(lines)


def _linear_of(row: ContainerReport) -> str:
    return f"{row.linear_saved} ({readable_bytes(row.linear_bytes)})" if row.linear_saved else ""


_COLUMNS: dict[str, Callable[[ContainerReport], object]] = {
    "blocks": _blocks_of,
    "class": lambda row: row.block_class,
    "attention calls": lambda row: row.attention_calls,
    "saved": lambda row: row.saved,
    "recomputed": lambda row: row.recomputed,
    "bytes saved": _bytes_of,
    "ops": lambda row: "\n".join(row.ops) or "none seen",
    "collectives": _collectives_of,
    "outputs of Linear saved": _linear_of,
    "offloaded": lambda row: row.offloaded or "",
}
"""Of the table of a report. A column that is empty in every row is left out."""
_NUMBERS = ("attention calls", "saved", "recomputed", "bytes saved")


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
    """Unexpected facts of the model's attention, such as backends that are set and ignored."""

    def __str__(self) -> str:
        table = Table()
        columns = {heading: [str(cell(row)) for row in self.rows] for heading, cell in _COLUMNS.items()}
        columns = {heading: cells for heading, cells in columns.items() if any(cells)}
        for heading in columns:
            table.add_column(heading, justify="right" if heading in _NUMBERS else "left", no_wrap=True)
        for cells in zip(*columns.values(), strict=True):
            table.add_row(*cells)
        state = f"policy {self.policy}" if self.active else "not enabled by fastac.enable"
        lines = [f"{self.model_class}: {state}", render(table), self.problem, *self.remarks, self.summary]
        return "\n".join(filter(None, lines))

    @property
    def summary(self) -> str:
        """One line to paste where others read it; "" where no attention is saved, or `enable` is undone."""
        names = ("attention_calls", "saved", "saved_bytes", "flops", "saved_flops")
        calls, saved, held, flops, avoided = (sum(getattr(row, name) for row in self.rows) for name in names)
        share = f", {avoided / flops:.0%} of the FLOPs that full recomputes in these blocks" if flops else ""
        line = f"fastac {self.policy}: {saved} of {calls} attention forwards are not run again{share}"
        return f"{line}; {readable_bytes(held)} held for them" if saved and self.active else ""


def report(model: torch.nn.Module) -> Report:
    """What fastac saved and recomputed in the latest forward of each of a model's blocks.

    Args:
        model: given to `fastac.enable`, or one that calls `fastac.checkpoint`.

    Returns:
        Values, and a table when printed. Blocks in a graph of torch.compile count as decided while it was traced.

    Raises:
        FastacError: the argument is not a module.

    Example:
        >>> print(fastac.report(transformer))
    """
    model = hook.check_module(model, "report")
    hook.check_no_part(model, "report")
    enabled = hook.enabled_on(model)
    containers = hook.containers_of(model)
    in_graphs = _decided(model)
    rows = tuple(_container_report(container, enabled, in_graphs) for container in containers)
    names = [name for container in containers for name in container.blocks]
    return Report(
        model_class=class_name(model),
        policy="none" if enabled is None else str(enabled.policy),
        active=enabled is not None and not enabled.was_switched_off() and not enabled.was_replaced(),
        problem=_problem(model, enabled, any(row.blocks_seen for row in rows)),
        rows=rows,
        remarks=tuple(ignored_backends(model, names)),
    )


def _container_report(
    container: BlockContainer, enabled: hook.Enabled | None, in_graphs: Mapping[str, list[Call]]
) -> ContainerReport:
    compiled = {name: in_graphs[name] for name in container.blocks if name in in_graphs}
    records = _records(block for name, block in container.blocks.items() if name not in compiled)
    seen = [record for record in records if record.latest is not None]
    latest: list[Any] = [record.latest for record in seen]
    calls = [call for one in (*(one.calls for one in latest), *compiled.values()) for call in one]
    products = [product for one in latest for product in one.products]
    parts = [record.communication for record in seen if record.communication is not None]
    saved = sum(call.saved for call in calls)
    names = []
    if enabled is not None and isinstance(enabled.policy, BlockPolicies):
        names = [enabled.policy_of(block).name for block in container.blocks.values()]
    return ContainerReport(
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
        choice_bytes=sum(one.choice_bytes for one in latest),
        blocks_full=names.count("full"),
        blocks_none=names.count("none"),
        blocks_compiled=len(compiled),
        communication=sum(parts, Communication()) if parts else None,
        writing=sum(one.writing for one in latest),
        linear_saved=len(products),
        linear_bytes=sum(product.saved_bytes for product in products),
        offloaded=offloaded_by(container.blocks.values()),
        flops=sum(one.flops for one in latest),
        saved_flops=sum(one.saved_flops for one in latest),
    )


def _decided(model: torch.nn.Module, ids: Collection[str] | None = None) -> dict[str, list[Call]]:
    """The calls of a model's blocks, by name, as they were decided on while a graph was traced.

    ids: of the compilations that count; by default all since the latest region of the block itself.
    """
    enabled = hook.enabled_on(model)
    if enabled is None:
        return {}
    blocks = {}
    for name, block in enabled.blocks.items():
        record = known_record(block) if ids is None else None
        since = -1 if record is None or record.latest is None else record.looked
        blocks[name] = class_name(block), enabled.policy_of(block), since
    return graphs.decided(blocks, ids)


def _problem(model: torch.nn.Module, enabled: hook.Enabled | None, seen: bool) -> str:
    if enabled is None:
        if seen and not hasattr(model, "enable_gradient_checkpointing"):
            return ""  # it checkpoints itself
        return "fastac.enable(model) was not called, or was undone; of patch_checkpoint, only modules are shown"
    if enabled.was_replaced():
        return "gradient checkpointing was enabled again without fastac: nothing is saved"
    if enabled.was_switched_off():
        return "gradient checkpointing was switched off since fastac.enable"
    if saves_nothing(enabled.policy):
        return "this policy saves nothing, and attention calls are not watched under it"
    return "" if seen else "no forward with gradients was seen yet"


# One training step, and how two of them differ


@contextlib.contextmanager
def executed_attention(*activities: ProfilerActivity) -> Iterator[tuple[Counter[str], profile]]:
    """Count the attention kernels that run inside, by op: complete at its end.

    torch's profiler counts every call of an op. A call that fastac answered from a tape ran no kernel and is
    subtracted. Calls that dynamo makes while it traces run none either, and are counted.

    activities: profiled beside the CPU.
    """
    ran: Counter[str] = Counter()
    answered: Counter[str] = Counter()
    engine.answered.append(answered)
    try:
        with profile(activities=[ProfilerActivity.CPU, *activities]) as profiled:
            yield ran, profiled
    finally:
        engine.answered[:] = [one for one in engine.answered if one is not answered]
    names = {op.qualified_name.partition(".")[0] for op in registry.present_ops() if op.is_attention}
    ends: Counter[tuple[int, str]] = Counter()  # time at which the last counted call ended, by its thread and op
    for event in profiled_events(profiled):
        thread, name = event.start_thread_id(), event.name()
        # A call inside one of the same op was made by a dispatch mode or a tensor subclass: count the outer one.
        if name in names and event.start_ns() >= ends[thread, name]:
            ran[name] += 1
            ends[thread, name] = event.end_ns()
    ran.subtract(answered)


@dataclasses.dataclass
class Step:
    """One forward and backward."""

    tensors: dict[str, torch.Tensor | None]
    """Every output and gradient, by name."""
    executions: tuple[int, int]
    """Attention kernels that ran in forward and in backward."""
    calls: list[Call]
    graphs: set[str]
    """Ids of the compilations whose graphs ran."""
    in_graph: bool = False
    """Whether `calls` are those decided while these were traced: in them no region is seen."""
    products: list[Product] = dataclasses.field(default_factory=list)
    offloaded: Offloaded | None = None

    def rounding(self, name: str) -> float:
        """The difference that another order of sums may make: a few units in the last place of the largest number."""
        tensor = self.tensors[name]
        return 0.0 if tensor is None else 16 * torch.finfo(tensor.dtype).eps * tensor.abs().max().item()


def _fresh(inputs: Any) -> Any:
    """Copies that share nothing with the originals, leaves of their own graph; other objects are deep-copied."""

    def copied(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad)
        return value if isinstance(value, torch.nn.Module) else copy.deepcopy(value)

    return tree_map(copied, inputs)


def run_step(model: torch.nn.Module, function: Callable[..., Any], args: Any, kwargs: Any) -> Step:
    """One forward and backward of a fixed random projection of all floating outputs, from the same random state."""
    model.zero_grad(set_to_none=True)
    args, kwargs = _fresh((args, kwargs))
    regions: list[RegionResult] = []
    for record in _records(model.modules()):
        record.transfers = None
    engine.collectors.append(regions)
    try:
        with generators_preserved(_devices(model)), buffers_preserved(model), torch.enable_grad():
            with executed_attention() as (forward, _):
                outputs = [_local(t) for t in floating(function(*args, **kwargs))]
            compiled = graphs.ids_among(nodes_between(outputs, ()))
            generator = torch.Generator().manual_seed(0)
            weights = [torch.randn(t.shape, generator=generator).to(t.device) for t in outputs]
            differentiable = [(t, w) for t, w in zip(outputs, weights, strict=True) if t.requires_grad]
            if not differentiable:
                raise FastacError(f"verify: no output of {class_name(model)} requires grad, so there is no gradient")
            with executed_attention() as (backward, _):
                torch.stack([(t.float() * w).sum() for t, w in differentiable]).sum().backward()
    finally:
        engine.collectors[:] = [one for one in engine.collectors if one is not regions]
    tensors: dict[str, torch.Tensor | None] = {f"output {i}": t.detach() for i, t in enumerate(outputs)}
    tensors |= {f"gradient of {name}": _local(parameter.grad) for name, parameter in model.named_parameters()}
    leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    tensors |= {f"gradient of input {i}": _local(leaf.grad) for i, leaf in enumerate(leaves)}
    model.zero_grad(set_to_none=True)
    calls = [call for region in regions for call in region.calls]
    products = [product for region in regions for product in region.products]
    executions, offloaded = (forward.total(), backward.total()), offloaded_by(model.modules())
    return Step(tensors, executions, calls, compiled, products=products, offloaded=offloaded)


def _local(tensor: Any) -> Any:
    """This rank's part of a tensor that is sharded over several (DTensor)."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def floating(outputs: Any) -> list[torch.Tensor]:
    """All floating-point tensors among a model's outputs, in order."""
    leaves = tree_leaves(tuple(outputs.values()) if isinstance(outputs, Mapping) else outputs)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def differences(expected: Step, got: Step) -> dict[str, float]:
    """Largest absolute difference of each output and gradient that is not bitwise equal; inf for a missing one."""
    found = {}
    for name, wanted in expected.tensors.items():
        value = got.tensors.get(name)
        if wanted is None or value is None:
            if wanted is not value:
                found[name] = math.inf
        elif wanted.shape != value.shape or not torch.equal(wanted.isnan(), value.isnan()):
            found[name] = math.inf
        elif not torch.equal(wanted.nan_to_num(), value.nan_to_num()):
            found[name] = (wanted.double() - value.double()).nan_to_num().abs().max().item()
    return found


def _devices(model: torch.nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in [*model.parameters(), *model.buffers()]}


# verify


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` measured. Executions are of attention kernels, in one step; differences are absolute."""

    subject: str
    policy: str
    reference: str
    compared: int
    different: tuple[str, ...]
    largest_difference: float
    noise: float
    """Largest difference between two runs of the reference, above 0 where kernels are not deterministic. If `compiled`,
    also between the reference compiled and not."""
    broken: tuple[str, ...]
    """Results that differ by more than four times their own noise."""
    reference_executions: tuple[int, int]
    policy_executions: tuple[int, int]
    saved: int
    recomputed: int
    saved_bytes: int
    allowed_again: int
    """Attention kernels that may run in backward: those that the policy recomputes, and the model's own."""
    linear_saved: int = 0
    linear_bytes: int = 0
    """Beside saved_bytes."""
    compiled: bool = False
    offloaded: Offloaded | None = None
    is_enabled: bool = True
    """Whether the model was enabled; else this is what `enable` would do."""

    def __str__(self) -> str:
        would = "" if self.is_enabled else " (not enabled: this is what fastac.enable would do)"
        table = Table()
        for heading in ("promise", self.reference, self.policy, "kept"):
            table.add_column(heading)
        equal = f"{self.compared - len(self.different)} of {self.compared} bitwise equal"
        forward, backward = zip(self.reference_executions, self.policy_executions, strict=True)
        alike = f"not bitwise: two runs of {self.reference} differ too, by {self.noise:.1g}"
        if self.compiled:
            alike = f"not bitwise: compiling {self.reference} alone changes as much (rounding, or {self.noise:.1g})"
        table.add_row(
            "outputs and gradients", "", equal, alike if self.different and not self.broken else _yes(not self.broken)
        )
        same, once = forward[0] == forward[1], self.policy_executions[1] <= self.allowed_again
        unseen = "none seen" if not forward[0] else ""
        table.add_row("attention runs in forward", str(forward[0]), str(forward[1]), unseen or _yes(same))
        table.add_row("attention runs in backward", str(backward[0]), str(backward[1]), unseen or _yes(once))
        table.add_row("attention calls saved", "", f"{self.saved} of {self.saved + self.recomputed}", "")
        if self.linear_saved:
            size = readable_bytes(self.linear_bytes)
            table.add_row("outputs of Linear saved", "", f"{self.linear_saved} ({size})", "")
        table.add_row("bytes saved", "", readable_bytes(self.saved_bytes), "")
        if self.offloaded is not None:
            table.add_row("offloaded", "", str(self.offloaded), "")
        return f"{self.subject}: {self.policy} against {self.reference}{would}\n{render(table)}"


def _yes(kept: bool) -> str:
    return "yes" if kept else "no"


def verify(
    model: torch.nn.Module,
    *args: Any,
    policy: str | Policy | Mapping[str, str | Policy] | None = None,
    blocks: Any = None,
    reference: str = "none",
    per_block: bool = False,
    **kwargs: Any,
) -> Verification:
    """Run a model without checkpointing and with a policy; compare outputs, every gradient, and kernel executions.

    A difference is allowed up to four times that of two runs of the reference. A model that is compiled as a whole is
    another graph with checkpointing than without: there it is also allowed up to four times the difference that
    compiling the reference makes, plus rounding.

    Executions are counted in this thread and its backward, by torch's profiler: let nothing else train, and call it
    outside of a profile of your own, which it would end. Afterwards the gradients of parameters, buffers, generator
    states and checkpointing are as before. Among several processes every rank must call it, and it raises on all when
    it raises on one.

    Args:
        model: a diffusers model, a model that is enabled, or any module, which is then taken as one block.
        args, kwargs: of one call of the model.
        policy, blocks: as in `enable`; by default those of the enabled model.
        reference: "none", or "full" for a model that does not fit otherwise.
        per_block: run the model once under full checkpointing, then compare block by block on the inputs each had;
            needs the memory of one block.

    Returns:
        What was measured, and a table when printed.

    Raises:
        PolicyNotAppliedError: attention ran again that was to be saved, or none was saved.
        FastacError: a result differs, or an option cannot be honoured.

    Example:
        >>> print(fastac.verify(transformer, **inputs))
    """
    group = Group()
    try:
        return group.run(_Subject(group, model, args, kwargs, policy, blocks, reference, per_block).verify)
    except OtherRankFailed as failed:
        kind = getattr(errors, failed.kind, FastacError)
        raise kind(f"verify failed on another rank. {failed}") from None


@dataclasses.dataclass
class _Subject:
    """A call of `verify`."""

    group: Group
    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    policy: Any
    blocks: Any
    reference: str
    per_block: bool
    determinism_check: str = "default"
    is_enabled: bool = False

    def verify(self) -> Verification:
        """Take the steps and compare them. Raises as the function of that name."""
        if self.reference not in ("none", "full"):
            raise FastacError(f'verify(reference={self.reference!r}): there are "none" and "full"')
        self.inner: Any = hook.check_module(self.model, "verify")
        hook.check_no_part(self.inner, "verify")
        prepare()
        enabled = hook.enabled_on(self.inner)
        if enabled is not None:
            self.is_enabled, self.determinism_check = True, enabled.determinism_check
            if enabled.by_forward and self.blocks is None:
                self.blocks = list(enabled.blocks.values())
        elif torch.utils.checkpoint.checkpoint is not torch_checkpoint:
            raise FastacError(
                "verify: patch_checkpoint is on, and verify would prove `enable` alone. With logging at INFO, each "
                "kind of checkpoint says what it saves."
            )
        if self.policy is None:
            self.policy = "attn_only" if enabled is None else enabled.policy_as_given()
        with _as_found(self.inner):
            if self.blocks is None and not hasattr(self.inner, "enable_gradient_checkpointing"):
                result = self.verify_block(self.model, self.args, self.kwargs, resolve(self.policy))
            elif self.per_block:
                result = self.verify_blocks()
            else:
                result = self._compare(self._reference_step, self._policy_step, self._enable().policy)
        _raise_if_broken(result)
        return result

    def _enable(self) -> Any:
        hook.enable(self.inner, self.policy, blocks=self.blocks, determinism_check=self.determinism_check)
        return hook.enabled_on(self.inner)

    def _reference_step(self) -> Step:
        hook.disable(self.inner)
        with wrappers.idle(self.inner):
            if self.blocks is not None and self.reference == "full":
                hook.enable(self.inner, "full", blocks=self.blocks, determinism_check=self.determinism_check)
            elif self.reference == "full":
                self.inner.enable_gradient_checkpointing(_full_checkpoint)
            elif self.blocks is None:
                self.inner.disable_gradient_checkpointing()
            step = run_step(self.model, self.model, self.args, self.kwargs)
            hook.disable(self.inner)
        return step

    def _policy_step(self) -> Step:
        if hook.enabled_on(self.inner) is None:  # once: a model that is compiled would be compiled again
            self._enable()
        found = run_step(self.model, self.model, self.args, self.kwargs)
        if found.calls or not found.graphs:
            return found
        calls = _decided(self.inner, found.graphs).values()
        return dataclasses.replace(found, calls=[call for block in calls for call in block], in_graph=True)

    def verify_blocks(self) -> Verification:
        """Each block by itself, on the inputs that it has in a step of the model under full checkpointing."""
        if self.blocks is not None:
            raise FastacError("verify(per_block=True) is for models that are enabled without blocks=...")
        enabled = self._enable()
        regions: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
        hook.disable(self.inner)
        with wrappers.idle(self.inner):
            self.inner.enable_gradient_checkpointing(functools.partial(_captured, regions))
            _run_forward(self.model, self.args, self.kwargs)
        if not self.group.agree(len(regions)):
            raise FastacError("verify(per_block=True): ranks have different numbers of blocks. Verify without it.")
        if not regions:
            raise FastacError(f"verify(per_block=True): {class_name(self.inner)} checkpointed no block on these inputs")
        parts = [self.verify_block(block, args, kwargs, enabled.policy_of(block)) for block, args, kwargs in regions]
        return _together(parts, str(enabled.policy))

    def verify_block(self, block: Any, args: Any, kwargs: Any, policy: Policy) -> Verification:
        """One block, or a module that is taken as one."""

        def reference_step() -> Step:
            function = _full_checkpoint if self.reference == "full" else wrappers.call_plainly
            with wrappers.idle(block):
                return run_step(block, function, (block, *args), kwargs)

        def policy_step() -> Step:
            with wrappers.idle(block):
                function = functools.partial(checkpoint, policy=policy, determinism_check=self.determinism_check)
                return run_step(block, function, (block, *args), kwargs)

        return self._compare(reference_step, policy_step, policy)

    def _compare(
        self, reference_step: Callable[[], Step], policy_step: Callable[[], Step], policy: Policy | BlockPolicies
    ) -> Verification:
        """Compare steps. The policy runs twice: its first step, compiled and observed, must be exact as well."""
        expected = reference_step()
        if self.group.any(bool(expected.graphs)):
            expected = reference_step()  # the first compiled, and what dynamo traced was counted
        first, later = policy_step(), policy_step()
        different = _largest(differences(expected, first), differences(expected, later))
        # Every rank takes the same steps: they may communicate.
        noise = differences(expected, reference_step()) if self.group.any(bool(different)) else {}
        compiled = self.group.any(bool(different) and later.in_graph)
        if compiled:
            with torch.compiler.set_stance("force_eager"):
                noise = _largest(noise, differences(expected, reference_step()))
        allowed = {name: 4 * size for name, size in noise.items()}
        if compiled:
            allowed = {name: allowed.get(name, 0.0) + expected.rounding(name) for name in different}
        saved = [call for call in later.calls if call.saved]
        own = expected.executions[1] if self.reference == "none" else 0
        # Regions under "full" are plain checkpointing and are not seen: what was not saved may run again.
        unseen = isinstance(policy, BlockPolicies) or policy.saves_nothing
        return Verification(
            subject=class_name(self.inner),
            policy=str(policy),
            reference=self.reference,
            compared=len(expected.tensors),
            different=tuple(different),
            largest_difference=max(different.values(), default=0.0),
            noise=max(noise.values(), default=0.0),
            broken=tuple(n for n, size in different.items() if math.isinf(size) or size > allowed.get(n, 0.0)),
            reference_executions=expected.executions,
            policy_executions=later.executions,
            saved=len(saved),
            recomputed=len(later.calls) - len(saved),
            saved_bytes=sum(one.saved_bytes for one in saved),
            allowed_again=own + (later.executions[0] if unseen else len(later.calls)) - len(saved),
            linear_saved=len(later.products),
            linear_bytes=sum(one.saved_bytes for one in later.products),
            compiled=compiled,
            offloaded=later.offloaded,
            is_enabled=self.is_enabled,
        )


def _largest(*found: dict[str, float]) -> dict[str, float]:
    names = dict.fromkeys(name for one in found for name in one)
    return {name: max(one.get(name, 0.0) for one in found) for name in names}


def _together(parts: list[Verification], policy: str) -> Verification:
    """The results of several blocks as one."""

    def merged(name: str) -> Any:
        values = [getattr(part, name) for part in parts]
        if name == "offloaded":
            return None
        if name in ("different", "broken"):
            return tuple(f"block {number}: {one}" for number, names in enumerate(values) for one in names)
        if isinstance(values[0], tuple):
            return tuple(map(sum, zip(*values, strict=True)))
        if isinstance(values[0], (bool, float)):
            return max(values)
        return sum(values) if isinstance(values[0], int) else values[0]

    names = [field.name for field in dataclasses.fields(Verification)]
    return dataclasses.replace(Verification(**{name: merged(name) for name in names}), policy=policy)


def _raise_if_broken(result: Verification) -> None:
    """Raise FastacError where a result differs, PolicyNotAppliedError where attention ran again or none was saved."""
    under, ran = f"verify: {result.subject} under {result.policy}", result.reference_executions[0]
    if result.broken:
        listed = ", ".join(result.broken[:5]) + (", ..." if len(result.broken) > 5 else "")
        raise FastacError(
            f"{under}: {len(result.broken)} of {result.compared} outputs and gradients differ from {result.reference} "
            f"checkpointing, by up to {result.largest_difference:.3g} ({listed}). Two runs of the reference differ by "
            f"{result.noise:.3g}.\n{result}"
        )
    again = result.policy_executions[1] - result.allowed_again
    if again > 0 or result.policy_executions[0] != ran:
        raise PolicyNotAppliedError(
            f"{under}: {max(again, 0)} attention kernels that were to be saved ran again in backward.\n{result}"
        )
    saves_all = result.policy.startswith("attn_only") and "min_kv" not in result.policy
    if "attn_only" in result.policy and (ran == 0 or (saves_all and result.saved == 0)):
        raise PolicyNotAppliedError(
            f"{under}: {ran} known attention kernels ran, and none was saved.\n"
            f"The model's attention is outside of the checkpointed blocks, linear, written out in small ops, or a "
            f'kernel without a row: see docs/adding_a_backend.md, or use policy="full".\n{result}'
        )


def _run_forward(model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """One forward with gradients on, on fresh inputs, without a backward of the whole model."""
    args, kwargs = _fresh((args, kwargs))
    with contextlib.ExitStack() as stack, torch.enable_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                stack.enter_context(module.no_sync())  # else it waits for a backward
        return model(*args, **kwargs)


def _full_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def _captured(regions: list[Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        regions.append((function, *_fresh((args, kwargs))))
    return _full_checkpoint(function, *args, **kwargs)


@contextlib.contextmanager
def _as_found(model: torch.nn.Module) -> Iterator[None]:
    """Restore a model at the end: gradients, buffers, generator states, checkpointing, its blocks' records."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    records = [(module, known_record(module)) for module in model.modules()]
    before = [(record, dataclasses.replace(record)) for _, record in records if record is not None]
    results, kinds.results, kinds.of_one_block = kinds.results, weakref.WeakKeyDictionary(), True
    try:
        with generators_preserved(_devices(model)), buffers_preserved(model), hook.checkpointing_preserved(model):
            yield
    finally:
        kinds.results, kinds.of_one_block = results, False
        for record, was in before:
            vars(record).update(vars(was))
        for module, found in records:
            if found is None:
                forget(module)
        for parameter, gradient in gradients:
            parameter.grad = gradient
