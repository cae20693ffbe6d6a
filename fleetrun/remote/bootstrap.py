"""Runs first on a host with --ship: unpacks the shipment, and serves the head from there.

Its text comes over ssh before anything else of fleetrun. It is written for Python 3.6, so that it
can report a Python that is too old for the rest.
"""

import io
import json
import os
import select
import shutil
import signal
import sys
import tarfile
import tempfile

# The folders of the shipment: fleetrun with what it imports, and the job's folder.
LIB, JOB = "lib", "job"
_OLDEST = (3, 10)
_CHUNK = 1 << 20


def run(like: str, mark: str, silence_s: float) -> None:
    """Unpack what the head sends, serve it, and leave nothing behind.

    LIKE is an answer in JSON, whose fault is filled in if the job cannot run here; MARK begins its
    line. A head that is silent for SILENCE_S seconds counts as gone.
    """
    if sys.version_info < _OLDEST:
        here, needed = sys.version.split()[0], ".".join(map(str, _OLDEST))
        fault = f"Python is {here} ({sys.executable}), and fleetrun needs {needed} or later."
        _refuse(like, mark, fault)
        return
    sent = _received(silence_s)
    if not sent:
        return
    try:
        folder = tempfile.mkdtemp(prefix="fleetrun-")
    except OSError as error:
        fault = f"what --ship sends could not be kept ({error.strerror or error})."
        _refuse(like, mark, fault)
        return
    cleaner, pipe = _cleaner(folder)
    try:
        try:
            _unpack(sent, folder)
        except (OSError, tarfile.TarError) as error:
            _refuse(like, mark, f"what --ship sends could not be kept in {folder} ({error}).")
            return
        del sent
        lib = os.path.join(folder, LIB)
        sys.path.insert(0, lib)
        from fleetrun.remote import agent, launcher

        agent.run(silence_s, launcher.Shipped(lib, os.path.join(folder, JOB), pipe))
    finally:
        os.write(pipe, b".")
        os.close(pipe)
        os.waitpid(cleaner, 0)


def _refuse(like: str, mark: str, fault: str) -> None:
    answer = dict(json.loads(like), fault=fault)
    os.write(1, ("\n" + mark + json.dumps(answer) + "\n").encode())


def _received(silence_s: float) -> bytes:
    """Return the shipment that follows a line with its size; empty if it is incomplete."""
    line = b""
    while not line.endswith(b"\n"):
        part = _part(1, silence_s)
        if not part:
            return b""
        line += part
    missing, parts = int(line), []
    while missing:
        part = _part(min(missing, _CHUNK), silence_s)
        if not part:
            return b""
        missing -= len(part)
        parts.append(part)
    return b"".join(parts)


def _part(most: int, silence_s: float) -> bytes:
    return os.read(0, most) if select.select([0], [], [], silence_s)[0] else b""


def _unpack(sent: bytes, folder: str) -> None:
    with tarfile.open(fileobj=io.BytesIO(sent)) as archive:
        if hasattr(tarfile, "fully_trusted_filter"):
            # A link may point to a file that every host has.
            archive.extractall(folder, filter="fully_trusted")  # noqa: S202 - made by the head
        else:
            archive.extractall(folder)  # noqa: S202 - as above
    os.makedirs(os.path.join(folder, JOB), exist_ok=True)


def _cleaner(folder: str) -> "tuple[int, int]":
    """Start a process that removes FOLDER once the returned pipe is written to or closed.

    Processes that may be killed hold the other end of the pipe.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(read_end)
        return pid, write_end
    try:
        os.setsid()
        for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        os.close(write_end)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for fd in range(3):
            os.dup2(nowhere, fd)
        os.read(read_end, 1)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)
