"""report and verify: what happened in a model's blocks, and proof of it on the user's own model."""

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

from fastac import errors, hook, models, registry
from fastac.backends.availability import ignored_backends
from fastac.backends.plugins import prepare
from fastac.checkpoint import checkpoint
from fastac.compile import graphs
from fastac.diagnosis.autograd_graph import nodes_between
from fastac.diagnosis.eager_look import buffers_preserved
from fastac.engine import comparison, wrappers
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

REFERENCES = ("none", "full")


def render(table: Table) -> str:
    """A rich table as plain text, as wide as it needs: nothing in it is cut off."""
    text = io.StringIO()
    Console(file=text, width=1000, force_terminal=False, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())


# report


@dataclasses.dataclass(frozen=True)
class Offloaded:
    """What blocks that offload keep, in bytes, and the copies of their latest regions: in backward there are more.

    copies: those of one region in one direction are one. waited_bytes: bytes of each that the device was idle for.
    """

    host_bytes: int
    device_bytes: int
    copies: int
    waited_bytes: tuple[int, ...]

    def __str__(self) -> str:
        host, device, waited = map(readable_bytes, (self.host_bytes, self.device_bytes, sum(self.waited_bytes)))
        waited = f"{len(self.waited_bytes)} of {self.copies} copies waited for ({waited})"
        return f"{host} on the host\n{device} on the device\n{waited}"


def offloaded_by(modules: Iterable[torch.nn.Module]) -> Offloaded | None:
    """What the latest regions of some modules offloaded; None where none did. Waits for the device."""
    moved = [record.transfers for record in _records(modules) if record.transfers is not None]
    if not moved:
        return None
    return Offloaded(
        sum(one.host_bytes for one in moved),
        sum(one.device_bytes for one in moved),
        sum(one.copies for one in moved),
        tuple(size for one in moved for size in one.waited_bytes()),
    )


def _records(modules: Iterable[torch.nn.Module]) -> list[BlockRecord]:
    return [record for one in modules if (record := known_record(one)) is not None]


