"""Reports to a job's other hosts that this host's command line is invalid."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fleetrun import argv, configfile, engines, job, options, planner
from fleetrun.engines import detect
from fleetrun.errors import FleetrunError
from fleetrun.model import Script
from fleetrun.options import RawOption
from fleetrun.records.variables import TOKEN
from fleetrun.request import resolve

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from fleetrun.argv import ParsedCommand
    from fleetrun.engines.detect import Detected
    from fleetrun.model import Request
    from fleetrun.run.observers import Caller

# Replaces an unreadable number of hosts; the coordinator knows the right one.
_SEVERAL = "2"


def tell(
    fault: FleetrunError, words: Sequence[str], environ: Mapping[str, str], caller: Caller | None
) -> None:
    """Report the FAULT in WORDS to the job's other hosts; the caller may then raise it.

    They are found as far as WORDS, ENVIRON and the config file can be read.
    """
    parsed = argv.legible(words)
    if parsed.asks("from_manifest"):
        return
    try:
        rows = detect.rows(environ)
        started = detect.read(rows, environ, _text) if rows else None
        request = _request(parsed, environ, started)._replace(typed=parsed.words)
        engine = engines.find(request, environ, planner.places(request))
    except (FleetrunError, OSError):
        return
    if request.hosts or request.hostfile:
        # One launcher for all of them.
        return
    if started is not None:
        if detect.unspread(started) is not None or _is_follower(started):
            return
        if started.token and not environ.get(TOKEN):
            environ = {**environ, TOKEN: started.token}
    job.tell(fault, request, environ, engine, caller)


def _request(
    parsed: ParsedCommand, environ: Mapping[str, str], started: Detected | None
) -> Request:
    """Return a request with the endpoint of the rendezvous, even if --nnodes is invalid."""
    try:
        config = configfile.find(parsed, environ, is_lenient=True)
    except FleetrunError:
        config = None
    known = parsed._replace(script=parsed.script or Script("file", "", ()))
    read = None if started is None else lambda: started
    try:
        return resolve(known, environ, config, detect=read, only_meeting=True)
    except FleetrunError:
        count = options.find("nnodes")
        settings = [setting for setting in parsed.settings if setting.option.target != count.name]
        if not parsed.asks("ips"):
            settings.append(RawOption(count, _SEVERAL, count.flag))
        known = known._replace(settings=tuple(settings))
        return resolve(known, environ, config, detect=read, only_meeting=True)


def _is_follower(started: Detected) -> bool:
    """Whether another task of the engine on this host reports for it."""
    if not detect.has_tasks(started):
        return False
    from fleetrun.remote import tasks  # only with a task for each rank

    return tasks.place(started).number > 0


def _text(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
