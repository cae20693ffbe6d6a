"""What Paddle's own launchers gave their workers, command line by command line.

`golden/launch-cases.jsonl` was recorded from the launchers of Paddle 1.8.5, 2.0.0, 2.6.2 and 3.3.1,
on devices of a plug-in where it has `paddle_counts`, what Paddle saw of each kind. Ours gives every
worker the same variables (and more), or `OURS` says why it is better not to.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from plans import planned

from fleetrun.cli import request
from fleetrun.cli.argv import split
from fleetrun.errors import FleetrunError
from fleetrun.host import scripts
from fleetrun.model import Address, Facts, LaunchPlan, ProcessSpec, RankSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

# Two endpoints whose ports are neither equal nor those that Paddle begins with.
_FREE = {"PADDLE_TRAINER_ENDPOINTS": r"[\d.]+:(?!607\d,)(\d+),[\d.]+:(?!607\d$|\1$)\d+"}
CASES: list[dict[str, Any]] = [
    json.loads(line)
    for line in (Path(__file__).parent / "golden/launch-cases.jsonl").read_text().splitlines()
]


class Ours(NamedTuple):
    """How our answer differs on purpose: what it is, what it says, and which variables differ.

    GIVES has patterns of those that ranks have; None: they have none.
    """

    answer: str
    reason: str
    says: str = ""
    but: tuple[str, ...] = ()
    gives: Mapping[str, str | None] = {}


REFUSED = "refused"
RUNS = "runs"
OTHER = "other values"

_TYPO = Ours(
    REFUSED,
    "Paddle drops a flag it does not know, and a typing mistake trains on the wrong devices.",
    says="no such option",
)
_MEETING = Ours(
    RUNS, "A plan of the whole job is made when all hosts have met; a dry run meets none."
)

OURS: dict[str, Ours] = {
    "v2.0.0/24_ps_and_ips": Ours(
        OTHER,
        "Without gloo a trainer may begin with zeros instead of the first one's weights.",
        but=("PADDLE_WITH_GLOO",),
    ),
    "new/60_2nodes_master_norank": _MEETING,
    "new/61_2nodes_master_rank": _MEETING,
    "new/70_2nodes_sort_ip": _MEETING,
    "new/53_etcd_no_module": Ours(RUNS, "No module is needed to ask an etcd."),
    "new/67_master_http_prefix": Ours(RUNS, "Hosts meet there all the same."),
    "new/80_strategy_yaml_flag": Ours(
        REFUSED,
        "Paddle drops --strategy; a training without its strategy is not what was asked.",
        says="no file s.yaml",
    ),
    "legacy/44_bad_flag_eq": _TYPO,
    "legacy/63_unknown_flag_swallowed": _TYPO,
    "new/30_bad_flag_eq": _TYPO,
    "new/79_unknown_flag_with_master": _TYPO,
    "new/87_typo_flag": _TYPO,
    "legacy/21_gpus_on_cpu_build_eq": Ours(
        REFUSED,
        "Who asks for GPUs 0 and 1 does not want one process on the CPU.",
        says="no GPU driver",
    ),
    "new/05_ips_host_not_listed": Ours(
        REFUSED,
        "Paddle makes every unlisted host rank 0, and two of them wait for each other for ever.",
        says="none of them is this host",
    ),
    "legacy/60_run_mode_collective": Ours(
        RUNS, "Paddle's CPU build knows no --run_mode=collective; it is what we do anyway."
    ),
    "legacy/33_ps_no_workers": Ours(
        RUNS, "Paddle's newer launcher takes one trainer where nobody names any, and so do we."
    ),
    "legacy/61_script_args_trigger_ps": Ours(
        RUNS, "--worker_num stands behind the script and is the script's own."
    ),
    "new/03_ips_local": Ours(
        OTHER,
        "On one host, free ports cannot collide with another job's; 6070 is there to be asked for.",
        but=("PADDLE_CURRENT_ENDPOINT", "PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS"),
        gives=_FREE,
    ),
    "new/48_ips_port": Ours(
        OTHER,
        "The master has a port of its own: static graphs' gloo listens on the first endpoint.",
        but=("PADDLE_MASTER",),
        gives={"PADDLE_MASTER": r"127\.0\.0\.1:(?!7000$|7001$)\d+"},
    ),
    "new/17_cvd_empty": Ours(
        OTHER,
        "An empty CUDA_VISIBLE_DEVICES hides every GPU; Paddle then selects GPU 0.",
        but=("FLAGS_selected_gpus",),
        gives={"FLAGS_selected_gpus": None, "PADDLE_DISTRI_BACKEND": "gloo"},
    ),
    "kinds/10_xpus_option": Ours(
        REFUSED,
        "Who names XPUs does not mean the MLUs of this host; --gpus and --devices may.",
        says="no XPU driver",
    ),
    "kinds/11_ips": Ours(
        OTHER,
        "On one host, free ports cannot collide with another job's, as without a plug-in.",
        but=("PADDLE_CURRENT_ENDPOINT", "PADDLE_MASTER", "PADDLE_TRAINER_ENDPOINTS"),
    ),
    "legacy/51_proxy": Ours(
        OTHER,
        "The script keeps its proxies (logging services need them); peers are in no_proxy.",
        but=("http_proxy", "https_proxy"),
        gives={
            **dict.fromkeys(("http_proxy", "https_proxy"), "http.*"),
            **dict.fromkeys(("no_proxy", "NO_PROXY"), "127.0.0.1,localhost"),
        },
    ),
}

# Recorded where Paddle believed the mask without a driver: here the mask has devices behind it.
_MASKED = frozenset(
    (
        "new/11_cvd_only",
        "new/12_cvd_nproc_less",
        "new/14_cvd_nproc1_multi",
        "new/73_job_id_devices",
    )
)

# ./run.sh starts dump_env.py, whose command line was recorded.
_ENTRY = {"./run.sh": "dump_env.py"}

# What stands before a Python script.
_PYTHON = ("/usr/bin/python3", "-u")


def _environ(case: Mapping[str, Any], folder: str) -> dict[str, str]:
    """Return the environment that the launcher had."""
    return {"PATH": "/usr/bin:/bin", "PWD": folder, **case["env"]}


def _facts(case: Mapping[str, Any], folder: Path) -> Facts:
    """Return the machine of the recording."""
    gpus = 8 if case["case"] in _MASKED else case["gpus_present"]
    return Facts(
        environ=_environ(case, str(folder)),
        cwd=str(folder),
        hostname="recorder",
        python=_PYTHON[0],
        pid=4711,
        started_utc="20250102T030405Z",
        cpus=2,
        device_counts={"gpu": gpus} if gpus else {},
        paddle_counts=case.get("paddle_counts", {}),
        addresses=(Address("lo", "127.0.0.1"), Address("eth0", "192.168.7.7")),
        peer_interface="eth0",
    )


def _plan(case: Mapping[str, Any], words: list[str], folder: Path, *, dry: bool) -> LaunchPlan:
    """Make our plan for a command line; a dry one, so that recorded ports need not be free here."""
    facts = _facts(case, folder)
    wanted = request.resolve(split(words), facts.environ)
    program = scripts.find(wanted.script, facts.cwd, facts.environ)
    facts = facts._replace(program=program)
    return planned(wanted, facts, dry=dry)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a folder with the scripts of the recordings."""
    (tmp_path / "dump_env.py").touch()
    (tmp_path / "run.sh").touch(mode=0o755)
    return tmp_path


