"""Resolves every option: command line > environment > config file > default, with its source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fleetrun import text
from fleetrun.cli.argv import ParsedCommand
from fleetrun.cli.configfile import Config, named
from fleetrun.cli.options import KNOWN, OPTIONS, find
from fleetrun.cli.types import Value
from fleetrun.engines import cluster
from fleetrun.engines.detect import Detected
from fleetrun.errors import UsageError
from fleetrun.model import (
    COMMAND_LINE,
    DEFAULT,
    DEFAULTS,
    USER_CONFIG,
    Given,
    Layer,
    Request,
    Setting,
    Strategy,
    flag,
)
from fleetrun.plan import kinds, modes
from fleetrun.plan.hosts import (
    ENDPOINTS,
    NO_IPV6,
    NO_IPV6_MASTER,
    in_paddlecloud,
    is_ipv6,
    is_loopback,
    meeting_point,
    own_port,
    store_endpoints,
)
from fleetrun.rundir import secrets
from fleetrun.rundir.variables import JOB
from fleetrun.strategy import load

# Options that fill no field of the request.
_NO_FIELD = ("config", "from_manifest", "help", "strategy", "version")
# Only a rank has these; then the next ones describe the job around us.
_RANK_MARKS = ("PADDLE_CURRENT_ENDPOINT", "PADDLE_GLOBAL_RANK")
_JOB_OF_RANK = ("PADDLE_NNODES", "PADDLE_MASTER", "PADDLE_RANK")
# Variables of ranks. On one host they do not describe the job to be started.
_IDENTITY = (
    *("PADDLE_TRAINER_ID", "PADDLE_TRAINERS_NUM", "PADDLE_TRAINER_ENDPOINTS"),
    *("PADDLE_CURRENT_ENDPOINT", "PADDLE_RANK_IN_NODE", "PADDLE_GLOBAL_RANK"),
    *("PADDLE_LOCAL_RANK", "PADDLE_GLOBAL_SIZE", "PADDLE_LOCAL_SIZE"),
)
# With these, the endpoints are those of a rank, or other variables place servers.
_NO_ENDPOINTS = (
    *("PADDLE_LOCAL_RANK", "PADDLE_RANK_IN_NODE", "PADDLE_GLOBAL_RANK", JOB),
    *("TRAINING_ROLE", "PADDLE_PSERVERS_IP_PORT_LIST"),
)
# PyTorchJob's and torchrun's number of hosts, this host's place, and the first host's address and
# port, newer ones first.
_PYTORCHS = (
    ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"),
)
_NOTHING_KNOWN: Mapping[str, Layer] = {}


class Choices:
    """What counts of each option, by the option's label, and remarks about the choice."""

    def __init__(self, tiers: Sequence[Sequence[Given]], notes: list[str]) -> None:
        self.tiers = tiers
        self.notes = notes
        self.chosen: dict[str, Given] = {}
        self._values: dict[str, Value] = {}
        for option in OPTIONS:
            if option.is_pair or option.label in _NO_FIELD:
                continue
            typed, variables, filed = (about(option.label, tier) for tier in tiers)
            self.take((typed or variables or filed or [option.by_default()])[-1])
            if typed and variables and not _agree(typed[-1], variables[-1]):
                stronger = f"{typed[-1].typed}={typed[-1].raw}"
                weaker = f"{variables[-1].typed}={variables[-1].raw}"
                why = "(in Paddle's launcher, the variable overrides the option)"
                notes.append(f"{stronger} overrides {weaker} {why}.")

    def __getitem__(self, name: str) -> Value:
        """Return the value of the option NAME."""
        return self._values[name]

    def word(self, name: str) -> str:
        """Return the text of the option NAME; empty if it has none."""
        value = self[name]
        return value if isinstance(value, str) else ""

    def number(self, name: str) -> int:
        """Return the number of the option NAME, or 0."""
        value = self[name]
        return value if isinstance(value, int) else 0

    def given(self, name: str) -> Given:
        """Return how the option NAME was given."""
        return self.chosen[name]

    def is_any(self, *names: str) -> bool:
        """Whether any of the options NAMES has a value that is not empty."""
        return any(self[name] for name in names)

    def is_typed(self, name: str) -> bool:
        """Whether the option NAME stands on the command line."""
        return self.given(name).source == COMMAND_LINE

    def is_default(self, name: str) -> bool:
        """Whether nobody has given the option NAME."""
        return self.given(name).source == DEFAULT

    def take(self, given: Given) -> None:
        """Let GIVEN replace what its option had; UsageError if it cannot be read."""
        option = find(given.name)
        self._values[option.label] = option.read(given)
        self.chosen[option.label] = given

    def put(self, name: str, raw: str, source: str) -> None:
        """Replace the value of the option NAME by that of RAW, for the reason SOURCE."""
        self.take(self.given(name)._replace(raw=raw, source=source))

    def drop(self, name: str) -> None:
        """Return the option NAME to its default."""
        self.take(find(name).by_default())

    def fault(self, name: str, problem: str) -> UsageError:
        """Return the error that says how the option NAME was given, and PROBLEM."""
        return UsageError(self.given(name).blame(problem))

    def ignore(self, name: str, why: str) -> None:
        """Remark that the option NAME has no effect, and WHY."""
        self.notes.append(f"{self.given(name).typed} has no effect: {why}.")


