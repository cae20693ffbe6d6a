"""Modes define a job's processes and the variables of each; pure, behind one protocol."""

from __future__ import annotations

from abc import abstractmethod
from typing import NamedTuple, Protocol, cast

from fleetrun.model import Facts, Request, Roster
from fleetrun.plan.devices import Share
from fleetrun.plan.layout import Layout, ModeHosts, Slots


class ModeRules(Protocol):
    """The interface of a mode's module."""

    @abstractmethod
    def places(self, request: Request) -> ModeHosts:
        """Return the hosts that REQUEST names."""

    @abstractmethod
    def slots(self, request: Request, share: Share) -> Slots:
        """Return the processes of REQUEST, with this host's devices."""

    @abstractmethod
    def layout(self, request: Request, facts: Facts, share: Share, roster: Roster) -> Layout:
        """Return the ranks of the slots on the hosts of ROSTER."""


class Feature(NamedTuple):
    """A part of Paddle that some builds lack; `symbol` is a text in libraries that have it."""

    name: str
    pronoun: str
    symbol: bytes


class Mode(NamedTuple):
    """A row of the table: `name` is what plans show, `words` are those of --run_mode."""

    name: str
    words: tuple[str, ...]
    file: str
    # Any of these options, or all of these variables, select this mode.
    options: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    feature: Feature | None = None
    # Whether all ranks do the same; the only rank of a host then gets all its devices.
    is_uniform: bool = True

    @property
    def rules(self) -> ModeRules:
        """The mode's module, imported only when it is needed."""
        return cast("ModeRules", __import__(self.file, fromlist=("layout",)))


MODES = (
    Mode("collective", ("collective",), "fleetrun.plan.modes.collective"),
    Mode(
        "ps",
        ("ps", "ps-heter", "heter"),
        "fleetrun.plan.modes.pserver",
        options=(
            *("server_num", "servers", "trainer_num", "trainers", "heter_worker_num"),
            *("heter_workers", "heter_devices", "coordinator_num", "coordinators"),
        ),
        # Kubernetes and PaddleCloud start one process per node, and set its role by these.
        variables=("TRAINING_ROLE", "PADDLE_PSERVERS_IP_PORT_LIST"),
        feature=Feature("parameter servers", "them", b"DistFleetWrapper\0"),
        is_uniform=False,
    ),
    Mode(
        "rpc",
        ("rpc",),
        "fleetrun.plan.modes.rpc",
        feature=Feature("paddle.distributed.rpc", "it", b"rpc_start_worker\0"),
    ),
)
BY_WORD = {word: mode for mode in MODES for word in mode.words}
