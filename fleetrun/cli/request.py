"""Resolves every option: command line > environment > config file > default, with its source."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fleetrun.cli.argv import ParsedCommand
from fleetrun.cli.configfile import Config, named
from fleetrun.cli.option import Option, Resolved
from fleetrun.cli.options import FIXED_PORT, KNOWN, OPTIONS, find
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
    Script,
    Setting,
    Strategy,
    flag,
)
from fleetrun.plan import kinds, modes
from fleetrun.plan.hosts import (
    ENDPOINTS,
    LAST_PORT,
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
from fleetrun.text import counted, is_digits, without_slips

# Options that fill no field of the request.
_NO_FIELD = ("config", "from_manifest", "help", "strategy", "version")
_WIDE_KEY = "the name, or the = after it, has full-width characters; "
# The most digits of a number of hosts.
_DIGITS = 9
# The strength of the command line as a source.
_TYPED = 2
# Options that start the job on other hosts.
_BY_SSH = ("hosts", "hostfile")
# The host's rank, if each of several hosts has a launcher.
_PLACE = "PADDLE_TRAINER_ID"
_CHECK = Script("file", "run_check", ())
# Variables of ranks. On one host they do not describe the job to be started.
_IDENTITY = (
    "PADDLE_TRAINER_ID",
    "PADDLE_TRAINERS_NUM",
    "PADDLE_TRAINER_ENDPOINTS",
    "PADDLE_CURRENT_ENDPOINT",
    "PADDLE_RANK_IN_NODE",
    "PADDLE_GLOBAL_RANK",
    "PADDLE_LOCAL_RANK",
    "PADDLE_GLOBAL_SIZE",
    "PADDLE_LOCAL_SIZE",
)
# Only a rank has these; then the next ones describe the job around us.
_RANK_MARKS = ("PADDLE_CURRENT_ENDPOINT", "PADDLE_GLOBAL_RANK")
_JOB_OF_RANK = ("PADDLE_NNODES", "PADDLE_MASTER", "PADDLE_RANK")
# With these, the endpoints are those of a rank, or other variables place servers.
_NO_ENDPOINTS = (
    *("PADDLE_LOCAL_RANK", "PADDLE_RANK_IN_NODE", "PADDLE_GLOBAL_RANK", JOB),
    *("TRAINING_ROLE", "PADDLE_PSERVERS_IP_PORT_LIST"),
)
_NO_NUMBER = (
    "without --nnodes the job is on this host alone. If there are more, give their number to all, "
    "--nnodes=N"
)
# PyTorchJob's and torchrun's number of hosts, this host's place, and the first host's address and
# port, newer ones first.
_PYTORCHS = (
    ("PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_MASTER_PORT"),
    ("WORLD_SIZE", "RANK", "MASTER_ADDR", "MASTER_PORT"),
)
# Options that have no effect without a strategy.
_ONLY_STRATEGY = ("strategy_mode", "strategy_strict")
# Options that have no effect without parameter servers.
_ONLY_SERVERS = ("http_port", "with_gloo")
_NOTHING_KNOWN: Mapping[str, Layer] = {}


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
    variables = _variables(environ)
    filed = config.given if config else ()
    _answer_for_others((*typed, *variables, *filed), notes)

    tiers = (typed, variables, filed)
    chosen = {}
    for option in OPTIONS:
        if not option.is_pair and option.label not in _NO_FIELD:
            given = [_about(option.label, tier) for tier in tiers]
            chosen[option.field] = _choose(option, given, notes)
    chosen["master"] = _meeting_point(chosen["master"])
    chosen["host"] = _own_host(chosen["host"], notes)
    _take_detected(chosen, detect, environ, notes)
    _take_endpoints(chosen, environ, notes)
    _take_check(chosen, parsed.script, notes)
    env = _pairs("env", (filed, typed))
    nccl = _pairs("nccl", (filed, typed))
    chosen["device_kind"], kind = _device_kind(chosen, env, notes)
    chosen["run_mode"] = _run_mode(chosen, environ, notes)
    word = chosen["run_mode"].of(str) or "collective"
    mode = modes.BY_WORD[word]
    # In these cases the hosts are known.
    is_listed = any(chosen[name].value for name in ("servers", "trainers"))
    is_told = in_paddlecloud(environ) or _is_requested(mode, environ)
    if not (is_listed or is_told or any(chosen[name].value for name in ("ips", *_BY_SSH))):
        _take_place(chosen, environ, notes)
        if detect is None:
            _take_this_host(chosen)
    hosts = _hosts(chosen, notes, is_cloud=is_listed or is_told)
    _check_elastic(chosen, hosts, word, notes, is_placed=is_listed or is_told)
    chosen["start_port"] = _first_port(chosen["start_port"], hosts.rank)
    is_by_ssh = any(chosen[name].value for name in _BY_SSH)
    # With roles, the remark is made where they are known.
    if hosts.nnodes == "1" and not in_paddlecloud(environ) and mode.is_uniform:
        notes.extend(_inherited(environ))
    if hosts.nnodes == "1" and chosen["nnodes"].given.source == "default" and not is_by_ssh:
        notes.extend(_of_pytorch(environ))

    strategy, strategy_settings = _strategy(chosen, tiers, layers, notes)

    # As given, except for those below.
    plain = {
        name: DEFAULTS[name] if resolved.value in (None, "") else resolved.value
        for name, resolved in chosen.items()
        if name in DEFAULTS
    }
    converted: dict[str, Any] = {
        "devices": chosen["devices"].given.raw.strip() or None,
        "device_kind": kind,
        "ips": hosts.ips,
        "host": (chosen["host"].of(str) or "").strip() or None,
        "network": (chosen["network"].of(str) or "").strip() or None,
        "nnodes": hosts.nnodes,
        "rank": hosts.rank,
        "spares": _spares(chosen["spares"], hosts, word, notes),
        "run_mode": word,
        "webhook": _address(chosen["webhook"]),
        "redirects": chosen["redirects"].value == "true",
    }
    return Request(
        script=parsed.script,
        env=tuple((name, value) for name, (value, _) in env.items()),
        nccl=tuple((name, value) for name, (value, _) in nccl.items()),
        strategy=strategy,
        settings=(
            *_config_setting(parsed, config),
            *(_setting(resolved) for resolved in chosen.values()),
            *_pair_settings("env", env),
            *_pair_settings("nccl", nccl),
            *strategy_settings,
        ),
        notes=tuple(notes),
        **{**plain, **converted},
    )


# -- precedence --------------------------------------------------------------------------------


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


def _variables(environ: Mapping[str, str]) -> tuple[Given, ...]:
    """Return the options that ENVIRON sets; the first of an option's variables counts."""
    ignored = _JOB_OF_RANK if any(mark in environ for mark in _RANK_MARKS) else ()
    return tuple(given for option in KNOWN for given in option.of_environment(environ, ignored))


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


