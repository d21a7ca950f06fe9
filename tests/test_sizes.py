"""Numbers of bytes, read and written."""

from __future__ import annotations

from typing import Any

import pytest

from fastac.errors import FastacError
from fastac.sizes import parse_bytes, readable_bytes


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0),
        (1234, 1234),
        ("1234", 1234),
        ("1234B", 1234),
        ("24GiB", 24 * 2**30),
        ("24 GB", 24 * 10**9),
        (" 24gib ", 24 * 2**30),
        ("512MiB", 512 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("0.1GB", 10**8),
        ("0.7KiB", 716),
        ("3 KB", 3000),
        ("2TiB", 2**41),
        ("2 TB", 2 * 10**12),
    ],
)
def test_bytes_are_parsed(text: str | int, expected: int) -> None:
    parsed = parse_bytes(text)
    assert parsed == expected
    assert type(parsed) is int


@pytest.mark.parametrize(
    "text", [-1, True, False, 1.5, None, "", "GiB", "-1GiB", "1e9", "24 apples", "24G", "1.5", "1.5 B", "1 2GiB", "nan"]
)
def test_what_is_no_number_of_bytes_is_an_error(text: Any) -> None:
    with pytest.raises(FastacError, match="expected bytes") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 1023, 1024, 1536, 5 * 2**20, 24 * 2**30, 3 * 2**40])
def test_what_is_written_can_be_read(size: int) -> None:
    assert parse_bytes(readable_bytes(size)) == size
