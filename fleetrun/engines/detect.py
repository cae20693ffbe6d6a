"""What a cluster's variables say about a job: its hosts, this host's index, its launchers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fleetrun.errors import EnvironmentFault
from fleetrun.plan import hostlist
from fleetrun.plan.kinds import ROOT, is_mask
from fleetrun.rundir.variables import ASSUME_DEVICES, JOB, STRATEGY
from fleetrun.text import counted, is_digits

# The largest plausible number of hosts.
_DIGITS = 6
# SLURM_INTERACTIVE_STEP, SLURM_BATCH_SCRIPT and SLURM_EXTERN_CONT of slurm/slurm.h, which srun does
# not start. One process runs there, on the first host.
_NO_STEPS = ("4294967290", "4294967291", "4294967292")

_Names = tuple[str, ...]


class ClusterRow(NamedTuple):
    """The variables of one engine, which applies if all `marks` are set.

    Of each field the first variable that is set counts. `hosts` has the names of all hosts with
    their format: hostlist, counted (name, slots, ...), or file (a name at the start of each line).
    """

    engine: str
    marks: _Names
    hosts: tuple[tuple[str, str], ...] = ()
    # The number of hosts, and the index of this one, from 0.
    nnodes: _Names = ()
    node: _Names = ()
    # The processes that the engine has started: in all, on this host, on each as in `4(x2),1`; and
    # the index of ours in all, and on this host.
    launchers: _Names = ()
    here: _Names = ()
    task_counts: _Names = ()
    rank: _Names = ()
    local: _Names = ()
    # What all tasks of a run share and no other run has; and what nobody else can know.
    run: _Names = ()
    token: _Names = ()
    # The numbers of job and step, which separate its ports from those of others on the host.
    job: _Names = ()
    step: _Names = ()
    # How to start one fleetrun on each host, for engines that say how many they have started.
    spread: str = ""
    # Whether it has started a single process, so that fleetrun starts the others (remote/srun.py).
    is_alone: bool = False


# The first row that applies has started this launcher; a later one may name the hosts.
TABLE = (
    # docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html, 4 and 5 alike
    ClusterRow(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        launchers=("OMPI_COMM_WORLD_SIZE",),
        here=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        rank=("OMPI_COMM_WORLD_RANK",),
        local=("OMPI_COMM_WORLD_LOCAL_RANK",),
        run=("PMIX_NAMESPACE",),
        # Of mpirun 4, 128 bits of chance (orte/util/pre_condition_transports.c).
        token=("OMPI_MCA_orte_precondition_transports",),
        spread="mpirun -N 1 fleetrun ...",
    ),
    # Hydra's proxy sets them, that of Intel MPI, too (mpich, src/pm/hydra, pmip_cb.c).
    ClusterRow(
        "MPICH",
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS"),
        launchers=("PMI_SIZE",),
        here=("MPI_LOCALNRANKS",),
        rank=("PMI_RANK",),
        local=("MPI_LOCALRANKID",),
        spread="mpirun -ppn 1 fleetrun ...",
    ),
    # slurm.schedmd.com/srun.html#SECTION_OUTPUT-ENVIRONMENT-VARIABLES
    ClusterRow(
        "Slurm",
        ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_NODEID"),
        hosts=(("SLURM_STEP_NODELIST", "hostlist"), ("SLURM_JOB_NODELIST", "hostlist")),
        nnodes=("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"),
        node=("SLURM_NODEID",),
        launchers=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        task_counts=("SLURM_STEP_TASKS_PER_NODE",),
        rank=("SLURM_PROCID",),
        local=("SLURM_LOCALID",),
        run=("SLURM_JOB_ID", "SLURM_STEP_ID"),
        job=("SLURM_JOB_ID",),
        step=("SLURM_STEP_ID",),
        spread="srun --ntasks-per-node=1 fleetrun ...",
    ),
    # salloc's shell and sbatch's script: one process, on the first host or on none.
    ClusterRow(
        "Slurm",
        ("SLURM_JOB_ID", "SLURM_JOB_NODELIST"),
        hosts=(("SLURM_JOB_NODELIST", "hostlist"),),
        nnodes=("SLURM_JOB_NUM_NODES",),
        job=("SLURM_JOB_ID",),
        spread="srun --ntasks-per-node=1 fleetrun ...",
        is_alone=True,
    ),
    # An Indexed Job (kubernetes.io/docs/concepts/workloads/controllers/job/#completion-mode); who
    # writes it says where the pods meet.
    ClusterRow(
        "Kubernetes",
        ("KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"),
        node=("JOB_COMPLETION_INDEX",),
    ),
    # ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-set-job-execution
    ClusterRow(
        *("LSF", ("LSB_JOBID", "LSB_MCPU_HOSTS"), (("LSB_MCPU_HOSTS", "counted"),)),
        job=("LSB_JOBID",),
    ),
    # OpenPBS, PBS Professional and Torque: qsub(1B), "Environment Variables".
    ClusterRow(
        *("PBS", ("PBS_JOBID", "PBS_NODEFILE"), (("PBS_NODEFILE", "file"),)), job=("PBS_JOBID",)
    ),
)

# Those whose daemons start the tasks, and end without notifying them.
MPIS = ("Open MPI", "MPICH")

# The fields that are numbers, with the least.
_NUMBERS = {"nnodes": 1, "node": 0, "launchers": 1, "here": 1, "rank": 0, "local": 0, "step": 0}

# All variables that are read.
VARIABLES = frozenset(
    name for row in TABLE for names in (row.marks, dict(row.hosts), *row[3:-2]) for name in names
)


class SourcedValue(NamedTuple):
    """A value, and the variable that it was read from."""

    value: str
    source: str

    def __str__(self) -> str:
        """NAME=VALUE."""
        return f"{self.source}={self.value}"

    def number(self, least: int = 0) -> int:
        """Return the value as a number; EnvironmentFault if it is not one from LEAST on."""
        is_number = is_digits(self.value) and len(self.value) <= _DIGITS
        if not is_number or int(self.value) < least:
            raise EnvironmentFault(
                f"{self} is not a number from {least} on, which its engine would write."
            )
        return int(self.value)


class Detected(NamedTuple):
    """The values of an engine's row for this job; None and () if unknown.

    `own` are the variables that each task has to itself, `token` the secret of a job with other
    hosts, `can_spread` whether fleetrun starts one on each host; `sources`, the variables read.
    """

    engine: str
    hosts: tuple[str, ...] = ()
    nnodes: int | None = None
    node: int | None = None
    launchers: int | None = None
    here: int | None = None
    local: int | None = None
    run: str = ""
    own: tuple[str, ...] = ()
    token: str = ""
    spread: str = ""
    can_spread: bool = False
    step: int = 0
    sources: Mapping[str, SourcedValue] = {}


def rows(environ: Mapping[str, str]) -> tuple[ClusterRow, ...]:
    """Return the engines that ENVIRON names; the first has started us."""
    # A rank belongs to a job that is already known.
    if environ.get(JOB):
        return ()
    no_step = environ.get("SLURM_STEP_ID") in _NO_STEPS
    return tuple(
        row
        for row in TABLE
        if all(environ.get(name, "").strip() for name in row.marks) and not (row.step and no_step)
    )


def _first(environ: Mapping[str, str], names: Sequence[str]) -> SourcedValue | None:
    """Return the first of NAMES that is set."""
    values = (SourcedValue(environ.get(name, "").strip(), name) for name in names)
    return next((value for value in values if value.value), None)


def read(rows: Sequence[ClusterRow], environ: Mapping[str, str]) -> Detected:
    """Return the facts of the engines ROWS.

    Raises EnvironmentFault if a variable is malformed or contradicts another.
    """
    row = rows[0]
    # Below an mpirun the hosts see different steps, or none.
    named = {field: _first(environ, getattr(row, field)) for field in _NUMBERS}
    sources = {field: value for field, value in named.items() if value is not None}
    numbers = {field: value.number(_NUMBERS[field]) for field, value in sources.items()}
    hosts: tuple[str, ...] = ()
    # mpirun names no hosts, but may run in an allocation of an engine that does.
    for other in rows if row.launchers and not row.hosts else rows[:1]:
        job = _first(environ, other.job)
        if job is not None:
            sources.setdefault("job", job)
        for name, form in other.hosts:
            listed = _first(environ, (name,))
            if listed is not None and not hosts:
                hosts = _names(listed, form)
                sources = {"nnodes": listed, **sources, "hosts": listed}
    nnodes, node = len(hosts) or numbers.get("nnodes"), numbers.get("node")
    launchers, here = numbers.get("launchers"), numbers.get("here")
    if row.is_alone:
        launchers = here = 1
    task_counts = _first(environ, row.task_counts)
    if task_counts is not None and node is not None:
        here, sources["here"] = _here(task_counts, node), task_counts
    if nnodes is None and launchers is not None and here is not None and launchers % here == 0:
        # No row names the hosts, but each has as many tasks as this one.
        nnodes, sources["nnodes"] = launchers // here, sources["launchers"]
        if here == 1 and "rank" in numbers:
            node, sources["node"] = numbers["rank"], sources["rank"]
    if node is not None and nnodes is not None and node >= nnodes:
        raise EnvironmentFault(
            f"{sources['node']}, but {sources['nnodes']}: {row.engine}'s variables contradict "
            "each other."
        )
    token = _first(environ, row.token)
    has_token = token is not None and here is not None and here < (launchers or 0)
    return Detected(
        row.engine,
        *(hosts, nnodes, node, launchers, here, numbers.get("local")),
        run="/".join(environ.get(name, "") for name in row.run),
        own=(*row.rank, *row.local),
        token=token.value if token is not None and has_token else "",
        spread=row.spread,
        can_spread=row.is_alone,
        step=numbers.get("step", 0),
        sources=sources,
    )


def _names(value: SourcedValue, form: str) -> tuple[str, ...]:
    """Return the hosts that VALUE names in FORM, each once, in the order of their first slot."""
    try:
        if form == "file":
            with open(value.value, encoding="utf-8") as file:
                names = [line.split()[0] for line in file if line.strip()]
        elif form == "hostlist":
            names = list(hostlist.expand(value.value))
        else:
            names = value.value.split()[::2]
    except OSError as error:
        raise EnvironmentFault(f"{value} cannot be read ({error.strerror}).") from None
    except ValueError as error:
        raise EnvironmentFault(f"{value}: {error}.") from None
    if not names:
        raise EnvironmentFault(f"{value} names no host.")
    return tuple(dict.fromkeys(names))


def _here(per_host: SourcedValue, node: int) -> int:
    """Return the number of tasks of host NODE by PER_HOST, such as `4(x2),1`."""
    for part in per_host.value.split(","):
        count, _, times = part.partition("(x")
        repeated = per_host._replace(value=times.rstrip(")")).number(1) if times else 1
        if node < repeated:
            return per_host._replace(value=count).number(1)
        node -= repeated
    raise EnvironmentFault(f"{per_host} has no number for each host.")


def has_tasks(facts: Detected) -> bool:
    """Whether the engine has started a fleetrun for each rank, and says which this one is."""
    if facts.nnodes is None or facts.launchers is None or facts.here is None:
        return False
    # MPI describes only this host.
    is_even = facts.node is not None or facts.here * facts.nnodes == facts.launchers
    return facts.launchers > facts.nnodes and facts.local is not None and is_even


def unspread(facts: Detected) -> str | None:
    """Return why there is not one fleetrun per host; None if there is."""
    if facts.nnodes is None:
        started, hosts = facts.here, "this host"
        is_spread = started in {None, 1}
    else:
        started, hosts = facts.launchers, counted(facts.nnodes, "host")
        is_spread = started in {None, facts.nnodes} or has_tasks(facts)
    if is_spread:
        return None
    known = [str(facts.sources[name]) for name in ("launchers", "nnodes") if name in facts.sources]
    return (
        f"{facts.engine} has started {counted(started or 1, 'fleetrun')} for {hosts} "
        f"({', '.join(dict.fromkeys(known))}); wanted is one on each host, which starts the ranks "
        f"there, or one for each rank: `{facts.spread}`. With --nnodes=1 each is a job of its own."
    )


# Variables that affect how a launch is planned, or how its ranks communicate and compute. The
# manifest has their values, and only the names of all others.
_FAMILIES = (
    *("PADDLE_", "FLAGS_", "NCCL_", "GLOO_", "OMP_", "POD_"),
    *("TRAINER_", "DISTRIBUTED_", "STAGE_", "MASTER_"),
)
_SINGLE = ("TRAINING_ROLE", "WITH_COVERAGE", ROOT, ASSUME_DEVICES, STRATEGY)


def is_remembered(name: str) -> bool:
    """Whether the manifest records the value of the variable NAME, unless it is secret.

    >>> is_remembered("NCCL_DEBUG"), is_remembered("CUDA_VISIBLE_DEVICES"), is_remembered("HOME")
    (True, True, False)
    """
    return name.startswith(_FAMILIES) or is_mask(name) or name in _SINGLE or name in VARIABLES
