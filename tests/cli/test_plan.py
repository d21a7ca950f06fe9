"""fastac plan: its table, its JSON, its picture, and one clear line for what cannot be planned."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import fastac
from fastac import cli
from fastac.cli.plan import add_arguments, lines_of
from fastac.models import published as configurations
from fastac.planning import Plan
from fastac.planning.forecast import ROWS
from fastac.planning.plans import make_plan
from fastac.planning.video import Training, plan_video
from fastac.policy import Policy
from tests.support import cells_of


@pytest.mark.slow
def test_the_command_of_the_readme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Wan 1.3B on 77 frames of 720p, in less than a minute."""
    picture = tmp_path / "p.png"
    video = ["--frames", "77", "--height", "720", "--width", "1280"]
    begin = time.process_time()
    assert cli.main(["plan", "wan2.1-t2v-1.3b", *video, "--budget", "40GiB", "--plot", str(picture)]) == 0
    assert time.process_time() - begin < 60
    captured = capsys.readouterr()
    assert "simulating wan2.1-t2v-1.3b on 77 frames\n" in captured.err
    cells = cells_of(captured.out)
    cells = {policy: row for policy, row in cells.items() if policy in (*ROWS, "within 40.0 GiB")}
    assert list(cells) == [*ROWS, "within 40.0 GiB"]
    assert cells["full"] == ["0", "7.3", "0", "23.2", "1.000", ""]  # as an H100 measured
    assert cells["long_attn_only"][:2] == ["6.3", "13.6"]
    assert cells["within 40.0 GiB"][0] == "40.0"
    relative = {policy: float(row[-2]) for policy, row in cells.items()}
    assert sorted(relative, key=relative.__getitem__)[:2] == ["none", "within 40.0 GiB"]
    assert 'plan.within("40GiB")' in captured.out.splitlines()[-1]
    assert picture.read_bytes().startswith(b"\x89PNG\r\n")


