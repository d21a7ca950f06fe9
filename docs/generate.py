"""Writes docs/backends.md, docs/models.md, and tables of README.md and of other documents.

`tests/docs` and `tests/models/test_parity.py` fail when one is stale. The tiny models of the tests are trained for it;
what was measured comes from benchmarks/results; shares of attention are planned from published configurations.

python docs/generate.py
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import itertools
import json
import runpy
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import fastac  # registers the rows
from fastac import registry
from fastac.backends import LIBRARIES
from fastac.backends.diffusers import BACKENDS
from fastac.backends.verdicts import Verdict
from fastac.models import published as configurations
from fastac.registry import AttentionOp

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "benchmarks")]

import peers  # noqa: E402
from tests.models import figures  # noqa: E402
from tests.models.tiny import TINY  # noqa: E402

HEAD = "<!-- Written by docs/generate.py. Do not edit. -->"
COMPOSITIONS = ROOT / "benchmarks" / "results" / "compositions_cpu.json"
PEERS = ROOT / "benchmarks" / "results" / "peers_cpu.json"
DISTRIBUTED = ROOT / "benchmarks" / "results" / "distributed_cpu.json"
GPU = ROOT / "benchmarks" / "results" / "gpu_wan_nvidia_h100_80gb_hbm3.json"

TESTS = {
    "scaled_dot_product_attention": ("test_sdpa.py",),
    "torch.nn.attention.varlen": ("libraries/varlen.py",),
    "flex_attention, NABLA": ("test_flex.py", "../compiled/test_flex.py"),
    "flash-attn 2": ("libraries/flash_attn_2.py",),
    "flash-attn 3": ("libraries/flash_attn_3.py",),
    "flash-attn 4": ("libraries/flash_attn_4.py",),
    "xFormers": ("libraries/xformers.py",),
    "FastVideo's flash-attn wrappers": ("libraries/fastvideo.py",),
    "video sparse attention": ("libraries/fastvideo_kernel.py", "libraries/vsa.py"),
    "VMoBA": ("libraries/vmoba.py",),
    "sparse-linear attention (SLA)": ("libraries/sla.py",),
    "attention with quantization-aware training": ("libraries/attn_qat.py",),
    "block-sparse attention (LongCat)": ("libraries/longcat.py",),
    "SageAttention, sage_attn3": ("libraries/sage.py",),
    "diffusers": ("libraries/diffusers_backends.py",),
}
"""Library -> its files in tests/backends."""

VERDICTS = {
    Verdict.SAVABLE: "its attention forward is an op, whose output fastac saves",
    Verdict.OPAQUE: "its attention forward is no op: savable once `fastac.make_visible` made it one",
    Verdict.DECOMPOSED: "it runs as many small ops: there is no attention output to save",
    Verdict.NOT_TRAINABLE: "it has no backward",
    Verdict.UNKNOWN: "nobody checked",
}


def backends() -> str:
    """The attention libraries, ops and diffusers backends as Markdown."""
    files = [value for value in vars(fastac.backends).values() if isinstance(value, ModuleType)]
    catalogue = [row for file in files for row in getattr(file, "ROWS", ())]
    rows = [row for row in registry.rows() if row in catalogue]  # tests register others in their process
    functions = [function for file in files for function in getattr(file, "FUNCTIONS", ())]
    order = list(Verdict)
    listed = sorted(BACKENDS.items(), key=lambda item: (order.index(item[1].verdict), item[0]))
    return _document(
        "# Attention backends",
        f"fastac {fastac.__version__}. `fastac backends` shows what your machine has. You can "
        "[add a backend](adding_a_backend.md) that is missing here, also in a package of its own.",
        _table(("verdict", "meaning"), ((_words(verdict), meaning) for verdict, meaning in VERDICTS.items())),
        "## Which libraries?",
        "*Tested with* names the releases whose real Python code passes the parity tests, over kernels for the CPU: "
        "under `attn_only`, gradients are bitwise equal to no checkpointing, and the attention kernel runs once.",
        _table(
            ("library", "verdict", "how its output is saved, what to do", "tested with"),
            (
                (
                    library.name,
                    _words(library.verdict),
                    "; ".join(filter(None, (library.how, library.advice))),
                    _tested_with(library.name),
                )
                for library in LIBRARIES
            ),
        ),
        "## Which ops?",
        "These are the rows. A namespace is a regular expression. If no case of a library's test file runs a row, that "
        "file names the row with the reason (`not_run`).",
        _table(
            ("op", "rows of", "layout of keys", "draws random numbers", "note"),
            (
                (
                    f"`{row.namespace}::{row.name}`",
                    row.backend,
                    row.layout + (f", `{row.max_kv}`" if row.max_kv else ""),
                    _draws(row.dropout),
                    _note(row),
                )
                for row in rows
                if isinstance(row, AttentionOp)
            ),
        ),
        "## Which kernels are no ops?",
        "fastac [makes](adding_a_backend.md#an-autogradfunction-made-visible) their `autograd.Function`s visible when "
        "their module is loaded and fastac is enabled.",
        _table(
            ("module", "Function", "backend", "layout of keys", "draws random numbers"),
            (
                (
                    f"`{function.module}`",
                    f"`{function.name}`",
                    function.backend,
                    function.layout + (f", `{function.max_kv}`" if function.max_kv else ""),
                    _draws(function.dropout),
                )
                for function in functions
            ),
        ),
        "## Which other ops are intercepted for attention?",
        _table(
            ("op", "what it is for"),
            (
                *(
                    (f"`{row.namespace}::{row.name}`", "saved: sparse attention chooses its blocks with it")
                    for row in rows
                    if row.kind == "choice"
                ),
                *(
                    (
                        f"`{row.namespace}::{row.name}`",
                        "refused: it runs only if scaled_dot_product_attention is decomposed",
                    )
                    for row in rows
                    if row.kind == "decomposition"
                ),
            ),
        ),
        "## Which backends of diffusers?",
        "These are the names that `transformer.set_attention_backend(...)` takes in diffusers 0.42. Those that run on "
        f"a CPU are tested on Wan, with {_tested_with('diffusers')}.",
        _table(
            ("backend", "verdict", "rows of", "what it is, or why not"),
            ((f"`{name}`", _words(found.verdict), found.family, found.reason) for name, found in listed),
        ),
    )


def models() -> str:
    """The video models of diffusers as Markdown."""
    return _document(
        "# Models",
        f"fastac {fastac.__version__}, {_torch()}, diffusers {importlib.metadata.version('diffusers')}. Every "
        "diffusers model with gradient checkpointing trains; those below are its video models. In policies by block "
        "name and in reports, blocks are the outermost lists of modules that hold attention; of these only the ones "
        "that diffusers names in `_repeated_blocks`, if it does. For four classes fastac names the lists itself.",
        "`tests/models/test_parity.py` measures the table on a CPU in fp32, with `attn_only` and a tiny model with "
        "random weights. It counts the attention kernels of one step, the bytes that the blocks held for them, and the "
        "outputs and gradients that were compared with training without checkpointing: all are equal, bit for bit.",
        "torch has no backward of `flex_attention` on a CPU: the tests add one. Linear attention (Sana-Video, half of "
        "the blocks of Sana-WM) has no kernel whose output could be saved: it is recomputed.",
        _table(figures.HEADINGS, (one.cells() for one in _figures())),
    )


def compositions() -> str:
    """docs/compile.md with the table of what benchmarks/compositions.py measured."""
    measured = json.loads(COMPOSITIONS.read_text(encoding="utf-8"))
    shapes = (
        f"{measured['layers']} blocks, {measured['tokens']} video tokens, {measured['text_tokens']} of text, batch "
        f"{measured['batch']}, {measured['dtype']}, torch {measured['machine']['torch']} on a CPU."
    )
    headings = ("model", "compiled by", "composition", "attention", "graphs", "breaks", "held MiB", "peak MiB")
    headings += ("error", "plain error")
    rows = (
        (
            row["model"],
            row["backend"] if row["backend"] != "eager" else "",
            row["composition"],
            f"{row['attention']} + {row['again']}",
            f"{row['graphs']} ({row['plain_graphs']})",
            f"{row['graph_breaks']} ({row['plain_graph_breaks']})",
            f"{row['held'] / 2**20:.1f}" if row["held"] is not None else "",
            f"{row['peak'] / 2**20:.1f}",
            *(f"{row[name]:.0e}" if row[name] else "0" for name in ("error", "plain_error")),
        )
        for row in measured["results"]
    )
    return _with_tables("docs/compile.md", {"compositions": f"{_wrapped(shapes)}\n\n{_table(headings, rows)}"})


def distributed() -> str:
    """docs/distributed.md with what benchmarks/distributed.py measured and what benchmarks/scaling.py computes."""
    measured = json.loads(DISTRIBUTED.read_text(encoding="utf-8"))
    shapes = (
        f"Wan, {measured['layers']} blocks of width {measured['width']}, {measured['tokens']} video tokens, "
        f"{measured['text_tokens']} of text, batch {measured['batch']}, {measured['dtype']}, torch "
        f"{measured['machine']['torch']}, gloo on a CPU. Figures are those of one rank."
    )
    headings = ("engine", "ranks", "policy", "attention", "collectives", "held MiB", "sent MiB")
    rows = (
        (
            row["engine"],
            str(row["ranks"]),
            row["policy"],
            *(" + ".join(map(str, row[name])) for name in ("attention", "collectives")),
            f"{row['held'] / 2**20:.1f}",
            " + ".join(f"{size / 2**20:.1f}" for size in row["sent"]),
        )
        for row in measured["results"]
    )
    scaling = runpy.run_path(str(ROOT / "benchmarks" / "scaling.py"))
    computed = _table(scaling["HEADINGS"], map(scaling["cells"], scaling["rows"]()))
    tables = {"engines": f"{_wrapped(shapes)}\n\n{_table(headings, rows)}", "scaling": computed}
    return _with_tables("docs/distributed.md", tables)


def measurements() -> str:
    """docs/measurements.md with what benchmarks/gpu_wan.py and benchmarks/peers.py measured."""
    measured = json.loads(PEERS.read_text(encoding="utf-8"))
    machine, versions = measured["machine"], measured["versions"]
    parts = [
        f"{machine['processor']}, {machine['cores']} cores; torch {machine['torch']}, diffusers "
        f"{machine['diffusers']}, torch_remat {versions['torch_remat']}; {measured['rounds']} rounds."
    ]
    for title, (headings, rows) in peers.tables(measured).items():
        parts += [f"{title}:", _table(tuple(headings), map(tuple, rows))]
    return _with_tables("docs/measurements.md", {"gpu": _gpu_tables(), "peers": "\n\n".join(parts)})


GPU_COLUMNS = {
    "over full": ("relative", ".3f", 1),
    "seconds": ("seconds", ".3f", 1),
    "forward alone": ("forward_seconds", ".3f", 1),
    "held": ("held_bytes", ".2f", 2**30),
    "on the host": ("host_bytes", ".2f", 2**30),
    "peak": ("peak_bytes", ".2f", 2**30),
    "planned peak": ("planned_peak_bytes", ".1f", 2**30),
    "copies hidden": ("hidden", ".0%", 1),
    "attention kernels": ("attention_kernels", ".0f", 1),
}
"""Heading -> field of a row of benchmarks/gpu_wan.py, how it is written, its unit."""

FIRST_COLUMNS = {
    "time, over full": ("relative", ".2f", 1),
    "held, GiB": ("held_bytes", ".1f", 2**30),
    "peak": ("peak_bytes", ".1f", 2**30),
    "planned peak": ("planned_peak_bytes", ".1f", 2**30),
}
"""Those of the README."""

FIRST_ROWS = {
    "torch full": "torch, full checkpointing",
    "torch SAC, FastVideo's list": "torch, selective checkpointing (FastVideo's list)",
    "attn_only": "**fastac, `attn_only`**",
    "long_attn_only": "**fastac, `long_attn_only`**",
    "attn_only, offload": "**fastac, `attn_only`, offload**",
    "plan 20 GiB": '**fastac, `plan.within("20GiB")`**',
}
"""Way of benchmarks/gpu_wan.py -> its words in the README."""


def readme() -> str:
    """README.md with the rows that matter most of what benchmarks/gpu_wan.py measured."""
    measured = json.loads(GPU.read_text(encoding="utf-8"))
    case = measured["cases"][0]
    rows = {row["way"]: row for row in case["rows"]}
    chosen = [rows[way] | {"way": words} for way, words in FIRST_ROWS.items() if way in rows]
    caption = _wrapped(f"A training step of {_shapes(case)}, {_conditions(measured)}")
    shares = [_shares(SMALL, size) for size in VIDEOS]
    rows_of_shares = [(f"{share.tokens:,}", *share.of_video()) for share in shares]
    tables = {
        "shares": _table(("video tokens", "FLOPs avoided", "bytes taken back"), rows_of_shares),
        "gpu": f"{caption}\n\n{_gpu_table(chosen, FIRST_COLUMNS)}",
    }
    return _with_tables("README.md", tables)


SMALL, LARGE = "wan2.1-t2v-1.3b", "wan2.1-t2v-14b"

VIDEOS = ((13, 512, 512), (81, 480, 832), (77, 720, 1280))
"""Frames, height and width of the videos for which attention's share of a block is computed."""


