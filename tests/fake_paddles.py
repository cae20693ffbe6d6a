"""A fake Paddle with plug-ins, for tests of its callers; the real one takes seconds to import.

Its plug-ins are text files: `lib-mlu.so` holds `mlu 4`, a kind and how many devices it has, or
`mlu 4 MLU_VISIBLE_DEVICES`, with the mask that it reads. What else is asked of it raises.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_DEVICE = """
import os, time

time.sleep(float(os.environ.get("FAKE_PADDLE_SLEEP", 0)))
if "FAKE_PADDLE_KILL" in os.environ:
    os.kill(os.getpid(), 11)
print("a plug-in says hello")
_root = os.environ.get("CUSTOM_DEVICE_ROOT") or "/nonexistent"
_counts = {}
for name in sorted(os.listdir(_root) if os.path.isdir(_root) else ()):
    if not name.startswith("lib-"):
        continue
    kind, count, *mask = open(os.path.join(_root, name)).read().split()
    _counts[kind] = int(count)
    if mask and mask[0] in os.environ:
        _counts[kind] = len([number for number in os.environ[mask[0]].split(",") if number])

def get_all_custom_device_type():
    return list(_counts)

def get_available_custom_device():
    # One alone has no number.
    pairs = [(kind, n, count) for kind, count in _counts.items() for n in range(count)]
    return [f"{kind}:{n}" if count > 1 else kind for kind, n, count in pairs]
"""


def fake_paddle(folder: Path) -> str:
    """Make the fake in FOLDER, and return the PYTHONPATH with it."""
    root = folder / "fake"
    (root / "paddle").mkdir(parents=True)
    (root / "paddle/__init__.py").touch()
    (root / "paddle/version.py").write_text("full_version = '3.3.1'\n")
    (root / "paddle/device.py").write_text(_DEVICE)
    return str(root)


def plugins(folder: Path, *texts: str) -> str:
    """Make the plug-ins that TEXTS describe in FOLDER, and return the folder.

    The fake takes nothing from libraries that are called otherwise.
    """
    root = folder / "plug-ins"
    root.mkdir()
    for text in texts:
        (root / f"lib-{text.split()[0]}.so").write_text(text)
    return str(root)
