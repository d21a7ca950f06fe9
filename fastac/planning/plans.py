"""Plans: bytes and FLOPs of each policy in one step, as values and as a table."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch

from fastac.diagnosis.tables import in_unit, render, table_of_figures, unit_of
from fastac.engine.checkpoint_wrappers import FSDP1
from fastac.errors import FastacError, class_before, class_name, parse_bytes, readable_bytes
from fastac.models.blocks import check_module, unwrapped
from fastac.planning import places
from fastac.planning.fake_model import Inputs, arguments, fake_model
from fastac.planning.fake_weights import BREAKS
from fastac.planning.forecast import ROWS, Forecast, PolicyFigures, States
from fastac.planning.places import Room
from fastac.policy import Policy, of_first

logger = logging.getLogger("fastac")

NOT_MODELLED = (
    "a plan counts the tensors that operators return; not what the allocator rounds up or cannot use, workspaces in "
    "kernels (attention backward, matrix products), temporaries of the optimizer, the CUDA context, other models",
    "a trainer's fused norms or rotary kernels hold less than the operators that are simulated",
)

TFLOPS = 400.0
"""TFLOP/s of a usual device: an H100 in bf16."""

HOST = 64 * 2**30
"""Bytes of host memory for each GPU, of a usual machine."""

GBPS = 25.0
"""GB/s of a usual bus between host and device, in each direction: PCIe 4 x16."""

WITHIN = "within "
"""Prefix of the name of the row for a budget."""

AUTO = "auto"
"""Name of the row for a memory: the best that fits in three places."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The plans of several policies for one model and one size of inputs. `within` plans for a number of bytes."""

    forecast: Forecast = dataclasses.field(repr=False, compare=False)
    # The model's name, and the sizes of its inputs in words.
    subject: str
    inputs: str
    states: States
    # Bytes of the model's gradients, which the peak of every policy includes.
    gradients: int
    policies: tuple[PolicyFigures, ...]
    # Only `fastac plan` sets the following. Block name -> its policy in the row of the budget or of the memory:
    blocks: Mapping[str, Policy] = dataclasses.field(default_factory=dict)
    # Policy -> the most frames with which a step fits `memory`, or 0.
    largest: Mapping[str, int] = dataclasses.field(default_factory=dict)
    # Bytes of saved outputs that were asked for.
    budget: int | None = None
    # Bytes of the device.
    memory: int | None = None
    # Bytes of the host for each GPU.
    host: int = HOST
    # GB/s of the bus between them, in each direction.
    gbps: float = GBPS
    # TFLOP/s of the device, for the rate that hides copies to the host.
    tflops: float = TFLOPS

    def within(
        self,
        saved: str | int | None = None,
        *,
        memory: str | int | None = None,
        host: str | int = 0,
        gbps: float = GBPS,
        linear: bool = True,
        offload: bool = False,
    ) -> dict[str, Policy]:
        """The policies of all blocks that avoid the most recompute with so many bytes.

        Either `saved` limits the saved outputs, or `memory` the whole step. A block saves attention over at least some
        number of keys, and outputs of Linear modules by name. The policies never recompute more than "full",
        "attn_only" or "long_attn_only", if these fit, too.

        Args:
            saved: bytes that the saved outputs of all blocks hold together after one forward, above what full
                checkpointing holds: "24GiB", "500MB" or a number.
            memory: bytes of the device for the peak of a step, with weights, gradients and the optimizer's states. All
                of it is used: give a tenth less than the device has for what a plan does not count, "72GiB" of 80.
            host: with `memory`, bytes of host memory for each GPU. The first blocks may leave what they keep there.
            gbps: with `host`, the rate of the bus between host and device, in GB/s and each direction, beside 400
                TFLOP/s of the device. If the device is half as fast, give twice the rate. Blocks copy no more than
                computation hides, unless nothing fits otherwise: then a warning says so.
            linear: whether outputs of Linear modules may be saved. Compiled blocks cannot save these.
            offload: with `saved`, whether the saved outputs wait in host memory, with the inputs of all blocks.

        Returns:
            Block name -> Policy, as `fastac.enable` takes it for a model with blocks of these names.

        Raises:
            FastacError: both of `saved` and `memory` were given, or none, or an argument that belongs to the other one;
                bytes without a unit, or a rate of 0; no policy fits `memory`: the text says what would fit.

        Example:
            >>> plan = fastac.plan(transformer, inputs)
            >>> fastac.enable(transformer, plan.within("24GiB"))
            >>> fastac.enable(transformer, plan.within(memory="72GiB", host="64GiB"))
        """
        if saved is not None and memory is None and not host:
            return places.within(self.forecast, parse_bytes(saved), linear, offload)
        if saved is not None or memory is None or offload:
            raise FastacError(
                'plan.within: give either bytes of saved outputs, within("24GiB") or within("24GiB", offload=True), or '
                'the memory of the device, within(memory="72GiB") or within(memory="72GiB", host="64GiB")'
            )
        room = self.room(parse_bytes(memory), parse_bytes(host), gbps)
        chosen = places.choose(self.forecast, room, linear=linear)
        if chosen is None:
            missing = places.missing(self.forecast, room)
            raise FastacError(f"plan.within(memory={memory!r}, host={host!r}): no policy fits. {missing}")
        places.warn_of_waiting(self.forecast, room, chosen)
        return chosen

    def room(self, memory: int, host: int | None = None, gbps: float | None = None) -> Room:
        """What a step may use. Raises FastacError for a rate that is not above 0.

        host, gbps: by default the plan's.
        """
        host, gbps = self.host if host is None else host, self.gbps if gbps is None else gbps
        if not (gbps > 0 and self.tflops > 0):
            raise FastacError(f"plan: {gbps:g} GB/s beside {self.tflops:g} TFLOP/s: two numbers above 0 were expected")
        return Room(memory, host, gbps * 1e9 / (self.tflops * 1e12))

    def as_json(self) -> dict[str, Any]:
        """The plan in values that JSON has."""
        fields = dataclasses.asdict(dataclasses.replace(self, forecast=None))  # type: ignore[arg-type]
        del fields["forecast"]
        return fields

    def __str__(self) -> str:
        unit = unit_of(row.peak_bytes for row in self.policies)
        columns = {"policy": [row.policy for row in self.policies]}
        for name in ("saved", "held", "host", "peak"):
            columns[f"{name}\n{unit}"] = [in_unit(getattr(row, f"{name}_bytes"), unit) for row in self.policies]
        columns["FLOPs\nof full"] = [f"{row.relative:.3f}" for row in self.policies]
        rates = [row.bytes_per_flop * self.tflops * 1e3 for row in self.policies]  # GB/s
        columns["GB/s"] = [(f"{rate:.2g}" if rate < 10 else f"{rate:,.0f}") if rate else "" for rate in rates]
        if self.largest:
            largest = {name: str(frames or "none") for name, frames in self.largest.items()}
            columns["longest\nvideo"] = [largest.get(row.policy, "") for row in self.policies]
        table = table_of_figures(f"{self.subject}: {self.inputs}", self._captions(), list(columns))
        for cells in zip(*columns.values(), strict=True):
            table.add_row(*cells)
        return render(table)

    @property
    def best(self) -> PolicyFigures | None:
        """The policy of fewest FLOPs that fits `memory` and `host`. If none other fits, its copies are not hidden."""
        if self.memory is None:
            return None
        room = self.room(self.memory)
        fitting = [row for row in self.policies if row.peak_bytes <= self.memory and row.host_bytes <= room.host]
        # Copies that the device waits for are worse than any recompute.
        return min(fitting, key=lambda row: (row.bytes_per_flop > room.bytes_per_flop, row.flops), default=None)

    def _captions(self) -> list[str]:
        states, best = self.states, self.best
        sizes = {"weights": states.weights, "gradients": self.gradients, "optimizer": states.optimizer}
        sizes |= {"gathered": states.gathered} if states.gathered else {}
        lines = [f"peak: with {', '.join(f'{name} {readable_bytes(size)}' for name, size in sizes.items())}"]
        if any(row.host_bytes for row in self.policies):
            lines += [
                "host: bytes in host memory for each GPU, which are not held on the device",
                f"GB/s: host copies of at least this rate in each direction are hidden at {self.tflops:g} TFLOP/s; "
                f"PCIe 4 x16 gives about 25, PCIe 5 x16 about 50",
            ]
        memory = readable_bytes(self.memory or 0)
        if self.largest:
            lines.append(f"longest video: the most frames with which a step fits {memory}, with any host memory")
        if self.blocks:
            lines.append(f"{self.policies[-1].policy}: {summary(self.blocks.values())}")
        if self.memory is not None:
            lines.append(
                f"memory: {memory}. The plan leaves no reserve for what it does not count; pass 10 % less than the "
                f"device has"
            )
            if best is None:
                lines.append(f"no policy fits. {places.missing(self.forecast, self.room(self.memory))}")
        if best is not None:
            takes = f"{best.relative:.3f} of the FLOPs of full, {readable_bytes(best.peak_bytes)}"
            host = f" and {readable_bytes(best.host_bytes)} of host memory for each GPU" * bool(best.host_bytes)
            lines.append(f"best that fits: {best.policy}, with {takes}{host}")
        return lines + list(NOT_MODELLED)


