"""Tuning real launches of a script that pretends to train, and records it like `inject`."""

from __future__ import annotations

import json
import signal
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from checkout import environ
from commandline import fleetrun, started
from processes import MARKER, Job, assert_no_survivors

from fleetrun.commands.tune import held_folder, trials

if TYPE_CHECKING:
    import subprocess

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
# Larger buckets are faster, 64 MB do not fit; the times are invented, so none is spent.
SCRIPT = """
import json, os, sys
rank = os.environ["PADDLE_TRAINER_ID"]
asked = json.load(open(os.environ["FLEETRUN_STRATEGY_FILE"]))["strategy"]
size = asked["fuse_grad_size_in_MB"]
if size == 64:
    raise MemoryError("64 MB are too many")
with open(os.environ["FLEETRUN_RECORDS"], "w") as file:
    for number in range(1, int(os.environ["FLEETRUN_STOP_AFTER"]) + 1):
        # The first steps are slow, and one rank is late.
        slow = 2 if size != "plan" else 52
        at = 100 + number / (3 if size == "plan" else size) if number > slow else number
        record = {"number": number, "at": at + 0.001 * int(rank), "loss": 1 / number}
        print(json.dumps({"schema": 1, "kind": "update", **record}), file=file)
assert sys.argv[1:] == ["--steps=7"]
"""


def tune(folder: Path, *words: str, script: str = SCRIPT) -> subprocess.CompletedProcess[str]:
    (folder / "train.py").write_text(script)
    marker = uuid.uuid4().hex
    done = fleetrun("tune", *words, "train.py", "--steps=7", folder=folder, **{MARKER: marker})
    assert_no_survivors(marker)
    return done


def test_the_fastest_that_works_is_chosen_and_everything_is_kept(tmp_path: Path) -> None:
    done = tune(
        tmp_path,
        "--vary=fuse_grad_size_in_MB=plan,4,64",
        "--strategy=gradient_merge",
        "--set=flags.FLAGS_x=1",
        "--env=A_TOKEN=b",
        "--steps=10",
        "--warmup=2",
        "--repeats=1",
        "--nproc_per_node=2",
        "--out=best",
    )
    assert done.returncode == 0, done.stderr
    first = next(line for line in done.stdout.splitlines() if line.startswith("1 "))
    assert first.split()[:3] == ["1", "4.00", "-"]
    assert "failed" in done.stdout
    assert "MemoryError: 64 MB are too many" in done.stdout
    assert "Fastest: fuse_grad_size_in_MB=4. Launch with --strategy=best/best.yaml." in done.stdout
    chosen = yaml.safe_load((tmp_path / "best" / "best.yaml").read_text())
    assert chosen == {
        "strategy": {
            "gradient_merge": True,
            "gradient_merge_configs": {"k_steps": 4, "avg": True},
            "fuse_grad_size_in_MB": 4,
        },
        "flags": {"FLAGS_x": "1"},
    }
    kept = json.loads((tmp_path / "best" / "tune.json").read_text())
    assert kept["best"] == {"fuse_grad_size_in_MB": "4"}
    assert [candidate["updates"] for candidate in kept["candidates"]] == [10, 10, 5]
    assert kept["candidates"][0]["peak_bytes"] > 1_000_000
    page = (tmp_path / "best" / "tune.html").read_text()
    assert page.count('class="bar"') == 3
    assert "64 MB are too many" in page


def test_when_nothing_trains_nothing_is_chosen(tmp_path: Path) -> None:
    (tmp_path / "tune").mkdir()
    (tmp_path / "tune" / "best.yaml").write_text("strategy: {}\n")
    done = tune(
        tmp_path, "--vary=fuse_grad_size_in_MB=1", "--repeats=1", "--nproc_per_node=1", script=""
    )
    assert done.returncode == 1
    assert "no update was seen" in done.stdout
    assert not (tmp_path / "tune" / "best.yaml").exists()