@dataclasses.dataclass(frozen=True)
class ContainerReport:
    """One block container. Calls and bytes are sums over the latest region of each block.

    extra_bytes: of saved_bytes, what only the backward of opaque kernels needs. choice_bytes: beside saved_bytes, the
    choices of sparse attention. blocks_full, blocks_none: how many the policy checkpoints fully, or not at all: these
    are not watched.
    blocks_compiled: of blocks_seen, how many stand in a compiled graph. Of these it says what was decided while the
    graph was traced, for the input sizes of that trace; nothing of them is seen while the graph runs.
    communication: of functional collectives, sums over the latest region of each block. `again` grows in backward.
    writing: collectives that write a buffer of their caller's, which are never saved; FSDP's own are not counted.
    linear_saved, linear_bytes: outputs of Linear modules that are saved, and what they hold beside saved_bytes.
    offloaded: of blocks that offload, sums over the latest region of each.
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
    choice_bytes: int = 0
    blocks_full: int = 0
    blocks_none: int = 0
    blocks_compiled: int = 0
    communication: Communication | None = None
    writing: int = 0
    linear_saved: int = 0
    linear_bytes: int = 0
    offloaded: Offloaded | None = None
    flops: int = 0
    """Of the forwards of blocks that save something; 0 where they were not seen."""
    saved_flops: int = 0
    """Of these, of the attention that is saved."""

    @property
    def held_bytes(self) -> int:
        """Everything that is saved: what attention, Linear modules and collectives returned, and choices."""
        communicated = self.communication.saved_bytes if self.communication is not None else 0
        return self.saved_bytes + self.choice_bytes + self.linear_bytes + communicated


@dataclasses.dataclass(frozen=True)
class Report:
    """What fastac did on a model. active: whether its function is the one the model will call.

    remarks: what of its attention is not as it seems, such as backends that are set in vain.
    """

    model_class: str
    policy: str
    active: bool
    problem: str
    rows: tuple[ContainerReport, ...]
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        table = Table(
            title=f"{self.model_class}: {f'policy {self.policy}' if self.active else 'not enabled by fastac.enable'}",
            title_justify="left",
            caption="\n".join(filter(None, (self.problem, *self.remarks))) or None,
        )
        headings = ["blocks", "class", "attention calls", "saved", "recomputed", "bytes saved", "ops"]
        communicates = any(row.communication or row.writing for row in self.rows)
        headings += ["collectives"] * communicates
        multiplies = any(row.linear_saved for row in self.rows)
        headings += ["outputs of Linear saved"] * multiplies
        offloads = any(row.offloaded for row in self.rows)
        headings += ["offloaded"] * offloads
        for heading in headings:
            words = heading in ("blocks", "class", "ops", "collectives", "outputs of Linear saved", "offloaded")
            table.add_column(heading, justify="left" if words else "right", no_wrap=True)
        for row in self.rows:
            notes = [f"{row.blocks_full} under full"] * bool(row.blocks_full)
            notes += [f"{row.blocks_none} not checkpointed"] * bool(row.blocks_none)
            unwatched = row.blocks_full + row.blocks_none
            notes += [f"{row.blocks_seen} seen"] * (row.blocks_seen + unwatched != row.blocks)
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
                *[str(row.offloaded or "")] * offloads,
            )
        return "\n".join(filter(None, (render(table), self.summary)))

    @property
    def summary(self) -> str:
        """One line to paste where others read it; "" where no attention is saved."""
        saved = sum(row.saved for row in self.rows)
        if not saved:
            return ""
        calls = sum(row.attention_calls for row in self.rows)
        held = readable_bytes(sum(row.saved_bytes for row in self.rows))
        flops, avoided = sum(row.flops for row in self.rows), sum(row.saved_flops for row in self.rows)
        share = f", {avoided / flops:.0%} of the FLOPs that full recomputes in these blocks" if flops else ""
        line = f"fastac {self.policy}: {saved} of {calls} attention forwards are not run again{share}"
        return f"{line}; {held} held for them"


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
    return "\n".join(lines) or "none"


def report(model: torch.nn.Module) -> Report:
    """What fastac saved and recomputed in the latest forward of each of a model's blocks.

    Args:
        model: that `fastac.enable` was given, or that calls `fastac.checkpoint`.

    Returns:
        Values, and a table when printed. Of blocks in a graph that torch.compile made it says what was decided when
        the graph was traced.

    Raises:
        FastacError: what is no module; a recompute on an accelerator that was not what the forward was.

    Example:
        >>> print(fastac.report(transformer))
    """
    hook.check_module(model, "report")
    comparison.check_pending()
    model = models.unwrapped(model)
    hook.check_no_part(model, "report")
    enabled = hook.enabled_on(model)
    containers = hook.containers_of(model)
    in_graphs = _decided(model, _since)
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
    records = [known_record(block) for name, block in container.blocks.items() if name not in compiled]
    seen = [record for record in records if record is not None and record.latest is not None]
    latest = [record.latest for record in seen if record.latest is not None]
    calls = [call for one in (*(one.calls for one in latest), *compiled.values()) for call in one]
    products = [product for one in latest for product in one.products]
    parts = [record.communication for record in seen if record.communication is not None]
    saved = sum(call.saved for call in calls)
    mixed = enabled is not None and isinstance(enabled.policy, BlockPolicies)
    names = [enabled.policy_of(block).name for block in container.blocks.values() if mixed and enabled]
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


def _decided(
    model: torch.nn.Module, since: Callable[[torch.nn.Module], int], ids: Collection[str] | None = None
) -> dict[str, list[Call]]:
    """The calls of a model's blocks, by name, as they were decided on while a graph was traced.

    since: when what is known of a block otherwise was seen, as compilations count; a trace before that does not count.
    ids: of the compilations that count; by default all.
    """
    enabled = hook.enabled_on(model)
    if enabled is None:
        return {}
    return graphs.decided(
        {name: (class_name(block), enabled.policy_of(block), since(block)) for name, block in enabled.blocks.items()},
        ids,
    )


def _since(block: torch.nn.Module) -> int:
    record = known_record(block)
    return -1 if record is None or record.latest is None else record.looked


def _problem(model: torch.nn.Module, enabled: hook.Enabled | None, seen: bool) -> str:
    if enabled is None:
        if seen and not hasattr(model, "enable_gradient_checkpointing"):
            return ""  # it checkpoints itself
        return "fastac.enable(model) was not called, or was undone; of patch_checkpoint it shows calls of modules alone"
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
    """Count attention kernels that run meanwhile, by their ops: complete once it is left.

    torch's profiler counts every call of an op, whoever stands in the dispatcher; a call that fastac answered from a
    tape ran no kernel. While dynamo traces, it makes calls that run none, either, and are counted.

    activities: what is profiled beside the CPU.
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
    ends: Counter[tuple[int, str]] = Counter()  # of the last call that was counted, by its thread and op
    for event in profiled_events(profiled):
        thread, name = event.start_thread_id(), event.name()
        # One inside its like was made by a dispatch mode, or a tensor subclass, in the place of that.
        if name in names and event.start_ns() >= ends[thread, name]:
            ran[name] += 1
            ends[thread, name] = event.end_ns()
    ran.subtract(answered)


