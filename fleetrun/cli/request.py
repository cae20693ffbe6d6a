"""Resolves every option: command line > environment > config file > default, with its source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fleetrun.cli.argv import ParsedCommand
from fleetrun.cli.configfile import Config
from fleetrun.cli.elsewhere import refuse_gone
from fleetrun.cli.option import Option, is_off
from fleetrun.cli.options import KNOWN, OPTIONS, find
from fleetrun.engines import cluster
from fleetrun.engines.detect import Detected
from fleetrun.errors import UsageError
from fleetrun.model import COMMAND_LINE, DEFAULT, DEFAULTS, Given, Request, Setting, Strategy
from fleetrun.plan import hosts, kinds, modes
from fleetrun.plan.environment import IDENTITY
from fleetrun.rundir import secrets
from fleetrun.rundir.variables import JOB
from fleetrun.strategy import load
from fleetrun.text import counted, is_digits

# Options that fill no field of the request.
_NO_FIELD = ("config", "help", "strategy", "version")
# Only a rank has these; then the next ones describe the job around us.
_RANK_MARKS = ("PADDLE_CURRENT_ENDPOINT", "PADDLE_GLOBAL_RANK")
_JOB_OF_RANK = ("PADDLE_NNODES", "PADDLE_MASTER", "PADDLE_RANK")
# With these, endpoints and numbers are those of a rank, or other variables place servers.
_PLACED = (
    *("PADDLE_LOCAL_RANK", "PADDLE_RANK_IN_NODE", "PADDLE_GLOBAL_RANK", JOB),
    *("TRAINING_ROLE", "PADDLE_PSERVERS_IP_PORT_LIST"),
)


class _Choices:
    """What counts of each option, and its value, by the option's label; and remarks."""

    def __init__(self, tiers: Sequence[Sequence[Given]], notes: list[str]) -> None:
        self.tiers = tiers
        self.notes = notes
        self.given: dict[str, Given] = {}
        self._values: dict[str, Any] = {}
        for option in OPTIONS:
            if option.is_pair or option.label in _NO_FIELD:
                continue
            typed, variables, filed = (about(option.label, tier) for tier in tiers)
            self.take((typed or variables or filed or [_default(option)])[-1])
            if typed and variables and typed[-1].raw.lower() != variables[-1].raw.lower():
                stronger, weaker = (f"{g.typed}={g.raw}" for g in (typed[-1], variables[-1]))
                why = "(in Paddle's launcher, the variable overrides the option)"
                notes.append(f"{stronger} overrides {weaker} {why}.")

    def __getitem__(self, name: str) -> Any:  # noqa: ANN401 - the option's type says
        return self._values[name]

    def is_from(self, name: str, source: str) -> bool:
        """Whether the option NAME was given in SOURCE: COMMAND_LINE, DEFAULT (nobody did), `$`."""
        return self.given[name].source.startswith(source)

    def take(self, given: Given) -> None:
        self._values[given.name] = find(given.name).read(given)
        self.given[given.name] = given

    def fault(self, name: str, problem: str) -> UsageError:
        return UsageError(self.given[name].blame(problem))


