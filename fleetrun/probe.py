"""The only reader of the world before a launch: devices, addresses, ports, the script."""

from __future__ import annotations

import os
import sys
import time
from typing import TYPE_CHECKING

from fleetrun import modes
from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.model import Address, Facts, Processors
from fleetrun.plan import command, hosts
from fleetrun.plan.visible import visible
from fleetrun.records.variables import ASSUME_DEVICES
from fleetrun.run import proc

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fleetrun.model import Request, Script
    from fleetrun.nvml import Inquiry, Nvml, Survey

# Any of these means that an NVIDIA driver is there to be asked (/dev/dxg: under Windows).
_NVIDIA = ("dev/nvidiactl", "proc/driver/nvidia/version", "dev/dxg")

_MASK = "CUDA_VISIBLE_DEVICES"

# Devices that show as numbered files under /dev.
_DEVICE_FILES = {"npu": "davinci", "xpu": "xpu"}
_ASSUMABLE = ("gpu", "npu", "xpu")

# What the kernel allows of the stack limit, whatever that is.
_EXEC_CEILING = 6 * 1024 * 1024

# Where the kernel takes ports for outgoing connections when nobody configured it.
_EPHEMERAL = (32768, 60999)


def _remark(text: str) -> None:
    """Say TEXT to the user at once."""
    if sys.stderr is not None:
        print(f"fleetrun: {visible(text)}", file=sys.stderr, flush=True)


def read(
    request: Request,
    environ: Mapping[str, str],
    names: Sequence[str] = (),
    *,
    root: str = "/",
    nvml: Callable[[], Nvml] | None = None,
    say: Callable[[str], None] = _remark,
    patience_s: float = 30.0,
) -> Facts:
    """Look at this host, as far as planning REQUEST needs to know.

    NAMES are the hosts of the job that are known by name. NVIDIA's driver is asked beside the rest;
    SAY gets a line when that takes long, and after PATIENCE_S seconds it counts as stuck.
    """
    assumed = environ.get(ASSUME_DEVICES)
    if assumed and request.dry_run is None:
        raise UsageError(
            f"{ASSUME_DEVICES}={assumed}: devices are assumed only for --dry-run; unset it "
            "to start on those that are here."
        )
    cwd = _here(root)
    # Ranks may be given a path of their own.
    if request.script.form == "module" and "PYTHONPATH" not in dict(request.env):
        check_module(request.script.target, cwd)
    facts = Facts(
        environ=environ,
        cwd=cwd,
        hostname=os.uname().nodename,
        python=sys.executable,
        pid=os.getpid(),
        started_utc=time.strftime("%Y%m%dT%H%M%SZ", time.gmtime()),
        cpus=len(os.sched_getaffinity(0)),
        device_counts=_assumed(assumed) if assumed else _device_files(root),
        program=find_script(request.script, cwd, environ),
        exec_limit=min(os.sysconf("SC_ARG_MAX"), _EXEC_CEILING),
    )
    inquiry = None if assumed else _ask_driver(request, root, nvml)
    facts = _with_network(request, _with_paddle(request, facts), names)
    near: dict[str, int] = {}
    if inquiry is not None:
        survey = inquiry.result(say, patience_s=patience_s)
        facts = _with_gpus(facts, survey, root)
        near = _near(root, survey)
    if facts.device_counts.get("gpu"):
        hcas, rdma = _rdma(root)
        facts = facts._replace(hcas=hcas, rdma=rdma)
    if request.bind != "none":
        facts = facts._replace(processors=_processors(root, near))
    return facts if request.debug is None else _with_debuggers(facts)


def _with_debuggers(facts: Facts) -> Facts:
    """Complete FACTS with what a debugger could use."""
    from importlib.util import find_spec  # noqa: PLC0415 - only where a debugger is wanted

    from fleetrun.run import terminal  # noqa: PLC0415 - see above

    return facts._replace(
        has_debugpy=find_spec("debugpy") is not None,
        is_at_terminal=terminal.is_ours(),
        used_ports=used_ports(),
    )


