"""The one table of every option of a launch: how it is written, what it means, what it takes."""

from __future__ import annotations

from fleetrun.cli.option import GROUPS, Option, by_spelling
from fleetrun.cli.types import (
    BOOL,
    FILE,
    FLAG,
    FOLDER,
    FREE,
    HOST_COUNT,
    JOB_NAME,
    LIST,
    LOG_SIZE,
    PORT,
    PROFILED,
    RANKS,
    TEXT,
    VARIABLE,
    WRAPPER,
    Type,
    choice,
    number,
    seconds,
)
from fleetrun.plan import kinds
from fleetrun.rundir import variables
from fleetrun.strategy import fields, load

_FLEET_SIZE = "start fleetrun on one more host of an elastic job (--nnodes=MIN:MAX), or stop one."
# A field of a strategy and its value, or several with commas.
FIELD = Type(
    "fields",
    wanted="give KEY=VALUE, where KEY is a field of a strategy.",
    words=tuple(
        f"{name}="
        for field in fields.TABLE
        for name in ([f"{field.name}.{key.name}" for key in field.keys] or [field.name])
    ),
)
_STRATEGIES = Type("list", LIST.parse, words=tuple(load.PRESETS), complete="file")


def _device_kind(text: str) -> str | None:
    """Return the kind of devices TEXT, as Paddle spells it."""
    kind = text.strip()
    is_known = kind.lower() in {*kinds.BUILT_IN, *kinds.VENDORS, *kinds.SYNONYMS}
    return kind.lower() if is_known else kind if kinds.is_name(kind) else None


_KIND = Type(
    "text",
    _device_kind,
    "give the name that Paddle has for it: npu, mlu, gpu.",
    words=("cpu", "gpu", *kinds.VENDORS),
)
# As Python's logging and Paddle call them.
_SYNONYMS = {"warn": "warning", "notset": "debug", "critical": "error", "fatal": "error"}
_NUMBERS = {
    "0": "debug",
    "10": "debug",
    "20": "info",
    "30": "warning",
    "40": "error",
    "50": "error",
}
_LEVEL = choice("debug", "info", "warning", "error", synonyms=_SYNONYMS | _NUMBERS)
# Paddle's launchers call the list of devices after their kind.
_KINDS = [
    f"{selected}{kind}s"
    for kind in ("gpu", *kinds.VENDORS, *kinds.SYNONYMS)
    for selected in ("", "selected_")
]

