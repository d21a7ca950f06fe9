"""Numbers of bytes, read and written."""

from __future__ import annotations

from typing import Any

import pytest

from fastac.errors import FastacError, readable_bytes
from fastac.planning.plans import parse_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (1234, 1234),
        ("1234B", 1234),
        ("24 GB", 24 * 10**9),
        (" 24gib ", 24 * 2**30),
        ("1.5GiB", 3 * 2**29),
        ("0.7KiB", 716),
        ("2TiB", 2**41),
    ],
)
def test_bytes_are_parsed(text: str | int, expected: int) -> None:
    parsed = parse_bytes(text)
    assert parsed == expected
    assert type(parsed) is int


@pytest.mark.parametrize(
    "text", [-1, True, 1.5, None, "", "GiB", "-1GiB", "1e9", "24 apples", "24G", "1.5", "1.5B", "40", "nan"]
)
def test_what_is_no_number_of_bytes_is_an_error(text: Any) -> None:
    with pytest.raises(FastacError, match=repr(text)):
        parse_bytes(text)


@pytest.mark.parametrize("size", [0, 1023, 1536, 24 * 2**30, 3 * 2**40])
def test_what_is_written_can_be_read(size: int) -> None:
    assert parse_bytes(readable_bytes(size)) == size
