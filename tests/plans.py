"""Requests and plans made by hand, to be shown in every form."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from fleetrun.model import (
    Device,
    Endpoint,
    LaunchPlan,
    ProcessSpec,
    RankSpec,
    Request,
    Rules,
    Script,
    Setting,
)
from fleetrun.run.observers import ObservedJob

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GOLDEN = Path(__file__).parent / "golden"


def request(**changes: object) -> Request:
    made = Request(
        script=Script("file", "train.py", ("--lr", "0.1")),
        nproc_per_node=2,
        settings=(
            Setting("nproc_per_node", "2", "command line"),
            Setting("log_level", "debug", "$PADDLE_LOG_LEVEL"),
            Setting("ips", "", "default"),
            Setting("log_dir", "log", "default"),
            Setting("max_restart", "0", "default"),
        ),
    )
    return made._replace(**changes)  # type: ignore[arg-type]


def plan(
    *,
    hosts: tuple[str, ...] = ("127.0.0.1",),
    node: int = 0,
    per_node: int = 2,
    argv: tuple[str, ...] = ("/usr/bin/python3", "-u", "train.py", "--lr", "0.1"),
    env: dict[str, str] | None = None,
    cwd: str = "/home/me/job",
    splits_logs: bool = False,
    **changes: object,
) -> LaunchPlan:
    ranks = tuple(
        RankSpec(
            role="TRAINER",
            rank=at * per_node + local,
            local_rank=local,
            node_rank=at,
            devices=(Device("gpu", str(4 + local), local),),
            endpoint=Endpoint(host, 6070 + local),
        )
        for at, host in enumerate(hosts)
        for local in range(per_node)
    )
    endpoints = ",".join(str(rank.endpoint) for rank in ranks)
    processes = tuple(
        ProcessSpec(
            name=f"trainer.{rank.rank}",
            argv=argv,
            env={
                "PADDLE_TRAINER_ID": str(rank.rank),
                "PADDLE_CURRENT_ENDPOINT": str(rank.endpoint),
                "PADDLE_TRAINERS_NUM": str(len(ranks)),
                "PADDLE_TRAINER_ENDPOINTS": endpoints,
                "FLAGS_selected_gpus": str(rank.local_rank),
                **(env or {}),
            },
            unset=("PADDLE_MASTER",),
            log=f"workerlog.{rank.local_rank}",
            error_log=f"workererr.{rank.local_rank}" if splits_logs else "",
            rank=rank,
        )
        for rank in ranks
        if rank.node_rank == node
    )
    made = LaunchPlan(
        job_id="default",
        mode="collective",
        engine="static" if len(hosts) > 1 else "local",
        generation=0,
        node_rank=node,
        nodes=hosts,
        ranks=ranks,
        processes=processes,
        rules=Rules(),
        cwd=cwd,
        log_dir="log",
        run_dir="log/runs/20261121T040700Z-default",
    )
    return made._replace(**changes)  # type: ignore[arg-type]


def refuse(text: str) -> None:
    raise AssertionError(text)


def job(
    made: LaunchPlan,
    *,
    log: Callable[[str], None] = refuse,
    asked: Request | None = None,
    **changes: object,
) -> ObservedJob:
    """Return the job of the plan MADE, for a request with CHANGES, which logs nothing."""
    begun = ObservedJob(asked or request(**changes), {}, log=log)
    begun.begin(made)
    return begun


def generation(
    essential: Sequence[bool], awaiting: Sequence[int] = (), *, has_peers: bool = False
) -> LaunchPlan:
    """Make a plan of processes that are essential or not; those AWAITING something wait for it."""
    needed = ((Endpoint("127.0.0.1", 1),),)
    processes = tuple(
        ProcessSpec(
            name=f"process.{index}",
            argv=(),
            env={},
            unset=(),
            log=f"workerlog.{index}",
            essential=is_essential,
            awaits=needed if index in awaiting else (),
        )
        for index, is_essential in enumerate(essential)
    )
    return plan(per_node=0, processes=processes, has_session=has_peers)


def assert_golden(name: str, text: str) -> None:
    """Compare TEXT with tests/golden/NAME; `UPDATE_GOLDEN=1` writes it anew, on purpose."""
    path = GOLDEN / name
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert text == path.read_text()