# A line each for how an option is written, read and grouped; another for what it does.
# fmt: off
OPTIONS: tuple[Option, ...] = (
    Option("devices gpus npus xpus $PADDLE_DEVICES", Type("list", str.strip), "common", "LIST",
           "Devices to use, one process each: 0,1 or 0-3 or all, or free for unused GPUs; also of "
           "any other kind, such as --mlus=0,1. Default: all visible devices.", hidden=_KINDS),
    Option("nproc_per_node $PADDLE_NPROC_PER_NODE", number(1, words=("auto", "gpu", "cpu")),
           "common", "N|auto|gpu|cpu",
           "Number of processes on this host; gpu, auto: one per GPU; cpu: one per core. Default: "
           "one per device."),
    Option("ips cluster_node_ips $PADDLE_IPS", LIST, "common", "LIST",
           "Addresses of all hosts, in rank order. Run the same command on each."),
    Option("env", VARIABLE, "common", "KEY=VALUE",
           "Set a variable for every process (repeatable)."),
    Option("log_dir $PADDLE_LOG_DIR", FOLDER, "common", "DIR",
           "Log folder: workerlog.N for process N, and one folder per launch."),
    Option("tee", RANKS, "common", "RANKS",
           "Show the output of these ranks on the console: all, 0,3 or 0-3. Default: rank 0.",
           bare="all"),
    Option(f"strategy ${variables.STRATEGY}", _STRATEGIES, "common", "NAME|FILE",
           "Apply this preset or YAML file to an unmodified script (repeatable, later ones win). "
           "Start with recommended; `fleetrun strategy list` shows all presets."),
    Option("max_restart $PADDLE_MAX_RESTART", number(0), "common", "N",
           "Restart all processes up to N times after a failure; not after usage or import "
           "errors, nor if the job makes no progress."),
    Option("hang_timeout", seconds(0), "common", "SECONDS",
           "Stop (or restart) the job if no process shows a sign of life for this long: output, "
           "updates, disk or GPU activity, a Python stack that changes. 0: never.",
           field="hang_timeout_s"),
    Option("dry_run", choice("table", "json"), "common", "table|json",
           "Show what would run and where each setting comes from, without starting anything.",
           bare="table"),
    Option("version", FLAG, "common", "", "Print the version."),
    Option("help", choice("screen", "all", *GROUPS, "codes"), "common", "all|SECTION",
           "Print one page (also -h), all options, or one section: common, strategy, devices, "
           "hosts, job, servers, paddle, codes.", bare="screen"),
    Option("set", FIELD, "strategy", "KEY=VALUE",
           "Set one strategy field; overrides all files (repeatable): fuse_grad_size_in_MB=16, "
           "gradient_merge_configs.k_steps=4, flags.FLAGS_x=1."),
    Option("strategy_mode", choice("defaults", "override"), "strategy", "defaults|override",
           "Which setting wins: the script's own (defaults) or the strategy's (override).",
           default="defaults"),
    Option("strategy_strict", FLAG, "strategy", "",
           "Fail if any part of the strategy has no effect."),
    Option("check_ranks", number(-1, words=("auto",)), "strategy", "auto|N",
           "When to compare the parameters of all ranks: after updates 1, 2, 4, ... 1024 and then "
           "every 1024 (auto), after 1 and 3 (0), every N updates, or never (-1)."),
    Option(f"device_kind ${kinds.XCCL}", _KIND, "devices", "KIND",
           "Kind of device: gpu, xpu, one of Paddle's plug-ins (npu, mlu, gcu, ...), or cpu."),
    Option("backend $PADDLE_DISTRI_BACKEND",
           choice("auto", "nccl", "gloo", "bkcl", "heter", "xccl", "flagcx"), "devices", "NAME",
           "Communication backend of the processes."),
    Option("oversubscribe", FLAG, "devices", "", "Allow more processes than devices."),
    Option("bind", choice("cores", "numa", "none"), "devices", "cores|numa|none",
           "Bind each process to CPUs of its own, near its GPU; numa: within one NUMA node."),
    Option("host node_ip $POD_IP", TEXT, "hosts", "IP",
           "Address of this host, if --ips cannot be matched with its interfaces."),
    Option("network", TEXT, "hosts", "IFACE|CIDR",
           "Network between the hosts: an interface (eth1) or its addresses (10.0.0.0/16)."),
    Option("start_port started_port $PADDLE_START_PORT $FLAGS_START_PORT $FLAGS_FIXED_PORT",
           PORT, "hosts", "PORT",
           "Port of the first process; the others get the ports after it. Default: free ports on "
           "one host, 6070 on several."),
    Option("nnodes np $PADDLE_NNODES $PADDLE_ELASTIC_NP", HOST_COUNT, "hosts", "N[:M]",
           "Number of hosts. Follows from --ips; required with --master. With N:M the job is "
           "elastic: it continues when hosts are lost or arrive."),
    Option("master elastic_server $PADDLE_MASTER $PADDLE_ELASTIC_SERVER", TEXT, "hosts",
           "HOST:PORT",
           "Where hosts meet if --ips does not name them: a host of the job and a free port on it; "
           "or etcd://HOST:PORT[,HOST:PORT...], an etcd 3 that lets an elastic job lose any host. "
           "Default: this host is the first and prints the command for the others."),
    Option("rdzv_timeout", seconds(0.1), "hosts", "SECONDS", "How long to wait for all hosts.",
           field="rdzv_timeout_s"),
    Option("elastic_timeout $PADDLE_ELASTIC_TIMEOUT", seconds(0.1), "hosts", "SECONDS",
           "How long an elastic job waits for one more host, at a start and with too few left.",
           field="elastic_timeout_s"),
    Option("spares", number(0), "hosts", "N",
           "Number of hosts beyond --nnodes that stand by and replace lost ones."),
    Option("heartbeat_timeout", seconds(1), "hosts", "SECONDS",
           "Silence after which a host counts as lost.", field="heartbeat_timeout_s"),
    Option("rank $PADDLE_RANK", number(-1), "hosts", "N",
           "This host's position among the hosts, counted from 0. Follows from --ips."),
    Option("hosts", TEXT, "hosts", "HOST:N,HOST:N",
           "Start the job on these hosts by ssh, each with that many ranks. Run this on one host."),
    Option("hostfile", FILE, "hosts", "FILE",
           "Like --hosts, from a file with one `HOST slots=N` per line."),
    Option("ssh", FREE, "hosts", "COMMAND",
           "The ssh command for --hosts and --hostfile, with its options."),
    Option("config", FILE, "job", "FILE",
           "Read options from this YAML file instead of ./fleetrun.yaml."),
    Option("quiet", FLAG, "job", "",
           "Print no banner and no remarks, only the output of the ranks and failures."),
    Option("redirects", BOOL, "job", "BOOL",
           "Write the standard error of all ranks to separate files, workererr.N.", bare="true"),
    Option("run_mode $PADDLE_RUN_MODE", choice("collective", "ps", "ps-heter", "heter", "rpc"),
           "job", "MODE", "Kind of job. Options of parameter servers imply ps."),
    Option("job_id $PADDLE_JOB_ID $PADDLE_ELASTIC_JOB_ID", JOB_NAME, "job", "NAME",
           "Name of the job."),
    Option("grace", seconds(0), "job", "SECONDS",
           "Time between asking processes to stop and killing them.", field="grace_s"),
    Option("resume_from", FOLDER, "job", "DIR",
           "At each start, replace {checkpoint} in the script's arguments with the newest complete "
           "checkpoint in this folder: a folder or file whose name ends with a number."),
    Option("wrap", WRAPPER, "job", "'RANKS: COMMAND'",
           "Run these ranks under a command: `0,2: nsys profile -o rank%q{PADDLE_TRAINER_ID}`. "
           "all: every rank."),
    Option("profile", PROFILED, "job", "RANKS[:STEPS]",
           "Record where these ranks spend the time of a few steps, as a trace for Perfetto: "
           "trace.RANK.json in the run directory. STEPS: 10-14 or 20. Default: 3-7."),
    Option("flight_recorder", FLAG, "job", "",
           "Record the last collectives of each rank, and report if ranks call different ones."),
    Option("detach", FLAG, "job", "",
           "Run the job in the background; see `fleetrun attach`, `fleetrun ps`, `fleetrun stop`."),
    Option("log_level $PADDLE_LOG_LEVEL", _LEVEL, "job", "LEVEL",
           "Verbosity of fleetrun itself: debug, info, warning, error."),
    Option("log_overwrite $PADDLE_LOG_OVERWRITE", BOOL, "job", "BOOL",
           "Keep no other launch folder in the log folder, as --log_keep 1 does.", bare="true"),
    Option("log_keep", number(1), "job", "N",
           "Number of launch folders to keep in the log folder."),
    Option("log_max_size", LOG_SIZE, "job", "SIZE",
           "Move the older part of a larger log to workerlog.N.1, .2, ...: 100M, 2G. 0: never.",
           field="log_max_bytes"),
    Option("metrics_period", seconds(0.1, or_zero=True), "job", "SECONDS",
           "Interval of the measurements in metrics.jsonl of the run directory. 0: never.",
           field="metrics_period_s"),
    Option("metrics_port", PORT, "job", "PORT",
           "Serve the metrics on this port of each host for Prometheus (prometheus-client)."),
    Option("server_num $PADDLE_SERVER_NUM", number(0), "servers", "N",
           "Number of parameter servers on this host (or on each of --ips)."),
    Option("trainer_num worker_num $PADDLE_TRAINER_NUM", number(0), "servers", "N",
           "Number of trainers on this host (or on each of --ips)."),
    Option("servers endpoints $PADDLE_SERVERS_ENDPOINTS", LIST, "servers", "LIST",
           "Endpoints of all parameter servers, HOST:PORT or HOST. Run the same on each host."),
    Option("trainers workers $PADDLE_TRAINERS_ENDPOINTS", LIST, "servers", "LIST",
           "Endpoints of all trainers."),
    Option("heter_worker_num", TEXT, "servers", "N;N",
           'Number of heterogeneous trainers of each stage: 2 or "1;2".'),
    Option("heter_workers", TEXT, "servers", "LIST;LIST",
           "Endpoints of heterogeneous trainers, stages separated by semicolons."),
    Option("heter_devices", TEXT, "servers", "KIND;KIND",
           "Device kind of each stage: cpu, gpu or xpu, separated by semicolons."),
    Option("coordinator_num", number(0), "servers", "N",
           "Number of coordinators of federated learning."),
    Option("coordinators", LIST, "servers", "LIST",
           "Endpoints of coordinators of federated learning."),
    Option("with_gloo $PADDLE_WITH_GLOO", choice("0", "1", "2"), "servers", "0|1|2",
           "Whether trainers wait for each other: 0 no, 1 yes, 2 yes, and servers too."),
    Option("http_port", PORT, "servers", "PORT",
           "Port on the first server where trainers meet for --with_gloo."),
)
# Options of Paddle's launchers that do nothing here, each with a remark that says why.
UNUSED = tuple(
    Option(names, kind, "paddle", metavar, "", bare=bare, reason=reason)
    for kind, metavar, bare, rows in (
        (BOOL, "BOOL", "true", {
            "legacy": "there is one launcher, which gives scripts what either of Paddle's does.",
            "sort_ip $PADDLE_SORT_IP": "hosts keep the order of --ips.",
            "enable_gpu_log": "metrics.jsonl in the run directory records GPU use.",
            "use_paddlecloud": "PaddleCloud's variables are always read if all of them are set.",
            "print_config": "the settings are in launch.txt of the run directory.",
            "use_env": "ranks always get PADDLE_LOCAL_RANK, and never an argument --local_rank.",
            "force": _FLEET_SIZE,
        }),
        (TEXT, "VALUE", None, {
            "scale": _FLEET_SIZE,
            "elastic_level $PADDLE_ELASTIC_LEVEL $PADDLE_ELASTIC_FAULT_TOLERANC_LEVEL":
                "see --nnodes=MIN:MAX and --max_restart.",
        }),
    )
    for names, reason in rows.items()
)
# fmt: on
# All that a command line may have.
KNOWN = (*OPTIONS, *UNUSED)
BY_SPELLING = by_spelling(KNOWN)


def find(name: str) -> Option:
    """Return the option called NAME (underscores, no hyphens); KeyError if there is none."""
    return BY_SPELLING[name]
