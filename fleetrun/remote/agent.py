"""The agent on another host, started by ssh: inspects the host, awaits orders, runs the launcher.

It ends the launcher when its own input ends or falls silent: the head was killed, the connection
cut, or a laptop went to sleep.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial

from fleetrun import __version__
from fleetrun.engines.ports import Ports
from fleetrun.errors import FleetrunError, shell_code
from fleetrun.model import Script
from fleetrun.probe import devices, scripts
from fleetrun.records import installed
from fleetrun.records.folder import write_all
from fleetrun.remote import launcher, logsender, protocol, reachability
from fleetrun.session import script

_CHUNK = 1 << 16
# The exit code if no launcher was started.
_UNUSED = 0


def look(inquiry: protocol.Inquiry, environ: Mapping[str, str]) -> protocol.Answer:
    """Return the answer to INQUIRY."""
    gpus = devices.gpus_by_files(environ)
    answer = protocol.Answer(
        gpus=-1 if gpus is None else gpus,
        fleetrun=__version__,
        python=sys.version.partition(" ")[0],
        paddle=_paddle(),
        address=address(environ),
        time=time.time(),
    )
    if not os.path.isdir(inquiry.cwd):
        return answer._replace(fault=f"there is no folder {inquiry.cwd}.")
    if not inquiry.target:
        return answer
    script_ = Script(inquiry.form, inquiry.target, ())
    try:
        scripts.find(script_, inquiry.cwd, environ)
    except FleetrunError as error:
        return answer._replace(fault=str(error))
    if (fault := _taken(inquiry.ports)) is not None:
        return answer._replace(fault=fault)

    is_python = script.is_python(script_)
    return answer._replace(
        digest=script.identity(script_, inquiry.cwd, environ) if is_python else ""
    )


def _taken(ports: Sequence[int]) -> str | None:
    """Return a sentence about the first of PORTS in use and its holder; None if all are free."""
    held = Ports(os.getpid())
    try:
        held.take(ports)
    except FleetrunError as error:
        return str(error)
    finally:
        held.close()
    return None


def _paddle() -> str:
    package = installed.paddle()
    return "" if package is None else f"{package[1]} ({package[0]})"


def address(environ: Mapping[str, str]) -> str:
    """Return the address at which ssh has reached this host; empty if unknown.

    >>> address({"SSH_CONNECTION": "10.0.0.9 50022 10.0.0.1 22"})
    '10.0.0.1'
    """
    words = environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 and words[2] != "UNKNOWN" else ""  # sshd(8)


class _Input:
    """The head's lines; `is_over` when no more will come."""

    def __init__(self, silence_s: float) -> None:
        self.silence_s = silence_s
        self._lines: list[bytes] = []
        self._rest = b""
        self.is_over = False

    def read(self) -> list[bytes]:
        """Return the lines that have arrived; wait for one up to the limit of silence."""
        part = b"" if self._lines else _part(self.silence_s)
        self.is_over = not part and not self._lines
        *lines, self._rest = (self._rest + part).split(b"\n")
        lines_, self._lines = self._lines + lines, []
        return lines_

    def line(self) -> bytes | None:
        """Wait for a non-empty line; None if none comes."""
        while not self.is_over:
            lines = [line for line in self.read() if line]
            if lines:
                self._lines = lines[1:]
                return lines[0]
        return None

    @property
    def has_lines(self) -> bool:
        """Whether there is unread input."""
        return bool(self._lines)


def _part(silence_s: float) -> bytes:
    """Return the head's next bytes; empty if it is gone, or silent for SILENCE_S seconds."""
    is_heard = bool(select.select([0], [], [], silence_s)[0])
    return os.read(0, _CHUNK) if is_heard else b""


def run(silence_s: float = protocol.SILENCE_S) -> None:
    """Serve the head, and exit with the launcher's exit code.

    A head that is silent for SILENCE_S seconds counts as gone.
    """
    # The job's end would wait 10 ms for the interpreter's.
    os._exit(_serve(silence_s))