def _command_lines(case: Mapping[str, Any]) -> list[list[str]]:
    """Return what was typed, on each node."""
    return [node["args"] for node in case["nodes"]] if "nodes" in case else [case["args"]]


def _failed(case: Mapping[str, Any]) -> bool:
    """Return whether Paddle's launcher failed."""
    return case["exit"] not in (0, [0, 0])


def _named(cases: list[dict[str, Any]]) -> pytest.MarkDecorator:
    """Make one test for each case, called as the case is."""
    return pytest.mark.parametrize("case", cases, ids=[case["case"] for case in cases])


@_named([case for case in CASES if not _failed(case) and case["case"] not in OURS])
def test_workers_get_what_paddle_gives_them(case: Mapping[str, Any], folder: Path) -> None:
    plan = _plan(case, case["args"], folder, dry=True)
    values = _compare(case, plan, but=())
    ports = [value for name, value in values.items() if name.startswith("<P")]
    assert len(set(ports)) == len(ports)


def _compare(case: Mapping[str, Any], plan: LaunchPlan, but: tuple[str, ...]) -> Mapping[str, str]:
    """Compare PLAN with the recording, BUT for some variables; return what placeholders mean."""
    ranks = {_called(spec.rank, case): spec for spec in plan.processes if spec.rank}
    assert ranks.keys() == case["children"].keys()
    values: dict[str, str] = {}
    for name, expected in case["children"].items():
        process = ranks[name]
        environ = _variables(case, plan, process)
        for variable, pattern in expected["env_set"].items():
            if variable not in but:
                _match(pattern, environ[variable], values, variable)
        assert not {*expected["env_unset"]} & environ.keys() - {*but}
        started = [_ENTRY.get(word, word) for word in process.argv if word not in _PYTHON]
        assert started == expected["argv"]
    return values


