"""What imports print, log and warn of before a fork, said again in each rank.

A rank says it when its script imports the modules, as that has configured streams, loggers and
warnings by then.
"""

from __future__ import annotations

import os
import sys
import warnings
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    # Keeps what says something again.
    Note = Callable[[Callable[[], object]], None]


class ImportLogging:
    """What imports do to Python's logging, which ranks do after the script has configured it."""

    def __init__(self) -> None:
        # Of the root logger: whether it had handlers, the method and its arguments.
        self._calls: list[tuple[bool, Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = []
        # The loggers that imports make: level, propagate, disabled, handlers.
        self._made: list[tuple[Any, int, bool, bool, list[Any]]] = []
        self._streams: list[tuple[str, Any]] = []
        self._propagates = True

    @contextmanager
    def noting(self, note: Note) -> Iterator[None]:
        """Note what is done, NOTE what is logged, and leave the root logger as it was."""
        import logging

        is_enabled = logging.Logger.isEnabledFor

        def is_noted(logger: Any, level: int) -> bool:
            # At any level, as ranks may want to see it; but a module that asks is told the truth.
            return sys._getframe(1).f_globals is vars(logging) or is_enabled(logger, level)

        def handle(logger: Any, record: Any) -> None:
            note(partial(_log_again, logger, record))

        root, loggers = logging.root, logging.root.manager.loggerDict
        before, known = (root.level, root.propagate, list(root.handlers)), set(loggers)
        self._streams = [(name, getattr(sys, name)) for name in ("stdout", "stderr")]
        with (
            replaced(logging.Logger, "setLevel", self._noted(root, logging.Logger.setLevel)),
            replaced(logging.Logger, "addHandler", self._noted(root, logging.Logger.addHandler)),
            replaced(logging.Logger, "isEnabledFor", is_noted),
            replaced(logging.Logger, "handle", handle),
        ):
            yield
        self._propagates = root.propagate
        level, root.propagate, root.handlers[:] = before
        root.setLevel(level)
        self._made = [
            (made, made.level, made.propagate, made.disabled, list(made.handlers))
            for name, made in loggers.items()
            if name not in known and isinstance(made, logging.Logger)
        ]

    def _noted(self, root: Any, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(logger: Any, *words: Any, **named: Any) -> Any:
            if logger is root:
                self._calls.append((bool(root.handlers), real, words, named))
            return real(logger, *words, **named)

        return call

    def again(self, silent: str) -> None:
        """Do it again, as imports do now that the script may have configured loggers.

        The logger SILENT gets no handler.
        """
        import logging

        root = logging.root
        is_configured = bool(root.handlers)
        for had_handlers, real, words, named in self._calls:
            # Paddle, like `basicConfig`, adds a handler only where there is none.
            if had_handlers or not is_configured:
                real(root, *words, **named)
        root.propagate = root.propagate and self._propagates
        changed = [(old, name) for name, old in self._streams if getattr(sys, name) is not old]
        for logger, level, propagates, is_disabled, handlers in self._made:
            if level:
                logger.setLevel(level)
            logger.propagate = logger.propagate and propagates
            # `dictConfig` disables the loggers that there are, and these come later.
            logger.disabled = is_disabled
            if logger.name == silent:
                logger.handlers = [own for own in logger.handlers if own not in handlers]
                continue
            for handler in handlers:
                logger.addHandler(handler)
        made = [logger for logger, *_ in self._made]
        for handler in (handler for logger in (root, *made) for handler in logger.handlers):
            for old, name in changed:
                if isinstance(handler, logging.StreamHandler) and handler.stream is old:
                    handler.stream = getattr(sys, name)


class ImportWarnings:
    """What imports do to Python's warnings, which ranks do after the script has configured them."""

    def __init__(self) -> None:
        # The filters that imports have added, before and after those that there were.
        self._first: list[Any] = []
        self._last: list[Any] = []

    @contextmanager
    def noting(self, note: Note) -> Iterator[None]:
        """NOTE each warning, show none, and leave the filters as they were."""
        before = list(warnings.filters)

        def show(shown: warnings.WarningMessage) -> None:
            note(partial(_warn_again, shown))

        # Nothing that a script may want to see is lost. The pattern tells this entry from others.
        with replaced(warnings, "_showwarnmsg_impl", show):
            warnings.resetwarnings()
            warnings.filterwarnings("always", module=".*")
            entry = warnings.filters[0]
            yield
        at = warnings.filters.index(entry)
        self._first, self._last = list(warnings.filters[:at]), list(warnings.filters[at + 1 :])
        self._set(before)

    def filter_again(self) -> None:
        """Add the filters again."""
        added = [*self._first, *self._last]
        own = [entry for entry in warnings.filters if entry not in added]
        self._set([*self._first, *own, *self._last])

    def _set(self, filters: list[Any]) -> None:
        warnings.filters[:] = filters  # type: ignore[index]
        warnings._filters_mutated()  # type: ignore[attr-defined]


class ImportOutput:
    """What imports print, log and warn of, which ranks do where the script wants it."""

    def __init__(self) -> None:
        self._calls: list[Callable[[], object]] = []
        self._files: list[int] = []

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep what is printed."""
        before = [os.dup(fd) for fd in (1, 2)]
        self._files = [os.memfd_create("printed") for _ in (1, 2)]
        for fd, file in enumerate(self._files, 1):
            os.dup2(file, fd)
        streams: list[Any] = [sys.stdout, sys.stderr]
        for stream, name in zip(streams, ("stdout", "stderr"), strict=True):
            stream.write = partial(self._write, name)
        try:
            yield
        finally:
            for stream in streams:
                del stream.write
                stream.flush()
            self._take_written()
            for fd, saved in enumerate(before, 1):
                os.dup2(saved, fd)
            for fd in (*before, *self._files):
                os.close(fd)

    def note(self, call: Callable[[], object]) -> None:
        """Keep CALL, which says it again, behind what was said before."""
        self._take_written()
        self._calls.append(call)

    def again(self) -> None:
        """Say it again; raises a Warning if that is an error for the script."""
        for call in self._calls:
            call()

    def _write(self, name: str, text: str) -> int:
        length = str.__len__(text)
        self.note(lambda: getattr(sys, name).write(text))
        return length

    def _take_written(self) -> None:
        """Keep what has come past Python's streams, such as from C."""
        for fd, file in enumerate(self._files, 1):
            text = os.pread(file, os.fstat(file).st_size, 0)
            if text:
                os.ftruncate(file, 0)
                os.lseek(file, 0, os.SEEK_SET)
                self._calls.append(partial(os.write, fd, text))


def _log_again(logger: Any, record: Any) -> None:
    """Log RECORD as of now, if that is wanted."""
    if not logger.isEnabledFor(record.levelno):
        return
    # Python takes a dictionary out of its tuple.
    words = record.args if isinstance(record.args, tuple) else (record.args,)
    at = record.pathname, record.lineno
    made = logger.makeRecord(
        *(record.name, record.levelno, *at, record.msg, words, record.exc_info),
        *(record.funcName, None, record.stack_info),
    )
    for name, value in vars(record).items():
        vars(made).setdefault(name, value)
    logger.handle(made)


def _warn_again(shown: warnings.WarningMessage) -> None:
    # A module that is not loaded until it is needed must not be loaded now.
    loaded = [module for module in sys.modules.values() if isinstance(module, type(sys))]
    modules = {vars(module).get("__file__"): module for module in loaded}
    module = modules.get(shown.filename)
    warnings.warn_explicit(
        shown.message,
        shown.category,
        shown.filename,
        shown.lineno,
        getattr(module, "__name__", None),
        vars(module).setdefault("__warningregistry__", {}) if module else None,
    )


@contextmanager
def replaced(owner: Any, name: str, replacement: object) -> Iterator[None]:
    """Let OWNER have REPLACEMENT as NAME."""
    real = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, real)
