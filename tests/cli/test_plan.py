"""fastac plan: its table, its JSON, its picture, and one clear line for what cannot be planned."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch

import fastac
from fastac import Policy
from fastac.models.published import cast
from tests.cli.conftest import Command
from tests.planning import planned
from tests.support import cells_of

FIXED = ["none", "full", "long_attn_only", "attn_only"]
ROWS = [*FIXED, *(f"{name}, offload" for name in FIXED[1:])]


def as_json(command: Command, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(command("plan", *arguments, "--json").out)
    return found | {"rows": {row["policy"]: row for row in found["policies"]}}


def built(path: str) -> Any:
    """The model of a config.json, without weights."""
    with torch.device("meta"):
        model = diffusers.WanTransformer3DModel.from_config(json.loads(Path(path).read_text()))
    cast(model, torch.bfloat16)
    return model.train()


def enabled_by(code: str, model: Any, inputs: Any = None) -> tuple[Any, fastac.Plan | None]:
    """The policy that lines of code enable, and the plan that they make."""
    policies: list[Any] = []
    stub = SimpleNamespace(plan=fastac.plan, first_blocks=fastac.first_blocks, Policy=Policy)
    stub.enable = lambda transformer, policy: policies.append(policy)
    given = {"fastac": stub, "transformer": model, "inputs": inputs}
    exec(code, given)
    fastac.enable(model, *policies)  # which it takes
    fastac.disable(model)
    return policies[0], given.get("plan")


@pytest.mark.slow
def test_the_command_of_the_readme(tmp_path: Path, command: Command) -> None:
    """Wan 1.3B on 77 frames of 720p."""
    picture = tmp_path / "p.png"
    video = ["--frames", "77", "--height", "720", "--width", "1280"]
    ran = command("plan", "wan2.1-t2v-1.3b", *video, "--budget", "40GiB", "--plot", str(picture))
    assert ran.status == 0
    assert "simulating wan2.1-t2v-1.3b on 77 frames\n" in ran.err
    cells = cells_of(ran.out)
    cells = {policy: row for policy, row in cells.items() if policy in (*ROWS, "within 40.0 GiB")}
    assert list(cells) == [*ROWS, "within 40.0 GiB"]
    assert cells["full"] == ["0", "7.3", "0", "23.2", "1.000", ""]  # as an H100 measured
    assert cells["long_attn_only"][:2] == ["6.3", "13.6"]
    assert cells["within 40.0 GiB"][0] == "40.0"
    readme = (Path(__file__).parents[2] / "README.md").read_text("utf-8")
    unlisted = [policy for policy, row in cells.items() if f"| {row[3]} GiB | {row[4]} |" not in readme]
    assert unlisted == ["full, offload", "long_attn_only, offload"]
    relative = {policy: float(row[-2]) for policy, row in cells.items()}
    assert sorted(relative, key=relative.__getitem__)[:2] == ["none", "within 40.0 GiB"]
    assert 'plan.within("40GiB")' in ran.out.splitlines()[-1]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_plan_as_json(small: list[str], tmp_path: Path, command: Command) -> None:
    """All that a plan has, and where the configuration is from; nothing else is on stdout. With a picture."""
    picture = tmp_path / "plan.svg"
    ran = command("plan", *small, "--budget", "20KiB", "--json", "--plot", str(picture))
    found: dict[str, Any] = json.loads(ran.out)
    assert ran.err.splitlines() == [
        f"building {small[0]} without weights",
        f"simulating {small[0]} on 5 frames",
        "drawing FLOPs over memory",
    ]
    assert found["configuration"] == found["subject"] == small[0]
    assert found["inputs"] == "1 x 5 frames of 32 x 48, 8 tokens of text, bfloat16, all weights, adamw"
    assert [one["policy"] for one in found["policies"]] == [*ROWS, "within 20.0 KiB"]
    assert (found["budget"], found["memory"], found["largest"]) == (20 * 2**10, None, {})
    blocks = {name: Policy(**one) for name, one in found["blocks"].items()}
    assert list(blocks) == ["blocks.0", "blocks.1", "blocks.2"]
    fastac.enable(built(small[0]), blocks)
    assert picture.read_bytes().startswith(b"<?xml")


def test_a_plan_as_a_table(small: list[str], monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    """In 80 columns. With the line of code for the best that fits: here that is no checkpointing."""
    monkeypatch.delenv("COLUMNS")
    options = ["--memory", "256KiB", "--optimizer", "sgd", "--dtype", "fp32", "--checkpointed", "2"]
    table = command("plan", *small, *options).out
    assert 70 < max(map(len, table.splitlines())) <= 80, table
    assert "…" not in table
    cells = cells_of(table)
    title = " ".join(table.split())
    assert "float32, all weights, sgd" in title
    assert "the most frames with which a step fits 256.0 KiB" in title
    assert [int(cells[name][-1]) for name in ("none", "full")] == [9, 17]
    assert "best that fits: none, with 0.768 of the FLOPs of full" in title
    assert table.splitlines()[-1] == "# It fits without checkpointing: nothing is to be enabled."


@pytest.mark.slow
def test_the_best_that_fits(small: list[str], command: Command) -> None:
    """Of all rows, with copies only as fast as the bus; and the lines of code enable it."""
    path = Path(small[0])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"num_layers": 4, "out_channels": 512}))
    sizes = [str(path), "--frames", "33", "--height", "64", "--width", "64", "--text-tokens", "8"]
    # On a bus that is fast enough for this video, beside a device of half the speed.
    options = ["--optimizer", "sgd", "--gpus", "2", "--gbps", "1e7", "--tflops", "200"]
    model = built(small[0])
    inputs = {"hidden_states": torch.empty(1, model.config.in_channels, 9, 8, 8, dtype=torch.bfloat16, device="meta")}
    inputs["timestep"] = torch.ones(1, dtype=torch.int64, device="meta")
    text = (1, 8, model.config.text_dim)
    inputs["encoder_hidden_states"] = torch.empty(text, dtype=torch.bfloat16, device="meta")
    with planned.exact():
        rows = as_json(command, *sizes, *options)["rows"]
        full, offload = (rows[name]["peak_bytes"] for name in ("full", "full, offload"))
        for memory, host in ((offload, 60_000), (full + 50_000, 60_000), (full, 0)):
            asked = [*sizes, *options, "--memory", f"{memory}B", "--host", f"{host}B"]
            found, printed = as_json(command, *asked), command("plan", *asked).out
            best = min(
                (row for row in found["policies"] if row["peak_bytes"] <= memory and row["host_bytes"] <= host),
                key=lambda row: row["flops"],
            )
            assert f"best that fits: {best['policy']}, with {best['relative']:.3f}" in " ".join(printed.split())
            code = "\n".join(line for line in printed.splitlines() if line.startswith(("fastac", "plan =")))
            policies, plan = enabled_by(code, model, inputs)
            if host:
                assert plan is not None
                assert policies == {name: Policy(**one) for name, one in found["blocks"].items()}
                assert planned.row_of(plan, policies).peak_bytes == best["peak_bytes"]
                waits = sum(bool(policy.offload) for policy in policies.values())
                words = f"auto: {waits} of 4 blocks wait on the host; saved: " * bool(waits)
                assert words in " ".join(printed.split())
            else:
                assert policies == "full"
    nothing = " ".join(command("plan", *sizes, "--memory", "1B").out.split())
    assert "no policy fits. Besides " in nothing


def test_a_plan_with_offload(small: list[str], command: Command) -> None:
    """What is within the budget waits in host memory, as the line of code has it; faster devices want faster copies."""
    name = "within 20.0 KiB, offload"
    with planned.exact():
        table = command("plan", *small, "--budget", "20KiB", "--offload", "--tflops", "1000").out
        found = as_json(command, *small, "--budget", "20KiB", "--offload")
    cells = cells_of(table)
    assert table.splitlines()[-1].endswith('.within("20KiB", offload=True))')
    on_host = {policy: row[2] != "0" for policy, row in cells.items() if policy in (*ROWS, name)}
    assert on_host == {policy: "offload" in policy for policy in (*ROWS, name)}
    assert "hidden at 1000 TFLOP/s" in " ".join(table.split())
    assert {one["offload"] for one in found["blocks"].values()} == {True}
    assert found["policies"][4]["host_bytes"] > 0
    rate = found["policies"][-1]["bytes_per_flop"] * 1e6
    assert float(cells[name][5].replace(",", "")) == pytest.approx(rate, rel=0.1)


def test_a_plan_for_some_blocks(small: list[str], command: Command) -> None:
    """Two rows between no checkpointing and all, and the line of code."""
    found = as_json(command, *small, "--checkpointed", "2")["rows"]
    for name in ("full", "attn_only"):
        row = found[f"{name}, first 2 blocks"]
        assert found["none"]["flops"] < row["flops"] < found[name]["flops"]
        assert found["full"]["held_bytes"] < row["held_bytes"] < found["none"]["held_bytes"]
        assert row["saved_bytes"] * 3 == found[name]["saved_bytes"] * 2
    model = built(small[0])
    line = command("plan", *small, "--checkpointed", "2").out.splitlines()[-1]
    assert enabled_by(line, model)[0] == fastac.first_blocks(model, 2, "attn_only")
    assert "there are 3" in command("plan", *small, "--checkpointed", "4").err


def test_a_plot_that_cannot_be_written_is_an_error(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Command
) -> None:
    """A file that the system refuses; and without matplotlib, before anything is simulated."""
    (tmp_path / "folder.svg").mkdir()
    assert "cannot write the plot" in command("plan", *small, "--plot", str(tmp_path / "folder.svg")).err
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    ran = command("plan", *small, "--plot", "p.png")
    assert (ran.status, "pip install matplotlib" in ran.err, "simulating" in ran.err) == (1, True, False)


def test_what_cannot_be_planned_is_one_message(small: list[str], command: Command) -> None:
    """Before anything is simulated, which may take minutes."""
    for arguments, message in (
        (["wan-of-tomorrow"], "'wan-of-tomorrow'"),
        (["wan2.1-1.3b"], 'Did you mean "wan2.1-t2v-1.3b"?'),
        (["wantransformer3d"], 'Did you mean "WanTransformer3DModel"?'),
        (["AllegroTransformer3DModel", "--lora", "4"], "LoRA of AllegroTransformer3DModel"),
        ([*small, "--frames", "10"], "frames 10 is not a multiple of 4"),
        ([*small, "--batch", "0"], "batch is 0"),
        ([*small, "--budget", "much"], "'much'"),
        ([*small, "--budget", "40"], "'40': expected bytes with their unit"),
        ([*small, "--memory", "80G"], "'80G'"),
        ([*small, "--memory", "80GiB", "--host", "64"], "'64'"),
        ([*small, "--memory", "80GiB", "--offload"], "plan --offload is for the row of --budget"),
        ([*small, "--gpus", "3", "--context-parallel", "2"], "does not divide 3 GPUs"),
        ([*small, "--plot", "nowhere/p.png"], "there is no folder"),
        ([*small, "--plot", "p.txt"], ".png"),
    ):
        ran = command("plan", *arguments)
        assert (ran.status, ran.out) == (1, ""), arguments
        *_, said = ran.err.splitlines()  # after what is being done
        assert said.startswith("fastac: "), ran.err
        assert message in said, ran.err
        assert "simulating" not in ran.err, arguments
    ran = command("plan", "Wan-AI/Wan2.1-T2V-14B-Diffusers")
    assert ran.status == 1
    *_, first, second = ran.err.splitlines()
    assert first.startswith("hf download Wan-AI/Wan2.1-T2V-14B-Diffusers transformer/config.json --local-dir ")
    assert second == f"fastac plan {first.split()[-1]}/transformer/config.json"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": "40"}, "cannot be built as it is configured.*TypeError"),
        ({"num_layers": 10**9}, "more than 100 blocks"),
        ({"patch_size": [1, 0, 2]}, "ZeroDivisionError"),
        ({"added_kv_proj_dim": 7, "image_dim": 7}, "same reduction dim"),  # torch logs a traceback of its own
        ({"_class_name": ["WanTransformer3DModel"]}, "cannot make the inputs"),
        ("[" * 10**6, ""),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_config_json_of_strangers(
    changes: dict[str, Any] | str,
    message: str,
    small: list[str],
    command: Command,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = Path(small[0])
    path.write_text(changes if isinstance(changes, str) else json.dumps(json.loads(path.read_text()) | changes))
    ran = command("plan", *small, "--text-tokens", "512")
    assert (ran.status, ran.out) == (1, "")
    *_, said = ran.err.splitlines()
    assert said.startswith("fastac: "), ran.err
    assert not caplog.records
    assert re.search(message, said), ran.err