@dataclasses.dataclass(frozen=True)
class Shares:
    """What it means for a block to save self-attention ("long"), or attention over the text as well ("all")."""

    tokens: int  # number of video tokens
    flops: dict[str, float]  # saved output -> share of the recompute of full checkpointing that goes away
    bytes: dict[str, float]  # saved output -> its bytes, as a share of those that full checkpointing frees

    def of_video(self) -> tuple[str, str]:
        """The cells of self-attention."""
        return f"{self.flops['long']:.0%}", f"{self.bytes['long']:.1%}"

    def of_text(self) -> tuple[str, str]:
        """The cells of attention over the text."""
        return f"{self.flops['all'] - self.flops['long']:.1%}", f"{self.bytes['all'] - self.bytes['long']:.1%}"


@functools.cache
def _shares(name: str, size: tuple[int, int, int]) -> Shares:
    """The shares for a published model in bf16, from the plan of its first block: the others are equal."""
    frames, height, width = size
    published = configurations.load_configuration(name)
    video = dataclasses.replace(published.default, frames=frames, height=height, width=width, dtype=torch.bfloat16)
    config = configurations.with_layers(published.config, 1)
    with torch.device("meta"):
        model = configurations.build(dataclasses.replace(published, config=config), video.dtype)
        inputs = published.inputs(video)
    plan = fastac.plan(model, inputs)
    rows = {row.policy: row for row in plan.policies}
    recomputed, freed = rows["full"].recomputed_flops, rows["none"].held_bytes - rows["full"].held_bytes
    saving = {"long": rows["long_attn_only"], "all": rows["attn_only"]}
    return Shares(
        video.tokens(published.patch),
        {attention: 1 - row.recomputed_flops / recomputed for attention, row in saving.items()},
        {attention: row.saved_bytes / freed for attention, row in saving.items()},
    )


