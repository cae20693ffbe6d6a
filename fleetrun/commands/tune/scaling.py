"""`fleetrun tune --scaling`: measures how speed grows with devices or hosts, and its limits.

The sizes run in turns, profiled on all ranks.
"""

from __future__ import annotations

import json
from math import hypot
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fleetrun import argv, conversion, options
from fleetrun.commands import tables
from fleetrun.commands.tune import losses, trials
from fleetrun.commands.tune.losses import CAUSES, Change, StepTimes
from fleetrun.errors import UsageError
from fleetrun.plan import hostlist
from fleetrun.records import arguments, metricsfile, names, reading, tracefile, variables

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fleetrun.commands.tune.candidates import TuneSpec
    from fleetrun.records.tracefile import TraceRecord

DATA = "scaling.json"
# How often the resources of a run are measured.
_MEASURED_S = 0.5
# Something slows the smallest size down if an efficiency is above this, or if more than this share
# of its step is not part of others'.
_SUPERLINEAR, _SLOWED = 1.1, 0.1
# Of the metrics, the last bytes are read; and what fewer bytes on a link show is nothing.
_LONGEST, _LEAST_BYTES = 1 << 20, 1 << 20


class JobSize(NamedTuple):
    """A number of ranks or hosts, and the launch options that start them."""

    number: int
    words: tuple[str, ...]


class ScaledRun(NamedTuple):
    """One run of a size: the parts of its step, or why they are unknown."""

    step: StepTimes = StepTimes(0.0)
    fault: str = ""
    folder: str = ""
    # What its launch has said of slow ranks: their labels and a sentence.
    remarks: tuple[tuple[tuple[str, ...], str], ...] = ()
    # How many hosts have left no profile.
    unseen_hosts: int = 0


class Figures(NamedTuple):
    """What a size has reached: its typical step, and that of the smallest size to compare with."""

    base: StepTimes
    step: StepTimes
    speedup: float
    # The least, that of `base` and `step`, and the largest.
    efficiency: tuple[float, float, float]
    # By cause.
    lost: Mapping[str, float]
    # Whether the script seems to divide a global batch.
    is_divided: bool


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
    step = losses.breakdown(traces)
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
    for place, host in enumerate(hosts):
        paths = sorted(Path(host.path).glob(names.trace("*")))
        profiles = [trace for path in paths if (trace := tracefile.read(str(path))) is not None]
        traces += (trace._replace(host=place) for trace in profiles)
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


