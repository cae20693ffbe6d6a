"""The newest complete checkpoint of a folder, for --resume_from.

Complete means that Paddle's Trainers (PaddleNLP, PaddleFormers) and `paddle.distributed.checkpoint`
can load it. Only cheap signs are checked: names in indexes, sizes in headers, last bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice

from fleetrun.errors import EnvironmentFault
from fleetrun.model import Checkpoints, HostListing
from fleetrun.text import visible

# Names of unfinished ones end differently, or begin with a dot or `tmp`.
_NUMBERED = re.compile(r"(?!\.|tmp)(?:.*[-_.])?(\d+)(\.(?:pdparams|pdckpt|ckpt|pkl))?")
# The output of paddle.save and pickle begins and ends with these bytes; that of
# `paddle.save(..., use_binary_format=True)` does not begin so.
_PICKLED = (".distcp", ".metadata", ".pdparams", ".pdopt", ".pdscaler", ".pkl", ".pdckpt", ".pth")
_BEGIN, _END = b"\x80", b"."
_ZIP = b"PK"
_PART = re.compile(rb"\d+_\d+\.distcp")
# Trainers write the first one with the model, and one of the others (.bin: PaddleFormers) later.
_TRAINERS, _STATES = "training_args.bin", frozenset({"trainer_state.json", "trainer_state.bin"})
# Some Trainers write these when everything else is there; the first one says so of the second.
_SCHEDULER = "scheduler.pdparams"
_LAST = (".checkpoint_done", _SCHEDULER)
_SAVES_OPTIMIZER = b"ignore_save_lr_and_optim\x94\x89"
# What accompanies a model's weights, and is written before them.
_COMPANIONS = (".json", ".txt", ".jinja")
# A part of a model, whose index names all.
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(\.\w+)")
_HEADER = 8
_MOST = 256 * 1024 * 1024
# The most checkpoints that a host reports to the others, and characters of each reason.
_MOST_LISTED, _LONGEST = 8, 120


def find(folder: str, *, is_alone: bool = True) -> Checkpoints:
    """Return the newest complete checkpoint in FOLDER, and why newer ones are not.

    IS_ALONE: no other host has parts of it in a folder of its own.
    """
    if os.path.isfile(folder):
        raise EnvironmentFault(f"--resume_from={folder} is a file; give the folder around it.")
    partial: list[tuple[str, str]] = []
    for name, why in _newest_first(folder, is_alone=is_alone):
        path = os.path.abspath(os.path.join(folder, name))
        if not why:
            with suppress(OSError):
                return Checkpoints(path, _written_ns(path), tuple(partial))
        partial.append((path, why or "it is gone"))
    return Checkpoints(None, 0, tuple(partial), has_folder=os.path.isdir(folder))


def listed(folder: str) -> tuple[tuple[str, str], ...]:
    """Return the newest checkpoints in FOLDER with their faults, for other hosts."""
    newest = islice(_newest_first(folder, is_alone=False), _MOST_LISTED)
    return tuple((name, visible(why)[:_LONGEST]) for name, why in newest if name.isprintable())


def agreed(folder: str, listings: Sequence[HostListing]) -> Checkpoints:
    """Return the newest checkpoint that is complete on all hosts, by their LISTINGS.

    Raises EnvironmentFault if it is not complete here, on a host that has come since.
    """
    known = [(host, dict(listing)) for host, listing in listings]
    partial: list[tuple[str, str]] = []
    for name in sorted({name for _, listing in known for name in listing}, key=_age, reverse=True):
        path = os.path.abspath(os.path.join(folder, name))
        faults = [(host, listing.get(name, "it is not there")) for host, listing in known]
        host, why = next(((host, why) for host, why in faults if why), ("", ""))
        if why:
            is_everywhere = all(reason == why for _, reason in faults)
            partial.append((path, why if is_everywhere else f"{why} on {host}"))
            continue
        why = fault(path, is_alone=False)
        if why:
            raise EnvironmentFault(
                f"{path}, from which the other hosts resume, is not complete on this one ({why}): "
                "copy it here, or share the folder of --resume_from."
            )
        return Checkpoints(path, _written_ns(path), tuple(partial))
    return Checkpoints(None, 0, tuple(partial))


def _newest_first(folder: str, *, is_alone: bool) -> Iterator[tuple[str, str]]:
    """Yield each checkpoint's name, and why it is incomplete."""
    names: list[str] = []
    try:
        names = [name for name in os.listdir(folder) if _is_checkpoint(folder, name)]
    except FileNotFoundError:
        pass
    except OSError as error:
        # Not the same as an empty folder: ranks would begin again, and overwrite what is there.
        raise EnvironmentFault(
            f"--resume_from={folder} cannot be read ({error.strerror})."
        ) from None
    last = [
        file for file in _LAST if any(os.path.exists(f"{folder}/{name}/{file}") for name in names)
    ]
    for name in sorted(names, key=_age, reverse=True):
        yield name, fault(os.path.join(folder, name), last, is_alone=is_alone)