def test_a_plan_as_json(small: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All that a plan has, and where the configuration is from; nothing else is on stdout. With a picture."""
    picture = tmp_path / "plan.svg"
    assert cli.main(["plan", *small, "--budget", "20KiB", "--json", "--plot", str(picture)]) == 0
    captured = capsys.readouterr()
    found: dict[str, Any] = json.loads(captured.out)
    building, simulating, drawing = captured.err.splitlines()
    assert building == f"building {small[0]} without weights"
    assert simulating == f"simulating {small[0]} on 5 frames"
    assert drawing == "drawing FLOPs over memory"
    assert found["configuration"] == found["subject"] == small[0]
    assert found["inputs"] == "1 x 5 frames of 32 x 48, 8 tokens of text, bfloat16, all weights, adamw"
    assert [one["policy"] for one in found["policies"]] == [*ROWS, "within 20.0 KiB"]
    assert (found["budget"], found["memory"], found["largest"]) == (20 * 2**10, None, {})
    blocks = {name: Policy(**one) for name, one in found["blocks"].items()}
    assert list(blocks) == ["blocks.0", "blocks.1", "blocks.2"]
    model: Any = configurations.build(configurations.load_configuration(small[0]))
    fastac.enable(model, blocks)
    assert picture.read_bytes().startswith(b"<?xml")


def test_a_plan_as_a_table(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In 80 columns. With the line of code for the best that fits: here that is no checkpointing."""
    monkeypatch.delenv("COLUMNS")
    assert cli.main(["plan", *small, "--memory", "256KiB", "--optimizer", "sgd", "--dtype", "fp32"]) == 0
    table = capsys.readouterr().out
    assert 70 < max(map(len, table.splitlines())) <= 80, table
    assert "…" not in table
    cells = cells_of(table)
    title = " ".join(table.split())
    assert "float32, all weights, sgd" in title
    assert "the most frames with which a step fits 256.0 KiB" in title
    assert [int(cells[name][-1]) for name in ("none", "full")] == [9, 17]
    assert "best that fits: none, with 0.768 of the FLOPs of full" in title
    assert table.splitlines()[-1] == "# It fits without checkpointing: nothing is to be enabled."


def test_the_best_that_fits(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all rows, with copies only as fast as the bus; and the lines of code enable it."""
    monkeypatch.setattr("fastac.engine.offload.SMALLEST", 0)
    Path(small[0]).write_text(json.dumps(json.loads(Path(small[0]).read_text()) | {"num_layers": 4}))
    configuration = configurations.load_configuration(small[0])
    video = dataclasses.replace(configuration.default, frames=33, height=64, width=64, text_tokens=8)
    found = plan_video(configuration, video, Training(optimizer="sgd"))
    model: Any = configurations.build(configuration, video.dtype)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    arguments = ["model", "--checkpointed", "2", "--optimizer", "sgd", "--gpus", "2", "--memory"]
    given = {"fastac": fastac, "transformer": model, "inputs": {}}

    def lines(plan: Plan, *options: str) -> list[str]:
        return lines_of(plan, parser.parse_args([*arguments, *options]))

    def enabled(code: list[str]) -> Any:
        with monkeypatch.context() as patched:
            patched.setattr(fastac, "plan", lambda *args, **kwargs: found)  # it was simulated already
            exec("\n".join(code), given)
        state = fastac.hook.enabled_on(model)
        fastac.disable(model)
        if state is None or isinstance(state.policy, Policy):
            return "none" if state is None else state.policy
        return {name: state.policy_of(block) for name, block in state.blocks.items()}

    # The best in three places, on a bus that is fast enough for this video, beside a device of half the speed.
    memory = found.forecast.peak("full") + 50_000
    rates: dict[str, float] = {"gbps": 1e7, "tflops": 200}
    options = [f"{memory}B", "--gbps", "1e7", "--tflops", "200"]
    planned = 'plan = fastac.plan(transformer, inputs, optimizer="sgd", gpus=2)'
    for host, code in ((0, ""), (60_000, ', host="60000B", gbps=2e+07')):
        plan = make_plan(found.forecast, "", "", memory=memory, host=host, **rates)
        assert plan.best is plan.policies[-1]
        assert (plan.best.policy, plan.best.host_bytes > 0) == ("auto", host > 0)
        written = lines(plan, *options, "--host", f"{host}B")
        assert written == [planned, f'fastac.enable(transformer, plan.within(memory="{memory}B"{code}))']
        assert enabled(written) == plan.blocks
        waits = sum(bool(policy.offload) for policy in plan.blocks.values())
        assert f"auto: {waits} of 4 blocks wait on the host; saved: " * bool(host) in " ".join(str(plan).split())
    # Nothing has to wait on a usual bus.
    plan = make_plan(found.forecast, "", "", memory=memory)
    assert plan.best.host_bytes == 0
    assert lines(plan, f"{memory}B")[1] == f'fastac.enable(transformer, plan.within(memory="{memory}B"))'
    assert "no policy fits. Besides " in " ".join(str(make_plan(found.forecast, "", "", memory=1)).split())

    rows = [*found.policies, dataclasses.replace(found.policies[0], policy="attn_only, first 2 blocks")]
    first = {f"blocks.{number}": Policy("attn_only" if number < 2 else "none") for number in range(4)}
    expected = ROWS | {"none": "none", "attn_only, first 2 blocks": first}
    for name, policy in expected.items():
        fits = tuple(dataclasses.replace(one, peak_bytes=1 if one.policy == name else 2) for one in rows)
        assert enabled(lines(dataclasses.replace(found, policies=fits, memory=1), "1B")) == policy
    # Copies that are waited for are worse than any recompute, and bytes that the host does not have are none.
    waits = dataclasses.replace(found.policies[3], peak_bytes=1, host_bytes=2, bytes_per_flop=1.0)
    full = dataclasses.replace(found.policies[1], peak_bytes=1)
    for fits, host, best in (((waits, full), 2, full), ((waits,), 2, waits), ((waits,), 1, None), ((), 1, None)):
        assert dataclasses.replace(found, policies=fits, memory=1, host=host).best is best


def test_a_plan_with_offload(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is within the budget waits in host memory, as the line of code has it; faster devices want faster copies."""
    monkeypatch.setattr("fastac.engine.offload.SMALLEST", 0)
    assert cli.main(["plan", *small, "--budget", "20KiB", "--offload", "--tflops", "1000"]) == 0
    table = capsys.readouterr().out
    cells = cells_of(table)
    assert table.splitlines()[-1].endswith('.within("20KiB", offload=True))')
    cells = {name: row for name, row in cells.items() if name in (*ROWS, "within 20.0 KiB, offload")}
    on_host = {name: row[2] != "0" for name, row in cells.items()}
    assert on_host == {name: "offload" in name for name in (*ROWS, "within 20.0 KiB, offload")}
    assert "hidden at 1000 TFLOP/s" in " ".join(table.split())
    assert cli.main(["plan", *small, "--budget", "20KiB", "--offload", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {Policy(**one).offload for one in found["blocks"].values()} == {True}
    assert found["policies"][4]["host_bytes"] > 0
    rate = found["policies"][-1]["bytes_per_flop"] * 1e6
    assert float(cells["within 20.0 KiB, offload"][5].replace(",", "")) == pytest.approx(rate, rel=0.1)


def test_a_plan_for_some_blocks(small: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Two rows between no checkpointing and all, and the line of code."""
    assert cli.main(["plan", *small, "--checkpointed", "2", "--memory", "256KiB", "--json"]) == 0
    found = {one["policy"]: one for one in json.loads(capsys.readouterr().out)["policies"]}
    for name in ("full", "attn_only"):
        row = found[f"{name}, first 2 blocks"]
        assert found["none"]["flops"] < row["flops"] < found[name]["flops"]
        assert found["full"]["held_bytes"] < row["held_bytes"] < found["none"]["held_bytes"]
        assert row["saved_bytes"] * 3 == found[name]["saved_bytes"] * 2
    assert cli.main(["plan", *small, "--checkpointed", "2"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    model: Any = configurations.build(configurations.load_configuration(small[0]))
    exec(line, {"fastac": fastac, "transformer": model})
    assert cli.main(["plan", *small, "--checkpointed", "4"]) == 1
    assert "there are 3" in capsys.readouterr().err


def test_a_plot_that_cannot_be_written_is_an_error(
    small: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is simulated; but for a file that the system refuses."""
    (tmp_path / "folder.svg").mkdir()
    assert cli.main(["plan", *small, "--plot", str(tmp_path / "folder.svg")]) == 1
    assert "cannot write the plot" in capsys.readouterr().err
    monkeypatch.setattr("fastac.planning.forecast.simulate", None)
    for name, message in (("nowhere/p.png", "there is no folder"), ("p.txt", ".png"), ("p", ".png")):
        assert cli.main(["plan", *small, "--plot", str(tmp_path / name)]) == 1
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert cli.main(["plan", *small, "--plot", str(tmp_path / "p.png")]) == 1
    assert "pip install matplotlib" in capsys.readouterr().err


def test_what_cannot_be_planned_is_one_message(
    small: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before anything is simulated, which may take minutes."""
    monkeypatch.setattr("fastac.planning.forecast.simulate", None)
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
    ):
        assert cli.main(["plan", *arguments]) == 1, arguments
        captured = capsys.readouterr()
        assert captured.out == "", arguments
        *_, said = captured.err.splitlines()  # after what is being done
        assert said.startswith("fastac: "), captured.err
        assert message in said, captured.err
    assert cli.main(["plan", "Wan-AI/Wan2.1-T2V-14B-Diffusers"]) == 1
    *_, first, second = capsys.readouterr().err.splitlines()
    assert first.startswith("hf download Wan-AI/Wan2.1-T2V-14B-Diffusers transformer/config.json --local-dir ")
    assert second == f"fastac plan {first.split()[-1]}/transformer/config.json"


def test_training_is_what_the_options_say(small: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Training] = []

    def noted(configuration: object, video: object, training: Training, **options: object) -> Any:
        seen.append(training)
        raise fastac.FastacError("enough")

    monkeypatch.setattr("fastac.cli.plan.plan_video", noted)
    options = ["--lora", "8", "--optimizer", "adamw8bit", "--gpus", "8", "--context-parallel", "4"]
    assert cli.main(["plan", *small, *options]) == 1
    assert seen == [Training(8, "adamw8bit", 8, 4)]


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
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = Path(small[0])
    path.write_text(changes if isinstance(changes, str) else json.dumps(json.loads(path.read_text()) | changes))
    started = time.perf_counter()
    assert cli.main(["plan", *small, "--text-tokens", "512"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    *_, said = captured.err.splitlines()
    assert said.startswith("fastac: "), captured.err
    assert not caplog.records
    assert re.search(message, said), captured.err
    assert time.perf_counter() - started < 30
