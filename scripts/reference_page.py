"""Writes docs/reference.md from tables of the code: .venv/bin/python scripts/reference_page.py."""

from __future__ import annotations

import re

from pages import DOCS, cell, table

PAGE = DOCS / "reference.md"
BEGIN = """\
<!-- made by scripts/reference_page.py from the tables of the code: edit those, and run it -->
# Reference: exit codes, variables, files (退出码、环境变量、文件)

[Options](options.md) has the options, and the variables that stand for them.
"""
EXIT_CODES = """
## Exit codes

`fleetrun --help=codes` prints the same.
"""
OWN = """
## Variables of fleetrun

Those that you may set, and those that a launch sets for its ranks.
"""
RANKS = """
## Variables of ranks

What a launch sets for its ranks: in collective jobs, jobs with parameter servers (ps) and rpc jobs,
or in those that are named. Where *yours stays* says yes, a value that you have exported wins;
`--env` and `--nccl` win over all. `fleetrun --dry-run` shows the values of a launch.
"""
REMOVED = """
Another launcher's word on who a process is reaches no rank: what stands above is replaced or, where
this launch does not set it, removed, and so are {names}.
"""
FILES = """
## Files of a run

Each launch has a run directory, `{runs}/TIME-JOB-PID` in the log folder (`log`, or `--log_dir`),
and links to the newest one beside it: `{latest}`, `workerlog.N` and so on.
[Logs](logs.md) says how they are read and kept. `{{rank}}` is the number of a trainer, or as in
`server.0`; `{{log}}` is {logs} with a number, and with
--redirects {errors} for standard error. A JSON document, or each line
of one that ends in `.jsonl`, has its schema's number under `schema`, which goes up when a key
changes its meaning or goes away.
"""
FOLDERS = """
`{gathered}/` has the logs of other hosts with `--gather_logs`; `node1/` and its like are those of
the other hosts where the [log folder is shared](logs.md#one-log-folder-for-several-hosts).
"""


def words(text: str) -> str:
    """Return TEXT with names of variables and options marked as code.

    >>> words("0, 1 or 2, see --with_gloo; `a`: PADDLE_MASTER.")
    '0, 1 or 2, see `--with_gloo`; `a`: `PADDLE_MASTER`.'
    """
    names = r"(?<![`\w-])(--[a-z][\w-]*(?:=[A-Z]+)?|[A-Z]+_[A-Z_]+[A-Z])(?![`\w])"
    return re.sub(names, r"`\1`", cell(text))


def exit_codes() -> str:
    """Return the table of exit codes."""
    from fleetrun.commands import help as pages

    rows = ((code, words(meaning)) for code, meaning in pages.EXIT_CODES)
    return EXIT_CODES + table(("code", "meaning"), rows)


def own_variables() -> str:
    """Return the tables of variables FLEETRUN_* that users may set or read."""
    from fleetrun.records import variables

    public = [one for one in variables.table() if one.is_public]
    rows = [(f"`{one.name}`", one.set_by, one.read_by, words(one.meaning)) for one in public]
    return OWN + table(("variable", "set by", "read by", "meaning"), rows)


def rank_variables() -> str:
    """Return the table of what else a launch sets for its ranks."""
    from fleetrun.plan import environment
    from fleetrun.records import rank_variables as known

    rows = (
        (
            f"`{one.name}`",
            words(one.meaning),
            "" if one.modes == known.ALL else ", ".join(one.modes),
            words(one.when),
            "yes" if one.yields else "",
        )
        for one in known.TABLE
    )
    heads = ("variable", "value", "jobs", "set", "yours stays")
    set_here = {one.name for one in known.TABLE}
    others = [f"`{name}`" for name in environment.IDENTITY if name not in set_here]
    names = f"{', '.join(others[:-1])} and {others[-1]}"
    return RANKS + table(heads, rows) + REMOVED.format(names=names)


def files() -> str:
    """Return the table of the files of a run directory."""
    from fleetrun.records import names

    logs = ", ".join(f"`{name}`" for name in names.LOGS.values())
    errors = ", ".join(f"`{name.removesuffix('log')}err`" for name in names.LOGS.values())
    rows = (
        (f"`{one.name}`", one.writer, words(one.reader), str(one.schema or ""), words(one.meaning))
        for one in names.FILES
    )
    head = FILES.format(runs=names.RUNS, latest=names.LATEST, logs=logs, errors=errors)
    made = table(("file", "written by", "read by", "schema", "what it has"), rows)
    return head + made + FOLDERS.format(gathered=names.GATHERED)


def page() -> str:
    """Return the page as it should be."""
    return BEGIN + exit_codes() + own_variables() + rank_variables() + files()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
