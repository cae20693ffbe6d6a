"""Jobs with parameter servers: processes, their places, and their variables."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleetrun.errors import UsageError
from fleetrun.model import (
    COORDINATOR,
    HETER,
    SERVER,
    TRAINER,
    Device,
    Endpoint,
    Member,
    Request,
    Roster,
    Script,
)
from fleetrun.plan import layout
from fleetrun.plan.devices import Share
from fleetrun.plan.modes import pserver
from fleetrun.plan.modes.roles import MEETING, Roles, roles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleetrun.model import RankSpec

SCRIPT = Script("file", "train.py", ())
CPU: tuple[tuple[Device, ...], ...] = ((),)
TWO_GPUS = ((Device("gpu", "4", 0),), (Device("gpu", "5", 1),))


def job(**wanted: Any) -> Request:
    return Request(SCRIPT, **wanted)


class Placed(NamedTuple):
    """A job with all processes placed."""

    request: Request
    roles: Roles
    ranks: pserver.Ranks

    def env(
        self, role: str, rank: int = 0, kind: str = "cpu", environ: Mapping[str, str] | None = None
    ) -> dict[str, str]:
        """Return the variables of one rank."""
        (spec,) = (spec for spec in self.ranks.ranks if (spec.role, spec.rank) == (role, rank))
        return pserver.variables(
            self.roles,
            self.ranks,
            spec,
            kind=kind,
            gloo=pserver.with_gloo(self.request, environ or {}, self.ranks),
            environ=environ or {},
        )

    def of(self, role: str) -> list[RankSpec]:
        """Return all who have ROLE."""
        return [spec for spec in self.ranks.ranks if spec.role == role]


def placed(
    request: Request,
    groups: tuple[tuple[Device, ...], ...] = CPU,
    hosts: tuple[str, ...] = ("127.0.0.1",),
) -> Placed:
    """Place all processes; ports from 20001 on are free."""
    slots = pserver.slots(request, Share("gpu", groups, "nccl"))
    first = slots.first_port if len(slots.hosts) > 1 else None
    rows = layout.ports(slots, request.start_port or first)
    names = slots.hosts or hosts
    rows = rows if slots.hosts else rows * len(hosts)
    members = tuple(
        Member(
            name,
            tuple(port or 20001 + place for place, port in enumerate(row)),
            tuple(slot.devices for slot in slots.on(name)),
        )
        for name, row in zip(names, rows, strict=True)
    )
    roster = Roster(members, 0, Endpoint(names[0], 20000))
    return Placed(request, roles(request), pserver.ranks(slots, roster))


def ports(placement: Placed, role: str) -> list[int]:
    return [spec.endpoint.port for spec in placement.of(role)]


# -- who and where -------------------------------------------------------------------------------


def test_a_start_port_counts_as_paddle_does() -> None:
    layout = placed(
        job(
            server_num=2,
            trainer_num=3,
            heter_worker_num="1;2",
            heter_devices="gpu;cpu",
            coordinator_num=1,
            start_port=7000,
        )
    )
    assert ports(layout, SERVER) == [7000, 7001]
    assert ports(layout, TRAINER) == [7002, 7003, 7004]
    assert ports(layout, HETER) == [7005, 7006, 7007]
    assert layout.ranks.meeting.port == 7008
    # Paddle gives the coordinator START + 1, which is a server's.
    assert ports(layout, COORDINATOR) == [7009]


def test_lists_keep_their_ports_and_the_rest_counts_from_6170() -> None:
    layout = placed(job(servers=("a:8000", "b:8000"), trainers=("a", "b:9000", "b")))
    assert [str(spec.endpoint) for spec in layout.ranks.ranks] == [
        "a:8000",
        "b:8000",
        "a:6172",
        "b:9000",
        "b:6174",
    ]
    assert str(layout.ranks.meeting) == "a:6175"


# -- one side alone ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "slots"),
    [
        ({"run_mode": "ps"}, {"PSERVER": 1, "TRAINER": 1}),
        ({"server_num": 2}, {"PSERVER": 2, "TRAINER": 1}),
        ({"servers": ("h:1", "h:2")}, {"PSERVER": 2, "TRAINER": 1}),
        ({"trainers": ("h", "b")}, {"PSERVER": 1, "TRAINER": 2}),
        ({"servers": ("h:1", "b:1")}, {"PSERVER": 2, "TRAINER": 1}),
        ({"heter_worker_num": "2"}, {"PSERVER": 1, "TRAINER": 1, "HETER_TRAINER": 2}),
    ],
)
def test_the_side_that_nobody_counts_is_one(wanted: dict[str, Any], slots: dict[str, int]) -> None:
    slotted = roles(job(**wanted)).slots
    counted = Counter(slot.role for slot in slotted.slots if slot.role != MEETING)
    assert counted == slots
    # On several hosts it is on the first one, whichever side that is.
    assert slotted.hosts in {(), ("h",), ("h", "b")}


# -- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"server_num": 1, "trainer_num": 0}, "--trainer_num=0: give a number, 1"),
        ({"server_num": 0, "run_mode": "ps"}, "--server_num=0: give a number, 1"),
        ({"server_num": -1, "trainer_num": 1}, "--server_num=-1: give a number"),
        (
            {"server_num": 2, "servers": ("127.0.0.1:1",), "trainer_num": 1},
            "--servers=127.0.0.1:1 names 1, and --server_num=2 says 2",
        ),
        ({"servers": ("h:1", "h:1"), "trainers": ("h:2",)}, "h:1 is given twice"),
        ({"servers": ("h:1",), "trainers": ("h:2",), "http_port": 2}, "h:2 is given twice"),
        ({"servers": ("h:0",), "trainers": ("h:2",)}, "`h:0` is not HOST:PORT"),
        ({"servers": ("h:x",), "trainers": ("h:2",)}, "`h:x` is not HOST:PORT"),
        ({"servers": ("::1",), "trainers": ("h:2",)}, "Paddle reads no IPv6"),
        ({"servers": ("2",), "trainers": ("2",)}, "--servers=2: `2` is not HOST:PORT"),
        ({"servers": ("h:65536",), "trainers": ("h:2",)}, "from 1 to 65535"),
        ({"servers": ("a:1", "b:1"), "trainer_num": 2}, "list them with --trainers"),
        ({"trainers": ("a:1", "b:1"), "server_num": 1}, "list them with --servers"),
        (
            {"servers": ("a:1", "b:1"), "trainers": ("a:2",), "heter_worker_num": "1"},
            "list them with --heter_workers",
        ),
        ({"servers": ("127.0.0.1:1",), "trainers": ("b:1",)}, "is a loopback address"),
        ({"servers": ("a:1",), "trainers": ("a:2",), "ips": ("b",)}, "leave --ips out"),
        ({"server_num": 1, "trainer_num": 1, "heter_worker_num": "1;x"}, "for each stage"),
        ({"server_num": 1, "trainer_num": 1, "heter_worker_num": "1;0"}, "for each stage"),
        (
            {
                "servers": ("a:1",),
                "trainers": ("a:2",),
                "heter_worker_num": "1;1",
                "heter_workers": "a:3;a:4,a:5",
            },
            "names 1;2, and --heter_worker_num=1;1 says otherwise",
        ),
        (
            {
                "server_num": 1,
                "trainer_num": 1,
                "heter_worker_num": "1;1",
                "heter_devices": "gpu",
            },
            "for each of the 2 stages",
        ),
        (
            {"server_num": 1, "trainer_num": 1, "heter_worker_num": "1", "heter_devices": "tpu"},
            "--heter_devices=tpu: name one of cpu, gpu, xpu",
        ),
        ({"server_num": 9, "trainer_num": 9, "start_port": 65530}, "give a lower --start_port"),
    ],
)
def test_what_does_not_fit_together_is_refused(wanted: dict[str, Any], says: str) -> None:
    request = job(**wanted)
    with pytest.raises(UsageError, match=re.escape(says)) as caught:
        layout.ports(roles(request).slots, request.start_port)
    assert str(caught.value).endswith(".")


# -- what each is told ---------------------------------------------------------------------------


def test_trainers_get_devices_of_the_mask_and_servers_see_none() -> None:
    layout = placed(job(server_num=1, trainer_num=3, coordinator_num=1), TWO_GPUS)
    visible = [layout.env(TRAINER, rank, "gpu")["CUDA_VISIBLE_DEVICES"] for rank in range(3)]
    # Paddle gives 0, 1 and 0: the mask's places, not its devices.
    assert visible == ["4", "5", "4"]
    assert layout.env(TRAINER, 1, "gpu")["FLAGS_selected_gpus"] == "0"
    for role in (SERVER, COORDINATOR):
        env = layout.env(role, kind="gpu")
        assert env["CUDA_VISIBLE_DEVICES"] == env["XPU_VISIBLE_DEVICES"] == ""
        assert "FLAGS_selected_gpus" not in env


def test_stages_know_their_neighbours() -> None:
    layout = placed(
        job(
            servers=("a:1",),
            trainers=("a:2", "b:2"),
            heter_workers="a:3;b:3,b:4",
            heter_devices="gpu;cpu",
        )
    )
    previous = "PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST"
    following = "PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST"
    shown = [
        (env["STAGE_ID"], env["HETER_DEVICE_TYPE"], env[previous], env[following])
        for env in (layout.env(TRAINER), layout.env(HETER, 0), layout.env(HETER, 2))
    ]
    assert shown == [
        ("1", "cpu", "", "a:3"),
        ("2", "gpu", "a:2,b:2", "b:3,b:4"),
        ("3", "cpu", "a:3", ""),
    ]
    env = layout.env(HETER, 2)
    assert env["STAGE_NUM"] == "3"
    assert env["PADDLE_STAGE_TRAINERS_NUM"] == "[2, 1, 2]"
    assert env["PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST"] == "a:3,b:3,b:4"
    assert "PADDLE_TRAINER_ID" not in env
    assert "STAGE_ID" not in layout.env(SERVER)


def test_trainers_wait_for_each_other_where_gloo_can() -> None:
    alone = job(server_num=1, trainer_num=2)
    assert placed(alone).env(TRAINER)["PADDLE_WITH_GLOO"] == "1"
    assert placed(alone).env(TRAINER, environ={"PADDLE_WITH_GLOO": "0"})["PADDLE_WITH_GLOO"] == "0"
    told = placed(alone._replace(with_gloo="2"))
    assert told.env(SERVER, environ={"PADDLE_WITH_GLOO": "0"})["PADDLE_WITH_GLOO"] == "2"
    heter = placed(alone._replace(heter_worker_num="1"))
    assert heter.env(TRAINER)["PADDLE_WITH_GLOO"] == "0"
    spread = placed(job(servers=("a:1",), trainers=("a:2", "b:2")))
    assert spread.env(TRAINER)["PADDLE_WITH_GLOO"] == "0"
    beside = placed(job(servers=("a:1",), trainers=("b:1", "b:2")))
    assert beside.env(TRAINER)["PADDLE_WITH_GLOO"] == "1"


# -- what always holds ---------------------------------------------------------------------------

HOSTS = st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3"])


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Make a request for some servers, trainers and others, by numbers or by lists."""
    start = draw(st.none() | st.integers(1, 60000))
    if draw(st.booleans()):
        stages = draw(st.lists(st.integers(1, 3), max_size=3))
        return job(
            server_num=draw(st.integers(1, 4)),
            trainer_num=draw(st.integers(1, 4)),
            heter_worker_num=";".join(map(str, stages)) or None,
            coordinator_num=draw(st.integers(0, 2)),
            start_port=start,
        )
    known: set[tuple[str, int]] = set()

    def endpoint() -> str:
        host = draw(HOSTS)
        port = draw(
            st.none() | st.integers(6160, 6200).filter(lambda number: (host, number) not in known)
        )
        if port is None:
            return host
        known.add((host, port))
        return f"{host}:{port}"

    def listed(least: int) -> tuple[str, ...]:
        return tuple(endpoint() for _ in range(draw(st.integers(least, 4))))

    stages_listed = [",".join(listed(1)) for _ in range(draw(st.integers(0, 2)))]
    return job(
        servers=listed(1),
        trainers=listed(1),
        heter_workers=";".join(stages_listed) or None,
        coordinators=listed(0),
        start_port=start,
    )