def why() -> str:
    """docs/why.md with the shares of attention in a block, which `fastac.plan` computes."""
    headings = ("model", "video tokens", "self-attention: FLOPs avoided", "bytes taken back")
    headings += ("text attention: FLOPs avoided", "bytes taken back")
    models = ((SMALL, "Wan 2.1 1.3B"), (LARGE, "Wan 2.1 14B"))
    shares = ((words, _shares(name, size)) for name, words in models for size in VIDEOS)
    rows = ((words, f"{share.tokens:,}", *share.of_video(), *share.of_text()) for words, share in shares)
    return _with_tables("docs/why.md", {"shares": _table(headings, rows)})


def _gpu_tables() -> str:
    """Every case that benchmarks/gpu_wan.py measured."""
    measured = json.loads(GPU.read_text(encoding="utf-8"))
    parts = [_wrapped(f"Training steps with {_conditions(measured)}"), f"```sh\n{measured['command']}\n```"]
    for case in measured["cases"]:
        shapes = f"{_shapes(case)}; timed steps of each way: {case['rounds']}."
        parts += [_wrapped(shapes), _gpu_table(case["rows"], GPU_COLUMNS)]
    return "\n\n".join(parts)


def _shapes(case: Mapping[str, Any]) -> str:
    return f"{case['title']}, {case['dtype']}"


