"""What a command prints on standard output, whole or with a sentence why not."""

from __future__ import annotations

import sys

from fleetrun.errors import EnvironmentFault


def put(text: str) -> int:
    """Print TEXT at once, so that a closed pipe shows up here, and return the exit code 0.

    Names may hold bytes that are no text; they come out as they came in, whatever the locale.
    """
    out = sys.stdout
    if out is None:
        raise EnvironmentFault("Standard output is closed, and what was asked for goes there.")
    try:
        out.flush()
        out.buffer.write(text.encode(errors="surrogateescape"))
        out.flush()
    except BrokenPipeError:
        # Whoever reads has seen enough, as in `| head`.
        raise
    except OSError as error:
        raise EnvironmentFault(f"Standard output cannot be written ({error.strerror}).") from None
    return 0
