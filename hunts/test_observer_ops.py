"""Every op of torch's own test data under the modes of a first region: the same step, bit for bit.

Each sample runs as it is, on conjugate or negative views of its inputs, and in place. What two runs without a mode do
not agree on is left out.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from hunts.test_torch_data import CHUNKS
from tests.diagnosis.observed import MODES
from tests.diagnosis.observed_ops import AT_TIMES, DTYPES, OTHER_PATH, changes_of_op
from tests.torch_data import SAMPLES, torch_data

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_ops(chunk: int) -> None:
    counts: Counter[str] = Counter()
    wrong: dict[str, list[str]] = {}
    ops: list[Any] = torch_data()[0][chunk::CHUNKS]
    for op in ops:
        if changed := changes_of_op(op, DTYPES, SAMPLES, MODES, counts):
            wrong[op.full_name] = changed
    print(counts)
    expected = {op.full_name for op in ops} & OTHER_PATH.keys()
    unknown = [line for name, lines in wrong.items() if name not in expected | AT_TIMES.keys() for line in lines]
    assert not unknown, "\n".join(unknown)
    assert not expected - wrong.keys(), "they no longer differ: remove them from OTHER_PATH"
