"""The environment of every rank: all variables that scripts for Paddle 2.0, 2.6 and 3.3 read."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from fleetrun.errors import UsageError
from fleetrun.model import Facts, RankSpec, Request, Roster, Strategy
from fleetrun.plan import communication, devices, kinds, masks
from fleetrun.plan.devices import Share
from fleetrun.plan.layout import Layout
from fleetrun.rundir import names
from fleetrun.rundir.variables import (
    EXEC_OPTIONS,
    FLIGHT_RECORDER,
    HEARTBEAT,
    JOB,
    PROFILE,
    PYTHON,
    RECORDS,
    REPORT_UPDATES,
    RUN_DIR,
    STACK_SIGNAL_VARIABLE,
    STRATEGY_FILE,
    TOKEN,
)

# The folder with the `sitecustomize` that every Python of a rank runs first; see its docstring.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_ISLAND = f"{_PACKAGE}/inject/site"
# On this signal (SIGRTMAX-4) the code in the rank writes the stacks of all threads.
STACK_SIGNAL = 60

# Variables by which launchers identify a process. Those that we do not set ourselves are removed,
# so that no worker sees half of another launcher's job. (MASTER_*: Paddle takes it before
# PADDLE_MASTER.)
_IDENTITY = """
DISTRIBUTED_TRAINER_ENDPOINTS HETER_DEVICE_TYPE MASTER_ADDR MASTER_PORT
PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST PADDLE_BACKUP_ENV_PATH PADDLE_COORDINATOR_ENDPOINTS
PADDLE_COORDINATOR_NUM PADDLE_CURRENT_ENDPOINT PADDLE_GLOBAL_RANK PADDLE_GLOBAL_SIZE
PADDLE_GLOO_HTTP_ENDPOINT PADDLE_HETER_TRAINER_IP_PORT_LIST PADDLE_LOCAL_DEVICE_IDS
PADDLE_LOCAL_RANK PADDLE_LOCAL_SIZE PADDLE_MASTER_ENDPOINT PADDLE_NEXT_HETER_TRAINER_IP_PORT_LIST
PADDLE_PORT PADDLE_PREVIOUS_HETER_TRAINER_IP_PORT_LIST PADDLE_PSERVERS_IP_PORT_LIST PADDLE_RANK
PADDLE_RANK_IN_NODE PADDLE_ROLE PADDLE_STAGE_TRAINERS_NUM PADDLE_TRAINERS PADDLE_TRAINERS_NUM
PADDLE_TRAINER_ENDPOINTS PADDLE_TRAINER_ID PADDLE_WORKER_ENDPOINT PADDLE_WORLD_DEVICE_IDS STAGE_ID
STAGE_NUM TRAINER_PORTS_NUM TRAINING_ROLE
"""
IDENTITY = tuple(_IDENTITY.split())


def is_identity(name: str) -> bool:
    """Whether the variable NAME identifies a process.

    >>> is_identity("PADDLE_TRAINER_ID"), is_identity("FLAGS_selected_mlus"), is_identity("HOME")
    (True, True, False)
    """
    return name in IDENTITY or name.startswith(kinds.SELECTED)


_PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_NO_PROXIES = ("no_proxy", "NO_PROXY")
# Of the launch that has started this one as a rank of its own.
_OF_OUTER_RANK = (STRATEGY_FILE, PROFILE, REPORT_UPDATES, FLIGHT_RECORDER)
# A process with the token may join the job, or end it.
_PRIVATE = (TOKEN, EXEC_OPTIONS, PYTHON)


class Environment(NamedTuple):
    """The environment of this host's ranks: a mapping for each, and the removed variables."""

    ranks: tuple[Mapping[str, str], ...]
    unset: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...]
    # The values of the variables that a strategy sets.
    of_strategy: Mapping[str, str] = {}
    # Sentences about interfaces that the user has named and that cannot work.
    suspects: tuple[str, ...] = ()


