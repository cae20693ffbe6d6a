"""Which values must never be shown or written down: known by their name, and by their shape.

Ranks load this file by its path, whatever Python they have: it imports nothing of fleetrun.
"""

# No syntax younger than Python 3.7, for those ranks; and `re` costs nothing, `typing` has it.
from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from fleetrun.model import Request

HIDDEN = "***"

# -- names ----------------------------------------------------------------------------------------

# Parts that say "secret" wherever they stand in a word: MYPASSWORD, DB_PASSWORDS.
_STEMS = (
    *("PASSWORD", "PASSWD", "PASSPHRASE", "PASSCODE", "SECRET", "CREDENTIAL", "APIKEY"),
    *("PRIVATEKEY", "ACCESSKEY", "ACCESSTOKEN", "AUTHTOKEN", "SSHPASS"),
)
# Words that can mean nothing else, and pairs of words.
_CERTAIN = frozenset(
    (
        *("CREDS", "JWT", "BEARER", "AUTHORIZATION", "WEBHOOK", "OTP", "SESSID", "PHPSESSID"),
        *("JSESSIONID", "SIGNATURE", "SIG"),
    )
)
_PAIRS = (
    *("API_KEY", "ACCESS_KEY", "PRIVATE_KEY", "ACCOUNT_KEY", "SIGNING_KEY", "ENCRYPTION_KEY"),
    *("ACCESS_TOKEN", "AUTH_TOKEN", "API_TOKEN", "REFRESH_TOKEN", "SESSION_TOKEN", "BOT_TOKEN"),
    *("SECURITY_TOKEN", "BEARER_TOKEN", "SESSION_ID", "SESSION_KEY", "ID_TOKEN"),
)
# Ends of a word: GITHUBTOKEN and OAUTH, but not TOKENIZERS, MAX_TOKENS or AUTHOR.
_ENDS = ("TOKEN", "AUTH")
_WORDS = frozenset(("PASS", "COOKIE", "COOKIES"))
# What the last word says; PAT is a personal access token only after somebody's name.
_LAST = frozenset(("KEY", "PWD", "SESSION", "SESSIONID", "PSK"))
_FOLDERS = frozenset(("PWD", "OLDPWD"))
_DESKTOP = frozenset(("XDG", "DESKTOP", "TERM", "GNOME", "KDE", "GDM", "TMUX", "DBUS"))
# Keys that open nothing.
_OTHER_KEYS = frozenset(
    (
        *("PUBLIC", "SORT", "PRIMARY", "FOREIGN", "GROUP", "LABEL", "IMAGE", "FEATURE", "INPUT"),
        *("OUTPUT", "STATE", "TARGET", "METRIC", "MONITOR", "COLUMN", "PARTITION", "INDEX"),
    )
)
# A secret's file, name or length is none.
_ABOUT = frozenset(
    (
        *("FILE", "FILES", "PATH", "PATHS", "DIR", "FOLDER", "NAME", "LENGTH", "LEN", "SIZE"),
        *("COUNT", "TTL", "TIMEOUT", "EXPIRY", "EXPIRES", "TYPE", "ALGORITHM", "POLICY"),
        *("HELPER", "PROMPT"),
    )
)
_SURE, _UNSURE, _NONE = 2, 1, 0


def is_secret(name: str) -> bool:
    """Whether a variable called NAME is likely to hold a secret.

    >>> is_secret("HF_TOKEN"), is_secret("aws_access_key_id"), is_secret("TOKENIZERS_PARALLELISM")
    (True, True, False)
    """
    return _certainty(name) != _NONE


def is_certain(name: str) -> bool:
    """Whether NAME can mean nothing but a secret.

    >>> is_certain("--db-password"), is_certain("--pad_token")
    (True, False)
    """
    return _certainty(name) == _SURE


