"""Recognises secrets, which must never be shown or stored, by name and by shape.

Ranks load this file by its path, in any Python, so it imports nothing of fleetrun.
"""

# No syntax newer than Python 3.7, for those ranks.
from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    import re
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from fleetrun.model import Request
else:

    class re:  # noqa: N801 - it stands for the module
        """`re`, which takes 6 ms of a launch that has no secrets."""

        def __getattr__(self, name: str) -> object:
            import re

            return getattr(re, name)

    re = re()

HIDDEN = "***"

# Patterns are compiled on first use, and an ordinary launch uses none: a text without any of these
# parts matches no pattern.
_PARTS = (
    *("pass", "secret", "cred", "key", "token", "auth", "jwt", "bearer", "hook", "otp", "sess"),
    *("sig", "cookie", "pwd", "psk", "pat"),
)

# -- names ----------------------------------------------------------------------------------------

# The words of a name, joined by "_": those that can only mean a secret;
_CERTAIN = (
    r"PASSWORD|PASSWD|PASSPHRASE|PASSCODE|SECRET|CREDENTIAL|SSHPASS|API_?KEY|PRIVATE_?KEY"
    r"|ACCESS_?KEY|ACCESS_?TOKEN|AUTH_?TOKEN|_(?:(?:ACCOUNT|SIGNING|ENCRYPTION|SESSION)_KEY"
    r"|(?:API|REFRESH|SESSION|BOT|SECURITY|BEARER|ID)_TOKEN|CREDS|JWT|BEARER|AUTHORIZATION"
    r"|WEBHOOK|OTP|SESSION_ID|(?:PHP|J)?SESS(?:ION)?ID|SIGNATURE|SIG)_"
)
# those that may mean one: GITHUBTOKEN and OAUTH, but not TOKENIZERS, MAX_TOKENS or AUTHOR;
_LAST = r"_(?:KEY|PWD|SESSION|SESSIONID|PSK)_$"
_LIKELY = rf"(?:TOKEN|AUTH|_PASS|_COOKIES?)_|{_LAST}|[^_]_PAT_$"
# and those that describe one (its file, its length), or have a similar name and open nothing.
_HARMLESS = (
    r"_(?:FILES?|PATHS?|DIR|FOLDER|NAME|LENGTH|LEN|SIZE|COUNT|TTL|TIMEOUT|EXPIRY|EXPIRES|TYPE"
    r"|ALGORITHM|POLICY|HELPER|PROMPT)_$|SECRETAR"
    r"|_(?:PUBLIC|SORT|PRIMARY|FOREIGN|GROUP|LABEL|IMAGE|FEATURE|INPUT|OUTPUT|STATE|TARGET|METRIC"
    r"|MONITOR|COLUMN|PARTITION|INDEX)_(?:.*_)?KEY_$"
    r"|^_(?:XDG|DESKTOP|TERM|GNOME|KDE|GDM|TMUX|DBUS)_(?!.*TOKEN).*SESSION|^_DESKTOP_SESSION"
)
# The shortest text with a secret in it is `://a@`. Results for texts shorter than a line are
# cached, as all ranks have nearly the same environment.
_SHORTEST, _LINE, _MOST_TOLD = 5, 200, 2048
_told_before: dict[tuple[str, bool], str] = {}
_SURE, _UNSURE, _NONE = 2, 1, 0
# The folders of a shell; and names that most logins or jobs have, for which the patterns, which
# take 10 ms to compile, say the same.
_KNOWN = {
    **dict.fromkeys(("PWD", "OLDPWD"), _NONE),
    **dict.fromkeys((f"XDG_SESSION_{of}" for of in ("ID", "TYPE", "CLASS", "DESKTOP")), _NONE),
    **dict.fromkeys(("DESKTOP_SESSION", "DBUS_SESSION_BUS_ADDRESS"), _NONE),
    "FLEETRUN_TOKEN": _SURE,
}


def is_secret(name: str) -> bool:
    """Whether a variable called NAME is likely to hold a secret.

    >>> is_secret("HF_TOKEN"), is_secret("aws_access_key_id"), is_secret("TOKENIZERS_PARALLELISM")
    (True, True, False)
    """
    return _certainty(name) != _NONE


