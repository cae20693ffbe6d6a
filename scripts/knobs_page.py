"""Writes docs/knobs.md: .venv/bin/python scripts/knobs_page.py [BENCHMARK.json ...].

What is known of each knob comes from fleetrun/strategy, what was measured from docs/knobs.json,
into which the comparisons of `scripts/bench strategy --json BENCHMARK.json` are taken first.
"""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pages import DOCS, cell, table

PAGE = DOCS / "knobs.md"
MEASURED = DOCS / "knobs.json"

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fleetrun.strategy.fields import Field

BEGIN = """\
<!-- made by scripts/knobs_page.py from fleetrun/strategy and docs/knobs.json: edit those -->
# Knobs of a strategy (策略字段)

What each field of a [strategy](strategies.md) does, where it takes effect, and, where it was
measured, what it makes of a step's time. The table after the first update says what it came to in
your job; `fleetrun strategy show FIELD` prints what stands here, and `fleetrun tune` measures with
your script.

* **effective**: fleetrun or Paddle does it, and a run has shown it. **no effect**: Paddle takes the
  setting, and nothing changes. **refused**: Paddle would stop, or train wrongly; a job that asks
  for it does not start. **untested**: only a GPU can tell, and none has been asked.
* {gpus}
* {legacy}

## Overview

A cell is for CPU / GPU where they differ.
"""
MODELS = {
    "many": "300 gradients of at most 4 KB",
    "many-static": "300 gradients of at most 4 KB, static graph",
    "adam": "300 gradients of at most 4 KB, Adam",
    "adam-static": "300 gradients of at most 4 KB, Adam, static graph",
    "momentum-static": "300 gradients of at most 4 KB, Momentum, static graph",
    "resnet": "ResNet-18, 45 MB",
    "large": "one gradient of 16 MB",
    "wide": "ten layers, 100 MB",
    "wide-adam-static": "ten layers, 100 MB, Adam, static graph",
    "layers": "24 layers, 1.6 MB",
    "tall-static": "24 layers, 1.6 MB, batches of 4096, static graph",
    "tiny": "1 KB",
}
HEADINGS = {
    "strategy": "Fields of `strategy:`",
    "build_strategy": "Fields of `build_strategy:`",
    "execution_strategy": "Fields of `execution_strategy:`",
}
# What takes effect on CPUs, but by itself makes nothing of a step.
UNMEASURED = {
    "hybrid_configs": "its groups are for what the script does with them (see fleetrun tune)",
    "without_graph_optimization": "it is on by itself, and false is refused",
}
VARIABLES = """
## Variables: `flags:`, `nccl:`, `env:`

Every rank gets them; what is exported already wins, and a line says so.
"""
HOW = """
*How it was measured*: `scripts/bench strategy` launches both sides, which train in turns. *Counted*
is what the first side's own table gave as evidence, and the allreduces of the other side where they
are more or fewer. *Memory* is the most that a rank of either side held, Paddle included. The ratio
is that of the times of a step (below 1: the first side is faster), with the interval that has the
median with 95 %. Two ranks on one machine without GPUs, over gloo, so what goes over a network is
not in it unless a bandwidth is named: then two namespaces with a link. The machine was shared, as
the load says. What is counted is the same in every run; times are what they were there: both sides
met the load alike, but what waits for each other often, such as many small allreduces, pays more
for it than on a machine of its own. A ratio is in bold where 1 lies outside its interval; elsewhere
the times show no difference.
"""


def overview() -> str:
    """Return the table of all knobs: their status by kind of graph and Paddle."""
    from fleetrun.strategy import fields

    rows = []
    for field in fields.TABLE:
        cells = [f"[`{field.name}`](#{anchor(field.name)})"]
        for graph in fields.GRAPHS:
            for paddle in fields.PADDLES:
                found = [
                    fields.outcome(field, paddle=paddle, graph=graph, device=device).status
                    for device in fields.DEVICES
                ]
                cells.append(" / ".join(dict.fromkeys(found)))
        rows.append([*cells, "yes" if of_field(field.name) else ""])
    heads = ["knob", *(f"{g} {p}" for g in ("dynamic", "static") for p in fields.PADDLES)]
    return table([*heads, "measured"], rows)


def anchor(name: str) -> str:
    """Return what GitHub makes of the heading NAME."""
    return re.sub(r"[^\w-]", "", name.lower())


