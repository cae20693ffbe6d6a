"""The real command line in tests: `python -m fleetrun` with small scripts as ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from checkout import ROOT, environ
from processes import MARKER, Job, assert_no_survivors
from waiting import LONG_S

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

FLEETRUN = (sys.executable, "-m", "fleetrun")
DRIVER = str(ROOT / "tests" / "process" / "driver.py")


def fleetrun(
    *words: str, folder: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run `fleetrun WORDS` in FOLDER (the current one), with VARIABLES beside ours."""
    return subprocess.run(
        [*FLEETRUN, *words],
        cwd=folder,
        env=environ(**variables),
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )


def started(*words: str, folder: Path | None = None, **popen: Any) -> subprocess.Popen[bytes]:
    """Start `fleetrun WORDS` in FOLDER; its output goes to pipes unless POPEN has others."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "env": environ()}
    argv = [*FLEETRUN, *words]
    return subprocess.Popen(argv, cwd=folder, **{**pipes, **popen})


class Ended(NamedTuple):
    """How a launcher ended: its exit code, what its ranks printed, and its own messages."""

    code: int
    out: bytes
    stderr: str


class Launcher(Job):
    """Starts the launcher `argv` in FOLDER, and waits for its end."""

    argv: list[str]
    # How long processes of a failed job may live on.
    leeway_s = 5.0

    def environ(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the environment of the launcher."""
        return environ(**{MARKER: self.marker, **(env or {})})

    def start(
        self,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        **popen: Any,
    ) -> subprocess.Popen[bytes]:
        """Start the launcher; its standard output and error are pipes unless POPEN says else."""
        usual = {
            "stdin": subprocess.DEVNULL,
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "env": self.environ(env),
            "cwd": self.folder,
        }
        return subprocess.Popen([*prefix, *self.argv], **{**usual, **popen})

    def start_until(self, *names: str, **start: Any) -> subprocess.Popen[bytes]:
        """Start the launcher, and wait until ranks have made these files in the folder."""
        launcher = self.start(**start)
        self.wait_for(*names)
        return launcher

    def run(self, **popen: Any) -> Ended:
        """Run the launcher to its end; no process may be left."""
        return self.finish(self.start(**popen))

    def release(self, launcher: subprocess.Popen[bytes]) -> Ended:
        """Let ranks that wait for the file `go` end, and finish."""
        (self.folder / "go").touch()
        return self.finish(launcher)

    def kill(self, launcher: subprocess.Popen[bytes]) -> None:
        """Kill the launcher; no process may be left."""
        launcher.kill()
        launcher.wait()
        assert_no_survivors(self.marker)

    def finish(self, process: subprocess.Popen[bytes], seconds: float = LONG_S) -> Ended:
        """Wait for the end of a started launcher; no process may be left."""
        try:
            out, err = process.communicate(timeout=seconds)
        finally:
            process.kill()
            process.wait()
            # After a signal killed the launcher itself, its supervisor or an orphan needs a moment.
            if process.returncode < 0:
                assert_no_survivors(self.marker)
            else:
                assert_no_survivors(self.marker, self.leeway_s if process.returncode else 0.0)
        stderr = (err or b"").decode(errors="replace")
        # For a test that fails: pytest shows it.
        print(stderr, file=sys.stderr)
        return Ended(process.returncode, out, stderr)


class Command(Launcher):
    """`fleetrun --nproc_per_node=RANKS OPTIONS script` in FOLDER.

    The script is shell text; a rank knows its number as $PADDLE_TRAINER_ID, which is $R for short.
    """

    def __init__(self, folder: Path, script: str, *options: str, ranks: int = 2) -> None:
        super().__init__(folder)
        self._script = folder / f"script-{self.marker[:8]}"
        self._script.write_text(f"#!/bin/sh\nR=$PADDLE_TRAINER_ID\n{script}\n")
        self._script.chmod(0o755)
        command = [*FLEETRUN, "--quiet", f"--nproc_per_node={ranks}"]
        self.argv = [*command, *options, str(self._script)]

    @classmethod
    def python(cls, folder: Path, code: str, *options: str, ranks: int = 2) -> Command:
        """Make a command whose ranks run Python CODE, with the rank as `rank`."""
        made = cls(folder, "", *options, ranks=ranks)
        script = made._script.with_suffix(".py")
        begin = "import os, sys, time\nrank = int(os.environ['PADDLE_TRAINER_ID'])\n"
        script.write_text(f"{begin}{code}\n")
        made.argv[-1] = str(script)
        return made

    def detach(self) -> subprocess.CompletedProcess[str]:
        """Start the launcher in the background, and return what it printed before."""
        self.argv.insert(len(FLEETRUN), "--detach")
        return subprocess.run(
            self.argv,
            env=self.environ(),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=LONG_S,
        )


class Driven(Launcher):
    """The supervisor alone, with shell COMMANDS as ranks, and what else driver.py may be told."""

    leeway_s = 0.0

    def __init__(self, folder: Path, *commands: str | list[str], **wanted: object) -> None:
        super().__init__(folder)
        argvs = [
            ["sh", "-c", command] if isinstance(command, str) else command for command in commands
        ]
        spec = folder / f"{self.marker}.json"
        spec.write_text(json.dumps({"commands": argvs, "folder": str(folder), **wanted}))
        self.argv = [sys.executable, DRIVER, str(spec)]


def process_in_background(printed: str) -> int:
    """Return the process id of the job, as PRINTED."""
    return int(printed.partition("in the background as process ")[2].partition(":")[0])