def resolve(
    parsed: ParsedCommand,
    environ: Mapping[str, str],
    config: Config | None = None,
    layers: Mapping[str, Layer] = _NOTHING_KNOWN,
    detect: Callable[[], Detected] | None = None,
) -> Request:
    """Return the request of PARSED, ENVIRON and CONFIG; UsageError if it is not valid.

    LAYERS are strategies by name that need not be read. DETECT returns the options of the engine
    that has started us, which a config file overrides.
    """
    if parsed.script is None:
        raise ValueError("a command without a script does nothing")
    notes = list(parsed.notes)
    typed = tuple(given for given in parsed.given if not _is_blank(given, notes))
    is_rank = any(environ.get(mark) for mark in _RANK_MARKS)
    ignored = _JOB_OF_RANK if is_rank else ()
    variables = tuple(g for option in KNOWN for g in option.of_environment(environ, ignored))
    filed = config.given if config else ()
    _answer_for_others((*typed, *variables, *filed), notes)

    chosen = Choices((typed, variables, filed), notes)
    _take_addresses(chosen)
    if detect is not None and not is_rank and not cluster.is_left_out(chosen.chosen):
        is_dry = not chosen.is_default("dry_run")
        for given in cluster.detected_options(chosen.chosen, detect(), notes, is_dry=is_dry):
            chosen.take(given)
    _take_endpoints(chosen, environ)
    env, nccl = (_pairs(name, (filed, typed)) for name in ("env", "nccl"))
    kind = _device_kind(chosen, env)
    mode = _mode(chosen, environ)
    # In these cases the hosts are known.
    is_placed = (
        chosen.is_any("servers", "trainers")
        or in_paddlecloud(environ)
        or _is_requested(mode, environ)
    )
    is_by_ssh = chosen.is_any("hosts", "hostfile")
    if not (is_placed or is_by_ssh or chosen["ips"]):
        _take_place(chosen, environ, is_started=detect is not None)
    ips, nnodes = _hosts(chosen, is_placed=is_placed)
    is_collective = chosen["run_mode"] == "collective"
    if ":" in nnodes and (is_placed or not is_collective):
        raise chosen.fault(
            "nnodes",
            "only collective jobs whose ranks fleetrun places are elastic; give one number.",
        )
    spares = chosen.number("spares")
    if spares and (nnodes == "1" or ips or not is_collective):
        chosen.ignore("spares", "only hosts of collective jobs that meet at --master stand by")
        spares = 0
    # With roles, the remark is made where they are known.
    if nnodes == "1" and not in_paddlecloud(environ) and mode.is_uniform:
        notes.extend(_inherited(environ, is_rank=is_rank))
    if nnodes == "1" and chosen.is_default("nnodes") and not is_by_ssh:
        notes.extend(_of_pytorch(environ))
    strategy, strategy_settings = _strategy(chosen, layers)

    is_ranked = chosen["rank"] not in (None, -1) and (nnodes != "1" or is_placed)
    fields: dict[str, Any] = {
        find(name).field: value
        for name in chosen.chosen
        if find(name).field in DEFAULTS and (value := chosen[name]) not in (None, "")
    }
    fields |= {
        "devices": chosen.given("devices").raw.strip() or None,
        "device_kind": kind,
        "ips": ips,
        "nnodes": nnodes,
        "rank": chosen.number("rank") if is_ranked else None,
        "spares": spares,
    }
    return Request(
        script=parsed.script,
        env=tuple((name, value) for name, (value, _) in env.items()),
        nccl=tuple((name, value) for name, (value, _) in nccl.items()),
        strategy=strategy,
        settings=(
            *_config_settings(parsed, config),
            *map(_setting, chosen.chosen.values()),
            *_pair_settings("env", env),
            *_pair_settings("nccl", nccl),
            *strategy_settings,
        ),
        notes=tuple(notes),
        **fields,
    )


