"""The one table of every option: how it is written, what it means, and whether it works yet."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from fleetrun import conversion, hints, modes, slips
from fleetrun.errors import UsageError
from fleetrun.model import DEFAULTS
from fleetrun.plan import kinds
from fleetrun.records import variables

Value = str | int | float | bool | tuple[str, ...] | tuple[int, int] | None

COMMON = "Most used"
STRATEGY = "Strategy"
DEVICES = "Devices"
HOSTS = "Hosts"
JOB = "Job and logs"
SERVERS = "Parameter servers and heterogeneous trainers"
ABOUT = "About"
PADDLE = "Taken from Paddle's command lines, without effect here"
LATER = "Not in this version: each answers with one sentence and exit code 2"
# By what they are called in --help=.
SECTIONS = {
    "common": COMMON,
    "strategy": STRATEGY,
    "devices": DEVICES,
    "hosts": HOSTS,
    "job": JOB,
    "servers": SERVERS,
    "about": ABOUT,
    "paddle": PADDLE,
    "later": LATER,
}
GROUPS = tuple(SECTIONS.values())

REPEATABLE = ("texts", "pairs")
_HYPHENATED = ("dry_run", "from_manifest", "no_kill")
# Words that are not a script after an option with an optional value; nothing after --help is read.
_OWN_WORDS = frozenset(("help", "color"))
# Those whose optional values are ranks.
_RANKS = frozenset(("tee", "redirects"))
# Those whose text may have any characters.
_FREE = frozenset(
    ("elastic_pre_hook", "job_id", "log_filter", "on_end", "ssh", "webhook", "wrap", "out")
)
# Paddle adds the host's rank to this port.
FIXED_PORT = "FLAGS_FIXED_PORT"
# The largest time or count.
_MOST = 1e9
# More digits than it has.
_DIGITS = 11
# The first two steps allocate, compile, and put buckets in order; all that are recorded are kept in
# memory until the last.
_PROFILED_STEPS, _MOST_PROFILED = "3-7", 1000
# Enough for any host; keeps `--tee=0-9999999999` from filling the memory.
_MOST_RANKS = 1 << 16
_LEAST_LOG = 1024 * 1024
# Values that switch an option off.
_OFF = frozenset(("", "-1", "none", *conversion.NO))

_TOPOLOGY = (
    "this version does not map ranks by topology. They follow the order of --ips, and on each host "
    "that of --gpus: write addresses and devices in the order that you want."
)
_TUNER = (
    "this version does not search parallel layouts. To run Paddle's own tuner, write "
    f"`{variables.EXEC}=off python -m paddle.distributed.launch` in place of fleetrun; "
    "`fleetrun tune` measures the fields of a strategy."
)
_HCCL = "no Paddle takes it; NPUs and other plug-ins communicate by xccl, as auto says."
_FLEET_SIZE = "start fleetrun on one more host of an elastic job (--nnodes=MIN:MAX), or stop one."


class Option(NamedTuple):
    """One option: a row of the table that the parser, the help and the completion share.

    `kind` is one of text, texts (repeatable), list (commas), int, float, duration (seconds, or with
    units), bool (may take a word), flag, choice, pairs (KEY=VALUE, repeatable). `bare` is the value
    when the option is written without one.
    `slot` is the request's field when several options fill the same one. `reason` says why
    an option of UNUSED does nothing here.
    """

    name: str
    kind: str
    group: str
    metavar: str
    help: str
    # The default, if no field of the request has it.
    own_default: str | None = None
    aliases: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    slot: str = ""
    # Words allowed: all of them for a choice, besides numbers for an int.
    words: tuple[str, ...] = ()
    # Aliases of values: (written, meant).
    synonyms: tuple[tuple[str, str], ...] = ()
    # Words that are no longer allowed, each with a sentence about what is.
    gone: tuple[tuple[str, str], ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    bare: str | None = None
    # Reads values that need more than their kind; ValueError says what is allowed.
    reader: Callable[[str], Value] | None = None
    reason: str = ""
    # What the shell completes the value with: file, dir or nothing.
    path: str = ""
    in_file: bool = True

    @property
    def flag(self) -> str:
        """The option as help and messages write it."""
        # Paddle writes underscores; the options that are not like any of its own do not.
        return "--" + (self.name.replace("_", "-") if self.name in _HYPHENATED else self.name)

    @property
    def target(self) -> str:
        """The request's field this option fills."""
        return self.slot or self.name

    @property
    def default(self) -> str | None:
        """The default as people write it: the option's own, or that of the request's field."""
        is_field = self.group != "" and self.target.removesuffix("_s") == self.name
        value = DEFAULTS.get(self.target) if is_field else None
        if self.own_default is not None or value is None or value == ():
            return self.own_default
        return f"{value:g}" if isinstance(value, float) else str(value).lower()

    def asks_for_nothing(self, raw: str) -> bool:
        """Whether RAW switches the option off, as a variable exported once for all jobs does."""
        return raw.strip().lower() in _OFF