def _here(root: str) -> str:
    """Return the current folder, on a host where processes can be supervised at all."""
    if not os.path.isdir(os.path.join(root, "proc/self/fd")):  # noqa: PTH112, PTH118
        raise EnvironmentFault(
            "/proc is not mounted, and without it processes cannot be supervised: "
            "`mount -t proc proc /proc`."
        )
    if not os.path.exists(os.devnull):  # noqa: PTH110
        raise EnvironmentFault(f"{os.devnull} is not there; programs expect it (`mount` a /dev).")
    return current_folder()


def current_folder() -> str:
    """Return the folder in which we are, if there is one."""
    try:
        return os.getcwd()  # noqa: PTH109 - pathlib costs start-up time
    except OSError as error:
        raise EnvironmentFault(
            f"The current folder cannot be found ({error.strerror}): it may have been removed or "
            "replaced; go to one that is there (`cd`)."
        ) from None


def _with_paddle(request: Request, facts: Facts) -> Facts:
    """Complete FACTS with what the Paddle here cannot do, where that matters."""
    feature = modes.BY_WORD[request.run_mode].feature
    if feature is None:
        return facts
    from fleetrun import paddles  # noqa: PLC0415 - most modes need only what every Paddle has

    return facts._replace(
        paddle_lacking=paddles.without(feature.symbol, sys.path),
        script_imports_paddle=paddles.imports_paddle(request.script, facts.cwd),
    )


def find_script(script: Script, cwd: str, environ: Mapping[str, str]) -> str | None:
    """Return the path of what is to be run; None for a module, which only Python can look up."""
    if script.form == "module" or script.target == command.CHECK:
        return None
    target = script.target
    interpreted = target.endswith((".py", ".pyxes"))
    if not interpreted and "/" not in target:
        return _find_program(target, cwd, environ)
    path = os.path.join(cwd, target)  # noqa: PTH118 - pathlib costs start-up time
    if os.path.isdir(path):  # noqa: PTH112
        raise EnvironmentFault(f"{target} is a folder, not a script (looked in {cwd}).")
    if not os.path.exists(path):  # noqa: PTH110
        raise EnvironmentFault(
            f"There is no script {target} (looked in {cwd}){_meant(target, cwd, '.')}"
        )
    if interpreted:
        if not os.access(path, os.R_OK):
            raise EnvironmentFault(f"The script {target} cannot be read; give yourself the right.")
        return target
    if not os.access(path, os.X_OK):
        raise EnvironmentFault(
            f"{target} is not executable: run `chmod +x {target}`, or start it with the program "
            f"that reads it, as in `fleetrun bash {target}`."
        )
    return target


def check_module(name: str, cwd: str) -> None:
    """Complain about a module NAME that is not there when one here has nearly that name."""
    if name == "__main__" or not all(part.isidentifier() for part in name.split(".")):
        return
    path = name.replace(".", "/")
    here = os.path.join(cwd, path)  # noqa: PTH118
    if os.path.isfile(f"{here}.py") or os.path.isdir(here):  # noqa: PTH112, PTH113
        return
    folder, _, last = path.rpartition("/")
    # A file of another kind that Python can import.
    if any(entry.partition(".")[0] == last for entry in _names(os.path.join(cwd, folder))):  # noqa: PTH118
        return
    from importlib.util import find_spec  # noqa: PLC0415 - not for modules that are here

    from fleetrun import nearby  # noqa: PLC0415 - as above

    first = path.partition("/")[0]
    is_here = os.path.isdir(os.path.join(cwd, first)) and first != path  # noqa: PTH112, PTH118
    meant = nearby.find(f"{path}.py", cwd)
    if meant is None or (not is_here and find_spec(first) is not None):
        return
    raise EnvironmentFault(
        f"There is no module {name} (looked in {cwd}); "
        f"did you mean {meant.removesuffix('.py').replace('/', '.')}?"
    )


