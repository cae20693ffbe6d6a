"""Which processes are recognised as children of the launcher."""

from __future__ import annotations

import os
import signal

import pytest
from waiting import until

from fleetrun.run import children
from fleetrun.run.children import Order


def order(number: int) -> Order:
    env = {b"PATH": os.environb[b"PATH"], b"PADDLE_TRAINER_ID": b"%d" % number}
    return Order(
        argv=("sleep", "60"),
        env=env,
        output=(null := os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)),
        errors=null,
        takes_our_stdin=False,
        default_signals=(),
        cpus=(),
    )


@pytest.mark.parametrize("number", [0, 1])
def test_a_rank_that_was_started_by_somebody_who_died_is_known_by_its_environment(
    number: int,
) -> None:
    orders = [order(0), order(1)]
    pids = [children.start(order) for order in orders]
    try:
        # Before exec a child has the launcher's environment.
        until(lambda: children.adopted(orders[number]) == pids[number])
        assert children.adopted(order(2)) is None
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            assert children.end([pid])[0].status.status == signal.SIGKILL
