"""Which values must never be shown or written down."""

from __future__ import annotations

HIDDEN = "***"

# Parts that say "secret" wherever they stand in a word: MYPASSWORD, DB_PASSWORDS.
_STEMS = ("PASSWORD", "PASSWD", "PASSPHRASE", "SECRET", "CREDENTIAL", "APIKEY", "PRIVATEKEY")
# Ends of a word: GITHUBTOKEN and OAUTH, but not TOKENIZERS, MAX_TOKENS or AUTHOR.
_ENDS = ("TOKEN", "AUTH", "ACCESSKEY")
_WORDS = frozenset(("PASS", "CREDS", "JWT", "COOKIE"))
_KEYS = ("API_KEY", "ACCESS_KEY", "PRIVATE_KEY")
_FOLDERS = frozenset(("PWD", "OLDPWD"))


def is_secret(name: str) -> bool:
    """Whether a variable called NAME is likely to hold a secret.

    >>> is_secret("HF_TOKEN"), is_secret("aws_access_key_id"), is_secret("TOKENIZERS_PARALLELISM")
    (True, True, False)
    """
    upper = name.upper()
    if upper in _FOLDERS:
        return False
    words = "".join(c if c.isalnum() else " " for c in upper).split()
    joined = "_".join(words)
    if has_stem(name):
        return True
    if any(word in _WORDS or word.endswith(_ENDS) for word in words):
        return True
    # A last word KEY or PWD says it, and so does ACCESS_KEY anywhere (AWS_ACCESS_KEY_ID).
    return words[-1:] in (["KEY"], ["PWD"]) or any(pair in joined for pair in _KEYS)


def has_stem(name: str) -> bool:
    """Whether NAME can mean nothing but a secret.

    >>> has_stem("--db-password"), has_stem("--pad_token")
    (True, False)
    """
    upper = name.upper()
    return any(stem in upper for stem in _STEMS)


def redact(name: str, value: str) -> str:
    """Show VALUE of the variable NAME without a secret and without user:password in an address.

    >>> redact("HF_TOKEN", "abc"), redact("http_proxy", "http://me:pw@proxy:3128/")
    ('***', 'http://***@proxy:3128/')
    """
    if is_secret(name):
        return HIDDEN
    head, *rest = value.split("://")
    return "://".join((head, *(_without_user(part) for part in rest)))


def _without_user(address: str) -> str:
    """Hide what stands before the last @ of ADDRESS, the part after ://."""
    # Not cut at the first slash: people write passwords with slashes in them.
    end = min((i for i in map(address.find, " ,;") if i >= 0), default=len(address))
    host = address[:end]
    return address if "@" not in host else f"{HIDDEN}@{host.rpartition('@')[2]}{address[end:]}"