class RawOption(NamedTuple):
    """An option with the text someone gave it, and where: `typed` is how it was written there."""

    option: Option
    raw: str
    typed: str
    source: str = "command line"

    def value(self) -> Value:
        """Read the typed value; UsageError that says where it came from."""
        try:
            return parse(self.option, self.raw)
        except ValueError as error:
            hint = hints.of_value(self.option.name, self.raw)
            raise UsageError(self.blame(hint or str(error))) from None

    def blame(self, problem: str) -> str:
        """Return PROBLEM as a sentence that says where it came from, without a variable's value."""
        raw = self.raw
        if self.option.kind == "pairs" and self.option.name != "set":
            # Not the value after a full-width sign either.
            key, equals, _ = raw.replace("\uff1d", "=").partition("=")
            raw = f"{key}=***" if equals else key
        if self.source == "command line":
            return f"{self.typed}={raw}: {problem}"
        if self.source.startswith("$"):
            return f"{self.option.flag}={raw} (from {self.source}): {problem}"
        return f"{self.source}: {self.typed}={raw}: {problem}"


def is_rank_list(word: str) -> bool:
    """Whether WORD can only be meant for --tee: all, or numbers, commas and ranges.

    torchrun's 0:3 for its options of these names, too.

    >>> is_rank_list("all"), is_rank_list("0,2-3"), is_rank_list("0:3"), is_rank_list("train.py")
    (True, True, True, False)
    """
    return word == "all" or (word[:1].isdigit() and not word.strip("0123456789,-:"))


def takes_next(option: Option, word: str) -> bool:
    """Whether WORD, standing after OPTION, is its value and not the script.

    An optional value never eats a script: a bool takes only a bool's word, --tee only ranks,
    and --dry-run nothing at all (`--dry-run sh run.sh` starts a shell).
    """
    if option.kind == "flag":
        return False
    if option.kind == "bool":
        return conversion.boolean(word) is not None
    if option.name in _RANKS:
        return is_rank_list(word) or (option.words != () and conversion.boolean(word) is not None)
    if option.name in _OWN_WORDS:
        return word in option.words
    return option.bare is None


def wanted(option: Option) -> str:
    """Return what OPTION takes, for an error message."""
    choices = ", ".join(option.words)
    match option.kind:
        case "int" | "float":
            number = conversion.number_in_words(
                is_whole=option.kind == "int",
                minimum=option.minimum,
                maximum=option.maximum,
            )
            return f"give {number}" + (f", or one of {choices}." if choices else ".")
        case "duration":
            least = f", {option.minimum:g} or more" if option.minimum is not None else ""
            return f"give a number of seconds{least}, or a time such as 90s, 30m or 1h30m."
        case "choice":
            return f"give one of {choices}."
        case "bool" | "flag":
            return "give true or false."
        case "pairs":
            letters = "letters, digits and underscores"
            if option.name == "set":
                letters = "a field of a strategy"
            return f"give KEY=VALUE, where KEY is {letters}."
        case _:
            return f"give {option.metavar or 'a value'}."


def parse(option: Option, raw: str) -> Value:
    """Read RAW as OPTION's typed value; ValueError says what is allowed.

    >>> parse(find("nproc_per_node"), "auto"), parse(find("nproc_per_node"), "8")
    ('auto', 8)
    >>> parse(find("ips"), "10.0.0.1, 10.0.0.2")
    ('10.0.0.1', '10.0.0.2')
    """
    text = raw.strip()
    if not (raw.isascii() or option.path or option.kind == "pairs" or option.name in _FREE):
        plain = slips.plain(raw)
        if plain != raw:
            raise ValueError(f"it has full-width characters: write {plain}.")
    if option.reader is not None:
        return option.reader(raw)
    match option.kind:
        case "int" | "float" | "duration":
            return _number(option, text)
        case "choice":
            return _choice(option, text)
        case "bool" | "flag":
            is_on = conversion.boolean(text)
            if is_on is None:
                raise ValueError(wanted(option))
            return is_on
        case "list":
            return tuple(raw.replace(",", " ").split())
        case _:
            return raw


