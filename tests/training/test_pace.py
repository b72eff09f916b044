"""Rates, by a clock set by hand."""

from __future__ import annotations

from p2pdpt.training.pace import Pace


def test_recent_and_overall_rates() -> None:
    now = [10.0]
    pace = Pace(lambda: now[0])
    now[0] = 12.0
    assert pace.recent(4, 100.0) == {"steps_per_s": 2.0, "samples_per_s": 50.0}
    now[0] = 16.0
    assert pace.recent(5, 300.0) == {"steps_per_s": 0.25, "samples_per_s": 50.0}
    now[0] = 20.0
    assert pace.overall(5, 300.0) == {"steps_per_s": 0.5, "samples_per_s": 30.0, "seconds": 10.0}


def test_no_time_is_no_rate() -> None:
    pace = Pace(lambda: 1.0)
    assert pace.recent(1, 1.0) == {"steps_per_s": 0.0, "samples_per_s": 0.0}
    assert pace.overall(1, 1.0)["seconds"] == 0.0