@dataclasses.dataclass
class Step:
    """One forward and backward: every output and gradient by name, and what ran.

    graphs: ids of the compilations whose graphs ran. in_graph: calls are those that were decided on while these were
    traced, in which no region is seen.
    """

    tensors: dict[str, torch.Tensor | None]
    executions: tuple[int, int]
    calls: list[Call]
    graphs: set[str]
    in_graph: bool = False
    products: list[Product] = dataclasses.field(default_factory=list)
    offloaded: Offloaded | None = None

    def rounding(self, name: str) -> float:
        """What two orders of adding up may make of a tensor: a few units in the last place of its largest number."""
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
        comparison.check_pending()
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
    """All floating-point tensors among what a model returns, in order."""
    leaves = tree_leaves(tuple(outputs.values()) if isinstance(outputs, Mapping) else outputs)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def differences(expected: Step, got: Step) -> dict[str, float]:
    """Largest absolute difference of each output and gradient that is not bitwise equal; inf for a missing one."""
    found = {}
    for name, wanted in expected.tensors.items():
        value = got.tensors.get(name)
        if wanted is None and value is None:
            continue
        if (
            wanted is None
            or value is None
            or wanted.shape != value.shape
            or not torch.equal(wanted.isnan(), value.isnan())
        ):
            found[name] = math.inf
        elif not torch.equal(wanted.nan_to_num(), value.nan_to_num()):
            found[name] = (wanted.double() - value.double()).nan_to_num().abs().max().item()
    return found


def _devices(model: torch.nn.Module) -> set[torch.device]:
    return {tensor.device for tensor in [*model.parameters(), *model.buffers()]}


# verify


