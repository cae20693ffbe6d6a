"""The one table of every option of a launch: how it is written, what it means, what it takes."""

from __future__ import annotations

import click

from fleetrun.cli.option import GROUPS, Option, by_spelling
from fleetrun.cli.types import (
    BOOL,
    FILE,
    FILES,
    FLAG,
    FOLDER,
    FREE,
    LAST_PORT,
    LIST,
    PATTERN,
    RANKS,
    TEXT,
    VARIABLE,
    Item,
    Type,
    among,
    choice,
    host_count,
    job_name,
    log_size,
    number,
    profiled,
    read_as,
    seconds,
    wrapper,
)
from fleetrun.plan import kinds
from fleetrun.rundir import variables
from fleetrun.strategy import fields, load

_TOPOLOGY = (
    "this version does not map ranks by topology. They follow the order of --ips, and on each host "
    "that of --gpus: write addresses and devices in the order that you want."
)
_TUNER = (
    "this version does not search parallel layouts. To run Paddle's own tuner, write "
    f"`{variables.EXEC}=off python -m paddle.distributed.launch` in place of fleetrun; "
    "`fleetrun tune` measures the fields of a strategy."
)
_FLEET_SIZE = "start fleetrun on one more host of an elastic job (--nnodes=MIN:MAX), or stop one."


class _Strategies(Type):
    """Presets and files of strategies, with commas."""

    def shell_complete(
        self, ctx: click.Context | None, param: click.Parameter | None, incomplete: str
    ) -> list[Item]:
        """Return files and presets; files first: bash would drop what precedes them."""
        earlier, comma, last = incomplete.rpartition(",")
        paths = super().shell_complete(ctx, param, incomplete)
        return [*paths, *among(load.PRESETS, last, earlier + comma)]


class FieldValues(Type):
    """KEY=VALUE, a field of a strategy and its value, or several with commas."""

    def __init__(self) -> None:
        super().__init__(
            "fields", wanted="give KEY=VALUE, where KEY is a field of a strategy.", is_free=True
        )

    def shell_complete(
        self, ctx: click.Context | None, param: click.Parameter | None, incomplete: str
    ) -> list[Item]:
        """Return fields, or the parts of those that have parts, as KEY=."""
        del ctx, param
        known: list[str] = []
        for field in fields.TABLE:
            known += [f"{field.name}.{key.name}=" for key in field.keys] or [f"{field.name}="]
        return among(known, incomplete)


def device_kind(text: str) -> str:
    """Return the kind of devices TEXT, as Paddle spells it."""
    kind = text.strip()
    if not kinds.is_name(kind):
        raise ValueError("give the name that Paddle has for it: npu, mlu, gpu.")
    is_known = kind.lower() in {*kinds.BUILT_IN, *kinds.VENDORS, *kinds.SYNONYMS}
    return kind.lower() if is_known else kind


# As Python's logging and Paddle call them.
_LEVELS = choice(
    *("debug", "info", "warning", "error"),
    synonyms={
        **dict.fromkeys(("notset", "0", "10"), "debug"),
        "20": "info",
        **dict.fromkeys(("warn", "30"), "warning"),
        **dict.fromkeys(("critical", "fatal", "40", "50"), "error"),
    },
)

# Paddle's launchers call the list of devices after their kind.
_KINDS = [
    f"{selected}{kind}s"
    for kind in (*kinds.VENDORS, *kinds.SYNONYMS)
    for selected in ("", "selected_")
]

