"""Where the time of a step goes, what more ranks lose, and what would save most of it; pure.

A rank does the same work per step at every size (weak scaling), so a step that takes longer than at
the smallest size loses time, to one of CAUSES.
"""

from __future__ import annotations

from itertools import takewhile
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from fleetrun.records.tracefile import SpanRecord, TraceRecord

# What the additional time of a step is lost to.
_DATA, _COMPUTATION, _WAITING, _COMMUNICATION, _OTHER = CAUSES = (
    *("data", "computation", "waiting", "communication"),
    "other",
)
# A smaller share of a step is not worth a change.
WORTH = 0.03
_MOST_ADVICE = 3
# How much later than the others a rank must be, as a share of a step, to be named.
_LATE = 0.02
# By how many standard errors, unless it is later by this share of a step: in some steps only.
_CERTAIN, _VERY_LATE = 3.0, 0.15
# Spans in which ranks wait for each other; and waits that are recorded separately.
_MEETINGS = "backward", "run"
_WAITS = "wait", "collective", "sync"
# The share of its lateness that one thing must explain.
_MOSTLY = 0.6
# What is divided by is at least this, in seconds.
_LEAST_S = 1e-3
# How much of a step a rank must wait for a processor to be named.
_QUEUED = 0.1
# How many times as long as the others a step at the beginning must take to be slow.
_SLOW_START = 3.0
# The least share of a step that a forward must take to show the size of a batch, and how much the
# share of the batch may differ from that of the ranks.
_DIVIDED = 0.1
# Why a rank is late, the deepest reason first.
_FOR_DATA = "longer for its data"
_IN_LAYERS = "waits {{}} longer in its {}, without computing (a lock, a file, a device)"
_IN_BACKWARD = "waits {} longer in its backward, without computing (a lock, Python's (GIL), a file)"
_REASONS = {
    "threads": "waits for Python's lock (GIL): its other threads compute for {} of a step{thread}",
    "queued": "waits {} longer for a processor, which something else uses or a limit holds",
    "data": f"waits {{}} {_FOR_DATA}",
    "forward": _IN_LAYERS.format("forward"),
    "backward": _IN_BACKWARD,
    "update": "takes {} longer for its update",
    "outside": "spends {} longer in the script itself: files, prints, checkpoints, locks",
}
# And if it computes there.
_COMPUTING = {
    "forward": "computes {} longer in its forward",
    "backward": "computes {} longer in its backward",
    "outside": "computes {} longer in the script itself",
}
_PREPARE = (
    "give the DataLoader more processes (num_workers=4, persistent_workers=True), or prepare data "
    "before the training"
)


class StepTimes(NamedTuple):
    """The parts of a step of one run, in seconds, averaged over recorded steps and ranks.

    They are those of the ranks that wait if there is one that the others wait for.
    """

    seconds: float
    # Its standard error, as steps differ from each other.
    error: float = 0.0
    data: float = 0.0
    forward: float = 0.0
    # Without buckets, if they are recorded separately.
    backward: float = 0.0
    update: float = 0.0
    # A static graph's program, which is computation and communication at once.
    program: float = 0.0
    # Passing buckets on and waiting for them.
    buckets: float = 0.0
    # Collectives that the script or its layers call, and waiting for the device.
    collectives: float = 0.0
    sync: float = 0.0
    device: str = ""
    # Whether a reducer of Paddle's communicates in the backward, unrecorded.
    has_reducer: bool = True
    # Until the slowest rank begins its backward.
    waiting: float = 0.0
    # The rank that the others wait for, and how many seconds it is behind the others.
    slowest: int | None = None
    late: float = 0.0
    # What that rank is late for, with its additional seconds; empty: not known.
    late_for: str = ""
    # What holds it back, as the launch has measured; empty: nothing that is known.
    held_by: str = ""
    # The rank that waits longest for a processor, how many seconds of a step, and all on average.
    queued_rank: int | None = None
    queued: float = 0.0
    queued_mean: float = 0.0
    # What TCP has measured of the slowest link between hosts; empty: nothing.
    link: str = ""
    # How many of the first recorded steps are slow, and how many times as long as others.
    slow_steps: int = 0
    slowdown: float = 1.0