def _about(name: str, tier: Iterable[Given]) -> list[Given]:
    """Return what TIER gives of the option NAME."""
    return [given for given in tier if given.name == name]


def _choose(option: Option, tiers: Sequence[Sequence[Given]], notes: list[str]) -> Resolved:
    """Return the last value of the strongest of TIERS, or the default of OPTION."""
    typed, variables, filed = tiers
    strongest = typed or variables or filed
    if not strongest:
        return option.by_default()
    last = strongest[-1]
    resolved = Resolved(option.read(last), last)
    if typed:
        notes.extend(
            f"{last.typed}={last.raw} overrides {earlier.typed}={earlier.raw}: the last one counts."
            for earlier in typed[:-1]
            if earlier.spelling != last.spelling
        )
        notes.extend(_contradicted(resolved, variables))
    return resolved


def _contradicted(resolved: Resolved, variables: Iterable[Given]) -> Iterable[str]:
    """Yield a remark for each variable with another value, which Paddle's launcher prefers."""
    given = resolved.given
    option = find(given.name)
    for variable in variables:
        if not option.is_readable(variable.raw) or option.read(variable) != resolved.value:
            yield (
                f"{given.typed}={given.raw} overrides {variable.typed}={variable.raw}"
                " (in Paddle's launcher, the variable overrides the option)."
            )