def summary(policies: Collection[Policy]) -> str:
    """Counts of blocks by what they do: "attention over at least 513 keys in 30 of 30 blocks, ..."."""
    if not any(policy.checkpoints for policy in policies):
        return "no checkpointing"
    counts: Counter[str] = Counter()
    for policy in policies:
        attention = f"attention over at least {policy.min_kv} keys" if policy.min_kv else "attention"
        counts.update([*[attention] * (policy.name == "attn_only"), *policy.linear])
    parts = [f"{what} in {count}" for what, count in counts.most_common(8)]
    parts += [f"{len(counts) - 8} more"] * (len(counts) > 8)
    if parts:
        parts[0] += f" of {len(policies)} blocks"
    on_host = sum(bool(policy.offload) for policy in policies)
    waiting = f"{on_host} of {len(policies)} blocks wait on the host; " * bool(on_host)
    return f"{waiting}saved: {', '.join(parts) or 'nothing'}"


def plan(
    model: torch.nn.Module,
    inputs: Inputs,
    *,
    blocks: Any = None,
    optimizer: str = "adamw",
    gpus: int = 1,
    checkpointed: int | None = None,
    device: str | None = None,
) -> Plan:
    """Plan a step of a model: the bytes that each policy holds, its peak, and the FLOPs that it recomputes.

    Args:
        model: it is copied without its data, and may be on the device "meta", offloaded or quantized.
        inputs: keyword arguments of one call, by name; or a tuple of arguments by position.
        blocks: as in `enable`.
        optimizer: "adamw", "adamw8bit" or "sgd".
        gpus: number of GPUs over which FSDP2 will shard weights, gradients and the optimizer's states.
        checkpointed: adds rows for "full" and "attn_only" in the first so many blocks, with the rest not checkpointed,
            as `fastac.first_blocks` has it.
        device: the device that will train, "cuda" or "cpu": some ops are one kernel on CUDA, and hold less. By default
            the device that holds weights or inputs now; "cuda" for a model on "meta".

    Returns:
        A Plan, which prints as a table; its `within` gives the policies for a number of bytes.

    Raises:
        FastacError: the model's blocks are unknown, it does not run on these inputs without data, or is not trained;
            `inputs` are neither a mapping nor a tuple; the optimizer or the device is unknown; it is sharded already.

    Example:
        >>> plan = fastac.plan(transformer, inputs)
        >>> fastac.enable(transformer, plan.within("24GiB"))
    """
    check_module(model, "plan")
    _refuse_sharded(model)
    shapes = str(arguments(inputs))
    advice = "If its weights are quantized, plan before, or from its configuration: fastac plan config.json."
    with explained(f"{class_name(model)} does not run without data on {shapes}", advice):
        forecast = Forecast(fake_model(model, inputs, blocks, device), optimizer, gpus)
        made = plan_of(forecast, class_name(model), shapes, checkpointed)
    if not next(row for row in made.policies if row.policy == "attn_only").saved_bytes:
        logger.warning(
            "plan: no attention of %s on %s can be saved, so a plan saves only outputs of Linear modules. "
            'fastac.enable(model, policy="attn_only") says why in the first step.',
            class_name(model),
            shapes,
        )
    return made


