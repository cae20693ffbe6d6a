"""Findings about disk space, limits, clock and libraries of a host; pure."""

from __future__ import annotations

from collections.abc import Iterator

from fleetrun.conversion import counted, size
from fleetrun.doctor.facts import CgroupLimits, Machine, ResourceLimits, Room
from fleetrun.doctor.findings import Finding, error, ok, warning

_MIB, _GIB = 1 << 20, 1 << 30
# Docker's default is 64 MiB, in which the workers of one DataLoader die of SIGBUS.
SHM_TIGHT, SHM_FULL = 1 * _GIB, 16 * _MIB
LOGS_TIGHT, LOGS_FULL = 1 * _GIB, 16 * _MIB
# A rank may have some hundreds of open files: libraries, sockets to each peer, data.
FILES_PER_RANK = 256
# The threads of a rank: Paddle, BLAS and data loaders.
THREADS_PER_RANK = 64
INODES_FEW = 1000
# A rank of Paddle's CPU build takes 400 MiB after the import.
MEMORY_PER_RANK = 512 * _MIB
# Synchronised clocks and a network folder do not explain more.
CLOCK_S = 1.0
_BASE_THREADS = 128


def judge(machine: Machine, *, ranks: int, has_peers: bool, has_rdma: bool) -> Iterator[Finding]:
    """Yield the findings about MACHINE for RANKS processes."""
    yield _shm(machine.shm)
    yield _logs(machine.logs)
    yield _libgomp(machine.libgomp)
    yield _open_files(machine.limits, ranks)
    yield _processes(machine.limits, machine.group, ranks)
    yield from _memory_limits(machine.limits, has_rdma=has_rdma)
    yield _memory(machine, ranks)
    yield _cpus(machine, ranks)
    yield _clock(machine, has_peers=has_peers)


def _shm(shm: Room) -> Finding:
    check = "shared memory"
    seen = f"{shm.path} has {size(shm.free)} free of {size(shm.total)}"
    means = "DataLoader workers and NCCL exchange data there, and die of SIGBUS when it is full"
    fix = (
        "ls -l /dev/shm  # remove what is left over; `mount -o remount,size=16G /dev/shm`, "
        "or in Docker --shm-size=16g"
    )
    if shm.refusal:
        return error(check, f"{shm.path} cannot be written ({shm.refusal}; {seen})", means, fix)
    if shm.free < SHM_FULL:
        return error(check, seen, means, fix)
    if shm.free < SHM_TIGHT:
        return warning(check, seen, means, fix)
    return ok(check, seen)


def _logs(logs: Room) -> Finding:
    check = "disk for logs"
    seen = f"{logs.path} has {size(logs.free)} free of {size(logs.total)}"
    fix = f"df -h {logs.path}  # make room, or give another --log_dir"
    if logs.refusal:
        means = "no rank could write its log"
        return error(check, f"{logs.path} cannot be written ({logs.refusal})", means, fix)
    if logs.free < LOGS_FULL:
        return error(check, seen, "the logs of the ranks will be cut off soon", fix)
    if logs.inodes is not None and logs.inodes < INODES_FEW:
        few = f"{logs.path} has room for {logs.inodes} more files"
        return warning(check, few, "new logs and checkpoints will soon fail", f"df -i {logs.path}")
    if logs.free < LOGS_TIGHT:
        return warning(check, seen, "logs and checkpoints may not fit", fix)
    return ok(check, seen)


def _libgomp(trouble: str) -> Finding:
    if trouble:
        return error(
            "OpenMP",
            f"libgomp.so.1 cannot be loaded ({trouble})",
            "`import paddle` fails without it",
            "apt-get install libgomp1  # or dnf install libgomp",
        )
    return ok("OpenMP", "libgomp.so.1 can be loaded")


def _open_files(limits: ResourceLimits, ranks: int) -> Finding:
    check = "open files"
    soft, hard = limits.open_files
    raised = f", and may be raised to {_limit(hard)}" * (hard != soft)
    seen = f"`ulimit -n` is {_limit(soft)}{raised}"
    if soft is not None and soft < FILES_PER_RANK:
        means = f"a rank may need {FILES_PER_RANK}: libraries, sockets to its peers, its data"
        return warning(check, seen, means, "ulimit -n 65536")
    if hard is not None and hard < FILES_PER_RANK + 8 * ranks:
        means = f"fleetrun itself needs some for {counted(ranks, 'rank')}"
        return error(check, seen, means, "ulimit -Hn 65536  # by root; or in limits.conf")
    return ok(check, seen)


