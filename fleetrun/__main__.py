"""`fleetrun` and `python -m fleetrun`."""

import os
import sys


def run() -> None:
    """Run the command line and end this process."""
    try:
        # Here, so that a Ctrl-C meanwhile is no traceback.
        from fleetrun.cli import main

        code = main()
    except KeyboardInterrupt:
        # 128 + SIGINT.
        code = 130
    try:
        # None stands for one that was closed when we started.
        for stream in filter(None, (sys.stdout, sys.stderr)):
            stream.flush()
    except OSError:
        # The reader is gone; main has dealt with what that means.
        pass
    if _is_watched():
        # Coverage and profilers write down what they saw when the interpreter ends.
        sys.exit(code)
    # Taking the interpreter apart takes 10 ms and more, which everybody waiting for the job's exit
    # code would wait too. Nothing is left to take apart: the job is over and its files are closed.
    os._exit(code)


def _is_watched() -> bool:
    """Whether somebody traces or profiles this process: coverage, cProfile, a debugger."""
    # Since Python 3.12 tools may be here instead.
    monitoring = getattr(sys, "monitoring", None)
    if monitoring is not None and any(monitoring.get_tool(tool) for tool in range(6)):
        return True
    return sys.gettrace() is not None or sys.getprofile() is not None


if __name__ == "__main__":
    # With -m the current folder is the first place of modules, and a json.py there would be
    # Python's: the scripts of the user are the ranks' business.
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]
    run()