@dataclasses.dataclass(frozen=True)
class Verification:
    """What `verify` measured. Executions are of attention kernels, in one step; largest differences are absolute.

    noise: the largest difference between two runs of the reference, above 0 where kernels are not deterministic; of a
    model compiled as a whole, also between the reference compiled and not, where that is `compiled`.
    broken: what differs by more than four times its own noise. allowed_again: attention kernels that may run in
    backward: those that the policy recomputes, and those of the model's own doing. linear_bytes: beside saved_bytes.
    offloaded: of blocks that offload. is_enabled: the model was; else it is what `enable` would do.
    """

    subject: str
    policy: str
    reference: str
    compared: int
    different: tuple[str, ...]
    largest_difference: float
    noise: float
    broken: tuple[str, ...]
    reference_executions: tuple[int, int]
    policy_executions: tuple[int, int]
    saved: int
    recomputed: int
    saved_bytes: int
    allowed_again: int
    linear_saved: int = 0
    linear_bytes: int = 0
    compiled: bool = False
    offloaded: Offloaded | None = None
    is_enabled: bool = True

    @property
    def is_noise(self) -> bool:
        """Whether results differ, and no more than the reference does by itself, which then proves nothing finer."""
        return bool(self.different) and not self.broken

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
        table.add_row("outputs and gradients", "", equal, alike if self.is_noise else _yes(not self.broken))
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

    Differences are allowed only where two runs of the reference differ, up to four times as much. A model that is
    compiled as a whole is another graph with checkpointing than without: there they are allowed up to four times what
    compiling the reference makes, and rounding. Executions are counted in this thread and its backward, by torch's
    profiler: let nothing else train, and call it outside of a profile of your own, which it would end.
    Parameters' gradients, buffers, generator states and checkpointing are as before afterwards. Among several
    processes every rank must call it, and it raises on all when it raises on one.

    Args:
        model: a diffusers model, a model that is enabled, or any module, which is then taken as one block.
        args, kwargs: of one call of the model.
        policy, blocks: as in `enable`; by default what it was given, for a model that is enabled.
        reference: "none", or "full" for a model that does not fit otherwise.
        per_block: run the model once under full checkpointing, then compare block by block on the inputs each had;
            needs the memory of one block.

    Returns:
        What was measured, and a table when printed.

    Raises:
        PolicyNotAppliedError: attention ran again that was to be saved, or none was saved.
        FastacError: a result differs, or the options cannot be honoured.

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
    """What is verified, and how."""

    group: Group
    model: torch.nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    policy: Any
    blocks: Any
    reference: str
    per_block: bool
    determinism_check: str = "default"

    def verify(self) -> Verification:
        """Take its steps and compare them. Raises as the function of that name."""
        if self.reference not in REFERENCES:
            raise FastacError(f"verify(reference={self.reference!r}): there are {', '.join(REFERENCES)}")
        hook.check_module(self.model, "verify")
        self.inner: Any = models.unwrapped(self.model)
        hook.check_no_part(self.inner, "verify")
        prepare()
        enabled = hook.enabled_on(self.inner)
        if enabled is None and torch.utils.checkpoint.checkpoint is not torch_checkpoint:
            raise FastacError(
                "verify: it proves what `enable` does, in a model of its own making, and would tell nothing of "
                "patch_checkpoint, which is on. With logging at INFO, each kind of checkpoint says what it saves."
            )
        if enabled is not None and enabled.by_forward and self.blocks is None:
            self.blocks = list(enabled.blocks.values())
        if self.policy is None:
            self.policy = "attn_only" if enabled is None else enabled.policy_as_given()
        if enabled is not None:
            self.determinism_check = enabled.determinism_check
        with _as_found(self.inner):
            if self.blocks is None and not hasattr(self.inner, "enable_gradient_checkpointing"):
                result = self.verify_block(self.model, self.args, self.kwargs, resolve(self.policy))
            elif self.per_block:
                result = self.verify_blocks()
            else:
                result = self.verify_model()
        result = dataclasses.replace(result, is_enabled=enabled is not None)
        _raise_if_broken(result)
        return result

    def verify_model(self) -> Verification:
        """Steps of the whole model."""
        self._enable(self.policy)
        enabled = hook.enabled_on(self.inner)
        assert enabled is not None
        return self._compare(self._reference_step, self._policy_step, enabled.policy, self._eager_reference_step)

    def _enable(self, policy: Any) -> None:
        hook.enable(self.inner, policy, blocks=self.blocks, determinism_check=self.determinism_check)

    def _reference_step(self) -> Step:
        hook.disable(self.inner)
        with wrappers.idle(self.inner):
            if self.blocks is not None and self.reference == "full":
                self._enable("full")
            elif self.reference == "full":
                self.inner.enable_gradient_checkpointing(_full_checkpoint)
            elif self.blocks is None:
                self.inner.disable_gradient_checkpointing()
            step = run_step(self.model, self.model, self.args, self.kwargs)
            hook.disable(self.inner)
        return step

    def _eager_reference_step(self) -> Step:
        with torch.compiler.set_stance("force_eager"):
            return self._reference_step()

    def _policy_step(self) -> Step:
        if hook.enabled_on(self.inner) is None:  # once: a model that is compiled would be compiled again
            self._enable(self.policy)
        found = run_step(self.model, self.model, self.args, self.kwargs)
        if found.calls or not found.graphs:
            return found
        calls = _decided(self.inner, lambda block: -1, found.graphs).values()
        return dataclasses.replace(found, calls=[call for block in calls for call in block], in_graph=True)

    def verify_blocks(self) -> Verification:
        """Each block by itself, on the inputs that it has in a step of the model under full checkpointing."""
        if self.blocks is not None:
            raise FastacError("verify(per_block=True) is for models that are enabled without blocks=...")
        self._enable(self.policy)
        enabled = hook.enabled_on(self.inner)
        assert enabled is not None
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
        self,
        reference_step: Callable[[], Step],
        policy_step: Callable[[], Step],
        policy: Policy | BlockPolicies,
        eager_reference_step: Callable[[], Step] | None = None,
    ) -> Verification:
        """The policy runs twice: the first step, which may compile and is watched, must be as exact as any other."""
        expected = reference_step()
        if self.group.any(bool(expected.graphs)):
            expected = reference_step()  # the first compiled, and what dynamo traced was counted
        first, later = policy_step(), policy_step()
        different = differences(expected, first)
        for name, difference in differences(expected, later).items():
            different[name] = max(difference, different.get(name, 0.0))
        # Every rank takes the same steps: they may communicate.
        noise = differences(expected, reference_step()) if self.group.any(bool(different)) else {}
        allowed = {name: 4 * size for name, size in noise.items()}
        compiled = eager_reference_step is not None and self.group.any(bool(different) and later.in_graph)
        if eager_reference_step is not None and compiled:
            compiling = differences(expected, eager_reference_step())
            noise |= {name: max(noise.get(name, 0.0), size) for name, size in compiling.items()}
            allowed = {
                name: max(allowed.get(name, 0.0), 4 * compiling.get(name, 0.0) + expected.rounding(name))
                for name in different
            }
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
        )


