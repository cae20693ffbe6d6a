"""Counts the plug-in devices that a Python's Paddle finds; runs in a child before a launch.

It writes to descriptor 3, marshalled: Paddle's version, and each kind with its number of devices,
in Paddle's order; or the error. A plug-in may print, crash or be slow.
"""

import marshal
import os


def count() -> "tuple[str, list[tuple[str, int]]]":
    """Return Paddle's version, and the kinds and numbers of its plug-ins' devices."""
    from paddle import device
    from paddle.version import full_version

    # As mlu:0, mlu:1.
    names = [name.partition(":")[0] for name in device.get_available_custom_device() or ()]
    kinds = device.get_all_custom_device_type() or ()
    return full_version, [(kind, names.count(kind)) for kind in kinds]


if __name__ == "__main__":
    try:
        answer = (count(), "")  # type: tuple[tuple[str, list[tuple[str, int]]] | None, str]
    except ModuleNotFoundError as error:
        if error.name != "paddle":
            answer = (None, f"{type(error).__name__}: {error}")
        else:
            answer = (("", []), "")
    except Exception as error:
        answer = (None, f"{type(error).__name__}: {error}")
    with os.fdopen(3, "wb") as pipe:
        # The oldest format that all supported Pythons read.
        pipe.write(marshal.dumps(answer, 2))
    # Skip what a plug-in does at exit.
    os._exit(0)
