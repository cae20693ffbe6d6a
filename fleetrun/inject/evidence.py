"""The proof of what took effect in this rank: `strategy.<rank>.json` of the run directory."""

from __future__ import annotations

import atexit
import json
import os
import sys
from importlib import util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .wish import Wish

SCHEMA = 1
_SECRETS = "_fleetrun_secrets"
EFFECTIVE, NO_EFFECT, REFUSED, SCRIPT = "effective", "no_effect", "refused", "script"


def many(count: int, what: str) -> str:
    """Write COUNT of WHAT.

    >>> many(1, "allreduce"), many(0, "allreduce")
    ('1 allreduce', '0 allreduces')
    """
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


class Evidence:
    """Collects what was counted in this process and writes it, whole or not at all.

    Whatever says `effective` must have counted it in the program or the calls that really ran;
    a setter's answer is no evidence.
    """

    def __init__(self, path: str, asked: Wish) -> None:
        self._path = path
        self._asked = asked
        self._pid = os.getpid()
        self._knobs: dict[str, dict[str, Any]] = {}
        self._notes: list[str] = []
        self._disagreements: list[dict[str, Any]] = []
        self._written = ""
        # Whether this process trains the rank; known at its first update.
        self._is_trainer: bool | None = None
        # Free for whoever counts: gradients, allreduces, bucket_bytes, communicators, groups, …
        self.counts: dict[str, Any] = {}
        # dygraph or static, once something was trained.
        self.graph = ""
        self.updates = 0
        # None: not compared.
        self.ranks_equal: bool | None = None
        # After which update they were compared last.
        self.compared_after: int | None = None

    def knob(
        self,
        name: str,
        status: str,
        *,
        in_effect: Any = None,
        reason: str = "",
        evidence: str = "",
    ) -> None:
        """Say what became of the field NAME; a later word replaces an earlier one."""
        asked = self._asked.strategy.get(
            name,
            self._asked.build_strategy.get(name, self._asked.execution_strategy.get(name)),
        )
        self._knobs[name] = {
            "name": name,
            "asked": asked,
            "in_effect": in_effect,
            "status": status,
            "reason": reason,
            "evidence": evidence,
        }

    def put(self, name: str, **changes: Any) -> None:
        """Change what was said of the field NAME in the columns CHANGES."""
        self._knobs[name].update(changes)

    def status(self, name: str) -> str | None:
        """Return what was said of the field NAME, None if nothing was."""
        return self._knobs[name]["status"] if name in self._knobs else None

    def known(self, name: str, value: Any) -> Mapping[str, Any]:
        """Return what the launcher knows of the field NAME with VALUE in this graph and Paddle."""
        paddle = sys.modules.get("paddle")
        # Of other versions the nearest: 2 or 3.
        version = str(getattr(paddle, "__version__", ""))[:1]
        here = {"graph": self.graph, "device": _device(paddle)}
        for line in self._asked.known(name, value):
            is_here = all(line.get(key, there) == there for key, there in here.items())
            if is_here and line.get("paddle", version)[:1] == version:
                return line
        return {}

    def note(self, text: str) -> None:
        """Leave a sentence for the user; once."""
        if text not in self._notes:
            self._notes.append(text)

    def disagree(self, name: str, script: Any, used: Any) -> None:
        """Say that the script sets NAME to SCRIPT itself, where the strategy says otherwise."""
        asked = self._asked.strategy.get(
            name,
            self._asked.build_strategy.get(name, self._asked.execution_strategy.get(name)),
        )
        entry = {"name": name, "script": script, "strategy": asked, "used": used}
        if entry not in self._disagreements:
            self._disagreements.append(entry)

    def claim(self) -> bool:
        """Say that this process trains; return whether it is the rank, and so may report.

        A rank may consist of several processes: it is the first of them that trains.
        """
        if self._is_trainer is None or os.getpid() != self._pid:
            # A forked child inherits this object; where it is the one that trains, it is its own.
            self._pid = os.getpid()
            self._is_trainer = not _is_taken(self._path, self._pid)
        return self._is_trainer

    def write(self) -> None:
        """Write what is known; training goes on where the file cannot be written."""
        # Neither forked DataLoader workers, which inherit this object, nor helpers are the rank.
        if os.getpid() != self._pid or not self._path:
            return
        if not self._is_trainer and (self._is_trainer is False or _exists(self._path)):
            return
        text = json.dumps(_without_secrets(self._record()))
        if text == self._written:
            return
        draft = f"{self._path}.{self._pid}"
        try:
            # Its owner's alone, from its first byte; a link that somebody has put there is in
            # the way.
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(draft, flags, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(draft, self._path)
            self._written = text
        except OSError as error:
            self._path = ""
            print(f"fleetrun: the strategy's evidence cannot be written: {error}", file=sys.stderr)

    def write_at_exit(self) -> None:
        """Write once more when the process ends, if it trained anything."""
        # A DataLoader worker or a helper that only imports Paddle must not overwrite the rank's.
        atexit.register(lambda: self.write() if self.graph or self._knobs else None)

    def _record(self) -> dict[str, Any]:
        paddle = sys.modules.get("paddle")
        return {
            "schema": SCHEMA,
            "rank": int(os.environ.get("PADDLE_TRAINER_ID", "0") or 0),
            "pid": self._pid,
            "paddle": getattr(paddle, "__version__", None),
            "graph": self.graph,
            "device": _device(paddle),
            "complete": self.updates > 0,
            "updates": self.updates,
            "knobs": [self._as_far_as_seen(knob) for knob in self._knobs.values()],
            "counts": self.counts,
            "disagreements": self._disagreements,
            "notes": self._notes,
            "ranks_equal": self.ranks_equal,
            "compared_after": self.compared_after,
        }

    def _as_far_as_seen(self, knob: dict[str, Any]) -> dict[str, Any]:
        """Return KNOB; what was counted in a backward has no effect until parameters change."""
        if self.updates or knob["status"] != EFFECTIVE:
            return knob
        reason = "no update of the optimizer was made"
        return {**knob, "status": NO_EFFECT, "in_effect": None, "reason": reason}


def _without_secrets(record: dict[str, Any]) -> object:
    """Return RECORD without the secrets of this process, which scripts give to Paddle, too."""
    module = sys.modules.get(_SECRETS)
    if module is None:
        home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
        path = os.path.join(home, "plan", "secrets.py")
        spec = util.spec_from_file_location(_SECRETS, path)
        if spec is None or spec.loader is None:
            raise ImportError(path)
        module = util.module_from_spec(spec)
        spec.loader.exec_module(module)
        sys.modules[_SECRETS] = module
    plain = json.loads(json.dumps(record, default=str))
    return module.everywhere(plain, module.Hider(os.environ, sys.argv))


def _is_taken(path: str, pid: int) -> bool:
    """Whether another process of this rank, which still runs, has proven in PATH that it trains."""
    try:
        with open(path, encoding="utf-8") as file:
            record = json.load(file)
        owner = record["pid"] if record["complete"] else pid
        with open(f"/proc/{owner}/environ", "rb") as file:
            environ = file.read()
    except (OSError, ValueError, KeyError):
        return False
    # Process ids are used again, and an earlier run of the rank leaves its file.
    return owner != pid and os.fsencode(path) in environ


def _exists(path: str) -> bool:
    return os.path.exists(path)


def _device(paddle: Any) -> str:
    try:
        return str(paddle.device.get_device()).partition(":")[0]
    except Exception:
        return ""
