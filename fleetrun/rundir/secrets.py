"""Recognises secrets, which must never be shown or stored, by name and by shape.

Ranks load this file by its path, in any Python, so it imports nothing of fleetrun.
"""

# No syntax newer than Python 3.7, for those ranks.
from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fleetrun.model import Request

HIDDEN = "***"

# The words of a name, each between two "_": those that mean a secret, and those that describe one,
# or have a similar name and open nothing.
_SECRET = re.compile(
    r"PASSW|PASSPHRASE|SSHPASS|SECRETS?_|CREDENTIAL|TOKEN_|AUTH_|(?:API|PRIVATE|ACCESS|ACCOUNT)_?KEY"
    r"|_(?:PASS|PWD|COOKIES?|JWT|BEARER|AUTHORIZATION|SIGNATURE|SIG|[^_]+_PAT)_$"
)
_HARMLESS = re.compile(
    r"_(?:FILES?|PATHS?|DIR|NAME|LENGTH|LEN|SIZE|COUNT|TIMEOUT|TYPE|IDS?)_$(?<!ACCESS_KEY_ID_)"
    r"|_(?:MAX|NEW|NEXT|PAD|UNK|EOS|BOS|SEP|CLS|MASK)_TOKEN_$"
)
# Before the @ of an address; a password may contain slashes and quotes.
_LOGIN = re.compile(
    r"://([^\s,;:@/?#]*:(?:(?!://)[^\s,;])*|(?<!ssh://)(?<!sftp://)[^\s\"'<>,;@/?#]+)@"
)
# Private keys, keys of services by their prefixes, and addresses whose last part is a secret.
_SHAPES = (
    re.compile(r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(.*?)(?:-----END|\Z)"),
    re.compile(
        r"\b((?:AKIA|ASIA|AROA)[0-9A-Z]{16}|(?:xox[abeoprs]|xapp|sk|pypi|nvapi|gl[a-z]{2,6})-[\w\-]{8,}"
        r"|hf_[A-Za-z0-9]{16,}|npm_\w{16,}|AIza[\w\-]{20,}|gh[pousr]_\w{16,}|github_pat_\w{16,}"
        r"|LTAI[A-Za-z0-9]{12,}|AKID[A-Za-z0-9]{16,}|eyJ[\w\-]{8,}\.[\w\-]{4,}(?:\.[\w\-]*)?)"
    ),
    re.compile(
        r"(?:hooks\.slack\.com/\w+/|/webhooks?/(?:send\?key=)?|/hook/|telegram\.org/bot)([^\s\"'<>,?]+)"
    ),
)
# A name, and after it (`name=value`, `"name": "value"`, `--name value` and the like) its value.
_NAME = re.compile(r"(?<![\w.\-])-{0,2}[A-Za-z][\w.\-]*")
_VALUE = re.compile(
    r"(?s)(?:\\*[\"']?[ \t]{0,3}(?:=|:(?!//))[ \t]{0,3}|(?P<space>[\"']?,?[ \t]+))"
    r"(?:(?i:Bearer|Basic|Token)[ \t]+)?"
    r"(?:\\*(?P<quote>[\"'])(?P<quoted>(?:(?!\\*(?P=quote)).)*)\\*(?P=quote)"
    r"|(?P<bare>[^\s,;&\"'<>]+))"
)
# What is no secret under any name; and code, in a text.
_NOTHING = re.compile(r"(?i)(?:true|false|yes|no|none|null|auto|value|=|\*+[:;.]*)?$")
_CODE = re.compile(r"[$%]?[{(\[]|(?:self|args|cfg|config|os)\.|\w+[(\[]")


@lru_cache(maxsize=4096)
def is_secret(name: str) -> bool:
    """Whether a variable called NAME is likely to hold a secret."""
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    words = re.sub(r"[\W_]+", "_", f"_{apart}_").upper()
    # A variable's key opens something; in code, keys are many things.
    is_key = name == name.upper() and words.endswith("_KEY_")
    return bool(is_key or _SECRET.search(words)) and not _HARMLESS.search(words)


def _is_meant(name: str, value: str) -> bool:
    """Whether VALUE, which follows NAME, is the secret that the name suggests."""
    # PWD is the folder of a shell, or the password of a connection string.
    is_folder = name.upper() == "PWD" and value[:1] in {"/", "~", "."}
    return is_secret(name) and not (is_folder or _NOTHING.match(value) or value == name)


@lru_cache(maxsize=2048)
def mask(text: str) -> str:
    """Return TEXT without what looks like a secret in it."""
    return _masked(text, [])


def redact(name: str, value: str) -> str:
    """Show VALUE of the variable NAME without a secret and without user:password in an address."""
    return HIDDEN if is_secret(name) else _masked(value, [], is_word=True)


def _masked(text: str, masked: list[str], *, is_word: bool = False) -> str:
    """Mask TEXT, a value of its own if it IS_WORD, and append what was replaced to MASKED."""

    def hide(match: re.Match[str]) -> str:
        begin, end = match.span(1)
        masked.append(match[1])
        return f"{text[match.start() : begin]}{HIDDEN}{text[end : match.end()]}"

    for pattern in (_LOGIN, *_SHAPES):
        text = pattern.sub(hide, text)
    parts, done = [], 0
    for named in _NAME.finditer(text):
        name = named[0]
        # First, as it is cheap: a value may reach to the end of the text.
        if named.start() < done or not is_secret(name):
            continue
        match = _VALUE.match(text, named.end())
        if match is None:
            continue
        is_quoted = match["bare"] is None
        value = match["quoted"] if is_quoted else match["bare"][0] + match["bare"][1:].rstrip(")]}")
        # In a sentence, what follows a word, or a short word after an option, is no value.
        is_prose = match["space"] and (name[0] != "-" or value[:1] == "-" or len(value) <= 4)
        is_code = not (is_word or is_quoted) and _CODE.match(value)
        if not is_prose and not is_code and _is_meant(name, value):
            begin = match.start("quoted" if is_quoted else "bare")
            masked.append(value)
            parts += [text[done:begin], HIDDEN]
            done = begin + len(value)
    return "".join((*parts, text[done:]))


def in_arguments(words: Sequence[str]) -> Iterator[tuple[int, str, str, str]]:
    """Find the secrets among the WORDS of a command line.

    Each is a word's place, what stands before the secret in it, the secret's name ("": it has
    none, only parts of it are secret), and the secret.
    """
    flag = ""
    for at, word in enumerate(words):
        name, rest = flag, word
        if word.startswith("-") or not _is_meant(flag, word):
            name = ""
            while not name and re.match(r"[_\-./:+~@]*[^\W_][\w\-./:+~@]*=", rest):
                key, _, rest = rest.partition("=")
                name = key if _is_meant(key, rest) else ""
        if not name and redact("", rest) == rest:
            rest = word
        if name or redact("", rest) != rest:
            yield at, word[: len(word) - len(rest)], name, rest
        flag = word if word.startswith("-") and "=" not in word else ""


def conceal(words: Sequence[str]) -> tuple[str, ...]:
    """Return the WORDS of a command line without secrets.

    >>> conceal(["--env=HF_TOKEN=abc", "train.py", "--db-password", "xyz", "--max_token", "512"])
    ('--env=HF_TOKEN=***', 'train.py', '--db-password', '***', '--max_token', '512')
    """
    shown = list(words)
    for at, before, name, value in in_arguments(words):
        # An address without its user and password still says something.
        shown[at] = before + (HIDDEN if name else redact("", value))
    return tuple(shown)


class Hider:
    """Removes the secrets of ENVIRON and of the command line WORDS, and all that looks like one."""

    def __init__(self, environ: Mapping[str, str], words: Sequence[str] = ()) -> None:
        self._environ = environ
        self._words = words
        self._values: tuple[str, ...] | None = None

    def __call__(self, text: str) -> str:
        """Return TEXT without secrets."""
        if self._values is None:
            self._values = self._find()
        for value in self._values:
            text = text.replace(value, HIDDEN)
        return mask(text)

    def _find(self) -> tuple[str, ...]:
        values = [value for name, value in self._environ.items() if is_secret(name)]
        arguments = list(in_arguments(self._words))
        values += [value for _, _, name, value in arguments if name]
        for value in (*self._environ.values(), *(value for *_, value in arguments)):
            _masked(value, values, is_word=True)
        # The password of a login; and all values as they appear within quotes.
        values += [value.partition(":")[2] for value in values]
        values += [repr(value)[1:-1] for value in values]
        # Longer ones first: one may be part of another.
        return tuple(sorted(filter(_is_distinct, set(values)), key=len, reverse=True))


def of_launch(request: Request, environ: Mapping[str, str]) -> Hider:
    """Return the redactor of a launch: for the secrets in ENVIRON and in REQUEST."""
    return Hider({**environ, **dict(request.env)}, request.typed)


def _is_distinct(value: str) -> bool:
    """Whether VALUE is the secret wherever it appears, as it is no word, number, path or name."""
    # Shorter ones are parts of too many words.
    if len(value) < 6 or value.startswith(("/", "./", "~")) or HIDDEN in value:
        return False
    is_word = re.sub(r"[_.\-]", "", value).isalpha() and value in (value.lower(), value.upper())
    return not (is_word and len(value) < 18) and not (value.isdigit() and len(value) <= 8)


def everywhere(document: object, redactor: Callable[[str], str]) -> object:
    """Return the JSON value DOCUMENT with REDACTOR applied to every text in it."""
    if isinstance(document, str):
        return redactor(document)
    if isinstance(document, dict):
        return {key: everywhere(value, redactor) for key, value in document.items()}
    if isinstance(document, (list, tuple)):
        return [everywhere(value, redactor) for value in document]
    return document