def about(name: str, tier: Iterable[Given]) -> list[Given]:
    """Return what TIER gives of the option NAME."""
    return [given for given in tier if given.name == name]


def _agree(first: Given, second: Given) -> bool:
    """Whether both say the same, but for case and blanks."""
    return first.raw.strip().lower() == second.raw.strip().lower()


def _is_blank(given: Given, notes: list[str]) -> bool:
    """Whether GIVEN is empty, as `--ips=$UNSET` is; add a remark to NOTES if it or an entry is."""
    kind = find(given.name).kind.name
    blank = kind in ("text", "list") and not given.raw.strip()
    if blank:
        notes.append(f"{given.typed} is empty and counts as not given.")
    elif kind == "list" and not all(map(str.strip, given.raw.split(","))):
        # As `--ips=$A,$B` with an unset variable is; the job would be smaller than meant.
        notes.append(f"{given.typed}={given.raw} has an empty entry, which counts as not given.")
    return blank


def _answer_for_others(all_given: Iterable[Given], notes: list[str]) -> None:
    """Refuse some of Paddle's options, and add a remark for those without effect."""
    for given in all_given:
        option = find(given.name)
        if not option.reason or option.switches_off(given.raw):
            continue
        if option.group == "later":
            raise UsageError(given.blame(option.reason))
        option.read(given)
        notes.append(f"{given.typed} has no effect: {option.reason}")


# -- hosts ---------------------------------------------------------------------------------------


def _take_addresses(chosen: Choices) -> None:
    """Read Paddle's --elastic_server, which is an etcd; refuse IPv6 as this host's address."""
    master, host = chosen.given("master"), chosen.given("host")
    names = {master.spelling, master.source[1:].lower().removeprefix("paddle_")}
    if "elastic_server" in names and not master.raw.strip().startswith(("etcd://", "etcds://")):
        chosen.take(master._replace(raw=f"etcd://{master.raw.strip()}"))
    if not is_ipv6(chosen.word("host").strip("[]")):
        return
    if not host.source.startswith("$"):
        raise chosen.fault("host", f"{NO_IPV6}; give this host's IPv4 address.")
    # A container engine sets it for everything in the container.
    chosen.notes.append(f"{host.typed}={host.raw} is ignored: {NO_IPV6}.")
    chosen.drop("host")


def _take_endpoints(chosen: Choices, environ: Mapping[str, str]) -> None:
    """Use the hosts of the endpoints in ENVIRON, as Paddle does, except inside a rank."""
    name = next((name for name in ENDPOINTS if environ.get(name, "").strip()), None)
    if (
        name is None
        or any(environ.get(mark) for mark in _NO_ENDPOINTS)
        or in_paddlecloud(environ)
        or chosen.is_any("ips", "hosts", "hostfile", "servers", "trainers")
        or (chosen["master"] and not chosen.given("master").source.startswith("$"))
        or (not chosen.is_default("nnodes") and chosen.word("nnodes") == "1")
    ):
        return
    ports: dict[str, list[str]] = {}
    for piece in environ[name].split(","):
        host, colon, port = piece.strip().rpartition(":")
        ports.setdefault(host if colon else port, []).append(port if colon else "")
    if len(ports) < 2:  # one is us
        return
    chosen.take(find("ips").given(",".join(ports), source=f"${name}"))
    first = next(iter(ports.values()))[0]
    if first.isdecimal() and chosen.is_default("start_port"):
        listed = [str(int(first) + place) for place in range(max(map(len, ports.values())))]
        if all(own == listed[: len(own)] for own in ports.values()):
            chosen.take(find("start_port").given(first, source=f"${name}"))
    chosen.notes.append(f"${name} names the hosts of the job: {', '.join(ports)}.")


