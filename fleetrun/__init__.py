"""fleetrun: start PaddlePaddle training on one machine or a thousand."""

__version__ = "2.0.0"

_INTERFACE = ("Job", "launch")


def __getattr__(name: str) -> object:
    """Return a name of the Python interface, which is only imported when it is used."""
    if name not in _INTERFACE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    from importlib import import_module

    return getattr(import_module("fleetrun.api"), name)
