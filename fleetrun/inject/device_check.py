"""Asks the Paddle of a Python which devices its plug-ins have; run before a launch, in a child.

It writes to descriptor 3, marshalled: Paddle's version, and each kind with its number of devices,
in Paddle's order; or why not. A plug-in may print, crash, or take its time.
"""

import marshal
import os


def count() -> "tuple[str, list[tuple[str, int]]]":
    """Return Paddle's version, and what its plug-ins have."""
    from paddle import device
    from paddle.version import full_version

    # As mlu:0, mlu:1.
    there = [name.partition(":")[0] for name in device.get_available_custom_device() or ()]
    kinds = device.get_all_custom_device_type() or ()
    return full_version, [(kind, there.count(kind)) for kind in kinds]


if __name__ == "__main__":
    try:
        said = (count(), "")  # type: tuple[tuple[str, list[tuple[str, int]]] | None, str]
    except ModuleNotFoundError as error:
        if error.name != "paddle":
            said = (None, f"{type(error).__name__}: {error}")
        else:
            said = (("", []), "")
    except Exception as error:
        said = (None, f"{type(error).__name__}: {error}")
    with os.fdopen(3, "wb") as pipe:
        # The oldest form of all Pythons in use.
        pipe.write(marshal.dumps(said, 2))
    # What a plug-in does at its end is nobody's business here.
    os._exit(0)