def _certainty(name: str) -> int:
    upper = name.upper()
    # As most are. This is asked of every variable, and of every word before = or : in a text.
    if name in _FOLDERS or not any(part in upper for part in _PARTS):
        return _NONE
    words = _words(name)
    joined = "_".join(words)
    if not words or _is_other(words, joined):
        return _NONE
    if (
        any(stem in upper for stem in _STEMS)
        or not _CERTAIN.isdisjoint(words)
        or any(f"_{pair}_" in f"_{joined}_" for pair in _PAIRS)
    ):
        return _SURE
    if not (
        any(word in _WORDS or word.endswith(_ENDS) for word in words)
        or words[-1] in _LAST
        or (words[-1] == "PAT" and len(words) > 1)
    ):
        return _NONE
    # Variables are named for what they hold; in code `token` and `key` are many things.
    return _SURE if name == upper else _UNSURE


def _is_other(words: list[str], joined: str) -> bool:
    """Whether WORDS name something about a secret, or something else that is called so."""
    return (
        words[-1] in _ABOUT
        or (words[-1] == "KEY" and not _OTHER_KEYS.isdisjoint(words))
        or (words[0] in _DESKTOP and "SESSION" in joined and "TOKEN" not in joined)
        or "SECRETAR" in joined
    )


_PARTS = (
    *("PASS", "SECRET", "CRED", "KEY", "TOKEN", "AUTH", "JWT", "BEARER", "HOOK", "OTP", "SESS"),
    *("SIG", "COOKIE", "PWD", "PSK", "PAT"),
)


def _words(name: str) -> list[str]:
    """Return the words of a NAME in upper case.

    >>> _words("--db-password"), _words("AccountKey"), _words("X-Amz-Signature")
    (['DB', 'PASSWORD'], ['ACCOUNT', 'KEY'], ['X', 'AMZ', 'SIGNATURE'])
    """
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", name)
    return "".join(c if c.isalnum() else " " for c in apart).upper().split()


# -- values ---------------------------------------------------------------------------------------

# Numbers up to this long are sizes and ids (`--max_token 4096`), not keys.
_SHORT = 6
# Code is full of `token: ")"`.
_LEAST_UNSURE = 3
_PLAIN_WORDS = frozenset(("", "true", "false", "yes", "no", "none", "null", "auto", HIDDEN))
# What code has where a secret would be: types, and where it gets its value from.
_CODE = (
    r"(?:str|bytes|int|bool|Any|Optional|SecretStr|lambda)\b|"
    r"(?:self|args|opts?|cfg|conf|config|kwargs|os|env|getpass)[.\[]|[$%]?[{(]"
)
# What stands after the -p of other programs than those that want a password.
_OTHER_P = (
    r"[./~]|[\w.\-]*[/=\\]|[\w\-]+\.[A-Za-z]\w{0,4}$|(?:fp|bf|tf|u?int|float|O)\d+$|"
    r"[\d.:\-]+(?:/\w+)?$"
)


def _is_plain(value: str) -> bool:
    """Whether VALUE is none under a name that may mean something else, too.

    >>> _is_plain("512"), _is_plain("<pad>"), _is_plain("True"), _is_plain("k3y-of-mine")
    (True, True, True, False)
    """
    return (
        value.lower() in _PLAIN_WORDS
        or (len(value) <= _SHORT and value.lstrip("-").replace(".", "", 1).isdigit())
        or value[:1] + value[-1:] in ("<>", "[]")
    )


def _is_identifier(value: str) -> bool:
    """Whether VALUE is what code calls something: `image`, `model.keys`."""
    return value.islower() and value.replace("_", "").replace(".", "").isalpha()


def _is_random(value: str) -> bool:
    """Whether VALUE looks drawn, not named: digits and letters change often.

    >>> _is_random("a8Fx03kQz91b"), _is_random("conv1_weights"), _is_random("fuse_grad_size_in_MB")
    (True, False, False)
    """
    changes = sum(
        (one.isdigit(), one.isupper()) != (two.isdigit(), two.isupper())
        for one, two in zip(value, value[1:])  # noqa: B905, RUF007 - an old Python has no other
    )
    return len(value) >= 12 and any(c.isdigit() for c in value) and changes >= 4


