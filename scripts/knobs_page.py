"""Writes docs/knobs.md and its Chinese twin: python scripts/knobs_page.py [BENCHMARK.json ...].

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

from pages import DOCS, cell, in_both_languages, table, translation, write

PAGES = in_both_languages(DOCS / "knobs.md")
MEASURED = DOCS / "knobs.json"

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fleetrun.strategy.fields import Field

    Translate = Callable[[str], str]

BEGIN = """\
<!-- made by scripts/knobs_page.py from fleetrun/strategy and docs/knobs.json: edit those -->
# Knobs of a strategy (策略字段)

[中文](knobs.zh-CN.md)

What each field of a [strategy](strategies.md) does, where it takes effect, and its measured effect
on the time of a step. The table after the first update shows what became of it in your job.
`fleetrun strategy show FIELD` prints the text of this page, and `fleetrun tune` measures with your
script.

* **effective**: fleetrun or Paddle does it, as observed in a run. **no difference**: this is so
  anyway. **no effect**: Paddle accepts the setting and ignores it. **refused**: Paddle would stop
  or train incorrectly, so a job with it does not start. **untested**: it needs a GPU, and has not
  run on one.
* {gpus}
* {legacy}

## Overview

Where CPU and GPU differ, a cell has CPU / GPU.
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
    "without_graph_optimization": "it is always on: false is refused",
}
VARIABLES = """
## Variables: `flags:`, `nccl:`, `env:`

Every rank gets them. Variables that you have exported take precedence, and a line says so.
"""
HOW = """
*How it was measured*: `scripts/bench strategy` launches both sides, which train in turns. *Counted*
is the evidence in the first side's table, and the number of allreduces of the other side if it
differs. *Memory* is the peak of a rank on each side, Paddle included. The ratio is that of the
times of a step (below 1: the first side is faster), with the 95 % confidence interval of its
median. Two ranks ran on one machine without GPUs, over gloo, without a network in between unless a
bandwidth is given: then in two network namespaces with a link of that bandwidth. The machine was
shared (see the load). Counts are the same in every run; times depend on the load, which was the
same for both sides, but hurts many small allreduces more than on an idle machine. A ratio is in
bold if 1 is outside its interval; otherwise the times show no difference.
"""


def overview(translate: Translate) -> str:
    """Return the table of all knobs: their status by kind of graph and Paddle."""
    from fleetrun.strategy import fields

    rows = []
    for field in fields.TABLE:
        cells = [f"[`{field.name}`](#{anchor(field.name)})"]
        for graph in fields.GRAPHS:
            for paddle in fields.PADDLES:
                statuses = [
                    fields.outcome(field, paddle=paddle, graph=graph, device=device).status
                    for device in fields.DEVICES
                ]
                cells.append(" / ".join(dict.fromkeys(statuses)))
        rows.append([*cells, translate("yes") if of_field(field.name) else ""])
    graphs = [translate(graph) for graph in ("dynamic", "static")]
    heads = [f"{graph} {paddle}" for graph in graphs for paddle in fields.PADDLES]
    return table([translate("knob"), *heads, translate("measured")], rows)


def anchor(name: str) -> str:
    """Return what GitHub makes of the heading NAME."""
    return re.sub(r"[^\w-]", "", name.lower())


def section(field: Field, translate: Translate) -> str:
    """Return all about FIELD."""
    from fleetrun.strategy import explanation, fields, schema

    lines = [f"\n### {field.name}\n", translate(schema.describe(field))]
    kinds = {key.name: translate(explanation.kind(key)) for key in (field, *field.keys)}
    if field.kind == "configs":
        line = translate("* `{}`: {} {}")
        lines += [
            "",
            *(line.format(key.name, translate(key.doc), kinds[key.name]) for key in field.keys),
        ]
    else:
        values, _, default = kinds[field.name].removesuffix("]").partition(" [")
        line = translate("Values: {}").format(values)
        lines.append(line + translate("; {}").format(default) if default else line)
    if field.aliases:
        aliases = ", ".join(f"`{alias}`" for alias in field.aliases)
        lines.append(translate("Also written {}.").format(aliases))
    places = [(p, g, d) for g in fields.GRAPHS for p in fields.PADDLES for d in fields.DEVICES]
    rows = [
        [status, cell(translate(reason)), _translated(shortly(where), translate)]
        for (status, reason), where in explanation.outcomes(field, places).items()
    ]
    heads = [translate(head) for head in ("status", "why", "where")]
    text = "\n".join(lines) + "\n" + table(heads, rows) + measured(field, translate)
    sets = " ".join(f"--set {word}" for word in explanation.sets(field))
    return f"{text}\n```text\nfleetrun {sets} train.py\n```\n"


