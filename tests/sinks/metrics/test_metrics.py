"""The process that measures: its file, its server, and that it never disturbs the job."""

from __future__ import annotations

import importlib
import importlib.util
import os
import signal
import socket
import urllib.request
from typing import TYPE_CHECKING, Any

import plans
import pytest
from commandline import Command
from ports import free
from processes import survivors
from terminals import state
from waiting import until

from fleetrun.errors import EnvironmentFault
from fleetrun.run import children
from fleetrun.run.events import Finished, Outcome
from fleetrun.run.loop import Loop
from fleetrun.rundir import metricsfile, names
from fleetrun.sinks.metrics import Metrics

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.slow

# Works a little.
TRAIN = """
held = bytearray(32 << 20)
step = 0
while not os.path.exists("go"):
    step += 1
    print(f"step {step} loss {1 / step:.3f}", flush=True)
    sum(range(100_000))
    time.sleep(0.01)
"""
OFTEN = "--metrics_period=0.2"


def records(job: Command) -> list[metricsfile.MetricsRecord]:
    path = str(job.folder / "log" / "latest" / names.METRICS)
    return list(metricsfile.spread(path, 100_000))


def scrape(port: int) -> dict[str, dict[str, float]]:
    """Return each sample's value by its name and rank."""
    accept = {"Accept": "application/openmetrics-text; version=1.0.0; charset=utf-8"}
    asked = urllib.request.Request(f"http://127.0.0.1:{port}/metrics", headers=accept)
    with urllib.request.urlopen(asked, timeout=60) as answer:  # noqa: S310 - see above
        text = answer.read().decode()
    samples: dict[str, dict[str, float]] = {}
    # It has no types.
    parser: Any = importlib.import_module("prometheus_client.openmetrics.parser")
    for family in parser.text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[sample.labels.get("rank", "")] = sample.value
    return samples


def is_whole(record: metricsfile.MetricsRecord) -> bool:
    """Whether all that two ranks of TRAIN use and say is in a record; they free it at their end."""
    return len(record.ranks) == 2 and all(
        rank.memory_bytes > 32 << 20 and rank.cpu_s and rank.cpu_percent and rank.loss is not None
        for rank in record.ranks
    )


def meters(job: Command) -> list[int]:
    """Return the processes that measure JOB."""
    return [pid for pid, words in survivors(job.marker).items() if "sinks.metrics" in words]


def test_what_ranks_use_is_written_and_served(tmp_path: Path) -> None:
    [port] = free(1)
    job = Command.python(tmp_path, TRAIN, OFTEN, f"--metrics_port={port}")
    launcher = job.start()
    until(lambda: any(is_whole(record) for record in records(job)))
    [meter] = meters(job)
    # As Slurm does to every process of a step.
    os.kill(meter, signal.SIGUSR1)
    os.kill(meter, signal.SIGTERM)
    served = scrape(port)
    done = job.release(launcher)
    assert (done.code, done.stderr) == (0, "")
    whole = next(record for record in records(job) if is_whole(record))
    assert [rank.rank for rank in whole.ranks] == [0, 1]
    pids = {event["pid"] for event in job.events() if event["event"] == "started"}
    assert {rank.pid for rank in whole.ranks} == pids
    assert all((rank.step or 0) >= 1 for rank in whole.ranks)
    assert whole.system.memory_total_bytes
    assert whole.gpus == ()
    assert served["fleetrun_rank_memory_bytes"]["1"] > 32 << 20
    assert served["fleetrun_rank_step"]["0"] >= 1
    assert served["fleetrun_rank_cpu_seconds_total"]["0"] > 0
    assert served["fleetrun_attempt"][""] == 0
    assert (job.folder / "log" / "latest" / names.METRICS).stat().st_mode & 0o777 == 0o600


def test_the_job_goes_on_without_it(tmp_path: Path) -> None:
    [port] = free(1)
    job = Command.python(tmp_path, TRAIN, OFTEN, f"--metrics_port={port}")
    console = tmp_path / "said"
    with console.open("wb") as stderr:
        launcher = job.start(stderr=stderr)
    until(lambda: records(job))
    [meter] = meters(job)
    os.kill(meter, signal.SIGKILL)
    sentence = "has ended; the job goes on without metrics."
    # Before the end of the ranks: a launcher that sees both at once has nothing to tell.
    until(lambda: sentence in console.read_text())
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert job.release(launcher).code == 0
    assert console.read_text().count(sentence) == 1


def test_it_ends_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    job = Command.python(tmp_path, TRAIN, OFTEN)
    launcher = job.start()
    until(lambda: records(job))
    assert meters(job)
    launcher.kill()
    # Which looks for survivors.
    job.finish(launcher)


def test_it_is_killed_when_the_job_is_over(tmp_path: Path) -> None:
    folder = tmp_path / "log" / "runs" / "a"
    folder.mkdir(parents=True)
    plan = plans.plan(cwd=str(tmp_path), log_dir="log", run_dir=str(folder))
    sink, loop, before = Metrics(plans.job(plan, metrics_period_s=0.05)), Loop(), children.pids()
    sink.open(loop)
    loop.turn()
    until((folder / names.METRICS).exists)
    (meter,) = set(children.pids()) - set(before)
    sink.on_event(Finished(Outcome(None), 0.0))
    until(lambda: state(meter) == "Z")
    sink.close()
    loop.close()


def test_modules_of_the_job_are_not_taken_for_its_own(tmp_path: Path) -> None:
    for name in ("json", "socket", "psutil"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('of the job')\n")
    job = Command(tmp_path, "until [ -e go ]; do sleep 0.01; done", OFTEN)
    # Like the installed command, without the job's folder on sys.path.
    job.argv[1:3] = ["-c", "import sys; sys.path.pop(0); from fleetrun.__main__ import run; run()"]
    launcher = job.start()
    until(lambda: records(job))
    assert job.release(launcher).stderr == ""


def test_a_job_whose_port_is_taken_runs_with_a_warning_and_is_measured(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        job = Command(
            tmp_path, "until [ -e go ]; do sleep 0.01; done", OFTEN, f"--metrics_port={port}"
        )
        launcher = job.start()
        until(lambda: records(job))
        done = job.release(launcher)
    assert done.stderr == (
        f"fleetrun: --metrics_port={port} cannot be used (Address already in use): the metrics of "
        "this job are not served, metrics.jsonl has them.\n"
    )


def test_without_the_library_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleetrun.sinks.metrics.find_spec", lambda _: None)
    sink = Metrics(plans.job(plans.plan(), metrics_port=9400))
    with pytest.raises(EnvironmentFault) as caught:
        sink.prepare()
    assert "pip install prometheus-client" in str(caught.value)


def test_a_restart_leaves_who_measures(tmp_path: Path) -> None:
    have = "log/latest/metrics.jsonl"
    more = f"n=$(wc -l <{have}); until [ $(wc -l <{have}) -gt $n ]; do sleep 0.05; done"
    script = f"until [ -s {have} ]; do sleep 0.05; done; {more}; [ $PADDLE_RESTART_COUNT = 1 ]"
    done = Command(tmp_path, f"{script} || exit 5", OFTEN, "--max_restart=1", ranks=1).run()
    assert done.code == 0, done.stderr
    assert "without metrics" not in done.stderr
