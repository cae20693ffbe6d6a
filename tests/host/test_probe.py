"""The facts that probe reads, from fake machines and from this one."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest
from nvmls import FakeNvml, FakeNvmlError, NoPermission, hang
from plans import a_request

from fleetrun.errors import EnvironmentFault, UsageError
from fleetrun.host import addresses, devices, gpumeter, nvml, probe, scripts
from fleetrun.model import Address, Script
from fleetrun.run import proc

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fleetrun.model import Facts, Request


def no_nvml() -> NoReturn:
    """Replace an NVML that must not be called, not even in a child."""
    os.kill(os.getppid(), signal.SIGABRT)
    raise AssertionError


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a bare machine, and a folder with a script to stand in."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "proc/self/fd").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    (tmp_path / "work/train.py").touch()
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def read(
    root: Path,
    lib: FakeNvml | None = None,
    environ: Mapping[str, str] | None = None,
    request: Request | None = None,
    timeout_s: float = 10.0,
) -> Facts:
    """Read the machine under ROOT."""
    request = request or a_request()
    return probe.read(
        request,
        environ or {},
        request.ips,
        root=str(root),
        nvml=no_nvml if lib is None else lambda: lib,
        timeout_s=timeout_s,
    )


def known(facts: Facts) -> dict[str, tuple[str, ...]]:
    """Return the UUIDs of the GPUs in FACTS, and of their instances."""
    return {gpu.uuid: tuple(part.uuid for part in gpu.instances) for gpu in facts.gpus}


@pytest.mark.parametrize("sign", ["dev/nvidiactl", "proc/driver/nvidia/version", "dev/dxg"])
def test_nvml_counts_gpus_where_a_driver_shows(root: Path, sign: str) -> None:
    (root / sign).parent.mkdir(parents=True, exist_ok=True)
    (root / sign).touch()
    facts = read(root, FakeNvml(("GPU-a",), ("GPU-b", "MIG-1", "MIG-2")))
    assert facts.device_counts == {"gpu": 2}
    assert known(facts) == {"GPU-a": (), "GPU-b": ("MIG-1", "MIG-2")}
    assert facts.notes == ()


def test_device_files_count_where_nvml_does_not_work(root: Path) -> None:
    for name in ("nvidiactl", "nvidia0", "nvidia1", "nvidia-uvm"):
        (root / "dev" / name).touch()
    facts = read(root, FakeNvml(broken=True))
    assert (facts.device_counts, facts.gpus) == ({"gpu": 2}, ())

    def missing() -> NoReturn:
        raise ImportError

    facts = probe.read(a_request(), {}, root=str(root), nvml=missing)
    assert (facts.device_counts, facts.gpus) == ({"gpu": 2}, ())


# -- a driver in trouble --------------------------------------------------------------------------


def with_driver(root: Path, gpus: int) -> None:
    """Put the device files of GPUS GPUs under ROOT."""
    for name in ("nvidiactl", *(f"nvidia{index}" for index in range(gpus))):
        (root / "dev" / name).touch()


def test_a_driver_that_never_answers_is_a_sentence_in_time(root: Path) -> None:
    with_driver(root, 2)
    # These are servers of other tests.
    before = mine()
    with pytest.raises(EnvironmentFault) as caught:
        read(root, FakeNvml(init=hang), timeout_s=0.2)
    sentence = str(caught.value)
    assert re.search(r"driver is stuck: it has not answered within 0.2 s", sentence)
    assert "--nproc_per_node=cpu" in sentence
    assert set(mine()) <= set(before)


def test_a_gpu_that_may_not_be_opened_or_is_lost_is_left_out_with_a_word(root: Path) -> None:
    with_driver(root, 4)
    trouble = {1: NoPermission("Insufficient Permissions"), 3: FakeNvmlError("GPU is lost")}
    gpus = (("GPU-a",), ("GPU-b",), ("GPU-c",), ("GPU-d",))
    facts = read(root, FakeNvml(*gpus, trouble=trouble))
    assert facts.device_counts == {"gpu": 2}
    assert known(facts) == {"GPU-a": (), "GPU-c": ()}
    (note,) = facts.notes
    assert note.startswith("GPU 3 does not work (GPU is lost); GPU 1 may not be opened (Insuff")


def mine() -> list[int]:
    """Return the children of this process that live."""
    return [process.pid for process in proc.all_processes() if process.parent == os.getpid()]


def test_the_real_nvml_has_what_we_use_of_it(root: Path) -> None:
    import pynvml  # where it is not installed, only this fails

    sources = [Path(str(module.__file__)).read_text() for module in (nvml, gpumeter)]
    used = {name for source in sources for name in re.findall(r"\bnvml[A-Z]\w+", source)}
    assert "nvmlDeviceGetCount" in used
    assert [name for name in used if not hasattr(pynvml, name)] == []
    assert pynvml.NVML_TEMPERATURE_GPU == gpumeter._SENSOR
    # Here it finds no driver's library, or the GPUs that are really there.
    (root / "dev/nvidiactl").touch()
    assert set(probe.read(a_request(), {}, root=str(root)).device_counts) <= {"gpu"}


def test_other_devices_are_counted_by_their_files(root: Path) -> None:
    for name in ("davinci0", "davinci1", "davinci_manager", "xpu0", "xpuctrl", "mtgpu.0"):
        (root / "dev" / name).touch()
    assert devices.by_files(str(root)) == {"npu": 2, "xpu": 1, "musa": 1}


@pytest.mark.parametrize(
    ("assumed", "expected"),
    [
        ("gpu:8", {"gpu": 8}),
        ("npu:4", {"npu": 4}),
        ("gpu:2, xpu:1", {"gpu": 2, "xpu": 1}),
        ("foo:8, dcu:1", {"foo": 8, "gpu": 1}),
        ("cpu", {}),
        ("gpu:0", {}),
    ],
)
def test_devices_can_be_assumed(root: Path, assumed: str, expected: dict[str, int]) -> None:
    (root / "dev/nvidiactl").touch()
    dry = a_request(dry_run="table")
    facts = read(root, environ={"FLEETRUN_ASSUME_DEVICES": assumed}, request=dry)
    assert facts.device_counts == expected


@pytest.mark.parametrize("assumed", ["gpu:8", "cpu", "nonsense"])
def test_nothing_is_started_on_devices_that_are_only_assumed(root: Path, assumed: str) -> None:
    with pytest.raises(UsageError, match=f"FLEETRUN_ASSUME_DEVICES={assumed}: .* --dry-run"):
        read(root, environ={"FLEETRUN_ASSUME_DEVICES": assumed})


def test_infiniband_counts_with_an_active_port(root: Path) -> None:
    (root / "dev/nvidiactl").touch()
    for name, state in {"mlx5_1": "4: ACTIVE\n", "mlx5_0": "1: DOWN\n"}.items():
        port = root / "sys/class/infiniband" / name / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    (root / "sys/class/infiniband/mlx5_2/ports/1").mkdir(parents=True)
    facts = read(root, FakeNvml(("GPU-a",)))
    assert (facts.hcas, facts.rdma) == (("mlx5_1",), ("mlx5_0", "mlx5_1", "mlx5_2"))
    assert read(root, FakeNvml()).rdma == ()


# -- the script ----------------------------------------------------------------------------------


def find(target: str, form: str = "file", path: str = "/usr/bin:/bin") -> str | None:
    """Find TARGET in the current folder."""
    script = Script(form, target, ())
    return scripts.find(script, str(Path.cwd()), {"PATH": path})


@pytest.mark.parametrize(
    ("target", "mode", "expected"),
    [
        ("train.py", 0o644, "train.py"),
        ("old.pyxes", 0o644, "old.pyxes"),
        ("packed.pyz", 0o644, "packed.pyz"),
        ("./run.sh", 0o755, "./run.sh"),
        ("run.sh", 0o755, "./run.sh"),
    ],
)
def test_scripts_are_found_where_they_are(
    root: Path, target: str, mode: int, expected: str
) -> None:
    (root / "work" / target).touch()
    (root / "work" / target).chmod(mode)
    assert find(target) == expected
    absolute = str(root / "work" / target)
    assert find(absolute) == absolute


@pytest.mark.parametrize(
    ("target", "code", "message"),
    [
        ("nosuch.py", 3, r"^There is no script nosuch\.py in /.*/work\.$"),
        ("./nosuch", 127, r"^There is no program \./nosuch"),
        ("nosuch", 127, r"^There is no program nosuch in \$PATH, nor a file"),
        ("folder.py", 3, r"^folder\.py is a folder, not a script"),
        ("package", 3, r"^package is a folder, .*; -m package runs a package\.$"),
        ("link.py", 3, r"^link\.py is a link to away\.py, which is missing\.$"),
        ("./folder.py", 3, r"folder\.py is a folder"),
        (
            "./plain.sh",
            126,
            r"run `chmod \+x \./plain\.sh`, or start .* `fleetrun bash \./plain\.sh`",
        ),
        ("plain.sh", 126, r"plain.sh is not executable: run `chmod \+x plain\.sh`"),
    ],
)
def test_what_cannot_be_run_is_a_fault(root: Path, target: str, code: int, message: str) -> None:
    (root / "work/folder.py").mkdir()
    (root / "work/package").mkdir()
    (root / "work/package/__main__.py").touch()
    (root / "work/link.py").symlink_to("away.py")
    (root / "work/plain.sh").touch(mode=0o644)
    with pytest.raises(EnvironmentFault, match=message) as fault:
        find(target)
    assert fault.value.exit_code == code


# -- the network ---------------------------------------------------------------------------------


OURS = (
    Address("lo", "127.0.0.1"),
    Address("eth0", "10.0.0.1"),
    Address("eth1", "fe80::1"),
    Address("eth1", "fd00::1"),
    Address("eth1", "10.1.2.3"),
    Address("eth2", "fd01::1"),
)


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("eth0", Address("eth0", "10.0.0.1")),
        ("eth1", Address("eth1", "10.1.2.3")),
        ("10.1.0.0/16", Address("eth1", "10.1.2.3")),
        ("10.1.2.3", Address("eth1", "10.1.2.3")),
        ("0.0.0.0/0", Address("lo", "127.0.0.1")),
    ],
)
def test_a_network_is_an_interface_or_addresses(word: str, expected: Address) -> None:
    assert addresses.chosen(word, OURS, "--network") == expected


def test_a_network_that_is_not_here_is_a_fault_that_lists_what_is() -> None:
    with pytest.raises(EnvironmentFault, match=r"only lo \(127.0.0.1\), eth0 \(10.0.0.1\)"):
        addresses.chosen("eth9", OURS, "--network=eth9")
    with pytest.raises(EnvironmentFault, match="no IPv4 address there"):
        addresses.chosen("192.168.0.0/16", OURS, "--network=192.168.0.0/16")
    with pytest.raises(UsageError, match="neither an interface nor a network"):
        addresses.chosen("10.0.0.0/99", OURS, "--network=10.0.0.0/99")


def test_interfaces_without_a_link_or_for_this_host_alone_are_dead_ends(root: Path) -> None:
    states = {"eth0": "up", "eth1": "down", "eth2": "lowerlayerdown", "bond0": "unknown"}
    for name, state in states.items():
        (root / "sys/class/net" / name).mkdir(parents=True)
        (root / "sys/class/net" / name / "operstate").write_text(f"{state}\n")
    own = [Address(name, f"10.0.{place}.1") for place, name in enumerate(states)]
    own += [
        Address("docker0", "172.17.0.1"),
        Address("veth1", "fe80::1"),
        Address("eth3", "fe80::2"),
    ]
    own += [Address("eth0", "fe80::3"), Address("lo", "127.0.0.1")]
    own += [Address("bare", "10.1.0.1"), Address("bridge", "10.2.0.1")]
    (root / "sys/class/net/bare/brif").mkdir(parents=True)
    (root / "sys/class/net/bridge/brif/eth0").mkdir(parents=True)
    interfaces = addresses.dead_ends(own, str(root))
    assert interfaces == {"eth1", "eth2", "docker0", "veth1", "eth3", "bare"}


# -- ports ---------------------------------------------------------------------------------------


def plugged(root: Path, **fields: object) -> Mapping[str, int]:
    """Return the NUMA nodes of three GPUs, the last of which is unknown."""
    (root / "dev/nvidiactl").touch()
    for bus, node in (("0000:3b:00.0", "1"), ("0001:86:00.0", "-1")):
        device = root / "sys/bus/pci/devices" / bus
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    buses = {"GPU-a": "00000000:3B:00.0", "GPU-b": "00000001:86:00.0"}
    lib = FakeNvml(("GPU-a", "MIG-1"), ("GPU-b",), ("GPU-c",), buses=buses)
    processors = read(root, lib, request=a_request(bind="cores")._replace(**fields)).processors  # type: ignore[arg-type]
    assert processors is not None
    return processors.near


def test_nvml_tells_which_node_a_gpu_is_near(root: Path) -> None:
    assert plugged(root) == {"0": 1, "GPU-a": 1, "MIG-1": 1}