def _take_detected(
    chosen: dict[str, Resolved],
    detect: Callable[[], Detected] | None,
    environ: Mapping[str, str],
    notes: list[str],
) -> None:
    """Use the options that DETECT returns where none is given, except inside a rank."""
    if detect is None or any(environ.get(mark) for mark in _RANK_MARKS):
        return

    given_options = {name: resolved.given for name, resolved in chosen.items()}
    if cluster.is_left_out(given_options):
        return
    is_dry = chosen["dry_run"].value is not None
    for given in cluster.detected_options(given_options, detect(), notes, is_dry=is_dry):
        option = find(given.name)
        chosen[option.field] = Resolved(option.read(given), given)


def _take_endpoints(
    chosen: dict[str, Resolved], environ: Mapping[str, str], notes: list[str]
) -> None:
    """Use the hosts of the endpoints in ENVIRON, as Paddle does, except inside a rank."""
    name = next((name for name in ENDPOINTS if environ.get(name, "").strip()), None)
    others = any(environ.get(mark) for mark in _NO_ENDPOINTS) or in_paddlecloud(environ)
    is_named = any(chosen[key].value for key in ("ips", "hosts", "hostfile", "servers", "trainers"))
    meeting, nnodes = chosen["master"].given, chosen["nnodes"].given
    is_met = bool(chosen["master"].value) and not meeting.source.startswith("$")
    is_alone = nnodes.source != DEFAULT and nnodes.raw.strip() == "1"
    if name is None or others or is_named or is_met or is_alone:
        return
    ports: dict[str, list[str]] = {}
    for piece in environ[name].split(","):
        host, colon, port = piece.strip().rpartition(":")
        ports.setdefault(host if colon else port, []).append(port if colon else "")
    if len(ports) < 2:  # one is us
        return
    taken = [("ips", ",".join(ports))]
    first = next(iter(ports.values()))[0]
    if first.isdecimal() and chosen["start_port"].given.source == DEFAULT:
        listed = [str(int(first) + place) for place in range(max(map(len, ports.values())))]
        if all(own == listed[: len(own)] for own in ports.values()):
            taken.append(("start_port", first))
    for target, raw in taken:
        option = find(target)
        given = option.given(raw, source=f"${name}")
        chosen[option.field] = Resolved(option.read(given), given)
    notes.append(f"${name} names the hosts of the job: {', '.join(ports)}.")


def _take_check(chosen: dict[str, Resolved], script: Script, notes: list[str]) -> None:
    """Let run_check with --master run on one of two hosts, as Paddle's check does."""
    nnodes, master = chosen["nnodes"].given, chosen["master"].given
    is_meant = nnodes.source == DEFAULT and master.source == COMMAND_LINE
    if script != _CHECK or not is_meant or chosen["ips"].value:
        return
    chosen["nnodes"] = Resolved("2", nnodes._replace(raw="2", source="run_check"))
    notes.append(f"{master.typed} lets run_check be one of two hosts, as in Paddle; see --nnodes.")


def _take_place(chosen: dict[str, Resolved], environ: Mapping[str, str], notes: list[str]) -> None:
    """Use $PADDLE_TRAINER_ID as the rank of this host among several, as Paddle does."""
    text = environ.get(_PLACE, "").strip()
    is_rank = any(environ.get(mark) for mark in (*_NO_ENDPOINTS, *_RANK_MARKS))
    if not text.isdecimal() or is_rank or _bounds(chosen["nnodes"].given)[1] == 1:
        return
    rank = chosen["rank"]
    option = find("rank")
    variable = option.given(text, f"${_PLACE}", f"${_PLACE}")
    if (rank.of(int) or 0) < 0 or rank.given.source == DEFAULT:
        chosen["rank"] = Resolved(option.read(variable), variable)
    elif rank.given.source == COMMAND_LINE:
        notes.extend(_contradicted(rank, [variable]))