def variables(
    request: Request,
    facts: Facts,
    share: Share,
    roster: Roster,
    *,
    layout: Layout,
    run_dir: str,
    strategy: Strategy | None = None,
) -> Environment:
    """Return the environment of this host's processes of LAYOUT.

    In order of precedence: --env, the rank's identity, what the user exported, options with
    a variable of their own, the strategy's variables, our defaults.
    """
    of_strategy = {} if strategy is None else strategy.variables
    defaults = _defaults(request, facts, share, roster, run_dir)
    defaults |= {name: str(setting.value) for name, setting in of_strategy.items()}
    shared = {name: value for name, value in defaults.items() if name not in facts.environ}
    shared |= _proxies(facts, roster) | _launch(request, facts, roster, run_dir)
    shared |= {**layout.job, **_plugins(facts, share)}
    chosen = _chosen(request)
    shared |= chosen
    for name, value in shared.items():
        if "\0" in value:
            raise UsageError(f"{name} contains a NUL character, which variables cannot contain.")
    path = chosen.pop("PYTHONPATH", facts.environ.get("PYTHONPATH", defaults.get("PYTHONPATH")))
    shared["PYTHONPATH"] = with_island(path)
    environments = [
        {
            **shared,
            **process.identity,
            **_own_mask(facts, share, process.spec),
            **_files(request, process.spec, run_dir),
            **({} if strategy is None else {STRATEGY_FILE: f"{run_dir}/{names.STRATEGY}"}),
            **chosen,
        }
        for process in layout.processes
    ]
    # The identity from another job's launcher.
    foreign = [
        name for name in sorted(facts.environ) if is_identity(name) and name not in roster.inherited
    ]
    foreign += [name for name in _OF_OUTER_RANK if name in facts.environ]
    private = [name for name in _PRIVATE if name in facts.environ]
    if share.backend != "xccl" and kinds.XCCL in facts.environ:
        # Paddle 2.6 would look for FLAGS_selected_* of that kind, and find device 0 for each rank.
        private.append(kinds.XCCL)
    # Paddle's launcher reads an empty mask as none, CUDA as one that hides all GPUs.
    private += [name for name in kinds.masks(share.kind) if facts.environ.get(name) == "all"]
    unset = tuple(
        tuple(name for name in (*foreign, *private) if name not in env) for env in environments
    )
    removed = [name for name in foreign if all(name in names for names in unset)]
    suspects = communication.suspects(request, facts, roster, shared)
    notes = suspects
    if removed:
        verb = "says" if len(removed) == 1 else "say"
        told = f"{', '.join(removed)} {verb} who a process is in another job"
        notes = (*notes, f"{told}: removed for the ranks.")
    first = environments[0] if environments else shared
    came_to = {name: first.get(name, facts.environ.get(name, "")) for name in of_strategy}
    for name, setting in of_strategy.items():
        # Ranks get PYTHONPATH with a folder of ours before it.
        if came_to[name] != str(setting.value) and name != "PYTHONPATH":
            winner = "its exported value" if name in facts.environ else "fleetrun's own"
            winner = "that of --env" if name in chosen else winner
            notes = (*notes, f"{name} of the strategy ({setting.source}): {winner} wins.")
    return Environment(tuple(environments), unset, notes, came_to, suspects)


def _launch(request: Request, facts: Facts, roster: Roster, run_dir: str) -> dict[str, str]:
    """Return the variables of the launch, which all modes share."""
    return {
        "PADDLE_JOB_ID": request.job_id,
        "PADDLE_LOG_DIR": os.path.abspath(os.path.join(facts.cwd, request.log_dir)),
        RUN_DIR: run_dir,
        # Unique to this launch: it identifies every process of ours, even if its parent is gone.
        JOB: names.run_name(run_dir),
        STACK_SIGNAL_VARIABLE: str(STACK_SIGNAL),
        # Each attempt after a failure is a generation of its own.
        "PADDLE_RESTART_COUNT": str(roster.generation),
        **({REPORT_UPDATES: "1"} if request.hang_timeout_s else {}),
    }


