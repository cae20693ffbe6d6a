"""The nouns: immutable values that the rooms pass to each other.

No `from __future__ import annotations`: `session.codec` checks fields by their annotations.
"""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

# As in Paddle.
UNNAMED_JOB = "default"
COMMAND_LINE, DEFAULT = "command line", "default"
# Paddle writes underscores; the options that are not like any of its own do not.
_HYPHENATED = ("dry_run", "no_kill")


def flag(name: str) -> str:
    """Return the option NAME as help and messages write it."""
    return "--" + (name.replace("_", "-") if name in _HYPHENATED else name)


class Setting(NamedTuple):
    """One option after precedence was applied: its value as shown, and where it came from."""

    name: str
    value: str
    source: str


class Given(NamedTuple):
    """An option as somebody gave it, and where; `typed` is how it was written there.

    `spelling` is the one of its names that was used: `npus` of `devices`. Of a variable, KEY=VALUE,
    messages show the key alone.
    """

    name: str
    raw: str
    typed: str
    source: str = COMMAND_LINE
    spelling: str = ""
    is_variable: bool = False

    @property
    def is_set(self) -> bool:
        """Whether it is more than the default, and not empty."""
        return self.source != DEFAULT and bool(self.raw.strip())

    def blame(self, problem: str) -> str:
        """Return PROBLEM as a sentence that says where it came from, without a variable's value."""
        # Not the value after a full-width sign either.
        secret = re.compile("[=\uff1d].*", re.DOTALL)
        raw = secret.sub("=***", self.raw) if self.is_variable else self.raw
        if self.source == COMMAND_LINE:
            return f"{self.typed}={raw}: {problem}"
        if self.source.startswith("$"):
            return f"{flag(self.spelling or self.name)}={raw} (from {self.source}): {problem}"
        return f"{self.source}: {self.typed}={raw}: {problem}"


class Script(NamedTuple):
    """The program to run, of the form "file" or "module"; `args` are the script's own, verbatim."""

    form: str
    target: str
    args: tuple[str, ...]

    @property
    def words(self) -> tuple[str, ...]:
        """The script and its arguments as words of a command line."""
        return (*(("-m",) if self.form == "module" else ()), self.target, *self.args)


FieldValue = bool | int | float | str | tuple[int | float | str, ...]


class FieldSetting(NamedTuple):
    """One setting of a strategy; `name` is dotted inside a field's configs.

    `source` is a file and its line, or --set; `reason`, why `auto`, or no value, became this value.
    """

    section: str
    name: str
    value: FieldValue
    source: str
    reason: str = ""


class Layer(NamedTuple):
    """The settings of one preset or file, in its order; `name` is as the user wrote it."""

    name: str
    settings: tuple[FieldSetting, ...]


# The sections of a strategy whose settings are environment variables of the ranks.
VARIABLE_SECTIONS = ("flags", "nccl", "env")


class Strategy(NamedTuple):
    """A job's settings of Paddle's distributed training, and how they are applied.

    Strategies with the same settings have the same `digest`. `mode`: the script's own settings win
    (defaults), or these (override). `check_ranks`: less and less often (`auto`), after updates 1
    and 3 (0), also every N updates, or never (-1). `layers`: presets and files, not yet combined.
    """

    sources: tuple[str, ...]
    settings: tuple[FieldSetting, ...]
    digest: str = ""
    mode: str = "defaults"
    is_strict: bool = False
    check_ranks: int | str = "auto"

    @property
    def variables(self) -> dict[str, FieldSetting]:
        """The environment variables that it sets."""
        settings = (setting for setting in self.settings if setting.section in VARIABLE_SECTIONS)
        return {setting.name: setting for setting in settings}


class Request(NamedTuple):
    """The user's request, typed, after CLI > environment > file > default.

    `cli/options.py` says what each option means; None and 0: it was not requested. Ranks are `all`,
    or numbers with commas.
    """

    script: Script
    devices: str | None = None
    device_kind: str | None = None
    nproc_per_node: int | str | None = None
    oversubscribe: bool = False
    ips: tuple[str, ...] = ()
    host: str | None = None
    network: str | None = None
    nnodes: str = "1"
    master: str | None = None
    rank: int | None = None
    rdzv_timeout_s: float = 600.0
    heartbeat_timeout_s: float = 10.0
    elastic_timeout_s: float = 30.0
    spares: int = 0
    start_port: int | None = None
    hosts: str | None = None
    hostfile: str | None = None
    ssh: str = "ssh"
    backend: str = "auto"
    run_mode: str = "collective"
    job_id: str = UNNAMED_JOB
    env: tuple[tuple[str, str], ...] = ()
    bind: str = "none"
    max_restart: int = 0
    resume_from: str | None = None
    grace_s: float = 10.0
    hang_timeout_s: float = 0.0
    flight_recorder: bool = False
    log_dir: str = "log"
    log_level: str = "info"
    redirects: bool = False
    log_overwrite: bool = False
    log_keep: int = 20
    log_max_bytes: int = 0
    metrics_period_s: float = 5.0
    metrics_port: int | None = None
    tee: str | None = None
    wrap: str | None = None
    profile: str | None = None
    quiet: bool = False
    detach: bool = False
    dry_run: str | None = None
    # Jobs with parameter servers: how many of each role, or their endpoints; `;` between stages.
    server_num: int | None = None
    servers: tuple[str, ...] = ()
    trainer_num: int | None = None
    trainers: tuple[str, ...] = ()
    heter_worker_num: str | None = None
    heter_workers: str | None = None
    heter_devices: str | None = None
    coordinator_num: int | None = None
    coordinators: tuple[str, ...] = ()
    http_port: int | None = None
    with_gloo: str | None = None
    strategy: Strategy | None = None
    settings: tuple[Setting, ...] = ()
    notes: tuple[str, ...] = ()
    # The words of the command line; and the options from it and from config files.
    typed: tuple[str, ...] = ()
    given: tuple[Given, ...] = ()