def _take_this_host(chosen: dict[str, Resolved]) -> None:
    """Let several hosts meet at this one, the first, unless another place is given."""
    nnodes, master = chosen["nnodes"].given, chosen["master"]
    # Files and variables apply to all hosts; and mpirun's --np counts processes.
    is_meant = nnodes.source in {COMMAND_LINE, "run_check"} and nnodes.spelling != "np"
    if master.value or not is_meant or _bounds(nnodes)[1] == 1:
        return
    if (chosen["rank"].of(int) or 0) <= 0:
        chosen["master"] = Resolved(
            ":0", master.given._replace(raw=":0", source="this host is the first")
        )


# -- single options ----------------------------------------------------------------------------


class Hosts(NamedTuple):
    """The result of all options about several hosts."""

    ips: tuple[str, ...]
    nnodes: str
    rank: int | None


def _meeting_point(master: Resolved) -> Resolved:
    """Return the rendezvous; Paddle's --elastic_server can only be an etcd."""
    given, marks = master.given, ("etcd://", "etcds://")
    if not _is_elastic_server(given) or given.raw.strip().startswith(marks):
        return master
    text = marks[0] + given.raw.strip()
    return Resolved(text, given._replace(raw=text))


def _is_elastic_server(given: Given) -> bool:
    return "elastic_server" in {given.spelling, given.source[1:].lower().removeprefix("paddle_")}


def _hosts(chosen: Mapping[str, Resolved], notes: list[str], *, is_cloud: bool) -> Hosts:
    """Return the hosts of the job; UsageError if the options contradict each other."""
    listed = chosen["ips"].value
    ips = tuple(map(str, listed if isinstance(listed, tuple) else ()))
    point = meeting_point(ips[0]) if len(ips) == 1 else None
    if point is not None:
        notes.append(f"The port of --ips={ips[0]} has no effect: see --start_port.")
        ips = (point.host,)
    nnodes, master = chosen["nnodes"], chosen["master"]
    least, count = _bounds(nnodes.given)
    if ips and least < count and least <= len(ips) <= count:
        # An elastic job of listed hosts needs not all of them.
        count = len(ips)
    elif ips and least == count:
        least = len(ips)
    if ips and nnodes.given.source != DEFAULT and count != len(ips):
        named = f"{chosen['ips'].given.typed} names {counted(len(ips), 'host')}"
        # A variable may be set for all jobs of a machine; the list was written for this one.
        if nnodes.given.source.startswith("$") and not chosen["ips"].given.source.startswith("$"):
            notes.append(f"{nnodes.given.typed}={count} is ignored: {named}.")
        else:
            raise UsageError(nnodes.given.blame(f"{named}; omit one of them."))
    count = len(ips) or count
    by_ssh = chosen["hosts"] if chosen["hosts"].value else chosen["hostfile"]
    if count > 1 and not ips and by_ssh.value:
        if least == count:
            raise UsageError(
                nnodes.given.blame(
                    f"leave it out: {by_ssh.given.typed} says which hosts there are, and the job "
                    "needs all of them; with MIN:MAX it needs MIN of them."
                )
            )
    elif count > 1 and not ips and not is_cloud:
        has_address = any(chosen[name].value for name in ("host", "network"))
        _check_meeting(master, nnodes.given, has_address=has_address)
        _check_rank(chosen["rank"], count + (chosen["spares"].of(int) or 0))
    if master.given.source == COMMAND_LINE and count == 1:
        is_meant = bool(ips) or nnodes.given.source != DEFAULT
        alone = "the job is on one host" if is_meant else _NO_NUMBER
        notes.append(f"{master.given.typed} has no effect: {alone}.")
    is_alone = count == 1 and not is_cloud
    size = str(count) if least >= count else f"{least}:{count}"
    return Hosts(ips, size, _rank(chosen["rank"], notes, is_alone=is_alone))