def _variables(case: Mapping[str, Any], plan: LaunchPlan, process: ProcessSpec) -> dict[str, str]:
    """Return the environment that PROCESS gets."""
    environ = {**_environ(case, plan.cwd), **process.env}
    return {name: value for name, value in environ.items() if name not in process.unset}


def _called(rank: RankSpec, case: Mapping[str, Any]) -> str:
    """Name RANK as the recordings do: servers by their port, which may be any."""
    if rank.role == "TRAINER":
        return f"TRAINER.{rank.rank}"
    # None of them has two of such a role.
    children: list[str] = list(case["children"])
    (name,) = [name for name in children if name.startswith(f"{rank.role}.")]
    port = name.partition(".p")[2]
    assert port.startswith("<") or int(port) == rank.endpoint.port
    return name


def _match(pattern: str, value: str, values: dict[str, str], name: str) -> None:
    """Check that VALUE fits PATTERN, in which a placeholder means the same thing each time."""
    parts = re.split(r"(<\w+>)", pattern)
    expression = "".join(
        f"(?P<p{index}>[^,:]+)" if index % 2 else re.escape(part)
        for index, part in enumerate(parts)
    )
    match = re.fullmatch(expression, value)
    assert match, f"{name}: {value} does not fit {pattern}"
    for index in range(1, len(parts), 2):
        assert values.setdefault(parts[index], match[f"p{index}"]) == match[f"p{index}"], name


@_named([case for case in CASES if _failed(case) and case["case"] not in OURS])
def test_what_paddle_refuses_is_refused_in_a_sentence(
    case: Mapping[str, Any], folder: Path
) -> None:
    for words in _command_lines(case):
        with pytest.raises(FleetrunError, match=r"[.?]$"):
            _plan(case, words, folder, dry=False)


@_named([case for case in CASES if case["case"] in OURS])
def test_where_ours_differs_it_does_so_as_said(case: Mapping[str, Any], folder: Path) -> None:
    ours = OURS[case["case"]]
    for words in _command_lines(case):
        if ours.answer == REFUSED:
            with pytest.raises(FleetrunError, match=ours.says):
                _plan(case, words, folder, dry=False)
            continue
        plan = _plan(case, words, folder, dry=True)
        assert plan.processes
        if ours.answer == OTHER:
            _compare(case, plan, ours.but)
        for process in plan.processes:
            environ = _variables(case, plan, process)
            for name, pattern in ours.gives.items():
                value = environ.get(name)
                assert value is pattern or re.fullmatch(pattern or "", value or ""), (name, value)


def test_every_difference_is_one_of_a_recorded_case() -> None:
    assert set(OURS) | _MASKED <= {case["case"] for case in CASES}