def test_a_script_that_ends_before_it_is_timed_is_said_to(tmp_path: Path) -> None:
    script = """
import json, os
with open(os.environ["FLEETRUN_RECORDS"], "w") as file:
    for number in (1, 2):
        record = {"schema": 1, "kind": "update", "number": number, "at": number}
        print(json.dumps(record), file=file)
"""
    options = "--scaling=1,2", "--repeats=1"
    done = tune(tmp_path, *options, script=script)
    assert done.returncode == 1
    assert "it succeeded after 2 updates, too few to time" in done.stdout


def test_what_to_write_is_said_without_a_secret_to_hide(tmp_path: Path) -> None:
    done = tune(tmp_path)
    problem = (
        "nothing to tune: give at least one --vary, as in --vary nccl_comm_num=1,2, or --scaling, "
        "as in --scaling=1,2,4."
    )
    assert (done.returncode, done.stderr) == (2, f"fleetrun: {problem}\n")


def test_a_value_that_cannot_be_meant_is_refused_before_anything_runs(tmp_path: Path) -> None:
    done = tune(tmp_path, "--vary=fuse_grad_size_in_MB=1,many")
    assert done.returncode == 2
    assert "fuse_grad_size_in_MB=many: give a whole number of MB" in done.stderr
    assert not (tmp_path / "tune").exists()


def test_a_folder_that_cannot_be_made_is_a_sentence_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    done = tune(tmp_path, "--vary=fuse_grad_size_in_MB=1", "--out=taken/tune")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "fleetrun: taken/tune cannot be written (Not a directory); see --out.\n"


def test_a_launch_that_is_refused_is_not_judged_by_an_earlier_one(tmp_path: Path) -> None:
    options = ["--vary=fuse_grad_size_in_MB=1", "--repeats=1", "--steps=8"]
    assert tune(tmp_path, *options, "--nproc_per_node=1").returncode == 0
    done = tune(tmp_path, *options, "--nproc_per_node=none")
    assert done.returncode == 1
    assert "--nproc_per_node=none" in done.stdout


def test_a_run_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    options = ["--vary=fuse_grad_size_in_MB=1", "--timeout=1", "--repeats=1", "--nproc_per_node=1"]
    done = tune(tmp_path, *options, script="import time; time.sleep(60)")
    assert done.returncode == 1
    assert "it was stopped after 1 s" in done.stdout


def test_help_says_what_to_write(tmp_path: Path) -> None:
    done = tune(tmp_path, "--help")
    assert done.stdout.startswith("Usage: fleetrun tune --vary KEY=A,B")


def test_half_a_line_and_the_later_rank_are_dealt_with(tmp_path: Path) -> None:
    made = {0: ((1, 1.0, 0.5), (2, 2.0, None), (3, 3.0, None)), 1: ((1, 1.5, 0.7),)}
    for rank, updates in made.items():
        keys = ("number", "at", "loss")
        lines = [
            json.dumps({"schema": 1, "kind": "update", **dict(zip(keys, update, strict=True))})
            for update in updates
        ]
        lines += ["x", '{"schema": 1, "kind": "update"}', lines[0].replace("1", "9")[:-1]]
        (tmp_path / f"rank.{rank}.jsonl").write_text("\n".join(lines))
    assert trials.read_updates(tmp_path) == (
        {1: 1.5, 2: 2.0, 3: 3.0},
        {0: {1: 0.5}, 1: {1: 0.7}},
    )


