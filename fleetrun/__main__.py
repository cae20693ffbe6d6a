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
    # Coverage and profilers write their data when the interpreter exits. Else everybody who waits
    # for the exit code would wait 10 ms for that: the job is over and its files are closed.
    monitoring = getattr(sys, "monitoring", None)  # since Python 3.12
    if (
        sys.gettrace()
        or sys.getprofile()
        or (monitoring and any(map(monitoring.get_tool, range(6))))
    ):
        sys.exit(code)
    os._exit(code)


if __name__ == "__main__":
    # With -m the current folder comes first in the search path, and a json.py there would replace
    # Python's; the user's scripts are for the ranks.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    run()
