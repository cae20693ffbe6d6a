"""`fleetrun` and `python -m fleetrun`."""

import os
import sys

# An old Python compiles this, and nothing more.
from fleetrun.errors import EnvironmentFault


def run() -> None:
    """Run the command line and end this process."""
    if sys.platform != "linux" or sys.version_info < (3, 10):
        actual = f"{sys.platform} with Python {sys.version.split()[0]}"
        print(f"fleetrun: Linux and Python 3.10 are required; this is {actual}.", file=sys.stderr)
        sys.exit(EnvironmentFault.exit_code)
    try:
        # Here, so that Ctrl-C during the import prints no traceback.
        from fleetrun.cli.app import main
        from fleetrun.printing import flush

        code = main()
        flush()
    except KeyboardInterrupt:
        # 128 + SIGINT.
        code = 130
    # The job is over and its files are closed: nobody waits for the interpreter to end.
    os._exit(code)


if __name__ == "__main__":
    # With -m the current folder comes first in the search path, and a json.py there would replace
    # Python's; the user's scripts are for the ranks.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    run()