def _take_place(chosen: Choices, environ: Mapping[str, str], *, is_started: bool) -> None:
    """Settle this host's place among several that are not listed, which an engine may have STARTED.

    $PADDLE_TRAINER_ID is its rank, as for Paddle; the first host meets the others here unless
    another place is given.
    """
    if _bounds(chosen)[1] == 1:
        return
    place = environ.get("PADDLE_TRAINER_ID", "").strip()
    is_rank = any(environ.get(mark) for mark in (*_NO_ENDPOINTS, *_RANK_MARKS))
    if place.isdecimal() and not is_rank and chosen["rank"] in (None, -1):
        chosen.take(find("rank").given(place, "$PADDLE_TRAINER_ID", "$PADDLE_TRAINER_ID"))
    # Files and variables apply to all hosts; and mpirun's --np counts processes.
    is_meant = chosen.is_typed("nnodes") and chosen.given("nnodes").spelling != "np"
    if is_meant and not is_started and not chosen["master"] and chosen.number("rank") <= 0:
        chosen.put("master", ":0", "this host is the first")


def _bounds(chosen: Choices) -> tuple[int, int]:
    """Return the minimum and maximum number of hosts."""
    low, colon, high = chosen.given("nnodes").raw.strip().partition(":")
    high = high if colon else low
    # Python refuses to read numbers of thousands of digits.
    if not all(text.is_digits(bound) and len(bound) < 10 for bound in (low, high)) or int(low) < 1:
        raise chosen.fault("nnodes", "give a number of hosts, 1 or more.")
    if int(high) < int(low):
        raise chosen.fault("nnodes", "give the smaller number of hosts first.")
    return int(low), int(high)


def _hosts(chosen: Choices, *, is_placed: bool) -> tuple[tuple[str, ...], str]:
    """Return the listed hosts, and how many as --nnodes says; UsageError for a contradiction."""
    least, most = _bounds(chosen)
    ips = _listed(chosen, least, most)
    count = len(ips) or most
    by_ssh = next((name for name in ("hosts", "hostfile") if chosen[name]), None)
    if count > 1 and not ips and by_ssh and least == most:
        raise chosen.fault(
            "nnodes",
            f"leave it out: {chosen.given(by_ssh).typed} says which hosts there are, and the job "
            "needs all of them; with MIN:MAX it needs MIN of them.",
        )
    if count > 1 and not ips and not by_ssh and not is_placed:
        _check_meeting(chosen)
        places = count + chosen.number("spares")
        if chosen.number("rank") >= places:
            raise chosen.fault("rank", f"the job has {places} hosts, 0 to {places - 1}.")
    if chosen.is_typed("master") and count == 1:
        chosen.ignore("master", "the job is on one host; for several, give all --nnodes=N")
    return ips, f"{least}:{count}" if least < min(count, most) else str(count)


def _listed(chosen: Choices, least: int, most: int) -> tuple[str, ...]:
    """Return the hosts of --ips; UsageError if --nnodes, from LEAST to MOST, does not fit them."""
    listed = chosen["ips"]
    ips = listed if isinstance(listed, tuple) else ()
    point = meeting_point(ips[0]) if len(ips) == 1 else None
    if point is not None:
        chosen.notes.append(f"The port of --ips={ips[0]} has no effect: see --start_port.")
        ips = (point.host,)
    # An elastic job of listed hosts needs not all of them.
    if not ips or chosen.is_default("nnodes") or least <= len(ips) <= most:
        return ips
    nnodes, given = chosen.given("nnodes"), chosen.given("ips")
    names = f"{given.typed} names {text.counted(len(ips), 'host')}"
    # A variable may be set for all jobs of a machine; the list was written for this one.
    if not nnodes.source.startswith("$") or given.source.startswith("$"):
        raise chosen.fault("nnodes", f"{names}; omit one of them.")
    chosen.notes.append(f"{nnodes.typed}={most} is ignored: {names}.")
    return ips