def _is_meant(name: str, value: str, *, quoted: bool, spaced: bool) -> bool:
    """Whether VALUE, which stands after NAME in a text, is the secret that NAME promises."""
    # The folder of a shell, or the password of a connection string.
    certainty = (_NONE if value[:1] in "/~." else _SURE) if name == "PWD" else _certainty(name)
    # Hidden already, or what a sentence of help calls it: `KEY=VALUE`.
    is_none = set(value.rstrip(":;.")) == {"*"} or value == "VALUE"
    if is_none or certainty == _NONE or value.lower() in _PLAIN_WORDS:
        return False
    if not quoted and (re.match(_CODE, value) or value == name):
        return False
    if certainty == _SURE:
        return True
    if _is_plain(value) or len(value) < _LEAST_UNSURE:
        return False
    if quoted or not spaced:
        # `key=image`, `session="main"`, `auth=basic`.
        is_other = _is_identifier(value) and (not quoted or _words(name)[-1] in _LAST)
        return not is_other and set("([{").isdisjoint(value)
    return _is_random(value)


# -- texts ----------------------------------------------------------------------------------------

# Patterns are compiled when they are first used: an ordinary launch uses none.
# Services whose keys say themselves what they are.
_KEYS = (
    r"\b(?:(?:A3T|AKIA|ASIA|AGPA|AROA|AIDA)[0-9A-Z]{16}|gh[pousr]_\w{16,}|github_pat_\w{16,}"
    r"|gl[a-z]{2,6}-[\w\-]{16,}|xox[abeoprs]-[\w\-]{8,}|xapp-[\w\-]{8,}|sk-[\w\-]{16,}"
    r"|[srp]k_(?:live|test)_\w{8,}|hf_[A-Za-z0-9]{16,}|npm_\w{16,}|pypi-[\w\-]{16,}"
    r"|AIza[\w\-]{20,}|ya29\.[\w\-]{8,}|SG\.[\w\-]{8,}\.[\w\-]{8,}|nvapi-[\w\-]{16,}"
    r"|dckr_pat_[\w\-]{16,}|dop_v1_\w{16,}|hv[sb]\.[\w\-]{16,}|LTAI[A-Za-z0-9]{12,}"
    r"|AKID[A-Za-z0-9]{16,}|ALTAK[A-Za-z0-9]{12,}|eyJ[\w\-]{8,}\.[\w\-]{4,}(?:\.[\w\-]*)?)"
)
_PEM = r"(?s)(-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----)(.*?)(?=-----END|\Z)"
# Addresses that are secrets from here on.
_HOOKS = (
    r"((?:hooks\.slack\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks"
    r"|open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot/v2/hook|[\w.\-]*webhook\.office\.com"
    r"|outlook\.office\.com/webhook|hooks\.zapier\.com/hooks|maker\.ifttt\.com/\S*?/key)/"
    r"|api\.telegram\.org/bot)([^\s\"'<>,?]+)"
)
_SCHEMES = r"(?i)\b(Bearer|Basic|Token|Digest)(\s+)([\w+/=.~\-]{8,})"
_COOKIES = r"(?i)\b((?:set-)?cookie\\*[\"']?\s*:\s*\\*[\"']?)([^\r\n\"']+)"
_USER = r"://([^\s\"'<>,;@]*(?:@[^\s\"'<>,;@/?#]*(?=@))*)@"
# Programs that take a password so.
_CLIENTS = (
    r"\b((?:mysql\w*|mariadb[\w\-]*)\b[^\n]{0,200}?[\"'\s]-p|sshpass[\"',]*\s+[\"']?-p[\"',]*\s*[\"']?"
    r"|redis-cli\b[^\n]{0,200}?[\"'\s]-a[\"',]*\s+[\"']?)([^\s\"',]+)"
)
_CLIENT_NAMES = ("mysql", "mariadb", "sshpass", "redis-cli")
# Parameters of signed addresses that mean something else elsewhere.
_QUERY = r"(?i)([?&;](?:key|code|sign|auth|q-ak|token)=)([^&;#\s\"'<>]+)"
_LEAST_QUERY = 12
_NAME = r"(?<![\w.\-])[\w.\-]+(?=\\*[\"']?[ \t]{0,3}[:=])"
_VALUE = (
    r"\\*[\"']?(?P<space>[ \t]{0,3})(?:=>|:=|==?|:(?!//))[ \t]{0,3}"
    r"(?P<scheme>(?:Bearer|Basic|Token|Digest)[ \t]+)?(?P<quote>\\*[\"'])?"
)
# Quotes and blanks around an equals sign are not that long.
_MOST_BETWEEN = 40
_BARE = r"[^\s,;&\"'<>]+"
_FLAG = r"(?<![\w.\-])(--?[A-Za-z][\w.\-]*)([\"']?,?[ \t]+[\"']?)([^\s\"',]+)"
_PROSE = frozenset(["to", "is", "in", "on", "of", "or", "and", "the", "a", "an", "for", "with"])


