"""What keyboards, editors and shells put into words by mistake: wide characters, blanks; pure."""

# No `from __future__ import annotations` here, for the reason given in model.py.

# Typographic dashes, the minus, and those of Chinese and Japanese keyboards. By number: names would
# import unicodedata when this is compiled, and a Ctrl-C in that moment becomes a SyntaxError.
LONG_DASHES = "\u2010\u2011\u2012\u2013\u2014\u2015\u2212\u30fc\ufe58\ufe63\uff0d"
_BLANKS = "\u00a0\u2002\u2003\u2009\u202f\u3000"
_PLAIN: dict[int, int | str] = {
    **{code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)},
    **dict.fromkeys(map(ord, LONG_DASHES), "-"),
    **dict.fromkeys(map(ord, _BLANKS), " "),
    **dict.fromkeys((0x200B, 0xFEFF), ""),
    0x3001: ",",
    0x3002: ".",
}
_CARRIAGE_RETURN = (
    "it ends in a carriage return, as lines of Windows do: remove them from the file with the "
    "command line, as in `sed -i 's/\\r$//' run.sh`."
)
_LONE_BLANK = (
    "a lone blank is a word of the command line: remove the blank after the backslash that ends a "
    "line."
)


def plain(text: str) -> str:
    """Return TEXT with ASCII characters in place of full-width ones, long dashes and odd blanks.

    >>> plain("\uff10\uff0c\uff11"), plain("\u2014\u2014gpus"), plain("0-3")
    ('0,1', '--gpus', '0-3')
    """
    return text if text.isascii() else text.translate(_PLAIN)


def plain_option(word: str) -> str:
    """Return WORD, which begins with a dash of any kind, as an option is written.

    >>> plain_option("\u2014gpus"), plain_option("\uff0d\uff0dgpus\uff1d\uff10")
    ('--gpus', '--gpus=0')
    """
    name = plain(word).lstrip("-")
    return f"--{name}" if len(name) > 1 else f"-{name}"


def blank(word: str) -> str | None:
    r"""Return what is wrong with WORD if it is a blank, or ends in a carriage return; or None.

    >>> blank("train.py\r")[:32], blank(" ")[:12], blank("train.py"), blank("")
    ('it ends in a carriage return, as', 'a lone blank', None, None)
    """
    if word.endswith("\r"):
        return _CARRIAGE_RETURN
    return _LONE_BLANK if word and not word.strip() else None