def _check_elastic(
    chosen: Mapping[str, Resolved],
    hosts: Hosts,
    mode: str,
    notes: list[str],
    *,
    is_placed: bool,
) -> None:
    """Raise UsageError if the job cannot be elastic."""
    nnodes = chosen["nnodes"].given
    is_elastic = ":" in hosts.nnodes
    if is_elastic and (is_placed or mode != "collective"):
        raise UsageError(
            nnodes.blame(
                "only collective jobs whose ranks fleetrun places are elastic; give one number."
            )
        )
    if is_elastic or chosen["spares"].of(int):
        return
    given = chosen["elastic_timeout_s"].given
    if given.source == COMMAND_LINE:
        notes.append(f"{given.typed} has no effect: the job is not elastic (--nnodes=MIN:MAX).")


def _spares(resolved: Resolved, hosts: Hosts, mode: str, notes: list[str]) -> int:
    """Return the number of spare hosts; 0 with a note if there can be none."""
    spares = resolved.of(int) or 0
    if not spares or (hosts.nnodes != "1" and not hosts.ips and mode == "collective"):
        return spares
    if hosts.nnodes == "1":
        notes.append(f"{resolved.given.typed} has no effect: the job is on one host.")
    else:
        notes.append(
            f"{resolved.given.typed} has no effect: only hosts of collective jobs that meet at "
            "--master stand by."
        )
    return 0


def _own_host(resolved: Resolved, notes: list[str]) -> Resolved:
    """Return this host's address, which ranks get, and which therefore cannot be IPv6."""
    if not is_ipv6((resolved.of(str) or "").strip().strip("[]")):
        return resolved
    if resolved.given.source.startswith("$"):
        # A container engine sets it for everything in the container.
        notes.append(f"{resolved.given.typed}={resolved.given.raw} is ignored: {NO_IPV6}.")
        return Resolved(None, resolved.given)
    raise UsageError(resolved.given.blame(f"{NO_IPV6}; give this host's IPv4 address."))


def _check_meeting(master: Resolved, nnodes: Given, *, has_address: bool) -> None:
    """Raise UsageError for several hosts that are neither listed nor given --master.

    HAS_ADDRESS says that the hosts' own addresses do not follow from the way to it.
    """
    text = master.of(str)
    if text is None:
        # mpirun's --np has another meaning.
        is_np = nnodes.spelling == "np"
        hint = "it is the number of hosts (--nproc_per_node: of processes); " if is_np else ""
        raise UsageError(
            nnodes.blame(
                f"{hint}name the hosts with --ips, or give --master=HOST:PORT, a host of the job "
                "and a free port on it, the same on every host."
            )
        )
    if text.startswith("etcd"):
        _check_store(text, master.given)
        return
    if own_port(text) is not None:
        return
    point = meeting_point(text)
    if point is None:
        raise UsageError(
            master.given.blame(
                "give HOST:PORT, a host of the job and a free port on it, such as 10.0.0.1:6170."
            )
        )
    if not point.host.strip("0.:"):
        raise UsageError(
            master.given.blame(
                "that is an address to listen on, where no other host can come; give the first "
                "host's address, the same on every host."
            )
        )
    if ":" in point.host and not has_address:
        raise UsageError(master.given.blame(NO_IPV6_MASTER))


def _check_store(text: str, given: Given) -> None:
    """Raise UsageError if TEXT names no usable etcd; TEXT may contain a password."""
    if store_endpoints(text) is not None:
        return
    if "@" in text:
        raise UsageError(
            f"{given.typed}: etcd with users is not supported; give etcd://HOST:PORT "
            "of one without users, or etcds:// of one with client certificates."
        )
    raise UsageError(
        given.blame(
            "give etcd://HOST:PORT[,HOST:PORT...]: the members of an etcd 3; etcds:// with TLS."
        )
    )


def _bounds(given: Given) -> tuple[int, int]:
    """Return the minimum and maximum number of hosts."""
    low, colon, high = given.raw.strip().partition(":")
    # Python refuses to read numbers of thousands of digits.
    is_long = max(len(low), len(high)) > _DIGITS
    is_valid = is_digits(low) and (not colon or is_digits(high))
    if is_long or not is_valid or int(low) < 1:
        raise UsageError(given.blame("give a number of hosts, 1 or more."))
    if colon and int(high) < int(low):
        raise UsageError(given.blame("give the smaller number of hosts first."))
    return int(low), int(high if colon else low)


