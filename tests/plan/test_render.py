"""The table is readable, and the sh form really launches."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from plans import assert_golden, plan, request
from waiting import LONG_S, until

from fleetrun.model import (
    LaunchPlan,
    ProcessSpec,
    Request,
    Setting,
)
from fleetrun.plan import render

SHELLS = [name for name in ("dash", "bash") if shutil.which(name)]

# Writes argv, environment and folder of one rank beside itself.
DUMP = """
import json, os, sys
out = os.path.join(os.environ["DUMP"], os.environ["PADDLE_TRAINER_ID"])
with open(out + ".part", "w") as file:
    json.dump({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}, file)
os.rename(out + ".part", out)
print("hello from", os.environ["PADDLE_TRAINER_ID"])
sys.exit(int(os.environ.get("EXIT", "0")))
"""

NASTY_ARGS = (
    "--x",
    "a b",
    "",
    "--",
    "it's",
    'say "hi"',
    "two\nlines\n",
    "FLEETRUN",
    "\nFLEETRUN\n",
    "tab\tbell\x07cr\r",
    "$HOME `id` \\ !! !$ *",
    "naïve 漢字 🚀",
    "{a,b}",
    "~",
    "x" * 5000,
)


# -------------------------------------------------------------------------------------- the table


def two_hosts() -> list[LaunchPlan]:
    hosts = ("10.0.0.1", "10.0.0.2")
    return [plan(hosts=hosts, node=node) for node in range(2)]


def test_table_is_what_it_was() -> None:
    assert_golden("dry-run.txt", render.table([plan()], request()))


def test_the_file_of_a_launch_is_the_table_without_its_heading() -> None:
    table = render.table([plan()], request())
    assert render.overview([plan()], request()) == table.partition("\n\n")[2]


def test_another_attempt_has_its_number_and_an_environment_of_its_own() -> None:
    text = render.attempt(plan(env={"PADDLE_RESTART_COUNT": "2"}, generation=2))
    assert text.startswith("\nAttempt 2\n")
    assert "PADDLE_RESTART_COUNT=2" in text
    assert "rank 1" in text


def test_table_of_two_hosts_is_what_it_was() -> None:
    plans = [
        host._replace(notes=("A remark.",), files={"log/runs/x/list": "a"}) for host in two_hosts()
    ]
    assert_golden("dry-run-two-hosts.txt", render.table(plans, request(), here=1))


def test_table_fits_into_100_columns() -> None:
    many = plan(
        per_node=64,
        argv=("python", "x" * 300, "word " * 60, *NASTY_ARGS),
        env={"LONG": "y" * 500, "CONTROL": "a\nb\tc\x1b[31m", "": ""},
    )
    text = render.table([many], request())
    assert max(map(len, text.splitlines())) <= 100
    assert "\x1b" not in text


def test_table_says_what_nobody_has_set_in_words() -> None:
    unset = (Setting("host", "None", "default"), Setting("ips", "None", "command line"))
    lines = render.table([plan()], request(settings=unset)).splitlines()
    assert "  host  not set  (default)" in lines
    assert "  ips   None  (command line)" in lines


def test_table_tells_what_all_ranks_share_once() -> None:
    text = render.table([plan()], request())
    assert text.count("PADDLE_TRAINERS_NUM=2") == 1
    assert text.count("PADDLE_TRAINER_ID=") == 2


def test_table_of_a_plan_without_processes_is_a_table() -> None:
    assert "0 processes on 1 node" in render.table([plan()._replace(processes=())], request())


def test_table_knows_processes_that_are_no_ranks() -> None:
    only = ProcessSpec("ssh host", ("ssh", "host"), {}, ("A",), "ssh.log")
    other = ProcessSpec("ssh other", ("ssh", "other"), {}, (), "ssh2.log")
    text = render.table([plan()._replace(processes=(only, other))], request())
    assert "ssh host" in text
    assert "      A is removed" in text


# --------------------------------------------------------------------------------------- the json


def test_json_holds_the_whole_plan() -> None:
    planned = plan(argv=("python", *NASTY_ARGS), files={"log/x": "text"}, notes=("A remark.",))
    document = json.loads(render.as_json([planned], request()))
    assert document["schema"] == 1
    (node,) = document["nodes"]
    assert node["here"] is True
    assert node["files"] == {"log/x": "text"}
    for shown, process in zip(node["processes"], planned.processes, strict=True):
        assert tuple(shown["argv"]) == process.argv
        assert shown["env"] == process.env
        assert process.rank is not None
        assert shown["rank"]["endpoint"] == str(process.rank.endpoint)
        assert shown["rank"]["devices"] == [
            {"kind": "gpu", "id": process.rank.devices[0].id, "ordinal": process.rank.local_rank}
        ]


def test_json_keys_are_stable() -> None:
    document = json.loads(render.as_json([plan()], request()))
    assert sorted(document) == [
        "engine", "generation", "job_id", "mode", "nodes", "rules", "schema", "script", "settings",
    ]  # fmt: skip
    assert sorted(document["nodes"][0]) == [
        "cwd", "files", "here", "host", "links", "log_dir", "node_rank", "notes",
        "processes", "run_dir",
    ]  # fmt: skip
    assert sorted(document["nodes"][0]["processes"][0]) == [
        "argv", "cpus", "env", "error_log", "essential", "log", "name", "rank", "unset",
    ]  # fmt: skip


def test_json_of_a_process_without_a_rank() -> None:
    only = ProcessSpec("ssh host", ("ssh", "host"), {}, (), "ssh.log")
    document = json.loads(render.as_json([plan()._replace(processes=(only,))], request()))
    assert document["nodes"][0]["processes"][0]["rank"] is None


# ----------------------------------------------------------------------------------------- the sh


def dumping_plan(
    tmp_path: Path, *, codes: tuple[int, ...] = (0, 0), **changes: object
) -> LaunchPlan:
    """Return a plan whose ranks write what they got into TMP_PATH/dump and exit with CODES."""
    job = tmp_path / "a job's folder"
    job.mkdir()
    (tmp_path / "dump").mkdir()
    (job / "dump.py").write_text(DUMP)
    env = {"DUMP": str(tmp_path / "dump"), "EMPTY": "", "QUOTES": "a 'b' \"c\"\n$d"}
    made = plan(argv=(sys.executable, "-u", "dump.py", *NASTY_ARGS), env=env, cwd=str(job))
    processes = tuple(
        process._replace(env={**process.env, "EXIT": str(code)})
        for process, code in zip(made.processes, codes, strict=True)
    )
    return made._replace(processes=processes, **changes)  # type: ignore[arg-type]


def assert_launched(made: LaunchPlan, tmp_path: Path, inherited: dict[str, str]) -> None:
    for process in made.processes:
        assert process.rank is not None
        got = json.loads((tmp_path / "dump" / str(process.rank.rank)).read_text())
        assert tuple(got["argv"]) == process.argv[3:]
        assert got["cwd"] == made.cwd
        env = {
            name: value
            for name, value in got["env"].items()
            if name not in {"_", "PWD", "OLDPWD", "SHLVL"}
        }
        wanted = {**inherited, **process.env}
        for name in process.unset:
            wanted.pop(name, None)
        assert env == wanted
        log = Path(made.cwd, made.run_dir, process.log)
        assert log.read_text() == f"hello from {process.rank.rank}\n"


INHERITED = {
    "PATH": os.environ["PATH"],
    "HOME": "/root",
    "LC_ALL": "C.UTF-8",
    "PADDLE_MASTER": "old:1",
}


@pytest.mark.parametrize("name", SHELLS)
@pytest.mark.parametrize("way", ["file", "argument"])
def test_sh_form_starts_what_the_plan_says(name: str, way: str, tmp_path: Path) -> None:
    made = dumping_plan(tmp_path)
    text = render.as_sh([made], request())
    if way == "file":
        (tmp_path / "launch.sh").write_text(text)
        command = [name, str(tmp_path / "launch.sh")]
    else:
        command = [name, "-c", text]
    done = subprocess.run(command, env=INHERITED, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert_launched(made, tmp_path, INHERITED)


@pytest.mark.parametrize("name", SHELLS)
@pytest.mark.parametrize(("codes", "wanted"), [((0, 7), 7), ((3, 7), 3), ((0, 0), 0)])
def test_sh_form_returns_the_first_failing_code(
    name: str, codes: tuple[int, int], wanted: int, tmp_path: Path
) -> None:
    text = render.as_sh([dumping_plan(tmp_path, codes=codes)], request())
    assert subprocess.run([name, "-c", text], env=INHERITED, check=False).returncode == wanted


@pytest.mark.parametrize("name", SHELLS)
def test_sh_form_that_is_terminated_stops_its_ranks(name: str, tmp_path: Path) -> None:
    job = 'echo $$ >"$0.part"; mv "$0.part" "$0"; exec sleep 1000'
    made = plan(cwd=str(tmp_path), per_node=1, argv=("sh", "-c", job, str(tmp_path / "pid")))
    (tmp_path / "launch.sh").write_text(render.as_sh([made], request()))
    running = subprocess.Popen([name, str(tmp_path / "launch.sh")], start_new_session=True)
    until((tmp_path / "pid").exists)
    os.killpg(running.pid, signal.SIGTERM)
    assert running.wait(LONG_S) in {143, -signal.SIGTERM}
    rank = int((tmp_path / "pid").read_text())
    until(lambda: not Path(f"/proc/{rank}").exists())


@pytest.mark.parametrize("name", SHELLS)
def test_sh_form_writes_the_files_of_the_plan(name: str, tmp_path: Path) -> None:
    text = "10.0.0.1:6070,\n'" * 9000
    made = dumping_plan(tmp_path, files={"log/runs/x/end points": text, "top": ""})
    script = tmp_path / "launch.sh"
    script.write_text(render.as_sh([made], request()))
    assert subprocess.run([name, script], env=INHERITED, check=False).returncode == 0
    assert Path(made.cwd, "log/runs/x/end points").read_text() == text
    assert Path(made.cwd, "top").read_text() == ""


def test_sh_form_makes_the_links_of_the_plan(tmp_path: Path) -> None:
    made = dumping_plan(tmp_path, links={"log/runs/x/lib a.so": "/plug-ins/lib a.so"})
    assert "  link      log/runs/x/lib a.so to /plug-ins/lib a.so" in render.table(
        [made], request()
    )
    script = render.as_sh([made], request())
    assert subprocess.run(["sh", "-c", script], env=INHERITED, check=False).returncode == 0
    assert Path(made.cwd, "log/runs/x/lib a.so").readlink() == Path("/plug-ins/lib a.so")


def test_sh_form_of_two_hosts_starts_the_ranks_of_this_one(tmp_path: Path) -> None:
    made = dumping_plan(tmp_path)
    other = made._replace(
        node_rank=1,
        nodes=("127.0.0.1", "127.0.0.2"),
        processes=tuple(
            process._replace(env={**process.env, "PADDLE_TRAINER_ID": str(2 + at), "EXIT": "9"})
            for at, process in enumerate(made.processes)
        ),
    )
    first = made._replace(nodes=("127.0.0.1", "127.0.0.2"))
    text = render.as_sh([first, other], request())
    assert subprocess.run(["sh", "-c", text], env=INHERITED, check=False).returncode == 0
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["0", "1"]
    there = render.as_sh([first, other], request(), here=1)
    assert subprocess.run(["sh", "-c", there], env=INHERITED, check=False).returncode == 9
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["0", "1", "2", "3"]


def test_sh_form_runs_a_command_that_has_an_equals_sign_in_its_path(tmp_path: Path) -> None:
    (tmp_path / "lr=1").mkdir()
    command = tmp_path / "lr=1" / "job"
    command.write_text('#!/bin/sh\necho "$@" >out\n')
    command.chmod(0o755)
    made = plan(cwd=str(tmp_path), per_node=1, argv=(str(command), "a", "b"))
    subprocess.run(["sh", "-c", render.as_sh([made], request())], check=True)
    assert (tmp_path / "out").read_text() == "a b\n"


# ------------------------------------------------------------------------------------ the secrets

SECRETS = {
    "WANDB_API_KEY": "sk-live-1234",
    "http_proxy": "http://me:hunter2@proxy:3128",
}


def secret_request() -> Request:
    return request(
        env=tuple(SECRETS.items()),
        settings=(
            *(Setting(f"env.{k}", v, "command line") for k, v in SECRETS.items()),
            Setting("master", "etcd://root:hunter2@10.0.0.1:2379", "command line"),
        ),
    )


@pytest.mark.parametrize("form", ["overview", "table", "json", "sh"])
def test_no_form_prints_a_secret(form: str) -> None:
    made = plan(env=SECRETS)
    text = {
        "overview": lambda: render.overview([made], secret_request()),
        "table": lambda: render.table([made], secret_request()),
        "json": lambda: render.as_json([made], secret_request()),
        "sh": lambda: render.as_sh([made], secret_request()),
    }[form]()
    assert "1234" not in text
    assert "hunter2" not in text
    assert "WANDB_API_KEY" in text


@pytest.mark.parametrize("name", SHELLS)
def test_sh_form_takes_secrets_from_the_environment(name: str, tmp_path: Path) -> None:
    made = dumping_plan(tmp_path)
    first, second = made.processes
    odd = {"my.api.key": "dotted", "MY_TOKEN": "plain $(words)"}
    made = made._replace(processes=(first._replace(env={**first.env, **odd}), second))
    text = render.as_sh([made], request())
    assert "dotted" not in text
    assert "'my.api.key' is secret, and no name for a shell variable: it is left out" in text
    without = subprocess.run(
        [name, "-c", text], env=INHERITED, capture_output=True, text=True, check=False
    )
    assert without.returncode != 0
    assert "MY_TOKEN: is secret, so its value is not here: export it first" in without.stderr
    assert list((tmp_path / "dump").iterdir()) == []
    subprocess.run([name, "-c", text], env={**INHERITED, **odd}, check=True)
    got = json.loads((tmp_path / "dump" / "0").read_text())
    assert got["env"]["MY_TOKEN"] == odd["MY_TOKEN"]