def _certainty(name: str) -> int:
    if name in _KNOWN or not _has_part(name.lower()):
        return _KNOWN.get(name, _NONE)
    words = _words(name)
    if re.search(_HARMLESS, words):
        return _NONE
    if re.search(_CERTAIN, f"{name.upper()} {words}"):
        return _SURE
    if not re.search(_LIKELY, words):
        return _NONE
    # Variables are named for what they hold; in code `token` and `key` are many things.
    return _SURE if name == name.upper() else _UNSURE


def _has_part(lower: str) -> bool:
    """Whether the text LOWER may name a secret."""
    # Names that every launch has contain `path` and `signal`, and so the parts `pat` and `sig`,
    # which matter only at the end of a word.
    return _has_one(_PARTS, lower.replace("path", "_h").replace("signal", "s_l"))


def _has_one(parts: Sequence[str], text: str) -> bool:
    # Without a loop in Python: a launch searches for some ten thousand.
    return any(map(text.__contains__, parts))


def _words(name: str) -> str:
    """Return the words of a NAME in upper case, each between two "_".

    >>> _words("--db-password"), _words("AccountKey"), _words("X-Amz-Signature")
    ('_DB_PASSWORD_', '_ACCOUNT_KEY_', '_X_AMZ_SIGNATURE_')
    """
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1_\2", name)
    return re.sub(r"[\W_]+", "_", f"_{apart}_").upper()


# -- values ---------------------------------------------------------------------------------------

# Values that are no secret under a name that may mean something else: numbers up to six digits are
# sizes and ids (`--max_token 4096`), `<pad>` is a token of a model, and code names where it takes a
# value from.
_NOTHING = r"(?i:true|false|yes|no|none|null|auto|\*+[:;.]*)?$"
_PLAIN = rf"(?s){_NOTHING}|(?=.{{1,6}}$)-*\d+\.?\d*$|<.*>$|\[.*\]$"
_CODE = (
    r"(?:str|bytes|int|bool|Any|Optional|SecretStr|lambda)\b|"
    r"(?:self|args|opts?|cfg|conf|config|kwargs|os|env|getpass)[.\[]|[$%]?[{(]"
)
# An identifier in code: `image`, `model.keys`.
_IDENTIFIER = r"[a-z_.]+$"
# What follows -p of programs for which it is not a password.
_OTHER_P = (
    r"[./~]|[\w.\-]*[/=\\]|[\w\-]+\.[A-Za-z]\w{0,4}$|(?:fp|bf|tf|u?int|float|O)\d+$|"
    r"[\d.:\-]+(?:/\w+)?$"
)
_PROSE = frozenset(["to", "is", "in", "on", "of", "or", "and", "the", "a", "an", "for", "with"])


def _is_random(value: str) -> bool:
    """Whether VALUE looks random, not like a name: digits and letters alternate often.

    >>> _is_random("a8Fx03kQz91b"), _is_random("conv1_weights"), _is_random("fuse_grad_size_in_MB")
    (True, False, False)
    """
    runs = re.findall(r"[0-9]+|[A-Z]+|[^0-9A-Z]+", value)
    return len(value) >= 12 and len(runs) > 4 and any(run.isdigit() for run in runs)


def _is_meant(
    name: str, value: str, *, is_word: bool = False, quoted: bool = False, spaced: bool = False
) -> bool:
    """Whether VALUE, which follows NAME, is the secret that the name suggests.

    Unless it is a word of a command line (IS_WORD), it may be code if it is not QUOTED, and the
    rest of a sentence if it is SPACED from its name.
    """
    # The folder of a shell, or the password of a connection string.
    certainty = (_NONE if value[:1] in "/~." else _SURE) if name == "PWD" else _certainty(name)
    # Help texts say `KEY=VALUE`.
    if certainty == _NONE or value == "VALUE" or re.match(_NOTHING, value):
        return False
    is_exact = quoted or (is_word and certainty == _SURE)
    if not is_exact and (re.match(_CODE, value) or value == name):
        return False
    if certainty == _SURE or re.match(_PLAIN, value):
        return certainty == _SURE
    is_last = re.search(_LAST, _words(name)) is not None
    # `key=image`, `session="main"`, `auth=basic`.
    if re.match(_IDENTIFIER, value) and (is_last if is_word or quoted else True):
        return is_word and len(value) > 6
    is_code = not is_word and (len(value) < 3 or not set("([{").isdisjoint(value))
    return not is_code and (quoted or not spaced or _is_random(value))