def _check_rank(resolved: Resolved, hosts: int) -> None:
    if (resolved.of(int) or 0) >= hosts:
        raise UsageError(resolved.given.blame(f"the job has {hosts} hosts, 0 to {hosts - 1}."))


def _rank(resolved: Resolved, notes: list[str], *, is_alone: bool) -> int | None:
    """Return the rank of our host as the user gave it; None on a single host."""
    rank = resolved.of(int)
    if rank is None or rank < 0:
        return None
    if is_alone and rank > 0:
        notes.append(f"{resolved.given.typed}={rank} has no effect: the job is on one host.")
    return None if is_alone else rank


def _first_port(resolved: Resolved, rank: int | None) -> Resolved:
    """Return the port of the first process; Paddle adds the host's RANK to FLAGS_FIXED_PORT."""
    first = resolved.of(int)
    if first is None or not rank or resolved.given.source != f"${FIXED_PORT}":
        return resolved
    if first + rank > LAST_PORT:
        raise UsageError(
            resolved.given.blame(f"with this host's place, {rank}, which is not a port.")
        )
    return Resolved(first + rank, resolved.given)


def _address(resolved: Resolved) -> str | None:
    """Return the URL of the webhook; the UsageError for a bad one does not show it."""
    address = (resolved.of(str) or "").strip()
    scheme, _, rest = address.partition("://")
    if address and not (scheme in {"http", "https"} and rest):
        # The option comes last: a word after its name is hidden like a password.
        problem = "give an address that begins with https:// or http:// to"
        raise UsageError(f"{problem} {resolved.given.typed}.")
    return address or None


def _device_kind(
    chosen: Mapping[str, Resolved], env: Mapping[str, tuple[str, str]], notes: list[str]
) -> tuple[Resolved, str | None]:
    """Return the value of --device_kind, and the kind: that, or that of the listed devices."""
    resolved, devices = chosen["device_kind"], chosen["devices"].given
    if kinds.XCCL in env and _strength(resolved) < _TYPED:
        raw, source = env[kinds.XCCL]
        typed = f"--env {kinds.XCCL}"
        resolved = Resolved(raw, resolved.given._replace(raw=raw, source=source, typed=typed))
    kind = (resolved.of(str) or "").strip()
    if kind and not kinds.is_name(kind):
        raise UsageError(
            resolved.given.blame("give the name that Paddle has for it: npu, mlu, gpu.")
        )
    if kind.lower() in {*kinds.BUILT_IN, *kinds.VENDORS, *kinds.SYNONYMS}:
        kind = kind.lower()
    kind = kinds.SYNONYMS.get(kind, kind)
    spelling = devices.spelling.removeprefix("selected_")
    listed = spelling.removesuffix("s")
    listed = kinds.SYNONYMS.get(listed, listed)
    if kind == listed or spelling == "devices" or not devices.raw.strip():
        return resolved, kind or None
    listed_devices = f"{devices.typed}={devices.raw}"
    if not kind:
        return resolved, listed
    if resolved.given.typed == flag("device_kind") and resolved.given.source == COMMAND_LINE:
        message = (
            f"{listed_devices} names {kinds.label(listed)}s; give one of the two, or --devices."
        )
        raise UsageError(resolved.given.blame(message))
    why = f"{resolved.given.typed}={resolved.given.raw}"
    if spelling in kinds.GENERAL:
        # Paddle's launchers treat them all as --devices.
        notes.append(f"{listed_devices} names {kinds.label(kind)}s: {why}.")
        return resolved, kind
    notes.append(f"{listed_devices} overrides {why}.")
    return Resolved(None, Given("device_kind", "", "", DEFAULT)), listed