DEFAULTS: Mapping[str, Any] = Request._field_defaults


class Device(NamedTuple):
    """One accelerator: `id` as the user knows it (number or UUID), `ordinal` in the mask."""

    kind: str
    id: str
    ordinal: int


class Address(NamedTuple):
    """One IP address of this host and the interface that has it."""

    interface: str
    ip: str


class Processors(NamedTuple):
    """The CPUs that we may use: those of each physical core, and the NUMA node of each core.

    `near` is the NUMA node of a device, by its number and by its UUID, where the driver reports it.
    """

    cores: tuple[tuple[int, ...], ...]
    nodes: tuple[int, ...]
    near: Mapping[str, int] = {}


class Gpu(NamedTuple):
    """An NVIDIA GPU, or an instance of one (MIG), as its driver reports it; None: it does not.

    `number` is NVML's; `users` are the processes that compute on it: pid and, if visible, command.
    `ecc_errors` are uncorrected; `compute_mode` is NVML_COMPUTEMODE_*, 0 by default.
    """

    uuid: str
    number: int = 0
    name: str = "GPU"
    bus: str = ""
    used_bytes: int | None = None
    total_bytes: int | None = None
    users: tuple[tuple[int, str], ...] = ()
    instances: "tuple[Gpu, ...]" = ()
    is_mig: bool = False
    compute_mode: int = 0

    @property
    def parts(self) -> "tuple[Gpu, ...]":
        """What a process can use of it: its instances, else the GPU itself."""
        return self.instances or (self,)

    @property
    def is_filled(self) -> bool:
        """Whether more of its memory is used than the driver and a desktop take."""
        return (self.used_bytes or 0) > 0.1 * (self.total_bytes or 0)


class Checkpoints(NamedTuple):
    """The newest whole checkpoint; newer ones are not whole: each why."""

    newest: str | None = None
    partial: tuple[tuple[str, str], ...] = ()


# A host, and its newest checkpoints, each with why it is not whole.
HostListing: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]


class Task(NamedTuple):
    """The CPUs and the variables that belong to one task of an engine."""

    cpus: tuple[int, ...]
    env: Mapping[str, str]


class Facts(NamedTuple):
    """The state of this host, read by probe just before planning, as far as the request needs."""

    environ: Mapping[str, str]
    cwd: str
    hostname: str
    python: str
    pid: int
    started_utc: str
    cpus: int
    # How many devices of each kind the driver has; a kind without a driver is absent.
    device_counts: Mapping[str, int]
    addresses: tuple[Address, ...] = ()
    peer_interface: str | None = None
    network: Address | None = None
    # Interfaces that lead to no other host: no link, or only to containers of this host.
    dead_ends: frozenset[str] = frozenset()
    resolved: Mapping[str, tuple[str, ...]] = {}
    # RDMA devices with an active port, and all there are.
    hcas: tuple[str, ...] = ()
    rdma: tuple[str, ...] = ()
    # The usable GPUs in index order, as far as NVIDIA's driver describes them.
    gpus: tuple[Gpu, ...] = ()
    # What the script's name turned out to be: a path that can be run or read.
    program: str | None = None
    processors: Processors | None = None
    # The version of this Paddle if it lacks what the mode needs.
    paddle_lacking: str | None = None
    is_rocm: bool = False
    # The kinds of the plug-ins that the ranks' Paddle loads, in its order, and how many devices of
    # each it sees behind the masks; and whether there may be plug-ins.
    paddle_counts: Mapping[str, int] = {}
    has_plugins: bool = False
    # Kind -> why none of its devices can be used, although there are signs of it.
    absent: Mapping[str, str] = {}
    # The engine's, where it has started one for each rank.
    tasks: tuple[Task, ...] = ()
    checkpoints: Checkpoints | None = None
    notes: tuple[str, ...] = ()


