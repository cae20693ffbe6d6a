"""`fleetrun tune --scaling`: measures how speed grows with devices or hosts, and its limits.

The sizes run in turns, profiled on all ranks. A rank does the same work per step at every size
(weak scaling), so a step that takes longer than at the smallest size loses time, to one of CAUSES.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean, median, stdev
from typing import TYPE_CHECKING, NamedTuple

from fleetrun import argv, conversion, options
from fleetrun.commands import tables
from fleetrun.commands.tune import trials
from fleetrun.errors import UsageError
from fleetrun.plan import hostlist
from fleetrun.records import arguments, metricsfile, names, reading, tracefile, variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from fleetrun.commands.tune.candidates import TuneSpec
    from fleetrun.records.tracefile import SpanRecord, TraceRecord

DATA = "scaling.json"
# What the additional time of a step is lost to.
_DATA, _COMPUTATION, _WAITING, _COMMUNICATION, _OTHER = CAUSES = (
    *("data", "computation", "waiting", "communication"),
    "other",
)
# A smaller share of a step is not worth a change.
_WORTH = 0.03
_MOST_ADVICE = 3
# How much later than the others a rank must be, as a share of a step, to be named.
_LATE = 0.02
# By how many standard errors, unless it is later by this share of a step: in some steps only.
_CERTAIN, _VERY_LATE = 3.0, 0.15
# How often the resources of a run are measured.
_MEASURED_S = 0.5
# Spans in which ranks wait for each other; and waits that are recorded separately.
_MEETINGS = "backward", "run"
_WAITS = "wait", "collective", "sync"
# The efficiency above which something slows the smallest size down.
_SUPERLINEAR = 1.1
# Of the metrics, the last bytes are read; and what fewer bytes on a link show is nothing.
_LONGEST, _LEAST_BYTES = 1 << 20, 1 << 20
# The share of its lateness that one thing must explain.
_MOSTLY = 0.6
# How much of a step a rank must wait for a processor to be named.
_QUEUED = 0.1
# Why a rank is late, the deepest reason first: if it does not compute longer, and if it does.
_IN_LAYERS = (
    "waits {{}} longer in its {}, without computing (a lock, a file, a device)",
    "computes {{}} longer in its {}",
)
_REASONS = {
    "threads": (
        "waits for Python's lock (GIL): its other threads compute for {} of a step{thread}",
    )
    * 2,
    "queued": ("waits {} longer for a processor, which something else uses or a limit holds",) * 2,
    "data": ("waits {} longer for its data",) * 2,
    "forward": tuple(text.format("forward") for text in _IN_LAYERS),
    "backward": tuple(text.format("backward") for text in _IN_LAYERS),
    "update": ("takes {} longer for its update",) * 2,
    "outside": (
        "spends {} longer in the script itself: files, prints, checkpoints, locks",
        "computes {} longer in the script itself",
    ),
}


class JobSize(NamedTuple):
    """A number of ranks or hosts, and the launch options that start them."""

    number: int
    words: tuple[str, ...]


class StepTimes(NamedTuple):
    """The parts of a step of one run, in seconds, averaged over recorded steps and ranks.

    They are those of the ranks that wait if there is one that the others wait for.
    """

    seconds: float
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


class ScaledRun(NamedTuple):
    """One run of a size: the parts of its step, or why they are unknown."""

    step: StepTimes = StepTimes(0.0)
    fault: str = ""
    folder: str = ""
    # What its launch has said of slow ranks: their labels and a sentence.
    remarks: tuple[tuple[tuple[str, ...], str], ...] = ()
    # How many hosts have left no profile.
    unseen_hosts: int = 0


class Change(NamedTuple):
    """Advice: the most that it would save of a step, and launch options that try it."""

    cause: str
    share: float
    text: str
    words: tuple[str, ...] = ()


# -- what to run ----------------------------------------------------------------------------------


def sizes(text: str, spec: TuneSpec) -> tuple[JobSize, ...]:
    """Return the sizes of TEXT, `1,2,4`: ranks on this host, or hosts of the launch's --hosts.

    Raises UsageError unless TEXT lists two or more numbers that the launch has.
    """
    parts = [part.strip() for part in text.split(",")]
    is_valid = all(conversion.is_digits(part) and int(part) for part in parts)
    if not is_valid or len(set(parts)) < 2:
        raise UsageError(
            f"--scaling={text}: give two or more numbers of devices, as in --scaling=1,2,4; with "
            "--hosts, numbers of hosts."
        )
    counts = sorted({int(part) for part in parts})
    for setting in argv.scan(spec.launch, options.TABLE).settings:
        name = setting.option.name
        if name in ("nproc_per_node", "nnodes"):
            raise UsageError(f"--scaling={text} gives {setting.typed} itself; leave that out.")
        if name != "hosts" and "devices" not in (name, setting.option.slot):
            continue
        listed = _listed(setting.raw, "hosts" if name == "hosts" else "devices")
        if counts[-1] > len(listed):
            raise UsageError(f"--scaling={text}: {setting.typed}={setting.raw} has {len(listed)}.")
        return tuple(JobSize(n, (f"{setting.typed}={','.join(listed[:n])}",)) for n in counts)
    return tuple(JobSize(count, (f"--nproc_per_node={count}",)) for count in counts)


def _listed(text: str, kind: str) -> list[str]:
    """Return the single hosts or devices of a list.

    >>> _listed("node[1-2]:4,gpu:8", "hosts"), _listed("0-2,5", "devices")
    (['node1:4', 'node2:4', 'gpu:8'], ['0', '1', '2', '5'])
    """
    if kind == "hosts":
        return list(hostlist.expand(text))
    devices: list[str] = []
    for word in filter(None, text.split(",")):
        span = conversion.parse_range(word)
        devices += [word] if span is None else map(str, span)
    return devices


def measure(spec: TuneSpec, size: JobSize, name: str) -> ScaledRun:
    """Launch SIZE in the folder NAME and return where its steps went."""
    folder = trials.new_folder(spec.out, "trials", name)
    options = _options(spec, size)
    if not any(word.startswith("--metrics_period") for word in options):
        # A run is short.
        options.append(f"--metrics_period={_MEASURED_S}")
    options.append(f"--profile=all:{spec.warmup + 1}-{spec.steps}")
    # One more, as the last recorded step ends when the next begins.
    environ = {variables.STOP_AFTER: str(spec.steps + 1)}
    code = trials.launch(options, spec.script, environ, folder, spec.timeout_s)
    run_dir = folder / "log" / names.LATEST
    events, fault = trials.outcome(code, folder, run_dir, spec.timeout_s)
    traces, unseen_hosts = read_traces(run_dir)
    if fault or not traces:
        return ScaledRun(fault=fault or trials.untimed(run_dir), folder=str(folder))
    remarks = tuple(
        (reading.texts(event.more.get("who")), reading.text(event.more.get("text")))
        for event in events
        if event.event == "warning" and event.more.get("what") == "straggler"
    )
    step = breakdown(traces)
    held_by = next((text for who, text in remarks if f"rank {step.slowest}" in who), "")
    step = step._replace(held_by=held_by, link=slowest_link(run_dir))
    return ScaledRun(step, folder=str(folder), remarks=remarks, unseen_hosts=unseen_hosts)


def _options(spec: TuneSpec, size: JobSize) -> list[str]:
    """Return the options of a launch of SIZE."""
    replaced = {word.partition("=")[0] for word in size.words}
    options = [word for word in spec.launch if word.partition("=")[0] not in replaced]
    return [*options, *size.words]


def refuse_invalid(spec: TuneSpec, job_sizes: Sequence[JobSize]) -> None:
    """Raise what a launch of the largest of JOB_SIZES says if it cannot start, before any runs."""
    trials.refuse_invalid(_options(spec, job_sizes[-1]), spec.script)


def read_traces(run_dir: Path) -> tuple[list[TraceRecord], int]:
    """Return the profiles of all ranks, and how many hosts have left none."""
    hosts = trials.hosts(run_dir)
    traces: list[TraceRecord] = []
    unseen = 1 if hosts[0].plan is None else len(hosts[0].plan.nodes)
    for host in hosts:
        paths = sorted(Path(host.path).glob(names.trace("*")))
        profiles = [trace for path in paths if (trace := tracefile.read(str(path))) is not None]
        traces += profiles
        unseen -= bool(profiles)
    return traces, unseen


def slowest_link(run_dir: Path) -> str:
    """Return what the metrics of the hosts show of the slowest link between them, if anything."""
    links: list[tuple[float, float, str, str]] = []
    for host in trials.hosts(run_dir):
        lines = (
            reading.content(str(Path(host.path) / names.METRICS), _LONGEST, from_end=True) or b""
        )
        records = (metricsfile.parse(line) for line in reversed(lines.splitlines()))
        # The ranks may have closed their connections before the last one.
        last = next((record for record in records if record is not None and record.links), None)
        if last is None:
            continue
        links += [
            (link.acked_bytes / link.busy_s, link.rtt_s, last.host, link.peer)
            for link in last.links
            if link.rtt_s is not None and link.busy_s and link.acked_bytes >= _LEAST_BYTES
        ]
    if not links:
        return ""
    speed, rtt_s, sender, peer = min(links)
    return (
        f"the slowest link between hosts, from {sender} to {peer}, carries "
        f"{conversion.size(speed)} a second with round trips of {rtt_s * 1e3:.1f} ms"
    )


def in_turns(
    spec: TuneSpec, job_sizes: Sequence[JobSize], log: Callable[[str], object], prefix: str = ""
) -> dict[JobSize, list[ScaledRun]]:
    """Run each of JOB_SIZES `spec.repeats` times, in turns; a size that fails is not run again."""
    runs: dict[JobSize, list[ScaledRun]] = {size: [] for size in job_sizes}
    for repeat in range(spec.repeats):
        for place, size in enumerate(job_sizes):
            if any(run.fault for run in runs[size]):
                continue
            run = measure(spec, size, f"scaling-{prefix}{place}-{repeat}")
            runs[size].append(run)
            shown = run.fault or f"{run.step.seconds * 1e3:.1f} ms a step"
            if run.unseen_hosts and not run.fault:
                unseen = conversion.counted(run.unseen_hosts, "host")
                shown += f"; no profile came from {unseen}, so waiting counts as communication"
            log(f"  {' '.join(size.words)}: {shown}")
    return runs


# -- where the time went --------------------------------------------------------------------------


def breakdown(traces: Sequence[TraceRecord]) -> StepTimes:
    """Return the parts of a step, from the profiles of all ranks.

    In the backward, a static program or a collective, ranks wait for the one that has spent most
    time outside it since the last one. Its backward counts, too, unless a reducer of Paddle's waits
    there unrecorded.

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

    return StepTimes(
        seconds=step,
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
    )


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
    more = {
        kind: _more([part.get(kind, 0.0) for part in parts], latest)
        for kind in ("running", *_REASONS)
    }
    explaining = {kind for kind, seconds in more.items() if seconds > _MOSTLY * late}
    # On a busy host, it waits for a processor whenever it has something to compute.
    computes = more["running"] + more["queued"] > _MOSTLY * late
    if "running" in explaining or "data" in explaining:
        # It does not wait for its threads, or they load its data.
        explaining.discard("threads")
    kind = next((kind for kind in _REASONS if kind in explaining), None)
    if kind is None:
        return ""
    thread = traces[latest].thread
    named = f" (mostly {thread})" if thread else ""
    return _REASONS[kind][computes].format(f"{more[kind] * 1e3:.1f} ms", thread=named)


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