def resolve(  # noqa: C901 - one step after the other
    parsed: ParsedCommand,
    environ: Mapping[str, str],
    config: Config = Config(),  # noqa: B008 - it is immutable
    detect: Callable[[], Detected] | None = None,
) -> Request:
    """Return the request of PARSED, ENVIRON and CONFIG; UsageError if it is not valid.

    DETECT returns the options of the engine that has started us, which a config file overrides.
    """
    assert parsed.script is not None
    notes = list(parsed.notes)
    is_rank = any(environ.get(mark) for mark in _RANK_MARKS)
    inherited = _JOB_OF_RANK if is_rank else ()
    is_alone = [given.raw for given in about("nnodes", parsed.given)][-1:] == ["1"]
    variables = [] if is_alone else [*_endpoints(environ)]
    variables += [g for option in KNOWN for g in option.of_environment(environ, inherited)]
    for given in (*parsed.given, *variables, *config.given):
        notes += find(given.name).remarks(given)
    for name, value in environ.items():
        if not is_off(value):
            refuse_gone(f"${name}", f"${name}")

    chosen = _Choices((parsed.given, variables, config.given), notes)
    _take_addresses(chosen)
    if detect is not None and not is_rank and not cluster.is_left_out(chosen.given):
        is_dry = chosen["dry_run"] is not None
        for given in cluster.detected_options(chosen.given, detect(), notes, is_dry=is_dry):
            chosen.take(given)
    # The value and the source of each variable of --env.
    env: dict[str, tuple[str, str]] = {}
    for given in about("env", (*config.given, *parsed.given)):
        name, _, value = str(find("env").read(given)).partition("=")
        env[name] = (value, given.source)
    kind = _device_kind(chosen, env)
    mode = _mode(chosen, environ)
    in_cloud = hosts.in_paddlecloud(environ)
    # In these cases the hosts are known.
    is_placed = bool(
        chosen["servers"] or chosen["trainers"] or in_cloud or _is_requested(mode, environ)
    )
    ips, nnodes = _hosts(chosen)
    if nnodes != "1" and not (ips or is_placed or chosen["hosts"] or chosen["hostfile"]):
        _meet(chosen, environ, nnodes, is_started=detect is not None)
    is_collective = chosen["run_mode"] == "collective"
    if ":" in nnodes and (is_placed or not is_collective):
        raise chosen.fault("nnodes", "only collective jobs are elastic; give one number.")
    left_behind = [f"${name}" for name in (*IDENTITY, *inherited) if environ.get(name)]
    # With roles, the remark is made where they are known.
    if left_behind and nnodes == "1" and not in_cloud and mode.is_uniform:
        ignored = "this job is on one host and ignores what another launcher left behind"
        notes.append(f"{ignored}: {', '.join(dict.fromkeys(left_behind))}.")
    idle = ("master", "rank") if (chosen["rank"] or 0) > 0 and not is_placed else ("master",)
    typed = [chosen.given[name].typed for name in idle if chosen.is_from(name, COMMAND_LINE)]
    if typed and nnodes == "1":
        what = f"{' and '.join(typed)} {'have' if typed[1:] else 'has'} no effect"
        notes.append(f"{what}: the job is on one host; for several, give all --nnodes=N.")
    strategy, strategy_settings = _strategy(chosen)

    fields: dict[str, Any] = {
        find(name).field: chosen[name]
        for name in chosen.given
        if find(name).field in DEFAULTS and chosen[name] not in (None, "")
    }
    fields |= {
        "device_kind": kind,
        "ips": ips,
        "nnodes": nnodes,
        "rank": chosen["rank"] if chosen["rank"] != -1 and (nnodes != "1" or is_placed) else None,
        # Others stand by only where hosts of a collective job meet.
        "spares": chosen["spares"] if nnodes != "1" and is_collective and not ips else 0,
    }
    source = COMMAND_LINE if parsed.asks("config") else "current folder"
    settings = [
        Setting("config", str(config.path), source if config.path else DEFAULT),
        *map(_setting, chosen.given.values()),
        *(_redacted(f"env.{name}", *pair) for name, pair in env.items()),
        *strategy_settings,
    ]
    return Request(
        script=parsed.script,
        env=tuple((name, value) for name, (value, _) in env.items()),
        strategy=strategy,
        settings=tuple(settings),
        notes=tuple(notes),
        typed=parsed.words,
        given=(*config.given, *parsed.given),
        **fields,
    )


def _default(option: Option) -> Given:
    return option.given(option.usual or "", source=DEFAULT)


def about(name: str, tier: Iterable[Given]) -> list[Given]:
    """Return what TIER gives of the option NAME."""
    return [given for given in tier if given.name == name]


# -- hosts ---------------------------------------------------------------------------------------


def _endpoints(environ: Mapping[str, str]) -> Iterator[Given]:
    """Yield the hosts and first port of endpoints in ENVIRON, as Paddle does but inside a rank."""
    name = next((name for name in hosts.ENDPOINTS if environ.get(name, "").strip()), None)
    is_placed = any(environ.get(mark) for mark in _PLACED)
    if name is None or is_placed or hosts.in_paddlecloud(environ):
        return
    endpoints = [endpoint.strip() for endpoint in environ[name].split(",")]
    names = list(dict.fromkeys(endpoint.partition(":")[0] for endpoint in endpoints))
    if len(names) > 1:  # one is us
        yield find("ips").given(",".join(names), f"${name}", f"${name}")
        port = endpoints[0].partition(":")[2]
        if is_digits(port):
            yield find("start_port").given(port, f"${name}", f"${name}")


