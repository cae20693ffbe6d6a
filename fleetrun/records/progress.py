"""Step and loss as ranks print them: what the last lines of a log tell."""

from __future__ import annotations

import re
from typing import NamedTuple

_NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?|[-+]?nan|[-+]?inf"
_STEP = re.compile(
    rb"(?i)(?<![a-z])(?:global[_ ]?step|step|iter(?:ation)?|batch)"
    rb"(?:[ \[\]:=#_]|\bid\b){0,4}(\d{1,12})(?![.\d])"
)
_LOSS = re.compile(rb"(?i)(?<![a-z])loss(?:[ \]:=,'\"]|\bis\b){1,6}(%b)" % _NUMBER.encode())


class Progress(NamedTuple):
    """What a rank has said last; None: nothing."""

    step: int | None = None
    loss: float | None = None
    line: str = ""


def of(text: bytes, pattern: re.Pattern[bytes] | None = None) -> Progress:
    r"""Return what the end of a log, TEXT, tells: the last line, and the last step and loss.

    PATTERN has a group `step` or `loss`, or both, for scripts that print them in another way.

    >>> of(b"epoch 1 step: 120, loss: 0.5\nsaved\n")
    Progress(step=120, loss=0.5, line='saved')
    """
    lines = [line for line in re.split(rb"[\r\n]+", text) if line.strip()]
    if not lines:
        return Progress()
    step: int | None = None
    loss: float | None = None
    for line in reversed(lines):
        if step is None:
            step = _whole(_found(line, _STEP, pattern, "step"))
        if loss is None:
            loss = _real(_found(line, _LOSS, pattern, "loss"))
        if step is not None and loss is not None:
            break
    return Progress(step, loss, lines[-1].decode(errors="replace").strip())


def _found(
    line: bytes, usual: re.Pattern[bytes], pattern: re.Pattern[bytes] | None, group: str
) -> bytes | None:
    """Return what LINE says of GROUP first."""
    is_own = pattern is not None and group in pattern.groupindex
    found = (pattern if pattern is not None and is_own else usual).search(line)
    return None if found is None else found[group if is_own else 1]


def _whole(text: bytes | None) -> int | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _real(text: bytes | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None