def _is_checkpoint(folder: str, name: str) -> bool:
    """Whether NAME is one by its name, and not the core dump, log or pipe of such a name."""
    match = _NUMBERED.fullmatch(name)
    path = os.path.join(folder, name)
    if match is None or match[2]:
        return match is not None
    if not os.path.isfile(path):
        # A link that leads nowhere is incomplete.
        return os.path.isdir(path) or os.path.islink(path)
    with suppress(OSError), open(path, "rb") as file:
        begin = file.read(2)
        return not begin or begin[:1] == _BEGIN or begin == _ZIP
    return True


def _age(name: str) -> tuple[int, str]:
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else -1, name


def _written_ns(path: str) -> int:
    """Return when something was last written into the checkpoint PATH, by the clock of files."""
    inside = (f"{path}/{name}" for name in _files(path)) if os.path.isdir(path) else ()
    return max(os.stat(file).st_mtime_ns for file in (path, *inside))


def _files(path: str) -> Iterable[str]:
    def refuse(error: OSError) -> None:
        raise error

    for root, _, names in os.walk(path, onerror=refuse):
        for name in names:
            yield os.path.relpath(os.path.join(root, name), path)


def fault(path: str, last: Iterable[str] = (), *, is_alone: bool = True) -> str:
    """Return why the checkpoint PATH is incomplete; empty if it is complete.

    LAST: files that are written last, as seen in its neighbours. IS_ALONE: as for `find`.
    """
    try:
        if not os.path.isdir(path):
            return _fault_of(path)
        names = sorted(_files(path))
        cut = filter(None, (_fault_of(f"{path}/{name}") for name in names))
        if is_alone:
            shards = filter(None, map(_SHARD.fullmatch, names))
            last = (*last, *(f"{shard[1]}{shard[2]}.index.json" for shard in shards))
        return _missing(path, names, last) or next(cut, "") or _unlisted(path, names)
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error})"


def _missing(path: str, names: Sequence[str], last: Iterable[str]) -> str:
    """Name the missing file that the others, NAMES, imply."""
    if not names:
        return "it is empty"
    if all(name.endswith(_COMPANIONS) for name in names):
        return "the model's weights are missing"
    expected = list(last)
    if _TRAINERS in names:
        if not _STATES.intersection(names):
            return "trainer_state is missing"
        with open(f"{path}/{_TRAINERS}", "rb") as file:
            expected += [_SCHEDULER] if _SAVES_OPTIMIZER in file.read(_MOST) else []
    missing = [name for name in expected if name not in names]
    if missing:
        return f"{missing[0]} is missing"
    with_metadata = {os.path.dirname(name) for name in names if name.endswith(".metadata")}
    parts = [os.path.dirname(name) for name in names if name.endswith(".distcp")]
    alone = [folder for folder in parts if folder not in with_metadata]
    return f"the .metadata of {alone[0] or 'its parts'} is missing" if alone else ""


def _fault_of(path: str) -> str:
    """Return what is visibly wrong with a file; empty: nothing."""
    name, size = os.path.basename(path), os.path.getsize(path)
    if not size and not name.startswith("."):
        return f"{name} is empty"
    with open(path, "rb") as file:
        if name.endswith(".safetensors"):
            length = int.from_bytes(file.read(_HEADER), "little")
            if length > min(_MOST, size - _HEADER):
                return f"{name} is cut off"
            tensors = json.loads(file.read(length)).values()
            ends = [tensor["data_offsets"][1] for tensor in tensors if "data_offsets" in tensor]
            expected = _HEADER + length + max(ends, default=0)
            return "" if size == expected else f"{name} has {size:,} bytes of {expected:,}"
        if name.endswith(_PICKLED) or name == "trainer_state.bin":
            is_pickled = file.read(1) == _BEGIN
            file.seek(size - 1)
            return f"{name} is cut off" if is_pickled and file.read() != _END else ""
        if name.endswith(".json") and size < _MOST:
            try:
                json.load(file)
            except ValueError:
                return f"{name} is cut off"
    return ""


def _unlisted(path: str, names: Sequence[str]) -> str:
    """Name the missing part that an index among NAMES lists."""
    for name in names:
        parts: Iterable[str] = ()
        with open(f"{path}/{name}", "rb") as file:
            if name.endswith(".index.json"):
                parts = json.load(file).get("weight_map", {}).values()
            elif name.endswith(".metadata"):
                parts = (part.decode() for part in _PART.findall(file.read(_MOST)))
        for part in sorted(set(parts)):
            if os.path.join(os.path.dirname(name), part) not in names:
                return f"{part} is missing, which {os.path.basename(name)} names"
    return ""
