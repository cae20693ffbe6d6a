"""Draws charts as SVG: lanes, lines, columns and heat maps, coloured by a style sheet; pure."""

from __future__ import annotations

import base64
import functools
import html
import math
import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from fleetrun.plan.visible import visible

# The size of every chart in units of the picture; the page scales it.
_WIDTH, _RIGHT, _TOP, _BOTTOM = 800, 12, 8, 38
_CHARACTER, _WIDEST = 7.2, 30
# The largest height of a lane, of all lanes together, and the smallest of a lane with gaps.
_LANE, _MOST, _GAPPED = 20, 800, 3
_TICKS = 6
_LINES = 260
_FEW_POINTS = 30
# The anchors of matplotlib's viridis: dark is low, also in print and for colour-blind people.
_SHADES = ((68, 1, 84), (59, 82, 139), (33, 145, 140), (94, 201, 98), (253, 231, 37))
_MOST_COLUMNS = 400


class Segment(NamedTuple):
    """A piece of a lane, from BEGIN to END; TIP is its tooltip."""

    lane: int
    begin: float
    end: float
    color: str
    tip: str


class Line(NamedTuple):
    """A line through points whose Y may be None: a gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    color: str
    faint: bool = False


class _Scale(NamedTuple):
    """An axis: maps its numbers to units of the picture."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        share = (value - self.low) / ((self.high - self.low) or 1.0)
        return round(self.begin + share * (self.end - self.begin), 2)

    def ticks(self) -> list[float]:
        """Return some round numbers of the axis."""
        rough = ((self.high - self.low) or 1.0) / _TICKS
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough)
        first = math.ceil(self.low / step)
        return [round(step * at, 12) for at in range(first, math.floor(self.high / step) + 1)]


def lanes(
    labels: Sequence[str],
    segments: Iterable[Segment],
    unit: str,
    colors: Iterable[tuple[str, str]] = (),
    moments: Sequence[tuple[float, str]] = (),
) -> str:
    """Return SEGMENTS in the lanes of LABELS, over an axis of UNIT that begins at 0.

    COLORS are names and colours of the legend; MOMENTS are marks below the axis' top.
    """
    segments = list(segments)
    lane = max(1.0, min(_LANE, _MOST / max(len(labels), 1)))
    left = _left(labels)
    top = _TOP + (_LANE if moments else 0)
    bottom = top + lane * len(labels)
    longest = max((piece.end for piece in segments), default=0.0)
    x = _Scale(0.0, max(longest, *(at for at, _ in moments), 1e-9), left, _WIDTH - _RIGHT)
    parts = [_below(x, top, bottom, unit), _names(labels, left, top, lane)]
    # Between very narrow lanes gaps only flicker, and so would seams: each covers the one before.
    gap = lane * 0.1 if lane >= _GAPPED else 0.0
    high = lane - 2 * gap if gap else 1.5 * lane
    for piece in segments:
        wide = max(round(x(piece.end) - x(piece.begin), 2), 0.5)
        parts.append(
            f'<rect class="point" x="{x(piece.begin)}" y="{top + piece.lane * lane + gap:.2f}" '
            f'width="{wide}" height="{high:.2f}" fill="{piece.color}">'
            f"{_tip(piece.tip)}</rect>"
        )
    for at, tip in moments:
        parts.append(
            f'<path class="moment" d="M{x(at)} {_TOP + 2}l6 6-6 6-6-6z">{_tip(tip)}</path>'
        )
    return _picture(bottom + _BOTTOM, parts, colors)