class Change(NamedTuple):
    """Advice: the most that it would save of a step, and launch options that try it."""

    cause: str
    share: float
    text: str
    words: tuple[str, ...] = ()


# -- where the time went --------------------------------------------------------------------------


def breakdown(traces: Sequence[TraceRecord]) -> StepTimes:
    """Return the parts of a step, from the profiles of all ranks.

    In the backward, a static program or a collective, ranks wait for the one that has spent most
    time outside it since the last one. Its backward counts, too; where a reducer of Paddle's waits
    in it unrecorded, only what Python's code there and the thread's use of a processor take, and
    what follows the end of the first backward on its host: that of the reducer is the same for all.

    >>> from fleetrun.records.tracefile import SpanRecord, TraceRecord
    >>> def rank(number, forward):
    ...     spans = (
    ...         SpanRecord("step 1", "step", "training", 0.0, 1.0),
    ...         SpanRecord("forward", "forward", "training", 0.0, forward),
    ...         SpanRecord("backward", "backward", "training", forward, 0.9 - forward),
    ...     )
    ...     seconds = {"step": 1.0, "forward": forward, "backward": 0.9 - forward}
    ...     return TraceRecord(number, 1, 1, seconds, None, spans)
    >>> step = breakdown([rank(0, 0.2), rank(1, 0.4)])
    >>> step.slowest, round(step.late, 3), round(step.waiting, 3), round(step.backward, 3)
    (1, 0.2, 0.2, 0.7)
    """
    traces = _with_tails(traces)
    own = [_own_times(trace) for trace in traces]
    if len({len(times) for times in own}) > 1:
        # Ranks that wait for each other elsewhere, as those of a pipeline, compare as a whole.
        own = [[sum(times)] for times in own]
    together = list(zip(*own, strict=True))
    # A step may have several backwards.
    steps = max(1, traces[0].steps)
    totals = [sum(times) / steps for times in zip(*together, strict=True)] or [0.0] * len(traces)
    latest = max(range(len(totals)), key=totals.__getitem__)
    late = _more(totals, latest)
    step = fmean(trace.seconds.get("step", 0.0) for trace in traces)
    queued, queued_rank = max((trace.seconds.get("queued", 0.0), trace.rank) for trace in traces)
    is_late = len(traces) > 1 and late > _LATE * step
    is_late = is_late and (late > _VERY_LATE * step or _is_certain(together, latest))
    # What one rank alone does longer is waiting for the others, and nothing else.
    usual = [place for place in range(len(traces)) if not (is_late and place == latest)]
    waiting = sum(max(times) - fmean(times[place] for place in usual) for times in together) / steps

    def of(kind: str) -> float:
        return fmean(traces[place].seconds.get(kind, 0.0) for place in usual)

    lengths = [span.seconds for span in traces[0].spans if span.kind == "step"]
    slow, slowdown = _slow_start(lengths)
    return StepTimes(
        seconds=step,
        error=stdev(lengths) / len(lengths) ** 0.5 if len(lengths) > 1 else 0.0,
        data=of("data"),
        forward=of("forward"),
        # Passing buckets on is a part of the backward.
        backward=max(0.0, of("backward") - of("send")),
        update=of("update"),
        program=of("run"),
        buckets=of("wait") + of("send"),
        collectives=of("collective"),
        sync=of("sync"),
        device=traces[0].device,
        has_reducer=any(trace.has_reducer for trace in traces),
        waiting=waiting,
        slowest=traces[latest].rank if is_late else None,
        late=late,
        late_for=_late_for(traces, latest, late) if is_late else "",
        queued_rank=queued_rank if queued > _QUEUED * step else None,
        queued=queued,
        queued_mean=of("queued"),
        slow_steps=slow,
        slowdown=slowdown,
    )