def section(field: Field) -> str:
    """Return all about FIELD."""
    from fleetrun.strategy import explanation, fields, schema

    lines = [f"\n### {field.name}\n", schema.describe(field)]
    if field.kind == "configs":
        lines += ["", *(f"* `{key.name}`: {key.doc} {explanation.kind(key)}" for key in field.keys)]
    else:
        lines.append(f"Give it as: {explanation.kind(field).removesuffix(']')}".replace(" [", "; "))
    if field.aliases:
        lines.append(f"Also written {', '.join(f'`{one}`' for one in field.aliases)}.")
    places = [(p, g, d) for g in fields.GRAPHS for p in fields.PADDLES for d in fields.DEVICES]
    found = explanation.outcomes(field, places)
    rows = [[status, cell(reason), shortly(where)] for (status, reason), where in found.items()]
    text = "\n".join(lines) + "\n" + table(["status", "why", "where"], rows) + measured(field)
    sets = " ".join(f"--set {word}" for word in explanation.sets(field))
    return f"{text}\n```text\nfleetrun {sets} train.py\n```\n"


def shortly(where: str) -> str:
    """Return WHERE, places as `dygraph 2.6.2 cpu`, with those together that are all of a kind.

    >>> shortly("static 2.6.2 cpu, static 2.6.2 gpu, static 3.3.1 cpu, dygraph 3.3.1 gpu")
    'static 2.6.2, static 3.3.1 CPU, dynamic 3.3.1 GPU'
    """
    from fleetrun.strategy import fields

    if where == "everywhere":
        return where
    found: dict[str, dict[str, list[str]]] = {}
    for graph, paddle, device in (place.split(" ") for place in where.split(", ")):
        found.setdefault(graph, {}).setdefault(paddle, []).append(device)
    parts = []
    for graph, paddles in found.items():
        name = graph.replace("dygraph", "dynamic")
        devices = {tuple(each) for each in paddles.values()}
        if len(paddles) == len(fields.PADDLES) and len(devices) == 1:
            parts.append(f"{name}{_device(devices.pop())}")
        else:
            parts += [f"{name} {paddle}{_device(tuple(each))}" for paddle, each in paddles.items()]
    return ", ".join(parts)


def _device(devices: tuple[str, ...]) -> str:
    return f" {devices[0].upper()}" if len(devices) == 1 else ""


def of_field(name: str) -> list[dict[str, Any]]:
    """Return the comparisons whose sides differ in the field NAME."""
    return [one for one in read() if name in one["knobs"]]


def ratio(one: dict[str, Any]) -> str:
    """Return the ratio of the comparison ONE with its interval, in bold where 1 is not in that.

    >>> ratio({"ratio": 0.8, "low": 0.7, "high": 0.9}), ratio({"ratio": 1, "low": 0.9, "high": 1.1})
    ('**0.80** (0.70-0.90)', '1.00 (0.90-1.10)')
    """
    mark = "" if one["low"] <= 1 <= one["high"] else "**"
    return f"{mark}{one['ratio']:.2f}{mark} ({one['low']:.2f}-{one['high']:.2f})"


def measured(field: Field) -> str:
    """Return the measured effect of FIELD, or why there is none."""
    rows = [
        [
            cell(one["about"]),
            f"{MODELS[one['model']]}; {one['paddle']}"
            + (f"; {one['link']}" if one["link"] else ""),
            cell(one.get("counted", "")),
            "{:.0f} MB, {:.0f} MB".format(*one["peak_mb"]) if "peak_mb" in one else "",
            f"{one['ms'][0]:g} ms, {one['ms'][1]:g} ms",
            ratio(one),
            f"{one['date']}, {one['cpus']} processors, load {one['load']:.0f}",
        ]
        for one in of_field(field.name)
    ]
    heads = ["measured", "gradients; Paddle", "counted", "memory", "a step", "ratio", "on"]
    return table(heads, rows) if rows else f"\n{why_not_measured(field)}\n"


def why_not_measured(field: Field) -> str:
    """Return why nothing was measured of FIELD, in a sentence; LookupError where something can be.

    >>> from fleetrun.strategy import fields
    >>> why_not_measured(fields.find("strategy", "dgc"))
    'Not measured: it takes effect on GPUs only, and none has been asked.'
    """
    from fleetrun.strategy import fields

    if field.name in UNMEASURED:
        return f"Not measured: {UNMEASURED[field.name]}."
    found = {
        device: {
            fields.outcome(field, paddle=paddle, graph=graph, device=device).status
            for paddle in fields.PADDLES
            for graph in fields.GRAPHS
        }
        for device in fields.DEVICES
    }
    if fields.EFFECTIVE in found["cpu"]:
        raise LookupError(
            f"{field.name} takes effect on CPUs: measure it by scripts/bench strategy."
        )
    if found["gpu"] & {fields.EFFECTIVE, fields.UNTESTED}:
        return "Not measured: it takes effect on GPUs only, and none has been asked."
    return "Nothing to measure: it takes effect nowhere."