def at_home(option: Option, raw: str, typed: str) -> str:
    """Return RAW, with the home folder in place of the ~ that begins a path of OPTION.

    UsageError if there is no such user; TYPED is how the option was written.
    """
    if not option.path or "~" not in raw:
        return raw
    # As in $PATH.
    between = ":" if typed.startswith("$") and ":" in raw else ","
    paths = []
    for path in raw.split(between) if option.kind == "list" else [raw]:
        begin = path[: len(path) - len(path.lstrip())]
        home = os.path.expanduser(path.lstrip())
        if home.startswith("~"):
            user = home.partition("/")[0]
            raise UsageError(
                f"{typed}={raw}: {user} is nobody's home folder here; for a file of that name "
                f"write ./{home}."
            )
        paths.append(f"{begin}{home}")
    return between.join(paths)


def _number(option: Option, text: str) -> str | int | float:
    """Read TEXT as a number within OPTION's bounds, or one of its words."""
    if text.lower() in option.words:
        return text.lower()
    number = conversion.number(
        conversion.parse_duration(text) if option.kind == "duration" else text,
        is_whole=option.kind == "int",
        minimum=option.minimum,
        maximum=_MOST if option.maximum is None else option.maximum,
    )
    if number is None:
        if text.isdecimal() and not text.isascii():
            raise ValueError("give a number in the digits 0-9.")
        if option.maximum is None and text.isdecimal():
            too_large = int(text[:_DIGITS]) > _MOST
            raise ValueError(f"give {_MOST:.0f} at most." if too_large else wanted(option))
        raise ValueError(wanted(option))
    return number


def _choice(option: Option, text: str) -> str:
    """Read TEXT as one of OPTION's words."""
    word = dict(option.synonyms).get(text.lower(), text.lower())
    if word not in option.words:
        raise ValueError(dict(option.gone).get(word, wanted(option)))
    return word


# -- values of their own kind ---------------------------------------------------------------------


def _ranks(text: str) -> str:
    """Return ranks, ranges written out: all, or numbers with commas.

    >>> _ranks("0-2, 5")
    '0,1,2,5'
    """
    parts = text.replace(",", " ").split()
    if parts == ["all"]:
        return "all"
    ranks: list[int] = []
    for part in parts or [""]:
        span = conversion.parse_range(part)
        if span is None or span.stop > _MOST_RANKS:
            is_range = part != "" and not part.strip("0123456789-")
            otherwise = "give all, or ranks such as 0,3 or 0-3."
            raise ValueError(f"{part} is not a range of ranks." if is_range else otherwise)
        ranks.extend(span)
    return ",".join(map(str, dict.fromkeys(ranks)))


def _wrapper(text: str) -> str:
    """Return ranks, as above, and the command that wraps theirs.

    >>> _wrapper("0-1:nsys  profile")
    '0,1: nsys profile'
    """
    ranks, colon, command = text.partition(":")
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"the command cannot be read: {error}.") from None
    if not colon or not words:
        raise ValueError("give 'RANKS: COMMAND', such as '0: nsys profile'.")
    return f"{_ranks(ranks)}: {shlex.join(words)}"


def _profiled(text: str) -> str:
    """Return ranks, as above, and the first and the last step that they record.

    >>> _profiled("0-1:20")
    '0,1:20-20'
    """
    ranks, colon, steps = text.partition(":")
    span = conversion.parse_range(steps if colon else _PROFILED_STEPS)
    if span is None or not span.start or len(span) > _MOST_PROFILED:
        raise ValueError(
            "give ranks and steps, such as 0,3:10-14; steps count from 1, and are at most "
            f"{_MOST_PROFILED}."
        )
    return f"{_ranks(ranks)}:{span.start}-{span.stop - 1}"


def _reading_rank(text: str) -> str:
    word = text.strip().lower()
    if word != "none" and not conversion.is_digits(word):
        raise ValueError("give a rank such as 0, or none.")
    return word if word == "none" else str(int(word))


def _pattern(text: str) -> str:
    if is_rank_list(text):
        raise ValueError(f"give a regular expression; --tee={text} chooses ranks.")
    conversion.pattern(text)
    return text


def _log_size(text: str) -> int:
    size = conversion.parse_size(text)
    if size is None or 0 < size < _LEAST_LOG:
        raise ValueError("give 1M or more, as 100M or 2G, or 0 for no limit.")
    return size