def _find_program(name: str, cwd: str, environ: Mapping[str, str]) -> str:
    """Return the program called NAME, looked up as a shell would."""
    path = environ.get("PATH", os.defpath)
    for folder in path.split(os.pathsep):
        candidate = os.path.join(cwd, folder, name)  # noqa: PTH118
        if os.path.isfile(candidate) and os.access(candidate, os.X_OK):  # noqa: PTH113
            return candidate
    here = os.path.join(cwd, name)  # noqa: PTH118
    if os.path.isfile(here):  # noqa: PTH113
        if os.access(here, os.X_OK):
            return f"./{name}"
        raise EnvironmentFault(
            f"{name} is in this folder but not executable: run `chmod +x {name}`, or start it "
            f"with the program that reads it, as in `fleetrun bash {name}`."
        )
    hint = _meant(name, cwd, "; a Python script ends in .py, a module needs -m.")
    raise EnvironmentFault(
        f"There is no program {name} in $PATH, nor a file of that name in {cwd}{hint}"
    )


def _meant(target: str, cwd: str, otherwise: str) -> str:
    """End a sentence with the file that TARGET, which is none, nearly names, or OTHERWISE."""
    from fleetrun import nearby  # noqa: PLC0415 - only a mistake pays for it

    meant = nearby.find(target, cwd)
    return otherwise if meant is None else f"; did you mean {meant}?"


def _device_files(root: str) -> dict[str, int]:
    """Count the devices that show as files, but for GPUs, which their driver knows better."""
    counts = {kind: _numbered(root, prefix) for kind, prefix in _DEVICE_FILES.items()}
    return {kind: count for kind, count in counts.items() if count}


def _ask_driver(request: Request, root: str, nvml: Callable[[], Nvml] | None) -> Inquiry | None:
    """Begin to ask NVIDIA's driver, if it is here and REQUEST may want its GPUs."""
    if request.nproc_per_node == "cpu" or request.device_kind not in {None, "gpu"}:
        return None
    if not any(os.path.exists(os.path.join(root, path)) for path in _NVIDIA):  # noqa: PTH110, PTH118
        return None
    from fleetrun.nvml import Inquiry, pynvml_module  # noqa: PLC0415 - only where a driver is

    return Inquiry(nvml or pynvml_module, wants_bus=request.bind != "none")


def _with_gpus(facts: Facts, survey: Survey, root: str) -> Facts:
    """Complete FACTS with the GPUs of SURVEY; where it failed, with what their files tell."""
    if survey.is_stuck:
        mask = facts.environ.get(_MASK, "all").strip()
        if mask == "all":
            raise EnvironmentFault(
                f"The NVIDIA driver is stuck: {survey.trouble}. Look at `nvidia-smi` and `dmesg`; "
                f"often only a reboot helps. To start without asking it, name the GPUs in {_MASK}, "
                "or train on the CPU with --nproc_per_node=cpu."
            )
        note = f"The NVIDIA driver is stuck: {survey.trouble}; {_MASK}={mask} is believed."
        count = _numbered(root, "nvidia") or len(mask.split(","))
    elif survey.trouble:
        # A driver and a library that disagree: the device files still tell how many there are.
        count = _numbered(root, "nvidia")
        note = f"NVML does not work ({survey.trouble}): GPUs are counted by their files in /dev."
    else:
        return _with_working_gpus(facts, survey)
    counts = {"gpu": count, **facts.device_counts} if count else facts.device_counts
    return facts._replace(
        device_counts=counts, notes=(*facts.notes, note) if count else facts.notes
    )


def _with_working_gpus(facts: Facts, survey: Survey) -> Facts:
    """Complete FACTS with the GPUs that work, and say which do not."""
    lost = [f"GPU {index} does not work ({why})" for index, why in survey.lost]
    barred = [f"GPU {index} may not be opened ({why})" for index, why in survey.barred]
    trouble = "; ".join((*lost, *barred))
    if not survey.gpus:
        if lost:
            raise EnvironmentFault(
                f"No GPU of this host can be used: {trouble}. Look at `nvidia-smi` and `dmesg`; "
                "to train on the CPU, give --nproc_per_node=cpu."
            )
        return facts._replace(without_gpus=trouble)
    uuids = tuple(gpu.uuid for gpu in survey.gpus)
    instances = tuple(uuid for gpu in survey.gpus for uuid in gpu.instances)
    ids = {"gpu": uuids} | ({"mig": instances} if instances else {})
    note = f"{trouble}: left out, and the others are numbered without, as CUDA numbers them."
    return facts._replace(
        device_counts={"gpu": len(uuids), **facts.device_counts},
        device_ids=ids,
        notes=(*facts.notes, note) if trouble else facts.notes,
    )


