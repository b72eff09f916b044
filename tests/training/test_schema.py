"""Schemas: equal for equal models, and differences that a person can act on."""

from __future__ import annotations

import msgspec
import torch
from torch import nn

from p2pdpt.training.schema import Entry, Schema, dense_strides, differences, schema_of


def mlp(hidden: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(8, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 2))


def test_entries_in_order_with_buffers_and_ties() -> None:
    model = nn.Module()
    model.a = nn.Linear(2, 3, bias=False)
    model.b = nn.Linear(2, 3, bias=False)
    model.b.weight = model.a.weight
    model.register_buffer("mask", torch.ones(2, dtype=torch.bool))
    schema = schema_of([model], {"bucket_mb": "25"})
    assert schema.entries == (
        Entry("parameter", "a.weight", (3, 2), "float32", True),
        Entry("parameter", "b.weight", (3, 2), "float32", True, tied="a.weight"),
        Entry("buffer", "mask", (2,), "bool", False),
    )
    assert [entry.describe() for entry in schema.entries] == [
        "(3,2) float32",
        "tied to a.weight",
        "(2) bool buffer",
    ]
    assert msgspec.msgpack.decode(schema.encode(), type=Schema) == schema


def test_several_models_are_numbered() -> None:
    names = [entry.name for entry in schema_of([nn.Linear(1, 1), nn.Linear(1, 1)]).entries]
    assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


def test_equal_models_have_equal_digests_and_no_differences() -> None:
    one, two = schema_of([mlp()]), schema_of([mlp()])
    assert one.digest() == two.digest()
    assert len(one.digest()) == 32
    assert differences({"node0": one, "node1": two}) == []


def test_shapes_that_differ_are_listed_with_their_nodes() -> None:
    schemas = {f"node{n}": schema_of([mlp(4 if n < 2 else 5)]) for n in range(3)}
    lines = differences(schemas)
    assert lines[0] == "0.weight: (4,8) float32 on node0, node1 vs (5,8) float32 on node2"
    assert "1.running_mean: (4) float32 buffer on node0, node1 vs (5) float32 buffer on node2" in (
        lines
    )


def test_what_is_missing_and_what_is_frozen() -> None:
    longer = nn.Sequential(*mlp().children(), nn.Linear(2, 2))
    frozen = mlp()
    frozen[0].requires_grad_(False)  # type: ignore[index]
    lines = differences(
        {"a": schema_of([mlp()]), "b": schema_of([longer]), "c": schema_of([frozen])}
    )
    assert lines == [
        "0.weight: (4,8) float32 on a, b vs (4,8) float32 frozen on c",
        "0.bias: (4) float32 on a, b vs (4) float32 frozen on c",
        "3.weight: absent on a, c vs (2,2) float32 on b",
        "3.bias: absent on a, c vs (2) float32 on b",
    ]


def test_at_most_ten_lines() -> None:
    one = schema_of([nn.Sequential(*(nn.Linear(2, 2) for _ in range(10)))])
    two = schema_of([nn.Sequential(*(nn.Linear(3, 3) for _ in range(10)))])
    lines = differences({"a": one, "b": two})
    assert len(lines) == 10
    assert lines[-1] == "and 11 more differences"


def test_another_order_is_named() -> None:
    def two(first: str, second: str) -> nn.Module:
        return nn.ModuleDict({first: nn.Linear(8, 8), second: nn.Linear(8, 8)})

    schemas = {"node0": schema_of([two("a", "b")]), "node1": schema_of([two("b", "a")])}
    (line,) = differences(schemas)
    assert line.startswith("parameter order differs at index 0: a.weight vs b.weight")
    assert line.endswith("(a.weight on node0 vs b.weight on node1)")


def test_another_order_comes_before_what_follows_from_it() -> None:
    def two(first: str, second: str) -> Schema:
        model = nn.ModuleDict({first: nn.Linear(8, 8), second: nn.Linear(8, 8)})
        return schema_of([model], {"optimizer 0": f"SGD of 4 parameters ({first})"})

    order, settings = differences({"node0": two("a", "b"), "node1": two("b", "a")})
    assert order.startswith("parameter order differs at index 0: a.weight vs b.weight")
    assert settings.startswith("optimizer 0: ")


def test_settings_that_differ() -> None:
    one, two = (schema_of([mlp()], {"bucket_mb": size}) for size in ("25", "10"))
    assert differences({"a": one, "b": two}) == ["bucket_mb: 25 on a vs 10 on b"]


def test_layouts_that_differ() -> None:
    last = nn.Conv2d(2, 3, 2)
    last.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    lines = differences({"a": schema_of([nn.Conv2d(2, 3, 2)]), "b": schema_of([last])})
    assert lines == [
        "weight: (3,2,2,2) float32 on a vs (3,2,2,2) float32 with strides (8,1,4,2) on b"
    ]


def test_dense_strides() -> None:
    base = torch.zeros(2, 3, 4)
    assert dense_strides(base) == (12, 4, 1)
    assert dense_strides(base.permute(2, 0, 1)) == (1, 12, 4)
    assert dense_strides(base[:, :2]) == (8, 4, 1)
    assert dense_strides(torch.zeros(1).expand(3, 4)) == (4, 1)
    assert dense_strides(torch.zeros(3, 0)) == (1, 1)
    assert dense_strides(torch.tensor(1.0)) == ()
