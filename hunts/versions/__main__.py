"""Run the tests on other releases of torch and diffusers.

python -m hunts.versions                  the oldest and the newest: README's example, the eager engine, parity
python -m hunts.versions 2.11.0           another one
python -m hunts.versions --all            every release; hook, verify, plan, compile and more on three of them
python -m hunts.versions --all --write    the same, into docs/versions.md where all passed; releases that are named
                                          change their lines
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import json
import os
import re
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fastac.engine.releases import FIRST_TORCH, TRACES, is_at_least
from hunts.versions.environments import ROOT, python_of
from tests.pairs import DIFFUSERS, FAMILIES

FLOOR, *_, NEWEST = DIFFUSERS
DOCUMENT = ROOT / "docs" / "versions.md"
EVERYTHING = (FLOOR, "2.11.0", NEWEST)
"""Releases that `--all` runs every room on."""

EAGER = {
    "engine": ("tests/engine", "tests/test_policy.py", "tests/test_registry.py", "tests/test_releases.py"),
    "models": ("tests/models/test_parity.py", "-k", FAMILIES),
}
MORE = {
    "hook": ("tests/hook",),
    "verify": ("tests/verification",),
    "sdpa": ("tests/backends/test_sdpa.py",),
    "diagnosis": ("tests/diagnosis",),
    "planning": ("tests/planning", "tests/test_flops.py"),
    "compile": ("tests/compiled",),
    "graph": ("tests/graph",),
    "distributed": ("tests/distributed/test_data_parallel.py", "tests/distributed/test_collectives.py"),
}
"""Room -> what pytest is given."""


@dataclasses.dataclass
class Result:
    """What one release did. example: what hunts.versions.example printed. rooms: pytest's last line, by room."""

    release: str
    example: dict[str, Any]
    rooms: dict[str, str] = dataclasses.field(default_factory=dict)
    failed: list[str] = dataclasses.field(default_factory=list)

    @property
    def is_kept(self) -> bool:
        """Whether attention runs once, bit for bit, and a compiled model is checkpointed or refused."""
        found = self.example
        is_saved = found["compiled"] in ({"full": 8, "attn_only": 4}, {"full": 8, "attn_only": "refused"})
        return is_saved and found["kernels"] == {"none": 4, "full": 8, "attn_only": 4} and all(found["exact"].values())


