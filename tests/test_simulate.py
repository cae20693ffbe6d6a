"""`scripts/simulate` plays a whole job with the real protocol, and its table stands in the docs."""

from __future__ import annotations

from pathlib import Path

import modules

SCRIPT = Path(__file__).parents[1] / "scripts" / "simulate_main.py"
HOSTS, RANKS = 6, 2


def test_a_small_job_meets_trains_fails_and_ends() -> None:
    result = modules.load(SCRIPT).simulate(HOSTS, RANKS)
    assert result.hosts == HOSTS
    # Each joins, is ready and stops; one of them says first that it has failed.
    assert result.received >= 3 * HOSTS + 1
    # Each hears of the roster, the start, the failure and the verdict.
    assert result.sent >= 4 * HOSTS
    assert result.roster_bytes > HOSTS * RANKS
    assert result.joins_per_s > 0.0
    # No host may start before it has read the roster.
    assert 0.0 < result.decoding_s < result.start_s
    assert 0.0 < result.idle_share < 1.0


def test_the_page_has_the_table_that_the_script_makes() -> None:
    module = modules.load(SCRIPT)
    page = module.PAGE.read_text(encoding="utf-8")
    shown = page.partition(module.BEGIN)[2].partition(module.END)[0].strip().splitlines()
    heads = module.table([], 8).splitlines()
    assert shown[: len(heads)] == heads
    assert len(shown) > len(heads)