def _refuse_sharded(model: torch.nn.Module) -> None:
    """Raise FastacError for a model that FSDP or `replicate` has changed: its parts are no longer those of the plan."""
    # FSDP1 wraps modules, the others derive classes.
    if any(FSDP1 in module._modules or class_before(module) is not type(module) for module in model.modules()):
        raise FastacError(
            f"plan: {class_name(unwrapped(model))} is sharded by FSDP, or replicated. Plan before that, with gpus=... "
            f'for the number of GPUs that share the weights; or train it under policy="auto", which measures.'
        )


@contextlib.contextmanager
def explained(problem: str, advice: str = "") -> Iterator[None]:
    """Turn an error of the model, or for want of data, into a FastacError with the first line of it."""
    try:
        yield
    except FastacError:
        raise
    except BREAKS as error:
        cause, _, _ = f"{type(error).__name__}: {error}".partition("\n")
        if "type" in str(error) and "bfloat16" in str(error).lower():  # the operands of a product have two dtypes
            advice = "If it trains under torch.autocast, plan under it; without a GPU under that of the CPU: "
            advice += 'with torch.autocast("cpu", torch.bfloat16).'
        raise FastacError(f"plan: {problem}: {cause}\n{advice}".strip()) from error


def plan_of(forecast: Forecast, name: str, inputs: str, checkpointed: int | None = None) -> Plan:
    """The plan of a forecast. checkpointed: adds two rows in which so many blocks are checkpointed."""
    policies = [forecast.figures(policy, row) for row, policy in ROWS.items()]
    if checkpointed is not None:
        # The model may have blocks that it does not call on these inputs: "the first" are those that run.
        called = [name for name in forecast.fake_model.blocks if name in forecast.full.begins]
        for policy_name in ("full", "attn_only"):
            first_blocks = of_first(called, checkpointed, policy_name)
            policies.append(forecast.figures(first_blocks, f"{policy_name}, first {checkpointed} blocks"))
    return Plan(forecast, name, inputs, forecast.states, forecast.gradients, tuple(policies))