# A line each for how an option is read, what it does, and where else it is set.
# fmt: off
OPTIONS: tuple[Option, ...] = (
    Option("devices gpus npus xpus selected_gpus selected_npus selected_xpus",
           LIST, "common", "LIST",
           "Devices to use, one process each: 0,1 or 0-3 or all, or free for GPUs that nobody "
           "uses. If $CUDA_VISIBLE_DEVICES is set, it must contain them. Any kind's name works: "
           "--mlus=0,1. Default: all visible devices.", env="PADDLE_DEVICES", hidden=_KINDS),
    Option("nproc_per_node",
           number(minimum=1, words=("auto", "gpu", "cpu")), "common", "N|auto|gpu|cpu",
           "Number of processes on this host; auto, gpu: one per GPU; cpu: one per core. Default: "
           "one per device.", env="PADDLE_NPROC_PER_NODE"),
    Option("ips cluster_node_ips", LIST, "common", "LIST",
           "Addresses of all hosts, in rank order. Run the same command on each.",
           env="PADDLE_IPS"),
    Option("env", VARIABLE, "common", "KEY=VALUE",
           "Set a variable for every process (repeatable)."),
    Option("nccl", VARIABLE, "common", "KEY=VALUE",
           "Set an NCCL variable (repeatable); its name needs no NCCL_."),
    Option("config", FILE, "common", "FILE",
           "Read options from this YAML file instead of ./fleetrun.yaml.", in_file=False),
    Option("log_dir", FOLDER, "common", "DIR",
           "Log folder: workerlog.N for process N, and one folder per launch.",
           env="PADDLE_LOG_DIR"),
    Option("tee", RANKS, "common", "RANKS",
           "Show the output of these ranks on the console: all, 0,3 or 0-3. Default: rank 0.",
           bare="all"),
    Option("redirects", BOOL, "job", "BOOL",
           "Write the standard error of all ranks to separate files, workererr.N beside "
           "workerlog.N. The console shows both.", bare="true"),
    Option("log_filter", PATTERN, "job", "PATTERN",
           "On the console, show only lines that match this regular expression, of the ranks that "
           "--tee selects. Log files have all lines."),
    Option("quiet", FLAG, "common", "",
           "Print no banner and no remarks, only the output of the ranks and failures."),
    Option("dry_run", choice("table", "json"), "common", "table|json",
           "Show what would run and where each setting comes from, without starting anything.",
           bare="table", in_file=False),
    Option("strategy", _Strategies("list", FILES.read, complete="file"), "strategy", "NAME|FILE",
           "Apply this preset or YAML file to an unmodified script (repeatable, later ones win). "
           "Start with recommended; `fleetrun strategy list` shows all presets.",
           env=variables.STRATEGY),
    Option("set", FieldValues(), "strategy", "KEY=VALUE",
           "Set one strategy field; overrides all files (repeatable): fuse_grad_size_in_MB=16, "
           "gradient_merge_configs.k_steps=4, flags.FLAGS_x=1."),
    Option("strategy_mode", choice("defaults", "override"), "strategy", "defaults|override",
           "Which setting wins if the script has its own: the script's (defaults) or the "
           "strategy's (override).", default="defaults"),
    Option("strategy_strict", FLAG, "strategy", "",
           "Fail if any part of the strategy has no effect."),
    Option("check_ranks", number(minimum=-1, words=("auto",)), "strategy", "auto|N",
           "When to compare the parameters of all ranks: after updates 1, 2, 4, ... 1024 and then "
           "every 1024 (auto), after 1 and 3 (0), also after every N updates, or never (-1). Ranks "
           "that differ under a strategy end the job. Default with a strategy: auto."),
    Option("device_kind", read_as(device_kind, words=("cpu", "gpu", *kinds.VENDORS)), "devices",
           "KIND",
           "Kind of device: gpu, xpu, one of Paddle's plug-ins (npu, mlu, gcu, ...), or cpu for "
           "none. Default: the first kind that Paddle has on this host.", env=kinds.XCCL),
    Option("backend",
           choice("auto", "nccl", "gloo", "bkcl", "heter", "xccl", "flagcx"), "devices", "NAME",
           "Communication backend of the processes.", env="PADDLE_DISTRI_BACKEND"),
    Option("oversubscribe", FLAG, "devices", "",
           "Allow more processes than devices."),
    Option("virtual_local_rank", FLAG, "devices", "",
           "Show each process only its own devices, counted from 0. PADDLE_LOCAL_RANK remains its "
           "rank on this host."),
    Option("gpu_memory_fraction", number(is_whole=False, minimum=0, maximum=1), "devices", "0..1",
           "Share of each GPU's memory that Paddle allocates at the start, with the allocator that "
           "does so (FLAGS_allocator_strategy=naive_best_fit)."),
    Option("bind", choice("cores", "numa", "none"), "devices", "cores|numa|none",
           "Bind each process to CPUs of its own, near its GPU: cores divides all of them; numa "
           "keeps each process within one NUMA node."),
    Option("host node_ip", TEXT, "hosts", "IP",
           "Address of this host, if --ips cannot be matched with its interfaces.", env="POD_IP"),
    Option("network", TEXT, "hosts", "IFACE|CIDR",
           "Network between the hosts: an interface (eth1) or its addresses (10.0.0.0/16). "
           "Default: the one that leads to the other hosts."),
    Option("start_port started_port", number(minimum=1, maximum=LAST_PORT), "hosts", "PORT",
           "Port of the first process; the others get the ports after it. Default: free ports on "
           "one host, 6070 on several.", env="PADDLE_START_PORT FLAGS_START_PORT FLAGS_FIXED_PORT"),
    Option("nnodes np", read_as(host_count), "hosts", "N[:M]",
           "Number of hosts. Follows from --ips; required with --master. With N:M the job is "
           "elastic: it continues when hosts are lost or arrive.",
           env="PADDLE_NNODES PADDLE_ELASTIC_NP"),
    Option("master elastic_server", TEXT, "hosts", "HOST:PORT",
           "Where hosts meet if --ips does not name them: a host of the job and a free port on it; "
           "or etcd://HOST:PORT[,HOST:PORT...], an etcd 3 that lets an elastic job lose any host. "
           "Default: this host is the first and prints the command for the others.",
           env="PADDLE_MASTER PADDLE_ELASTIC_SERVER"),
    Option("rdzv_timeout", seconds(0.1), "hosts", "SECONDS",
           "How long to wait for all hosts.", field="rdzv_timeout_s"),
    Option("elastic_timeout", seconds(0.1), "hosts", "SECONDS",
           "How long an elastic job waits for one more host: before it starts, before it restarts "
           "with new hosts, and if too few are left.",
           field="elastic_timeout_s", env="PADDLE_ELASTIC_TIMEOUT"),
    Option("spares", number(minimum=0), "hosts", "N",
           "Number of hosts beyond --nnodes that stand by and replace lost ones."),
    Option("heartbeat_timeout", seconds(1), "hosts", "SECONDS",
           "Silence after which a host counts as lost. A host that is cut off from the others ends "
           "its own processes before that.", field="heartbeat_timeout_s"),
    Option("rank", number(minimum=-1), "hosts", "N",
           "This host's position among the hosts, counted from 0. Follows from --ips.",
           env="PADDLE_RANK"),
    Option("hosts", TEXT, "hosts", "HOST:N,HOST:N",
           "Start the job on these hosts by ssh, each with that many ranks. Run this on one host "
           "only.", in_file=False),
    Option("hostfile", FILE, "hosts", "FILE",
           "Like --hosts, from a file with one `HOST slots=N` per line.", in_file=False),
    Option("ssh", FREE, "hosts", "COMMAND",
           "The ssh command for --hosts and --hostfile, with its options."),
    Option("ssh_fanout", number(minimum=1), "hosts", "N",
           "Number of hosts to connect to at once."),
    Option("run_mode", choice("collective", "ps", "ps-heter", "heter", "rpc"), "job", "MODE",
           "Kind of job. Options of parameter servers imply ps.", env="PADDLE_RUN_MODE"),
    Option("job_id", read_as(job_name, is_free=True), "job", "NAME",
           "Name of the job.", env="PADDLE_JOB_ID PADDLE_ELASTIC_JOB_ID"),
    Option("grace", seconds(0), "job", "SECONDS",
           "Time between asking processes to stop and killing them.", field="grace_s"),
    Option("max_restart", number(minimum=0), "job", "N",
           "Restart all processes up to N times after a failure, with new ports; not after usage "
           "or import errors, nor if the job makes no progress.", env="PADDLE_MAX_RESTART"),
    Option("resume_from", FOLDER, "job", "DIR",
           "At each start, replace {checkpoint} in the script's arguments with the newest complete "
           "checkpoint in this folder: a folder or file whose name ends with a number."),
    Option("debug", RANKS, "job", "RANK|all",
           "Make these ranks wait for a debugger (debugpy) before their first line, each at a port "
           "of its own. Suspends --hang_timeout."),
    Option("wrap", read_as(wrapper, is_free=True), "job", "'RANKS: COMMAND'",
           "Run these ranks under a command: `0,2: nsys profile -o rank%q{PADDLE_TRAINER_ID}`. "
           "all: every rank."),
    Option("profile", read_as(profiled), "job", "RANKS[:STEPS]",
           "Record where these ranks spend the time of a few steps, as a trace for Perfetto: "
           "trace.RANK.json in the run directory. STEPS: 10-14 or 20. Default: 3-7."),
    Option("hang_timeout", seconds(0), "job", "SECONDS",
           "Stop (or restart) the job if no process shows a sign of life for this long: output, "
           "updates, disk or GPU activity, a Python stack that changes. 0: never.",
           field="hang_timeout_s"),
    Option("flight_recorder", FLAG, "job", "",
           "Record the last collectives of each rank, and report at once if ranks call different "
           "ones. --hang_timeout includes it."),
    Option("detach", FLAG, "job", "",
           "Run the job in the background: `fleetrun attach` shows its console, `fleetrun ps` "
           "lists it, `fleetrun stop` ends it.", in_file=False),
    Option("preflight", FLAG, "job", "",
           "First check this host as `fleetrun doctor` does, or all hosts of the job. Start "
           "nothing if there is an error."),
    Option("log_level", _LEVELS, "job", "LEVEL",
           "Verbosity of fleetrun itself: debug, info, warning, error. Paddle's notset means "
           "debug, critical means error.", env="PADDLE_LOG_LEVEL"),
    Option("log_overwrite", BOOL, "job", "BOOL",
           "Overwrite log files instead of appending to them.",
           env="PADDLE_LOG_OVERWRITE", bare="true"),
    Option("log_keep", number(minimum=1), "job", "N",
           "Number of launch folders to keep in the log folder."),
    Option("log_max_size", read_as(log_size), "job", "SIZE",
           "Move the older part of a log to workerlog.N.1, .2, ... if it exceeds this size: 100M, "
           "2G. 0: never.", field="log_max_bytes", default="0"),
    Option("metrics_period", seconds(0), "job", "SECONDS",
           "Interval at which resource use of the host, GPUs and ranks is written to metrics.jsonl "
           "in the run directory. 0: never.", field="metrics_period_s"),
    Option("metrics_port", number(minimum=1, maximum=LAST_PORT), "job", "PORT",
           "Serve the metrics on this port of each host in OpenMetrics, for Prometheus. Needs "
           "prometheus-client."),
    Option("from_manifest", FILE, "job", "FILE",
           "Repeat the launch that wrote this manifest.json: same folder, environment and command "
           "line. Options that you add take precedence.", in_file=False),
    Option("server_num", number(minimum=0), "servers", "N",
           "Number of parameter servers on this host (or on each of --ips). Makes the job one with "
           "parameter servers.", env="PADDLE_SERVER_NUM"),
    Option("trainer_num worker_num", number(minimum=0), "servers", "N",
           "Number of trainers on this host (or on each of --ips).", env="PADDLE_TRAINER_NUM"),
    Option("servers endpoints", LIST, "servers", "LIST",
           "Endpoints of all parameter servers, HOST:PORT or HOST. Run the same command on each "
           "host.", env="PADDLE_SERVERS_ENDPOINTS"),
    Option("trainers workers", LIST, "servers", "LIST",
           "Endpoints of all trainers.", env="PADDLE_TRAINERS_ENDPOINTS"),
    Option("heter_worker_num", TEXT, "servers", "N;N",
           'Number of heterogeneous trainers of each stage: 2 or "1;2".'),
    Option("heter_workers", TEXT, "servers", "LIST;LIST",
           "Endpoints of heterogeneous trainers, stages separated by semicolons."),
    Option("heter_devices", TEXT, "servers", "KIND;KIND",
           "Device kind of each stage: cpu, gpu or xpu, separated by semicolons."),
    Option("coordinator_num", number(minimum=0), "servers", "N",
           "Number of coordinators of federated learning."),
    Option("coordinators", LIST, "servers", "LIST",
           "Endpoints of coordinators of federated learning."),
    Option("with_gloo", choice("0", "1", "2"), "servers", "0|1|2",
           "Whether trainers wait for each other: 0 no, 1 yes, 2 yes, and servers too. Default: 1 "
           "if all trainers are on one host.", env="PADDLE_WITH_GLOO"),
    Option("http_port", number(minimum=1, maximum=LAST_PORT), "servers", "PORT",
           "Port on the first server where trainers meet for --with_gloo."),
    Option("version", FLAG, "about", "",
           "Print the version.", in_file=False),
    Option("help",
           choice("screen", "all", *GROUPS, "codes", is_optional=True), "about", "all|SECTION",
           "Print one screen (also -h), all of this text, or one section: common, strategy, "
           "devices, hosts, job, servers, about, paddle, later, codes.",
           bare="screen", in_file=False),
)
# fmt: on


