"""Policies: values that say which attention calls are saved, and their names."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import fastac
from fastac.policy import LONG_MIN_KV, NAMED, Policy, resolve, resolve_blocks

ROOT = Path(__file__).resolve().parent.parent


def test_attn_only_saves_every_call() -> None:
    assert all(Policy("attn_only").saves(keys) for keys in (1, 77, 1 << 20))


def test_full_saves_nothing() -> None:
    assert Policy("full").saves_nothing
    assert not any(Policy("full").saves(keys) for keys in (1, 77, 1 << 20))


def test_long_attn_only_draws_the_line_at_1024_keys() -> None:
    long = NAMED["long_attn_only"]
    assert LONG_MIN_KV == 1024
    assert [long.saves(keys) for keys in (512, 1023, 1024, 72_000)] == [False, False, True, True]
    assert not long.saves_nothing


def test_min_kv_is_the_fewest_keys_that_are_saved() -> None:
    assert [Policy("attn_only", min_kv=10).saves(keys) for keys in (9, 10, 11)] == [False, True, True]


def test_the_default_is_attn_only() -> None:
    assert Policy() == Policy("attn_only", min_kv=0) == NAMED["attn_only"]


@pytest.mark.parametrize("name", ["none", "attention_only", "ATTN_ONLY", "", "long_attn_only"])
def test_policy_of_an_unknown_name(name: str) -> None:
    """`long_attn_only` is a named value, not a kind: Policy("attn_only", min_kv=1024)."""
    with pytest.raises(fastac.FastacError, match="no such policy") as error:
        Policy(name)
    assert '"attn_only"' in str(error.value)
    assert "min_kv" in str(error.value)


@pytest.mark.parametrize("min_kv", [-1, 1.5, "1024", None, True])
def test_min_kv_must_be_a_number_of_keys(min_kv: object) -> None:
    with pytest.raises(fastac.FastacError, match="min_kv"):
        Policy("attn_only", min_kv=min_kv)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["none", "", None, True])
def test_collectives_are_saved_or_recomputed(wrong: object) -> None:
    with pytest.raises(fastac.FastacError, match='there are "save" and "recompute"'):
        Policy("attn_only", collectives=wrong)  # type: ignore[arg-type]
    assert [policy.saves_collectives for policy in NAMED.values()] == [False, True, True]
    assert not Policy("attn_only", collectives="recompute").saves_collectives
    with pytest.raises(fastac.FastacError, match="full saves nothing"):
        Policy("full", collectives="recompute")


def test_what_differs_from_a_named_policy_is_printed() -> None:
    assert str(Policy(collectives="recompute")) == "attn_only(collectives='recompute')"
    assert str(Policy(min_kv=1024, collectives="recompute")) == "attn_only(min_kv=1024, collectives='recompute')"


def test_full_with_min_kv_has_no_meaning() -> None:
    with pytest.raises(fastac.FastacError, match="full saves nothing"):
        Policy("full", min_kv=8)


def test_a_policy_is_a_frozen_value() -> None:
    one = Policy("attn_only", min_kv=8)
    assert one == Policy("attn_only", min_kv=8)
    assert hash(one) == hash(Policy("attn_only", min_kv=8))
    assert copy.deepcopy(one) == one
    assert pickle.loads(pickle.dumps(one)) == one
    with pytest.raises(AttributeError):
        one.min_kv = 9  # type: ignore[misc]


@pytest.mark.parametrize("name", NAMED)
def test_a_named_policy_is_printed_by_its_name(name: str) -> None:
    assert str(resolve(name)) == name


def test_a_policy_without_a_name_is_printed_with_its_bound() -> None:
    assert str(Policy("attn_only", min_kv=77)) == "attn_only(min_kv=77)"


def test_resolve_keeps_a_value() -> None:
    mine = Policy("attn_only", min_kv=5)
    assert resolve(mine) is mine


def test_resolve_names_what_there_is() -> None:
    with pytest.raises(fastac.FastacError) as error:
        resolve("attention")
    message = str(error.value)
    assert "'attention'" in message
    assert all(f'"{name}"' in message for name in NAMED)


@pytest.mark.parametrize("wrong", [None, 3, ["attn_only"], Policy])
def test_resolve_of_something_else(wrong: object) -> None:
    with pytest.raises(fastac.FastacError, match="expected a name"):
        resolve(wrong)  # type: ignore[arg-type]


# Linear modules and budgets


@pytest.mark.parametrize("linear", ["ffn.0", ("",), (3,), None, ("ffn.0", None), {"ffn.0"}])
def test_linear_is_a_tuple_of_names(linear: object) -> None:
    with pytest.raises(fastac.FastacError, match=r"a tuple of names was expected"):
        Policy("attn_only", linear=linear)  # type: ignore[arg-type]


def test_linear_may_be_a_list() -> None:
    """As JSON has it; what is held is a tuple, so that policies can be compared and be keys."""
    policy = Policy("attn_only", linear=["ffn.0"])
    assert policy.linear == ("ffn.0",)
    assert {policy: 1}[Policy("attn_only", linear=("ffn.0",))] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "full", "linear": ("ffn.0",)}, "full saves nothing"),
        ({"name": "linear_only"}, "must be there"),
        ({"name": "linear_only", "linear": ()}, "must be there"),
        ({"name": "linear_only", "linear": ("*",), "min_kv": 3}, "min_kv has no meaning"),
        ({"name": "budget"}, r"of how many bytes\? Policy\.budget"),
        ({"name": "attn_only", "limit": 5}, "these are of Policy.budget"),
        ({"name": "attn_only", "per_block": True}, "these are of Policy.budget"),
        ({"name": "budget", "limit": "24GiB"}, "a number of bytes"),
        ({"name": "budget", "limit": 2.5}, "a number of bytes"),
        ({"name": "budget", "limit": True}, "a number of bytes"),
        ({"name": "budget", "limit": -1}, "a number of bytes"),
        ({"name": "budget", "limit": 100, "min_kv": 3}, "budget"),
        ({"name": "budget", "limit": 100, "linear": ("ffn.0",)}, "budget"),
    ],
    ids=str,
)
def test_arguments_that_have_no_meaning_together(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(fastac.FastacError, match=message):
        Policy(**arguments)


@pytest.mark.parametrize("arguments", [{}, {"total": 1, "per_block": 1}, {"total": "1GiB", "per_block": "1MiB"}])
def test_a_budget_is_of_all_blocks_or_of_each(arguments: dict[str, Any]) -> None:
    with pytest.raises(fastac.FastacError, match="one of two"):
        Policy.budget(**arguments)


def test_what_policies_save() -> None:
    alone, budget = Policy("linear_only", linear=("ffn.*",)), Policy.budget(1 << 30)
    assert not alone.saves(72_000)
    assert not alone.saves_nothing
    assert alone.saves_collectives
    assert budget.saves(1)
    assert budget.is_budget
    assert not any(one.is_budget for one in (alone, *NAMED.values()))
    assert not Policy.budget(1, collectives="recompute").saves_collectives


def test_policies_of_linear_modules_and_budgets_are_printed_with_them() -> None:
    assert str(Policy(linear=("ffn.2", "attn1.*"))) == "attn_only(linear=ffn.2+attn1.*)"
    assert str(Policy(min_kv=9, linear=("*",))) == "attn_only(min_kv=9, linear=*)"
    assert str(Policy("linear_only", linear=("q",))) == "linear_only(linear=q)"
    assert str(Policy.budget("1GiB")) == "budget(1.0 GiB)"
    assert str(Policy.budget(per_block="2MiB", linear=False)) == "budget(2.0 MiB per block, linear=False)"


def test_budgets_are_values() -> None:
    assert Policy.budget("1GiB") == Policy.budget(1 << 30)
    assert hash(Policy.budget("1GiB")) == hash(Policy.budget(1 << 30))
    assert Policy.budget("1GiB") != Policy.budget(per_block="1GiB")
    assert Policy.budget("1GiB") != Policy.budget("1GiB", linear=False)
    assert pickle.loads(pickle.dumps(Policy.budget("1GiB"))) == Policy.budget("1GiB")


# Per block


def blocks(count: int = 3) -> dict[str, torch.nn.Module]:
    return {f"blocks.{i}": torch.nn.Linear(1, 1) for i in range(count)}


def test_the_first_matching_pattern_counts() -> None:
    named = blocks()
    policies = resolve_blocks({"blocks.0": "full", "*": Policy("attn_only", min_kv=9)}, named)
    assert [str(policies[block]) for block in named.values()] == ["full", "attn_only(min_kv=9)", "attn_only(min_kv=9)"]


def test_patterns_are_of_whole_names() -> None:
    named = {f"blocks.{i}": torch.nn.Linear(1, 1) for i in (1, 10)}
    policies = resolve_blocks({"blocks.1": "full", "blocks.1?": "attn_only"}, named)
    assert [str(policies[block]) for block in named.values()] == ["full", "attn_only"]


def test_a_block_without_a_pattern() -> None:
    with pytest.raises(fastac.FastacError, match=r"no pattern for block 'blocks\.1'"):
        resolve_blocks({"blocks.0": "full"}, blocks())


def test_a_pattern_without_a_block() -> None:
    with pytest.raises(fastac.FastacError, match=r'"transformer_blocks\.0" matches no block.*"blocks\.0"'):
        resolve_blocks({"transformer_blocks.0": "full", "*": "attn_only"}, blocks())


def test_a_pattern_behind_a_wider_one() -> None:
    """The first match counts. A last "*" may have nothing left."""
    with pytest.raises(
        fastac.FastacError, match=r'"blocks\.0" counts for no block.* put the narrower first, "\*" last'
    ):
        resolve_blocks({"*": "attn_only", "blocks.0": "full"}, blocks())
    assert str(resolve_blocks({"blocks.*": "full", "*": "attn_only"}, blocks())) == "full"


def test_something_else_in_the_place_of_a_policy() -> None:
    """Named by its class: a model would fill the screen."""
    with pytest.raises(fastac.FastacError, match=r"mapping of block names to these, got Linear$"):
        resolve(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


def test_a_mapping_to_an_unknown_policy() -> None:
    with pytest.raises(fastac.FastacError, match="no such policy"):
        resolve_blocks({"*": "attention"}, blocks())


def test_an_empty_mapping() -> None:
    with pytest.raises(fastac.FastacError, match="no pattern"):
        resolve_blocks({}, blocks())


def test_mixed_policies_are_printed_together() -> None:
    assert str(resolve_blocks({"blocks.0": "full", "*": "attn_only"}, blocks())) == "mixed (attn_only, full)"


# FASTAC_DISABLE


def run_disabled(value: str, code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd=ROOT,
        env={**os.environ, "FASTAC_DISABLE": value},
        capture_output=True,
        text=True,
        check=False,
    )


def test_fastac_disable_turns_every_policy_into_full_with_one_log_line() -> None:
    """Names, values and mappings, through enable and through checkpoint: no attention is saved by any of them."""
    done = run_disabled(
        "1",
        """
        import logging
        logging.basicConfig(format="%(name)s %(levelname)s %(message)s")
        import torch, fastac
        from fastac.engine import tape
        from fastac.policy import Policy, resolve, resolve_blocks
        from tests import support

        assert str(resolve("attn_only")) == str(resolve(Policy("attn_only", min_kv=3))) == "full"
        mixed = resolve_blocks({"*": "attn_only"}, {"blocks.0": torch.nn.Linear(1, 1)})
        assert {str(p) for p in mixed.values()} == {"full"}

        support.count_cpu_attention()
        def executions(model, inputs):
            support.executions.clear()
            support.train_step(model, inputs)
            return support.executions[support.CPU_ATTENTION]

        inputs = support.stack_inputs()
        assert executions(support.stack(policy="attn_only"), inputs) == 8, "a policy by name"
        assert executions(support.stack(policy=Policy("attn_only")), inputs) == 8, "a policy by value"
        model, inputs = support.build("WanTransformer3DModel")
        fastac.enable(model, "attn_only")
        assert executions(model, inputs) == 8, "enable"
        assert fastac.report(model).policy == "full"
        """,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("fastac ")]
    assert len(lines) == 1, done.stderr
    assert "FASTAC_DISABLE" in lines[0]


@pytest.mark.parametrize("value", ["0"])
def test_fastac_disable_set_to_no(value: str) -> None:
    done = run_disabled(value, "from fastac.policy import resolve; print(resolve('attn_only'))")
    assert done.stdout.strip() == "attn_only", done.stderr
    assert "FASTAC_DISABLE" not in done.stderr
