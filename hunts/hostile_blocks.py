"""Random hostile programs: a block of random lines, used in random ways, with checkpointing and without.

A program is the text of Python code, made from a seed and the tables of hunts/hostile_lines.py. Both runs raise,
or both succeed with the same outputs, gradients, buffers and random generators, bit for bit; or fastac refuses, with an
error of its own. Anything else is a failure. This shows the program of a seed, what comes of it, and for a failure the
shortest program that still fails:

    python -m hunts.hostile_blocks 1234

Two numbers run a range of seeds: `python -m hunts.hostile_blocks 0 3000`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import logging
import random
import re
import string
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.utils.checkpoint import CheckpointError, set_checkpoint_early_stop
from torch.utils.checkpoint import checkpoint as torch_checkpoint

import fastac
from fastac.engine import module_state
from hunts import hostile_lines as lines
from tests import support
from tests.conftest import as_in_a_fresh_process
from tests.engine.simulated import simulated
from tests.support import Tensors
from tests.torch_data import same_bits

POLICIES = (
    *('"attn_only"',) * 5,
    *('"full"',) * 4,
    '"long_attn_only"',
    'fastac.Policy("attn_only", min_kv=7)',
    'fastac.Policy("attn_only", linear=("*",))',
    'fastac.Policy("attn_only", offload=True, keep=1)',
)
ORDERED = 10**6
"""From this seed on, programs are of buffers that one call reads and another one writes. In these, a RecomputeError is
a failure as well."""

NESTED = ('"attn_only"', '"long_attn_only"', '"full"', '"none"')

# Making a program

BODY = """\
# seed {seed}: {dtype}, {policy}, {options}
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = 1.5
{init}
    def forward(self, x, y, more=None, flag=True):
        a, b, c = x, tensors(y)[0], x * 2 if more is None else tensors(more)[0]
{forward}

{parts}
def use():
    block = run.module(Block())
{use}
"""


@dataclasses.dataclass
class Program:
    seed: int
    dtype: str
    policy: str
    options: dict[str, bool]  # of checkpoint
    bodies: dict[str, list[str]]  # "forward", "part1", ..., "use" -> lines

    @property
    def text(self) -> str:
        written = [line for body in self.bodies.values() for line in body]
        init = [line.split("# init: ")[1] for line in written if "# init: " in line]
        parts = [
            f"    def {name}(self, a, b, c, flag=True):\n{indented([*body, 'return a, b, c'], 2)}\n"
            for name, body in self.bodies.items()
            if name.startswith("part")
        ]
        return BODY.format(
            **vars(self),
            init=indented(init, 2),
            forward=indented(self.bodies["forward"], 2),
            parts="\n".join(parts),
            use=indented(self.bodies["use"], 1),
        )


def indented(body: Iterable[str], depth: int) -> str:
    written = [part for line in body for part in line.split("  # init: ")[0].split("\n")]
    return "\n".join("    " * depth + line for line in written)


class Writer:
    """Writes the program of a seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        choice = self.random.choice
        self.number = 0
        if seed >= ORDERED:
            self.program = self.ordered(seed)
            return
        self.bodies: dict[str, list[str]] = {"forward": []}
        # Some programs draw and change nothing, so that preserve_rng_state=False is right: then no values are compared.
        # Others use torch's own checkpoint, which writes state twice and does not restore all generators.
        self.quiet, by_torch = self.random.random() < 0.1, self.random.random() < 0.5
        self.without = (*lines.STATE, *lines.DRAWN_OUTSIDE_TORCH) if by_torch or self.quiet else ("torch_region",)
        self.without += (*lines.DRAWN, *lines.INNER_GRADIENTS, "writes_query") if self.quiet else ()
        self.lines = {line: often / len(table) for often, table in lines.BLOCK.values() for line in self.allowed(table)}
        self.bodies["forward"] = [*self.body(self.random.randint(2, 9)), choice(lines.RETURNS)]
        self.bodies["use"] = list(self.use())
        policy, dtype = choice(POLICIES), choice(("float32", "float64"))
        options = {"preserve_rng_state": False} if self.quiet else {}
        if self.random.random() < 0.1:
            options["early_stop"] = False
        self.program = Program(seed, dtype, policy, options, self.bodies)

    def ordered(self, seed: int) -> Program:
        """Several calls a step, of which some read the buffers that others write."""
        choice, randint = self.random.choice, self.random.randint
        others = [line for kind in ("plain", "attention") for line in lines.BLOCK[kind][1] if "drawing" not in line]
        body = [choice(others) for _ in range(randint(1, 3))] + [choice(lines.ORDERED) for _ in range(randint(1, 3))]
        self.random.shuffle(body)
        use = []
        # Writes that no version shows begin in the first step, which compares values.
        first = [choice(lines.MODES) for _ in range(randint(2, 3))]
        later = [mode for mode in lines.MODES if mode != "data" or mode in first]
        for step in range(randint(3, 9)):
            use.append("x, y, z = leaves = run.leaves(6)\nouts = []")
            for mode in [choice(later) for _ in range(randint(2, 3))] if step else first:
                use += [choice(("block.train()", "block.eval()"))] * (self.random.random() < 0.4)
                use.append(f"outs.append(run.keep(run.checkpoint(block, x, y, flag={mode!r})))")
            use += [choice(lines.ORDERS), choice(lines.ENDS)]
        bodies = {
            "forward": [*map(self.filled, body), choice(("return a + b.tanh() * c", "return a, b, c"))],
            "use": use,
        }
        return Program(seed, choice(("float32", "float64")), choice(POLICIES), {}, bodies)

    def body(self, length: int, depth: int = 0) -> list[str]:
        return [self.line(depth) for _ in range(length)]

    def line(self, depth: int) -> str:
        if self.random.random() < 0.15 and depth < 2:
            line = self.filled(self.random.choice(self.allowed(lines.PARTS)))
            self.bodies[f"part{self.number}"] = []
            self.bodies[f"part{self.number}"] += self.body(self.random.randint(1, 4), depth + 1)
            return line
        (line,) = self.random.choices(list(self.lines), list(self.lines.values()))
        return self.filled(line)

    def allowed(self, table: Iterable[str]) -> list[str]:
        return [line for line in table if not any(word in line for word in self.without)]

    def filled(self, line: str) -> str:
        self.number += 1
        names = {key: self.random.choice("abc") for key in "opq"}
        policy = self.random.choice(NESTED)
        return string.Template(line).substitute(names, n=self.number, policy=policy)

    def use(self) -> Iterable[str]:
        """One to three steps."""
        choice, often = self.random.choice, self.random.random
        if often() < 0.4:
            yield choice(lines.PREPARATIONS)
        for _ in range(choice((1, 2, 2, 3))):
            yield string.Template(choice(lines.INPUTS)).substitute(tokens=choice((6, 6, 6, 9)))
            yield choice(self.allowed(lines.CALLS)) + "\nrun.keep(out)"
            if often() < 0.35 and not self.quiet:
                yield choice(lines.CHANGES)
            yield choice(lines.BACKWARDS)
            yield choice(lines.ENDS)


