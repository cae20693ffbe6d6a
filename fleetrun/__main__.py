"""`fleetrun` and `python -m fleetrun`."""

import os
import sys

from fleetrun.cli import main


def run() -> None:
    """Run the command line and end this process."""
    code = main()
    try:
        # None stands for one that was closed when we started.
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except OSError:
        # The reader is gone; main has dealt with what that means.
        pass
    # Taking the interpreter apart takes 10 ms and more, which everybody waiting for the job's exit
    # code would wait too. Nothing is left to take apart: the job is over and its files are closed.
    os._exit(code)


if __name__ == "__main__":
    run()