def _job_name(text: str) -> str:
    # It becomes part of a folder's name.
    text = text.strip()
    if not text.isprintable() or set(text) & set("/ ") or text.startswith("."):
        raise ValueError("give a name without slashes and spaces, and no dot at its start.")
    return text


def _flag(name: str, group: str, text: str, **more: Any) -> Option:  # noqa: ANN401 - Option checks
    return Option(name, "flag", group, "", text, bare="true", **{"own_default": "false", **more})


def _bool(name: str, group: str, text: str, **more: Any) -> Option:  # noqa: ANN401 - as above
    return Option(name, "bool", group, "BOOL", text, bare="true", **more)


# A line each for what an option is, what it does, and how it is read.
# fmt: off
TABLE: tuple[Option, ...] = (
    # The ten that people use.
    Option("gpus", "list", COMMON, "LIST",
           "GPUs to use, one process each: 0,1 or 0-3 or all, or free for those that nobody uses. "
           "If $CUDA_VISIBLE_DEVICES is set, it must contain them. Default: all visible GPUs.",
           aliases=("selected_gpus",), slot="devices"),
    Option("nproc_per_node", "int", COMMON, "N|auto|gpu|cpu",
           "Number of processes on this host; auto, gpu: one per GPU; cpu: one per core. Default: "
           "one per device.",
           env=("PADDLE_NPROC_PER_NODE",), words=("auto", "gpu", "cpu"), minimum=1),
    Option("ips", "list", COMMON, "LIST",
           "Addresses of all hosts, in rank order. Run the same command on each.",
           aliases=("cluster_node_ips",), env=("PADDLE_IPS",)),
    Option("env", "pairs", COMMON, "KEY=VALUE", "Set a variable for every process (repeatable)."),
    Option("nccl", "pairs", COMMON, "KEY=VALUE",
           "Set an NCCL variable (repeatable); its name needs no NCCL_."),
    Option("config", "text", COMMON, "FILE",
           "Read options from this YAML file instead of ./fleetrun.yaml. Options that it does not "
           "set are read from ~/.config/fleetrun/fleetrun.yaml.",
           path="file", in_file=False),
    Option("log_dir", "text", COMMON, "DIR",
           "Log folder: workerlog.N for process N, and one folder per launch.",
           env=("PADDLE_LOG_DIR",), path="dir"),
    Option("tee", "list", COMMON, "RANKS",
           "Show the output of these ranks on the console: all, 0,3 or 0-3. Default: rank 0.",
           bare="all", reader=_ranks),
    # As torchrun writes them.
    Option("redirects", "choice", JOB, "BOOL",
           "Write the standard error of all ranks to separate files, workererr.N beside "
           "workerlog.N. The console shows both.",
           words=("false", "true"),
           synonyms=(("0", "false"), ("3", "true"), ("no", "false"), ("yes", "true")),
           bare="true"),
    Option("log_filter", "text", JOB, "PATTERN",
           "On the console, show only lines that match this regular expression, of the ranks that "
           "--tee selects. Log files have all lines.",
           reader=_pattern),
    _flag("quiet", COMMON,
          "Print no banner and no remarks, only the output of the ranks and failures."),
    Option("dry_run", "choice", COMMON, "table|json|sh",
           "Show what would run and where each setting comes from, without starting anything. sh "
           "prints a script that you can paste.",
           words=("table", "json", "sh"), bare="table", in_file=False),
    # Strategy.
    Option("strategy", "list", STRATEGY, "NAME|FILE",
           "Apply this preset or YAML file to an unmodified script (repeatable, later ones win). "
           "Start with recommended; `fleetrun strategy list` shows all presets.",
           env=(variables.STRATEGY,), path="file"),
    Option("set", "pairs", STRATEGY, "KEY=VALUE",
           "Set one strategy field; overrides all files (repeatable): fuse_grad_size_in_MB=16, "
           "gradient_merge_configs.k_steps=4, flags.FLAGS_x=1."),
    Option("strategy_mode", "choice", STRATEGY, "defaults|override",
           "Which setting wins if the script has its own: the script's (defaults) or the "
           "strategy's (override).",
           own_default="defaults", words=("defaults", "override")),
    _flag("strategy_strict", STRATEGY,
          "Fail if any part of the strategy has no effect."),
    Option("check_ranks", "int", STRATEGY, "auto|N",
           "When to compare the parameters of all ranks: after updates 1, 2, 4, 8, ... and then "
           "every 32 to 1024 (auto), after 1 and 3 (0), also after every N updates, or never (-1). "
           "Ranks that differ under a strategy end the job. Default with a strategy: auto.",
           words=("auto",), minimum=-1),
    # Devices.
    Option("devices", "list", DEVICES, "LIST",
           "Like --gpus, for any kind of device that this host has. The kind's name works as an "
           "option, too: --mlus=0,1.",
           env=("PADDLE_DEVICES",)),
    Option("npus", "list", DEVICES, "LIST",
           "Like --gpus, for NPUs.",
           aliases=("selected_npus",), slot="devices"),
    Option("xpus", "list", DEVICES, "LIST",
           "Like --gpus, for XPUs.",
           aliases=("selected_xpus",), slot="devices"),
    Option("device_kind", "text", DEVICES, "KIND",
           "Kind of device: gpu, xpu, one of Paddle's plug-ins (npu, mlu, gcu, ...), or cpu for "
           "none. Default: the first kind that Paddle has on this host.",
           env=(kinds.XCCL,), words=("cpu", "gpu", *kinds.VENDORS)),
    # For one release: earlier ones took it.
    Option("backend", "choice", DEVICES, "NAME",
           "Communication backend of the processes.",
           env=("PADDLE_DISTRI_BACKEND",),
           words=("auto", "nccl", "gloo", "bkcl", "heter", "xccl", "flagcx"),
           gone=(("hccl", _HCCL),)),
    _flag("oversubscribe", DEVICES, "Allow more processes than devices."),
    _flag("virtual_local_rank", DEVICES,
          "Show each process only its own devices, counted from 0. PADDLE_LOCAL_RANK remains its "
          "rank on this host."),
    Option("gpu_memory_fraction", "float", DEVICES, "0..1",
           "Share of each GPU's memory that Paddle allocates at the start, with the allocator that "
           "does so (FLAGS_allocator_strategy=naive_best_fit).",
           minimum=0, maximum=1),
    Option("bind", "choice", DEVICES, "cores|numa|none",
           "Bind each process to CPUs of its own, near its GPU: cores divides all of them; numa "
           "keeps each process within one NUMA node.",
           words=("cores", "numa", "none")),
    # Hosts.
    Option("host", "text", HOSTS, "IP",
           "Address of this host, if --ips cannot be matched with its interfaces.",
           aliases=("node_ip",), env=("POD_IP",)),
    Option("network", "text", HOSTS, "IFACE|CIDR",
           "Network between the hosts: an interface (eth1) or its addresses (10.0.0.0/16). "
           "Default: the one that leads to the other hosts."),
    Option("start_port", "int", HOSTS, "PORT",
           "Port of the first process; the others get the ports after it. Default: free ports on "
           "one host, 6070 on several.",
           aliases=("started_port",), env=("PADDLE_START_PORT", "FLAGS_START_PORT", FIXED_PORT),
           minimum=1, maximum=65535),
    Option("nnodes", "text", HOSTS, "N[:M]",
           "Number of hosts. Follows from --ips; required with --master. With N:M the job is "
           "elastic: it continues when hosts are lost or arrive.",
           env=("PADDLE_NNODES",)),
    Option("master", "text", HOSTS, "HOST:PORT",
           "Where hosts meet if --ips does not name them: a host of the job and a free port on it; "
           "or etcd://HOST:PORT[,HOST:PORT...], an etcd 3 that lets an elastic job lose any host. "
           "Default: this host is the first and prints the command for the others.",
           env=("PADDLE_MASTER",)),
    # Paddle's words for elastic jobs.
    Option("elastic_server", "text", HOSTS, "HOST:PORT",
           "An etcd 3 that keeps the roster: Paddle's name for --master=etcd://HOST:PORT.",
           slot="master", env=("PADDLE_ELASTIC_SERVER",)),
    Option("np", "text", HOSTS, "N[:M]",
           "Number of hosts: --nnodes in Paddle's elastic jobs.",
           slot="nnodes", env=("PADDLE_ELASTIC_NP",)),
    Option("rdzv_timeout", "duration", HOSTS, "SECONDS",
           "How long to wait for all hosts.",
           slot="rdzv_timeout_s", minimum=0.1),
    Option("elastic_timeout", "duration", HOSTS, "SECONDS",
           "How long an elastic job waits for one more host: before it starts, before it restarts "
           "with new hosts, and if too few are left.",
           env=("PADDLE_ELASTIC_TIMEOUT",), slot="elastic_timeout_s", minimum=0.1),
    Option("spares", "int", HOSTS, "N",
           "Number of hosts beyond --nnodes that stand by and replace lost ones.",
           minimum=0),
    Option("heartbeat_timeout", "duration", HOSTS, "SECONDS",
           "Silence after which a host counts as lost. A host that is cut off from the others ends "
           "its own processes before that.",
           slot="heartbeat_timeout_s", minimum=1),
    Option("rank", "int", HOSTS, "N",
           "This host's position among the hosts, counted from 0. Follows from --ips.",
           env=("PADDLE_RANK",), minimum=-1),
    Option("hosts", "text", HOSTS, "HOST:N,HOST:N",
           "Start the job on these hosts by ssh, each with that many ranks. Run this on one host "
           "only.",
           in_file=False),
    Option("hostfile", "text", HOSTS, "FILE",
           "Like --hosts, from a file with one `HOST slots=N` per line.",
           path="file", in_file=False),
    Option("include", "text", HOSTS, "HOST@HOST",
           "Use only these hosts, or only some of their devices: a@b:0,2.",
           in_file=False),
    Option("exclude", "text", HOSTS, "HOST@HOST",
           "Leave out these hosts, or some of their devices.",
           in_file=False),
    Option("ssh", "text", HOSTS, "COMMAND",
           "The ssh command for --hosts and --hostfile, with its options."),
    Option("ssh_fanout", "int", HOSTS, "N", "Number of hosts to connect to at once.", minimum=1),
    # Job and logs.
    Option("run_mode", "choice", JOB, "MODE",
           "Kind of job. Options of parameter servers imply ps.",
           env=("PADDLE_RUN_MODE",), words=tuple(modes.BY_WORD)),
    Option("job_id", "text", JOB, "NAME",
           "Name of the job.",
           env=("PADDLE_JOB_ID", "PADDLE_ELASTIC_JOB_ID"), reader=_job_name),
    Option("grace", "duration", JOB, "SECONDS",
           "Time between asking processes to stop and killing them.",
           slot="grace_s", minimum=0),
    Option("max_restart", "int", JOB, "N",
           "Restart all processes up to N times after a failure, with new ports; not after usage "
           "or import errors, nor if the job makes no progress.",
           env=("PADDLE_MAX_RESTART",), minimum=0),
    Option("resume_from", "text", JOB, "DIR",
           "At each start, replace {checkpoint} in the script's arguments with the newest "
           "complete checkpoint in this folder: a folder or file whose name ends with a number.",
           path="dir"),
    Option("stdin", "text", JOB, "RANK|none",
           "The rank that reads the terminal or pipe, or none. Default: the rank that is shown.",
           words=("none",), reader=_reading_rank),
    Option("debug", "list", JOB, "RANK|all",
           "Make these ranks wait for a debugger before their first line: debugpy if it is "
           "installed, with one port per rank, else pdb on the terminal. Suspends --hang_timeout.",
           words=("all",), reader=_ranks),
    Option("wrap", "text", JOB, "'RANKS: COMMAND'",
           "Run these ranks under a command: `0,2: nsys profile -o rank%q{PADDLE_TRAINER_ID}`. "
           "all: every rank.",
           reader=_wrapper),
    Option("profile", "text", JOB, "RANKS[:STEPS]",
           "Record where these ranks spend the time of a few steps, as a trace for Perfetto: "
           "trace.RANK.json in the run directory. STEPS: 10-14 or 20. Default: 3-7.",
           reader=_profiled),
    Option("hang_timeout", "duration", JOB, "SECONDS",
           "Stop (or restart) the job if no process shows a sign of life for this long: output, "
           "updates, disk or GPU activity, a Python stack that changes. 0: never.",
           slot="hang_timeout_s", minimum=0),
    _flag("flight_recorder", JOB,
          "Record the last collectives of each rank, and report at once if ranks call different "
          "ones. --hang_timeout includes it."),
    _flag("detach", JOB,
          "Run the job in the background: `fleetrun attach` shows its console, `fleetrun ps` lists "
          "it, `fleetrun stop` ends it.",
          in_file=False),
    Option("on_end", "text", JOB, "COMMAND",
           "Shell command to run when the job has ended, successfully or not, with a JSON object "
           "on its standard input. It does not change the exit code and is stopped after 30 s. "
           "Only the first host runs it."),
    Option("webhook", "text", JOB, "URL",
           "http or https URL to which the same JSON object is posted."),
    _flag("preflight", JOB,
          "First check this host as `fleetrun doctor` does, or all hosts of the job. Start nothing "
          "if there is an error."),
    Option("log_level", "choice", JOB, "LEVEL",
           "Verbosity of fleetrun itself: debug, info, warning, error. Paddle's notset means "
           "debug, critical means error.",
           env=("PADDLE_LOG_LEVEL",), words=("debug", "info", "warning", "error"),
           synonyms=(("notset", "debug"), ("0", "debug"), ("10", "debug"), ("20", "info"),
                     ("30", "warning"), ("warn", "warning"), ("40", "error"), ("50", "error"),
                     ("critical", "error"), ("fatal", "error"))),
    _bool("log_overwrite", JOB,
          "Overwrite log files instead of appending to them.",
          env=("PADDLE_LOG_OVERWRITE",)),
    Option("log_keep", "int", JOB, "N",
           "Number of launch folders to keep in the log folder.",
           minimum=1),
    Option("gather_logs", "choice", JOB, "tail|all",
           "Copy the logs of all hosts to the coordinator's host at the end, into "
           "log/latest/gathered: the last 64 KiB of each, or all of it.",
           words=("tail", "all"), bare="tail"),
    Option("log_max_size", "text", JOB, "SIZE",
           "Move the older part of a log to workerlog.N.1, .2, ... if it exceeds this size: 100M, "
           "2G. 0: never.",
           own_default="0", slot="log_max_bytes", reader=_log_size),
    Option("metrics_period", "duration", JOB, "SECONDS",
           "Interval at which resource use of the host, GPUs and ranks is written to metrics.jsonl "
           "in the run directory. 0: never.",
           minimum=0, slot="metrics_period_s"),
    Option("metrics_port", "int", JOB, "PORT",
           "Serve the metrics on this port of each host in OpenMetrics, for Prometheus. Needs "
           "prometheus-client.",
           minimum=1, maximum=65535),
    Option("from_manifest", "text", JOB, "FILE",
           "Repeat the launch that wrote this manifest.json: same folder, environment and command "
           "line. Options that you add take precedence.",
           path="file", in_file=False),
    # Parameter servers.
    Option("server_num", "int", SERVERS, "N",
           "Number of parameter servers on this host (or on each of --ips). Makes the job one with "
           "parameter servers.",
           env=("PADDLE_SERVER_NUM",), minimum=0),
    Option("trainer_num", "int", SERVERS, "N",
           "Number of trainers on this host (or on each of --ips).",
           aliases=("worker_num",), env=("PADDLE_TRAINER_NUM",), minimum=0),
    Option("servers", "list", SERVERS, "LIST",
           "Endpoints of all parameter servers, HOST:PORT or HOST. Run the same command on each "
           "host.",
           aliases=("endpoints",), env=("PADDLE_SERVERS_ENDPOINTS",)),
    Option("trainers", "list", SERVERS, "LIST",
           "Endpoints of all trainers.",
           aliases=("workers",), env=("PADDLE_TRAINERS_ENDPOINTS",)),
    Option("heter_worker_num", "text", SERVERS, "N;N",
           'Number of heterogeneous trainers of each stage: 2 or "1;2".'),
    Option("heter_workers", "text", SERVERS, "LIST;LIST",
           "Endpoints of heterogeneous trainers, stages separated by semicolons."),
    Option("heter_devices", "text", SERVERS, "KIND;KIND",
           "Device kind of each stage: cpu, gpu or xpu, separated by semicolons."),
    Option("coordinator_num", "int", SERVERS, "N",
           "Number of coordinators of federated learning.",
           minimum=0),
    Option("coordinators", "list", SERVERS, "LIST",
           "Endpoints of coordinators of federated learning."),
    Option("with_gloo", "choice", SERVERS, "0|1|2",
           "Whether trainers wait for each other: 0 no, 1 yes, 2 yes, and servers too. Default: 1 "
           "if all trainers are on one host.",
           env=("PADDLE_WITH_GLOO",), words=("0", "1", "2")),
    Option("http_port", "int", SERVERS, "PORT",
           "Port on the first server where trainers meet for --with_gloo.",
           minimum=1, maximum=65535),
    _flag("version", ABOUT, "Print the version.", in_file=False),
    Option("color", "choice", ABOUT, "auto|always|never",
           "Colour fleetrun's own lines. auto: on a terminal, unless $NO_COLOR is set.",
           words=("auto", "always", "never"), bare="always"),
    Option("help", "choice", ABOUT, "all|SECTION",
           "Print one screen (also -h), all of this text, or one section: common, strategy, "
           "devices, hosts, job, servers, about, paddle, later, codes.",
           words=("screen", "all", *SECTIONS, "codes"), bare="screen", in_file=False),
)