def typical(runs: Sequence[ScaledRun]) -> StepTimes:
    """Return the step of the median run, of which everything that is told of RUNS derives.

    Of two, it is the faster one: what else runs on a host makes steps longer, never shorter.
    """
    return sorted((run.step for run in runs), key=lambda step: step.seconds)[(len(runs) - 1) // 2]


def efficiency(
    small: Sequence[ScaledRun], large: Sequence[ScaledRun], *, has_errors: bool = False
) -> tuple[float, float, float]:
    """Return the least efficiency of the turns, that of the typical runs, and the largest.

    1.0 means no loss. The range of a single turn, or if it HAS_ERRORS, is that of its steps, too.

    >>> def of(*seconds):
    ...     return [ScaledRun(StepTimes(seconds_of_step)) for seconds_of_step in seconds]
    >>> efficiency(of(1.0, 3.0, 2.0), of(1.0, 4.0, 4.0))
    (0.5, 0.5, 1.0)
    """
    pairs = [(before.step, after.step) for before, after in zip(small, large, strict=False)]
    ratios = [before.seconds / after.seconds for before, after in pairs]
    error = 1.0
    if has_errors or len(pairs) == 1:
        error += 2 * max(hypot(*(step.error / step.seconds for step in pair)) for pair in pairs)
    # Always between the others, as the median keeps the order of the turns.
    middle = typical(small).seconds / typical(large).seconds
    return min(ratios) / error, middle, max(ratios) * error


def gain(
    before: Sequence[ScaledRun], after: Sequence[ScaledRun]
) -> tuple[tuple[float, float, float], str]:
    """Return how many times as fast AFTER a change is (least, typical, most), and the text of that.

    All runs BEFORE it count: that one of them had to share its processors is no gain.
    """
    turns = len(before) // len(after)
    least, middle, most = times = efficiency(before, [*after] * turns, has_errors=True)
    text = f"{middle:.2f} times as fast"
    if f"{least:.2f}" != f"{most:.2f}":
        text += f" ({least:.2f} to {most:.2f})"
        text += ", no more than the spread of the runs" * (least <= 1 <= most)
    return times, text


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
        (_, step, speedup, (least, middle, most), lost, _) = figures(size, runs)
        has_spread = size != sound[0] and f"{least:.0%}" != f"{most:.0%}"
        spread = f" ({least:.0%} to {most:.0%})" if has_spread else ""
        shown = [f"{part * 1e3:+.1f}" if size != sound[0] else "" for part in lost.values()]
        row = (str(size.number), f"{step.seconds * 1e3:.1f} ms", f"{speedup:.2f}")
        rows.append((*row, f"{middle:.0%}{spread}", *shown))
    heads = ("size", "step", "speedup", "efficiency", *CAUSES)
    shown_rows = tables.layout(rows, heads=heads, numbers=len(heads), width=width)
    return "\n".join((shown_rows.rstrip("\n"), *faults))


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
        largest = figures(sound[-1], runs)
        advice = losses.changes(largest.base, largest.step, spec.launch)
        for text in _remarks(runs, advice):
            log(text)
        if not advice:
            log(f"No loss is large enough to justify a change ({losses.WORTH:.0%} of a step).")
        for number, change in enumerate(advice, 1):
            at_most = 1 / (1 - min(change.share, 0.99))
            log(
                f"{number}. {change.cause}, {change.share:.0%} of a step: {change.text}; at most "
                f"{at_most:.2f} times as fast."
            )
            row: dict[str, object] = {**change._asdict(), "at_most": at_most}
            row |= {"tried": None, "tried_range": None, "then": ""}
            if change.words:
                row |= _tried(spec, runs, change, f"try{number}-", log)
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


def figures(size: JobSize, runs: Mapping[JobSize, Sequence[ScaledRun]]) -> Figures:
    """Return what SIZE has reached, compared with the smallest one of RUNS."""
    first = _sound(runs)[0]
    share = first.number / size.number
    small, step = typical(runs[first]), typical(runs[size])
    is_divided = size != first and losses.is_divided(small, step, share)
    speedup = small.seconds / step.seconds / (1 if is_divided else share)
    base = losses.divided(small, share) if is_divided else small
    least, middle, most = (1.0, 1.0, 1.0) if size == first else efficiency(runs[first], runs[size])
    divided = base.seconds / small.seconds
    efficiencies = least * divided, middle * divided, most * divided
    return Figures(base, step, speedup, efficiencies, losses.lost(base, step), is_divided)


def _sound(runs: Mapping[JobSize, Sequence[ScaledRun]]) -> list[JobSize]:
    """Return the sizes of which no run has failed."""
    return [size for size in runs if not any(run.fault for run in runs[size])]


def _remarks(
    runs: Mapping[JobSize, Sequence[ScaledRun]], advice: Sequence[Change]
) -> Iterator[str]:
    """Yield what ADVICE does not say: why speed grows faster than ranks, and slow ranks."""
    sound = _sound(runs)
    first, last = sound[0], sound[-1]
    reached = figures(last, runs)
    step = reached.step
    if reached.is_divided:
        yield (
            f"With {last.number} ranks, a forward takes {step.forward * 1e3:.1f} ms instead of "
            f"{typical(runs[first]).forward * 1e3:.1f}, as if the script divided a global batch: "
            "so efficiencies compare with a step whose data, forward and backward are divided, too."
        )
    if last.number > 1 and not losses.communicates(step):
        yield (
            f"With {last.number}, no rank was seen to communicate: each seems to train by itself, "
            "without DataParallel, fleet or a collective."
        )
    yield from _slowdowns(runs, reached, advice)
    if step.device not in ("", "cpu"):
        yield (
            f"On a {step.device}, forward and backward are the time to launch kernels; what these "
            "and collectives take is seen where the script waits for the device."
        )
    for text in dict.fromkeys(text for run in runs[last] for _, text in run.remarks):
        if not any(text.removesuffix(".") in change.text for change in advice):
            yield f"With {last.number}: {text}"


def _slowdowns(
    runs: Mapping[JobSize, Sequence[ScaledRun]], reached: Figures, advice: Sequence[Change]
) -> Iterator[str]:
    """Yield what makes steps of RUNS longer at any size, so that efficiencies mean less.

    REACHED are the figures of the largest size.
    """
    sound = _sound(runs)
    first, last = sound[0], sound[-1]
    step, lost = reached.step, reached.lost
    slow = max((typical(runs[size]) for size in sound), key=lambda step: step.slow_steps)
    if slow.slow_steps:
        yield (
            f"Steps take {slow.slowdown:.0f} times as long up to number {slow.slow_steps} of those "
            "that count (compiling, caches, autotuning): raise --warmup by "
            f"{slow.slow_steps} or more, and --steps by as much."
        )
    certain, most = max((figures(size, runs).efficiency[0], size) for size in sound[1:])
    if certain > _SUPERLINEAR:
        small = typical(runs[first])
        why = "see the processors and what else runs on them"
        if small.queued_rank is not None:
            queued = f"{small.queued * 1e3:.1f} ms of a step"
            why = f"rank {small.queued_rank} waits {queued} for a processor"
        yield (
            f"A step with {first.number} takes longer than with {most.number}, so it is slowed "
            f"down ({why}), and efficiencies mean little."
        )
    least = min(("data", "other"), key=lost.__getitem__)
    # For what the first rank alone does, others wait, and in the meantime their data comes.
    moved = lost["waiting"] if step.slowest == 0 or least == "data" else 0.0
    is_advised = any(change.cause == "waiting" for change in advice)
    if (
        step.slowest == 0
        and not is_advised
        and -lost[least] > moved / 2 > _SLOWED / 2 * step.seconds
    ):
        yield (
            f"With {last.number}, {losses.late_rank(step)}; with {first.number}, a step contains "
            "the same, so its removal makes both faster."
        )
    if certain <= _SUPERLINEAR and -lost[least] - moved > _SLOWED * reached.base.seconds:
        yield (
            f"A step with {first.number} has {-lost[least] * 1e3:.1f} ms of {least} time that one "
            f"with {last.number} does not have, so it was slowed down, and efficiencies are too "
            "high."
        )


def _tried(
    spec: TuneSpec,
    known: Mapping[JobSize, Sequence[ScaledRun]],
    change: Change,
    prefix: str,
    log: Callable[[str], object],
) -> dict[str, object]:
    """Run the largest of the KNOWN sizes with and without CHANGE in turns.

    Return how many times as fast it is, in each run, too, and what only its profiles show: a
    strategy's buckets tell a rank that computes longer in its backward from communication.
    """
    size = _sound(known)[-1]
    changed = JobSize(size.number, (*size.words, *change.words))
    runs = in_turns(spec, (size, changed), lambda _: None, prefix)
    shown = " ".join(change.words)
    fault = next((run.fault for several in runs.values() for run in several if run.fault), "")
    if fault:
        log(f"   Tried {shown}: {fault}")
        return {}
    (least, middle, most), text = gain([*runs[size], *known[size]], runs[changed])
    log(f"   Tried {shown}: {text}.")
    before, after = typical(runs[size]), typical(runs[changed])
    then = ""
    if (
        before.slowest is None
        and after.slowest is not None
        and after.late > losses.WORTH * after.seconds
    ):
        then = f"{losses.late_rank(after)}; the others wait for it, and not for communication"
        log(f"   Its profiles show more: {then}.")
    return {"tried": middle, "tried_range": [least, most], "then": then}


def _row(size: JobSize, runs: Mapping[JobSize, Sequence[ScaledRun]]) -> dict[str, object]:
    """Return what is kept of SIZE; of a failed one, and without others, only its runs."""
    row: dict[str, object] = {"number": size.number, "words": list(size.words)}
    row |= dict.fromkeys(("step_s", "speedup", "efficiency", "efficiency_range"))
    row |= dict.fromkeys(("lost_s", "is_divided"))
    if size in _sound(runs):
        (_, step, speedup, (least, middle, most), lost, is_divided) = figures(size, runs)
        row |= {
            "step_s": step.seconds,
            "speedup": speedup,
            "efficiency": middle,
            "efficiency_range": [least, most],
            "lost_s": lost,
            "is_divided": is_divided,
        }
    row["remarks"] = list(dict.fromkeys(text for run in runs[size] for _, text in run.remarks))
    row["runs"] = [
        {"fault": run.fault, "folder": run.folder, **run.step._asdict()} for run in runs[size]
    ]
    return row
