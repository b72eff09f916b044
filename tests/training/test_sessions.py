"""Sessions as a script sees them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import p2pdpt
from p2pdpt.errors import ConfigError, PeerFailedError, SessionError
from p2pdpt.training.report import Reporter


def line() -> nn.Linear:
    layer = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def slope(model: nn.Module) -> float:
    """Return the gradient of the one weight."""
    (parameter,) = model.parameters()
    assert parameter.grad is not None
    return float(parameter.grad)


def ones(count: int, value: float = 1.0) -> torch.Tensor:
    return torch.full((count, 1), value)


def test_what_a_session_knows(arena: Any) -> None:
    def run(rank: int) -> Any:
        model = line()
        with arena.session(rank, model, sgd(model), seed=5 + rank) as s:
            return (s.rank, s.size, s.is_first, s.seed, s.step, str(s.device), list(s.epochs(2)))

    assert arena.run(2, run) == [
        (0, 2, True, 5, 0, "cpu", [0, 1]),
        (1, 2, False, 5, 0, "cpu", [0, 1]),
    ]


def test_sums_and_means(arena: Any) -> None:
    def run(rank: int) -> Any:
        with arena.session(rank, line()) as s:
            return s.sum(a=rank + 1), s.mean(a=rank + 1), s.mean(a=rank, weight=[1, 3][rank])

    assert arena.run(2, run) == [({"a": 3.0}, {"a": 1.5}, {"a": 0.75})] * 2


def test_steps_are_counted_by_optimizers_and_attempts_by_backward(arena: Any) -> None:
    def run(rank: int) -> None:
        model = line()
        optimizer = sgd(model)
        with arena.session(rank, model, optimizer) as s:
            model(ones(1)).sum().backward()
            model(ones(1)).sum().backward()
            assert (s.step, s.rounds) == (0, 2)
            optimizer.step()
            optimizer.step()
            assert s.step == 1

    arena.run(2, run)
    steps = [key[1:] for key, rank in arena.hub.log if key[0] == "seal" and rank == 0]
    assert steps == [(0, 0), (0, 1)]


def test_without_an_optimizer_every_exchange_is_a_step(arena: Any) -> None:
    def run(rank: int) -> int:
        model = line()
        with arena.session(rank, model) as s:
            for _ in range(3):
                model(ones(1)).sum().backward()
            step: int = s.step
            return step

    assert arena.run(2, run) == [3, 3]


def test_weights_by_samples_and_by_tokens(arena: Any) -> None:
    def run(rank: int) -> Any:
        model = line()
        found = []
        with arena.session(rank, model) as s:
            for x in s.split([ones(3)]):
                model(x * (rank + 1)).mean().backward()
                found.append(slope(model))
            model.zero_grad()
            s.weight([1, 0][rank])
            model(ones(1, rank + 5.0)).mean().backward()
            found.append(slope(model))
        return found

    # 1 and 2 samples; then only the first counts.
    assert arena.run(2, run) == [[pytest.approx((1 * 1 + 2 * 2) / 3), 5.0]] * 2


def test_a_batch_of_no_weight_spoils_nothing(arena: Any) -> None:
    def run(rank: int) -> float:
        layer, norm = line(), nn.BatchNorm1d(1, affine=False)
        with arena.session(rank, [layer, norm]) as s:
            s.weight([1, 0][rank])
            layer(ones(1, 3.0 if rank == 0 else float("inf"))).sum().backward()
            norm(layer(ones(2, 1.0 if rank == 0 else float("nan")))).sum().backward()
            assert norm.running_mean is not None and norm.running_mean.tolist() == [0.0]
        return slope(layer)

    assert arena.run(2, run) == [3.0, 3.0]


@pytest.mark.parametrize(
    ("second", "last"), [([8, 8, 8, 8, 3], (8 * 1 + 3 * 2) / 11), ([8, 8, 8, 8], 1.0)]
)
def test_uneven_local_batches(arena: Any, second: list[int], last: float) -> None:
    def run(rank: int) -> list[float]:
        model = line()
        found = []
        with arena.session(rank, model) as s:
            for _ in s.epochs(3):
                for x in s.local([ones(n, rank + 1.0) for n in ([8] * 5, second)[rank]]):
                    model(x).mean().backward()
                    found.append(slope(model))
                    model.zero_grad()
        return found

    expected = [pytest.approx(1.5)] * 4 + [pytest.approx(last)]
    assert arena.run(2, run) == [expected * 3] * 2


def test_shuffled_data_is_the_same_training_at_any_number_of_nodes(arena: Any) -> None:
    x = torch.randn(20, 1, generator=torch.Generator().manual_seed(3))

    def train(size: int) -> Any:
        def run(rank: int) -> Any:
            model = line()
            optimizer = sgd(model, 0.1)
            loader = DataLoader(TensorDataset(x, x * 3), batch_size=8, shuffle=True)
            with arena.session(rank, model, optimizer, seed=1) as s:
                for _ in s.epochs(3):
                    for a, b in s.split(loader):
                        nn.functional.mse_loss(model(a), b).backward()
                        optimizer.step()
                        optimizer.zero_grad()
            return model.weight.item()

        (first, *others) = arena.run(size, run)
        assert all(other == first for other in others)
        return first

    alone = train(1)
    assert train(2) == pytest.approx(alone, rel=1e-6)
    assert train(5) == pytest.approx(alone, rel=1e-6)


def test_two_models_and_two_optimizers_in_turn(arena: Any) -> None:
    def run(rank: int) -> Any:
        one, two = line(), line()
        nn.init.ones_(two.weight)
        first, second = sgd(one), sgd(two)
        with arena.session(rank, [one, two], [first, second]) as s:
            for x in s.split([ones(2, 2.0), ones(2, 4.0)]):
                (two(one(x)) - 1).mean().backward()
                first.step()
                first.zero_grad()
                second.zero_grad()
                two(one(x).detach()).mean().backward()
                second.step()
                second.zero_grad()
            assert s.step == 4
        return one.weight.item(), two.weight.item()

    outcomes = arena.run(2, run)
    assert outcomes[0] == outcomes[1] == arena.run(1, run)[0]


def test_gradient_scaling_and_schedulers(arena: Any) -> None:
    def run(rank: int) -> Any:
        model = line()
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        with arena.session(rank, model, optimizer, state={"sched": scheduler}) as s:
            for value in (1.0, float("inf"), 1.0):
                # One member overflows: all see it, and skip the step together.
                x = ones(1, value if rank else 1.0)
                scaler.scale(model(x).sum()).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 10.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            scheduler.step()
            assert s.step == 2
        return model.weight.item()

    assert arena.run(2, run) == [-2.0, -2.0]


def test_impossible_options_are_refused_by_name(arena: Any) -> None:
    with pytest.raises(SessionError, match="bucket_mb"):
        arena.session(0, line(), bucket_mb=0)
    with pytest.raises(SessionError, match="seed"):
        arena.session(0, line(), seed=-1)


def test_outside_the_block_everything_says_so(arena: Any) -> None:
    s = arena.session(0, line())
    calls: list[Callable[[], Any]] = [
        lambda: s.rank,
        lambda: s.step,
        lambda: s.mean(a=1),
        lambda: s.split([]),
    ]
    for call in calls:
        with pytest.raises(SessionError, match="with p2pdpt"):
            call()

    def run(rank: int) -> None:
        again = arena.session(rank, line())
        with again:
            pass
        with pytest.raises(SessionError, match="entered once"), again:
            pass
        with pytest.raises(SessionError, match="not open"):
            again.sum(a=1)

    arena.run(1, run)


def test_an_error_on_one_node_is_told_to_the_others_at_once(arena: Any) -> None:
    def run(rank: int) -> None:
        model = line()
        with arena.session(rank, model):
            if rank == 1:
                raise ValueError("no such file")
            model(ones(1)).sum().backward()

    begun = time.monotonic()
    other, error = arena.outcomes(2, run)
    assert time.monotonic() - begun < 5
    assert isinstance(error, ValueError)
    assert isinstance(other, PeerFailedError)
    assert "peer node1" in str(other) and str(other).endswith("ValueError: no such file")


def test_parameters_that_came_apart_are_found_at_the_end(arena: Any) -> None:
    def run(rank: int) -> None:
        model = line()
        with arena.session(rank, model), torch.no_grad():
            if rank == 1:
                model.weight += 2**-100

    for outcome in arena.outcomes(2, run):
        assert isinstance(outcome, SessionError)
        assert "not equal at the end" in str(outcome)
        assert "they differ in weight." in str(outcome)
    # A topology that promises no more than to come close is not held to it.
    arena.run(
        2,
        lambda rank: (
            arena.session(rank, nn.Linear(1, 1), exact=False).__enter__().__exit__(None, None, None)
        ),
    )


def test_the_events_of_a_run(arena: Any) -> None:
    read, write = os.pipe()

    def run(rank: int) -> str:
        model = line()
        optimizer = sgd(model)
        reporter = Reporter(write if rank == 0 else None, time.monotonic)
        with arena.session(rank, model, optimizer, reporter=reporter) as s:
            for _ in s.epochs(2):
                for x in s.split([ones(4)]):
                    model(x).mean().backward()
                    optimizer.step()
                s.report(**s.mean(loss=2.0), note=7)
            digest: str = s.digest()
            return digest

    digest = arena.run(2, run)[0]
    os.close(write)
    with os.fdopen(read) as pipe:
        events = [json.loads(text) for text in pipe]
    kinds = [event.pop("event") for event in events]
    assert kinds == ["joined", "progress", "report", "report", "finished"]
    joined, progress, report, _, finished = events
    assert joined == {
        "id": "0" * 16,
        "name": "node0",
        "rank": 0,
        "members": ["node0", "node1"],
        "topology": "hub",
        "transport": "hub",
        "address": "test:0",
    }
    assert {"step", "epoch", "samples_per_s", "steps_per_s", "bytes_sent", "exposed_s", "loss"} == (
        progress.keys()
    )
    assert progress["step"] == 1 and progress["loss"] is None
    assert report == {"step": 1, "epoch": 0, "metrics": {"loss": 2.0, "note": 7}}
    assert finished["digest"] == digest
    assert finished["steps"] == 2
    assert finished["metrics"] == {"loss": 2.0, "note": 7}
    assert finished["bytes_sent"] > 0
    assert finished["samples_per_s"] == pytest.approx(4 / finished["seconds"])


def test_a_failure_is_an_event(arena: Any) -> None:
    read, write = os.pipe()

    def run(rank: int) -> None:
        with arena.session(rank, line(), reporter=Reporter(write, time.monotonic)):
            raise ValueError("on purpose")

    (outcome,) = arena.outcomes(1, run)
    assert isinstance(outcome, ValueError)
    os.close(write)
    with os.fdopen(read) as pipe:
        last = json.loads(pipe.readlines()[-1])
    assert last == {
        "event": "failed",
        "error": "ValueError: on purpose",
        "kind": "ValueError",
        "step": 0,
    }


def test_hooks_are_gone_afterwards(arena: Any) -> None:
    model = line()
    optimizer = sgd(model)

    def run(rank: int) -> None:
        with arena.session(rank, model, optimizer):
            model(ones(1)).sum().backward()

    arena.run(1, run)
    optimizer.zero_grad()
    model(ones(2)).sum().backward()
    assert slope(model) == 2.0
    optimizer.step(lambda: 0.0)


# The public door, with real nodes.


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("P2PDPT_"):
            monkeypatch.delenv(name)


def test_with_nobody_around_a_script_trains_alone() -> None:
    model = line()
    optimizer = sgd(model)
    with p2pdpt.session(model, optimizer, seed=3) as s:
        assert (s.rank, s.size, s.seed) == (0, 1, 3)
        for x in s.split([ones(4, 2.0)]):
            model(x).mean().backward()
            optimizer.step()
        assert s.sum(a=1) == {"a": 1.0}
    assert model.weight.item() == -2.0


def test_the_environment_wins_and_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("P2PDPT_MIN_NODES", "none")
    with pytest.raises(ConfigError, match="P2PDPT_MIN_NODES"):
        p2pdpt.session(line())
    monkeypatch.setenv("P2PDPT_MIN_NODES", "1")
    monkeypatch.setenv("P2PDPT_TOPOLOGY", "mapreduce")
    with p2pdpt.session(line(), topology="ring") as s:
        assert s.size == 1


def test_two_sessions_of_one_run_meet() -> None:
    weights: list[Any] = [None, None]

    def node(rank: int) -> None:
        torch.manual_seed(rank)
        model = nn.Linear(1, 1, bias=False)
        with p2pdpt.session(model, run="meeting", min_nodes=2) as s:
            model(ones(1, 1.0 + s.rank)).sum().backward()
            weights[rank] = (model.weight.item(), slope(model), s.size)

    threads = [threading.Thread(target=node, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert weights[0] == weights[1]
    assert weights[0][1:] == (1.5, 2)


SCRIPT = """
import sys, time
import p2pdpt, torch
from torch import nn
model = nn.Linear(1, 1)
with p2pdpt.session(model, run=sys.argv[1], min_nodes=2, patience=5) as s:
    step = 0
    while True:
        try:
            model(torch.ones(1, 1)).sum().backward()
        except p2pdpt.PeerFailedError:
            print(time.monotonic(), flush=True)
            raise
        step += 1
        if step == 5:
            print("going", s.rank, flush=True)
"""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that train together, each past its fifth step."""
    script = tmp_path / "endless.py"
    script.write_text(SCRIPT, encoding="utf-8")
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), f"pair-{os.getpid()}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("going")
    yield processes
    for process in processes:
        process.kill()
        process.communicate()


def test_a_killed_peer_ends_the_other_by_name_within_two_seconds(
    pair: list[subprocess.Popen[str]],
) -> None:
    killed = time.monotonic()
    pair[1].kill()
    told, text = pair[0].communicate(timeout=30)
    # The clock is the machine's, so both processes read the same.
    assert float(told) - killed < 2
    assert pair[0].returncode == 1
    assert "PeerFailedError: peer " in text.strip().splitlines()[-1]


def test_an_interrupt_ends_both_by_name(pair: list[subprocess.Popen[str]]) -> None:
    pair[0].send_signal(signal.SIGINT)
    _, own = pair[0].communicate(timeout=20)
    _, other = pair[1].communicate(timeout=20)
    assert own.strip().endswith("KeyboardInterrupt")
    assert "PeerFailedError" in other and "KeyboardInterrupt" in other.strip().splitlines()[-1]