def mask(text: str) -> str:
    """Return TEXT without what looks like a secret in it.

    >>> mask("https://me:pw@h/?access_token=abc&a=1"), mask('{"password": "a", "lr": 1}')
    ('https://***@h/?access_token=***&a=1', '{"password": "***", "lr": 1}')
    >>> mask("--max_tokens=512 --tokenizer=bert author=me PASSWORD_FILE=/run/x")
    '--max_tokens=512 --tokenizer=bert author=me PASSWORD_FILE=/run/x'
    """
    return _masked(text, [])


def _masked(text: str, found: list[str]) -> str:
    """Mask TEXT, and put into FOUND what was masked."""
    lower = text.lower()
    for marks, pattern, hide in _SHAPES:
        # Looking for a mark first is many times faster than looking for what it may begin.
        if any(mark in lower for mark in marks):
            text = re.sub(pattern, lambda match, hide=hide: hide(match, found), text)  # type: ignore[misc]
    if any(part in lower for part in _LOWER_PARTS):
        text = _pairs(text, found)
    return text


def _whole(match: re.Match[str], found: list[str]) -> str:
    found.append(match[0])
    return HIDDEN


def _second(match: re.Match[str], found: list[str]) -> str:
    found.append(match[2])
    return match[1] + HIDDEN


def _without_user(match: re.Match[str], found: list[str]) -> str:
    scheme = match.string[max(0, match.start() - 8) : match.start()]
    if not _is_login(scheme, match[1]):
        return match[0]
    found.extend((match[1], match[1].partition(":")[2]))
    return f"://{HIDDEN}@"


def _is_login(scheme: str, user: str) -> bool:
    """Whether USER, before the @ of an address, lets somebody in: no path, no mere name for ssh."""
    if ":" in user:
        return True
    return "/" not in user and user != HIDDEN and not scheme.lower().endswith(("ssh", "sftp"))


def _query(match: re.Match[str], found: list[str]) -> str:
    is_token = match[1][1:-1].lower() == "token"
    if _is_plain(match[2]) or (len(match[2]) < _LEAST_QUERY and not is_token):
        return match[0]
    return _second(match, found)


def _scheme(match: re.Match[str], found: list[str]) -> str:
    scheme, blank, value = match.groups()
    is_prose = value.isalpha() and (value.islower() or value.istitle())
    if is_prose or (scheme.lower() == "token" and not _is_random(value)):
        return match[0]
    found.append(value)
    return f"{scheme}{blank}{HIDDEN}"


def _flag(match: re.Match[str], found: list[str]) -> str:
    name, between, value = match.groups()
    is_meant = _is_meant(name, value, quoted=False, spaced=False)
    if not is_meant or value.startswith("-") or value in _PROSE:
        return match[0]
    found.append(value)
    return f"{name}{between}{HIDDEN}"


# What one of must be in a text (in small letters), what is looked for, and what becomes of it.
_SHAPES = (
    (("://",), _USER, _without_user),
    (("private key",), _PEM, _second),
    (
        (
            *("a3t", "akia", "asia", "agpa", "aroa", "aida", "gh", "gl", "xox", "xapp-", "sk-"),
            *("k_live", "k_test", "hf_", "npm_", "pypi-", "aiza", "ya29.", "sg.", "nvapi-"),
            *("dckr_", "dop_v1_", "hvs.", "hvb.", "ltai", "akid", "altak", "eyj"),
        ),
        _KEYS,
        _whole,
    ),
    (("hook", "telegram", "ifttt"), _HOOKS, _second),
    (_CLIENT_NAMES, _CLIENTS, _second),
    (("?", "&", ";"), _QUERY, _query),
    (("cookie",), _COOKIES, _second),
    (("bearer", "basic", "token", "digest"), _SCHEMES, _scheme),
    (("--", " -"), _FLAG, _flag),
)
_LOWER_PARTS = tuple(part.lower() for part in _PARTS)