def _processes(limits: ResourceLimits, group: CgroupLimits, ranks: int) -> Finding:
    check = "processes"
    needed = _BASE_THREADS + THREADS_PER_RANK * ranks
    means = (
        f"{counted(ranks, 'rank')} may have {needed} threads; one that cannot start ends the job"
    )
    if group.processes is not None and group.processes - group.processes_used < needed:
        return warning(
            check,
            f"the control group allows {group.processes}, of which {group.processes_used} run",
            means,
            "docker run --pids-limit=-1 ...  # or pids.max of the group",
        )
    soft, hard = limits.processes
    if not limits.is_root and soft is not None and soft - limits.threads < needed:
        seen = f"`ulimit -u` is {soft} (at most {_limit(hard)}), and {limits.threads} threads run"
        return warning(check, seen, means, "ulimit -u unlimited")
    return ok(check, f"room for the {needed} threads that {counted(ranks, 'rank')} may have")


def _memory_limits(limits: ResourceLimits, *, has_rdma: bool) -> Iterator[Finding]:
    virtual = limits.virtual_bytes[0]
    if virtual is not None:
        yield warning(
            "address space",
            f"`ulimit -v` is {size(virtual)}",
            "CUDA reserves more address space than a GPU has memory; ranks may die silently",
            "ulimit -v unlimited",
        )
    locked = limits.locked_bytes[0]
    if has_rdma and locked is not None and locked < _GIB:
        yield warning(
            "locked memory",
            f"`ulimit -l` is {size(locked)}",
            "InfiniBand needs memory that stays where it is: NCCL fails, or uses slow sockets",
            "ulimit -l unlimited  # in Docker --ulimit memlock=-1",
        )


def _memory(machine: Machine, ranks: int) -> Finding:
    group = machine.group
    check = "memory"
    if group.memory_bytes is None:
        most, free, owner = machine.memory_bytes, machine.memory_bytes, "this host"
    else:
        most, owner = group.memory_bytes, "the control group"
        free = most - group.memory_used
    seen = f"{owner} has {size(most)}"
    needed = ranks * MEMORY_PER_RANK
    if group.memory_bytes is not None:
        seen += f", of which {size(max(free, 0))} is free"
    if group.kills:
        seen += f"; the kernel has killed {group.kills} of its processes"
    fix = "docker run --memory=...  # or memory.max; or fewer ranks: --nproc_per_node"
    if free < needed:
        means = f"{counted(ranks, 'rank')} may take {size(needed)} before they load anything"
        return warning(check, seen, means, fix)
    if group.kills:
        return warning(check, seen, "the memory of the control group has been too small", fix)
    return ok(check, seen)


def _cpus(machine: Machine, ranks: int) -> Finding:
    quota = machine.group.cpus
    usable = machine.cpus if quota is None else min(machine.cpus, quota)
    seen = f"{machine.cpus} may be used"
    if quota is not None and quota < machine.cpus:
        seen += f", {quota:g} of them at a time (control group)"
    if usable < ranks:
        return warning(
            "CPUs",
            seen,
            f"{counted(ranks, 'rank')} share them, so each is slow",
            "docker run --cpus=...  # or cpu.max, taskset; or fewer ranks: --nproc_per_node",
        )
    return ok("CPUs", seen)


def _clock(machine: Machine, *, has_peers: bool) -> Finding:
    clock = machine.clock
    if clock.other and abs(clock.ahead_s) > CLOCK_S:
        side = "ahead of" if clock.ahead_s > 0 else "behind"
        return warning(
            "clock",
            f"ours is {abs(clock.ahead_s):.1f} s {side} that of the file system of {clock.other}",
            "times in logs contradict each other, and what is new may look old",
            "chronyc tracking; chronyc makestep  # or timedatectl set-ntp true",
        )
    if has_peers and clock.is_synchronised is False:
        return warning(
            "clock",
            "not synchronised (by the kernel's status)",
            "times of several hosts cannot be compared",
            "timedatectl set-ntp true  # or start chronyd",
        )
    state = {
        True: "synchronised",
        False: "not synchronised; that matters on several hosts only",
        None: "whether it is synchronised is unknown",
    }
    return ok("clock", state[clock.is_synchronised])


def _limit(number: int | None) -> str:
    return "unlimited" if number is None else str(number)
