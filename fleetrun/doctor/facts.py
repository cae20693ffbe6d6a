"""The facts of a host for a check-up: plain values without a judgement."""

# No `from __future__ import annotations` here, for the reason given in model.py.
from collections.abc import Mapping
from typing import NamedTuple


class Room(NamedTuple):
    """A file system: bytes in all and free, free inodes (None: it does not count them)."""

    path: str
    total: int
    free: int
    inodes: int | None
    # Why it is not writable; empty: it is.
    refusal: str = ""


class ResourceLimits(NamedTuple):
    """The limits of processes (`ulimit`), soft and hard; None: unlimited."""

    open_files: tuple[int | None, int | None]
    processes: tuple[int | None, int | None]
    locked_bytes: tuple[int | None, int | None]
    virtual_bytes: tuple[int | None, int | None]
    # The number of threads of our user.
    threads: int
    # Whether the process limit does not apply to us.
    is_root: bool


class CgroupLimits(NamedTuple):
    """The limits of our cgroup and those above it; None: none."""

    memory_bytes: int | None
    memory_used: int
    # The CPU quota; 1.5 is one and a half CPUs.
    cpus: float | None
    processes: int | None
    processes_used: int
    # How many of its processes the out-of-memory killer has killed.
    kills: int


class ClockOffset(NamedTuple):
    """By how many seconds our wall clock is ahead of another.

    `other` names that clock; empty if there is none.
    """

    ahead_s: float
    other: str
    # Whether the kernel says it is disciplined by NTP; None: unknown.
    is_synchronised: bool | None


class Machine(NamedTuple):
    """The resources that a host offers its processes."""

    shm: Room
    logs: Room
    limits: ResourceLimits
    group: CgroupLimits
    clock: ClockOffset
    cpus: int
    memory_bytes: int
    # Why GCC's OpenMP library cannot be loaded; empty: it can.
    libgomp: str


class Command(NamedTuple):
    """A program on PATH: `kind` is ours, paddle's or other; `prefix` is its environment."""

    path: str
    kind: str
    prefix: str = ""


class Build(NamedTuple):
    """An installed Paddle, by its files."""

    version: str
    folder: str
    # The versions it was built with; empty: without.
    cuda: str = ""
    cudnn: str = ""
    nccl: str = ""
    # Parts that some builds lack -> whether this one has them; absent: unknown.
    parts: Mapping[str, bool] = {}


class Software(NamedTuple):
    """The programs of a host: our Python, those on PATH, and the installed Paddles."""

    python: str
    python_version: str
    prefix: str
    fleetrun: str
    # The environment that is activated ($VIRTUAL_ENV, $CONDA_PREFIX); empty: none.
    activated: str
    # In the order of PATH.
    commands: tuple[Command, ...]
    # None: no Paddle is installed for our Python.
    build: Build | None
    # Installed packages that contain Paddle: paddlepaddle, paddlepaddle-gpu.
    packages: tuple[str, ...] = ()
    # Paddle imports setuptools and its wheels do not always bring it; the version of protobuf
    # (empty: unknown).
    has_setuptools: bool = True
    protobuf: str = ""
    # Whether the environment has a `fleetrun`; or just `fleetrunx`, as after an uninstalled Paddle.
    has_command: bool = True
    is_command_lost: bool = False


class User(NamedTuple):
    """A process that uses memory of a GPU; bytes are None if the driver does not report them."""

    pid: int
    name: str
    used: int | None


class Gpu(NamedTuple):
    """One GPU; None means that the driver does not report the value."""

    number: int
    name: str
    uuid: str
    bus: str = ""
    memory: int | None = None
    used: int | None = None
    users: tuple[User, ...] = ()
    # As in 9.0.
    capability: tuple[int, int] | None = None
    # Uncorrected ECC errors since the driver was loaded.
    ecc_errors: int | None = None
    is_remap_pending: bool | None = None
    is_remap_failed: bool | None = None
    is_mig: bool | None = None
    instances: int = 0
    # Bits of NVML's clocks event (throttle) reasons.
    throttle: int | None = None
    # default, exclusive process, prohibited.
    compute_mode: str | None = None
    # PCIe lanes in use, and the most that GPU and slot support.
    lanes: tuple[int, int] | None = None
    # NVLinks that are up, and all there are.
    nvlinks: tuple[int, int] | None = None


class Xid(NamedTuple):
    """A GPU error in the kernel's log: its number, the GPU's bus address, and the line."""

    number: int
    bus: str
    text: str