# fmt: on


class Unused(NamedTuple):
    """An option of Paddle's launchers that does nothing here: refused, or taken with a remark."""

    env: tuple[str, ...]
    # Why it has no effect, or what to do instead.
    reason: str
    takes_value: bool = False
    is_refused: bool = False

    def row(self, name: str) -> Option:
        """Return the option NAME as the parser, the help and the page need it."""
        kind, metavar, bare = (
            ("text", "VALUE", None) if self.takes_value else ("bool", "BOOL", "true")
        )
        group = LATER if self.is_refused else PADDLE
        return Option(name, kind, group, metavar, "", env=self.env, bare=bare, reason=self.reason)


UNUSED = {
    "legacy": Unused(
        (), "there is one launcher, and it gives scripts what either of Paddle's does."
    ),
    "sort_ip": Unused(
        ("PADDLE_SORT_IP",),
        "hosts keep the order of --ips; without it, the others follow the master by address.",
    ),
    "enable_gpu_log": Unused(
        (), "metrics.jsonl in the run directory records GPU use, without nvidia-smi."
    ),
    "use_paddlecloud": Unused(
        (), "PaddleCloud's variables are always read if all of them are set."
    ),
    "print_config": Unused((), "the settings are in launch.txt of the run directory."),
    "use_env": Unused(
        (), "ranks always get PADDLE_LOCAL_RANK, and never an argument --local_rank."
    ),
    "scale": Unused((), _FLEET_SIZE, takes_value=True),
    "force": Unused((), _FLEET_SIZE),
    "elastic_level": Unused(
        ("PADDLE_ELASTIC_LEVEL", "PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL"),
        "--nnodes=MIN:MAX continues without lost hosts, and --max_restart restarts the job after "
        "a failure.",
        takes_value=True,
    ),
    "enable_auto_mapping": Unused((), _TOPOLOGY, is_refused=True),
    "cluster_topo_path": Unused((), _TOPOLOGY, takes_value=True, is_refused=True),
    "rank_mapping_path": Unused(
        ("PADDLE_RANK_MAPPING_PATH",), _TOPOLOGY, takes_value=True, is_refused=True
    ),
    "auto_parallel_config": Unused(
        ("PADDLE_AUTO_PARALLEL_CONFIG",), _TUNER, takes_value=True, is_refused=True
    ),
    "auto_cluster_config": Unused(("PADDLE_AUTO_CLUSTER",), _TUNER, is_refused=True),
    "auto_tuner_json": Unused((), _TUNER, takes_value=True, is_refused=True),
}
# All that a command line may have.
KNOWN = (*TABLE, *(unused.row(name) for name, unused in UNUSED.items()))


