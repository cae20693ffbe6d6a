"""Writes the tables of docs/ and the Chinese help from the code: .venv/bin/python scripts/docs.py.

A table stands on its page between two marks. A text that is new is added to its catalogue, to be
translated; one that is gone is taken out.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import reference_tables

ROOT = Path(__file__).parents[1]
# They look into the fleetrun beside them, whichever Python they are run by.
sys.path.insert(0, str(ROOT))

from fleetrun.cli import help as help_page
from fleetrun.cli.option import GROUPS, Option
from fleetrun.cli.options import KNOWN, OPTIONS
from fleetrun.plan import environment
from fleetrun.strategy import explanation, fields
from fleetrun.text import sentence

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

Translate = Callable[[str], str]

PAGES = (ROOT / "docs" / "reference.md", ROOT / "docs" / "strategies.md")
# The texts of the help, which the package brings, and those that only the tables have.
HELP = ROOT / "fleetrun" / "locale" / "zh_CN" / "LC_MESSAGES" / "fleetrun.po"
CELLS = Path(__file__).with_name("pages.zh_CN.po")
_MARKED = re.compile(r"(<!-- ([\w ]+), by scripts/docs.py -->\n).*?(\n<!-- end -->)", re.DOTALL)


# -- the tables ------------------------------------------------------------------------------------


def cell(text: str) -> str:
    r"""Return TEXT as a cell of a table.

    >>> cell("a|b\nc")
    'a\\|b c'
    """
    return text.replace("|", "\\|").replace("\n", " ")


def as_code(text: str) -> str:
    """Return TEXT as a cell with the names of variables and options marked as code.

    >>> as_code("0, 1 or 2, see --with_gloo; `a`: PADDLE_MASTER.")
    '0, 1 or 2, see `--with_gloo`; `a`: `PADDLE_MASTER`.'
    """
    names = r"(?<![`\w-])(--[a-z][\w-]*(?:=[A-Z]+)?|[A-Z]+_[A-Z_]+[A-Z])(?![`\w])"
    return re.sub(names, r"`\1`", cell(text))


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of Markdown.

    >>> print(table(("code", "meaning"), [("0", "all well")]), end="")
    | code | meaning |
    | --- | --- |
    | 0 | all well |
    """
    columns = list(heads)
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def option_tables(translate: Translate) -> str:
    """Return a table for each section of the help."""
    heads = [translate(head) for head in ("option", "default", "variable", "meaning")]
    return "\n".join(
        f"### {translate(group)}\n\n{table(heads, rows)}"
        for name, group in GROUPS.items()
        if (rows := [_of(option, translate) for option in KNOWN if option.group == name])
    )


def _of(option: Option, translate: Translate) -> tuple[str, ...]:
    """Return OPTION's line of a table: its spellings, default, variables and meaning."""
    spellings = (f"{option.opts[0]}{option.value_shown}", *option.opts[1:])
    meaning = translate(option.help or option.reason)
    return (
        cell(", ".join(f"`{spelling}`" for spelling in spellings)),
        "" if option.usual in {None, "false"} else cell(f"`{option.usual}`"),
        ", ".join(f"`{name}`" for name in option.env),
        cell(sentence(meaning)),
    )


def exit_codes(translate: Translate) -> str:
    """Return the table of exit codes."""
    rows = ((code, as_code(translate(meaning))) for code, meaning in help_page.EXIT_CODES)
    return table(map(translate, ("code", "meaning")), rows)


def own_variables(translate: Translate) -> str:
    """Return the table of the variables FLEETRUN_* that users may set or read."""
    rows = (
        (f"`{row.name}`", translate(row.set_by), translate(row.read_by), as_code(translate(row[3])))
        for row in reference_tables.OWN
        if row.is_public
    )
    return table(map(translate, ("variable", "set by", "read by", "meaning")), rows)


def rank_variables(translate: Translate) -> str:
    """Return the table of what else a launch sets for its ranks."""
    rows = (
        (
            f"`{row.name}`",
            as_code(translate(row.meaning)),
            "" if row.modes == reference_tables.ALL else ", ".join(row.modes),
            as_code(translate(row.when)),
            translate("yes") if row.yields else "",
        )
        for row in reference_tables.OF_RANKS
    )
    return table(map(translate, ("variable", "value", "jobs", "set", "yours wins")), rows)


def removed_variables(_: Translate) -> str:
    """Return the names of the variables that no launch sets and ranks never see."""
    set_here = {row.name for row in reference_tables.OF_RANKS}
    names = [f"`{name}`" for name in environment.IDENTITY if name not in set_here]
    return f"{', '.join(names)}.\n"


def files(translate: Translate) -> str:
    """Return the table of the files of a run directory."""
    rows = (
        (
            f"`{file.name}`",
            translate(file.writer),
            as_code(translate(file.reader)),
            str(file.schema or ""),
            as_code(translate(file.meaning)),
        )
        for file in reference_tables.FILES
    )
    return table(map(translate, ("file", "written by", "read by", "schema", "contents")), rows)


