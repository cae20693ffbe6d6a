"""The newest complete checkpoint of a folder, for --resume_from.

Complete means that Paddle's Trainers (PaddleNLP, PaddleFormers) and `paddle.distributed.checkpoint`
can load it. Only cheap signs are checked: names in indexes, sizes in headers, last bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
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
_PART = re.compile(rb"\d+_\d+\.distcp")
# Trainers write the first one with the model, and one of the others (.bin: PaddleFormers) later.
_TRAINERS, _STATES = "training_args.bin", frozenset({"trainer_state.json", "trainer_state.bin"})
# Some Trainers write these when everything else is there; the first one says so of the second.
_DONE, _SCHEDULER = ".checkpoint_done", "scheduler.pdparams"
_SAVES_OPTIMIZER = b"ignore_save_lr_and_optim\x94\x89"
# What accompanies a model's weights, and is written before them.
_COMPANIONS = (".json", ".txt", ".jinja")
# A part of a model; the index that names all parts is written after them.
_SHARD = re.compile(r"(.+)-\d{5}-of-\d{5}(\.\w+)")
_HEADER, _MOST = 8, 256 * 1024 * 1024
# The most checkpoints that a host reports to the others, and characters of each reason.
_MOST_LISTED, _LONGEST = 8, 120


def find(folder: str) -> Checkpoints:
    """Return the newest complete checkpoint in FOLDER, and why newer ones are not."""
    if os.path.isfile(folder):
        raise EnvironmentFault(f"--resume_from={folder} is a file; give the folder around it.")
    partial: list[tuple[str, str]] = []
    for name, why in _newest_first(folder):
        path = os.path.abspath(os.path.join(folder, name))
        if not why:
            return Checkpoints(path, tuple(partial))
        partial.append((path, why))
    return Checkpoints(None, tuple(partial))


def listed(folder: str) -> tuple[tuple[str, str], ...]:
    """Return the newest checkpoints in FOLDER with their faults, for other hosts."""
    newest = islice(_newest_first(folder), _MOST_LISTED)
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
            partial.append((path, f"{why} on {host}"))
            continue
        why = _fault(path)
        if why:
            raise EnvironmentFault(
                f"{path}, from which the other hosts resume, is not complete on this one ({why}): "
                "copy it here, or share the folder of --resume_from."
            )
        return Checkpoints(path, tuple(partial))
    return Checkpoints(None, tuple(partial))


def _newest_first(folder: str) -> Iterator[tuple[str, str]]:
    """Yield each checkpoint's name, and why it is incomplete."""
    names: list[str] = []
    try:
        for name in os.listdir(folder):
            match = _NUMBERED.fullmatch(name)
            path = os.path.join(folder, name)
            # A core dump, a log or a pipe may have such a name. A lost link is incomplete.
            if match and (match[2] or os.path.isdir(path) or os.path.islink(path)):
                names.append(name)
    except FileNotFoundError:
        pass
    except OSError as error:
        # Not the same as an empty folder: ranks would begin again, and overwrite what is there.
        raise EnvironmentFault(
            f"--resume_from={folder} cannot be read ({error.strerror})."
        ) from None
    needs_mark = any(os.path.exists(f"{folder}/{name}/{_DONE}") for name in names)
    for name in sorted(names, key=_age, reverse=True):
        path = os.path.join(folder, name)
        is_done = not needs_mark or not os.path.isdir(path) or os.path.exists(f"{path}/{_DONE}")
        yield name, _fault(path) if is_done else f"{_DONE} is missing"


def _age(name: str) -> tuple[int, str]:
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else -1, name


def _files(path: str) -> Iterable[str]:
    def refuse(error: OSError) -> None:
        raise error

    for root, _, names in os.walk(path, onerror=refuse):
        for name in names:
            yield os.path.relpath(os.path.join(root, name), path)


def _fault(path: str) -> str:
    """Return why the checkpoint PATH is incomplete; empty if it is complete."""
    try:
        if not os.path.isdir(path):
            return _fault_of(path)
        names = sorted(_files(path))
        faults = (_missing(path, names), *(_fault_of(f"{path}/{name}") for name in names))
        return next(filter(None, faults), "") or _unlisted(path, names)
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error})"


def _missing(path: str, names: Sequence[str]) -> str:
    """Name what is missing beside the files NAMES."""
    if all(name.endswith(_COMPANIONS) for name in names):
        return "the model's weights are missing" if names else "it is empty"
    if _TRAINERS in names:
        if not _STATES.intersection(names):
            return "trainer_state is missing"
        with open(f"{path}/{_TRAINERS}", "rb") as file:
            saves_optimizer = _SAVES_OPTIMIZER in file.read(_MOST)
        if saves_optimizer and _SCHEDULER not in names:
            return f"{_SCHEDULER} is missing"
    for shard in filter(None, map(_SHARD.fullmatch, names)):
        index = f"{shard[1]}{shard[2]}.index.json"
        if index not in names:
            return f"{index} is missing"
    with_metadata = {os.path.dirname(name) for name in names if name.endswith(".metadata")}
    with_parts = {os.path.dirname(name) for name in names if name.endswith(".distcp")}
    alone = sorted(with_parts - with_metadata)
    return f"the .metadata of {alone[0] or 'its parts'} is missing" if alone else ""


def _fault_of(path: str) -> str:
    """Return what is visibly wrong with a file; empty: nothing."""
    name, size = os.path.basename(path), os.path.getsize(path)
    if not size and not name.startswith("."):
        return f"{name} is empty"
    is_cut = False
    with open(path, "rb") as file:
        if name.endswith(".safetensors"):
            length = int.from_bytes(file.read(_HEADER), "little")
            is_cut = length > min(_MOST, size - _HEADER)
            tensors = {} if is_cut else json.loads(file.read(length))
            ends = [tensor.get("data_offsets", (0, 0))[1] for tensor in tensors.values()]
            is_cut = is_cut or size != _HEADER + length + max(ends, default=0)
        elif name.endswith(_PICKLED) or name == "trainer_state.bin":
            is_pickled = file.read(1) == _BEGIN
            file.seek(size - 1)
            is_cut = is_pickled and file.read() != _END
        elif name.endswith(".json") and size < _MOST:
            try:
                json.load(file)
            except ValueError:
                is_cut = True
    return f"{name} is cut off" if is_cut else ""


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
