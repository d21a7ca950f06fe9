"""Policies: values that say which attention calls are saved, and their names. What is saved: tests/engine and hook."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fastac
from fastac import FastacError, Policy
from tests import support

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(
    ("policy", "printed"),
    [
        (Policy(), "attn_only"),
        (Policy("full"), "full"),
        (Policy("attn_only", min_kv=1024), "long_attn_only"),
        (Policy(min_kv=77), "attn_only(min_kv=77)"),
        (Policy(collectives="recompute"), "attn_only(collectives='recompute')"),
        (Policy(min_kv=1024, collectives="recompute"), "attn_only(min_kv=1024, collectives='recompute')"),
        (Policy(linear=("ffn.2", "attn1.*")), "attn_only(linear=ffn.2+attn1.*)"),
        (Policy("linear_only", linear=["q"]), "linear_only(linear=q)"),
        (Policy("full", offload=True), "full(offload=True)"),
        (Policy("long_attn_only"), "long_attn_only"),
        (Policy("long_attn_only", offload=True), "attn_only(min_kv=1024, offload=True)"),
        (Policy("long_attn_only", min_kv=77), "attn_only(min_kv=77)"),
        (Policy(offload="inputs", keep=3), "attn_only(offload='inputs', keep=3)"),
    ],
    ids=str,
)
def test_a_policy_is_a_frozen_value(policy: Policy, printed: str) -> None:
    """Printed by its name, or by what differs from one."""
    assert str(policy) == printed
    written = eval(policy.as_code(), {"fastac": fastac})
    written = Policy(written) if isinstance(written, str) else written
    for other in (copy.deepcopy(policy), support.pickled(policy), Policy(**dataclasses.asdict(policy)), written):
        assert other == policy
        assert {policy: 1}[other] == 1
    with pytest.raises(AttributeError):
        policy.min_kv = 9  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "some"}, r'(?=.*"attn_only")(?=.*min_kv)'),
        ({"name": "attention_only"}, r'Did you mean "attn_only"\?'),
        ({"name": "Full"}, r'Did you mean "full"\?'),
        ({"name": "everything"}, r"^(?!.*Did you mean)"),
        ({"name": "long_attn_only", "min_kv": True}, "min_kv"),
        ({"name": ""}, "attn_only"),
        *(({"min_kv": wrong}, "min_kv") for wrong in (-1, "1024", True)),
        ({"collectives": "none"}, "collectives"),
        *(({"linear": wrong}, "linear") for wrong in ("ffn.0", ("",), None)),
        ({"name": "full", "collectives": "recompute"}, "saves nothing"),
        ({"name": "none", "min_kv": 8}, "saves nothing"),
        ({"name": "full", "linear": ("ffn.0",)}, "saves nothing"),
        ({"name": "linear_only"}, "linear"),
        ({"offload": "host"}, r'True, "attention" and "inputs"'),
        *(({"offload": True, "keep": wrong}, "1 or more") for wrong in (0, True, "2")),
        ({"name": "none", "offload": True}, "nothing of that"),
        ({"name": "full", "offload": "attention"}, "nothing of that"),
        ({"name": "linear_only", "linear": ("*",), "min_kv": 3}, "min_kv"),
    ],
    ids=str,
)
def test_what_is_no_policy(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(FastacError, match=message):
        Policy(**arguments)


@pytest.mark.parametrize(("keys", "executions"), [(1023, 2), (1024, 1)])
def test_long_attn_only_draws_the_line_at_1024_keys(keys: int, executions: int) -> None:
    def region(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return fastac.checkpoint(lambda q: F.scaled_dot_product_attention(q, key, key), query, policy="long_attn_only")

    inputs = {"query": torch.randn(1, 1, 2, 4, requires_grad=True), "key": torch.randn(1, 1, keys, 4)}
    assert support.executions_of(region, inputs) == executions


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("attention", r"'attention'.*\"full\".*\"attn_only\".*\"long_attn_only\""),
        ("attn-only", r'Did you mean "attn_only"\?'),
        (None, "a name"),
        (torch.nn.Linear(2, 2), r"got Linear\b"),  # named by its class: a model would fill the screen
        ({}, "no pattern"),
        ({1: "full", "*": "attn_only"}, r"patterns of block names.*\[1, '\*'\]"),
        ({"*": "attention"}, "'attention'"),
        ({"blocks.0": "full"}, r"'blocks\.1'"),
        ({"transformer_blocks.0": "full", "*": "attn_only"}, r"transformer_blocks\.0.*blocks\.0"),
        ({"blocks": "full", "*": "attn_only"}, r'no block.* Did you mean "blocks\.\*"\?'),  # of whole names
        ({"block.0": "full", "*": "attn_only"}, r'Did you mean "blocks\.0"\?'),
        ({"*": "attn_only", "blocks.0": "full"}, r"first match counts\. The blocks"),
    ],
    ids=str,
)
def test_what_enable_does_not_take(wrong: Any, message: str) -> None:
    with pytest.raises(FastacError, match=message):
        fastac.enable(support.stack(), wrong, blocks="blocks")


def test_patterns_are_of_whole_names_and_a_last_one_may_have_nothing_left() -> None:
    model, policies = support.stack(layers=11), dict.fromkeys(("blocks.1", "blocks.1?", "blocks.*", "*"), "full")
    fastac.enable(model, policies | {"blocks.*": "attn_only"}, blocks="blocks")
    assert support.executions_of(model, support.stack_inputs()) == 22 + 2 * 2


@pytest.mark.parametrize("count", [0, 3, 11])
def test_the_first_blocks_alone(count: int) -> None:
    """By their order in the model, not by that of their names; all of them, or none."""
    model = support.stack(layers=11)
    policies = fastac.first_blocks(model, count, "full", blocks="blocks")
    assert policies == {f"blocks.{i}": "full" if i < count else "none" for i in range(11)}
    fastac.enable(model, policies, blocks="blocks")
    assert fastac.first_blocks(model, count, "full") == policies
    assert support.executions_of(model, support.stack_inputs()) == 22 + 2 * count
    for arguments, message in (((12,), "are 11"), ((-1,), "are 11"), (("3",), "'3'"), ((3, "all"), "'all'")):
        with pytest.raises(FastacError, match=message):
            fastac.first_blocks(model, *arguments, blocks="blocks")


# FASTAC_DISABLE


def test_fastac_disable() -> None:
    """Turns every policy but "none" into torch's checkpoint, with one log line: names, values, mappings, everywhere."""
    program = """
        import importlib, logging
        logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
        import fastac
        from tests import support

        importlib.import_module("fastac.checkpointing").Region = None  # none opens
        executions = support.executions_of
        inputs, model = support.stack_inputs(), support.stack()
        print(executions(support.stack(policy="attn_only"), inputs))
        for policy in (fastac.Policy("attn_only", min_kv=3), {"*": "attn_only"}, {"blocks.0": "none", "*": "full"}):
            fastac.enable(model, policy, blocks="blocks")
            print(executions(model, inputs), fastac.report(model).policy)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        env={**os.environ, "FASTAC_DISABLE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == ["8", "8 full", "8 full", "6 mixed (full, none)"], done.stderr
    assert done.stderr.count("FASTAC_DISABLE") == 1, done.stderr