def _run_mode(
    chosen: dict[str, Resolved], environ: Mapping[str, str], notes: list[str]
) -> Resolved:
    """Return the job's mode, which other options may imply."""
    resolved = chosen["run_mode"]
    for mode in modes.MODES:
        asking = [chosen[name] for name in mode.options if _asks(chosen[name])]
        if resolved.given.source == DEFAULT:
            if asking:
                resolved = _implied(resolved, mode.name, asking[0].given.typed)
            elif _is_requested(mode, environ):
                resolved = _implied(resolved, mode.name, f"${mode.variables[0]}")
        elif resolved.value not in mode.words and asking:
            resolved = _settled(resolved, mode, asking, chosen, notes)
    if modes.BY_WORD[str(resolved.value)].is_uniform:
        notes.extend(
            f"{chosen[name].given.typed} has no effect: only jobs with parameter servers use it."
            for name in _ONLY_SERVERS
            if chosen[name].value is not None and chosen[name].given.source == COMMAND_LINE
        )
    return resolved


def _settled(
    resolved: Resolved,
    mode: modes.Mode,
    asking: Sequence[Resolved],
    chosen: dict[str, Resolved],
    notes: list[str],
) -> Resolved:
    """Return the winner if RESOLVED, --run_mode, contradicts MODE, which ASKING requests."""
    strength = _strength(resolved)
    strongest = max(asking, key=_strength)
    if _strength(strongest) > strength:
        notes.append(
            f"{strongest.given.typed} overrides {resolved.given.typed}={resolved.given.raw}: "
            f"it requests {_what(mode)}."
        )
        return _implied(resolved, mode.name, strongest.given.typed)
    if _strength(strongest) == strength:
        raise UsageError(
            resolved.given.blame(
                f"{strongest.given.typed} requests {_what(mode)}; omit one of them."
            )
        )
    for loser in asking:
        notes.append(f"{loser.given.typed} has no effect: {resolved.given.typed}={resolved.value}.")
        chosen[find(loser.given.name).field] = Resolved(None, loser.given)
    return resolved


def _what(mode: modes.Mode) -> str:
    """Return MODE's name for an error message."""
    return mode.name if mode.feature is None else mode.feature.name


def _asks(resolved: Resolved) -> bool:
    """Whether RESOLVED requests any process; heterogeneous trainers are counted in a text."""
    given = resolved.given
    return bool(resolved.value) and not find(given.name).switches_off(given.raw)


def _strength(resolved: Resolved) -> int:
    """Return the strength of RESOLVED's source: command line > environment > file."""
    source = resolved.given.source
    return _TYPED if source == COMMAND_LINE else int(source.startswith("$"))


def _implied(resolved: Resolved, mode: str, by: str) -> Resolved:
    """Return MODE in place of RESOLVED, for the reason BY."""
    return Resolved(mode, resolved.given._replace(raw=mode, source=by))


def _pairs(name: str, tiers: Iterable[Iterable[Given]]) -> dict[str, tuple[str, str]]:
    """Collect each variable of --env or --nccl: its value and its source; a later tier wins."""
    pairs: dict[str, tuple[str, str]] = {}
    for tier in tiers:
        for given in tier:
            if given.name != name:
                continue
            key, equals, value = given.raw.partition("=")
            if not equals or not (key.isascii() and key.isidentifier()) or "\0" in value:
                wide = without_slips(key) != key
                raise UsageError(given.blame(f"{_WIDE_KEY if wide else ''}{find(name).wanted}"))
            if name == "nccl":
                key = "NCCL_" + key.upper().removeprefix("NCCL_")
            pairs[key] = (value, given.source)
    return pairs


# -- the strategy ----------------------------------------------------------------------------------


