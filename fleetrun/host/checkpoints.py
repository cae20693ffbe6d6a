"""The newest complete checkpoint of a folder, for --resume_from.

Complete means that Paddle's Trainers (PaddleNLP, PaddleFormers) and `paddle.distributed.checkpoint`
can load it. Only cheap signs are checked: names in indexes, sizes in headers, last bytes.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
_RANKS = re.compile(r"(rng_state)_(\d+)(\.pth)")
# Trainers write the first one with the model, and one of the others (.bin: PaddleFormers) later.
_TRAINERS, _STATES = "training_args.bin", frozenset({"trainer_state.json", "trainer_state.bin"})
# Some Trainers write these when everything else is there.
_SCHEDULER = "scheduler.pdparams"
_LAST = (".checkpoint_done", _SCHEDULER)
# How the first one says that the optimizer and its scheduler are saved, too.
_SAVES_OPTIMIZER = b"ignore_save_lr_and_optim\x94\x89"
# How PaddleFormers says there that the states of random numbers are not.
_SAVES_NO_RANDOM = b"save_rng_states\x94\x89"
# A part of a model, its place and the number of parts.
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.\w+)")
# What accompanies a model's weights, and is written before them.
_SETTINGS = frozenset(("config.json", "model_config.json"))
_COMPANIONS = _SETTINGS | {
    *("generation_config.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "tokenizer.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("chat_template.json", "chat_template.jinja", "preprocessor_config.json"),
}
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
                written_ns, lacks = _written_ns(path), is_alone and _lacks_random(path)
                return Checkpoints(path, written_ns, tuple(partial), lacks_random=lacks)
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


def _lacks_random(path: str) -> bool:
    """Whether PATH is a Trainer's without any state of random numbers: it can be loaded."""
    arguments = f"{path}/{_TRAINERS}"
    if not os.path.isfile(arguments) or any(n.startswith("rng_state") for n in os.listdir(path)):
        return False
    with open(arguments, "rb") as file:
        return _SAVES_NO_RANDOM not in file.read(_MOST)


def _written_ns(path: str) -> int:
    """Return when something was last written into the checkpoint PATH, by the clock of files."""
    inside = (f"{path}/{name}" for name in _files(path)) if os.path.isdir(path) else ()
    return max(os.stat(file).st_mtime_ns for file in (path, *inside))


def _age(name: str) -> tuple[int, str]:
    match = _NUMBERED.fullmatch(name)
    return int(match[1]) if match else -1, name


def fault(path: str, last: Iterable[str] = (), *, is_alone: bool = True) -> str:
    """Return why the checkpoint PATH is incomplete; empty if it is complete.

    LAST: files that are written last, as seen in its neighbours. IS_ALONE: as for `find`.
    """
    try:
        if not os.path.isdir(path):
            return _fault_of(path)
        names = sorted(_files(path))
        return (
            _missing(frozenset(names), last, is_alone=is_alone)
            or _missing_model(frozenset(names), is_alone=is_alone)
            or _unsaved(path, names)
            or next(filter(None, (_fault_of(f"{path}/{name}") for name in names)), "")
            or _unlisted(path, names)
        )
    except (OSError, ValueError) as error:
        return f"it cannot be read ({error})"


def _files(path: str) -> Iterable[str]:
    for root, _, names in os.walk(path, onerror=_refuse):
        for name in names:
            yield os.path.relpath(os.path.join(root, name), path)


def _refuse(error: OSError) -> None:
    raise error


def _missing(names: frozenset[str], last: Iterable[str], *, is_alone: bool) -> str:
    """Name the missing file that the other files imply."""
    if not names:
        return "it is empty"
    for name in last:
        if name not in names:
            return f"{name} is missing"
    if _TRAINERS in names and not _STATES & names:
        return "trainer_state is missing"
    folders = {os.path.dirname(name) for name in names if name.endswith(".distcp")}
    for folder in folders:
        if not any(n.endswith(".metadata") and os.path.dirname(n) == folder for n in names):
            return f"the .metadata of {folder or 'its parts'} is missing"
    ranks = {int(match[2]) for name in names if (match := _RANKS.fullmatch(name))}
    # A host with a folder of its own has those of its own ranks; a single one above 1 is named by
    # the number of ranks, and has those of all (PaddleNLP).
    is_from_0 = is_alone and not (len(ranks) == 1 and max(ranks) > 1)
    first = 0 if is_from_0 else min(ranks, default=0)
    absent = set(range(first, max(ranks, default=-1))) - ranks
    return f"rng_state_{min(absent)}.pth is missing" if absent else ""


def _missing_model(names: frozenset[str], *, is_alone: bool) -> str:
    """Name what is missing of a model whose settings or other parts are there."""
    if names & _SETTINGS and names <= _COMPANIONS:
        return "the model's weights are missing"
    shards = filter(None, map(_SHARD.fullmatch, sorted(names))) if is_alone else ()
    for shard in shards:
        model, _, count, suffix = shard.groups()
        others = (f"{model}-{part + 1:05}-of-{count}{suffix}" for part in range(int(count)))
        for name in (*others, f"{model}{suffix}.index.json"):
            if name not in names:
                return f"{name} is missing"
    return ""


def _unsaved(path: str, names: Sequence[str]) -> str:
    """Name the scheduler's file if a Trainer saves it, which it does after the optimizer's."""
    if _TRAINERS not in names or _SCHEDULER in names:
        return ""
    with open(f"{path}/{_TRAINERS}", "rb") as file:
        return f"{_SCHEDULER} is missing" if _SAVES_OPTIMIZER in file.read(_MOST) else ""


def _fault_of(path: str) -> str:
    """Return what is visibly wrong with a file; empty: nothing."""
    name = os.path.basename(path)
    size = os.path.getsize(path)
    if name.endswith(".safetensors"):
        return _fault_of_tensors(path, name, size)
    if not size and not name.startswith("."):
        return f"{name} is empty"
    with open(path, "rb") as file:
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


def _fault_of_tensors(path: str, name: str, size: int) -> str:
    """Return how a safetensors file differs in size from its header; empty: not at all."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(_HEADER), "little")
        if size < _HEADER or length > min(_MOST, size - _HEADER):
            return f"{name} is cut off"
        header = json.loads(file.read(length))
    ends = [tensor["data_offsets"][1] for tensor in header.values() if "data_offsets" in tensor]
    expected = _HEADER + length + max(ends, default=0)
    return "" if size == expected else f"{name} has {size:,} bytes of {expected:,}"


def _unlisted(path: str, names: Iterable[str]) -> str:
    """Name the missing part that an index lists."""
    present = set(names)
    for name in names:
        folder = os.path.dirname(name)
        for part in _parts(f"{path}/{name}"):
            if os.path.join(folder, part) not in present:
                return f"{part} is missing, which {os.path.basename(name)} names"
    return ""


def _parts(path: str) -> Iterable[str]:
    """Return the files that the index PATH lists; none if it is not an index."""
    if path.endswith(".index.json"):
        with open(path, "rb") as file:
            index: Mapping[str, object] = json.load(file)
        listed = index.get("weight_map", {})
        return sorted(set(listed.values())) if isinstance(listed, dict) else ()
    if path.endswith(".metadata"):
        with open(path, "rb") as file:
            return sorted({part.decode() for part in _PART.findall(file.read(_MOST))})
    return ()
