"""Turns a request and the facts of this host into the plan of its launcher.

A mode gives an engine its slots; the engine returns a roster, which the mode lays out.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import (
    UNNAMED_JOB,
    Facts,
    LaunchPlan,
    ProcessSpec,
    RankSpec,
    Request,
    Roster,
    Rules,
)
from fleetrun.plan import (
    affinity,
    command,
    devices,
    environment,
    free_gpus,
    hosts,
    modes,
    origin,
)
from fleetrun.plan.devices import Share
from fleetrun.plan.layout import Layout, ModeHosts, Slots
from fleetrun.rundir import names
from fleetrun.strategy import document, resolve

_CHECKPOINT, _THREADS = "{checkpoint}", "OMP_NUM_THREADS"
# File names end at 255 bytes; time, process id and node need some of them.
_LONGEST_JOB = 100
# Options that name ranks, before a colon if more follows.
_OF_RANKS = ("tee", "wrap", "profile")

_Variables = tuple[Mapping[str, str], ...]
_Masks = Sequence[tuple[int, ...]]


def places(request: Request) -> ModeHosts:
    """Return the hosts that the options of REQUEST's mode name."""
    return modes.BY_WORD[request.run_mode].rules.places(request)


def share(request: Request, facts: Facts) -> Share:
    """Distribute this host's devices over its ranks."""
    return devices.share(request, facts, takes_all=modes.BY_WORD[request.run_mode].is_uniform)


def slots(request: Request, facts: Facts, share: Share) -> Slots:
    """Return the processes that REQUEST needs, if this host's Paddle supports them."""
    _lacking(request, facts)
    return modes.BY_WORD[request.run_mode].rules.slots(request, share)


def first_port(request: Request) -> int:
    """Return the first port for hosts that cannot consult each other."""
    nothing = Share("cpu", ((),), "gloo")
    return modes.BY_WORD[request.run_mode].rules.slots(request, nothing).first_port


def plan(request: Request, facts: Facts, share: Share, roster: Roster) -> LaunchPlan:
    """Decide everything that the launcher on host ROSTER.me will do."""
    _check_hosts(request, roster)
    request = _resuming(request, facts)
    log_dir = os.path.abspath(os.path.join(facts.cwd, request.log_dir))
    run_dir = f"{log_dir}/{names.RUNS}/{_run_folder(request, facts, roster)}"
    mode = modes.BY_WORD[request.run_mode]
    layout = mode.rules.layout(request, facts, share, roster)
    # In an elastic job some ranks may join later or leave.
    if roster.assigned is None and roster.first_me is None:
        _check_ranks(request, layout)
    strategy, topology = request.strategy, resolve.topology(layout.ranks)
    if strategy is not None:
        strategy = resolve.resolve(strategy, topology)
    env = environment.variables(
        request, facts, share, roster, layout=layout, run_dir=run_dir, strategy=strategy
    )
    files = {}
    if strategy is not None:
        text = document.text(strategy, topology, env.of_strategy)
        files[f"{run_dir}/{names.STRATEGY}"] = text
    specs = [process.spec for process in layout.processes]
    commands = _commands(request, facts, specs)
    variables, masks = _bound(request, facts, specs, env.ranks)
    logs = [
        process.log if roster.shared_logs is None else names.shared_log(process.spec)
        for process in layout.processes
    ]
    processes = tuple(
        ProcessSpec(
            name=process.name,
            argv=argv,
            env=own,
            unset=unset,
            log=log,
            essential=process.essential,
            rank=process.spec,
            cpus=cpus,
            error_log=names.error_log(log) if request.redirects else "",
        )
        for process, log, argv, own, unset, cpus in zip(
            layout.processes, logs, commands, variables, env.unset, masks, strict=True
        )
    )
    return LaunchPlan(
        job_id=request.job_id,
        mode=mode.name,
        engine=roster.engine,
        generation=roster.generation,
        node_rank=roster.me,
        nodes=tuple(member.host for member in roster.members),
        ranks=layout.ranks,
        processes=processes,
        rules=roster.rules
        or Rules(request.grace_s, request.max_restart, hang_timeout_s=request.hang_timeout_s),
        cwd=facts.cwd,
        log_dir=log_dir,
        run_dir=run_dir,
        files=files,
        notes=(
            *request.notes,
            *facts.notes,
            *share.notes,
            *roster.notes,
            *env.notes,
            *_lacking(request, facts),
            *layout.notes,
        ),
        suspects=env.suspects,
        strategy=strategy,
        has_session=len(roster.members) > 1 or roster.first_me is not None,
        shared_logs=roster.shared_logs,
        checkpoints=facts.checkpoints,
    )


def _check_hosts(request: Request, roster: Roster) -> None:
    """Raise an error if hosts would count their own free GPUs, or Paddle cannot read an address."""
    is_counted = isinstance(request.nproc_per_node, int)
    if len(roster.members) > 1 and request.devices == free_gpus.FREE and not is_counted:
        raise UsageError(
            f"{origin.option(request, 'devices')}: hosts may have different numbers of free GPUs, "
            "and each must have the same number of ranks; add --nproc_per_node."
        )
    unread = next((member.host for member in roster.members if ":" in member.host), None)
    if unread is not None:
        raise EnvironmentFault(
            f"Ranks would have the address {unread}, and {hosts.NO_IPV6}: give the hosts' IPv4 "
            "addresses, or with --master their network, --network=10.0.0.0/16."
        )