# -- texts ----------------------------------------------------------------------------------------

# The keys of services with a prefix that identifies them, and these prefixes in lower case. Those
# of forges have a pattern of their own: `gloo` begins like them, and all together take 8 ms to
# compile.
_FORGE_KEYS = r"\b(gh[pousr]_\w{16,}|github_pat_\w{16,}|gl[a-z]{2,6}-[\w\-]{16,})"
_KEYS = (
    r"\b((?:A3T|AKIA|ASIA|AGPA|AROA|AIDA)[0-9A-Z]{16}|xox[abeoprs]-[\w\-]{8,}|xapp-[\w\-]{8,}|sk-[\w\-]{16,}"
    r"|[srp]k_(?:live|test)_\w{8,}|hf_[A-Za-z0-9]{16,}|npm_\w{16,}|pypi-[\w\-]{16,}"
    r"|AIza[\w\-]{20,}|ya29\.[\w\-]{8,}|SG\.[\w\-]{8,}\.[\w\-]{8,}|nvapi-[\w\-]{16,}"
    r"|dckr_pat_[\w\-]{16,}|dop_v1_\w{16,}|hv[sb]\.[\w\-]{16,}|LTAI[A-Za-z0-9]{12,}"
    r"|AKID[A-Za-z0-9]{16,}|ALTAK[A-Za-z0-9]{12,}|eyJ[\w\-]{8,}\.[\w\-]{4,}(?:\.[\w\-]*)?)"
)
_KEY_MARKS = (
    *("a3t", "akia", "asia", "agpa", "aroa", "aida", "xox", "xapp-", "sk-", "k_live"),
    *("k_test", "hf_", "npm_", "pypi-", "aiza", "ya29.", "sg.", "nvapi-", "dckr_", "dop_v1_"),
    *("hvs.", "hvb.", "ltai", "akid", "altak", "eyj"),
)
# Addresses whose last part is a secret.
_HOOKS = (
    r"(?:(?:hooks\.slack\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/webhooks"
    r"|open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot/v2/hook|[\w.\-]*webhook\.office\.com"
    r"|outlook\.office\.com/webhook|hooks\.zapier\.com/hooks|maker\.ifttt\.com/\S*?/key)/"
    r"|api\.telegram\.org/bot)([^\s\"'<>,?]+)"
)
_LOGIN = r"://((?:(?!://)[^\s\"'<>,;@])*(?:@[^\s\"'<>,;@/?#]*(?=@))*)@"
# As a word of a command line, an address ends with the word, and passwords may contain slashes and
# quotes.
_LOGIN_IN_WORD = r"://((?:(?!://)[^ ,;])*)@"
# Programs that take a password in such an option.
_CLIENTS = ("mysql", "mariadb", "sshpass", "redis-cli")
_CLIENT_OPTION = (
    r"\b(?:(?:mysql\w*|mariadb[\w\-]*)\b[^\n]{0,200}?[\"'\s]-p|sshpass[\"',]*\s+[\"']?-p[\"',]*\s*"
    r"[\"']?|redis-cli\b[^\n]{0,200}?[\"'\s]-a[\"',]*\s+[\"']?)([^\s\"',]+)"
)
_PEM = r"(?s)-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----(.*?)(?:-----END|\Z)"
# Parameters of signed addresses that mean something else elsewhere.
_QUERY = r"(?i)[?&;](key|code|sign|auth|q-ak|token)=([^&;#\s\"'<>]+)"
_COOKIES = r"(?i)\b(?:set-)?cookie\\*[\"']?\s*:\s*\\*[\"']?([^\r\n\"']+)"
_SCHEMES = r"(?i)\b(Bearer|Basic|Token|Digest)\s+([\w+/=.~\-]{8,})"
_OPTIONS = r"(?<![\w.\-])(--?[A-Za-z][\w.\-]*)[\"']?,?[ \t]+[\"']?([^\s\"',]+)"
# `name=value`, `"name": "value"` and the like.
_NAME = r"(?<![\w.\-])[\w.\-]+(?=\\*[\"']?[ \t]{0,3}[:=])"
_VALUE = (
    r"(?s)\\*[\"']?(?P<space>[ \t]{0,3})(?:=>|:=|==?|(?P<colon>:(?!//)))[ \t]{0,3}"
    r"(?P<scheme>(?:Bearer|Basic|Token|Digest)[ \t]+)?"
    r"(?:(?P<quote>[\"'])(?P<quoted>(?:\\.|(?!(?P=quote))[^\\])*)(?P=quote)"
    r"|(?P<mark>\\+[\"'])(?P<marked>.*?)(?P=mark)|\\*[\"'](?P<rest>[^\n]*)|(?P<bare>[^\s,;&\"'<>]+))"
)