@given(requests(), st.integers(1, 3))
@settings(deadline=None)
def test_everybody_finds_himself_in_what_he_is_told(request: Request, hosts: int) -> None:
    """Read the environment as Paddle's role maker does."""
    layout = placed(request, hosts=tuple(f"10.1.0.{host}" for host in range(hosts)))
    assert len({spec.endpoint for spec in layout.ranks.ranks} | {layout.ranks.meeting}) == (
        len(layout.ranks.ranks) + 1
    )
    environs = [layout.env(spec.role, spec.rank) for spec in layout.ranks.ranks]
    for spec, env in zip(layout.ranks.ranks, environs, strict=True):
        me = f"{env['POD_IP']}:{env['PADDLE_PORT']}"
        assert me == str(spec.endpoint)
        names = {
            SERVER: "PADDLE_PSERVERS_IP_PORT_LIST",
            TRAINER: "PADDLE_TRAINER_ENDPOINTS",
            HETER: "PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST",
            COORDINATOR: "PADDLE_COORDINATOR_ENDPOINTS",
        }
        assert env[names[spec.role]].split(",").index(me) == spec.rank
        if spec.role == TRAINER:
            assert env["PADDLE_TRAINER_ID"] == str(spec.rank)
            assert int(env["PADDLE_TRAINERS_NUM"]) == len(layout.of(TRAINER))
    meeting = {env["PADDLE_GLOO_HTTP_ENDPOINT"] for env in environs}
    assert len(meeting) == 1
    # Only the first server serves the meeting, and it does so on its own host.
    assert meeting.pop().startswith(f"{layout.of(SERVER)[0].endpoint.host}:")