# Options of Paddle's launchers that do nothing here: each is taken with a remark that says why.
# Those that end with = have a value; the variables follow the name.
_WITHOUT_EFFECT = {
    "legacy": "there is one launcher, which gives scripts what either of Paddle's does.",
    "sort_ip PADDLE_SORT_IP": "hosts keep the order of --ips.",
    "enable_gpu_log": "metrics.jsonl in the run directory records GPU use.",
    "use_paddlecloud": "PaddleCloud's variables are always read if all of them are set.",
    "print_config": "the settings are in launch.txt of the run directory.",
    "use_env": "ranks always get PADDLE_LOCAL_RANK, and never an argument --local_rank.",
    "scale=": _FLEET_SIZE,
    "force": _FLEET_SIZE,
    "elastic_level= PADDLE_ELASTIC_LEVEL PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL": (
        "see --nnodes=MIN:MAX and --max_restart."
    ),
}
# Those that are refused with what to do instead.
_NOT_HERE = {
    "enable_auto_mapping": _TOPOLOGY,
    "cluster_topo_path=": _TOPOLOGY,
    "rank_mapping_path= PADDLE_RANK_MAPPING_PATH": _TOPOLOGY,
    "auto_parallel_config= PADDLE_AUTO_PARALLEL_CONFIG": _TUNER,
    "auto_cluster_config PADDLE_AUTO_CLUSTER": _TUNER,
    "auto_tuner_json=": _TUNER,
}


def _unused(row: str, group: str, reason: str) -> Option:
    """Return the option of ROW, a key of the tables above."""
    name, _, env = row.partition(" ")
    if name.endswith("="):
        return Option(name[:-1], TEXT, group, "VALUE", "", env=env, reason=reason)
    return Option(name, BOOL, group, "BOOL", "", env=env, bare="true", reason=reason)


UNUSED = tuple(
    _unused(row, group, reason)
    for group, table in (("paddle", _WITHOUT_EFFECT), ("later", _NOT_HERE))
    for row, reason in table.items()
)
# All that a command line may have.
KNOWN = (*OPTIONS, *UNUSED)
BY_SPELLING = by_spelling(KNOWN)


def find(name: str) -> Option:
    """Return the option called NAME (underscores, no hyphens); KeyError if there is none."""
    return BY_SPELLING[name]
