"""Cutting batches in any container."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from p2pdpt.errors import SessionError
from p2pdpt.training.batches import batch_length, cut

Pair = namedtuple("Pair", "x y")


@dataclass
class Record:
    x: torch.Tensor
    note: str


T = torch.arange(6).reshape(3, 2)


@pytest.mark.parametrize(
    ("batch", "length"),
    [
        (T, 3),
        ((T, T), 3),
        ({"x": [T], "y": 1}, 3),
        (np.zeros((4, 2)), 4),
        (Record(T, "n"), 3),
        (["a", "b"], 2),
        ([torch.tensor(1), T], 3),
    ],
)
def test_lengths(batch: Any, length: int) -> None:
    assert batch_length(batch) == length


def test_what_has_no_length_is_refused() -> None:
    with pytest.raises(SessionError, match="cannot tell how many samples a batch of type int"):
        batch_length(7)


def test_containers_keep_their_kind() -> None:
    whole = {
        "pair": Pair(T, [T, (T,)]),
        "texts": ["a", "b", "c"],
        "ids": (1, 2, 3),
        "name": "abc",
        "scalar": torch.tensor(7),
        "array": np.arange(3),
        "record": Record(T, "n"),
    }
    part = cut(whole, 1, 3)
    assert isinstance(part["pair"], Pair)
    assert part["pair"].x.tolist() == [[2, 3], [4, 5]]
    assert part["pair"].y[1][0].tolist() == [[2, 3], [4, 5]]
    assert part["texts"] == ["b", "c"]
    assert part["ids"] == (2, 3)
    assert part["name"] == "abc"
    assert part["scalar"].item() == 7
    assert part["array"].tolist() == [1, 2]
    assert part["record"].x.tolist() == [[2, 3], [4, 5]]
    assert part["record"].note == "n"


def test_tensors_are_views() -> None:
    part = cut(T, 1, 2)
    assert part.data_ptr() == T[1].data_ptr()


def test_unequal_lengths_are_refused() -> None:
    with pytest.raises(SessionError, match="first dimensions 3 and 2"):
        cut((T, torch.zeros(2)), 0, 1)


def test_packed_sequences_are_refused() -> None:
    packed = pack_sequence([torch.zeros(2, 1), torch.zeros(1, 1)])
    with pytest.raises(SessionError, match="pack inside the training loop"):
        cut((torch.zeros(2), packed), 0, 1)