def lines(curves: Sequence[Line], below: str, beside: str, *, from_zero: bool = False) -> str:
    """Return CURVES over an axis titled BELOW and beside one titled BESIDE.

    The page's script shows the values under the mouse, by `data-scale`.
    """
    across = [at for line in curves for at in line.x]
    values = [value for line in curves for value in line.y if value is not None]
    low, high = min(values, default=0.0), max(values, default=1.0)
    if from_zero:
        low = min(low, 0.0)
    if high == low:
        # A level line is in the middle.
        room = (abs(low) or 1.0) / 2
        low, high = low if from_zero else low - room, high + room
    y = _Scale(low, high, _LINES - _BOTTOM, _TOP)
    labels = [f"{tick:g}" for tick in y.ticks()]
    left = _left(labels) + 14
    x = _Scale(min(across, default=0.0), max(across, default=1.0), left, _WIDTH - _RIGHT)
    parts = [_below(x, _TOP, _LINES - _BOTTOM, below)]
    for tick, label in zip(y.ticks(), labels, strict=True):
        parts.append(
            f'<path class="grid" d="M{left} {y(tick)}H{_WIDTH - _RIGHT}"/>'
            f'<text class="end" x="{left - 6}" y="{y(tick) + 4}">{label}</text>'
        )
    parts.append(
        f'<text class="middle" transform="rotate(-90)" x="{-_LINES / 2 + 15}" y="11">'
        f"{_text(beside)}</text>"
    )
    for line in curves:
        place = f'class="line{" faint" * line.faint}" stroke="{line.color}"'
        name = f' data-name="{_text(line.name)}"' * (not line.faint)
        parts.append(f'<path {place}{name} d="{_path(line, x, y)}"/>')
        if len(line.x) < _FEW_POINTS:
            parts += [
                f'<circle cx="{x(at)}" cy="{y(value)}" r="2.5" fill="{line.color}"/>'
                for at, value in zip(line.x, line.y, strict=True)
                if value is not None
            ]
    scale = " ".join(f"{number:.9g}" for number in (*x, *y))
    named = [(line.name, line.color) for line in curves if not line.faint]
    return _picture(_LINES, parts, named if len(named) > 1 else (), f' data-scale="{scale}"')


def columns(named: Sequence[tuple[str, float]], unit: str, color: str) -> str:
    """Return a lane for each of NAMED, as long as its value in UNIT."""
    segments = [
        Segment(at, 0.0, value, color, f"{name}: {value:g} {unit}")
        for at, (name, value) in enumerate(named)
    ]
    return lanes([name for name, _ in named], segments, unit)


