"""An option in messages: as the user wrote it, with its source."""

from __future__ import annotations

from fleetrun.model import Request
from fleetrun.plan import kinds


def option(request: Request, name: str) -> str:
    """Write the option for NAME: `--gpus=0,9`, or `--gpus=0,9 (from $PADDLE_DEVICES)`."""
    value = getattr(request, name)
    if isinstance(value, tuple):
        value = ",".join(value)
    flag = _of_devices(request) if name == "devices" else name
    written = f"--{flag}={value}"
    for setting in request.settings:
        if setting.name in {name, flag} and setting.source not in {"command line", "default"}:
            return f"{written} (from {setting.source})"
    return written


def source(request: Request, name: str) -> str:
    """Return the variable or the file that has set the option NAME; empty: the command line."""
    sources = (setting.source for setting in request.settings if setting.name == name)
    return next((text for text in sources if text not in {"command line", "default"}), "")


def is_given(request: Request, name: str) -> bool:
    """Whether the option NAME, which has no default, was given."""
    return any(setting.name == name and setting.source != "default" for setting in request.settings)


def _of_devices(request: Request) -> str:
    """Return the name of the option that named the devices."""
    option = f"{request.device_kind}s"
    names = {"devices", option, *kinds.GENERAL}
    is_chosen = request.device_kind is None or is_given(request, "device_kind")
    otherwise = "devices" if is_chosen else option
    return next((setting.name for setting in request.settings if setting.name in names), otherwise)
