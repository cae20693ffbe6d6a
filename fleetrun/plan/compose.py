"""The whole plan of one launcher, from what was asked, seen, shared out and gathered."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from fleetrun.errors import UsageError
from fleetrun.model import LaunchPlan, ProcessSpec, Rules
from fleetrun.modes import collective
from fleetrun.plan import command, environment, hosts, origin

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleetrun.model import Facts, RankSpec, Request, Roster, Strategy
    from fleetrun.modes.cast import Cast
    from fleetrun.plan.devices import Share
    from fleetrun.strategy.resolve import Topology

# File names end at 255 bytes; time, process id and node need some of them.
_LONGEST_JOB = 100


def compose(request: Request, facts: Facts, share: Share, roster: Roster) -> LaunchPlan:
    """Decide everything that the launcher on host ROSTER.me will do."""
    log_dir = os.path.abspath(os.path.join(facts.cwd, request.log_dir))  # noqa: PTH100, PTH118 - pathlib costs start-up time
    run_dir = f"{log_dir}/runs/{_run_name(request, facts, roster)}"
    cast = _cast(request, facts, share, roster)
    if not cast.keeps_identity:
        _check_ranks(request, "tee", (request.tee or "").split(","), cast)
        _check_ranks(request, "stdin", (request.stdin or "",), cast)
    strategy, ranks = _strategy(request, cast)
    env = environment.variables(
        request, facts, share, roster, cast=cast, run_dir=run_dir, strategy=strategy
    )
    argv = command.argv(request, facts)
    mine = [part.spec for part in cast.parts]
    variables, masks, notes = _bound(request, facts, mine, env.ranks)
    processes = tuple(
        ProcessSpec(
            name=part.name,
            argv=argv,
            env=own,
            unset=unset,
            log=part.log,
            essential=part.essential,
            rank=part.spec,
            cpus=cpus,
            awaits=part.awaits,
        )
        for part, own, unset, cpus in zip(cast.parts, variables, env.unset, masks, strict=True)
    )
    # In a collective job the last rank has the longest numbers, and nothing else differs.
    for process in processes[-1:] if cast.mode == collective.NAME else processes:
        environment.check_size(process, facts)
    return LaunchPlan(
        job_id=request.job_id,
        mode=cast.mode,
        engine=roster.engine,
        generation=roster.generation,
        node_rank=roster.me,
        nodes=tuple(member.host for member in roster.members),
        ranks=cast.ranks,
        processes=processes,
        rules=Rules(request.grace_s, request.max_restart),
        cwd=facts.cwd,
        log_dir=log_dir,
        run_dir=run_dir,
        files=_files(env, strategy, ranks, run_dir),
        notes=(
            *request.notes,
            *facts.notes,
            *share.notes,
            *roster.notes,
            *env.notes,
            *cast.notes,
            *notes,
            *_reach(request, strategy),
        ),
        strategy=strategy,
        peers=cast.peers,
    )


def _check_ranks(request: Request, option: str, words: Sequence[str], cast: Cast) -> None:
    """Complain about an OPTION that names trainers' ranks which the job does not have."""
    there = [spec.rank for spec in cast.ranks if spec.role == collective.ROLE]
    missing = [word for word in words if word.isdigit() and int(word) not in there]
    if missing and there:
        have = "only rank 0" if len(there) == 1 else f"ranks {there[0]}-{there[-1]}"
        raise UsageError(
            f"{origin.option(request, option)}: there is no rank {missing[0]}; the job has {have}."
        )


def _strategy(request: Request, cast: Cast) -> tuple[Strategy | None, Topology | None]:
    """Return the request's strategy as it is for the trainers of CAST, and where those are."""
    if request.strategy is None:
        return None, None
    from fleetrun.strategy import resolve  # noqa: PLC0415 - only those who have one pay for it

    nodes = [spec.node_rank for spec in cast.ranks if spec.role == collective.ROLE]
    ranks = resolve.topology(nodes)
    return resolve.resolve(request.strategy, ranks), ranks


def _files(
    env: environment.Environment, strategy: Strategy | None, ranks: Topology | None, run_dir: str
) -> Mapping[str, str]:
    """Return the files of ENV, and the one that tells the training processes of STRATEGY."""
    if strategy is None or ranks is None:
        return env.files
    from fleetrun.strategy import document  # noqa: PLC0415 - only those who have one pay for it

    path = f"{run_dir}/{environment.STRATEGY_NAME}"
    return {**env.files, path: document.text(strategy, ranks, env.of_strategy)}


def _reach(request: Request, strategy: Strategy | None) -> tuple[str, ...]:
    """Say why STRATEGY cannot get into the script, when it is clear that it cannot."""
    if strategy is None:
        return ()
    from fleetrun.strategy import reach  # noqa: PLC0415 - only those who have one pay for it

    reason = reach.obstacle(request.script)
    return () if reason is None else (reason,)


def _cast(request: Request, facts: Facts, share: Share, roster: Roster) -> Cast:
    """Return who takes part, as the mode has it."""
    if request.run_mode in hosts.SERVER_MODES:
        from fleetrun.modes import ps  # noqa: PLC0415 - only those who want servers pay for it

        return ps.cast(request, facts, share, roster)
    if request.run_mode == "rpc":
        from fleetrun.modes import rpc  # noqa: PLC0415 - seldom wanted

        return rpc.cast(roster)
    return collective.cast(roster)


def _bound(
    request: Request,
    facts: Facts,
    ranks: Sequence[RankSpec],
    variables: tuple[Mapping[str, str], ...],
) -> tuple[tuple[Mapping[str, str], ...], tuple[tuple[int, ...], ...], tuple[str, ...]]:
    """Return VARIABLES with the number of threads, the CPUs of each of RANKS, and remarks."""
    if facts.processors is None:
        return variables, ((),) * len(ranks), ()
    from fleetrun.plan import affinity  # noqa: PLC0415 - only those who bind pay for it

    binding = affinity.bind(request.bind, facts.processors, [spec.devices for spec in ranks])
    threaded = tuple(
        affinity.with_threads(env, threads, facts.environ)
        for env, threads in zip(variables, binding.threads, strict=True)
    )
    return threaded, binding.masks, binding.notes


def _run_name(request: Request, facts: Facts, roster: Roster) -> str:
    """Return the run directory's own name: unique on this host, and telling."""
    job = request.job_id
    if not job or "/" in job or "\0" in job or job in {".", ".."}:
        raise UsageError(
            f"{origin.option(request, 'job_id')} names a folder in the logs: "
            "give letters, digits and -_. but no slash."
        )
    plain = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in job)
    plain = plain.encode()[:_LONGEST_JOB].decode(errors="ignore")
    node = f"-node{roster.me}" if len(roster.members) > 1 else ""
    return f"{facts.started_utc}-{plain}-{facts.pid}{node}"
