"""How an option is called in a message: as it was written, and where it came from."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fleetrun.model import Request

_KIND_FLAGS = {"gpu": "gpus", "npu": "npus", "xpu": "xpus"}


def option(request: Request, name: str) -> str:
    """Write the option that fills NAME: `--gpus=0,9`, or `--gpus=0,9 (from $PADDLE_DEVICES)`."""
    value = getattr(request, name)
    if isinstance(value, tuple):
        value = ",".join(value)
    flag = _KIND_FLAGS.get(request.device_kind or "", name) if name == "devices" else name
    written = f"--{flag}={value}"
    for setting in request.settings:
        if setting.name in {name, flag} and setting.source not in {"command line", "default"}:
            return f"{written} (from {setting.source})"
    return written