# The profile of a training whose second rank is late, and whose data is slow.
SCALED = """
import json, os
rank, ranks = int(os.environ["PADDLE_TRAINER_ID"]), int(os.environ["PADDLE_TRAINERS_NUM"])
steps, _, path = os.environ["FLEETRUN_PROFILE"].partition(":")
first, last = map(int, steps.split("-"))
assert last + 1 == int(os.environ["FLEETRUN_STOP_AFTER"])
forward = 0.1 + 0.05 * rank
data = 0.01 if ranks == 1 else 0.06
backward = {1: 0.2, 2: 0.225}[ranks] + 0.05 - 0.05 * rank
sends = 0.1 if ranks == 2 and "FLEETRUN_STRATEGY_FILE" not in os.environ else 0.0
seconds = {"data": data, "forward": forward, "backward": backward + sends, "step": 0.5 + sends}
def span(name, at, seconds, args={}):
    return {"ph": "X", "name": name, "cat": name.split()[0], "pid": rank, "tid": 0, "ts": at * 1e6,
            "dur": seconds * 1e6, "args": args}
events = [{"ph": "M", "name": "thread_name", "pid": rank, "tid": 0, "args": {"name": "training"}}]
for step in range(first, last + 1):
    events += [span(f"step {step}", step, 0.5), span("data", step, data)]
    ready = step + data + forward
    events += [span("forward", step + data, forward), span("backward", ready, backward + sends)]
summary = {"steps": last + 1 - first, "seconds": seconds, "hidden": None}
more = {"rank": rank, "first_step": first, "summary": summary}
json.dump({"schema": 1, "traceEvents": events, "otherData": more}, open(path, "w"))
"""


def test_what_scaling_is_lost_to_is_told_and_tried(tmp_path: Path) -> None:
    done = tune(tmp_path, "--scaling=1,2", "--warmup=2", "--repeats=1", script=SCALED)
    assert (done.returncode, done.stderr) == (0, "")
    rows = [line.split() for line in done.stdout.splitlines()]
    assert next(row for row in rows if row[:1] == ["2"] and "ms" in row)[1:5] == [
        "600.0",
        "ms",
        "1.67",
        "83%",
    ]
    kept = json.loads((tmp_path / "tune" / "scaling.json").read_text())
    assert [size["number"] for size in kept["sizes"]] == [1, 2]
    assert [change["cause"] for change in kept["changes"]] == ["communication", "waiting", "data"]
    assert "rank 1 is 50.0 ms later than the others" in done.stdout
    assert "Tried --strategy=recommended: 1.20 times as fast." in done.stdout


# The second rank is late in its backward; who waits for buckets is recorded with a strategy only.
LATE_BACKWARD = SCALED.replace(
    "def span(",
    """
forward, backward, sends = 0.1, 0.2 * ranks, 0.0
seconds = {"data": data, "forward": 0.1, "backward": backward, "step": 0.3 + backward}
waited = (0.3, 0.01)[rank] if ranks == 2 and "FLEETRUN_STRATEGY_FILE" in os.environ else 0.0
if waited:
    seconds |= {"backward": backward - waited, "running": backward - waited, "wait": waited}
def span(""",
).replace(
    "summary =",
    """
    events += [span("wait for bucket 0", ready + backward - waited, waited)] * bool(waited)
summary =""",
)


def test_a_rank_that_is_late_in_its_backward_is_found_by_what_is_tried(tmp_path: Path) -> None:
    done = tune(tmp_path, "--scaling=1,2", "--warmup=2", "--repeats=1", script=LATE_BACKWARD)
    assert (done.returncode, done.stderr) == (0, "")
    kept = json.loads((tmp_path / "tune" / "scaling.json").read_text())
    then = [change["then"] for change in kept["changes"] if change["cause"] == "communication"]
    late = "rank 1 is 290.0 ms later than the others, and computes 290.0 ms longer in its backward"
    assert then == [f"{late}; the others wait for it, and not for communication"]
    assert f"   Its profiles show more: {then[0]}.\n" in done.stdout