def _own_mask(facts: Facts, share: Share, spec: RankSpec) -> dict[str, str]:
    """Hide other devices from a rank, if requested or if it could not choose its own."""
    if not share.has_own_masks or not spec.devices:
        return {}
    # CUDA shows a process only one of the MIG instances in a mask.
    return {masks.variable(facts, share.kind): ",".join(device.id for device in spec.devices)}


def _plugins(facts: Facts, share: Share) -> dict[str, str]:
    """Return the variables that make Paddle use the devices of SHARE, and no plug-in's others."""
    env = {kinds.XCCL: share.kind} if share.backend == "xccl" else {}
    if share.kind not in facts.paddle_counts and facts.has_plugins:
        # Paddle prefers a plug-in's devices to GPUs and the CPU.
        env[kinds.ROOT] = ""
    return env


def _files(request: Request, spec: RankSpec, run_dir: str) -> dict[str, str]:
    """Return the variables with the paths of what this rank writes: records, heartbeat, ..."""
    name = names.rank_name(spec)
    env = {
        RECORDS: f"{run_dir}/{names.rank_records(name)}",
        HEARTBEAT: f"{run_dir}/{names.heartbeat(name)}",
    }
    ranks, _, steps = (request.profile or "").partition(":")
    if spec.is_among(ranks):
        env[PROFILE] = f"{steps}:{run_dir}/{names.trace(name)}"
    if spec.is_trainer and (request.flight_recorder or request.hang_timeout_s):
        env[FLIGHT_RECORDER] = f"{run_dir}/{names.collectives(name)}"
    return env


def with_island(path: str | None) -> str:
    """Return the PYTHONPATH of ranks: our folder, which removes itself later, before the user's.

    >>> with_island("a:").removeprefix(_ISLAND), with_island(None) == _ISLAND
    (':a:', True)
    """
    # A fleetrun that was started by another one inherits it.
    entries = [entry for entry in path.split(":") if entry != _ISLAND] if path else []
    return ":".join([_ISLAND, *entries])


def _defaults(
    request: Request, facts: Facts, share: Share, roster: Roster, run_dir: str
) -> dict[str, str]:
    """Return the variables that hold unless the user exports them."""
    defaults = {
        "PADDLE_WITH_GLOO": "0",
        "PADDLE_GLOO_RENDEZVOUS": "3",
        "PADDLE_GLOO_FS_PATH": f"{run_dir}/gloo",
        "PADDLE_AUTO_CLUSTER": "0",
        # A crash in native code shows the Python stack, too.
        "PYTHONFAULTHANDLER": "1",
        # Paddle 2 iterates over sets of names where it builds programs with branches: ranks would
        # sum gradients in different orders.
        "PYTHONHASHSEED": "0",
        "POD_NAME": f"{request.job_id}-{roster.me}",
    }
    is_cuda = share.kind == "gpu" and not facts.is_rocm
    if is_cuda and any(device.id.isdecimal() for group in share.groups for device in group):
        # CUDA would number the fastest GPU first, unlike the driver, whose numbers we use.
        defaults[devices.ORDER] = devices.DRIVERS_ORDER
    return defaults | communication.variables(request, facts, share, roster)


def _proxies(facts: Facts, roster: Roster) -> dict[str, str]:
    """Exempt the peers from the user's proxies, which otherwise remain for the script."""
    if not any(facts.environ.get(name) for name in _PROXIES):
        return {}
    entries = [
        entry.strip() for name in _NO_PROXIES for entry in facts.environ.get(name, "").split(",")
    ]
    entries += ["127.0.0.1", "localhost", *(member.host for member in roster.members)]
    # Programs read one or the other, so both contain all names.
    return dict.fromkeys(_NO_PROXIES, ",".join(dict.fromkeys(filter(None, entries))))


def _chosen(request: Request) -> dict[str, str]:
    """Return the variables of --env."""
    chosen = dict(request.env)
    if TOKEN in chosen:
        raise UsageError(
            f"--env {TOKEN}: it is for the launchers alone, so no rank gets it; export it instead."
        )
    return chosen
