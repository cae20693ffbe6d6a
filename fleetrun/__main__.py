"""`fleetrun` and `python -m fleetrun`."""

import os
import sys

# An old Python compiles this, and nothing more.
from fleetrun.errors import EnvironmentFault, unfit


def run() -> None:
    """Run the command line and end this process."""
    problem = unfit(sys.platform, tuple(sys.version_info[:3]))
    if problem is not None:
        print(f"fleetrun: {problem}", file=sys.stderr)
        sys.exit(EnvironmentFault.exit_code)
    try:
        # Here, so that Ctrl-C during the import prints no traceback.
        from fleetrun.cli.app import main

        code = main()
    except KeyboardInterrupt:
        # 128 + SIGINT.
        code = 130
    try:
        # None: the stream was closed at the start.
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except OSError:
        # The reader is gone; main has handled that.
        pass
    if _is_watched():
        # Coverage and profilers write their data when the interpreter exits.
        sys.exit(code)
    # Finalizing the interpreter takes 10 ms and more, for which everybody waiting for the exit code
    # would wait. Nothing is left to finalize: the job is over and its files are closed.
    os._exit(code)


def _is_watched() -> bool:
    """Whether this process is traced or profiled: by coverage, cProfile or a debugger."""
    # Since Python 3.12 tools may use this instead.
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is not None and any(monitoring.get_tool(tool) for tool in range(6)):
        return True
    return sys.gettrace() is not None or sys.getprofile() is not None


if __name__ == "__main__":
    # With -m the current folder comes first in the search path, and a json.py there would replace
    # Python's; the user's scripts are for the ranks.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    run()