def by_name(table: Iterable[Option] = KNOWN) -> dict[str, Option]:
    """Map every spelling, with underscores and without the two hyphens, to its option."""
    return {name: option for option in table for name in (option.name, *option.aliases)}


def find(name: str) -> Option:
    """Return the option called NAME (underscores, no hyphens)."""
    option = by_name().get(name) or of_kind(name)
    if option is None:
        raise KeyError(name)
    return option


def is_option(name: str) -> bool:
    """Whether there is an option called NAME (underscores, no hyphens)."""
    return name in by_name() or of_kind(name) is not None


def of_kind(name: str, value: str = "") -> Option | None:
    """Return the option NAME that lists devices of a kind which the table does not have.

    VALUE must look like a list of devices if the kind is unknown; whether they exist is checked on
    the host.

    >>> of_kind("mlus").slot, of_kind("selected_foos", "0-3").name, of_kind("foos", "x")
    ('devices', 'foos', None)
    """
    listed = name.removeprefix("selected_")
    kind = listed.removesuffix("s")
    if kind == listed or not kinds.is_name(kind):
        return None
    looks_right = value in {"all", "free"} or (value != "" and not value.strip("0123456789,- "))
    if not (looks_right or kind in kinds.VENDORS or kind in kinds.SYNONYMS):
        return None
    about = f"The same for {kinds.label(kind)}s."
    return Option(listed, "list", DEVICES, "LIST", about, slot="devices")