def _strategy(
    chosen: Mapping[str, Resolved],
    tiers: Sequence[Sequence[Given]],
    layers: Mapping[str, Layer],
    notes: list[str],
) -> tuple[Strategy | None, Sequence[Setting]]:
    """Return the strategy and its lines of the settings; None without a strategy."""
    typed, variables, filed = (_about("strategy", tier) for tier in tiers)
    given = typed or variables or filed
    sets = [setting for tier in (tiers[2], tiers[0]) for setting in _about("set", tier)]
    check = chosen["check_ranks"]
    every = check.of(int)
    check_ranks: int | str | None = check.of(str) if every is None else every
    if not (given or sets or check_ranks not in {None, -1}):
        notes.extend(
            f"{chosen[name].given.typed} has no effect: no strategy is requested."
            for name in _ONLY_STRATEGY
            if chosen[name].given.source == COMMAND_LINE
        )
        return None, (Setting("strategy", "None", DEFAULT),)
    # Only imported for a strategy.

    named = load.names(given)
    unplaced = load.requested(named, sets, layers)
    notes.extend(unplaced.notes)
    strategy = unplaced.strategy._replace(
        mode=chosen["strategy_mode"].of(str) or "defaults",
        is_strict=chosen["strategy_strict"].value is True,
        check_ranks="auto" if check_ranks is None else check_ranks,
    )
    lines = load.settings(named, sets)
    return strategy, [Setting(n, secrets.redact(n.rpartition(".")[2], v), s) for n, v, s in lines]


# -- the environment -----------------------------------------------------------------------------


def _is_requested(mode: modes.Mode, environ: Mapping[str, str]) -> bool:
    """Whether ENVIRON has all variables by which a cluster requests MODE."""
    return bool(mode.variables) and all(environ.get(name) for name in mode.variables)


def _of_pytorch(environ: Mapping[str, str]) -> Iterable[str]:
    """Yield a warning about variables by which PyTorch's launchers place this host among several.

    Within a rank of such a job, which has $LOCAL_RANK, they count processes.
    """
    for count, place, master, port in _PYTORCHS:
        number = environ.get(count, "").strip()
        if not number.isdecimal() or int(number) < 2 or environ.get("LOCAL_RANK"):
            continue
        if all(environ.get(name, "").strip() for name in (place, master)):
            is_here = is_loopback(environ[master].strip())
            at = f"{'' if is_here else f'${master}'}:${port}"
            yield (
                f"this host trains alone: ${count}={number}, ${place} and ${master} are of PyTorch "
                f"and do not count. For one job on {number} hosts write fleetrun "
                f"--nnodes=${count} --rank=${place} --master={at}; to train alone, --nnodes=1."
            )
            return


def _inherited(environ: Mapping[str, str]) -> Iterable[str]:
    """Yield a warning about rank variables of another launcher, which do not count here."""
    names = [name for name in _IDENTITY if environ.get(name)]
    if any(environ.get(mark) for mark in _RANK_MARKS):
        names += [name for name in _JOB_OF_RANK if environ.get(name)]
    if names:
        listed = ", ".join(f"${name}" for name in names)
        yield f"this job is on one host and ignores what another launcher left behind: {listed}."


# -- what is shown -------------------------------------------------------------------------------


def _setting(resolved: Resolved) -> Setting:
    """Return RESOLVED as a line of the settings."""
    value, given = resolved
    raw, source, name = given.raw, given.source, given.spelling or given.name
    if source == DEFAULT:
        # It is in the source code, and looking for secrets takes a while.
        return Setting(given.name, "None" if value is None else raw, source)
    if isinstance(value, bool):
        shown = str(value).lower()
    elif isinstance(value, tuple) or (find(given.name).kind.name == "text"):
        shown = raw.strip()
    elif isinstance(value, float):
        shown = f"{value:.15g}"
    else:
        shown = str(value)
    return Setting(name, secrets.redact(name, shown), source)


def _pair_settings(name: str, pairs: Mapping[str, tuple[str, str]]) -> Iterable[Setting]:
    """Yield a line for each variable, with secrets concealed."""
    for key, (value, source) in pairs.items():
        yield Setting(f"{name}.{key}", secrets.redact(key, value), source)


def _config_setting(parsed: ParsedCommand, config: Config | None) -> Iterable[Setting]:
    """Yield the settings that name the config files, and why they were read."""
    if config is None or config.path is None:
        yield Setting("config", "None", DEFAULT)
    else:
        source = COMMAND_LINE if named(parsed.given) else "current folder"
        yield Setting("config", config.path, source)
    if config is not None and config.beneath is not None:
        yield Setting(USER_CONFIG, config.beneath, "this user")
