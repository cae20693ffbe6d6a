#!/usr/bin/env python3
"""Compiles fleetrun/locale/zh_CN/LC_MESSAGES/fleetrun.po to the file that gettext reads.

A text that is new is added to the .po, to be translated; one that is gone is taken out.
"""

from __future__ import annotations

import ast
import re
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from fleetrun import options
from fleetrun.commands import help as pages
from fleetrun.commands.report import words
from fleetrun.strategy import load

FOLDER = Path(__file__).parents[1] / "fleetrun" / "locale" / "zh_CN" / "LC_MESSAGES"
SOURCE, COMPILED = FOLDER / "fleetrun.po", FOLDER / "fleetrun.mo"
HEAD = "Content-Type: text/plain; charset=UTF-8\nLanguage: zh_CN\n"
_ENTRY = re.compile(r'^msgid ((?:".*"\n)+)msgstr ((?:".*"\n)+)', re.MULTILINE)
# GNU's format: this number, revision 0, the count, and where tables of lengths and places begin.
_MAGIC, _HEADER = 0x950412DE, 28


def wanted() -> list[str]:
    """Return every text of the help, in the order in which it is read."""
    texts = [pages.SCREEN, pages.ABOUT, *pages.WORDS]
    texts += [text for _, text in (*pages.EXAMPLES, *pages.EXIT_CODES, *pages.COMPLETION)]
    texts += [*pages.NOTES, *load.PRESETS.values()]
    for group in options.GROUPS:
        texts.append(group)
        texts += [option.help for option in options.TABLE if option.group == group]
    return list(dict.fromkeys((*texts, *words.TEXTS)))


def read(text: str) -> dict[str, str]:
    """Return the translations that TEXT, a .po file, has."""
    return {_joined(text): _joined(meant) for text, meant in _ENTRY.findall(text)}


def _joined(lines: str) -> str:
    return "".join(ast.literal_eval(line) for line in lines.splitlines())


def write(translations: dict[str, str]) -> str:
    """Return a .po file of TRANSLATIONS, whose order is kept."""
    return "\n".join(
        f"msgid {_quoted(text)}\nmsgstr {_quoted(meant)}\n" for text, meant in translations.items()
    )


def _quoted(text: str) -> str:
    lines = text.splitlines(keepends=True) or [""]
    escaped = [
        line.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for line in lines
    ]
    return "\n".join(f'"{line}"' for line in (escaped if len(lines) == 1 else ["", *escaped]))


def compiled(translations: dict[str, str]) -> bytes:
    """Return the .mo file of TRANSLATIONS; those that are not made yet are left out."""
    pairs = sorted((a.encode(), b.encode()) for a, b in translations.items() if b)
    begin = _HEADER + 16 * len(pairs)
    tables: list[list[int]] = [[], []]
    texts = b""
    for place in range(2):
        for pair in pairs:
            tables[place] += [len(pair[place]), begin + len(texts)]
            texts += pair[place] + b"\0"
    head = (_MAGIC, 0, len(pairs), _HEADER, _HEADER + 8 * len(pairs), 0, begin)
    numbers = (*head, *tables[0], *tables[1])
    return struct.pack(f"<{len(numbers)}I", *numbers) + texts


def updated(known: dict[str, str]) -> dict[str, str]:
    """Return KNOWN with an entry for each text that is wanted, and for no other."""
    return {"": HEAD, **{text: known.get(text, "") for text in wanted()}}


if __name__ == "__main__":
    translations = updated(read(SOURCE.read_text(encoding="utf-8")) if SOURCE.exists() else {})
    SOURCE.write_text(write(translations), encoding="utf-8")
    COMPILED.write_bytes(compiled(translations))
    missing = [text for text, meant in translations.items() if not meant]
    sys.exit(f"{SOURCE} lacks {len(missing)} translations: {missing}" if missing else 0)