def read() -> list[dict[str, Any]]:
    """Return what was measured."""
    found: list[dict[str, Any]] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return found


def settings(options: Sequence[str] | None) -> dict[str, str]:
    """Return what the options of a side set.

    >>> settings(["--set=a=1", "--set=build_strategy.b=true", "--check_ranks=0"])
    {'a': '1', 'b': 'true'}
    """
    found = {}
    for option in options or ():
        name, _, value = option.removeprefix("--set=").partition("=")
        if option.startswith("--set="):
            first, _, rest = name.partition(".")
            found[rest if first in HEADINGS else first] = value
    return found


def compared(one: dict[str, str], other: dict[str, str]) -> list[str]:
    """Return the fields by which two sides differ; of what one does not set, those of the first.

    >>> compared({"a": "1", "b": "2"}, {"a": "3"}), compared({"a": "1"}, {"a": "2", "b": "3"})
    (['a', 'b'], ['a'])
    """
    return [name for name in one if other.get(name) != one[name]]


def taken(benchmark: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the comparisons of BENCHMARK, a document of `scripts/bench strategy`, in short."""
    found = []
    for one in benchmark["comparisons"]:
        knobs = compared(*(settings(options) for options in one["options"]))
        several = [
            round(1000 * sorted(turn["wall_s"] for turn in one[side])[len(one[side]) // 2], 1)
            for side in ("one", "other")
        ]
        found.append(
            {
                "knobs": knobs,
                "comparison": one["comparison"],
                "about": one["about"],
                "model": one["model"],
                "paddle": benchmark["versions"]["paddle"],
                "link": benchmark.get("link", ""),
                "ms": several,
                "counted": counted(knobs, *one["proofs"]),
                "peak_mb": [
                    round((proof or one["proofs"][0])["peak_bytes"] / 1e6)
                    for proof in one["proofs"]
                ],
                "ratio": round(one["ratio"], 3),
                "low": round(one["confident"][0], 3),
                "high": round(one["confident"][1], 3),
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "cpus": benchmark["machine"]["cpus"],
                "load": round(benchmark["machine"]["load_before"], 1),
            }
        )
    return [one for one in found if one["knobs"]]


def counted(knobs: Sequence[str], proof: dict[str, Any], other: dict[str, Any] | None) -> str:
    """Return what showed that KNOBS took effect, by the PROOF of one side and that of the OTHER.

    >>> told = {"counts": {"allreduces": 1}, "evidence": {"a": "2 gradients in 1 allreduce"}}
    >>> counted(["a"], told, {"counts": {"allreduces": 2}, "evidence": {}})
    '2 gradients in 1 allreduce; else 2 allreduces'
    """
    said = [proof["evidence"].get(knob, "") for knob in knobs]
    counts = [each["counts"].get("allreduces") for each in (proof, other or proof)]
    if counts[1] is not None and counts[0] != counts[1]:
        said.append(f"else {counts[1]} allreduce{'' if counts[1] == 1 else 's'}")
    # Of a feature's parts the table says that they are as the feature.
    return "; ".join(dict.fromkeys(one for one in said if one and not one.startswith("as ")))


def merged(known: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return KNOWN with NEW in the place of what compares the same."""

    def key(one: dict[str, Any]) -> tuple[str, ...]:
        return (one["comparison"], one["model"], one["paddle"], one["link"])

    return sorted({key(one): one for one in [*known, *new]}.values(), key=key)


def page() -> str:
    """Return the page as it should be."""
    from fleetrun.strategy import explanation, fields

    parts = [BEGIN.format(gpus=fields.GPUS, legacy=cell(fields.LEGACY_IR)), overview(), HOW]
    for kind in fields.FIELD_SECTIONS:
        parts.append(f"\n## {HEADINGS[kind]}\n\n[Paddle's own page]({explanation.LINKS[kind]})\n")
        parts += [section(field) for field in fields.TABLE if field.section == kind]
    parts.append(VARIABLES)
    rows = []
    for name, (meaning, line) in explanation.VARIABLES.items():
        example = f"`--set {name}.{line.replace(': ', '=')}`"
        rows.append([f"`{name}:`", meaning, f"`{line}`", example])
    parts.append(table(["section", "what", "a line of it", "or"], rows))
    return "".join(parts)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        new = taken(json.loads(Path(name).read_text(encoding="utf-8")))
        MEASURED.write_text(json.dumps(merged(read(), new), indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
