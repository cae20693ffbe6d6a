"""Benchmarks: each subcommand measures, shows tables, and can write JSON."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

import faults
import launch
import launches
import nodes
import strategy

BENCHMARKS = {
    "launch": (launch, "start-up, exit and cost of a launch"),
    "faults": (faults, "how a launch ends when something goes wrong"),
    "nodes": (nodes, "one job on several hosts (needs root)"),
    "strategy": (strategy, "what a strategy makes of a training step"),
}


def main() -> int:
    """Run the benchmark that the command line names."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description=__doc__)
    subcommands = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    for name, (benchmark, what) in BENCHMARKS.items():
        own = subcommands.add_parser(
            name,
            help=what,
            description=benchmark.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        own.add_argument("--json", type=Path, metavar="FILE", help="write every number there")
        own.set_defaults(run=benchmark.run)
        benchmark.add_options(own)
    chosen = parser.parse_args()
    launches.adopt_orphans()
    code: int = chosen.run(chosen)
    return code


if __name__ == "__main__":
    # As if it were interrupted: what was launched must not stay behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
