"""Models and optimizers that can be trained in a group, and those that cannot."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p2pdpt.errors import SessionError
from p2pdpt.training.subject import Subject


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=1.0)


def test_one_model_or_several() -> None:
    one, two = nn.Linear(1, 1), nn.BatchNorm1d(1)
    assert [name for name, _ in Subject(one).parameters()] == ["weight", "bias"]
    subject = Subject([one, two], sgd(one))
    assert [name for name, _ in subject.parameters()] == [
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
    ]
    assert len(list(subject.tensors())) == 4 + 3
    assert len(subject.digest()) == 64
    assert [*subject.digests()][3:5] == ["1.bias", "1.running_mean"]


def test_what_is_shared_comes_once() -> None:
    one = nn.BatchNorm1d(1)
    subject = Subject([one, nn.Sequential(one)])
    assert [name for name, _ in subject.parameters()] == ["0.weight", "0.bias"]
    assert len(list(subject.tensors())) == 2 + 3


def test_settings_tell_optimizers_apart() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    plain = Subject(model, sgd(model)).settings()
    assert plain["models"] == "1" and plain["optimizers"] == "1"
    assert plain["optimizer 0"].startswith("SGD of 4 parameters (")
    grouped = torch.optim.SGD([{"params": list(each.parameters())} for each in model], lr=1.0)
    assert Subject(model, grouped).settings()["optimizer 0"].startswith("SGD of 2+2 parameters (")
    turned = torch.optim.SGD(list(model.parameters())[::-1], lr=1.0)
    assert Subject(model, turned).settings() != plain
    assert Subject(model, sgd(model)).settings() == plain


def test_state_has_names() -> None:
    model = nn.Linear(1, 1)
    optimizer = sgd(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    subject = Subject(model, optimizer, {"sched": scheduler})
    assert subject.state() == {"optimizer 0 (SGD)": optimizer, "state['sched']": scheduler}
    with pytest.raises(SessionError, match=r"state\['x'\] is a int without state_dict"):
        Subject(model, optimizer, {"x": 3})


def test_what_cannot_be_trained_is_refused_by_name() -> None:
    model = nn.Linear(1, 1)
    with pytest.raises(SessionError, match="SGD has 2 parameters of no model"):
        Subject(model, sgd(nn.Linear(1, 1)))
    with pytest.raises(SessionError, match=r"takes a torch\.nn\.Module"):
        Subject([])
    with pytest.raises(SessionError, match=r"parameter weight has no memory.*model\.to_empty"):
        Subject(nn.Linear(1, 1, device="meta"))
    with pytest.raises(SessionError, match="parameter weight has no shape yet"):
        Subject(nn.LazyLinear(1))
    with pytest.raises(SessionError, match=r"LBFGS\.step\(closure\)"):
        Subject(model, torch.optim.LBFGS(model.parameters()))
    with pytest.raises(SessionError, match=r"str is no torch\.optim\.Optimizer"):
        Subject(model, ["adam"])  # type: ignore[list-item]


def test_steps_are_told_and_closures_refused_inside_the_block_only() -> None:
    model = nn.Linear(1, 1)
    optimizers = [sgd(model), sgd(model)]
    told: list[int] = []
    with Subject(model, optimizers).hooked(lambda: told.append(1)):
        optimizers[0].step()
        optimizers[1].step(None)
        with pytest.raises(SessionError, match=r"SGD\.step\(closure\)"):
            optimizers[0].step(lambda: 0.0)
        with pytest.raises(SessionError, match=r"SGD\.step\(closure\)"):
            optimizers[0].step(closure=lambda: 0.0)
    assert told == [1, 1]
    optimizers[0].step(lambda: 0.0)
    assert told == [1, 1]


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.eye(3).to_sparse(), "layout sparse_coo"),
        (torch.ones(1).expand(4), "several elements in one place"),
        (torch.ones(2, device="meta"), "has no memory"),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(tensor: torch.Tensor, said: str) -> None:
    one, two = nn.Linear(1, 1), nn.Linear(1, 1)
    two.register_buffer("odd", tensor)
    with pytest.raises(SessionError, match=rf"^buffer 1\.odd .*{said}"):
        Subject([one, two])
    three = nn.Module()
    three.odd = nn.Parameter(tensor, requires_grad=False)
    with pytest.raises(SessionError, match=rf"^parameter odd .*{said}"):
        Subject(three)
