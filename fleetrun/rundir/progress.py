"""The step and loss that ranks print, from the last lines of a log."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

_FLOAT = rb"(?i:[-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?|[-+]?nan|[-+]?inf)"
_STEP = re.compile(
    rb"(?i)(?<![a-z])(?:global[_ ]?step|step|iter(?:ation)?|batch)"
    rb"(?:[ \[\]:=#_]|\bid\b){0,4}(\d{1,12})(?![.\d])"
)
_LOSS = re.compile(rb"(?i)(?<![a-z])loss(?:[ \]:=,'\"]|\bis\b){1,6}(%b)" % _FLOAT)


class Progress(NamedTuple):
    """The last output of a rank; None: nothing."""

    step: int | None = None
    loss: float | None = None
    line: str = ""
    # When that step was reported in a heartbeat; None: it is from the output.
    step_at: float | None = None


def printed(text: bytes) -> Progress:
    r"""Return the last line, step and loss in TEXT, the end of a log.

    >>> printed(b"epoch 1 step: 120/500, loss: 0.5\nsaved\n")
    Progress(step=120, loss=0.5, line='saved', step_at=None)
    """
    seen = Progress()
    for line in reversed([line for line in re.split(rb"[\r\n]+", text) if line.strip()]):
        seen = seen if seen.line else seen._replace(line=line.decode(errors="replace").strip())
        step, loss = _STEP.search(line), _LOSS.search(line)
        if seen.step is None and step is not None:
            seen = seen._replace(step=int(step[1]))
        if seen.loss is None and loss is not None:
            seen = seen._replace(loss=float(loss[1]))
        if seen.step is not None and seen.loss is not None:
            break
    return seen


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
