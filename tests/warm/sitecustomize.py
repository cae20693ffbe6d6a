"""Lets a rank be forked by tests/warm/server.py instead of starting from nothing.

On the PYTHONPATH of a test's launch. A Python that is to run a script stays as a stand-in for the
one that is forked, and ends as it does, or when that is gone after TERM: ports are free then.
"""

from __future__ import annotations

import _socket

# Only what a Python has at once: each of them waits for this.
import marshal
import os
import signal
import sys


def _script() -> int | None:
    """Return where the script stands on our command line; None if it is no plain script."""
    place = 1
    while sys.orig_argv[place : place + 1] and sys.orig_argv[place] in ("-u", "-W"):
        place += 1 + (sys.orig_argv[place] == "-W")
    words = sys.orig_argv[place:]
    return place if words and words[0].endswith(".py") else None


def _stand_in(path: str, place: int) -> None:
    argv = sys.orig_argv
    text = marshal.dumps(
        {
            "argv": argv,
            "words": argv[place:],
            "ignores_warnings": "ignore" in argv[:place],
            "folder": os.getcwd(),
            "environ": dict(os.environ),
        }
    )
    caller = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
    caller.connect(path)
    is_asked_to_end = False

    def end(signum: int, frame: object) -> None:
        nonlocal is_asked_to_end
        del signum, frame
        is_asked_to_end = True
        # The rank is killed, and `recv` returns.
        caller.shutdown(_socket.SHUT_WR)

    signal.signal(signal.SIGTERM, end)
    # What the launcher asks Paddle by itself answers through another descriptor than a rank has.
    numbers = range(3 + argv[place].endswith("/device_check.py"))
    descriptors = b"".join(number.to_bytes(4, sys.byteorder) for number in numbers)
    rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, descriptors)]
    text = len(text).to_bytes(4, "big") + text
    sent = caller.sendmsg([text], rights)
    while sent < len(text):
        sent += caller.send(text[sent:])
    code = int.from_bytes(caller.recv(2) or b"\0\1", "big", signed=True)
    if is_asked_to_end:
        code = -signal.SIGTERM
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code % 256)


# Those whom the rank starts by itself start as always, but for the self-tests on a device.
_is_self_test = sys.orig_argv[1:2] and sys.orig_argv[1].endswith("/on_device.py")
_variable = "TEST_WARM_SELF_TESTS" if _is_self_test else "TEST_WARM_SOCKET"
_place = _script() if _variable in os.environ else None
if _place is not None:
    _stand_in(os.environ.pop(_variable), _place)
