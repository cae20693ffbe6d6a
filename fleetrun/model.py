"""The nouns: immutable values that the rooms pass to each other.

No `from __future__ import annotations`: `session.codec` checks fields by their annotations.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

# The default --job_id, as in Paddle.
UNNAMED_JOB = "default"
_INTERPRETERS = ("python", "sh", "bash", "dash", "zsh")


class Setting(NamedTuple):
    """One option after precedence was applied: its value as shown, and where it came from."""

    name: str
    value: str
    source: str


COMMAND_LINE, DEFAULT = "command line", "default"
# Paddle writes underscores; the options that are not like any of its own do not.
_HYPHENATED = ("dry_run", "from_manifest", "no_kill")


def flag(name: str) -> str:
    """Return the option NAME as help and messages write it."""
    return "--" + (name.replace("_", "-") if name in _HYPHENATED else name)


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
        raw = self.raw
        if self.is_variable:
            # Not the value after a full-width sign either.
            key, equals, _ = raw.replace("\uff1d", "=").partition("=")
            raw = f"{key}=***" if equals else key
        if self.source == COMMAND_LINE:
            return f"{self.typed}={raw}: {problem}"
        if self.source.startswith("$"):
            return f"{flag(self.spelling or self.name)}={raw} (from {self.source}): {problem}"
        return f"{self.source}: {self.typed}={raw}: {problem}"


class Script(NamedTuple):
    """The program to run; `args` are the script's own, verbatim."""

    # "file" or "module".
    form: str
    target: str
    args: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name of what trains: of a shell or Python, that of its script.

        >>> Script("file", "bin/train.py", ()).name, Script("file", "sh", ("-x", "run.sh")).name
        ('train.py', 'run.sh')
        """
        name = self.target.rpartition("/")[2]
        first = next((arg for arg in self.args if not arg.startswith("-")), "")
        if first and "-c" not in self.args and name.rstrip("0123456789.") in _INTERPRETERS:
            return first.rpartition("/")[2]
        return name

    @property
    def words(self) -> tuple[str, ...]:
        """The script and its arguments as words of a command line."""
        return (*(("-m",) if self.form == "module" else ()), self.target, *self.args)


FieldValue = bool | int | float | str | tuple[int | float | str, ...]


class FieldSetting(NamedTuple):
    """One setting of a strategy; `name` is dotted inside a field's configs."""

    section: str
    name: str
    value: FieldValue
    # A file and its line, or --set.
    source: str
    # Why `auto`, or no value, became this value.
    reason: str = ""


class Layer(NamedTuple):
    """The settings of one preset or file, in its order; `name` is as the user wrote it."""

    name: str
    settings: tuple[FieldSetting, ...]


# The sections of a strategy whose settings are environment variables of the ranks.
VARIABLE_SECTIONS = ("flags", "nccl", "env")


class Strategy(NamedTuple):
    """A job's settings of Paddle's distributed training, and how they are applied.

    Strategies with the same settings have the same `digest`. `check_ranks`: compare the ranks'
    parameters less and less often (`auto`), after updates 1 and 3 (0), also every N updates (N), or
    never (-1).
    """

    sources: tuple[str, ...]
    settings: tuple[FieldSetting, ...]
    digest: str = ""
    # defaults: the script's own settings win; override: these.
    mode: str = "defaults"
    is_strict: bool = False
    check_ranks: int | str = "auto"
    # The presets and files before they were combined.
    layers: tuple[Layer, ...] = ()

    @property
    def variables(self) -> dict[str, FieldSetting]:
        """The environment variables that it sets."""
        return {
            setting.name: setting
            for setting in self.settings
            if setting.section in VARIABLE_SECTIONS
        }


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
    virtual_local_rank: bool = False
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
    ssh_fanout: int = 32
    backend: str = "auto"
    run_mode: str = "collective"
    job_id: str = UNNAMED_JOB
    env: tuple[tuple[str, str], ...] = ()
    nccl: tuple[tuple[str, str], ...] = ()
    gpu_memory_fraction: float | None = None
    bind: str = "none"
    max_restart: int = 0
    resume_from: str | None = None
    grace_s: float = 10.0
    on_end: str | None = None
    preflight: bool = False
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
    log_filter: str | None = None
    stdin: str | None = None
    debug: str | None = None
    wrap: str | None = None
    profile: str | None = None
    quiet: bool = False
    detach: bool = False
    color: str = "auto"
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
    # None: nothing is injected into the script.
    strategy: Strategy | None = None
    settings: tuple[Setting, ...] = ()
    # One-line remarks about the command line, for the user.
    notes: tuple[str, ...] = ()
    # The command line, as it was typed; and the options from it and from config files.
    typed: tuple[str, ...] = ()
    given: tuple[Given, ...] = ()
    # Variables of the launcher that a manifest brings back; None: it was not set.
    restored: tuple[tuple[str, str | None], ...] = ()

    @property
    def variables(self) -> dict[str, str]:
        """The variables of --nccl, whose names need no NCCL_, and of --env, which win."""
        nccl = {f"NCCL_{name.removeprefix('NCCL_')}": value for name, value in self.nccl}
        return nccl | dict(self.env)