class CudaStart(NamedTuple):
    """The result of cuInit in a child process: its code (0: success) and the code's name.

    `trouble` says why there is no code: the library cannot be loaded, crashes or hangs.
    """

    # Whether /dev/nvidia-uvm exists, which CUDA needs and NVML does not.
    has_uvm: bool
    code: int = 0
    name: str = ""
    # How many GPUs it shows without a mask.
    gpus: int = 0
    trouble: str = ""


class GpuFailure(NamedTuple):
    """Where a test computation failed: device, step, how it ended, and its last words."""

    device: str
    step: str
    how: str
    words: str
    # A known explanation of these words; empty: none.
    meaning: str = ""


class GpuProof(NamedTuple):
    """A test computation of Paddle: the libraries it could not load, and its first failure.

    `trouble` says why there was none.
    """

    devices: tuple[str, ...]
    # Each with the pip package that contains it; empty: none.
    libraries: tuple[tuple[str, str], ...] = ()
    failure: GpuFailure | None = None
    trouble: str = ""
    # The program that did it, which can also link libraries.
    program: str = ""


class Gpus(NamedTuple):
    """What NVIDIA's driver reports; `trouble`: why it does not; `is_stuck`: it may never answer."""

    has_driver: bool
    # Whether there are device files; a container without GPUs has none.
    has_files: bool = True
    gpus: tuple[Gpu, ...] = ()
    # The indexes of those that may not be opened or do not work, and why.
    barred: tuple[tuple[int, str], ...] = ()
    lost: tuple[tuple[int, str], ...] = ()
    driver: str = ""
    # The newest CUDA version that the driver supports, as in 12.4.
    cuda: tuple[int, int] | None = None
    # The path between two GPUs: same board, PCIe switch, host bridge, NUMA node, across the system.
    links: Mapping[tuple[int, int], str] = {}
    xids: tuple[Xid, ...] = ()
    # Why the kernel's log could not be read; empty: it could.
    log_refusal: str = ""
    trouble: str = ""
    is_stuck: bool = False
    # None: it was not started.
    cuda_start: CudaStart | None = None


class Interface(NamedTuple):
    """A network interface; its speed in Mbit/s, None if unknown."""

    name: str
    addresses: tuple[str, ...]
    is_up: bool
    speed_mbit: int | None
    mtu: int
    is_loopback: bool = False


class RdmaPort(NamedTuple):
    """A port of an InfiniBand or RoCE device: its state and rate in the kernel's words."""

    device: str
    port: str
    state: str
    rate: str


class NameLookup(NamedTuple):
    """The addresses of a host name, and how long resolving it took."""

    name: str
    addresses: tuple[str, ...]
    seconds: float


class Network(NamedTuple):
    """How this host reaches others."""

    hostname: str
    interfaces: tuple[Interface, ...]
    # Our own name first.
    lookups: tuple[NameLookup, ...]
    rdma: tuple[RdmaPort, ...]
    # The value of NCCL_SOCKET_IFNAME, and the interface of the route to the other hosts.
    asked_interface: str
    peer_interface: str | None
    # The ports that the job wants here, and who holds each; empty: nobody.
    ports: tuple[tuple[int, str], ...]
    ephemeral: tuple[int, int]
    has_peers: bool


class Connect(NamedTuple):
    """An attempt to connect to one port of another host.

    `outcome` is connected, refused (the host answers, nothing listens), silent (no answer at all),
    or another program (which listens there); `text` says more.
    """

    port: int
    outcome: str
    text: str = ""


class HostDescription(NamedTuple):
    """The properties that hosts exchange and compare."""

    host: str
    fleetrun: str
    python: str
    paddle: str
    cuda: str
    nccl: str
    driver: str


class Peer(NamedTuple):
    """Another host of the job; `card` is None if it did not answer."""

    host: str
    connects: tuple[Connect, ...]
    card: HostDescription | None = None
    # By how many seconds its clock is ahead of ours, and the error of that.
    ahead_s: float = 0.0
    accuracy_s: float = 0.0


class Transfer(NamedTuple):
    """Allreduces of one size: bytes, seconds of each, and whether the sums were correct."""

    nbytes: int
    seconds: float
    is_right: bool


class Transfers(NamedTuple):
    """The measurements of the two ranks, and the bandwidth of a plain TCP connection (B/s)."""

    backend: str
    ranks: int
    rows: tuple[Transfer, ...] = ()
    link: float | None = None
    # Why there are no rows: the job's exit and its last words.
    trouble: str = ""