def _serve(silence_s: float) -> int:
    head = _Input(silence_s)
    begin = head.line()
    if begin is None:
        return _UNUSED
    try:
        inquiry = protocol.read(begin, protocol.Inquiry)
    except ValueError:
        refusal = protocol.Answer(fault="its fleetrun differs from the one here.")
        _tell(protocol.line(refusal))
        return _UNUSED
    environ = {**os.environ, **inquiry.environ}
    open_port = reachability.OpenPort(inquiry.reach_ports)
    answer = look(inquiry, environ)._replace(port=open_port.port)
    _tell(protocol.line(answer))
    if inquiry.target and not answer.fault:
        launcher.load(environ, has_others=bool(inquiry.reach_ports))
    order = _order(head, answer)
    if order is not None and order.hosts:
        unreached = reachability.missing(
            [protocol.HostEndpoint(*endpoint) for endpoint in order.hosts]
        )
        _tell(protocol.line(protocol.Unreached(unreached)))
        order = _order(head, answer)
    open_port.close()
    if order is None:
        return _UNUSED
    pid, code = _launch(order.words, inquiry.cwd, environ, head)
    if inquiry.logs:
        _send_logs(inquiry, pid, head)
    return code


def _order(head: _Input, answer: protocol.Answer) -> protocol.HostOrder | None:
    """Wait for HEAD's order after ANSWER; None if none comes."""
    text = head.line()
    return None if text is None or answer.fault else protocol.read(text, protocol.HostOrder)


def _send_logs(inquiry: protocol.Inquiry, pid: int, head: _Input) -> None:
    """Send the logs of the launcher PID unless the head is gone or has them already."""
    folder, extent, nonce = inquiry.logs
    run = logsender.find(os.path.join(inquiry.cwd, folder), pid)
    if run is None or head.is_over:
        return
    write_all(1, logsender.beginning(run, nonce))
    answer = head.line()
    while answer not in {None, logsender.SEND, logsender.KEEP}:
        answer = head.line()
    if answer == logsender.SEND:
        # The head may be killed meanwhile.
        with suppress(BrokenPipeError):
            logsender.send(run, everything=extent == "all", write=partial(write_all, 1))


def _tell(line: bytes) -> None:
    write_all(1, b"\n" + protocol.MARK + line)


def _launch(
    words: tuple[str, ...], cwd: str, environ: Mapping[str, str], head: _Input
) -> tuple[int, int]:
    """Run the launcher with WORDS in CWD until it ends; return its process and exit code.

    HEAD may end it.
    """
    pid = launcher.start(words, cwd, environ)
    pidfd = os.pidfd_open(pid)
    is_asked = False
    while True:
        # More orders may have arrived together with the order to start.
        if head.has_lines:
            is_asked = _obey(head.read(), pidfd, is_asked=is_asked, is_over=False)
        watched = [pidfd] if head.is_over else [pidfd, 0]
        ready, _, _ = select.select(watched, [], [], None if head.is_over else head.silence_s)
        if pidfd in ready:
            break
        orders = head.read() if ready else []
        # Silence: the head or the connection is gone.
        head.is_over = head.is_over or not ready
        is_asked = _obey(orders, pidfd, is_asked=is_asked, is_over=head.is_over)
    return pid, shell_code(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _obey(orders: list[bytes], pidfd: int, *, is_asked: bool, is_over: bool) -> bool:
    """Carry out ORDERS, and return whether the launcher has been asked to stop."""
    must_stop = protocol.STOP.strip() in orders or is_over
    is_sent = (must_stop and not is_asked) or protocol.NOW.strip() in orders
    with suppress(ProcessLookupError):
        if is_sent:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        if is_sent or protocol.END.strip() in orders:
            # A stopped launcher (`kill -STOP`) would not end.
            signal.pidfd_send_signal(pidfd, signal.SIGCONT)
    return is_asked or is_sent
