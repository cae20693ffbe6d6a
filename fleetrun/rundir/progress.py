"""The step and loss that ranks print, from the last lines of a log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from fleetrun.rundir import reading

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?nan|[-+]?inf"
_STEP = re.compile(
    rb"(?i)(?<![a-z])(?:global[_ ]?step|step|iter(?:ation)?|batch)"
    rb"(?:[ \[\]:=#_]|\bid\b){0,4}(?P<step>\d{1,12})(?![.\d])"
    rb"(?:\s{0,2}(?:/|of)\s{0,2}(?P<total>\d{1,12})(?![.\d]))?"
)
_LOSS = re.compile(rb"(?i)(?<![a-z])loss(?:[ \]:=,'\"]|\bis\b){1,6}(?P<loss>%b)" % _NUMBER.encode())
# As printed by the Trainers of PaddleNLP and PaddleFormers, and by PaddleClas and its siblings.
_THROUGHPUT = re.compile(
    rb"(?i)(tokens|samples)_per_second(?P<device>_per_device)?[\"']?[:= ]{1,3}(%b)"
    rb"|\bips[:= ]{1,3}(%b) ?(tokens?|samples?|images?|sequences?|instances?|words?)/s"
    % (_NUMBER.encode(), _NUMBER.encode())
)
# The number of bytes to read at the end of a log.
_TAIL = 8192


class Progress(NamedTuple):
    """The last output of a rank; None: nothing."""

    step: int | None = None
    loss: float | None = None
    line: str = ""
    # How many steps there will be.
    total: int | None = None
    # As `197.6 samples/s`; empty: nothing.
    throughput: str = ""
    # When that step was reported in a heartbeat; None: it is from the output.
    step_at: float | None = None


def printed(text: bytes, pattern: re.Pattern[bytes] | None = None) -> Progress:
    r"""Return the last line, step and loss in TEXT, the end of a log.

    PATTERN has a group `step` or `loss`, or both, for scripts that print them in another way, and
    may have one `total` for the number of steps.

    >>> printed(b"epoch 1 step: 120/500, loss: 0.5\nsaved\n")
    Progress(step=120, loss=0.5, line='saved', total=500, throughput='', step_at=None)
    """
    own = {} if pattern is None else pattern.groupindex
    of_step = pattern if pattern is not None and "step" in own else _STEP
    of_loss = pattern if pattern is not None and "loss" in own else _LOSS
    seen = Progress()
    for line in reversed([line for line in re.split(rb"[\r\n]+", text) if line.strip()]):
        seen = seen if seen.line else seen._replace(line=line.decode(errors="replace").strip())
        step, loss = of_step.search(line), of_loss.search(line)
        if seen.step is None and step is not None and step["step"].isdigit():
            # From the same line: another may count epochs.
            total = step.groupdict().get("total")
            seen = seen._replace(
                step=int(step["step"]), total=None if total is None else int(total)
            )
        if seen.loss is None and loss is not None and re.fullmatch(_NUMBER, loss["loss"].decode()):
            seen = seen._replace(loss=float(loss["loss"]))
        seen = seen if seen.throughput else seen._replace(throughput=throughput_of(line))
        if seen.step is not None and seen.loss is not None:
            break
    return seen


def throughput_of(line: bytes) -> str:
    """Return the tokens (or else samples) per second in LINE; empty if there are none.

    >>> throughput_of(b"loss: 3.8, interval_samples_per_second: 197.6004, interval_steps_per_se")
    '198 samples/s'
    >>> throughput_of(b"train_samples_per_second: 5.0, train_tokens_per_second_per_device: 6400.25")
    '6.4e+03 tokens/s a device'
    >>> throughput_of(b"ips: 31.25 images/s, eta: 0:01")
    '31.2 images/s'
    """
    matches = [*_THROUGHPUT.finditer(line)]
    best = max(matches, key=lambda match: (match[1] or b"").lower() == b"tokens", default=None)
    if best is None:
        return ""
    number, unit = (best[3], best[1]) if best[1] else (best[4], best[5])
    text = f"{float(number):.3g} {unit.decode().lower().rstrip('s')}s/s"
    return f"{text} a device" if best["device"] else text


def tail(paths: Sequence[str]) -> bytes:
    """Return the end of the log in the files PATHS; what was written last comes last."""
    ordered = sorted(paths, key=reading.written_at)
    return b"\n".join(reading.content(path, _TAIL, from_end=True) or b"" for path in ordered)


def steps_per_second(points: Sequence[tuple[float, int]]) -> float | None:
    """Return the speed by POINTS: times in seconds, and the step that was over at each.

    The first step, which compiles and allocates, is left out: it begins before step 1, and may end
    with the second point of a script that numbers its steps otherwise.

    >>> steps_per_second([(0.0, 0), (5.0, 1), (5.5, 2), (6.0, 3)])
    2.0
    >>> steps_per_second([(5.0, 1), (6.0, 3)])
    2.0
    """
    if len(points) > 2 or (points and points[0][1] == 0):
        points = points[1:]
    if len(points) < 2:
        return None
    (begin, first), (end, last) = points[0], points[-1]
    return (last - first) / (end - begin) if end > begin and last > first else None
