from __future__ import annotations

from p2pdpt.channel import Meta
from p2pdpt.protocol.plan import Plan, Worth
from p2pdpt.protocol.weighting import Fold, Reduction
from p2pdpt.topology import ADD, COPY

# Rank 0 adds the leaves of 0 and 1, rank 2 adds its own and copies the result to rank 0.
WORTH = (
    Worth(ADD, ((True, 0), (True, 1))),
    Worth(ADD, ((False, 0), (True, 2))),
    Worth(COPY, ((False, 1),)),
)


def plan(reduction: Reduction = Reduction.MEAN) -> Plan:
    return Plan(((), (), ()), (0, 0, 0), False, reduction, True, WORTH)


def test_equal_weights_only_divide_at_the_end() -> None:
    done = Meta(1.0, 1.0, 0)
    assert plan().weigh([4.0, 4.0, 4.0]) == [
        Fold(Meta(4.0, 8.0, 2), None, None),
        Fold(done, None, 3.0),
        Fold(done, None, None),
    ]


def test_unequal_weights_multiply_where_they_meet() -> None:
    folds = plan().weigh([1.0, 1.0, 2.0])
    assert folds[0] == Fold(Meta(1.0, 2.0, 2), None, None)
    assert folds[1].scales == (1.0, 2.0)
    assert folds[1].divisor == 4.0


def test_sums_take_no_weights() -> None:
    folds = plan(Reduction.SUM).weigh([1.0, 5.0, 2.0])
    assert [(fold.scales, fold.divisor) for fold in folds] == [(None, None)] * 3


def test_nothing_has_weight() -> None:
    folds = plan().weigh([0.0, 0.0, 0.0])
    assert folds[1].scales == (0.0, 0.0)
    assert folds[1].divisor is None
