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
    Strategy,
    Task,
)
from fleetrun.plan import (
    affinity,
    command,
    debug,
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

_CHECKPOINT = "{checkpoint}"
# File names end at 255 bytes; time, process id and node need some of them.
_LONGEST_JOB = 100


def places(request: Request) -> ModeHosts:
    """Return the hosts that the options of REQUEST's mode name."""
    return modes.BY_WORD[request.run_mode].rules.places(request)


def mode(request: Request) -> str:
    """Return the name of REQUEST's mode, for code that must not import modes."""
    return request.run_mode


def share(request: Request, facts: Facts) -> Share:
    """Distribute this host's devices over its ranks."""
    mode = modes.BY_WORD[request.run_mode]
    return devices.share(request, facts, takes_all=mode.is_uniform)


def slots(request: Request, facts: Facts, share: Share) -> Slots:
    """Return the processes that REQUEST needs, if this host's Paddle supports them."""
    _lacking(request, facts)
    return modes.BY_WORD[request.run_mode].rules.slots(request, share)


def first_port(request: Request) -> int:
    """Return the first port for hosts that cannot consult each other."""
    nothing = devices.Share("cpu", ((),), "gloo")
    return modes.BY_WORD[request.run_mode].rules.slots(request, nothing).first_port


def plan(request: Request, facts: Facts, share: Share, roster: Roster) -> LaunchPlan:
    """Decide everything that the launcher on host ROSTER.me will do."""
    _check_free(request, roster)
    request = _resuming(request, facts)
    _check_readable(roster)
    log_dir = os.path.abspath(os.path.join(facts.cwd, request.log_dir))
    run_dir = f"{log_dir}/{names.RUNS}/{_run_folder(request, facts, roster)}"
    mode = modes.BY_WORD[request.run_mode]
    layout = mode.rules.layout(request, facts, share, roster)
    # In an elastic job some ranks may join later or leave.
    if roster.assigned is None and roster.first_me is None:
        _check_ranks(request, "tee", (request.tee or "").split(","), layout)
        _check_ranks(request, "stdin", (request.stdin or "",), layout)
        _check_ranks(request, "debug", (request.debug or "").split(","), layout)
        for name in ("wrap", "profile"):
            ranks_of = (getattr(request, name) or "").partition(":")[0].split(",")
            _check_ranks(request, name, ranks_of, layout)
    strategy = _strategy(request, layout)
    env = environment.variables(
        request,
        facts,
        share,
        roster,
        layout=layout,
        run_dir=run_dir,
        strategy=strategy,
    )
    local_ranks = [process.spec for process in layout.processes]
    commands, debug_notes = _commands(request, facts, local_ranks)
    variables, masks, notes = _bound(request, facts, local_ranks, env.ranks)
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
            awaits=process.awaits,
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
        files=_files(env, strategy, layout, run_dir),
        notes=(
            *request.notes,
            *filter(None, (facts.taken_command,)),
            *facts.notes,
            *share.notes,
            *roster.notes,
            *env.notes,
            *_lacking(request, facts),
            *layout.notes,
            *notes,
            *debug_notes,
        ),
        suspects=env.suspects,
        strategy=strategy,
        has_session=len(roster.members) > 1 or roster.first_me is not None,
        shared_logs=roster.shared_logs,
        checkpoints=facts.checkpoints,
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


def _check_readable(roster: Roster) -> None:
    """Raise EnvironmentFault if Paddle could not parse the ranks' endpoints."""
    unread = [member.host for member in roster.members if ":" in member.host]
    if unread:
        raise EnvironmentFault(
            f"Ranks would have the address {unread[0]}, and {hosts.NO_IPV6}: give the hosts' IPv4 "
            "addresses, or with --master their network, --network=10.0.0.0/16."
        )


def _check_free(request: Request, roster: Roster) -> None:
    """Raise an error if several hosts would each count their own free GPUs."""
    counted = isinstance(request.nproc_per_node, int)
    if len(roster.members) > 1 and request.devices == free_gpus.FREE and not counted:
        raise UsageError(
            f"{origin.option(request, 'devices')}: hosts may have different numbers of free GPUs, "
            "and each must have the same number of ranks; add --nproc_per_node."
        )


def _lacking(request: Request, facts: Facts) -> tuple[str, ...]:
    """Warn or refuse if this host's Paddle lacks what the mode needs."""
    feature, version = modes.BY_WORD[request.run_mode].feature, facts.paddle_lacking
    if feature is None or version is None:
        return ()
    message = (
        f"Paddle {version} here was built without {feature.name}: use paddlepaddle 2.6.2, which "
        f"has {feature.pronoun} (pip install paddlepaddle==2.6.2)."
    )
    # A script that does not name Paddle may not need it, and a dry run may be for another host.
    if facts.script_imports_paddle and request.dry_run is None:
        raise EnvironmentFault(message)
    return (message,)


def _commands(
    request: Request, facts: Facts, specs: Sequence[RankSpec]
) -> tuple[list[tuple[str, ...]], tuple[str, ...]]:
    """Return the command of each of SPECS, and remarks."""
    before, notes = debug.debugging(request, facts, specs)
    debuggers = [before.get(spec.rank, ()) if spec.is_trainer else () for spec in specs]
    commands = [command.argv(request, facts, debugger) for debugger in debuggers]
    if request.wrap is None:
        return commands, notes

    ranks, _, text = request.wrap.partition(": ")
    words = shlex.split(text)
    if facts.wrap_fault is not None and any(spec.is_among(ranks) for spec in specs):
        raise EnvironmentFault(f"{origin.option(request, 'wrap')}: {facts.wrap_fault}")
    return [
        (*words, *argv) if spec.is_among(ranks) else argv
        for spec, argv in zip(specs, commands, strict=True)
    ], notes


def _check_ranks(request: Request, option: str, words: Sequence[str], layout: Layout) -> None:
    """Raise an error if OPTION names ranks of trainers that the job does not have."""
    existing = [spec.rank for spec in layout.ranks if spec.is_trainer]
    missing = [word for word in words if word.isdigit() and int(word) not in existing]
    if missing and existing:
        have = "only rank 0" if len(existing) == 1 else f"ranks {existing[0]}-{existing[-1]}"
        raise UsageError(
            f"{origin.option(request, option)}: there is no rank {missing[0]}; the job has {have}."
        )


def _strategy(request: Request, layout: Layout) -> Strategy | None:
    """Return the request's strategy resolved for the trainers of LAYOUT."""
    if request.strategy is None:
        return None

    return resolve.resolve(request.strategy, resolve.topology(layout.ranks))


def _files(
    env: environment.Environment, strategy: Strategy | None, layout: Layout, run_dir: str
) -> Mapping[str, str]:
    """Return the file with STRATEGY for the training processes, if there is one."""
    if strategy is None:
        return {}

    text = document.text(strategy, resolve.topology(layout.ranks), env.of_strategy)
    return {f"{run_dir}/{names.STRATEGY}": text}


def _bound(
    request: Request,
    facts: Facts,
    ranks: Sequence[RankSpec],
    variables: tuple[Mapping[str, str], ...],
) -> tuple[tuple[Mapping[str, str], ...], tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Return VARIABLES with the number of threads, the CPUs of each of RANKS, and remarks."""
    if facts.tasks:
        variables = tuple(
            {**_of_task(task), **env} for task, env in zip(facts.tasks, variables, strict=True)
        )
    if facts.processors is None:
        masks = tuple(task.cpus for task in facts.tasks)
        return variables, masks if len(set(masks)) > 1 else ((),) * len(ranks), ()

    processors, notes = facts.processors, tuple[str, ...]()
    if processors.near and not devices.is_drivers_order(request, facts.environ):
        # By UUID they are still identified.
        near = {name: node for name, node in processors.near.items() if not name.isdecimal()}
        processors = processors._replace(near=near)
        notes = (
            f"{devices.ORDER} numbers GPUs unlike the driver, so the CPUs near them are unknown.",
        )
    binding = affinity.bind(request.bind, processors, [spec.devices for spec in ranks])
    threaded = tuple(
        affinity.with_threads(env, threads, facts.environ)
        for env, threads in zip(variables, binding.threads, strict=True)
    )
    return threaded, binding.masks, (*notes, *binding.notes)


def _of_task(task: Task) -> Mapping[str, str]:
    """Return the variables of TASK that its rank gets, without those for devices."""
    return {name: value for name, value in task.env.items() if not name.endswith("_DEVICES")}


def _run_folder(request: Request, facts: Facts, roster: Roster) -> str:
    """Return the run directory's path below the folder of all runs."""
    shared = roster.shared_logs
    if shared is not None:
        return f"{shared.run_name}/{shared.own}" if shared.own else shared.run_name
    if roster.first_me is not None:
        # The name stays while the host's place changes.
        return f"{_own_name(request, facts)}-node{roster.first_me}"
    node = f"-node{roster.me}" if len(roster.members) > 1 else ""
    return _own_name(request, facts) + node


def _own_name(request: Request, facts: Facts) -> str:
    return run_name(request, facts.started_utc, facts.pid)


def run_name(request: Request, started_utc: str, pid: int) -> str:
    """Return the name of the launch of PID at STARTED_UTC, unique on this host."""
    job = request.job_id
    if job == UNNAMED_JOB:
        # The name that people use.
        script = request.script.name.removesuffix(".py")
        job = script if script.strip(".") else job
    if not job or "/" in job or "\0" in job or job in {".", ".."}:
        raise UsageError(
            f"{origin.option(request, 'job_id')} names a folder in the logs: "
            "give letters, digits and -_. but no slash."
        )
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in job)
    plain = plain.encode()[:_LONGEST_JOB].decode(errors="ignore")
    return f"{started_utc}-{plain}-{pid}"