def _together(parts: list[Verification], policy: str) -> Verification:
    """What was found of several blocks, as one."""

    def summed(name: str) -> Any:
        return sum(getattr(part, name) for part in parts)

    def pairs(name: str) -> tuple[int, int]:
        forward, backward = zip(*(getattr(part, name) for part in parts), strict=True)
        return sum(forward), sum(backward)

    return Verification(
        subject=parts[0].subject,
        policy=policy,
        reference=parts[0].reference,
        compared=summed("compared"),
        different=tuple(f"block {i}: {name}" for i, part in enumerate(parts) for name in part.different),
        largest_difference=max(part.largest_difference for part in parts),
        noise=max(part.noise for part in parts),
        broken=tuple(f"block {i}: {name}" for i, part in enumerate(parts) for name in part.broken),
        reference_executions=pairs("reference_executions"),
        policy_executions=pairs("policy_executions"),
        saved=summed("saved"),
        recomputed=summed("recomputed"),
        saved_bytes=summed("saved_bytes"),
        allowed_again=summed("allowed_again"),
        linear_saved=summed("linear_saved"),
        linear_bytes=summed("linear_bytes"),
        compiled=any(part.compiled for part in parts),
    )


def _raise_if_broken(result: Verification) -> None:
    """Raise FastacError where a result differs, PolicyNotAppliedError where attention ran again or none was saved."""
    if result.broken:
        listed = ", ".join(result.broken[:5]) + (", ..." if len(result.broken) > 5 else "")
        raise FastacError(
            f"verify: {len(result.broken)} of {result.compared} outputs and gradients of {result.subject} under "
            f"{result.policy} differ from {result.reference} checkpointing, by up to {result.largest_difference:.3g} "
            f"({listed}); two runs of the reference differ by {result.noise:.3g}.\n{result}"
        )
    if "attn_only" in result.policy and result.reference_executions[0] == 0:
        raise PolicyNotAppliedError(
            f"verify: {result.subject} runs no attention kernel that is known, so {result.policy} saves none.\n"
            f"Its attention is linear, written out in small ops, or a kernel without a row: see "
            f'docs/adding_a_backend.md, or use policy="full".\n{result}'
        )
    again = result.policy_executions[1] - result.allowed_again
    if again > 0 or result.policy_executions[0] != result.reference_executions[0]:
        raise PolicyNotAppliedError(
            f"verify: {result.subject} under {result.policy} ran {max(again, 0)} attention kernels in backward that "
            f"were to be saved.\n{result}"
        )
    if result.policy.startswith("attn_only") and "min_kv" not in result.policy and result.saved == 0:
        raise PolicyNotAppliedError(
            f"verify: {result.subject} runs {result.reference_executions[0]} attention kernels, none of them inside a "
            f"checkpointed block, so {result.policy} saved nothing.\n{result}"
        )


def _run_forward(model: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """One forward with gradients on, on fresh inputs, that is followed by no backward of the whole model."""
    args, kwargs = _fresh((args, kwargs))
    with contextlib.ExitStack() as stack, torch.enable_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.parallel.DistributedDataParallel):
                stack.enter_context(module.no_sync())  # else it waits for the gradients of one backward
        return model(*args, **kwargs)


def _full_checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)


def _captured(regions: list[Any], function: Any, *args: Any, **kwargs: Any) -> Any:
    with torch.no_grad():
        regions.append((function, *_fresh((args, kwargs))))
    return _full_checkpoint(function, *args, **kwargs)


@contextlib.contextmanager
def _as_found(model: torch.nn.Module) -> Iterator[None]:
    """Leave a model as it is now: gradients, buffers, generator states, checkpointing, its blocks' records."""
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
