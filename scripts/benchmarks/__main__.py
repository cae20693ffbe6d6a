"""Benchmarks: each subcommand measures, shows tables, and can write JSON."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import faults
import launch
import nodes
import strategy


def main() -> int:
    """Run the benchmark that the command line names."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    subcommands = parser.add_subparsers(dest="subcommand", required=True, metavar="SUBCOMMAND")
    launch.add_to(subcommands)
    faults.add_to(subcommands)
    nodes.add_to(subcommands)
    strategy.add_to(subcommands)
    for benchmark in subcommands.choices.values():
        benchmark.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
    chosen = parser.parse_args()
    code: int = chosen.run(chosen)
    return code


if __name__ == "__main__":
    # As if it were interrupted: what was launched must not stay behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