def _conditions(measured: Mapping[str, Any]) -> str:
    """Machine, releases, and what else the file notes."""
    machine = measured["machine"]
    releases = f"torch {machine['torch']}, diffusers {machine['diffusers']}"
    ran = f"random weights, on one {machine['gpu']['name']}, {releases}."
    return " ".join(filter(None, (ran, measured.get("notes"))))


def _gpu_table(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, tuple[str, str, int]]) -> str:
    """Ways and their figures, or why one did not run. Columns without a figure are left out."""
    lines = [[row["way"], *(_gpu_cell(row, *column) for column in columns.values())] for row in rows]
    for row, line in zip(rows, lines, strict=True):
        line[1] = " ".join(row["problem"].split()) or line[1]
    filled = [any(cells) for cells in zip(*lines, strict=True)]
    headings = itertools.compress(("", *columns), filled)
    return _table(tuple(headings), (tuple(itertools.compress(line, filled)) for line in lines))


def _gpu_cell(row: Mapping[str, Any], field: str, form: str, unit: int) -> str:
    """A figure, of several steps the median; nothing where it was not measured."""
    found = row.get(field)
    if found in (None, []):
        return ""
    return format((statistics.median(found) if isinstance(found, list) else found) / unit, form)


def _with_tables(path: str, tables: Mapping[str, str]) -> str:
    """A document with the tables between their marks made anew, by name."""
    text = (ROOT / path).read_text(encoding="utf-8")
    for name, table in tables.items():
        begin, end = f"<!-- Written by docs/generate.py: {name} -->", f"<!-- {name} -->"
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


