"""Writes docs/reference.md and its Chinese twin from tables: python scripts/reference_page.py."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import reference_tables
from pages import DOCS, cell, in_both_languages, table, translation, write

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    Translate = Callable[[str], str]

PAGES = in_both_languages(DOCS / "reference.md")
BEGIN = """\
<!-- made by scripts/reference_page.py from the tables of the code: edit those, and run it -->
# Reference: exit codes, variables, files, fields (退出码、环境变量、文件、策略字段)

[中文](reference.zh-CN.md)

For options, and the variables that set them, see [Options](options.md).
"""
EXIT_CODES = """
## Exit codes

`fleetrun --help=codes` prints the same.
"""
OWN = """
## Variables of fleetrun

The variables that you can set, and those that a launch sets for its ranks.
"""
RANKS = """
## Variables of ranks

What a launch sets for its ranks in collective jobs, jobs with parameter servers (ps) and rpc jobs,
or only in the jobs listed. If *yours wins* says yes, a value that you have exported takes
precedence; `--env` and `--nccl` take precedence over everything. `fleetrun --dry-run` shows the
values of a launch.
"""
REMOVED = """
Ranks never see the rank variables of another launcher: fleetrun replaces the variables above, or
removes those that this launch does not set, together with {names}.
"""
FILES = """
## Files of a run

Each launch has a run directory, `{runs}/TIME-JOB-PID` in the log folder (`log`, or `--log_dir`),
and links to the newest one beside it: `{latest}`, `workerlog.N` and so on.
[Logs](logs.md) explains how to read and keep them. `{{rank}}` is the number of a trainer, or a name
such as `server.0`; `{{log}}` is {logs}
with a number, and with `--redirects` {errors}
for standard error. Each JSON document, and each line of a `.jsonl` file, has the key `schema`, a
number that increases when a key changes its meaning or is removed.
"""
FOLDERS = """
`{gathered}/` contains the logs of other hosts with `--gather_logs`; `node1/` and so on are the
folders of the other hosts if the [log folder is shared](logs.md#one-log-folder-for-several-hosts).
"""
FIELDS = """
## Fields of a strategy

What each field of a [strategy](strategies.md) does in each Paddle, in dynamic and static graphs;
where CPU and GPU differ, a cell has CPU / GPU. `fleetrun strategy show FIELD` prints its parts, the
reasons, and an example; the table after the first update shows what became of it in your job.

**effective**: fleetrun or Paddle does it, as observed in a run. **expected**: it should do so on
GPUs, where no strategy has run yet. **no difference**: this is so
anyway. **no effect**: Paddle accepts the setting and ignores it. **refused**: Paddle would stop or
train incorrectly, so a job with it does not start. **untested**: it needs a GPU, and has not run on
one. What is said of GPUs is derived from the programs that Paddle's GPU build generates.
"""


def words(text: str) -> str:
    """Return TEXT with names of variables and options marked as code.

    >>> words("0, 1 or 2, see --with_gloo; `a`: PADDLE_MASTER.")
    '0, 1 or 2, see `--with_gloo`; `a`: `PADDLE_MASTER`.'
    """
    names = r"(?<![`\w-])(--[a-z][\w-]*(?:=[A-Z]+)?|[A-Z]+_[A-Z_]+[A-Z])(?![`\w])"
    return re.sub(names, r"`\1`", cell(text))


def heads(translate: Translate, *names: str) -> Sequence[str]:
    """Return the heads of a table."""
    return [translate(name) for name in names]


def exit_codes(translate: Translate) -> str:
    """Return the table of exit codes."""
    from fleetrun.commands import help as pages

    rows = ((code, words(translate(meaning))) for code, meaning in pages.EXIT_CODES)
    return translate(EXIT_CODES) + table(heads(translate, "code", "meaning"), rows)


def own_variables(translate: Translate) -> str:
    """Return the tables of variables FLEETRUN_* that users may set or read."""
    public = [variable for variable in reference_tables.OWN if variable.is_public]
    rows = [
        (
            f"`{variable.name}`",
            *map(translate, (variable.set_by, variable.read_by)),
            words(translate(variable.meaning)),
        )
        for variable in public
    ]
    columns = heads(translate, "variable", "set by", "read by", "meaning")
    return translate(OWN) + table(columns, rows)


def rank_variables(translate: Translate) -> str:
    """Return the table of what else a launch sets for its ranks."""
    from fleetrun.plan import environment

    rows = (
        (
            f"`{variable.name}`",
            words(translate(variable.meaning)),
            "" if variable.modes == reference_tables.ALL else ", ".join(variable.modes),
            words(translate(variable.when)),
            translate("yes") if variable.yields else "",
        )
        for variable in reference_tables.OF_RANKS
    )
    columns = heads(translate, "variable", "value", "jobs", "set", "yours wins")
    set_here = {variable.name for variable in reference_tables.OF_RANKS}
    others = [f"`{name}`" for name in environment.IDENTITY if name not in set_here]
    removed = translate(REMOVED).format(names=", ".join(others))
    return translate(RANKS) + table(columns, rows) + removed


def files(translate: Translate) -> str:
    """Return the table of the files of a run directory."""
    from fleetrun.records import names

    logs = ", ".join(f"`{name}`" for name in names.LOGS.values())
    errors = ", ".join(f"`{name.removesuffix('log')}err`" for name in names.LOGS.values())
    rows = (
        (
            f"`{file.name}`",
            translate(file.writer),
            words(translate(file.reader)),
            str(file.schema or ""),
            words(translate(file.meaning)),
        )
        for file in reference_tables.FILES
    )
    head = translate(FILES).format(runs=names.RUNS, latest=names.LATEST, logs=logs, errors=errors)
    columns = heads(translate, "file", "written by", "read by", "schema", "contents")
    return head + table(columns, rows) + translate(FOLDERS).format(gathered=names.GATHERED)


def fields_of_strategies(translate: Translate) -> str:
    """Return the table of fields: type and default, and the status by kind of graph and Paddle."""
    from fleetrun.strategy import explanation, fields

    rows = []
    for field in fields.TABLE:
        cells = [f"`{field.name}`", cell(translate(explanation.kind(field)))]
        for graph in fields.GRAPHS:
            for paddle in fields.PADDLES:
                statuses = [
                    fields.outcome(field, paddle=paddle, graph=graph, device=device).status
                    for device in fields.DEVICES
                ]
                cells.append(" / ".join(dict.fromkeys(statuses)))
        rows.append(cells)
    graphs = heads(translate, "dynamic", "static")
    columns = [f"{graph} {paddle}" for graph in graphs for paddle in fields.PADDLES]
    return translate(FIELDS) + table([*heads(translate, "field", "value"), *columns], rows)


def text(page: Path) -> str:
    """Return PAGE as it should be."""
    translate = translation(page)
    parts = (exit_codes, own_variables, rank_variables, files, fields_of_strategies)
    return translate(BEGIN) + "".join(part(translate) for part in parts)


if __name__ == "__main__":
    write(PAGES, text)
