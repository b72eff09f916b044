"""The beginning: models compared, then one member's values everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from p2pdpt.errors import SchemaError, SessionError
from p2pdpt.training import start
from p2pdpt.training.agreement import Agreement
from p2pdpt.training.schema import schema_of
from p2pdpt.training.start import agree_on_model, agree_on_state, spread_tensors


def member(arena: Any, rank: int, body: Any) -> Any:
    return arena.member(rank, lambda parts: body(parts.waiting))


def agree(arena: Any, models: list[nn.Module], states: list[dict[str, Any]] | None = None) -> Any:
    def run(rank: int) -> Any:
        state = states[rank] if states else {}
        return member(
            arena,
            rank,
            lambda waiting: agree_on_model(
                Agreement(waiting), schema_of([models[rank]]), 100 + rank, state
            ),
        )

    return arena.outcomes(len(models), run)


def test_equal_models_get_the_first_members_seed(arena: Any) -> None:
    assert agree(arena, [nn.Linear(2, 2) for _ in range(3)]) == [100, 100, 100]


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (
            nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 1)),
            "0.weight: (4,4) float32 on node0, node1 vs (5,4) float32 on node2",
        ),
        (
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1), nn.Linear(1, 1)),
            "2.weight: absent on node0, node1 vs (1,1) float32 on node2",
        ),
        (
            nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).requires_grad_(False),
            "0.weight: (4,4) float32 on node0, node1 vs (4,4) float32 frozen on node2",
        ),
    ],
    ids=["hidden", "deeper", "frozen"],
)
def test_other_models_are_an_error_on_all_that_lists_the_differences(
    arena: Any, other: nn.Module, line: str
) -> None:
    plain = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)) for _ in range(2)]
    for outcome in agree(arena, [*plain, other]):
        assert isinstance(outcome, SchemaError)
        assert line in str(outcome)
        assert str(outcome).count("\n") <= 11


def test_another_order_of_registration_is_refused(arena: Any) -> None:
    models: list[nn.Module] = [
        nn.ModuleDict({first: nn.Linear(8, 8), second: nn.Linear(8, 8)})
        for first, second in ("ab", "ba")
    ]
    for outcome in agree(arena, models):
        assert isinstance(outcome, SchemaError)
        assert "parameter order differs at index 0: a.weight vs b.weight" in str(outcome)


def test_schemas_too_large_to_send_are_cut(arena: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "LISTED_BYTES", 200)
    one = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)))
    two = nn.Sequential(*(nn.Linear(2, 2) for _ in range(20)), nn.Linear(1, 1))
    for outcome in agree(arena, [one, two]):
        assert isinstance(outcome, SchemaError)
        assert "beyond the first entries, which are equal" in str(outcome)


def test_state_that_differs_is_named(arena: Any) -> None:
    def state(steps: int) -> dict[str, Any]:
        layer = nn.Linear(1, 1)
        optimizer = torch.optim.Adam(layer.parameters())
        for _ in range(steps):
            layer(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        return {"optimizer 0 (Adam)": optimizer}

    models: list[nn.Module] = [nn.Linear(1, 1) for _ in range(3)]
    for outcome in agree(arena, models, [state(0), state(0), state(1)]):
        assert isinstance(outcome, SessionError)
        assert "the state of optimizer 0 (Adam) differs at the start" in str(outcome)
        assert "that of node0, node1 from that of node2" in str(outcome)


def test_equal_state_is_no_difference() -> None:
    agree_on_state(["a", "b"], [{"x": "1"}, {"x": "1"}])
    agree_on_state(["a"], [{}])


KINDS: list[torch.Tensor] = [
    torch.randn(3, 5),
    torch.randn(4, 6).t(),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(10)[::2],
    torch.tensor(3),
    torch.tensor([True, False, True]),
    torch.randn(7).bfloat16(),
    torch.randn(7).half(),
    torch.randn(3, dtype=torch.complex64),
    torch.zeros(0, 4),
    torch.arange(5, dtype=torch.int64),
]


@pytest.mark.parametrize("stage", [16, 64, 1 << 20])
def test_every_kind_of_tensor_arrives_bit_by_bit(
    arena: Any, monkeypatch: pytest.MonkeyPatch, stage: int
) -> None:
    monkeypatch.setattr(start, "STAGE_BYTES", stage)
    copies = [
        [tensor.clone() if rank == 0 else torch.zeros_like(tensor) for tensor in KINDS]
        for rank in range(3)
    ]
    strides = [[tensor.stride() for tensor in mine] for mine in copies]
    arena.run(
        3,
        lambda rank: member(arena, rank, lambda waiting: spread_tensors(waiting, copies[rank])),
    )
    for mine, layout in zip(copies, strides, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, KINDS, strict=True))
        assert [tensor.stride() for tensor in mine] == layout


def test_parameters_can_be_spread_too(arena: Any) -> None:
    models = [nn.Linear(3, 3) for _ in range(2)]
    arena.run(
        2,
        lambda rank: member(
            arena, rank, lambda waiting: spread_tensors(waiting, models[rank].parameters())
        ),
    )
    assert torch.equal(models[0].weight, models[1].weight)


def test_nothing_to_spread(arena: Any) -> None:
    arena.run(2, lambda rank: member(arena, rank, lambda waiting: spread_tensors(waiting, [])))
    assert [key for key, _ in arena.hub.log if key[0] == "broadcast"] == []
