"""Planning buckets, and gradients as views of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p2pdpt.dtypes import DTYPES
from p2pdpt.errors import SessionError
from p2pdpt.memory import allocate
from p2pdpt.training.buckets import (
    GradientBucket,
    Planned,
    area_tensor,
    carrier,
    plan_buckets,
    same_memory,
)

F32, F16 = DTYPES["float32"], DTYPES["float16"]


def test_buckets_run_backwards_and_the_first_is_small() -> None:
    plan = plan_buckets([(F32, 4)] * 6, limit=48, first=16)
    assert [(dtype.name, [item.index for item in items]) for dtype, items in plan] == [
        ("float32", [5]),
        ("float32", [4, 3, 2]),
        ("float32", [1, 0]),
    ]
    assert plan[1][1] == [Planned(4, 0, 4), Planned(3, 4, 4), Planned(2, 8, 4)]


def test_every_type_has_buckets_of_its_own() -> None:
    plan = plan_buckets([(F32, 2), (F16, 2), (F32, 2)], limit=1 << 20)
    assert [(dtype.name, [item.index for item in items]) for dtype, items in plan] == [
        ("float32", [2, 0]),
        ("float16", [1]),
    ]


def test_offsets_are_aligned_to_16_bytes() -> None:
    ((_, items),) = plan_buckets([(F32, 3), (F32, 1), (F32, 5)], limit=1 << 20)
    assert items == [Planned(2, 0, 5), Planned(1, 8, 1), Planned(0, 12, 3)]
    ((_, halves),) = plan_buckets([(F16, 1), (F16, 1)], limit=1 << 20)
    assert [item.offset for item in halves] == [0, 8]


def test_a_large_tensor_has_a_bucket_to_itself_and_an_empty_one_takes_no_room() -> None:
    plan = plan_buckets([(F32, 0), (F32, 100), (F32, 1)], limit=64, first=64)
    assert [[item.index for item in items] for _, items in plan] == [[2], [1], [0]]
    assert plan_buckets([], limit=64) == []


def test_carriers() -> None:
    assert carrier("w", torch.bfloat16).name == "bfloat16"
    assert carrier("w", torch.complex128).name == "float64"
    with pytest.raises(SessionError, match="parameter w is of type int64"):
        carrier("w", torch.int64)
    with pytest.raises(SessionError, match="float8"):
        carrier("w", torch.float8_e4m3fn)


def test_areas_become_tensors_of_their_type_over_the_same_memory() -> None:
    for name in ("float32", "bfloat16", "float16", "uint8", "int64"):
        memory = allocate(DTYPES[name], 3)
        tensor = area_tensor(memory.mine, memory.dtype)
        assert str(tensor.dtype) == f"torch.{name}"
        tensor.fill_(1)
        assert memory.mine.any()
        del tensor
        memory.close()


class Case:
    """A bucket of one weight and one bias."""

    def __init__(self, in_place: bool = False, extra: int = 0) -> None:
        self.layer = nn.Linear(2, 1)
        self.layer.weight.data = torch.tensor([[1.0, 2.0]])
        self.layer.bias.data = torch.tensor([3.0])
        named = list(self.layer.named_parameters())
        self.bucket = GradientBucket.build(
            7,
            F32,
            [Planned(1, 0, 1), Planned(0, 4, 2)],
            named,
            lambda dtype, length: allocate(dtype, length, in_place=in_place),
            extra,
        )
        self.bias, self.weight = self.bucket.slots

    @property
    def mine(self) -> list[float]:
        values: list[float] = self.bucket.memory.mine.tolist()
        return values

    def exchange(self, factor: float = 2.0) -> None:
        """Stand in for a round, with another member that has `factor - 1` times as much."""
        self.bucket.memory.result[:] = self.bucket.memory.mine * factor

    def grad(self, value: float) -> None:
        self.layer.weight.grad = torch.full((1, 2), float(value))


def test_layout_and_flags() -> None:
    case = Case(extra=2)
    assert case.bucket.memory.length == 6 + 2 + 2
    assert (case.bias.name, case.weight.name) == ("bias", "weight")
    case.grad(5)
    case.bucket.settle([0.25, 1.0])
    # Bias, padding, weight, the flags of bias and weight, and what was added.
    assert case.mine == [0, 0, 0, 0, 5, 5, 0, 1, 0.25, 1]
    case.exchange()
    assert case.bucket.read_extra() == [0.5, 2.0]


def test_settling_makes_gradients_views_and_publishing_shows_the_result() -> None:
    case = Case()
    case.grad(5)
    case.bucket.settle()
    grad = case.layer.weight.grad
    assert grad is not None and same_memory(grad, case.weight.mine)
    case.exchange()
    case.bucket.publish()
    assert case.layer.weight.grad is not None
    assert case.layer.weight.grad.tolist() == [[10, 10]]
    assert same_memory(case.layer.weight.grad, case.weight.result)
    assert case.layer.bias.grad is None
    assert case.mine[4:6] == [5, 5]


def test_a_gradient_of_another_member_appears_here() -> None:
    case = Case()
    case.bucket.settle()
    case.bucket.memory.result[:] = [3, 0, 0, 0, 0, 0, 0.5, 0]
    case.bucket.publish()
    assert case.layer.bias.grad is not None and case.layer.bias.grad.tolist() == [3]
    assert case.layer.weight.grad is None


def test_stale_contributions_are_cleared() -> None:
    case = Case()
    case.grad(5)
    case.bucket.settle()
    case.layer.weight.grad = None
    case.bucket.settle()
    assert case.mine == [0] * 8


def test_a_shown_result_becomes_the_base_of_what_follows() -> None:
    case = Case()
    case.grad(5)
    case.bucket.settle()
    case.exchange()
    case.bucket.publish()
    assert case.layer.weight.grad is not None
    case.layer.weight.grad.mul_(0.5).add_(1)
    case.weight.before()
    assert same_memory(case.layer.weight.grad, case.weight.mine)
    case.layer.weight.grad.add_(1)
    case.bucket.settle()
    assert case.mine[4:] == [7, 7, 0, 1]
    assert case.bucket.memory.result[4:6].tolist() == [6, 6]


def test_replacing_the_memory_of_a_gradient_does_not_reach_the_bucket() -> None:
    case = Case()
    case.grad(5)
    case.bucket.settle()
    case.exchange()
    case.bucket.publish()
    assert case.layer.weight.grad is not None
    case.layer.weight.grad.data = torch.zeros(1, 2)
    assert case.weight.result.tolist() == [[10, 10]]
    case.bucket.settle()
    assert case.mine[4:] == [0, 0, 0, 1]


def test_in_place_buckets_have_one_view() -> None:
    case = Case(in_place=True)
    case.grad(5)
    case.bucket.settle()
    case.exchange()
    case.bucket.publish()
    case.weight.before()
    assert case.layer.weight.grad is not None
    assert case.layer.weight.grad.tolist() == [[10, 10]]


def test_another_type_is_refused_by_name() -> None:
    case = Case()
    case.layer.double()
    case.layer.weight.grad = torch.zeros(1, 2, dtype=torch.float64)
    with pytest.raises(SessionError, match=r"parameter weight was \(1, 2\) torch.float32"):
        case.bucket.settle()


def test_sparse_gradients_become_dense() -> None:
    case = Case()
    case.layer.weight.grad = torch.sparse_coo_tensor(
        torch.tensor([[0, 0], [1, 1]]), torch.tensor([2.0, 3.0]), (1, 2), check_invariants=True
    )
    assert case.weight.absorb()
    assert case.weight.mine.tolist() == [[0, 5]]


def test_released_gradients_leave_the_bucket() -> None:
    case = Case()
    case.grad(5)
    case.bucket.settle()
    case.weight.release()
    case.bias.release()
    assert case.layer.weight.grad is not None
    assert case.layer.weight.grad.tolist() == [[5, 5]]
    assert not same_memory(case.layer.weight.grad, case.weight.mine)


def test_opening_counts_what_is_awaited() -> None:
    case = Case()
    case.bucket.launched = True
    case.bucket.open()
    assert (case.bucket.waiting, case.bucket.launched) == (2, False)


def test_views_have_the_layout_of_dense_parameters() -> None:
    layer = nn.Conv2d(2, 3, 2, bias=False)
    layer.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    bucket = GradientBucket.build(
        0, F32, [Planned(0, 0, 24)], list(layer.named_parameters()), allocate
    )
    assert bucket.slots[0].mine.stride() == layer.weight.stride() == (8, 1, 4, 2)
    assert bucket.slots[0].mine.data_ptr() == bucket.memory.mine.ctypes.data


def test_a_contribution_that_does_not_count_is_all_zeros() -> None:
    case = Case(extra=1)
    case.grad(float("inf"))
    case.bucket.settle([1.0])
    case.bucket.settle([1.0], counts=False)
    assert case.mine == [0] * 9