def _assumed(text: str) -> dict[str, int]:
    """Return the devices of FLEETRUN_ASSUME_DEVICES: `gpu:8`, `npu:4`, `cpu`."""
    if text == "cpu":
        return {}
    counts = {}
    for piece in text.split(","):
        kind, _, number = piece.strip().partition(":")
        if kind not in _ASSUMABLE or not (number.isascii() and number.isdigit()):
            raise UsageError(
                f"{ASSUME_DEVICES}={text}: give KIND:NUMBER with a kind of "
                f"{', '.join(_ASSUMABLE)}, or cpu, for example gpu:8."
            )
        counts[kind] = int(number)
    return {kind: count for kind, count in counts.items() if count}


def _near(root: str, survey: Survey) -> dict[str, int]:
    """Return the NUMA node of each GPU, under its number and the UUIDs of it and its instances."""
    near: dict[str, int] = {}
    for index, gpu in enumerate(survey.gpus):
        node = _numa_node(root, gpu.bus) if gpu.bus else None
        if node is not None:
            near |= dict.fromkeys((str(index), gpu.uuid, *gpu.instances), node)
    return near


def _numa_node(root: str, bus: str) -> int | None:
    """Return the NUMA node of the device at BUS; None where the machine does not say."""
    # NVML writes 00000000:3B:00.0, the kernel 0000:3b:00.0.
    domain, _, rest = bus.lower().partition(":")
    device = f"{domain[-4:]}:{rest}"
    node = _text(os.path.join(root, "sys/bus/pci/devices", device, "numa_node")).strip()  # noqa: PTH118
    return int(node) if node.isdigit() else None


def _processors(root: str, near: Mapping[str, int]) -> Processors:
    """Return the CPUs that we may use, by physical core."""
    # What a container, a batch system or taskset has left us.
    allowed = os.sched_getaffinity(0)
    base = os.path.join(root, "sys/devices/system")  # noqa: PTH118
    node_of: dict[int, int] = {}
    for name in _names(os.path.join(base, "node")):  # noqa: PTH118
        if name.startswith("node") and name[4:].isdigit():
            listed = _text(os.path.join(base, "node", name, "cpulist"))  # noqa: PTH118
            node_of |= dict.fromkeys(_cpus(listed), int(name[4:]))
    cores: list[tuple[int, ...]] = []
    left = set(allowed)
    for cpu in sorted(allowed):
        path = os.path.join(base, "cpu", f"cpu{cpu}", "topology/thread_siblings_list")  # noqa: PTH118
        core = tuple(sorted({cpu, *_cpus(_text(path))} & left))
        if cpu in left:
            cores.append(core)
            left.difference_update(core)
    nodes = tuple(node_of.get(core[0], 0) for core in cores)
    return Processors(tuple(cores), nodes, near)


def _cpus(text: str) -> list[int]:
    r"""Read a list of CPUs as the kernel writes it.

    >>> _cpus("0-2,8\n"), _cpus("")
    ([0, 1, 2, 8], [])
    """
    found: list[int] = []
    for piece in text.strip().split(","):
        low, _, high = piece.partition("-")
        if low.isdigit() and (high or low).isdigit():
            found += range(int(low), int(high or low) + 1)
    return found


def _numbered(root: str, prefix: str) -> int:
    """Count the device files that are called PREFIX and a number."""
    try:
        names = os.listdir(os.path.join(root, "dev"))  # noqa: PTH118, PTH208
    except OSError:
        return 0
    return sum(name.startswith(prefix) and name[len(prefix) :].isdigit() for name in names)