def shades(
    labels: Sequence[str],
    at: Sequence[float],
    values: Sequence[Sequence[float | None]],
    below: str,
    unit: str,
) -> str:
    """Return VALUES[label][moment] as a heat map: a row of pixels for each of LABELS, over AT."""
    known = [value for row in values for value in row if value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    wide = min(len(at), _MOST_COLUMNS)
    step = (at[-1] - at[0]) / max(wide - 1, 1)
    picked = [min(bisect_left(at, at[0] + step * pixel), len(at) - 1) for pixel in range(wide)]
    span = (high - low) or 1.0
    rows = [
        bytes(
            0 if (value := row[moment]) is None else 1 + round((value - low) / span * 254)
            for moment in picked
        )
        for row in values
    ]
    lane = max(1.0, min(_LANE, _MOST / len(labels)))
    left = _left(labels)
    bottom = _TOP + lane * len(labels)
    x = _Scale(at[0], at[-1], left, _WIDTH - _RIGHT)
    image = (
        f'<image class="map" x="{left}" y="{_TOP}" width="{_WIDTH - _RIGHT - left}" '
        f'height="{bottom - _TOP:g}" preserveAspectRatio="none" href="{_png(rows)}"/>'
    )
    return _picture(
        bottom + _BOTTOM,
        (_below(x, _TOP, bottom, below), image, _names(labels, left, _TOP, lane)),
        [(f"{low:.4g} {unit}", _shade(0)), (f"{high:.4g} {unit}", _shade(254))],
    )


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Return the moving average of VALUES, over a fiftieth of them on both sides.

    >>> smoothed([1.0, None, 3.0, 5.0])
    [1.0, None, 4.0, 4.0]
    """
    near = max(1, len(values) // 50)
    sums = [0.0, *accumulate(value or 0.0 for value in values)]
    counts = [0, *accumulate(int(value is not None) for value in values)]
    means: list[float | None] = []
    for at, value in enumerate(values):
        left, right = max(0, at - near), min(len(values), at + near + 1)
        mean = (sums[right] - sums[left]) / max(counts[right] - counts[left], 1)
        means.append(None if value is None else mean)
    return means


def _path(line: Line, x: _Scale, y: _Scale) -> str:
    """Return the path of LINE, interrupted by its gaps."""
    path, is_down = [], False
    for at, value in zip(line.x, line.y, strict=True):
        if value is not None:
            path.append(f"{'L' if is_down else 'M'}{x(at):g} {y(value):g}")
        is_down = value is not None
    return "".join(path)


def _below(x: _Scale, top: float, bottom: float, title: str) -> str:
    ticks = "".join(
        f'<path class="grid" d="M{x(tick)} {top}V{bottom:g}"/>'
        f'<text class="middle" x="{x(tick)}" y="{bottom + 15:g}">{tick:g}</text>'
        for tick in x.ticks()
    )
    middle = (x.begin + x.end) / 2
    return f'{ticks}<text class="middle" x="{middle:g}" y="{bottom + 31:g}">{_text(title)}</text>'


def _names(labels: Sequence[str], left: float, top: float, lane: float) -> str:
    every = max(1, math.ceil(16 / lane))
    return "".join(
        f'<text class="end" x="{left - 6:g}" y="{top + (at + 0.5) * lane + 4:g}">'
        f"{_text(labels[at][:_WIDEST])}</text>"
        for at in range(0, len(labels), every)
    )


def _left(labels: Iterable[str]) -> float:
    return 14 + _CHARACTER * max((len(label[:_WIDEST]) for label in labels), default=0)


def _picture(
    height: float, parts: Iterable[str], colors: Iterable[tuple[str, str]], more: str = ""
) -> str:
    legend = "".join(
        f'<span><svg viewBox="0 0 1 1"><rect width="1" height="1" fill="{color}"/></svg>'
        f"{_text(name)}</span>"
        for name, color in colors
    )
    return (
        f'<div class="legend">{legend}</div>'
        f'<svg viewBox="0 0 {_WIDTH} {height:g}"{more}>{"".join(parts)}</svg>'
    )


def _shade(level: int) -> str:
    return "#" + bytes(_palette()[level + 1]).hex()


@functools.cache
def _palette() -> list[tuple[int, ...]]:
    """Return 256 colours: 0 means no value, the others go from low to high."""
    colors: list[tuple[int, ...]] = [(0, 0, 0)]
    for level in range(255):
        place, share = divmod(level / 254 * (len(_SHADES) - 1), 1)
        near = _SHADES[int(place)]
        far = _SHADES[min(int(place) + 1, len(_SHADES) - 1)]
        colors.append(tuple(round(a + (b - a) * share) for a, b in zip(near, far, strict=True)))
    return colors


def _png(rows: Sequence[bytes]) -> str:
    """Return ROWS of palette numbers as the data URL of a PNG picture."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        body = kind + content
        return struct.pack(">I", len(content)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", len(rows[0]), len(rows), 8, 3, 0, 0, 0)
    colors = b"".join(map(bytes, _palette()))
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    parts = (("IHDR", head), ("PLTE", colors), ("tRNS", b"\0"), ("IDAT", pixels), ("IEND", b""))
    content = b"\x89PNG\r\n\x1a\n" + b"".join(chunk(kind.encode(), part) for kind, part in parts)
    return f"data:image/png;base64,{base64.b64encode(content).decode()}"


def _tip(text: str) -> str:
    return f"<title>{_text(text)}</title>"


def _text(text: str) -> str:
    return html.escape(visible(text))
