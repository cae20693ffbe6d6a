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

# The words of a name, each between two "_": those that can only mean a secret, those that may mean
# one, and those that describe one (its file, its length), or have a similar name and open nothing.
_CERTAIN = re.compile(
    r"PASSWORD|PASSWD|PASSPHRASE|PASSCODE|SECRET|CREDENTIAL|SSHPASS|API_?KEY|PRIVATE_?KEY"
    r"|ACCESS_?KEY|(?:ACCESS|AUTH|API|REFRESH|BOT|SECURITY|BEARER)_?TOKEN"
    r"|_(?:CREDS|JWT|BEARER|AUTHORIZATION|WEBHOOK|OTP|SIGNATURE|SIG)_"
)
_LIKELY = re.compile(r"TOKEN_|AUTH_|_(?:PASS|COOKIES?|KEY|PWD|SESSION|SESSION_?ID|PSK|[^_]+_PAT)_$")
_HARMLESS = re.compile(
    r"_(?:FILES?|PATHS?|DIR|FOLDER|NAME|LENGTH|LEN|SIZE|COUNT|TTL|TIMEOUT|EXPIRY|EXPIRES|TYPE"
    r"|ALGORITHM|POLICY|HELPER|PROMPT)_$|SECRETAR|^_PWD_$"
    r"|_(?:PUBLIC|SORT|PRIMARY|FOREIGN|GROUP|LABEL|IMAGE|FEATURE|INPUT|OUTPUT|STATE|TARGET|METRIC"
    r"|MONITOR|COLUMN|PARTITION|INDEX)_(?:.*_)?KEY_$"
    r"|^_(?:XDG|DESKTOP|TERM|GNOME|KDE|GDM|TMUX|DBUS)_(?!.*TOKEN).*SESSION"
)
# A text without any of these has no secret.
_MARKS = re.compile(
    r"(?i)pass|secret|cred|key|token|auth|jwt|bearer|hook|otp|sess|sig|cookie|pwd|psk|pat"
    r"|://.*@|hf_|npm_|nvapi|sk-|gh[pousr]_|gl\w+-|xox|xapp-|akia|asia|ltai|akid|eyj|aiza|pypi|ya29"
    r"|sg\.|telegram"
)
# Shapes whose last group (or whole) is a secret: the part before the @ of an address, which in a
# whole value ends with the last @, as passwords may contain slashes and quotes;
_LOGIN = re.compile(
    r"://([^\s\"'<>,;@/?#]*:(?:(?!://)[^\s\"'<>,;])*?|(?<!ssh://)(?<!sftp://)[^\s\"'<>,;@/?#]+)@"
)
_LOGIN_IN_WORD = re.compile(
    r"://((?:(?!://)[^ ,;@/])*:(?:(?!://)[^ ,;])*|(?<!ssh://)(?<!sftp://)[^ ,;@/?#]+)@"
)
# private keys, the keys of services by their prefixes, and addresses whose last part is a secret.
_SHAPES = (
    re.compile(r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(.*?)(?:-----END|\Z)"),
    re.compile(
        r"\b((?:AKIA|ASIA|AROA)[0-9A-Z]{16}|xox[abeoprs]-[\w\-]{8,}|xapp-[\w\-]{8,}|sk-[\w\-]{16,}"
        r"|[srp]k_(?:live|test)_\w{8,}|hf_[A-Za-z0-9]{16,}|npm_\w{16,}|pypi-[\w\-]{16,}"
        r"|AIza[\w\-]{20,}|ya29\.[\w\-]{8,}|SG\.[\w\-]{8,}\.[\w\-]{8,}|nvapi-[\w\-]{16,}"
        r"|gh[pousr]_\w{16,}|github_pat_\w{16,}|gl[a-z]{2,6}-[\w\-]{16,}"
        r"|LTAI[A-Za-z0-9]{12,}|AKID[A-Za-z0-9]{16,}|eyJ[\w\-]{8,}\.[\w\-]{4,}(?:\.[\w\-]*)?)"
    ),
    re.compile(
        r"(?:hooks\.slack\.com/\w+/|/webhooks/|/bot/v2/hook/|webhook\.office\.com/"
        r"|zapier\.com/hooks/|api\.telegram\.org/bot)([^\s\"'<>,?]+)"
    ),
)
# A name, and after it (`name=value`, `"name": "value"`, `--name value` and the like) its value.
_NAME = re.compile(r"(?<![\w.\-])-{0,2}[A-Za-z][\w.\-]*")
_VALUE = re.compile(
    r"(?s)(?:\\*[\"']?[ \t]{0,3}(?:=>|:=|=|:(?!//))[ \t]{0,3}|(?P<space>[\"']?,?[ \t]+))"
    r"(?:(?i:Bearer|Basic|Token|Digest)[ \t]+)?"
    r"(?:\\*(?P<quote>[\"'])(?P<quoted>(?:(?!\\*(?P=quote)).)*)\\*(?P=quote)"
    r"|(?P<bare>[^\s,;&\"'<>]+))"
)
# What is no secret under any name; what is none under one that may mean something else.
_NOTHING = re.compile(r"(?i)(?:true|false|yes|no|none|null|auto|value|\*+[:;.]*)?$")
# Numbers up to six digits are sizes and ids, `<pad>` is a token of a model, and code is code.
_ORDINARY = re.compile(
    r"(?s)(?=.{1,6}$)-*\d+\.?\d*$|<.*>$|\[.*\]$|[$%]?[{(]|lambda\b"
    r"|(?:self|args|opts?|cfg|conf|config|kwargs|os|env|getpass)[.\[]"
)
_IDENTIFIER = re.compile(r"[a-z_.]+$")
# A short word after these is a column or the name of a session.
_MANY_THINGS = re.compile(r"(?i)(?:key|pwd|psk|session(?:_?id)?)$")
# In a sentence, a short word after an option is no value: to, the, with.
_LONGEST_WORD = 4


def is_secret(name: str) -> bool:
    """Whether a variable called NAME is likely to hold a secret.

    >>> is_secret("HF_TOKEN"), is_secret("aws_access_key_id"), is_secret("TOKENIZERS_PARALLELISM")
    (True, True, False)
    """
    return any(_certainty(name))


@lru_cache(maxsize=4096)
def _certainty(name: str) -> tuple[bool, bool]:
    """Return whether NAME is that of a secret for certain, and whether it may be."""
    if not _MARKS.search(name):
        return False, False
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    words = re.sub(r"[\W_]+", "_", f"_{apart}_").upper()
    if _HARMLESS.search(words):
        return False, False
    is_likely = _LIKELY.search(words) is not None
    # Variables are named for what they hold; in code `token` and `key` are many things.
    return bool(_CERTAIN.search(words)) or (is_likely and name == name.upper()), is_likely


def _is_meant(name: str, value: str, *, is_word: bool = False, is_quoted: bool = False) -> bool:
    """Whether VALUE, which follows NAME, is the secret that the name suggests.

    It may be code, or a word of a sentence, unless it is a word of a command line (IS_WORD) or
    IS_QUOTED.
    """
    is_certain, is_likely = _certainty(name)
    if name.upper() == "PWD" and value[:1] not in "/~.":
        # Not the folder of a shell, but the password of a connection string.
        is_certain = True
    if _NOTHING.match(value) or value == name:
        return False
    if is_certain:
        return is_word or is_quoted or value[:1] not in "({$"
    if not is_likely or _ORDINARY.match(value):
        return False
    is_identifier = _IDENTIFIER.match(value) is not None
    if is_word:
        return len(value) > 6 or not (is_identifier and _MANY_THINGS.search(name))
    return _is_random(value) or (is_quoted and len(value) > 6 and not is_identifier)


def _is_random(value: str) -> bool:
    """Whether VALUE looks random, not like a name: digits and letters alternate often.

    >>> _is_random("a8Fx03kQz91b"), _is_random("conv1_weights"), _is_random("fuse_grad_size_in_MB")
    (True, False, False)
    """
    runs = re.findall(r"[0-9]+|[A-Z]+|[^0-9A-Z]+", value)
    return len(value) >= 12 and len(runs) > 4 and any(run.isdigit() for run in runs)


@lru_cache(maxsize=2048)
def mask(text: str) -> str:
    """Return TEXT without what looks like a secret in it.

    >>> mask("https://me:pw@h/?access_token=abc&a=1"), mask('{"password": "a", "lr": 1}')
    ('https://***@h/?access_token=***&a=1', '{"password": "***", "lr": 1}')
    >>> mask("--max_tokens=512 --tokenizer=bert author=me PASSWORD_FILE=/run/x")
    '--max_tokens=512 --tokenizer=bert author=me PASSWORD_FILE=/run/x'
    """
    return _masked(text, [])


def redact(name: str, value: str) -> str:
    """Show VALUE of the variable NAME without a secret and without user:password in an address.

    >>> redact("HF_TOKEN", "abc"), redact("http_proxy", "http://me:pw@proxy:3128/")
    ('***', 'http://***@proxy:3128/')
    """
    return HIDDEN if is_secret(name) else _masked(value, [], is_word=True)


def _masked(text: str, masked: list[str], *, is_word: bool = False) -> str:
    """Mask TEXT, and append what was replaced to MASKED."""
    if not _MARKS.search(text):
        return text

    def hide(match: re.Match[str]) -> str:
        begin, end = match.span(match.lastindex or 0)
        masked.append(text[begin:end])
        return f"{text[match.start() : begin]}{HIDDEN}{text[end : match.end()]}"

    for pattern in (_LOGIN_IN_WORD if is_word else _LOGIN, *_SHAPES):
        text = pattern.sub(hide, text)
    parts, done = [], 0
    for begin, end in _named(text):
        masked.append(text[begin:end])
        parts += [text[done:begin], HIDDEN]
        done = end
    return "".join((*parts, text[done:]))


def _named(text: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of the secrets in TEXT that follow their names."""
    done = 0
    for named in _NAME.finditer(text):
        name = named[0]
        if named.start() < done or not (name.upper() == "PWD" or is_secret(name)):
            continue
        match = _VALUE.match(text, named.end())
        # In a sentence, what follows a word is no value.
        if match is None or (match["space"] and not name.startswith("-")):
            continue
        group = "quoted" if match["bare"] is None else "bare"
        begin, end = match.span(group)
        if group == "bare":
            # The brackets of a list or a call around it are not its own.
            end = max(begin + 1, begin + len(match["bare"].rstrip(")]}")))
        value = text[begin:end]
        is_prose = match["space"] and (value.startswith("-") or len(value) <= _LONGEST_WORD)
        if not is_prose and _is_meant(name, value, is_quoted=group == "quoted"):
            yield begin, end
            done = end


def in_arguments(words: Sequence[str]) -> Iterator[tuple[int, str, str, str]]:
    """Find the secrets among the WORDS of a command line.

    Each is a word's place, what stands before the secret in it, the secret's name ("": it has
    none, only parts of it are secret), and the secret.

    >>> list(in_arguments(["train.py", "--db-password", "xyz", "--url=http://me:pw@h"]))
    [(2, '', '--db-password', 'xyz'), (3, '--url=', '', 'http://me:pw@h')]
    """
    flag = ""
    for at, word in enumerate(words):
        if flag and not word.startswith("-") and _is_meant(flag, word, is_word=True):
            yield at, "", flag, word
        else:
            secret = _in_word(word)
            if secret is not None:
                yield (at, *secret)
        flag = word if word.startswith("-") and "=" not in word else ""


def _in_word(word: str) -> tuple[str, str, str] | None:
    """Return what stands before the secret in WORD, its name and the secret, if there is one."""
    rest = word
    while re.match(r"[_\-./:+~@]*[^\W_][\w\-./:+~@]*=", rest):
        name, _, rest = rest.partition("=")
        if _is_meant(name, rest, is_word=True):
            return word[: len(word) - len(rest)], name, rest
    for part in (rest, word):
        if redact("", part) != part:
            return word[: len(word) - len(part)], "", part
    return None


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
        distinct = filter(_is_distinct, set(values))
        return tuple(sorted(distinct, key=lambda value: (-len(value), value)))


def of_launch(request: Request, environ: Mapping[str, str]) -> Hider:
    """Return the redactor of a launch: for the secrets in ENVIRON and in REQUEST."""
    return Hider({**environ, **dict(request.env), **dict(request.nccl)}, request.typed)


def _is_distinct(value: str) -> bool:
    """Whether VALUE is the secret wherever it appears, as it is no word, number, path or name.

    >>> _is_distinct("hunter2"), _is_distinct("attention"), _is_distinct("/run/key.pem")
    (True, False, False)
    """
    # Shorter ones are parts of too many words.
    if len(value) < 6 or value.startswith(("/", "./", "~")) or HIDDEN in value:
        return False
    plain = value.replace("_", "").replace(".", "").replace("-", "")
    is_word = plain.isalpha() and (value.islower() or value.isupper() or value.istitle())
    return not (is_word and len(value) < 18) and not (value.isdigit() and len(value) <= 8)


def everywhere(document: object, redactor: Callable[[str], str]) -> object:
    """Return the JSON value DOCUMENT with REDACTOR applied to every text in it.

    >>> everywhere({"a": ["https://me:pw@h", 1]}, mask)
    {'a': ['https://***@h', 1]}
    """
    if isinstance(document, str):
        return redactor(document)
    if isinstance(document, dict):
        return {key: everywhere(value, redactor) for key, value in document.items()}
    if isinstance(document, (list, tuple)):
        return [everywhere(value, redactor) for value in document]
    return document