# Running it


class Run:
    """What a program calls.

    way: "none" without checkpointing, "inner" with torch's own checkpoints inside alone, "torch" under torch's own, and
    "fastac". caught_errors: those that the program caught itself.
    """

    def __init__(self, program: Program, way: str) -> None:
        self.way, self.dtype, self.options = way, getattr(torch, program.dtype), program.options
        self.policy = eval(program.policy, {"fastac": fastac})
        self.found: list[torch.Tensor] = []
        self.inputs: list[torch.Tensor] = []
        self.modules: list[torch.nn.Module] = []
        self.caught_errors: list[Exception] = []

    def checkpoint(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        options = {} if self.way in ("none", "inner") else self.options
        return self.region(self.policy, function, *args, **options, **kwargs)

    def region(self, policy: Any, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        policy = {"fastac": policy, "torch": "torch"}.get(self.way, "none")
        return support.run_checkpointed(function, *args, policy=policy, **kwargs)

    def torch_region(self, function: Callable[..., Any], *args: Any, use_reentrant: bool = False) -> Any:
        """A checkpoint of the block's own. A reentrant one always stays: it has outcomes of its own."""
        if self.way == "none" and not use_reentrant:
            return function(*args)
        return torch_checkpoint(function, *args, use_reentrant=use_reentrant)

    @contextlib.contextmanager
    def caught(self) -> Iterator[None]:
        """What code does that catches every exception, also those by which a recompute ends early."""
        try:
            yield
        except Exception as error:
            self.caught_errors.append(error)

    def module(self, module: torch.nn.Module) -> torch.nn.Module:
        self.modules.append(module.to(self.dtype))
        return module

    def leaves(self, tokens: int, trained: str = "xyz") -> list[torch.Tensor]:
        made = [torch.randn(2, tokens, lines.W, dtype=self.dtype).requires_grad_(name in trained) for name in "xyz"]
        self.inputs += made
        return made

    def keep(self, value: Any) -> Any:
        for one in lines.tensors(value):
            self.found += one.detach().clone(), torch.tensor(one.requires_grad)
        return value

    def loss(self, value: Any) -> torch.Tensor:
        """Of what requires grad, so that most programs raise nothing."""
        roots = [one for one in lines.tensors(value) if one.requires_grad]
        return support.loss_of(roots or torch.zeros(1, requires_grad=True))

    def trained(self) -> Tensors:
        parameters = {
            f"{number}.{name}": one for number, m in enumerate(self.modules) for name, one in m.named_parameters()
        }
        return parameters | {f"input {number}": one for number, one in enumerate(self.inputs)}

    def grad(self, value: Any, **options: bool) -> list[torch.Tensor]:
        wanted = [one for one in self.trained().values() if one.requires_grad]
        found = torch.autograd.grad(self.loss(value), wanted, allow_unused=True, **options) if wanted else ()
        return self.keep([one for one in found if one is not None])

    def optimize(self) -> None:
        torch.optim.SGD(self.trained().values(), lr=0.01).step()

    def zero_gradients(self) -> None:
        for one in self.trained().values():
            one.grad = None

    def result(self) -> Tensors:
        """All that a program leaves behind, by name."""
        trained = self.trained()
        found = {f"value {number}": one for number, one in enumerate(self.found)}
        found |= {name: one.detach().clone() for name, one in trained.items()}
        found |= support.gradients(trained)
        for number, module in enumerate(self.modules):
            found |= {f"buffer {number}.{name}": one.detach().clone() for name, one in module.named_buffers()}
        found["generator of torch"] = torch.get_rng_state()
        found["generator of Python"] = torch.tensor(random.getstate()[1])
        _, numbers, position, *_ = np.random.get_state()
        found["generator of numpy"] = torch.tensor([*map(int, numbers), position])
        return found


NAMES = {
    **vars(lines),
    **{one.__name__: one for one in (contextlib, copy, functools, gc, np, random, torch)},
    "nn": torch.nn,
    "F": torch.nn.functional,
    "set_checkpoint_early_stop": set_checkpoint_early_stop,
}


def execute(program: Program, way: str, around: Any = contextlib.nullcontext) -> Tensors | Exception:
    """What a program leaves behind, or raises. around: a context that is open meanwhile."""
    run = Run(program, way)
    names = {**NAMES, "run": run}
    exec(compile(program.text, f"<seed {program.seed}>", "exec"), names)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    offloads = "offload" in program.policy and way == "fastac"
    # Every second program of buffers has large ones: none is copied before it is known to be written.
    small = -1 if program.seed >= ORDERED and program.seed % 2 else module_state.SMALL
    with (
        as_in_a_fresh_process(),
        simulated() if offloads else contextlib.nullcontext() as device,
        quiet(),
        mock.patch.object(module_state, "SMALL", small),
    ):
        try:
            with around():
                names["use"]()
        except Exception as error:
            return error.with_traceback(None)
        assert device is None or not device.faults, device.faults
    refusals = [one for one in run.caught_errors if is_refusal(one)] if way == "fastac" else []
    return refusals[0] if refusals else run.result()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(?!fastac)")
        yield


# Comparing two runs


class Verdict(NamedTuple):
    """kind: "exact", "both raise", "refused", "known" or "failure". words: more, in words."""

    kind: str
    words: str


ARGUMENT = "An argument that the block writes itself"
"""What is read after backward differs. Gradients do not."""

KNOWN = {
    "State that is no buffer and that no saved tensor shows": r"self\.(calls|kept|weight|generator)",
    "A hook that a block registers on its own argument": r"^hook\(",
    ARGUMENT: r"\b[abc]\.\w+_\(",
    "An op that writes a tensor after it saved it": r"rrelu",
}
"""Words of docs/limits.md for what any checkpointing gets wrong -> pattern of the lines of a block that do it."""

WRITTEN = "A tensor that the block changes in place after autograd saved it"
"""Where that is an error without checkpointing, gradients are those of the values that were saved."""


def check(program: Program) -> Verdict:
    """Run a program with checkpointing and without."""
    expected, found = execute(program, "none"), execute(program, "fastac")
    if isinstance(found, Exception):
        if isinstance(expected, Exception):
            return Verdict("both raise", type(expected).__name__)
        if is_refusal(found) and not (program.seed >= ORDERED and isinstance(found, CheckpointError)):
            return Verdict("refused", words_of(found))
    elif not isinstance(expected, Exception) and not differences(found, expected):
        return Verdict("exact", "")
    if differences(execute(program, "none"), expected):
        return Verdict("not deterministic", "")
    if is_written(expected):
        unchanged = without([re.escape(line) for line in lines.CHANGES], program)
        expected = execute(program, "none", allow_mutation_on_saved_tensors)
        if not differences(found, expected) or not differences(found, execute(unchanged, "none")):
            return Verdict("known", WRITTEN)
    if differences(execute(program, "inner"), expected):
        return Verdict("known", "torch's own checkpoint inside is not exact")
    theirs = execute(program, "torch")
    different, of_torch = differences(found, expected), differences(theirs, expected)
    if (isinstance(theirs, Exception) or set(different) <= set(of_torch)) and (words := known(program, different)):
        return Verdict("known", words)
    exactness = f"not exact, either: {', '.join(of_torch)}" if of_torch else "exact"
    return Verdict("failure", f"{', '.join(different)}; torch's own checkpoint is {exactness}")


def is_refusal(error: Exception) -> bool:
    return isinstance(error, (fastac.FastacError, CheckpointError)) or is_written(error)


def is_written(result: Tensors | Exception) -> bool:
    # torch's words; the second for a leaf that became none by the write.
    return isinstance(result, Exception) and bool(re.search(r"modified (by an )?inplace|^grad_accum", str(result)))


def without(patterns: Sequence[str], program: Program) -> Program:
    """The program without lines in which one of some patterns is found."""
    shorter = copy.deepcopy(program)
    for body in shorter.bodies.values():
        body[:] = [line for line in body if not any(re.search(pattern, line) for pattern in patterns)] or ["pass"]
    return shorter


def known(program: Program, different: Sequence[str]) -> str:
    """The first of KNOWN without whose lines the program does not fail."""
    for words, pattern in KNOWN.items():
        shorter = program if words == ARGUMENT and "gradient" in str(different) else without([pattern], program)
        if shorter != program and check(shorter).kind != "failure":
            return words
    return ""


def differences(found: Tensors | Exception, expected: Tensors | Exception) -> list[str]:
    """Names of what differs; for an error, the error."""
    if isinstance(found, Exception):
        return [] if isinstance(expected, Exception) else [f"raises {found!r}"]
    if isinstance(expected, Exception):
        return [f"does not raise {expected!r}"]
    return [
        name
        for name in found.keys() | expected.keys()
        if name not in found or name not in expected or not same_bits(found[name], expected[name])
    ]


def words_of(error: Exception) -> str:
    """An error without what differs from program to program."""
    bases = [one for one in type(error).__mro__ if one.__module__ != "builtins" and one.__name__ != "FastacError"]
    text = re.sub(r"^\S*(Block|part|<lambda>|region)\S*: ", "", str(error).splitlines()[0])
    text = re.sub(r"\([\d, ]*\)|\d+|'[^']*'|\"[^\"]*\"", "_", text)
    return f"{(bases or [type(error)])[0].__name__}: {text[:110]}"


def shortest(program: Program) -> Program:
    """The program without the lines that the failure does not need."""
    before = None
    while before != program:
        before = program
        for name, body in before.bodies.items():
            for number in reversed(range(len(body))):
                shorter = copy.deepcopy(program)
                del shorter.bodies[name][number]
                if check(shorter).kind == "failure":
                    program = shorter
    return program


def show(seed: int) -> str:
    program = Writer(seed).program
    verdict = check(program)
    shown = f"{program.text}\n# {verdict.kind}: {verdict.words}\n"
    if verdict.kind == "failure":
        program = shortest(program)
        shown = f"{program.text}\n# {check(program)}\n"
    return shown


def count(seeds: Iterable[int]) -> tuple[Counter[Verdict], list[int]]:
    """Verdicts of the programs of some seeds, and the seeds that failed."""
    counts: Counter[Verdict] = Counter()
    failed = []
    for seed in seeds:
        verdict = check(Writer(seed).program)
        if verdict.kind == "failure":
            failed.append(seed)
        counts[verdict] += 1
    return counts, failed


def table(counts: Counter[Verdict]) -> str:
    ordered = sorted(counts.items(), key=lambda item: (item[0].kind, -item[1]))
    return "\n".join(f"{number:6} {kind}  {words}" for (kind, words), number in ordered if kind != "failure")


def main(first: int, last: int | None = None) -> None:
    torch.set_num_threads(1)
    logging.disable()
    warnings.simplefilter("ignore")
    failed = [first]
    if last is not None:
        counts, failed = count(range(first, last))
        print(table(counts))
    for seed in failed:
        print(show(seed))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