def mask(text: str) -> str:
    """Return TEXT without what looks like a secret in it.

    >>> mask("https://me:pw@h/?access_token=abc&a=1"), mask('{"password": "a", "lr": 1}')
    ('https://***@h/?access_token=***&a=1', '{"password": "***", "lr": 1}')
    >>> mask("--max_tokens=512 --tokenizer=bert author=me PASSWORD_FILE=/run/x")
    '--max_tokens=512 --tokenizer=bert author=me PASSWORD_FILE=/run/x'
    """
    return _told(text, is_word=False)


def redact(name: str, value: str) -> str:
    """Show VALUE of the variable NAME without a secret and without user:password in an address.

    >>> redact("HF_TOKEN", "abc"), redact("http_proxy", "http://me:pw@proxy:3128/")
    ('***', 'http://***@proxy:3128/')
    """
    return HIDDEN if is_secret(name) else _told(value, is_word=True)


def _told(text: str, *, is_word: bool) -> str:
    if len(text) < _SHORTEST:
        return text
    key = text, is_word
    known = _told_before.get(key)
    if known is None:
        known = _masked(text, [], is_word=is_word)
        if len(text) < _LINE and len(_told_before) < _MOST_TOLD:
            _told_before[key] = known
    return known


def _masked(text: str, masked: list[str], *, is_word: bool = False) -> str:
    """Mask TEXT, and append what was replaced to MASKED."""
    lower = text.lower()
    if not _has_one(_FIRST_MARKS, lower):
        return text
    has_parts = _has_part(lower)
    for marks, pattern, is_meant in _SHAPES:
        # Looking for a mark first is many times faster than looking for what it may begin.
        if _has_one(marks, lower) and (has_parts or pattern is not _OPTIONS):
            is_login = is_word and pattern is _LOGIN
            every = re.finditer(_LOGIN_IN_WORD if is_login else pattern, text)
            matches = [match for match in every if is_meant(match)]
            text = _without((match.span(match.lastindex or 0) for match in matches), text, masked)
    is_named = has_parts and _has_one(":=", text)
    return _without(_values(text), text, masked) if is_named else text


def _without(spans: Iterable[tuple[int, int]], text: str, masked: list[str]) -> str:
    """Mask the SPANS of TEXT, and append their content to MASKED."""
    parts: list[str] = []
    done = 0
    for start, end in spans:
        masked.append(text[start:end])
        parts += (text[done:start], HIDDEN)
        done = end
    return "".join((*parts, text[done:]))


def _values(text: str) -> Iterator[tuple[int, int]]:
    """Yield the spans of the secrets in TEXT that follow their names."""
    done = 0
    for named in re.finditer(_NAME, text):
        is_named = named[0] == "PWD" or is_secret(named[0])
        is_new = is_named and named.start() >= done
        match = re.compile(_VALUE).match(text, named.end()) if is_new else None
        if match is None:
            continue
        start, end = match.span(match.lastgroup or 0)
        if match["bare"]:
            # The brackets of a list or a call around it are not its own.
            end = max(start + 1, start + len(match["bare"].rstrip(")]}")))
        value, is_spaced = text[start:end], bool(match["space"] or match["colon"])
        is_meant = _is_meant(named[0], value, quoted=not match["bare"], spaced=is_spaced)
        if value and (is_meant or match["scheme"]):
            yield start, end
            done = end


def _is_login(match: re.Match[str]) -> bool:
    """Whether the part before the @ of an address is a login, not a path or a user of ssh."""
    user, scheme = match[1], match.string[max(0, match.start() - 8) : match.start()]
    is_name = "/" in user or user == HIDDEN or scheme.lower().endswith(("ssh", "sftp"))
    return ":" in user or not is_name


