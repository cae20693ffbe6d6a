"""The real command line in tests: `python -m fleetrun` with small scripts as ranks."""

from __future__ import annotations

import json
import os
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from processes import MARKER, assert_no_survivors, piped
from waiting import LONG_S, until

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).parents[1]


class Command:
    """`fleetrun --nproc_per_node=RANKS OPTIONS script` in FOLDER, under a fresh marker.

    The script is shell text; a rank knows its number as $PADDLE_TRAINER_ID, which is $R for short.
    """

    # All that a test has made, for whoever cleans up after it.
    made: ClassVar[list[Command]] = []

    def __init__(self, folder: Path, script: str, *options: str, ranks: int = 2) -> None:
        self.folder = folder
        self.marker = uuid.uuid4().hex
        self.made.append(self)
        self._script = folder / f"script-{self.marker[:8]}"
        self._script.write_text(f"#!/bin/sh\nR=$PADDLE_TRAINER_ID\n{script}\n")
        self._script.chmod(0o755)
        fleetrun = [sys.executable, "-m", "fleetrun", "--quiet", f"--nproc_per_node={ranks}"]
        self.argv = [*fleetrun, *options, str(self._script)]

    @classmethod
    def python(cls, folder: Path, code: str, *options: str, ranks: int = 2) -> Command:
        """Make one whose ranks run Python CODE, with the rank as `rank`."""
        made = cls(folder, "", *options, ranks=ranks)
        script = made._script.with_suffix(".py")
        begin = "import os, sys, time\nrank = int(os.environ['PADDLE_TRAINER_ID'])\n"
        script.write_text(f"{begin}{code}\n")
        made.argv[-1] = str(script)
        return made

    def environ(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of the launcher."""
        # An empty mask means CPU.
        own = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", MARKER: self.marker}
        return {**os.environ, **own, **(env or {})}

    def start(
        self,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> subprocess.Popen[bytes]:
        """Start the launcher; its standard output and error are pipes unless POPEN says else."""
        return piped([*prefix, *self.argv], self.environ(env), self.folder, **popen)

    def run(self, **popen: Any) -> Ended:
        """Run the launcher to its end; nobody may be left."""
        return self.finish(self.start(**popen))

    def finish(self, process: subprocess.Popen[bytes], seconds: float = LONG_S) -> Ended:
        """Wait for the end of a started launcher; nobody may be left."""
        try:
            out, err = process.communicate(timeout=seconds)
        finally:
            process.kill()
            # After a kill -9 the guard needs a moment.
            assert_no_survivors(self.marker, LONG_S if process.returncode else 0.0)
        return Ended(process.returncode, out, (err or b"").decode(errors="replace"))

    def wait_for(self, *names: str) -> None:
        """Wait until ranks have made these files in the folder."""
        until(lambda: all((self.folder / name).exists() for name in names))

    def log(self, rank: int) -> Path:
        """Return where users look for a rank's output."""
        return self.folder / "log" / f"workerlog.{rank}"

    def events(self) -> list[dict[str, Any]]:
        """Return what the last launch has written down so far."""
        try:
            text = (self.folder / "log" / "latest" / "events.jsonl").read_text()
        except FileNotFoundError:
            return []
        # While it is written, a reader may see half of the last line, which is none.
        return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]


class Ended:
    """How a launcher ended: its code, what ranks showed, and what it said itself."""

    def __init__(self, code: int, out: bytes, said: str) -> None:
        self.code = code
        self.out = out
        self.said = said