def _pairs(text: str, found: list[str]) -> str:
    """Mask the values of `name=value`, `"name": "value"` and the like in TEXT."""
    parts: list[str] = []
    done = 0
    bares = re.compile(_BARE)
    for named in re.finditer(_NAME, text):
        if named.start() < done or not (named[0] == "PWD" or _certainty(named[0])):
            continue
        begin = re.match(_VALUE, text[named.end() : named.end() + _MOST_BETWEEN])
        if begin is None:
            continue
        start = named.end() + begin.end()
        quote = begin["quote"]
        if quote:
            end = _end_of_quoted(text, start, quote)
        else:
            bare = bares.match(text, start)
            end = start if bare is None else bare.end()
            # The brackets of a list or a call around it are not its own.
            while end - start > 1 and text[end - 1] in ")]}":
                end -= 1
        value = text[start:end]
        spaced = bool(begin["space"]) or ":" in begin[0]
        if not value or not (
            begin["scheme"] or _is_meant(named[0], value, quoted=bool(quote), spaced=spaced)
        ):
            continue
        found.append(value)
        parts += (text[done:start], HIDDEN)
        done = end
    return "".join((*parts, text[done:]))


def _end_of_quoted(text: str, start: int, quote: str) -> int:
    """Return where the text that QUOTE has opened before START ends."""
    end = text.find(quote, start)
    while quote in ('"', "'") and end > start and _is_escaped(text, end):
        end = text.find(quote, end + 1)
    if end < 0:
        end = text.find("\n", start)
    return len(text) if end < 0 else end


def _is_escaped(text: str, at: int) -> bool:
    begin = at
    while begin and text[begin - 1] == "\\":
        begin -= 1
    return bool((at - begin) % 2)


def redact(name: str, value: str) -> str:
    """Show VALUE of the variable NAME without a secret and without user:password in an address.

    >>> redact("HF_TOKEN", "abc"), redact("http_proxy", "http://me:pw@proxy:3128/")
    ('***', 'http://***@proxy:3128/')
    """
    return HIDDEN if is_secret(name) else _redacted(value, [])


def _redacted(value: str, found: list[str]) -> str:
    """Mask VALUE, a word or a variable: other than in a text, an address ends where it does."""
    head, *rest = value.split("://")
    if not rest or "@" not in value:
        return _masked(value, found)
    scheme = head
    parts = [head]
    for part in rest:
        # Not cut at the first slash: people write passwords with slashes in them.
        end = min((i for i in map(part.find, " ,;") if i >= 0), default=len(part))
        user, at, _ = part[:end].rpartition("@")
        if at and _is_login(scheme, user):
            found.extend((user, user.partition(":")[2]))
            parts.append(HIDDEN + part[len(user) :])
        else:
            parts.append(part)
        scheme = part
    return _masked("://".join(parts), found)


# -- command lines --------------------------------------------------------------------------------


def in_arguments(words: Sequence[str]) -> Iterator[tuple[int, str, str, str]]:
    """Find the secrets among the WORDS of a command line.

    Each is a word's place, what stands before the secret in it, the secret's name ("": it has
    none, only parts of it are secret), and the secret.

    >>> list(in_arguments(["train.py", "--db-password", "xyz", "--url=http://me:pw@h"]))
    [(2, '', '--db-password', 'xyz'), (3, '--url=', '', 'http://me:pw@h')]
    """
    flag = ""
    client = ""
    for at, word in enumerate(words):
        program = word.rpartition("/")[2]
        if program.startswith(_CLIENT_NAMES):
            client = program
        before, name, value = _in_argument(word, flag, client)
        flag = word if word.startswith("-") and "=" not in word else ""
        if value is not None:
            yield at, before, name, value