def _slow_start(lengths: Sequence[float]) -> tuple[int, float]:
    """Return how many of the first steps of LENGTHS are slow, and how many times as long.

    >>> _slow_start([5.0, 4.0, 1.0, 1.0, 9.0, 1.0]), _slow_start([1.0, 5.0, 1.0])
    ((2, 4.5), (0, 1.0))
    """
    if not lengths:
        return 0, 1.0
    usual = sorted(lengths)[(len(lengths) - 1) // 2]
    slow = list(takewhile(lambda length: length > _SLOW_START * usual, lengths))
    return len(slow), fmean(slow) / usual if slow else 1.0


def _is_certain(together: Sequence[Sequence[float]], place: int) -> bool:
    """Whether what is at PLACE exceeds the others by more than it does by chance.

    >>> _is_certain([(1.0, 1.5), (2.0, 1.8)], 1), _is_certain([(1.0, 1.5), (1.4, 1.8)], 1)
    (False, True)
    """
    more = [_more(times, place) for times in together]
    if len(more) < 2:
        return True
    return bool(fmean(more) * len(more) ** 0.5 > _CERTAIN * stdev(more))


def _late_for(traces: Sequence[TraceRecord], latest: int, late: float) -> str:
    """Return what makes the rank of the trace LATEST late; empty: no single thing."""
    parts = [{**trace.seconds, "outside": _outside(trace)} for trace in traces]
    for trace, part in zip(traces, parts, strict=True):
        # Where ranks wait for each other in it, too, it is as long for all.
        if busy := [span.busy for span in trace.spans if span.busy is not None]:
            part["backward"] = sum(busy) / trace.steps
    more = {
        kind: _more([part.get(kind, 0.0) for part in parts], latest)
        for kind in ("running", *_REASONS)
    }
    explaining = {kind for kind, seconds in more.items() if seconds > _MOSTLY * late}
    # On a busy host, it waits for a processor whenever it has something to compute, as the others.
    others = [part for place, part in enumerate(parts) if place != latest]
    crowding = median(
        part.get("queued", 0.0) / max(part.get("running", 0.0), _LEAST_S) for part in others
    )
    usual = crowding * parts[latest].get("running", 0.0)
    if parts[latest].get("queued", 0.0) - usual <= _MOSTLY * late:
        explaining.discard("queued")
    computes = more["running"] + more["queued"] > _MOSTLY * late
    if "running" in explaining or "data" in explaining:
        # It does not wait for its threads, or they load its data.
        explaining.discard("threads")
    kind = next((kind for kind in _REASONS if kind in explaining), None)
    if kind is None:
        return ""
    thread = traces[latest].thread
    texts = _REASONS | (_COMPUTING if computes else {})
    named = f" (mostly {thread})" if thread else ""
    return texts[kind].format(f"{more[kind] * 1e3:.1f} ms", thread=named)


def _more(seconds: Sequence[float], place: int) -> float:
    """Return how much more there is at PLACE than the median of the others.

    >>> _more([0.2, 0.5], 1)
    0.3
    """
    others = [*seconds[:place], *seconds[place + 1 :]]
    return seconds[place] - median(others) if others else 0.0


def _outside(trace: TraceRecord) -> float:
    """Return the seconds of a step that belong to no recorded part."""
    parts = ("data", "forward", "backward", "update", "run", *_WAITS)
    return trace.seconds.get("step", 0.0) - sum(trace.seconds.get(part, 0.0) for part in parts)


def _with_tails(traces: Sequence[TraceRecord]) -> list[TraceRecord]:
    """Return TRACES, whose ranks are also busy from the end of the first backward on their host on.

    A reducer of Paddle's ends its backwards on all of them together.
    """
    on_host: dict[int, list[list[SpanRecord]]] = {}
    for trace in traces:
        on_host.setdefault(trace.host, []).append(_reducing(trace))
    ends_on = {
        host: [
            min(span.begin + span.seconds for span in backwards)
            for backwards in zip(*together, strict=False)
        ]
        for host, together in on_host.items()
    }
    return [_with_tail(trace, ends_on[trace.host]) for trace in traces]


def _with_tail(trace: TraceRecord, ends: Sequence[float]) -> TraceRecord:
    """Return TRACE, whose rank is also busy in its backwards from ENDS on."""
    busy = {
        span: span.busy + span.begin + span.seconds - end
        for span, end in zip(_reducing(trace), ends, strict=False)
        if span.busy is not None
    }
    spans = (span._replace(busy=busy.get(span, span.busy)) for span in trace.spans)
    return trace._replace(spans=tuple(spans))


def _reducing(trace: TraceRecord) -> list[SpanRecord]:
    """Return the backwards of TRACE in which a reducer of Paddle's is known to communicate."""
    return [span for span in trace.spans if span.busy is not None]


def _own_times(trace: TraceRecord) -> list[float]:
    """Return how long TRACE's rank was busy before it could wait for others, each time it could."""
    # A backward without the reducer, as one of those that accumulate gradients, is no meeting.
    has_known = bool(_reducing(trace))
    # What is within another one follows it.
    spans = sorted(
        (
            span
            for span in trace.spans
            if span.kind in (*_MEETINGS, *_WAITS)
            and (span.kind != "backward" or span.busy is not None or not has_known)
        ),
        key=lambda span: (span.begin, -span.seconds),
    )
    meetings: list[SpanRecord] = []
    waited: list[float] = []
    ended = 0.0
    for span in spans:
        end = span.begin + span.seconds
        if not meetings or span.begin >= meetings[-1].begin + meetings[-1].seconds:
            meetings.append(span)
            waited.append(0.0)
            ended = span.begin
        elif end > ended:
            waited[-1] += end - max(span.begin, ended)
            ended = end
    steps = [span for span in trace.spans if span.kind == "step"]
    if not steps or not meetings:
        return []
    # What follows the last one counts as if it came before the first one.
    last = steps[-1].begin + steps[-1].seconds
    ended = steps[0].begin - (last - meetings[-1].begin - meetings[-1].seconds)
    own = []
    for span, waited_s in zip(meetings, waited, strict=True):
        busy = span.begin - ended
        if span.busy is not None:
            busy += span.busy
        elif span.kind == "backward" and (waited_s or not trace.has_reducer):
            busy += span.seconds - waited_s
        own.append(busy)
        ended = span.begin + span.seconds
    return own


def lost(small: StepTimes, large: StepTimes) -> dict[str, float]:
    """Return, by cause, the additional seconds of a step of LARGE over one of SMALL.

    The backward of one rank is computation; that of many also has communication unless that is
    recorded separately. Its computation is assumed to slow down as the forward does then.

    >>> small = StepTimes(1.0, forward=0.4, backward=0.6)
    >>> large = StepTimes(1.7, forward=0.5, backward=1.1, waiting=0.05)
    >>> {cause: round(seconds, 2) for cause, seconds in lost(small, large).items()}
    {'data': 0.0, 'computation': 0.25, 'waiting': 0.05, 'communication': 0.3, 'other': 0.1}
    """
    slower = large.forward / small.forward if small.forward else 1.0
    is_separate = large.buckets or not large.has_reducer
    computed = large.backward if is_separate else small.backward * slower
    computation = (large.forward - small.forward) + (large.update - small.update)
    computation += computed - small.backward
    communication = large.backward + large.buckets - small.buckets - computed
    communication += large.collectives - small.collectives
    # A device computes as much with any number of ranks.
    communication += large.sync - small.sync
    # A program contains all of it; its waiting ranks are not visible either.
    communication += large.program - small.program
    waiting = min(large.waiting, max(0.0, communication))
    by_cause = {
        _DATA: large.data - small.data,
        _COMPUTATION: computation,
        _WAITING: waiting,
        _COMMUNICATION: communication - waiting,
    }
    by_cause[_OTHER] = large.seconds - small.seconds - sum(by_cause.values())
    return by_cause


def is_divided(small: StepTimes, large: StepTimes, share: float) -> bool:
    """Whether the script seems to divide a global batch, of which each rank of LARGE has SHARE.

    A device computes after the forward, which only launches its kernels. A forward that waits for
    a processor is no larger.
    """
    shorter = small.forward - large.forward
    return (
        large.device in ("", "cpu")
        and small.forward > _DIVIDED * small.seconds
        and abs(large.forward / small.forward - share) < _DIVIDED
        and small.queued_mean - large.queued_mean < shorter / 2
    )


def communicates(step: StepTimes) -> bool:
    """Whether anything in STEP can have communicated; a static program may."""
    recorded = step.program or step.buckets or step.collectives or step.sync
    return step.has_reducer or bool(recorded)


def divided(step: StepTimes, share: float) -> StepTimes:
    """Return what STEP would take with SHARE of its batch: its update stays as long.

    >>> divided(StepTimes(1.0, forward=0.4, backward=0.4, update=0.2), 0.5).seconds
    0.6
    """
    parts = {name: getattr(step, name) for name in ("data", "forward", "backward", "program")}
    return step._replace(
        seconds=step.seconds - (1 - share) * sum(parts.values()),
        **{name: seconds * share for name, seconds in parts.items()},
    )


# -- what to change -------------------------------------------------------------------------------


def changes(small: StepTimes, large: StepTimes, launch: Iterable[str]) -> list[Change]:
    """Return the changes that would save most of a step of LARGE, launched with LAUNCH options.

    >>> [change] = changes(StepTimes(1.0, backward=1.0), StepTimes(1.5, backward=1.5), [])
    >>> change.cause, round(change.share, 2), change.words
    ('communication', 0.33, ('--strategy=recommended',))
    """
    used = {word.partition("=")[0] for word in launch}
    advice = []
    # A cause may be longer than all that is lost: what a rank alone does in the smallest size, too.
    most = large.seconds - small.seconds
    for cause, seconds in lost(small, large).items():
        share = min(seconds, most) / large.seconds if large.seconds else 0.0
        if share < WORTH:
            continue
        is_queued = large.queued_mean - small.queued_mean > _MOSTLY * seconds
        words: tuple[str, ...] = ()
        if cause == _DATA:
            text = _PREPARE
        elif cause == _COMPUTATION or (cause == _OTHER and is_queued):
            text = "ranks share processors or memory: bind each to its own (--bind=cores)"
            text += _starved(large)
            words = () if "--bind" in used else ("--bind=cores",)
        elif cause == _WAITING:
            # With loaders as slow, the first one to be late stays the last: the others prefetch.
            is_data = large.late_for.endswith(_FOR_DATA)
            text = f"{_PREPARE if is_data else 'give all ranks the same work'}; {late_rank(large)}"
        elif cause == _COMMUNICATION and _in_collectives(large) > seconds / 2:
            text = (
                "collectives that the script or its layers call take "
                f"{_in_collectives(large) * 1e3:.1f} ms: call fewer and larger ones; in a hybrid "
                "job, lower the degrees of mp, sep or pp"
            )
        elif cause == _COMMUNICATION and not used & {"--strategy", "--set"}:
            text = "fuse gradients and overlap their allreduce (--strategy=recommended)"
            text += _unhidden(small, seconds)
            words = ("--strategy=recommended",)
        elif cause == _COMMUNICATION:
            text = (
                "send less or later: `fleetrun tune --vary fuse_grad_size_in_MB=4,16,64`, "
                "gradient_merge, or 16-bit communication (bf16_allreduce)"
            )
        else:
            text = (
                "the script itself: prints, checkpoints, `.numpy()` and `.item()` of tensors "
                "between steps"
            )
        if cause == _COMMUNICATION and large.link:
            text += f"; {large.link}"
        advice.append(Change(cause, share, text, words))
    return sorted(advice, key=lambda change: -change.share)[:_MOST_ADVICE]


def _unhidden(small: StepTimes, seconds: float) -> str:
    """Return what to do about SECONDS of communication that a step of SMALL cannot hide."""
    if seconds <= small.seconds:
        return ""
    return (
        f"; that hides at most {small.seconds * 1e3:.1f} ms behind the rest of a step, so send "
        "less, too (gradient_merge, bf16_allreduce)"
    )


def _in_collectives(step: StepTimes) -> float:
    """Return how long the collectives that are called from Python take beside waiting for ranks."""
    return max(0.0, step.collectives - step.waiting)


def _starved(step: StepTimes) -> str:
    if step.queued_rank is None:
        return ""
    queued = f"{step.queued * 1e3:.1f} ms of a step for a processor"
    return f"; rank {step.queued_rank} waits {queued}"


def late_rank(step: StepTimes) -> str:
    """Return which rank the others wait for, and why."""
    if step.slowest is None:
        return "no rank is always the last"
    why = f", and {step.late_for}" if step.late_for else ""
    if step.held_by:
        why = f": {step.held_by.removesuffix('.')}"
    return f"rank {step.slowest} is {step.late * 1e3:.1f} ms later than the others{why}"
