"""The hosts of PaddleCloud's variables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from plans import a_request, gathered, some_facts

from fleetrun.engines import paddlecloud
from fleetrun.errors import EnvironmentFault
from fleetrun.plan.layout import ModeHosts

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleetrun.model import Request

CLOUD = {
    "PADDLE_TRAINERS": "10.0.0.1, 10.0.0.2",
    "POD_IP": "10.0.0.2",
    "PADDLE_TRAINER_ID": "1",
    "TRAINER_PORTS_NUM": "2",
}


def named(request: Request, environ: Mapping[str, str]) -> tuple[str, ...] | None:
    """Return the hosts that PaddleCloud's variables name for a job of trainers."""
    return paddlecloud.find(request, environ, ModeHosts())


def test_paddlecloud_names_the_hosts() -> None:
    assert named(a_request(ips=("1.1.1.1",)), CLOUD) == ("10.0.0.1", "10.0.0.2")


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {name: value for name, value in CLOUD.items() if name != "TRAINER_PORTS_NUM"},
        {**CLOUD, "POD_IP": ""},
        {**CLOUD, "PADDLE_TRAINERS_NUM": "1"},
        {**CLOUD, "PADDLE_TRAINERS": "10.0.0.1"},
    ],
)
def test_less_than_all_variables_is_no_paddlecloud(environ: dict[str, str]) -> None:
    assert named(a_request(), environ) is None


def test_the_list_wins_over_paddlecloud_where_paddle_lets_it() -> None:
    environ = {**CLOUD, "PADDLE_LAUNCH_WITH_ARGS": "1"}
    assert named(a_request(ips=("10.0.0.7",)), environ) is None
    assert named(a_request(), environ) == ("10.0.0.1", "10.0.0.2")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"PADDLE_TRAINER_ID": "x"}, "PADDLE_TRAINER_ID=x is not a number"),
        ({"PADDLE_TRAINER_ID": "2"}, "PADDLE_TRAINER_ID=2 is not a number up to 1;"),
        ({"TRAINER_PORTS_NUM": "-1"}, "TRAINER_PORTS_NUM=-1 is not a number"),
        ({"PADDLE_PORT": "http"}, "PADDLE_PORT=http is not a number"),
        ({"DISTRIBUTED_TRAINER_ENDPOINTS": "a:1,b:x"}, "a:1,b:x must have"),
        ({"DISTRIBUTED_TRAINER_ENDPOINTS": "a:1,b:2"}, "must have TRAINER_PORTS_NUM=2 endpoints"),
    ],
)
def test_what_paddlecloud_says_is_checked(changed: dict[str, str], message: str) -> None:
    with pytest.raises(EnvironmentFault, match=message):
        gathered(a_request(nproc_per_node=2), some_facts(environ={**CLOUD, **changed}))


def test_paddlecloud_wins_over_the_list_and_says_so() -> None:
    facts = some_facts(environ=CLOUD)
    assert gathered(a_request(nproc_per_node=2, ips=("10.0.0.1", "10.0.0.2")), facts).notes == ()
    (note,) = gathered(a_request(nproc_per_node=2, ips=("1.1.1.1",)), facts).notes
    assert note.startswith("--ips=1.1.1.1 is ignored: PADDLE_TRAINERS=10.0.0.1,10.0.0.2")
