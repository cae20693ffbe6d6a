"""The table is readable, and so is the JSON."""

from __future__ import annotations

import json

import pytest
from plans import assert_golden, plan, request

from fleetrun.model import (
    LaunchPlan,
    Request,
    Setting,
)
from fleetrun.plan import render

NASTY_ARGS = (
    "--x",
    "a b",
    "",
    "it's",
    "two\nlines\n",
    "tab\tbell\x07cr\r",
    "naïve 漢字 🚀",
    "x" * 5000,
)


# -------------------------------------------------------------------------------------- the table


def two_hosts() -> list[LaunchPlan]:
    hosts = ("10.0.0.1", "10.0.0.2")
    return [plan(hosts=hosts, node=node) for node in range(2)]


def test_table_is_what_it_was() -> None:
    assert_golden("dry-run.txt", render.table([plan()], request()))


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


# --------------------------------------------------------------------------------------- the json


def test_json_holds_the_whole_plan() -> None:
    planned = plan(argv=("python", *NASTY_ARGS), files={"log/x": "text"}, notes=("A remark.",))
    document = json.loads(render.as_json([planned], request()))
    assert document["schema"] == 2
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
        "cwd", "files", "here", "host", "log_dir", "node_rank", "notes",
        "processes", "run_dir",
    ]  # fmt: skip
    assert sorted(document["nodes"][0]["processes"][0]) == [
        "argv", "cpus", "env", "error_log", "essential", "log", "name", "rank", "unset",
    ]  # fmt: skip


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


@pytest.mark.parametrize("form", ["overview", "table", "json"])
def test_no_form_prints_a_secret(form: str) -> None:
    made = plan(env=SECRETS)
    text = {
        "overview": lambda: render.overview([made], secret_request()),
        "table": lambda: render.table([made], secret_request()),
        "json": lambda: render.as_json([made], secret_request()),
    }[form]()
    assert "1234" not in text
    assert "hunter2" not in text
    assert "WANDB_API_KEY" in text