def _own_times(trace: TraceRecord) -> list[float]:
    """Return how long TRACE's rank was busy before it could wait for others, each time it could."""
    # What is within another one follows it.
    spans = sorted(
        (span for span in trace.spans if span.kind in (*_MEETINGS, *_WAITS)),
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
        if span.kind == "backward" and (waited_s or not trace.has_reducer):
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


def typical(runs: Sequence[ScaledRun]) -> StepTimes:
    """Return the step of the median run."""
    return sorted((run.step for run in runs), key=lambda step: step.seconds)[len(runs) // 2]


def efficiency(
    small: Sequence[ScaledRun], large: Sequence[ScaledRun]
) -> tuple[float, float, float]:
    """Return the least, median and largest efficiency of the turns: 1.0 means no loss.

    >>> def of(*seconds):
    ...     return [ScaledRun(StepTimes(seconds_of_step)) for seconds_of_step in seconds]
    >>> efficiency(of(1.0, 1.1), of(1.25, 1.1))
    (0.8, 0.9, 1.0)
    """
    ratios = [
        before.step.seconds / after.step.seconds
        for before, after in zip(small, large, strict=False)
        if after.step.seconds
    ]
    return min(ratios), median(ratios), max(ratios)


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
        if share < _WORTH:
            continue
        is_queued = large.queued_mean - small.queued_mean > _MOSTLY * seconds
        words: tuple[str, ...] = ()
        if cause == _DATA:
            text = (
                "give the DataLoader more processes (num_workers=4, persistent_workers=True), or "
                "prepare data before the training"
            )
        elif cause == _COMPUTATION or (cause == _OTHER and is_queued):
            text = "ranks share processors or memory: bind each to its own (--bind=cores)"
            text += _starved(large)
            words = () if "--bind" in used else ("--bind=cores",)
        elif cause == _WAITING:
            text = f"give all ranks the same work; {_slowest(large)}"
        elif cause == _COMMUNICATION and _in_collectives(large) > seconds / 2:
            text = (
                "collectives that the script or its layers call take "
                f"{_in_collectives(large) * 1e3:.1f} ms: call fewer and larger ones; in a hybrid "
                "job, lower the degrees of mp, sep or pp"
            )
        elif cause == _COMMUNICATION and not used & {"--strategy", "--set"}:
            text = "fuse gradients and overlap their allreduce (--strategy=recommended)"
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


def _in_collectives(step: StepTimes) -> float:
    """Return how long the collectives that are called from Python take beside waiting for ranks."""
    return max(0.0, step.collectives - step.waiting)


def _starved(step: StepTimes) -> str:
    if step.queued_rank is None:
        return ""
    queued = f"{step.queued * 1e3:.1f} ms of a step for a processor"
    return f"; rank {step.queued_rank} waits {queued}"


def _slowest(step: StepTimes) -> str:
    if step.slowest is None:
        return "no rank is always the last"
    why = f", and {step.late_for}" if step.late_for else ""
    if step.held_by:
        why = f": {step.held_by.removesuffix('.')}"
    return f"rank {step.slowest} is {step.late * 1e3:.1f} ms later than the others{why}"


# -- what is told ---------------------------------------------------------------------------------


def table(runs: Mapping[JobSize, Sequence[ScaledRun]], width: int = 0) -> str:
    """Return a table of sizes: speed, efficiency and the time lost to each cause."""
    sound = _sound(runs)
    rows: list[tuple[str, ...]] = []
    faults = []
    for size in runs:
        if size not in sound:
            # Beside the figures of others a long error would make the table too wide.
            fault = next(run.fault for run in runs[size] if run.fault)
            faults.append(f"{size.number} failed: {fault}")
            rows.append((str(size.number), "failed"))
            continue
        step, first = typical(runs[size]), sound[0]
        least, middle, most = efficiency(runs[first], runs[size])
        spread = f" ({least:.0%} to {most:.0%})" if size != first and len(runs[size]) > 1 else ""
        parts = lost(typical(runs[first]), step) if size != first else dict.fromkeys(CAUSES)
        shown = ["" if part is None else f"{part * 1e3:+.1f}" for part in parts.values()]
        speedup = f"{middle * size.number / first.number:.2f}"
        row = (str(size.number), f"{step.seconds * 1e3:.1f} ms", speedup, f"{middle:.0%}{spread}")
        rows.append((*row, *shown))
    heads = ("size", "step", "speedup", "efficiency", *CAUSES)
    figures = tables.layout(rows, heads=heads, numbers=len(heads), width=width)
    return "\n".join((figures.rstrip("\n"), *faults))


def run(
    spec: TuneSpec, job_sizes: Sequence[JobSize], log: Callable[[str], object], width: int = 0
) -> int:
    """Measure JOB_SIZES, report the results, and return the exit code."""
    log(f"{len(job_sizes)} sizes, {spec.steps} updates, {spec.repeats} runs each, in turns")
    runs = in_turns(spec, job_sizes, log)
    log(table(runs, width))
    sound = _sound(runs)
    tried: list[dict[str, object]] = []
    if len(sound) > 1:
        log(
            f"From {CAUSES[0]} on: how many milliseconds longer a step takes than at the smallest "
            "size. Speedup and efficiency assume that each rank keeps its batch size."
        )
        advice = changes(typical(runs[sound[0]]), typical(runs[sound[-1]]), spec.launch)
        for text in _remarks(runs, advice):
            log(text)
        if not advice:
            log(f"No loss is large enough to justify a change ({_WORTH:.0%} of a step).")
        for number, change in enumerate(advice, 1):
            at_most = 1 / (1 - min(change.share, 0.99))
            log(
                f"{number}. {change.cause}, {change.share:.0%} of a step: {change.text}; at most "
                f"{at_most:.2f} times as fast."
            )
            row: dict[str, object] = {**change._asdict(), "at_most": at_most}
            row |= {"tried": None, "tried_range": None, "then": ""}
            if change.words:
                row |= _tried(spec, sound[-1], change, f"try{number}-", log)
            tried.append(row)
    document = {
        "schema": 1,
        "launch": arguments.conceal([*spec.launch, *spec.script])[0],
        "steps": spec.steps,
        "warmup": spec.warmup,
        "repeats": spec.repeats,
        "sizes": [_row(size, runs) for size in job_sizes],
        "changes": tried,
    }
    trials.write(spec.out, {DATA: json.dumps(document, indent=1) + "\n"})
    return 0 if len(sound) == len(job_sizes) else 1


def _sound(runs: Mapping[JobSize, Sequence[ScaledRun]]) -> list[JobSize]:
    """Return the sizes of which no run has failed."""
    return [size for size in runs if not any(run.fault for run in runs[size])]


def _remarks(
    runs: Mapping[JobSize, Sequence[ScaledRun]], advice: Sequence[Change]
) -> Iterator[str]:
    """Yield what ADVICE does not say: why speed grows faster than ranks, and slow ranks."""
    sound = _sound(runs)
    first, last = sound[0], sound[-1]
    _, most = max((efficiency(runs[first], runs[size])[0], size) for size in sound[1:])
    if efficiency(runs[first], runs[most])[0] > _SUPERLINEAR:
        small = typical(runs[first])
        why = "see the processors and what else runs on them"
        if small.queued_rank is not None:
            queued = f"{small.queued * 1e3:.1f} ms of a step"
            why = f"rank {small.queued_rank} waits {queued} for a processor"
        yield (
            f"A step with {first.number} takes longer than with {most.number}, so it is slowed "
            f"down ({why}), and efficiencies mean little."
        )
    device = typical(runs[last]).device
    if device not in ("", "cpu"):
        yield (
            f"On a {device}, forward and backward are the time to launch kernels; what these and "
            "collectives take is seen where the script waits for the device."
        )
    for text in dict.fromkeys(text for run in runs[last] for _, text in run.remarks):
        if not any(text.removesuffix(".") in change.text for change in advice):
            yield f"With {last.number}: {text}"


def _tried(
    spec: TuneSpec, size: JobSize, change: Change, prefix: str, log: Callable[[str], object]
) -> dict[str, object]:
    """Run SIZE with and without CHANGE in turns.

    Return how many times as fast it is, in each run, too, and what only its profiles show: a
    strategy's buckets tell a rank that computes longer in its backward from communication.
    """
    changed = JobSize(size.number, (*size.words, *change.words))
    runs = in_turns(spec, (size, changed), lambda _: None, prefix)
    shown = " ".join(change.words)
    fault = next((run.fault for several in runs.values() for run in several if run.fault), "")
    if fault:
        log(f"   Tried {shown}: {fault}")
        return {}
    least, middle, most = efficiency(runs[size], runs[changed])
    spread = f" ({least:.2f} to {most:.2f})" if spec.repeats > 1 else ""
    log(f"   Tried {shown}: {middle:.2f} times as fast{spread}.")
    before, after = typical(runs[size]), typical(runs[changed])
    then = ""
    if before.slowest is None and after.slowest is not None and after.late > _WORTH * after.seconds:
        then = f"{_slowest(after)}; the others wait for it, and not for communication"
        log(f"   Its profiles show more: {then}.")
    return {"tried": middle, "tried_range": [least, most], "then": then}


def _row(size: JobSize, runs: Mapping[JobSize, Sequence[ScaledRun]]) -> dict[str, object]:
    """Return what is kept of SIZE; of a failed one, and without others, only its runs."""
    row: dict[str, object] = {"number": size.number, "words": list(size.words)}
    sound = _sound(runs)
    row |= dict.fromkeys(("step_s", "speedup", "efficiency", "efficiency_range", "lost_s"))
    if size in sound:
        step, first = typical(runs[size]), sound[0]
        least, middle, most = efficiency(runs[first], runs[size])
        row |= {
            "step_s": step.seconds,
            "speedup": middle * size.number / first.number,
            "efficiency": middle,
            "efficiency_range": [least, most],
            "lost_s": lost(typical(runs[first]), step),
        }
    row["remarks"] = list(dict.fromkeys(text for run in runs[size] for _, text in run.remarks))
    row["runs"] = [
        {"fault": run.fault, "folder": run.folder, **run.step._asdict()} for run in runs[size]
    ]
    return row