def _take_addresses(chosen: _Choices) -> None:
    """Read Paddle's --elastic_server, which is an etcd; ignore IPv6 as this host's address."""
    master, host = chosen.given["master"], chosen.given["host"]
    is_server = "elastic_server" in f"{master.spelling} {master.source.lower()}"
    if is_server and not master.raw.startswith("etcd://"):
        chosen.take(master._replace(raw=f"etcd://{master.raw.strip()}"))
    # A container engine sets it for everything in the container.
    if hosts.is_ipv6((chosen["host"] or "").strip("[]")):
        chosen.notes.append(f"{host.typed}={host.raw} is ignored: {hosts.NO_IPV6}.")
        chosen.take(_default(find("host")))


def _hosts(chosen: _Choices) -> tuple[tuple[str, ...], str]:
    """Return the listed hosts, and how many as --nnodes says; UsageError for a contradiction."""
    least, most = hosts.bounds(chosen["nnodes"])
    ips: tuple[str, ...] = chosen["ips"] or ()
    if len(ips) == 1 and (point := hosts.meeting_point(ips[0])) is not None:
        ips = (point.host,)  # as suites write it; ports have an option of their own
    # An elastic job of listed hosts needs not all of them.
    if ips and not chosen.is_from("nnodes", DEFAULT) and not least <= len(ips) <= most:
        names = f"{chosen.given['ips'].typed} names {counted(len(ips), 'host')}"
        # A variable may be set for all jobs of a machine; the list was written for this one.
        if not chosen.is_from("nnodes", "$") or chosen.is_from("ips", "$"):
            raise chosen.fault("nnodes", f"{names}; omit one of them.")
        chosen.notes.append(f"{chosen.given['nnodes'].typed}={most} is ignored: {names}.")
    count = len(ips) or most
    return ips, f"{least}:{count}" if least < min(count, most) else str(count)


def _meet(chosen: _Choices, environ: Mapping[str, str], nnodes: str, *, is_started: bool) -> None:
    """Settle where NNODES hosts meet that are not listed, and which one this is.

    $PADDLE_TRAINER_ID is its rank, as for Paddle. The first host, unless an engine has STARTED it,
    meets the others here if no other place is given.
    """
    place = environ.get("PADDLE_TRAINER_ID", "").strip()
    is_rank = any(environ.get(mark) for mark in (*_PLACED, *_RANK_MARKS))
    if is_digits(place) and not is_rank and chosen["rank"] in {None, -1}:
        chosen.take(find("rank").given(place, "$PADDLE_TRAINER_ID", "$PADDLE_TRAINER_ID"))
    rank, given = chosen["rank"] or 0, chosen.given["nnodes"]
    # Files and variables apply to all hosts; and mpirun's --np counts processes.
    is_meant = given.source == COMMAND_LINE and given.spelling != "np"
    if is_meant and not is_started and not chosen["master"] and rank <= 0:
        is_first = "this host is the first"
        chosen.take(chosen.given["master"]._replace(raw=":0", source=is_first))
    master = chosen["master"] or ""
    if not master:
        raise chosen.fault(
            "nnodes",
            "it is the number of hosts (--nproc_per_node: of processes); name the hosts with "
            "--ips, or give --master=HOST:PORT, a host of the job and a free port on it.",
        )
    point = hosts.meeting_point(master)
    is_valid = hosts.own_port(master) is not None or (point is not None and point.host.strip("0."))
    if master.startswith("etcd"):
        is_valid = hosts.store_endpoints(master) is not None
    if not is_valid:
        # Without the value, which may have a password.
        raise UsageError(
            f"{chosen.given['master'].typed}: give HOST:PORT, the address of the job's first host "
            "and a free port on it, the same on every host, such as 10.0.0.1:6170; or "
            "etcd://HOST:PORT[,HOST:PORT...], the members of an etcd 3 without users and TLS."
        )
    places = hosts.bounds(nnodes)[1] + chosen["spares"]
    if rank >= places:
        raise chosen.fault("rank", f"the job has {places} hosts, 0 to {places - 1}.")