class Endpoint(NamedTuple):
    """A TCP address of one rank."""

    host: str
    port: int

    def __str__(self) -> str:
        """HOST:PORT, as Paddle reads it."""
        return f"{self.host}:{self.port}"


class Member(NamedTuple):
    """One host of the job: a port and a group of devices for each of its slots."""

    host: str
    ports: tuple[int, ...]
    groups: tuple[tuple[Device, ...], ...]


class SharedLogs(NamedTuple):
    """A log folder that several hosts of the job share: all keep to one run directory.

    `marker` is the file by which newcomers find it. `folders` in it, and which attempt this is, by
    node rank; `own` is empty on the first host, which alone makes links and removes old runs.
    """

    run_name: str
    marker: str
    folders: Mapping[int, str]
    attempts: Mapping[int, int] = {}
    own: str = ""


class Rules(NamedTuple):
    """How to react: `grace_s` between TERM and KILL.

    After `hang_timeout_s` without a sign of life the job hangs; 0: hangs are not detected.
    """

    grace_s: float = 10.0
    max_restarts: int = 0
    hang_timeout_s: float = 0.0


class Roster(NamedTuple):
    """The hosts of the job, in rank order, and the index of this one."""

    members: tuple[Member, ...]
    me: int
    master: Endpoint
    generation: int = 0
    engine: str = "local"
    notes: tuple[str, ...] = ()
    # Inherited variables that the hosts were read from: true for the ranks, too.
    inherited: tuple[str, ...] = ()
    # Our place when the session began; None: it is the same.
    first_me: int | None = None
    # Role and rank of the one process that a cluster requests here; None: the mode says which run.
    assigned: tuple[str, int] | None = None
    shared_logs: SharedLogs | None = None
    # What the hosts of the job share, and --resume_from on each; None: the job has one host.
    rules: Rules | None = None
    checkpoints: tuple[HostListing, ...] | None = None


# Roles, as Paddle's TRAINING_ROLE calls them.
SERVER, TRAINER, HETER, COORDINATOR = "PSERVER", "TRAINER", "HETER_TRAINER", "COORDINATOR"


class RankSpec(NamedTuple):
    """One rank's place in the job."""

    role: str
    rank: int
    local_rank: int
    node_rank: int
    devices: tuple[Device, ...]
    endpoint: Endpoint

    @property
    def is_trainer(self) -> bool:
        """Whether it is a trainer, as all ranks are but those of parameter servers."""
        return self.role == TRAINER

    def is_among(self, ranks: str) -> bool:
        """Whether RANKS, `all` or numbers with commas between them, names this trainer."""
        return self.is_trainer and (ranks == "all" or str(self.rank) in ranks.split(","))


class ProcessSpec(NamedTuple):
    """One process to start: `env` is added to the launcher's own environment, `unset` is removed.

    `log` is the file's name in the run directory, `error_log` that of standard error ("": the
    same); the job is done when all `essential` ones are. It may run on `cpus`; none: on all.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    unset: tuple[str, ...]
    log: str
    essential: bool = True
    rank: RankSpec | None = None
    cpus: tuple[int, ...] = ()
    error_log: str = ""


class LaunchPlan(NamedTuple):
    """Everything this launcher will do, decided; never edited, only planned again."""

    job_id: str
    mode: str
    engine: str
    generation: int
    node_rank: int
    nodes: tuple[str, ...]
    ranks: tuple[RankSpec, ...]
    processes: tuple[ProcessSpec, ...]
    rules: Rules
    cwd: str
    log_dir: str
    run_dir: str
    # Files the plan needs before anything starts: path -> text.
    files: Mapping[str, str] = {}
    # Remarks for the user: what was derived, what was overridden; and those of them that explain
    # why ranks do not reach each other.
    notes: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    strategy: Strategy | None = None
    # Whether there are other hosts, which must agree on how the job ends.
    has_session: bool = False
    shared_logs: SharedLogs | None = None
    checkpoints: Checkpoints | None = None

    @property
    def trainers(self) -> dict[int, int]:
        """The processes of this host that are trainers, by rank."""
        ranks = ((index, process.rank) for index, process in enumerate(self.processes))
        return {rank.rank: index for index, rank in ranks if rank is not None and rank.is_trainer}


class FieldVerdict(NamedTuple):
    """What became of a field of the strategy in the ranks that `who` names, all as text.

    `status` is effective, no_difference (the job is the same without it), no_effect, refused,
    script (the script's own setting won) or no_word (the evidence does not mention it).
    """

    name: str
    asked: str
    in_effect: str
    status: str
    why: str = ""
    who: tuple[str, ...] = ()


class ExitStatus(NamedTuple):
    """How a process ended: its exit code, or the signal that killed it."""

    code: int | None = None
    signum: int | None = None

    @property
    def exit_code(self) -> int:
        """The code a shell would report: its own, or 128 + signal."""
        return (self.code or 0) if self.signum is None else 128 + self.signum