def _is_parameter(match: re.Match[str]) -> bool:
    is_long = len(match[2]) >= 12 or match[1].lower() == "token"
    return is_long and not re.match(_PLAIN, match[2])


def _is_credential(match: re.Match[str]) -> bool:
    scheme, value = match.groups()
    is_prose = value.isalpha() and (value.islower() or value.istitle())
    return not is_prose and (scheme.lower() != "token" or _is_random(value))


def _is_option(match: re.Match[str]) -> bool:
    name, value = match.groups()
    return value[0] != "-" and value not in _PROSE and _is_meant(name, value)


def _is_any(match: re.Match[str]) -> bool:
    return bool(match)


# By pattern: parts of which a text must contain one (in lower case), and a test of each match.
_SHAPES: tuple[tuple[tuple[str, ...], str, Callable[[re.Match[str]], bool]], ...] = (
    (("://",), _LOGIN, _is_login),
    (("private key",), _PEM, _is_any),
    (_KEY_MARKS, _KEYS, _is_any),
    (("gh", "gl", "github_pat_"), _FORGE_KEYS, _is_any),
    (("hooks.", "/hook", "/webhook", "webhook.", "telegram", "ifttt"), _HOOKS, _is_any),
    (_CLIENTS, _CLIENT_OPTION, _is_any),
    (("key=", "code=", "sign=", "auth=", "q-ak=", "token="), _QUERY, _is_parameter),
    (("cookie",), _COOKIES, _is_any),
    (("bearer", "basic", "token", "digest"), _SCHEMES, _is_credential),
    ((" ", "\t"), _OPTIONS, _is_option),
)
_MARKS = (*_PARTS, *(mark for marks, *_ in _SHAPES for mark in marks))
# Without them there is no secret: options are looked for only where there are parts of names.
_FIRST_MARKS = tuple(mark for mark in _MARKS if not mark.isspace())

# -- command lines --------------------------------------------------------------------------------


def in_arguments(words: Sequence[str]) -> Iterator[tuple[int, str, str, str]]:
    """Find the secrets among the WORDS of a command line.

    Each is a word's place, what stands before the secret in it, the secret's name ("": it has
    none, only parts of it are secret), and the secret.

    >>> list(in_arguments(["train.py", "--db-password", "xyz", "--url=http://me:pw@h"]))
    [(2, '', '--db-password', 'xyz'), (3, '--url=', '', 'http://me:pw@h')]
    """
    flag = client = ""
    for at, word in enumerate(words):
        program = word.rpartition("/")[2]
        client = program if program.startswith(_CLIENTS) else client
        before, name, value = _in_argument(word, flag, client)
        flag = word if word.startswith("-") and "=" not in word else ""
        if value is not None:
            yield at, before, name, value


def _in_argument(word: str, flag: str, client: str) -> tuple[str, str, str | None]:
    """Return what stands before WORD's secret, its name ("" for a part of it), and the secret."""
    if flag and not word.startswith("-"):
        is_password = flag == "-p" and not re.match(f"{_PLAIN}|{_OTHER_P}", word)
        is_login = flag == "-a" and client == "redis-cli"
        if is_password or is_login or _is_meant(flag, word, is_word=True):
            return "", flag, word
    if client.startswith(("mysql", "mariadb", "sshpass")) and word[:2] == "-p" and word[2:]:
        return "-p", "-p", word[2:]
    if flag in ("-u", "--user", "--userpwd"):
        user, colon, password = word.partition(":")
        if colon and not re.match(rf"{_PLAIN}|[/\\]", password):
            return f"{user}:", "--user-password", password
    return _in_word(word)


def _in_word(word: str) -> tuple[str, str, str | None]:
    if not _has_one(_MARKS, word.lower()):
        return "", "", None
    rest = word
    while re.match(r"[_\-./:+~@]*[^\W_][\w\-./:+~@]*=", rest):
        name, _, rest = rest.partition("=")
        if _is_meant(name, rest, is_word=True):
            return word[: len(word) - len(rest)], name, rest
    for part in (rest, word):
        if redact("", part) != part:
            return word[: len(word) - len(part)], "", part
    return "", "", None


# -- known values ---------------------------------------------------------------------------------


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
        return tuple(
            sorted(filter(_is_distinct, set(values)), key=lambda value: (-len(value), value))
        )


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
