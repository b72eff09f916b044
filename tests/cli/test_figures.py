from __future__ import annotations

import pytest

from p2pdpt.cli.figures import human_bytes, human_number, human_seconds, parse_size, plain_table


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (12_345_678, "12.3 MB"), (5e15, "5000 TB")],
)
def test_bytes(count: float, text: str) -> None:
    assert human_bytes(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1.234, "1.23"), (123.4, "123"), (98765.4, "98765"), (0.01234, "0.0123")],
)
def test_numbers(value: float, text: str) -> None:
    assert human_number(value) == text


def test_a_number_that_is_none() -> None:
    assert human_number(float("nan")) == "nan"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12e-6, "12.0 µs"),
        (0.25, "250 ms"),
        (61.23, "61.2 s"),
        (125, "2 min 05 s"),
        (7260, "2 h 01 min"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert human_seconds(seconds) == text


@pytest.mark.parametrize(
    ("text", "size"),
    [("512", 512), ("4K", 4096), ("16M", 16 << 20), ("1GiB", 1 << 30), ("0.5k", 512)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "K", "0", "-4K", "4X", "1.5", "nan", "inf"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a number of bytes|could not convert"):
        parse_size(text)


def test_a_table_is_aligned() -> None:
    assert plain_table(("node", "steps"), [("a", "1"), ("node10", "100")]) == [
        "node    steps",
        "a           1",
        "node10    100",
    ]