def _translated(places: str, translate: Translate) -> str:
    """Return PLACES, as `shortly` writes them, with the words for kinds of graphs translated."""
    return re.sub(r"dynamic|static|everywhere|, ", lambda match: translate(match[0]), places)


def shortly(where: str) -> str:
    """Return WHERE, places as `dygraph 2.6.2 cpu`, with those together that are all of a kind.

    >>> shortly("static 2.6.2 cpu, static 2.6.2 gpu, static 3.3.1 cpu, dygraph 3.3.1 gpu")
    'static 2.6.2, static 3.3.1 CPU, dynamic 3.3.1 GPU'
    """
    from fleetrun.strategy import fields

    if where == "everywhere":
        return where
    places: dict[str, dict[str, list[str]]] = {}
    for graph, paddle, device in (place.split(" ") for place in where.split(", ")):
        places.setdefault(graph, {}).setdefault(paddle, []).append(device)
    parts = []
    for graph, paddles in places.items():
        name = graph.replace("dygraph", "dynamic")
        devices = {tuple(supported) for supported in paddles.values()}
        if len(paddles) == len(fields.PADDLES) and len(devices) == 1:
            parts.append(f"{name}{_device(devices.pop())}")
        else:
            parts += [
                f"{name} {paddle}{_device(tuple(supported))}"
                for paddle, supported in paddles.items()
            ]
    return ", ".join(parts)


def _device(devices: tuple[str, ...]) -> str:
    return f" {devices[0].upper()}" if len(devices) == 1 else ""


def of_field(name: str) -> list[dict[str, Any]]:
    """Return the comparisons whose sides differ in the field NAME."""
    return [row for row in read() if name in row["knobs"]]


def ratio(row: dict[str, Any]) -> str:
    """Return the ratio of the comparison ONE with its interval, in bold where 1 is not in that.

    >>> ratio({"ratio": 0.8, "low": 0.7, "high": 0.9}), ratio({"ratio": 1, "low": 0.9, "high": 1.1})
    ('**0.80** (0.70-0.90)', '1.00 (0.90-1.10)')
    """
    mark = "" if row["low"] <= 1 <= row["high"] else "**"
    return f"{mark}{row['ratio']:.2f}{mark} ({row['low']:.2f}-{row['high']:.2f})"


def measured(field: Field, translate: Translate) -> str:
    """Return the measured effect of FIELD, or why there is none."""
    rows = [
        [
            cell(translate(row["about"])),
            translate("; ").join(
                filter(None, (translate(MODELS[row["model"]]), row["paddle"], row["link"]))
            ),
            cell(row.get("counted", "")),
            "{:.0f} MB, {:.0f} MB".format(*row["peak_mb"]) if "peak_mb" in row else "",
            f"{row['ms'][0]:g} ms, {row['ms'][1]:g} ms",
            ratio(row),
            translate("{}, {} processors, load {:.0f}").format(
                row["date"], row["cpus"], row["load"]
            ),
        ]
        for row in of_field(field.name)
    ]
    heads = ("measured", "gradients; Paddle", "counted", "memory", "a step", "ratio", "on")
    columns = [translate(head) for head in heads]
    return table(columns, rows) if rows else f"\n{translate(why_not_measured(field))}\n"


def why_not_measured(field: Field) -> str:
    """Return why nothing was measured of FIELD, in a sentence; LookupError where something can be.

    >>> from fleetrun.strategy import fields
    >>> why_not_measured(fields.find("strategy", "dgc"))
    'Not measured: it takes effect on GPUs only.'
    """
    from fleetrun.strategy import fields

    if field.name in UNMEASURED:
        return f"Not measured: {UNMEASURED[field.name]}."
    statuses = {
        device: {
            fields.outcome(field, paddle=paddle, graph=graph, device=device).status
            for paddle in fields.PADDLES
            for graph in fields.GRAPHS
        }
        for device in fields.DEVICES
    }
    if fields.EFFECTIVE in statuses["cpu"]:
        raise LookupError(
            f"{field.name} takes effect on CPUs: measure it by scripts/bench strategy."
        )
    if statuses["gpu"] & {fields.EFFECTIVE, fields.UNTESTED}:
        return "Not measured: it takes effect on GPUs only."
    return "Nothing to measure: it takes effect nowhere."


def read() -> list[dict[str, Any]]:
    """Return what was measured."""
    rows: list[dict[str, Any]] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return rows


