from __future__ import annotations

from extproc.lab.replay.guard_scenario import bursts, p99_s, replay

HOURS = 0.5
MINUTE_S = 60.0


def test_where_locality_hurts_the_tail_the_guard_takes_it_back() -> None:
    """With a control group of a tenth, so that it takes minutes; `figures` shows how long it takes with the default."""
    trace = bursts(1, hours=HOURS)
    guarded, levels = replay("with guard", trace, percent=10.0)
    latency, none = replay("latency alone", trace)
    assert none == []
    assert p99_s(guarded, 0.0, 5 * MINUTE_S) > 1.2 * p99_s(latency, 0.0, 5 * MINUTE_S)  # there is something to notice
    assert [level for _, level in levels[:4]] == [0, 1, 2, 3]
    settled_s = levels[3][0] + MINUTE_S
    assert settled_s < 20 * MINUTE_S
    assert p99_s(guarded, settled_s, 3600.0 * HOURS) <= 1.1 * p99_s(latency, settled_s, 3600.0 * HOURS)
