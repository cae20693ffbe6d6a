"""The devices of Paddle's plug-ins, as the ranks' own Paddle counts them in a child process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

from fleetrun.errors import EnvironmentFault
from fleetrun.host import plugins
from fleetrun.host.plugins import Signs
from fleetrun.model import Facts, Request
from fleetrun.plan import kinds, masks
from fleetrun.plan.kinds import label
from fleetrun.run.isolation import IsolatedCall
from fleetrun.text import counted

_CHECKER = os.path.join(os.path.dirname(os.path.dirname(__file__)), "inject", "device_check.py")

# After this many seconds, a line says what the launch waits for.
_REMARK_S = 10.0

# The kind that stands for plug-ins without devices.
_NONE = "plug-in"


class DeviceCounts(NamedTuple):
    """Paddle's version (empty: not installed), and the number of devices of each kind."""

    version: str
    counts: Mapping[str, int]


class Query:
    """A query to the Paddle of SIGNS, with EXTRA variables; `result` awaits the answer."""

    def __init__(self, signs: Signs, extra: Mapping[str, str] | None = None) -> None:
        self._python = signs.python
        environ = {**signs.environ, **(extra or {})}
        command = [self._python, _CHECKER]
        try:
            self._question = IsolatedCall(
                lambda: os.execve(self._python, command, environ)  # noqa: S606 - no shell is wanted
            )
        except OSError as error:
            raise EnvironmentFault(
                "Paddle cannot be asked for its devices: no process can be started "
                f"({error.strerror}); look at `ulimit -u` and the limits of the container."
            ) from None

    def result(self, log: Callable[[str], None], timeout_s: float) -> DeviceCounts:
        """Return the answer; LOG gets a line if that takes long."""
        awaited = "Paddle's plug-ins to count their devices"
        answer = self._question.result(timeout_s, log=log, awaited=awaited, log_after_s=_REMARK_S)
        if answer.value is None:
            why = answer.trouble
            raise EnvironmentFault(
                f"The Paddle of {self._python} does not tell which devices it has: {why}. Look at "
                f"what `{self._python} -c 'import paddle'` says; --device_kind=cpu trains on the "
                "CPU."
            )
        version, counts = cast("tuple[str, list[tuple[str, int]]]", answer.value)
        return DeviceCounts(version, dict(counts))


def with_devices(
    facts: Facts,
    request: Request,
    signs: Signs,
    *,
    log: Callable[[str], None],
    timeout_s: float,
) -> Facts:
    """Complete FACTS with the devices of plug-ins, or with why there are none."""
    answer = Query(signs).result(log, timeout_s)
    if not answer.version:
        # Then only device files can tell.
        why = f"{signs.python} has no Paddle that could tell"
        kind = request.device_kind or ""
        is_missing = plugins.is_named(request) and kind not in facts.device_counts
        return facts._replace(absent={kind: why, **facts.absent}) if is_missing else facts
    absent = dict(facts.absent)
    paddle = f"Paddle {answer.version} of {signs.python}"
    for kind, count in answer.counts.items():
        if not count:
            absent[kind] = f"{paddle} has a plug-in for {label(kind)}s, and sees none"
    for kind, count in signs.files.items():
        if kind not in answer.counts and kind not in kinds.BUILT_IN:
            absent[kind] = _without_plugin(kind, count, paddle)
    kind_ = request.device_kind
    if kind_ is not None and kind_ not in answer.counts and plugins.is_named(request):
        known_kinds = ", ".join(f"{label(kind)}s" for kind in answer.counts)
        has = f" (it has {known_kinds})" if known_kinds else ""
        absent.setdefault(kind_, f"{paddle} has no plug-in for {label(kind_)}s{has}")
    if not answer.counts and signs.root:
        absent.setdefault(_NONE, f"{paddle} gets no device from the plug-ins in {signs.root}")
    built_in = {kind: n for kind, n in facts.device_counts.items() if kind in kinds.BUILT_IN}
    return facts._replace(
        device_counts=built_in,
        paddle_counts=dict(answer.counts),
        plugins=_hidden(answer.counts, signs, log, timeout_s),
        unmasked=_unmasked(
            facts, request, answer.counts, signs=signs, log=log, timeout_s=timeout_s
        ),
        absent=absent,
    )


def _unmasked(
    facts: Facts,
    request: Request,
    counts: Mapping[str, int],
    *,
    signs: Signs,
    log: Callable[[str], None],
    timeout_s: float,
) -> frozenset[str]:
    """Return the kinds of which Paddle sees several devices behind a mask of one.

    They matter only if REQUEST wants masks.
    """
    several = [kind for kind, count in counts.items() if count > 1]
    if not request.virtual_local_rank or not several:
        return frozenset()
    variables = [masks.variable(facts, kind) for kind in several]
    single_masks = {name: facts.environ.get(name, "0").split(",")[0].strip() for name in variables}
    masked = Query(signs, single_masks).result(log, timeout_s).counts
    return frozenset(kind for kind in several if masked.get(kind, 0) > 1)


def _without_plugin(kind: str, count: int, paddle: str) -> str:
    """Describe a host that has COUNT devices of KIND, and PADDLE without their plug-in."""
    number = counted(count, label(kind))
    package = kinds.VENDORS[kind].package
    install = f" (pip install {package})" if package else ""
    return f"this host has {number}, and {paddle} has no plug-in for {label(kind)}s{install}"


def _hidden(
    counts: Mapping[str, int], signs: Signs, log: Callable[[str], None], timeout_s: float
) -> dict[str, tuple[str, ...]]:
    """Return the libraries of each kind but the first, which Paddle loads by default."""
    libraries = plugins.libraries(signs.root)
    if len(counts) <= 1 or len(libraries) <= 1:
        return {}

    libraries_of: dict[str, tuple[str, ...]] = {}
    with tempfile.TemporaryDirectory(prefix="fleetrun-plugins-") as folder:
        queries = []
        for place, library in enumerate(libraries):
            root = os.path.join(folder, str(place))
            os.mkdir(root)
            os.symlink(os.path.abspath(library), os.path.join(root, os.path.basename(library)))
            queries.append((library, Query(signs, {kinds.ROOT: root})))
        for library, query in queries:
            for kind in query.result(log, timeout_s).counts:
                libraries_of[kind] = (*libraries_of.get(kind, ()), os.path.abspath(library))
    first = next(iter(counts))
    return {kind: paths for kind, paths in libraries_of.items() if kind != first}