def fields_of_strategies(translate: Translate) -> str:
    """Return the table of fields: type and default, and the status by kind of graph and Paddle."""
    columns = [(graph, paddle) for graph in fields.GRAPHS for paddle in fields.PADDLES]
    heads = [
        f"{translate(word)} {paddle}" for word in ("dynamic", "static") for paddle in fields.PADDLES
    ]
    rows: list[tuple[str, ...]] = []
    idle: list[str] = []
    for field in fields.TABLE:
        statuses = tuple(
            " / ".join(
                dict.fromkeys(
                    fields.outcome(field, paddle=paddle, graph=graph, device=device).status
                    for device in fields.DEVICES
                )
            )
            for graph, paddle in columns
        )
        if set(statuses) == {fields.NO_EFFECT}:
            idle.append(f"`{field.name}`")
        else:
            rows.append((f"`{field.name}`", cell(translate(explanation.kind(field))), *statuses))
    rows.append((", ".join(idle), "", *[fields.NO_EFFECT] * len(columns)))
    return table([translate("field"), translate("value"), *heads], rows)


TABLES: Mapping[str, Callable[[Translate], str]] = {
    "options": option_tables,
    "exit codes": exit_codes,
    "variables of fleetrun": own_variables,
    "variables of ranks": rank_variables,
    "variables that are removed": removed_variables,
    "files of a run": files,
    "fields of a strategy": fields_of_strategies,
}


# -- catalogues, in the formats of gettext ---------------------------------------------------------

_HEAD = "Content-Type: text/plain; charset=UTF-8\nLanguage: zh_CN\n"
_ENTRY = re.compile(r'^msgid ((?:".*"\n)+)msgstr ((?:".*"\n)+)', re.MULTILINE)


def help_texts() -> list[str]:
    """Return every text of the help and of report pages, in the order in which it is read."""
    texts = [help_page.INTRODUCTION, *help_page.WORDS]
    texts += [text for _, text in help_page.EXIT_CODES]
    texts += help_page.NOTES
    for name, group in GROUPS.items():
        texts.append(group)
        texts += [str(option.help) for option in OPTIONS if option.group == name]
    return list(dict.fromkeys(texts))


def read(path: Path) -> dict[str, str]:
    """Return the translations that a .po file has."""

    def joined(lines: str) -> str:
        return "".join(map(json.loads, lines.splitlines()))

    entries = _ENTRY.findall(path.read_text(encoding="utf-8"))
    return {joined(text): joined(translated) for text, translated in entries}


def po(translations: Mapping[str, str]) -> bytes:
    """Return a .po file of TRANSLATIONS, whose order is kept."""

    def quoted(text: str) -> str:
        lines = text.splitlines(keepends=True) or [""]
        return "\n".join(
            json.dumps(line, ensure_ascii=False) for line in ["", *lines][len(lines) == 1 :]
        )

    entries = (f"msgid {quoted(a)}\nmsgstr {quoted(b)}\n" for a, b in translations.items())
    return "\n".join(entries).encode()


def mo(translations: Mapping[str, str]) -> bytes:
    """Return the .mo file of TRANSLATIONS; those that are not made yet are left out."""
    pairs = sorted((a.encode(), b.encode()) for a, b in translations.items() if b)
    count, header = len(pairs), 28
    # GNU's format: the places of the originals, those of the translations, and all texts.
    numbers = [0x950412DE, 0, count, header, header + 8 * count, 0, header + 16 * count]
    texts = b""
    for column in zip(*pairs, strict=True):
        for text in column:
            numbers += [len(text), header + 16 * count + len(texts)]
            texts += text + b"\0"
    return struct.pack(f"<{len(numbers)}I", *numbers) + texts


# -- all of it -------------------------------------------------------------------------------------


def chinese(page: Path) -> Path:
    """Return the Chinese twin of PAGE."""
    return page.with_suffix(".zh-CN.md")


def filled(page: Path, translate: Translate) -> bytes:
    """Return PAGE with its tables as they should be."""

    def between_marks(place: re.Match[str]) -> str:
        return f"{place[1]}\n{TABLES[place[2]](translate)}{place[3]}"

    return _MARKED.sub(between_marks, page.read_text(encoding="utf-8")).encode()


def generated() -> tuple[dict[Path, bytes], Sequence[str]]:
    """Return every file that is made here as it should be, and the texts without a translation."""
    known, known_cells = read(HELP), read(CELLS)
    of_help = {"": _HEAD, **{text: known.get(text, "") for text in help_texts()}}
    used: dict[str, str] = {}

    def translate(text: str) -> str:
        if text not in of_help:
            used[text] = known_cells.get(text, "")
        # The empty text of a catalogue is its header.
        return (of_help.get(text) or used.get(text) or text) if text else ""

    contents = {page: filled(page, str) for page in PAGES}
    contents |= {chinese(page): filled(chinese(page), translate) for page in PAGES}
    of_cells = {text: used[text] for text in [*known_cells, *used] if text in used}
    contents |= {HELP: po(of_help), HELP.with_suffix(".mo"): mo(of_help), CELLS: po(of_cells)}
    return contents, [text for text, meant in (of_help | of_cells).items() if not meant]


def main() -> int:
    """Write every file, and name the texts that are not translated yet."""
    contents, untranslated = generated()
    for path, content in contents.items():
        path.write_bytes(content)
    if untranslated:
        print(f"{HELP} or {CELLS} lacks translations: {untranslated}", file=sys.stderr)
    return bool(untranslated)


if __name__ == "__main__":
    sys.exit(main())