@pytest.mark.parametrize("options", [("--scaling=1,2,3",), ("--vary=fuse_grad_size_in_MB=1,64",)])
def test_results_are_one_json_object_if_that_is_asked_for(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    words = (*options, "--json", "--warmup=2", "--repeats=1")
    is_scaling = options[0].startswith("--scaling")
    script = {"script": SCALED} if is_scaling else {}
    done = tune(tmp_path, *words, **script)
    assert done.returncode == is_scaling
    shown = json.loads(done.stdout)
    name = "scaling.json" if is_scaling else "tune.json"
    assert shown == json.loads((tmp_path / "tune" / name).read_text())
    if not is_scaling:
        assert "Fastest: " in done.stderr
        return
    assert "in turns\n" in done.stderr
    first, second, failed = shown["sizes"]
    assert (first["efficiency"], first["speedup"]) == (1.0, 1.0)
    assert second["efficiency_range"] == [pytest.approx(0.5 / 0.6)] * 2
    assert (second["speedup"], second["step_s"]) == (pytest.approx(1 / 0.6), 0.6)
    assert second["lost_s"]["data"] == pytest.approx(0.05)
    assert (failed["efficiency"], failed["lost_s"]) == (None, None)
    assert "KeyError: 3" in failed["runs"][0]["fault"]
    change = shown["changes"][0]
    assert change["at_most"] == pytest.approx(1 / (1 - change["share"]))
    assert change["tried_range"] == [change["tried"]] * 2


def test_a_size_that_fails_is_told_and_the_others_are_compared(tmp_path: Path) -> None:
    done = tune(tmp_path, "--scaling=1,2,3", "--repeats=1", "--warmup=2", script=SCALED)
    assert done.returncode == 1
    assert "KeyError: 3" in done.stdout
    assert "83%" in done.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--scaling=2"], "give two or more numbers of devices"),
        (["--scaling=1,x"], "give two or more numbers of devices"),
        (["--scaling=1,\uff12"], "give two or more numbers of devices"),
        (["--scaling=1,2", "--vary=a=1"], "--scaling and --vary are two measurements"),
        (["--scaling=1,2", "--nproc_per_node=2"], "gives --nproc_per_node itself"),
        (["--scaling=1,4", "--gpus=0-1"], "--gpus=0-1 has 2"),
        (["--scaling=1,2", "--hosts=a:1"], "--hosts=a:1 has 1"),
    ],
)
def test_what_cannot_be_scaled_is_refused(tmp_path: Path, words: list[str], says: str) -> None:
    done = tune(tmp_path, *words, script=SCALED)
    assert done.returncode == 2
    assert says in done.stderr
    assert not (tmp_path / "tune").exists()


@pytest.mark.parametrize(
    ("script", "code", "says"),
    [
        ("train.py", 2, "fleetrun: 4 processes, 2 devices; "),
        ("none.py", 3, "fleetrun: There is no script none.py in "),
    ],
)
def test_a_size_that_cannot_start_is_refused_before_any_runs(
    tmp_path: Path, script: str, code: int, says: str
) -> None:
    (tmp_path / "train.py").write_text("")
    devices = {"FLEETRUN_ASSUME_DEVICES": "gpu:2", "CUDA_VISIBLE_DEVICES": "0,1"}
    done = fleetrun("tune", "--scaling=4,1", script, folder=tmp_path, **devices)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.startswith(says)
    assert done.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
def test_a_run_ends_with_the_command_that_started_it(
    tmp_path: Path, signum: signal.Signals
) -> None:
    script = "import pathlib, signal; pathlib.Path('runs').touch(); signal.pause()"
    (tmp_path / "train.py").write_text(script)
    job = Job(tmp_path)
    words = "tune", "--scaling=1,2", "train.py"
    with started(*words, folder=tmp_path, env=environ(**{MARKER: job.marker})) as command:
        job.wait_for("runs")
        command.send_signal(signum)
        command.communicate()
    assert_no_survivors(job.marker)


def test_a_folder_of_another_command_is_left_alone(tmp_path: Path) -> None:
    folder = tmp_path / "tune"
    folder.mkdir()
    with held_folder(str(folder)):
        done = tune(tmp_path, "--vary=fuse_grad_size_in_MB=1")
    assert (done.returncode, done.stdout) == (3, "")
    assert "Another fleetrun tune or verify is using tune: " in done.stderr
    assert list(folder.iterdir()) == []
    with held_folder(str(folder)):
        pass
