"""Digests see every bit, name, type and shape, and nothing else."""

from __future__ import annotations

import torch
from torch import nn

from p2pdpt.training.digest import module_digest, state_digest, tensor_digest


def test_the_digest_of_tensors_is_sha256_of_names_types_shapes_and_bits() -> None:
    one = tensor_digest([("a", torch.zeros(2))])
    assert one == "ec1841cbdc263d58c521c11c91ec280d3d429bb36609ccc2888fa93fcb7fe477"


def test_it_depends_on_bits_names_types_and_shapes() -> None:
    base = torch.tensor([1.0, 2.0])
    digests = {
        tensor_digest([("a", base)]),
        tensor_digest([("b", base)]),
        tensor_digest([("a", base.double())]),
        tensor_digest([("a", base.reshape(2, 1))]),
        tensor_digest([("a", torch.nextafter(base, base * 2))]),
        tensor_digest([("a", base), ("b", base)]),
        tensor_digest([("a", torch.tensor([0.0]))]),
        tensor_digest([("a", torch.tensor([-0.0]))]),
    }
    assert len(digests) == 8


def test_it_does_not_depend_on_layout() -> None:
    image = torch.randn(2, 3, 4, 5)
    last = image.to(memory_format=torch.channels_last)
    assert tensor_digest([("a", image)]) == tensor_digest([("a", last)])


def test_all_types_and_empty_tensors_have_one() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.bool, torch.int64, torch.complex64):
        a, b = torch.zeros(3).to(dtype), torch.ones(3).to(dtype)
        assert tensor_digest([("a", a)]) != tensor_digest([("a", b)])
    assert tensor_digest([("a", torch.zeros(0))]) != tensor_digest([("a", torch.zeros(1, 0))])


def test_a_module_counts_parameters_and_buffers() -> None:
    one, two = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    assert module_digest([one]) == module_digest([two])
    assert one.num_batches_tracked is not None
    one.num_batches_tracked += 1
    assert module_digest([one]) != module_digest([two])
    assert module_digest([two, two]) != module_digest([two])


def test_state_is_compared_by_value() -> None:
    def state(step: int, value: float) -> dict[str, object]:
        return {
            "state": {0: {"step": torch.tensor(step), "avg": torch.full((2,), value)}},
            "param_groups": [{"lr": 0.1, "betas": (0.9, 0.99), "foreach": None}],
        }

    assert state_digest(state(1, 0.5)) == state_digest(state(1, 0.5))
    assert state_digest(state(1, 0.5)) != state_digest(state(2, 0.5))
    assert state_digest(state(1, 0.5)) != state_digest(state(1, 0.25))
    assert state_digest([1, True]) != state_digest([True, 1])
    assert state_digest(print) == state_digest(len)
