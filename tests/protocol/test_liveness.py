from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2pdpt.protocol.liveness import BEATS, Liveness, Silence


def run(liveness: Liveness, until: float) -> list[Silence]:
    found = []
    while liveness.next_tick() <= until:
        found += liveness.tick(liveness.next_tick())
    return found


def test_a_silent_peer_is_told_once_after_the_patience() -> None:
    liveness = Liveness(6.0, 0.0)
    assert liveness.interval == 1.0
    liveness.add("a", 0.0)
    assert run(liveness, 5.9) == []
    assert run(liveness, 6.0) == [Silence("a", "no heartbeat for 6 s")]
    assert run(liveness, 60.0) == []


def test_any_sign_of_life_counts() -> None:
    liveness = Liveness(6.0, 0.0)
    liveness.add("a", 0.0)
    liveness.add("b", 0.0)
    run(liveness, 5.0)
    liveness.heard("a", 5.0)
    liveness.heard("stranger", 5.0)
    assert run(liveness, 7.0) == [Silence("b", "no heartbeat for 6 s")]
    assert run(liveness, 11.0) == [Silence("a", "no heartbeat for 6 s")]


def test_a_removed_peer_is_not_watched() -> None:
    liveness = Liveness(6.0, 0.0)
    liveness.add("a", 0.0)
    liveness.remove("a")
    liveness.remove("a")
    assert run(liveness, 60.0) == []


def test_an_own_stall_suspects_nobody() -> None:
    liveness = Liveness(6.0, 0.0)
    liveness.add("a", 0.0)
    run(liveness, 2.0)
    assert liveness.tick(63.0) == []
    assert liveness.stalled == 60.0
    # What was silence before still counts: 2 + 1 seconds so far.
    assert run(liveness, 65.9) == []
    assert run(liveness, 66.0) == [Silence("a", "no heartbeat for 6 s")]


@given(
    st.lists(st.floats(0.0, 50.0), max_size=30),
    st.floats(0.5, 20.0),
)
def test_whatever_the_stalls_a_peer_that_beats_is_never_suspected(
    stalls: list[float], patience: float
) -> None:
    liveness = Liveness(patience, 0.0)
    liveness.add("a", 0.0)
    now = 0.0
    for stall in stalls:
        now = liveness.next_tick() + stall
        assert liveness.tick(now) == []
        # Heard as soon as the loop runs again, as what came is read then.
        liveness.heard("a", now)


def test_heartbeats_fit_into_the_patience() -> None:
    assert BEATS >= 3