def settings(options: Sequence[str] | None) -> dict[str, str]:
    """Return what the options of a side set.

    >>> settings(["--set=a=1", "--set=build_strategy.b=true", "--check_ranks=0"])
    {'a': '1', 'b': 'true'}
    """
    values = {}
    for option in options or ():
        name, _, value = option.removeprefix("--set=").partition("=")
        if option.startswith("--set="):
            first, _, rest = name.partition(".")
            values[rest if first in HEADINGS else first] = value
    return values


def compared(first: dict[str, str], other: dict[str, str]) -> list[str]:
    """Return the fields by which two sides differ; of what one does not set, those of the first.

    >>> compared({"a": "1", "b": "2"}, {"a": "3"}), compared({"a": "1"}, {"a": "2", "b": "3"})
    (['a', 'b'], ['a'])
    """
    return [name for name in first if other.get(name) != first[name]]


def taken(benchmark: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the comparisons of BENCHMARK, a document of `scripts/bench strategy`, in short."""
    rows = []
    for comparison in benchmark["comparisons"]:
        knobs = compared(*(settings(options) for options in comparison["options"]))
        several = [
            round(
                1000
                * sorted(turn["wall_s"] for turn in comparison[side])[len(comparison[side]) // 2],
                1,
            )
            for side in ("one", "other")
        ]
        rows.append(
            {
                "knobs": knobs,
                "comparison": comparison["comparison"],
                "about": comparison["about"],
                "model": comparison["model"],
                "paddle": benchmark["versions"]["paddle"],
                "link": benchmark.get("link", ""),
                "ms": several,
                "counted": counted(knobs, *comparison["proofs"]),
                "peak_mb": [
                    round((proof or comparison["proofs"][0])["peak_bytes"] / 1e6)
                    for proof in comparison["proofs"]
                ],
                "ratio": round(comparison["ratio"], 3),
                "low": round(comparison["confident"][0], 3),
                "high": round(comparison["confident"][1], 3),
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "cpus": benchmark["machine"]["cpus"],
                "load": round(benchmark["machine"]["load_before"], 1),
            }
        )
    return [comparison for comparison in rows if comparison["knobs"]]


def counted(knobs: Sequence[str], proof: dict[str, Any], other: dict[str, Any] | None) -> str:
    """Return what showed that KNOBS took effect, by the PROOF of one side and that of the OTHER.

    >>> told = {"counts": {"allreduces": 1}, "evidence": {"a": "2 gradients in 1 allreduce"}}
    >>> counted(["a"], told, {"counts": {"allreduces": 2}, "evidence": {}})
    '2 gradients in 1 allreduce; else 2 allreduces'
    """
    evidence = [proof["evidence"].get(knob, "") for knob in knobs]
    counts = [side["counts"].get("allreduces") for side in (proof, other or proof)]
    if counts[1] is not None and counts[0] != counts[1]:
        evidence.append(f"else {counts[1]} allreduce{'' if counts[1] == 1 else 's'}")
    # Of a feature's parts the table says that they are as the feature.
    return "; ".join(
        dict.fromkeys(text for text in evidence if text and not text.startswith("as "))
    )


def merged(known: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return KNOWN with NEW in the place of what compares the same."""

    def key(row: dict[str, Any]) -> tuple[str, ...]:
        return (row["comparison"], row["model"], row["paddle"], row["link"])

    return sorted({key(row): row for row in [*known, *new]}.values(), key=key)


def text(page: Path) -> str:
    """Return PAGE as it should be."""
    from fleetrun.strategy import explanation, fields

    translate = translation(page)
    known = {"gpus": translate(fields.GPUS), "legacy": cell(translate(fields.LEGACY_IR))}
    parts = [translate(BEGIN).format(**known), overview(translate), translate(HOW)]
    for kind in fields.FIELD_SECTIONS:
        title = translate("Paddle's own page")
        link = f"[{title}]({explanation.LINKS[kind]})"
        parts.append(f"\n## {translate(HEADINGS[kind])}\n\n{link}\n")
        parts += [section(field, translate) for field in fields.TABLE if field.section == kind]
    parts.append(translate(VARIABLES))
    rows = []
    for name, (meaning, line) in explanation.VARIABLES.items():
        example = f"`--set {name}.{line.replace(': ', '=')}`"
        rows.append([f"`{name}:`", translate(meaning), f"`{line}`", example])
    heads = [translate(head) for head in ("section", "what", "example", "or")]
    parts.append(table(heads, rows))
    return "".join(parts)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        new = taken(json.loads(Path(name).read_text(encoding="utf-8")))
        MEASURED.write_text(json.dumps(merged(read(), new), indent=1) + "\n", encoding="utf-8")
    write(PAGES, text)
