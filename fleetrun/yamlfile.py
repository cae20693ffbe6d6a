"""Loads YAML with line numbers, and explains in one sentence what cannot be read."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from fleetrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from yaml import Mark, SafeLoader


def text_of(path: str, what: str) -> str:
    """Return the text of the file at PATH, which is WHAT; UsageError if it cannot be read."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}: {what} cannot be read.") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: {what} is not UTF-8 text.") from None


@contextmanager
def loading(text: str, path: str) -> Iterator[SafeLoader]:
    """Yield a loader of TEXT, found at PATH; UsageError for what it raises."""
    # Only imported for a YAML file.
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        yield loader
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = at(path, mark) if mark else path
        problem = getattr(error, "problem", None) or "there is a character that YAML does not allow"
        raise UsageError(f"{where}: this is not YAML: {problem}.") from None
    finally:
        loader.dispose()


def at(path: str, mark: Mark) -> str:
    """Return the position MARK as file:line; the text of an option has no lines."""
    return path if path.startswith("-") else f"{path}:{mark.line + 1}"