def run(release: str, rooms: dict[str, tuple[str, ...]]) -> Result:
    """README's example and some rooms on one release, and what they do printed."""
    python = python_of(release)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}

    def output_of(*command: str) -> tuple[int, str]:
        done = subprocess.run(
            [python, *command], cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return done.returncode, done.stdout

    _, text = output_of("-m", "hunts.versions.example")
    printed = re.search(r"^RESULT (.*)$", text, re.MULTILINE)
    if printed is None:
        sys.exit(f"torch {release}: the example failed\n{text}")
    result = Result(release, json.loads(printed[1]))
    ran = [result.example[name].partition("+")[0] for name in ("torch", "diffusers")]
    if ran != [release, DIFFUSERS[release]]:
        sys.exit(f"torch {release}, diffusers {DIFFUSERS[release]} were asked for, and {ran} ran")
    print(f"torch {release}, diffusers {DIFFUSERS[release]}: {result.example}", flush=True)
    for room, tests in rooms.items():
        if room == "graph" and not is_at_least(FIRST_TORCH[TRACES], release):
            result.rooms[room] = f"needs {FIRST_TORCH[TRACES]}"
            continue
        started = time.monotonic()
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow and not soak", *tests]
        # Before 2.13 torch leaves open what it opened around a forward that raised, and fails when that is collected.
        command += ["-p", "no:unraisableexception"] if not is_at_least("2.13", release) else []
        code, text = output_of(*command)
        last = re.findall(r"^.*\d (?:passed|failed|errors?)\b.* in \d.*$", text, re.MULTILINE)[-1:]
        counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", "".join(last))
        result.rooms[room] = ", ".join(counts)
        print(f"torch {release}, {room}: {', '.join(counts)} in {time.monotonic() - started:.0f} s", flush=True)
        if code:
            result.failed.append(room)
            print(text, flush=True)
    return result


def document(results: list[Result]) -> Iterator[str]:
    """docs/versions.md. Releases that did not run keep the lines that they have."""
    first, last = (release.rpartition(".")[0] for release in (FLOOR, NEWEST))
    before = DOCUMENT.read_text(encoding="utf-8").splitlines() if DOCUMENT.is_file() else []
    kept = {release: [line for line in before if line.startswith(f"| {release} |")] for release in DIFFUSERS}
    for result in results:
        kept[result.release] = [row_of(result), rooms_of(result)]
    yield "<!-- Written by python -m hunts.versions --all --write. Do not edit. -->\n"
    yield "# Releases\n"
    yield f"fastac runs on torch {first} to {last}. A feature that a release lacks is an error where you use it:\n"
    yield "| feature | first torch |\n|---|---|"
    yield from features()
    yield _wrapped(
        "\nEach pair below trained a Wan transformer of two blocks, which has four attention calls (Python "
        f"{results[0].example['python']}, CPU). The columns: attention kernels of a step that ran under plain "
        "checkpointing and under `attn_only`; whether output and gradients are bitwise those without checkpointing; "
        "kernels of the same model compiled as a whole; how many of the private names of torch in fastac exist.\n"
    )
    yield "| torch | diffusers | full | attn_only | bitwise | compiled, full | compiled, attn_only | private names |"
    yield "|---|---|---|---|---|---|---|---|"
    yield from (lines[0] for lines in kept.values() if lines)
    yield f"\nThe tests of each room ran as follows. Models: {FAMILIES.replace(' or ', ', ')}.\n"
    yield f"| torch | run on | {' | '.join(EAGER | MORE)} |\n|---|---|{'---|' * len(EAGER | MORE)}"
    yield from (lines[1] for lines in kept.values() if lines)
    yield _wrapped(f"\nTests of features that the release does not have, and tests of a GPU, are skipped. {LEFT}")


def _wrapped(text: str) -> str:
    """A paragraph in lines of 100, with the empty lines around it."""
    return "\n".join(textwrap.fill(one, 100, break_on_hyphens=False) for one in text.split("\n"))


LEFT = (
    "Collectives are not counted below 2.12, as torch's profiler loses some of gloo's. FSDP2 in mixed precision raises "
    "CheckpointError in torch 2.10 to 2.12, without fastac as well. Torch 2.8 cannot be used: `checkpoint("
    "early_stop=...)` came with 2.9, and so did `torch.library.get_kernel`, by which the tests count kernels. On a GPU "
    "only torch 2.11 ran ([measurements](measurements.md#on-a-gpu))."
)


def features() -> list[str]:
    return [f"| {feature} | {release} |" for feature, release in FIRST_TORCH.items()]


def row_of(result: Result) -> str:
    found = result.example
    cells = [result.release, found["diffusers"], found["kernels"]["full"], found["kernels"]["attn_only"]]
    cells += ["yes" if all(found["exact"].values()) else "NO", *found["compiled"].values()]
    cells += [f"{found['private'] - len(found['absent'])} of {found['private']}"]
    return f"| {' | '.join(map(str, cells))} |"


def rooms_of(result: Result) -> str:
    cells = [result.release, str(dt.date.today()), *(result.rooms.get(room, "") for room in EAGER | MORE)]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hunts.versions", description=__doc__.partition("\n")[0])
    named = "by default the oldest and the newest, or all"
    parser.add_argument("releases", nargs="*", choices=[*DIFFUSERS, []], help=named)
    parser.add_argument("--all", action="store_true", help="every room, on three of the releases")
    parser.add_argument("--write", action="store_true", help="write docs/versions.md")
    arguments = parser.parse_args()
    if arguments.write and not arguments.all:
        parser.error("--write needs --all")
    releases = arguments.releases or (list(DIFFUSERS) if arguments.all else [FLOOR, NEWEST])

    def run_rooms(release: str) -> Result:
        return run(release, EAGER | MORE if arguments.all and release in EVERYTHING else EAGER)

    with ThreadPoolExecutor(2) as pool:  # two releases at a time: most of a run is one process on one core
        results = list(pool.map(run_rooms, releases))
    bad = [result for result in results if result.failed or not result.is_kept]
    wrong = [f"{result.release}: {', '.join(result.failed) or 'the example'}" for result in bad]
    if wrong:
        sys.exit(f"failed: {'; '.join(wrong)}")
    if arguments.write:
        DOCUMENT.write_text("\n".join(document(results)) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
