"""From the words of a launch to its request."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from fleetrun.cli import configfile, mistakes, request
from fleetrun.cli.argv import ParsedCommand
from fleetrun.cli.parser import COMMANDS
from fleetrun.engines import detect
from fleetrun.errors import EnvironmentFault
from fleetrun.model import Layer, Request
from fleetrun.yamlfile import text_of


class ResolvedLaunch(NamedTuple):
    """A request, with the environment that it was made from, and the engine that started us."""

    request: Request
    environ: Mapping[str, str]
    engine: detect.Detected | None = None


def resolve(parsed: ParsedCommand, environ: Mapping[str, str]) -> ResolvedLaunch:
    """Return the request of PARSED in ENVIRON; UsageError if it is not valid."""
    restored: tuple[tuple[str, str | None], ...] = ()
    layers: Mapping[str, Layer] = {}
    if parsed.asks("from_manifest"):
        from fleetrun.cli import replay  # reads manifests

        again = replay.replay(parsed, environ)
        try:
            os.chdir(again.cwd)
        except OSError as error:
            raise EnvironmentFault(
                f"The manifest's folder {again.cwd} cannot be entered ({error.strerror})."
            ) from None
        parsed = again.parsed._replace(notes=(*again.parsed.notes, *again.notes))
        environ, file = again.environ, again.config
        restored, layers = again.restored, again.layers
    else:
        file = configfile.find(parsed.given, environ)
    mistakes.refuse(parsed, COMMANDS)
    listed = detect.rows(environ)
    engine: list[detect.Detected] = []

    def detected() -> detect.Detected:
        engine.append(detect.read(listed, environ, lambda path: text_of(path, "the list of hosts")))
        return engine[0]

    made = request.resolve(parsed, environ, file, layers, detected if listed else None)
    given = configfile.beside(file, parsed.given)
    made = made._replace(typed=parsed.words, given=given, restored=restored)
    return ResolvedLaunch(made, environ, engine[0] if engine else None)