def _rdma(root: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the InfiniBand and RoCE devices with an active port, and all of them."""
    folder = os.path.join(root, "sys/class/infiniband")  # noqa: PTH118
    names = _names(folder)
    active = []
    for name in names:
        ports = os.path.join(folder, name, "ports")  # noqa: PTH118
        states = [_text(os.path.join(ports, port, "state")) for port in _names(ports)]  # noqa: PTH118
        if any("ACTIVE" in state for state in states):
            active.append(name)
    return tuple(active), names


def _names(folder: str) -> tuple[str, ...]:
    """List what FOLDER holds, in order; nothing if it is not there."""
    try:
        return tuple(sorted(os.listdir(folder)))  # noqa: PTH208
    except OSError:
        return ()


def _text(path: str) -> str:
    """Read a small file's text; nothing if it cannot be read."""
    return proc.content(path).decode("ascii", errors="replace")


def _with_network(request: Request, facts: Facts, names: Sequence[str]) -> Facts:
    """Complete FACTS with our addresses, what the hosts' NAMES are, and the way to the peers."""
    if not names and request.host is not None:
        names = (request.host,)
    if all(hosts.is_loopback(name) for name in names):
        return facts
    facts = facts._replace(addresses=addresses())
    if facts.hostname in names:
        # The name says it: only the first peer is looked up, for the way there.
        peers = [name for name in names if name != facts.hostname][:1]
    else:
        peers = [name for name in names if not hosts.ours(name, facts)]
    resolved = {name: resolve(name) for name in peers if not hosts.is_address(name)}
    facts = facts._replace(resolved=resolved)
    for name in peers:
        if not hosts.ours(name, facts):
            targets = resolved.get(name, (name,))
            return facts._replace(peer_interface=_interface_to(targets, facts.addresses))
    return facts


def addresses() -> tuple[Address, ...]:
    """Return every IP address of this host."""
    # 80 ms that only several hosts have to pay.
    import socket  # noqa: PLC0415

    import psutil  # noqa: PLC0415

    families = (socket.AF_INET, socket.AF_INET6)
    return tuple(
        Address(interface, entry.address.partition("%")[0])
        for interface, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in families
    )


def resolve(name: str) -> tuple[str, ...]:
    """Return the IPv4 addresses of a host's name; none when nobody knows it."""
    import socket  # noqa: PLC0415 - see addresses

    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _interface_to(targets: Sequence[str], own: Sequence[Address]) -> str | None:
    """Return the interface from which the kernel would reach the first of TARGETS it can."""
    import socket  # noqa: PLC0415 - see addresses

    for target in targets:
        probe = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            # Connecting a datagram socket sends nothing; the kernel only looks up the route.
            probe.connect((target, 9))
            source = probe.getsockname()[0]
        except OSError:
            continue
        finally:
            probe.close()
        return next((address.interface for address in own if address.ip == source), None)
    return None


def ephemeral_ports(root: str = "/") -> tuple[int, int]:
    """Return the first and the last port that the kernel gives to outgoing connections."""
    try:
        text = _text(os.path.join(root, "proc/sys/net/ipv4/ip_local_port_range"))  # noqa: PTH118
        low, high = (int(word) for word in text.split())
    except ValueError:
        return _EPHEMERAL
    return low, high


def used_ports() -> frozenset[int]:
    """Return the local TCP ports in use, read without opening anything."""
    ports = set()
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _text(path).splitlines()[1:]:
            local = line.split(None, 2)[1]
            ports.add(int(local.rpartition(":")[2], 16))
    return frozenset(ports)


def port_holder(port: int) -> str | None:
    """Name the process that holds TCP port PORT: `pid 123 (python train.py)`."""
    import psutil  # noqa: PLC0415 - only for an error message

    # Ports that fleetruns hold for their ranks show as abstract sockets of this name.
    reserved = f"@fleetrun/port/{port}"
    for kind in ("tcp", "unix"):
        for connection in psutil.net_connections(kind):
            local = connection.laddr
            held = str(local) == reserved if not isinstance(local, tuple) else local[1:] == (port,)
            # Connections that only linger have no process any more.
            if held and connection.pid is not None:
                return _described(connection.pid)
    return None


def _described(pid: int) -> str:
    """Describe a process."""
    import psutil  # noqa: PLC0415 - only for an error message

    from fleetrun.plan import arguments  # noqa: PLC0415 - only for an error message

    try:
        command = " ".join(arguments.conceal(psutil.Process(pid).cmdline())[0])
    except psutil.Error:
        return f"pid {pid}"
    return f"pid {pid} ({command})" if command else f"pid {pid}"