def _resuming(request: Request, facts: Facts) -> Request:
    """Return REQUEST with the newest checkpoint among the script's arguments."""
    if request.resume_from is None:
        return request
    if not any(_CHECKPOINT in word for word in request.script.args):
        raise UsageError(
            f"{origin.option(request, 'resume_from')}: no argument of the script has "
            f"{_CHECKPOINT}: write --resume={_CHECKPOINT}, as the script calls it."
        )
    path = None if facts.checkpoints is None else facts.checkpoints.newest
    args = with_checkpoint(request.script.args, path)
    return request._replace(script=request.script._replace(args=args))


def with_checkpoint(args: tuple[str, ...], path: str | None) -> tuple[str, ...]:
    """Return ARGS with PATH; without one, drop the arguments that need it, with their option.

    >>> with_checkpoint(("--resume", "{checkpoint}", "--lr=1"), "out/checkpoint-7")
    ('--resume', 'out/checkpoint-7', '--lr=1')
    >>> with_checkpoint(("--resume", "{checkpoint}", "--from={checkpoint}", "--lr=1"), None)
    ('--lr=1',)
    >>> with_checkpoint(("--fp16", "--resume", "{checkpoint}", "{checkpoint}"), None)
    ('--fp16',)
    """
    words: list[str] = []
    before = ""
    for word in args:
        if _CHECKPOINT not in word:
            words.append(word)
        elif path is not None:
            words.append(word.replace(_CHECKPOINT, path))
        elif word == _CHECKPOINT and before.startswith("-") and "=" not in before:
            words.pop()
        before = word
    return tuple(words)


def _lacking(request: Request, facts: Facts) -> tuple[str, ...]:
    """Warn if this host's Paddle lacks what the mode needs."""
    feature, version = modes.BY_WORD[request.run_mode].feature, facts.paddle_lacking
    if feature is None or version is None:
        return ()
    message = (
        f"Paddle {version} here was built without {feature.name}: use paddlepaddle 2.6.2, which "
        f"has {feature.pronoun} (pip install paddlepaddle==2.6.2)."
    )
    return (message,)


def _commands(request: Request, facts: Facts, specs: Sequence[RankSpec]) -> list[tuple[str, ...]]:
    """Return the command of each of SPECS."""
    argv = command.argv(request, facts)
    ranks, _, text = (request.wrap or "").partition(": ")
    wrapped = [request.wrap is not None and spec.is_among(ranks) for spec in specs]
    return [(*shlex.split(text), *argv) if is_wrapped else argv for is_wrapped in wrapped]


def _check_ranks(request: Request, layout: Layout) -> None:
    """Raise UsageError if an option names ranks of trainers that the job does not have."""
    existing = [spec.rank for spec in layout.ranks if spec.is_trainer]
    for name in _OF_RANKS:
        words = (getattr(request, name) or "").partition(":")[0].split(",")
        missing = [word for word in words if word.isdigit() and int(word) not in existing]
        if missing and existing:
            have = "only rank 0" if len(existing) == 1 else f"ranks {existing[0]}-{existing[-1]}"
            raise UsageError(
                f"{origin.option(request, name)}: there is no rank {missing[0]}; the job has "
                f"{have}."
            )


def _bound(
    request: Request, facts: Facts, specs: Sequence[RankSpec], variables: _Variables
) -> tuple[_Variables, _Masks]:
    """Return VARIABLES with the number of threads, and the CPUs of each of SPECS."""
    if facts.tasks:
        # The engine's own variables, but for those of devices.
        variables = tuple(
            {key: text for key, text in task.env.items() if not key.endswith("_DEVICES")} | {**env}
            for task, env in zip(facts.tasks, variables, strict=True)
        )
    processors = facts.processors
    if processors is None:
        masks = [task.cpus for task in facts.tasks]
        return variables, masks if len(set(masks)) > 1 else [()] * len(specs)
    if not devices.is_drivers_order(request, facts.environ):
        # CUDA's numbers are not the driver's; by UUID GPUs are still identified.
        near = {name: node for name, node in processors.near.items() if not name.isdecimal()}
        processors = processors._replace(near=near)
    masks, threads = affinity.bind(request.bind, processors, [spec.devices for spec in specs])
    if _THREADS not in facts.environ:
        # --env takes precedence.
        variables = tuple(
            {_THREADS: str(count)} | {**env} for env, count in zip(variables, threads, strict=True)
        )
    return variables, masks


def _run_folder(request: Request, facts: Facts, roster: Roster) -> str:
    """Return the run directory's path below the folder of all runs."""
    shared = roster.shared_logs
    if shared is not None:
        return f"{shared.run_name}/{shared.own}" if shared.own else shared.run_name
    name = run_name(request, facts.started_utc, facts.pid)
    # The name stays while the host's place changes.
    me = roster.me if roster.first_me is None else roster.first_me
    is_alone = len(roster.members) == 1 and roster.first_me is None
    return name if is_alone else f"{name}-node{me}"


def run_name(request: Request, started_utc: str, pid: int) -> str:
    """Return the name of the launch of PID at STARTED_UTC, unique on this host."""
    job = request.job_id
    if job == UNNAMED_JOB:
        # The name that people use.
        script = os.path.basename(request.script.target).removesuffix(".py")
        job = script if script.strip(".") else job
    if not job or "/" in job or "\0" in job or job in {".", ".."}:
        raise UsageError(
            f"{origin.option(request, 'job_id')} names a folder in the logs: "
            "give letters, digits and -_. but no slash."
        )
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in job)
    plain = plain.encode()[:_LONGEST_JOB].decode(errors="ignore")
    return f"{started_utc}-{plain}-{pid}"