def _check_meeting(chosen: Choices) -> None:
    """Raise UsageError for several hosts that are neither listed nor given a usable --master."""
    master = chosen.word("master")
    if not master:
        # mpirun's --np has another meaning.
        is_np = chosen.given("nnodes").spelling == "np"
        hint = "it is the number of hosts (--nproc_per_node: of processes); " if is_np else ""
        raise chosen.fault(
            "nnodes",
            f"{hint}name the hosts with --ips, or give --master=HOST:PORT, a host of the job "
            "and a free port on it, the same on every host.",
        )
    if master.startswith("etcd"):
        if store_endpoints(master) is None:
            # Without the value, which may have a password.
            raise UsageError(
                f"{chosen.given('master').typed}: give etcd://HOST:PORT[,HOST:PORT...], the "
                "members of an etcd 3 without users; etcds:// with TLS."
            )
        return
    if own_port(master) is not None:
        return
    point = meeting_point(master)
    if point is None or not point.host.strip("0.:"):
        raise chosen.fault(
            "master",
            "give HOST:PORT, the address of the job's first host and a free port on it, the same "
            "on every host, such as 10.0.0.1:6170.",
        )
    # The hosts' own addresses follow from the way to it, unless they are given.
    if ":" in point.host and not chosen.is_any("host", "network"):
        raise chosen.fault("master", NO_IPV6_MASTER)


# -- devices and mode ----------------------------------------------------------------------------


def _device_kind(chosen: Choices, env: Mapping[str, tuple[str, str]]) -> str | None:
    """Return the kind of devices: that of --device_kind, or of the listed devices."""
    if kinds.XCCL in env and not chosen.is_typed("device_kind"):
        raw, source = env[kinds.XCCL]
        typed = f"--env {kinds.XCCL}"
        chosen.take(find("device_kind").given(raw, typed, source))
    devices, asked = chosen.given("devices"), chosen.given("device_kind")
    kind = chosen.word("device_kind")
    if kind and not kinds.is_name(kind):
        raise chosen.fault("device_kind", "give the name that Paddle has for it: npu, mlu, gpu.")
    if kind.lower() in {*kinds.BUILT_IN, *kinds.VENDORS, *kinds.SYNONYMS}:
        kind = kind.lower()
    spelling = devices.spelling.removeprefix("selected_")
    listed = spelling.removesuffix("s")
    kind, listed = (kinds.SYNONYMS.get(name, name) for name in (kind, listed))
    if spelling == "devices" or not devices.raw.strip():
        return kind or None
    if kind in {"", listed}:
        return listed
    written, why = f"{devices.typed}={devices.raw}", f"{asked.typed}={asked.raw}"
    if chosen.is_typed("device_kind") and asked.typed == flag("device_kind"):
        names = f"{written} names {kinds.label(listed)}s"
        raise chosen.fault("device_kind", f"{names}; give one of the two, or --devices.")
    if spelling in kinds.GENERAL:
        # Paddle's launchers treat them all as --devices.
        chosen.notes.append(f"{written} names {kinds.label(kind)}s: {why}.")
        return kind
    chosen.notes.append(f"{written} overrides {why}.")
    chosen.drop("device_kind")
    return listed


def _mode(chosen: Choices, environ: Mapping[str, str]) -> modes.Mode:
    """Settle --run_mode, which other options may imply, and return the job's mode."""
    for mode in modes.MODES:
        asking = [
            name
            for name in mode.options
            if chosen[name] and not find(name).switches_off(chosen.given(name).raw)
        ]
        if chosen.is_default("run_mode"):
            if asking:
                chosen.put("run_mode", mode.name, chosen.given(asking[0]).typed)
            elif _is_requested(mode, environ):
                chosen.put("run_mode", mode.name, f"${mode.variables[0]}")
        elif asking and chosen["run_mode"] not in mode.words:
            _settle(chosen, mode, asking)
    return modes.BY_WORD[chosen.word("run_mode")]


def _settle(chosen: Choices, mode: modes.Mode, asking: Sequence[str]) -> None:
    """Drop the options ASKING for MODE if only --run_mode is typed, or it if only they are."""
    run_mode = chosen.given("run_mode")
    typed = [name for name in asking if chosen.is_typed(name)]
    if chosen.is_typed("run_mode") == bool(typed):
        what = mode.name if mode.feature is None else mode.feature.name
        asked = chosen.given((typed or asking)[0]).typed
        raise chosen.fault("run_mode", f"{asked} requests {what}; omit one of them.")
    if typed:
        asked = chosen.given(typed[0]).typed
        chosen.notes.append(f"{asked} overrides {run_mode.typed}={run_mode.raw}.")
        chosen.put("run_mode", mode.name, asked)
        return
    for name in asking:
        chosen.ignore(name, f"{run_mode.typed}={chosen['run_mode']}")
        chosen.drop(name)


def _is_requested(mode: modes.Mode, environ: Mapping[str, str]) -> bool:
    """Whether ENVIRON has all variables by which a cluster requests MODE."""
    return bool(mode.variables) and all(environ.get(name) for name in mode.variables)