@functools.cache
def _figures() -> list[figures.Figures]:
    torch.set_num_threads(1)
    return [figures.measured(name) for name in TINY]


QUICK: dict[str, Callable[[], str]] = {
    "docs/backends.md": backends,
    "docs/compile.md": compositions,
    "docs/distributed.md": distributed,
    "docs/measurements.md": measurements,
    "docs/why.md": why,
    "README.md": readme,
}
"""Documents for which no model is trained."""

DOCUMENTS = QUICK | {"docs/models.md": models}


def _tested_with(library: str) -> str:
    packages = runpy.run_path(str(ROOT / "tests" / "backends" / "packages.py"))
    tested = []
    for name in TESTS[library]:
        path = ROOT / "tests" / "backends" / name
        if not path.exists():
            continue
        needed = [path.partition("/")[0] for path in packages["LIBRARIES"].get(path.stem, ())]
        releases = [f"{package} {packages['PACKAGES'][package].version}" for package in needed]
        tested.append(f"[{', '.join(releases) or _torch()}](../{path.relative_to(ROOT).as_posix()})")
    return ", ".join(tested) or "not covered"


def _torch() -> str:
    return f"torch {torch.__version__.partition('+')[0]}"


def _draws(dropout: str | None) -> str:
    return "never" if dropout is None else f"`{dropout}`"


def _note(row: AttentionOp) -> str:
    chosen = " and ".join(f"`{argument}`" for argument in row.selection)
    notes = (
        f"refused: {row.note}" if not row.trains else "",
        f"known by its `{row.with_argument}`" if row.with_argument else "",
        f"{chosen} saved with it" if chosen else "",
        f"attention over as many keys as `{row.coarse}` has entries is recomputed" if row.coarse else "",
    )
    return "; ".join(filter(None, notes))


def _words(verdict: Verdict) -> str:
    return verdict.value.replace("_", " ")


def _document(*parts: str) -> str:
    return "\n\n".join((HEAD, *map(_wrapped, parts))) + "\n"


def _wrapped(text: str) -> str:
    """Prose in lines that people read raw; a table as it is."""
    return text if text.startswith("|") else textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)


def _table(headings: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in rows]
    lines = [list(headings), ["---"] * len(headings), *escaped]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


if __name__ == "__main__":
    for name, write in DOCUMENTS.items():
        (ROOT / name).write_text(write(), encoding="utf-8")
