"""The first lines on the console: at most five, as wide as a terminal, with all that matters."""

from __future__ import annotations

import pytest
from plans import assert_golden, plan, request

from fleetrun.model import Device, LaunchPlan, Strategy
from fleetrun.plan.brief import brief
from fleetrun.text import display_width

HOSTS = ("10.0.0.1", "10.0.0.2")


def lines_of(made: LaunchPlan, **changes: object) -> list[str]:
    return brief(request(**changes), made)


def with_devices(made: LaunchPlan, *groups: tuple[Device, ...]) -> LaunchPlan:
    processes = tuple(
        process._replace(rank=process.rank._replace(devices=devices))
        for process, devices in zip(made.processes, groups, strict=True)
        if process.rank is not None
    )
    return made._replace(processes=processes)


def test_banner_is_what_it_was() -> None:
    assert_golden("banner.txt", "\n".join(lines_of(plan())) + "\n")


def test_banner_of_a_host_among_several_says_which_of_the_ranks_are_its_own() -> None:
    first, *_ = lines_of(plan(hosts=HOSTS, node=1))
    assert first == "starting train.py on 10.0.0.2 (node rank 1 of 2 nodes): ranks 2-3 of 4"


@pytest.mark.parametrize(
    ("groups", "shown"),
    [
        (((), ()), "none (CPU)"),
        (((Device("gpu", "0", 0),), (Device("gpu", "1", 1),)), "gpu 0-1"),
        (((Device("gpu", "GPU-1f", 0),), (Device("gpu", "GPU-2e", 1),)), "gpu GPU-1f, GPU-2e"),
        (
            (
                (Device("gpu", "0", 0), Device("gpu", "1", 1)),
                (Device("gpu", "2", 2), Device("gpu", "5", 3)),
            ),
            "gpu 0-2, 5 (2 for each process)",
        ),
    ],
)
def test_banner_says_devices_and_backend(
    groups: tuple[tuple[Device, ...], ...], shown: str
) -> None:
    made = with_devices(plan(env={"PADDLE_DISTRI_BACKEND": "nccl"}), *groups)
    assert lines_of(made)[1] == f"devices {shown}; backend nccl"


@pytest.mark.parametrize(
    ("strategy", "line"),
    [
        (
            Strategy(("comm_fusion", "--set"), ()),
            "strategy comm_fusion, --set; the script's settings win",
        ),
        (Strategy(("my.yaml",), (), mode="override"), "strategy my.yaml; it wins"),
    ],
)
def test_banner_names_the_strategy_and_who_wins(strategy: Strategy, line: str) -> None:
    assert lines_of(plan(strategy=strategy))[2] == line


def test_a_narrow_terminal_gets_whole_words_and_paths() -> None:
    lines = brief(request(), plan(hosts=HOSTS, node=1), width=50)
    assert " ".join(line.strip() for line in lines).startswith(
        "starting train.py on 10.0.0.2 (node rank 1 of 2 nodes): ranks 2-3 of 4 devices "
    )
    assert max(map(display_width, lines[:-1])) <= 50 - len("fleetrun: ")
    assert lines[-1].endswith("log/runs/20261121T040700Z-default/launch.txt")
