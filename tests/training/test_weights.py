"""What an exchange weighs, over any sequence of batches and backwards."""

from __future__ import annotations

import pytest

from p2pdpt.errors import SessionError
from p2pdpt.training.weights import SampleLedger


def test_without_batches_every_exchange_weighs_one() -> None:
    ledger = SampleLedger()
    assert [ledger.take(), ledger.take()] == [1.0, 1.0]
    assert ledger.samples == 0


def test_a_batch_weighs_its_samples() -> None:
    ledger = SampleLedger()
    ledger.hand(8)
    assert ledger.take() == 8
    ledger.hand(3)
    assert ledger.take() == 3
    assert ledger.samples == 11


def test_a_second_exchange_of_one_batch_weighs_the_same() -> None:
    ledger = SampleLedger()
    ledger.hand(8)
    assert [ledger.take(), ledger.take()] == [8, 8]
    assert ledger.samples == 8


def test_local_backwards_add_up() -> None:
    ledger = SampleLedger()
    for samples in (8, 8, 4):
        ledger.hand(samples)
        ledger.touch()
        ledger.touch()
    assert ledger.take() == 20


def test_a_batch_that_no_backward_used_does_not_count() -> None:
    ledger = SampleLedger()
    ledger.hand(8)
    ledger.hand(5)
    assert ledger.take() == 5


def test_a_weight_replaces_the_samples_of_one_batch() -> None:
    ledger = SampleLedger()
    ledger.hand(8)
    ledger.override(100)
    ledger.override(120)
    assert ledger.take() == 120
    assert ledger.samples == 8
    ledger.hand(8)
    assert ledger.take() == 8


def test_a_weight_without_batches() -> None:
    ledger = SampleLedger()
    ledger.override(2.5)
    ledger.touch()
    ledger.override(0)
    assert ledger.take() == 2.5
    ledger.override(7)
    assert ledger.take() == 7
    assert ledger.samples == 0


def test_a_repeated_batch_weighs_nothing_whatever_is_said() -> None:
    ledger = SampleLedger()
    ledger.hand(8)
    assert ledger.take() == 8
    ledger.hand(0)
    ledger.override(50)
    assert ledger.take() == 0
    ledger.override(50)
    assert ledger.take() == 0
    ledger.hand(2)
    ledger.override(6)
    assert ledger.take() == 6


@pytest.mark.parametrize("weight", [-1.0, float("nan"), float("inf")])
def test_impossible_weights_are_refused(weight: float) -> None:
    with pytest.raises(SessionError, match="0, or a number from 1e-12 to 1e"):
        SampleLedger().override(weight)
