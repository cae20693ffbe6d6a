"""Which variables imports read, so that ranks which have other values are not forked after them."""

from __future__ import annotations

import dis
import os
import re
import sys
from collections.abc import ItemsView
from contextlib import contextmanager
from functools import partial
from types import CodeType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import FrameType

# Variables that a library reads when it is loaded, or Python when it starts: a fork cannot read
# them again. `docs/failures.md` lists them. Variables that Python code reads during its import are
# recorded.
READ_AT_LOAD = (
    # Python, the loader and the C library.
    *("PYTHON", "LD_", "MALLOC_", "GLIBC_", "LANG", "LC_", "TZ"),
    # Threads and linear algebra.
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "ACC_"),
    # numpy, Fortran's runtime, OpenSSL and glog.
    *("NPY_", "NUMPY_", "GFORTRAN_", "OPENSSL_", "GLOG_", "GOOGLE_"),
)
# Read while Paddle is imported, and applied again in the fork (`Loaded.exec_module`).
_DONE_AGAIN = frozenset(("PADDLE_TRAINER_ID",))
# Instructions that store a loop's variable, and those that load one; not what sets aside the
# variables of the same names, as comprehensions do.
_STORES = {"STORE_FAST", "STORE_NAME", "STORE_GLOBAL"}
_LOAD = re.compile("LOAD_(FAST(?!_AND_CLEAR)|NAME|GLOBAL|DEREF|CLOSURE|CLASSDEREF|FROM)")
# What uses variables by their names.
_BY_NAME = {"locals", "globals", "vars", "eval", "exec"}
# Generators and coroutines.
_SUSPENDS = 0x20 | 0x80 | 0x200


class VariableReads:
    """What the imports of a process with ENVIRON read."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._environ = environ
        # The module that is being imported.
        self.loading = ""
        # Variables that Python code reads during its import, and the modules that do.
        self._read: dict[str, str] = {}
        # The packages that look through all variables for their own, whose names begin with
        # theirs, and the modules.
        self._seekers: dict[str, str] = {}

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Note the variables that are read.

        A module that looks for its own among all, as tqdm does, has read no value that its loop
        does not use.
        """
        kind: Any = type(os.environ)
        read, loop = kind.__getitem__, _TracedLoop()

        def noting(environ: Any, name: Any) -> Any:
            use = partial(self._read.setdefault, os.fsdecode(name), self.loading)
            caller = sys._getframe(1)
            if environ is os.environ and loop.follows(caller, use):
                self._seekers.setdefault(_package(caller.f_back).lower(), self.loading)
            else:
                use()
            return read(environ, name)

        kind.__getitem__ = noting
        try:
            yield
        finally:
            kind.__getitem__ = read
            loop.end()

    def differs(self, environ: Mapping[str, str]) -> str:
        """Return a variable of ENVIRON that differs from the value at import, if any."""
        for name in sorted(self._environ.keys() | environ.keys()):
            counts = self.reader(name) is not None or name.startswith(READ_AT_LOAD)
            if counts and name not in _DONE_AGAIN and environ.get(name) != self._environ.get(name):
                return name
        return ""

    def reader(self, name: str) -> str | None:
        """Return the module of `load` whose import reads the variable NAME, if any."""
        own = (seeker for seeker in self._seekers if name.lower().startswith(seeker))
        return self._read.get(name, self._seekers.get(next(own, "")))


class _TracedLoop:
    """Tells which values a loop over all names and values uses, by a trace of its instructions.

    A value that comes from a variable may go anywhere, also to what is written in C.
    """

    def __init__(self) -> None:
        self._frame: FrameType | None = None
        # Where it takes the next value, where it ends, and where it loads values.
        self._next, self._exit = 0, 0
        self._loads: frozenset[int] = frozenset()
        # What to call when the value of this turn is used; and whether this turn is traced.
        self._use: Callable[[], object] | None = None
        self._is_traced = False

    def follows(self, caller: FrameType, use: Callable[[], object]) -> bool:
        """Whether CALLER gives a variable to a loop that can be followed; then USE is called."""
        frame = caller.f_back
        if caller.f_code is not ItemsView.__iter__.__code__ or frame is None:
            return False
        is_traced = frame is self._frame and sys.gettrace() == self._trace
        if is_traced and self._next < frame.f_lasti < self._exit:
            # A loop in this one.
            return False
        if not is_traced or frame.f_lasti != self._next:
            self.end()
            loop = None if sys.gettrace() else _loads_in_loop(frame)
            if loop is None:
                return False
            self._frame, self._next = frame, frame.f_lasti
            self._loads, self._exit = loop
            frame.f_trace, frame.f_trace_opcodes, frame.f_trace_lines = self._trace, True, False
            sys.settrace(self._trace)
        self._end_turn()
        self._use, self._is_traced = use, False
        return True

    def end(self) -> None:
        """Follow the loop no longer."""
        if self._frame is not None:
            self._frame.f_trace, self._frame.f_trace_opcodes = None, False
            if sys.gettrace() == self._trace:
                sys.settrace(None)
        self._frame = None
        self._end_turn()

    def _end_turn(self) -> None:
        if self._use is not None and not self._is_traced:
            self._use()
        self._use = None

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame is not self._frame:
            return None
        if event == "return" or (event == "opcode" and frame.f_lasti == self._exit):
            self.end()
            return None
        if event == "opcode":
            self._is_traced = True
            if self._use is not None and frame.f_lasti in self._loads:
                self._use()
        return self._trace


def _loads_in_loop(frame: FrameType) -> tuple[frozenset[int], int] | None:
    """Return where the loop in which FRAME stands loads its values, and where it ends.

    None: it is no `for name, value in ...`, or values could be used elsewhere.
    """
    code = frame.f_code
    rows = list(dis.get_instructions(code))
    at = max(number for number, row in enumerate(rows) if row.offset <= frame.f_lasti)
    begin, unpack, *stores = rows[at : at + 4]
    if (begin.opname, unpack.opname) != ("FOR_ITER", "UNPACK_SEQUENCE"):
        return None
    if stores[0].opname == "STORE_FAST_STORE_FAST":
        name = stores[0].argval[1]
    elif all(row.opname in _STORES for row in stores):
        name = stores[1].argval
    else:
        return None
    # Functions of this one may use a variable of the module; and what suspends it, at any time.
    inner = set().union(*(_names(const) for const in code.co_consts))
    if code.co_flags & _SUSPENDS or name in inner or not _BY_NAME.isdisjoint(code.co_names):
        return None
    loads, extended = set[int](), list[int]()
    for row in rows:
        extended.append(row.offset)
        if row.opname == "EXTENDED_ARG":
            continue
        names = row.argval if isinstance(row.argval, tuple) else (row.argval,)
        # One that stores one variable and loads another has that one last.
        if name in names[row.opname.startswith("STORE") :] and _LOAD.search(row.opname):
            loads.update(extended)
        extended.clear()
    if not all(begin.offset < load < begin.argval for load in loads):
        return None
    return frozenset(loads), begin.argval


def _names(code: object) -> set[str]:
    """Return the names that CODE uses, and the functions in it."""
    if not isinstance(code, CodeType):
        return set()
    return {*code.co_names, *code.co_freevars}.union(*map(_names, code.co_consts))


def _package(frame: FrameType | None) -> str:
    """Return the package whose code runs in FRAME."""
    module: str = "" if frame is None else frame.f_globals.get("__name__", "")
    return module.partition(".")[0]
