"""What `tune --scaling` reads of its runs, and what it says."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from commandline import Command
from metricsrecords import a_record

from fleetrun.commands.tune import losses, scaling
from fleetrun.records import metricsfile, names

if TYPE_CHECKING:
    from pathlib import Path


def test_the_profiles_of_all_hosts_are_read_and_a_host_without_one_is_counted(
    tmp_path: Path,
) -> None:
    """The log folder may be shared, or the files of other hosts come home into `node1`."""
    job = Command(tmp_path, "exit 0", ranks=1)
    assert job.run().code == 0
    (run,) = (tmp_path / "log" / "runs").iterdir()
    plan = json.loads((run / names.PLAN).read_text())
    (run / names.PLAN).write_text(json.dumps({**plan, "nodes": ["10.0.0.1", "10.0.0.2"]}))

    def leave(folder: Path, number: int) -> None:
        about = {"rank": number, "first_step": 1, "summary": {"steps": 1, "seconds": {"step": 1.0}}}
        trace = {"schema": 1, "traceEvents": [], "otherData": about}
        (folder / names.trace(str(number))).write_text(json.dumps(trace))

    leave(run, 0)
    traces, unseen_hosts = scaling.read_traces(tmp_path / "log" / "latest")
    assert ([trace.rank for trace in traces], unseen_hosts) == ([0], 1)
    other = run / "node1"
    other.mkdir()
    for name in (names.EVENTS, names.PLAN, names.LOCK):
        (other / name).write_text(
            (run / name).read_text().replace('"node_rank": 0', '"node_rank": 1')
        )
    leave(other, 1)
    traces, unseen_hosts = scaling.read_traces(tmp_path / "log" / "latest")
    assert ([trace.rank for trace in traces], unseen_hosts) == ([0, 1], 0)


def test_the_slowest_link_between_hosts_is_told_with_communication(tmp_path: Path) -> None:
    job = Command(tmp_path, "exit 0", ranks=1)
    assert job.run().code == 0
    latest = tmp_path / "log" / "latest"
    assert scaling.slowest_link(latest) == ""
    links = (
        metricsfile.LinkUse("10.0.0.2", 0.0002, 200 << 20, 2.0, 9, 0),
        metricsfile.LinkUse("10.0.0.3", 0.0101, 35 << 20, 2.0, 9, 0),
        # Nothing was sent there.
        metricsfile.LinkUse("10.0.0.4", 0.5, 1000, 2.0, 9, 0),
    )
    for shown in (links, ()):
        metricsfile.append(str(latest / names.METRICS), a_record()._replace(links=shown))
    link = scaling.slowest_link(latest)
    assert link == (
        "the slowest link between hosts, from h to 10.0.0.3, carries 17.5 MiB a second with round "
        "trips of 10.1 ms"
    )
    large = losses.StepTimes(2.0, backward=2.0, link=link)
    (change,) = losses.changes(losses.StepTimes(1.0, backward=1.0), large, ())
    assert change.text.endswith(f"(--strategy=recommended); {link}")


def test_on_a_device_forward_and_backward_are_said_to_be_launches() -> None:
    sizes = [scaling.JobSize(number, ()) for number in (1, 2)]
    run = scaling.ScaledRun(losses.StepTimes(1.0, device="gpu"))
    (text,) = scaling._remarks({size: [run] for size in sizes}, ())
    assert text.startswith("On a gpu, forward and backward are the time to launch kernels")


@pytest.mark.parametrize(
    ("small", "why"),
    [
        (losses.StepTimes(2.0), "see the processors and what else runs on them"),
        (
            losses.StepTimes(2.0, queued_rank=0, queued=1.5),
            "rank 0 waits 1500.0 ms of a step for a processor",
        ),
    ],
)
def test_more_than_all_speed_is_explained(small: losses.StepTimes, why: str) -> None:
    sizes = [scaling.JobSize(number, ()) for number in (1, 2, 4)]
    steps = (small, losses.StepTimes(1.0), losses.StepTimes(1.9))
    runs = {size: [scaling.ScaledRun(step)] * 2 for size, step in zip(sizes, steps, strict=True)}
    (text,) = scaling._remarks(runs, ())
    assert text == (
        f"A step with 1 takes longer than with 2, so it is slowed down ({why}), and efficiencies "
        "mean little."
    )
    assert list(scaling._remarks({**runs, sizes[0]: runs[sizes[1]]}, ())) == []


def test_a_long_error_stands_below_the_table() -> None:
    fault = "it exited with 1: " + "x" * 200
    sizes = [scaling.JobSize(number, ()) for number in (1, 2)]
    run = scaling.ScaledRun(losses.StepTimes(1.0))
    shown = scaling.table({sizes[0]: [run], sizes[1]: [scaling.ScaledRun(fault=fault)]}, 0)
    *figures, last = shown.split("\n")
    assert last == f"2 failed: {fault}"
    assert max(map(len, figures)) < 100