def _in_argument(word: str, flag: str, client: str) -> tuple[str, str, str | None]:
    """Return what stands before WORD's secret, its name ("" for a part of it), and the secret."""
    if flag and not word.startswith("-") and (_is_secret(flag, word) or _is_login_of(client, flag)):
        return "", flag, word
    if client.startswith(("mysql", "mariadb", "sshpass")) and word[:2] == "-p" and word[2:]:
        return "-p", "-p", word[2:]
    if flag in ("-u", "--user", "--userpwd"):
        user, colon, password = word.partition(":")
        if colon and not _is_plain(password) and password[0] not in "/\\":
            return f"{user}:", "--user-password", password
    before, rest = "", word
    while True:
        name, equals, value = rest.partition("=")
        if not equals or not _is_name(name):
            break
        before += f"{name}="
        if _is_secret(name, value):
            return before, name, value
        rest = value
    if _redacted(rest, []) == rest:
        before, rest = "", word
    return before, "", None if _redacted(rest, []) == rest else rest


def _is_login_of(client: str, flag: str) -> bool:
    return client == "redis-cli" and flag == "-a"


def _is_name(text: str) -> bool:
    return text.strip("-+~@") != "" and all(char.isalnum() or char in "_-./:+~@" for char in text)


def _is_secret(name: str, value: str) -> bool:
    """Whether VALUE is the secret that NAME promises; models have tokens too, and sort keys."""
    if name == "-p":
        return not (_is_plain(value) or re.match(_OTHER_P, value))
    certainty = _certainty(name)
    if certainty == _NONE or value == HIDDEN or not value:
        return False
    is_other = certainty == _UNSURE and (
        re.match(_CODE, value) is not None
        or _is_plain(value)
        or (_words(name)[-1] in _LAST and _is_identifier(value) and len(value) <= _SHORT)
    )
    return not is_other


# -- known values ---------------------------------------------------------------------------------

# Shorter ones are parts of too many words.
_LEAST = 6


class Hider:
    """Takes the secrets of ENVIRON and WORDS, a command line, and all that looks like one out."""

    def __init__(self, environ: Mapping[str, str], words: Sequence[str] = ()) -> None:
        self._environ = environ
        self._words = words
        self._values: tuple[str, ...] | None = None

    def __call__(self, text: str) -> str:
        """Return TEXT without secrets."""
        if self._values is None:
            self._values = self._find()
        for value in self._values:
            if value in text:
                text = text.replace(value, HIDDEN)
        return mask(text)

    def _find(self) -> tuple[str, ...]:
        found: list[str] = []
        for name, value in self._environ.items():
            if is_secret(name):
                found.append(value)
            _redacted(value, found)
        for _, _, name, value in in_arguments(self._words):
            if name:
                found.append(value)
            _redacted(value, found)
        # As it is told within quotes.
        found += [repr(value)[1:-1] for value in found]
        distinct = {value for value in found if _is_distinct(value)}
        # One may be a part of another.
        return tuple(sorted(distinct, key=lambda value: (-len(value), value)))


def of_launch(request: Request, environ: Mapping[str, str]) -> Hider:
    """Return what hides the secrets of a launch: those of ENVIRON, and of what REQUEST says."""
    return Hider({**environ, **dict(request.env), **dict(request.nccl)}, request.typed)


def _is_distinct(value: str) -> bool:
    """Whether VALUE, wherever it stands, is the secret: no word, number, path or name.

    >>> _is_distinct("hunter2"), _is_distinct("attention"), _is_distinct("/run/key.pem")
    (True, False, False)
    """
    if len(value) < _LEAST or value.startswith(("/", "./", "~")) or HIDDEN in value:
        return False
    plain = value.replace("_", "").replace("-", "").replace(".", "")
    is_word = plain.isalpha() and (value.islower() or value.isupper() or value.istitle())
    return not (is_word and len(value) < 3 * _LEAST) and not (
        value.isdigit() and len(value) <= _LEAST + 2
    )


def everywhere(document: object, hide: Callable[[str], str]) -> object:
    """Return DOCUMENT, as JSON has it, with every text in it as HIDE makes it.

    >>> everywhere({"a": ["https://me:pw@h", 1]}, mask)
    {'a': ['https://***@h', 1]}
    """
    if isinstance(document, str):
        return hide(document)
    if isinstance(document, dict):
        return {key: everywhere(value, hide) for key, value in document.items()}
    if isinstance(document, (list, tuple)):
        return [everywhere(value, hide) for value in document]
    return document