def _pairs(name: str, tiers: Iterable[Iterable[Given]]) -> dict[str, tuple[str, str]]:
    """Collect each variable of --env or --nccl: its value and its source; a later tier wins."""
    pairs: dict[str, tuple[str, str]] = {}
    for given in (given for tier in tiers for given in about(name, tier)):
        key, _, value = str(find(name).read(given)).partition("=")
        if name == "nccl":
            key = "NCCL_" + key.upper().removeprefix("NCCL_")
        pairs[key] = (value, given.source)
    return pairs


# -- the strategy --------------------------------------------------------------------------------


def _strategy(
    chosen: Choices, layers: Mapping[str, Layer]
) -> tuple[Strategy | None, Sequence[Setting]]:
    """Return the strategy and its lines of the settings; None without a strategy."""
    typed, variables, filed = (about("strategy", tier) for tier in chosen.tiers)
    given = typed or variables or filed
    sets = [*about("set", chosen.tiers[2]), *about("set", chosen.tiers[0])]
    check = chosen["check_ranks"]
    if not (given or sets or check not in {None, -1}):
        for name in ("strategy_mode", "strategy_strict"):
            if chosen.is_typed(name):
                chosen.ignore(name, "no strategy is requested")
        return None, (Setting("strategy", "None", DEFAULT),)
    requested_names = load.names(given)
    strategy = load.requested(requested_names, sets, layers)._replace(
        mode=chosen.word("strategy_mode"),
        is_strict=chosen["strategy_strict"] is True,
        check_ranks=check if isinstance(check, int | str) else "auto",
    )
    lines = load.settings(requested_names, sets)
    return strategy, [Setting(n, secrets.redact(n.rpartition(".")[2], v), s) for n, v, s in lines]


# -- the environment -----------------------------------------------------------------------------


def _of_pytorch(environ: Mapping[str, str]) -> Iterator[str]:
    """Yield a warning about variables by which PyTorch's launchers place this host among several.

    Within a rank of such a job, which has $LOCAL_RANK, they count processes.
    """
    for count, place, master, port in _PYTORCHS:
        number = environ.get(count, "").strip()
        if not number.isdecimal() or int(number) < 2 or environ.get("LOCAL_RANK"):
            continue
        if all(environ.get(name, "").strip() for name in (place, master)):
            at = f"{'' if is_loopback(environ[master].strip()) else f'${master}'}:${port}"
            yield (
                f"this host trains alone: ${count}={number}, ${place} and ${master} are of PyTorch "
                f"and do not count. For one job on {number} hosts write fleetrun "
                f"--nnodes=${count} --rank=${place} --master={at}; to train alone, --nnodes=1."
            )
            return


def _inherited(environ: Mapping[str, str], *, is_rank: bool) -> Iterator[str]:
    """Yield a warning about rank variables of another launcher, which do not count here."""
    left = [name for name in (*_IDENTITY, *(_JOB_OF_RANK * is_rank)) if environ.get(name)]
    if left:
        listed = ", ".join(f"${name}" for name in left)
        yield f"this job is on one host and ignores what another launcher left behind: {listed}."


# -- what is shown -------------------------------------------------------------------------------


def _setting(given: Given) -> Setting:
    """Return GIVEN as a line of the settings."""
    option = find(given.name)
    if given.source == DEFAULT:
        # It is in the source code, and looking for secrets takes a while.
        return Setting(given.name, "None" if option.usual is None else given.raw, DEFAULT)
    name = given.spelling or given.name
    return Setting(name, secrets.redact(name, given.raw.strip()), given.source)


def _pair_settings(name: str, pairs: Mapping[str, tuple[str, str]]) -> Iterator[Setting]:
    """Yield a line for each variable, with secrets concealed."""
    for key, (value, source) in pairs.items():
        yield Setting(f"{name}.{key}", secrets.redact(key, value), source)


def _config_settings(parsed: ParsedCommand, config: Config | None) -> Iterator[Setting]:
    """Yield the settings that name the config files, and why they were read."""
    if config is None or config.path is None:
        yield Setting("config", "None", DEFAULT)
    else:
        source = COMMAND_LINE if named(parsed.given) else "current folder"
        yield Setting("config", config.path, source)
    if config is not None and config.beneath is not None:
        yield Setting(USER_CONFIG, config.beneath, "this user")