# -- devices, mode, strategy ---------------------------------------------------------------------


def _device_kind(chosen: _Choices, env: Mapping[str, tuple[str, str]]) -> str | None:
    """Return the kind of devices: that of --device_kind, or of the listed devices."""
    if kinds.XCCL in env and not chosen.is_from("device_kind", COMMAND_LINE):
        raw, source = env[kinds.XCCL]
        chosen.take(find("device_kind").given(raw, f"--env {kinds.XCCL}", source))
    devices, asked = chosen.given["devices"], chosen.given["device_kind"]
    kind: str | None = chosen["device_kind"]
    kind = kinds.SYNONYMS.get(kind or "", kind)
    spelling = devices.spelling.removeprefix("selected_")
    listed = spelling.removesuffix("s")
    listed = kinds.SYNONYMS.get(listed, listed)
    if spelling == "devices" or not devices.raw.strip() or kind == listed:
        return kind
    if kind is None:
        return listed
    # Paddle's launchers treat the general ones as --devices.
    if spelling in kinds.GENERAL and not chosen.is_from("device_kind", COMMAND_LINE):
        names = f"{devices.typed}={devices.raw} names {kinds.label(kind)}s"
        chosen.notes.append(f"{names}: {asked.typed}={asked.raw}.")
        return kind
    names = f"{devices.typed}={devices.raw} names {kinds.label(listed)}s"
    raise chosen.fault("device_kind", f"{names}; give one of the two, or --devices.")


def _mode(chosen: _Choices, environ: Mapping[str, str]) -> modes.Mode:
    """Settle --run_mode, which other options may imply, and return the job's mode."""
    for mode in modes.MODES:
        asking = [
            chosen.given[name].typed
            for name in mode.options
            if chosen[name] and not is_off(chosen.given[name].raw)
        ]
        run_mode = chosen.given["run_mode"]
        if run_mode.source == DEFAULT and (asking or _is_requested(mode, environ)):
            source = asking[0] if asking else f"${mode.variables[0]}"
            chosen.take(run_mode._replace(raw=mode.name, source=source))
        elif asking and chosen["run_mode"] not in mode.words:
            what = mode.name if mode.feature is None else mode.feature.name
            raise chosen.fault("run_mode", f"{asking[0]} requests {what}; omit one of them.")
    return modes.BY_WORD[chosen["run_mode"]]


def _is_requested(mode: modes.Mode, environ: Mapping[str, str]) -> bool:
    """Whether ENVIRON has all variables by which a cluster requests MODE."""
    return bool(mode.variables) and all(environ.get(name) for name in mode.variables)


def _strategy(chosen: _Choices) -> tuple[Strategy | None, Sequence[Setting]]:
    """Return the strategy and its lines of the settings; None without a strategy."""
    typed, variables, filed = (about("strategy", tier) for tier in chosen.tiers)
    sets = [*about("set", chosen.tiers[2]), *about("set", chosen.tiers[0])]
    check = chosen["check_ranks"]
    names = load.names(typed or variables or filed)
    if not (names or sets or check not in {None, -1}):
        return None, (Setting("strategy", "None", DEFAULT),)
    strategy = load.requested(names, sets)._replace(
        mode=chosen["strategy_mode"],
        is_strict=chosen["strategy_strict"],
        check_ranks="auto" if check is None else check,
    )
    return strategy, [_redacted(*setting) for setting in load.settings(names, sets)]


# -- what is shown -------------------------------------------------------------------------------


def _setting(given: Given) -> Setting:
    """Return GIVEN as a line of the settings."""
    if given.source == DEFAULT:
        # It is in the source code, and looking for secrets takes a while.
        return Setting(given.name, given.raw or "None", DEFAULT)
    return _redacted(given.spelling or given.name, given.raw.strip(), given.source)


def _redacted(name: str, value: str, source: str) -> Setting:
    return Setting(name, secrets.redact(name.rpartition(".")[2], value), source)