# The defaults, by the fields of the request.
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
    """The CPUs that we may use: those of each physical core, and the NUMA node of each core."""

    cores: tuple[tuple[int, ...], ...]
    nodes: tuple[int, ...]
    # The NUMA node of a device, by its number and by its UUID, where the driver reports it.
    near: Mapping[str, int] = {}


class Gpu(NamedTuple):
    """An NVIDIA GPU, or an instance of one (MIG), as its driver reports it; None: it does not.

    `number` is NVML's; `users` are the processes that compute on it: pid and, if visible, command.
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
    # Only a check-up reads what follows. Uncorrected ECC errors since the driver was loaded.
    ecc_errors: int | None = None
    is_remap_pending: bool = False
    is_remap_failed: bool = False
    # NVML_COMPUTEMODE_*: 0 is the default.
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
    """The newest whole checkpoint; newer ones are not whole: each why.

    `has_folder` is false if there is no folder to look in, whose name may be mistyped.
    """

    newest: str | None = None
    partial: tuple[tuple[str, str], ...] = ()
    has_folder: bool = True


# A host, and the newest checkpoints in its folder, each with why it is not whole.
HostListing: TypeAlias = tuple[str, tuple[tuple[str, str], ...]]


class Task(NamedTuple):
    """The CPUs and the variables that belong to one task of an engine."""

    cpus: tuple[int, ...]
    env: Mapping[str, str]


class Facts(NamedTuple):
    """The state of this host, read by probe just before planning."""

    environ: Mapping[str, str]
    cwd: str
    hostname: str
    python: str
    pid: int
    started_utc: str
    cpus: int
    # How many devices of each kind the driver has; a kind without a driver is absent.
    device_counts: Mapping[str, int]
    # Only read when there are several hosts: every address of ours, and the way to the peers.
    addresses: tuple[Address, ...] = ()
    peer_interface: str | None = None
    # Our address in the network given by --network.
    network: Address | None = None
    # Interfaces that lead to no other host: no link, or only to containers of this host.
    dead_ends: frozenset[str] = frozenset()
    # The addresses of the host names in the lists, where needed.
    resolved: Mapping[str, tuple[str, ...]] = {}
    # RDMA devices with an active port, and all there are.
    hcas: tuple[str, ...] = ()
    rdma: tuple[str, ...] = ()
    # The usable GPUs in index order, as far as NVIDIA's driver describes them.
    gpus: tuple[Gpu, ...] = ()
    # What the script's name turned out to be: a path that can be run or read.
    program: str | None = None
    # Why the command of --wrap cannot be run on this host, as a sentence; none: it can.
    wrap_fault: str | None = None
    # Only read when processes are to be bound to them.
    processors: Processors | None = None
    # Only read for modes that need a part of Paddle that some builds lack: the version of the
    # Paddle that is here if it lacks it, and whether the script itself says that it imports Paddle.
    paddle_lacking: str | None = None
    script_imports_paddle: bool = False
    # Only read if a debugger is requested: whether Python has debugpy, and the TCP ports in
    # use.
    has_debugpy: bool = False
    used_ports: frozenset[int] = frozenset()
    # Whether the GPUs are AMD's.
    is_rocm: bool = False
    # The kinds of the plug-ins that the ranks' Paddle loads, in its order, and how many devices of
    # each it sees behind the masks.
    paddle_counts: Mapping[str, int] = {}
    # Whether there may be plug-ins for the ranks' Paddle.
    has_plugins: bool = False
    # Kind -> why none of its devices can be used, although there are signs of it.
    absent: Mapping[str, str] = {}
    # The engine's tasks on this host where it has started one for each rank.
    tasks: tuple[Task, ...] = ()
    # Of --resume_from, before this attempt.
    checkpoints: Checkpoints | None = None
    # A sentence if the command `fleetrun` is another package's, or missing; None: it is ours.
    taken_command: str | None = None
    # Other remarks about this host for the user.
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


class Assigned(NamedTuple):
    """The one process that a cluster requests on this host."""

    role: str
    rank: int


class SharedLogs(NamedTuple):
    """A log folder that several hosts of the job share: all keep to one run directory."""

    # Of the run directory, and of the file by which newcomers find it; both in the log folder.
    run_name: str
    marker: str
    # The folders in the run directory of the hosts that share it, by node rank.
    folders: Mapping[int, str]
    # Which attempt this generation is on each host, by node rank: hosts may have come later.
    attempts: Mapping[int, int] = {}
    # Ours; empty on the first host, which alone makes links and removes old runs.
    own: str = ""


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
    # Our place when the session of an elastic job began; None: hosts neither come nor go.
    first_me: int | None = None
    # None: the mode says which processes run here.
    assigned: Assigned | None = None
    # None: nobody else writes into our log folder.
    shared_logs: SharedLogs | None = None
    # The settings shared by the hosts of the job; None: the job has one host.
    rules: "Rules | None" = None
    # Of --resume_from, on each host; None: the job has one host.
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
    same); the job is done when all `essential` ones are.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    unset: tuple[str, ...]
    log: str
    essential: bool = True
    rank: RankSpec | None = None
    # The only CPUs it may run on; none named: all that the launcher may use.
    cpus: tuple[int, ...] = ()
    error_log: str = ""


class Rules(NamedTuple):
    """How to react: seconds between TERM and KILL, the number of restarts, and the hang timeout."""

    grace_s: float = 10.0
    max_restarts: int = 0
    # Seconds before the second attempt; each later one waits twice as long.
    backoff_s: float = 1.0
    # Seconds without a sign of life after which the job hangs; 0: hangs are not detected.
    hang_timeout_s: float = 0.0


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
    # One-line remarks for the user: what was derived, what was overridden.
    notes: tuple[str, ...] = ()
    # Those of the notes that explain why ranks do not reach each other.
    suspects: tuple[str, ...] = ()
    # The requested one, with every auto that depends on hosts and ranks resolved.
    strategy: Strategy | None = None
    # Whether there are other hosts, which must agree on how the job ends.
    has_session: bool = False
    # None: nobody else writes into our log folder.
    shared_logs: SharedLogs | None = None
    # The checkpoint from which its ranks resume, if requested.
    checkpoints: Checkpoints | None = None

    @property
    def trainers(self) -> dict[int, int]:
        """The processes of this host that are trainers, by rank."""
        ranks = ((index, process.rank) for index, process in enumerate(self.processes))
        return {rank.rank: index for index, rank in ranks if rank is not None and rank.is_trainer}


class FieldVerdict(NamedTuple):
    """What became of a field of the strategy in the ranks that `who` names, all as text.

    `status` is one of effective, no_difference (the job is the same without it), no_effect,
    refused, script (the script's own setting won) and no_word (the evidence does not mention it).
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
        if self.signum is not None:
            return 128 + self.signum
        return self.code or 0
