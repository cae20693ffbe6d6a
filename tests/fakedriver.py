"""A fake of NVIDIA's driver in C, below the real pynvml; only root can install it for a launch."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from lab import is_root

SOURCE = Path(__file__).parent / "drivers" / "driver.c"
# A machine with the driver, as /proc shows it.
HERE = (
    "unshare",
    "--mount",
    "sh",
    "-ec",
    (
        "mount -t tmpfs tmpfs /proc/driver; mkdir /proc/driver/nvidia; "
        'echo NVRM version: 550.54.14 >/proc/driver/nvidia/version; exec "$@"'
    ),
    "sh",
)
needed = pytest.mark.skipif(
    not is_root() or not shutil.which("cc"), reason="not root, or no compiler"
)


def build(folder: Path) -> dict[str, str]:
    """Build it in FOLDER, and return the variables that make launchers load it."""
    library = folder / "libcuda.so.1"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
        (folder / "libnvidia-ml.so.1").symlink_to(library.name)
    return {"LD_LIBRARY_PATH": str(folder)}
