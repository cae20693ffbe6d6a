"""Several hosts on one machine: namespaces with their own network, name, processes and mounts.

Everything hangs on one process per host and one for the switch between them, which die with the
test run (even with `kill -9`); nothing is made in the machine's own network, so two runs at once
do not meet and nothing is left to clean up.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from checkout import environ
from waiting import HEARTBEAT, LONG_S, until

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

NEEDED = ("ip", "unshare", "nsenter", "setpriv", "mount", "hostname", "ps", "pgrep")
SUBNET = "10.88.0"
SWITCH = Path(__file__).with_name("switch.py")

# Runs as the first process of a host. A fresh /sys shows the interfaces of this host only; the
# control groups, which were mounted below the old one, are carried over.
BOOT = """
hostname "$1"
mount --bind "$2/hosts" /etc/hosts
mkdir "$2/cgroup"
mount --rbind /sys/fs/cgroup "$2/cgroup"
mount -t sysfs sysfs /sys
mount --move "$2/cgroup" /sys/fs/cgroup
mount -t tmpfs tmpfs /dev/shm
: >"$2/ready"
while :; do sleep 1000 & wait; done
"""


class Host(NamedTuple):
    """One host: `pid` is its first process, as this machine numbers it."""

    name: str
    ip: str
    pid: int
    folder: Path

    def command(self, argv: Sequence[str], cwd: Path | None = None) -> list[str]:
        """Return the command that runs ARGV on this host."""
        enter = ["nsenter", "-t", str(self.pid), "-n", "-u", "-i", "-m", "-p", "--"]
        # Entering the mounts of a host leads to its root folder.
        go = ["sh", "-c", 'cd "$1" && shift && exec "$@"', "sh", str(cwd or self.folder)]
        return [*enter, *go, *argv]

    def run(
        self,
        *argv: str,
        env: Mapping[str, str] | None = None,
        check: bool = True,
        timeout: float = LONG_S,
    ) -> subprocess.CompletedProcess[str]:
        """Run ARGV on this host to its end."""
        return subprocess.run(
            self.command(argv),
            env=env,
            check=check,
            timeout=timeout,
            capture_output=True,
            text=True,
        )

    def start(
        self, *argv: str, env: Mapping[str, str] | None = None, output: str = "output"
    ) -> subprocess.Popen[bytes]:
        """Start ARGV on this host; what it writes goes to the file OUTPUT in the host's folder."""
        with (self.folder / output).open("wb") as file:
            return subprocess.Popen(
                self.command(argv),
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def fleetrun(
        self,
        *words: str,
        folder: Path | None = None,
        before: str = ":",
        python: Path | str = sys.executable,
        **variables: str,
    ) -> subprocess.Popen[bytes]:
        """Start `fleetrun WORDS` in FOLDER, or the host's own, after the shell commands BEFORE."""
        script = f'cd "$1" && shift; {before}; exec "$@"'
        is_launch = words[:1] and words[0].startswith("-")
        if is_launch and not any(word.startswith("--heartbeat_timeout") for word in words):
            words = (HEARTBEAT, *words)
        command = (str(python), "-m", "fleetrun", *words)
        where = str(folder or self.folder)
        return self.start("sh", "-c", script, "sh", where, *command, env=environ(**variables))

    @property
    def output(self) -> str:
        """The output of what was started last."""
        return (self.folder / "output").read_text()

    def filter(self, *rules: str) -> None:
        """Add the RULES of nft, each with its chain, to the firewall of this host: in and out."""
        chains = (
            f"add chain ip lab {way} {{ type filter hook {way}put priority 0; }}"
            for way in ("in", "out")
        )
        added = (f"add rule ip lab {rule}" for rule in rules)
        self.run("nft", "; ".join(("add table ip lab", *chains, *added)))

    def crash(self) -> None:
        """End all its processes at once, as when a host loses its power."""
        os.kill(self.pid, signal.SIGKILL)

    def processes(self) -> list[str]:
        """Return the command lines of all processes of this host, except its own first ones."""
        shown = self.run("ps", "-e", "-o", "pid=,args=").stdout.splitlines()
        rows = [line.split(None, 1) for line in shown]
        return [
            args
            for pid, args in rows
            if pid != "1" and not args.startswith(("sleep 1000", "ps -e"))
        ]


def missing() -> str | None:
    """Return why this machine cannot have hosts, or None."""
    absent = [name for name in NEEDED if not shutil.which(name)]
    if absent:
        return f"the commands {', '.join(absent)} are missing (Debian: apt install iproute2 procps)"
    done = subprocess.run(
        ["unshare", "--net", "--mount", "true"], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return f"this machine does not let us make namespaces: {done.stderr.strip()}"
    return None


class Network:
    """Hosts and the switch between them, which can inject faults."""

    def __init__(self, hosts: tuple[Host, ...], switch: int | subprocess.Popen[str]) -> None:
        self.hosts = hosts
        self._switch = switch

    def cut(self, *hosts: Host) -> None:
        """Let nothing through to or from HOSTS; neither end can see that."""
        self._set(hosts, "cut", "nomaster")

    def heal(self, *hosts: Host) -> None:
        """Let everything through to and from HOSTS again."""
        self._set(hosts, "heal", "master switch")

    def spoil(self, *, loss: float = 0.0, delay_ms: float = 0.0) -> None:
        """Lose LOSS percent of all frames, and deliver each DELAY_MS late; needs a slow switch."""
        self._order(f"loss {loss:g}")
        self._order(f"delay {delay_ms:g}")

    def delay(self, host: Host, delay_ms: float) -> None:
        """Deliver each frame that HOST sends DELAY_MS late; needs a slow switch."""
        self._order(f"slow {self.hosts.index(host)}")
        self._order(f"delay {delay_ms:g}")

    def _set(self, hosts: Sequence[Host], order: str, bridge: str) -> None:
        for host in hosts:
            at = self.hosts.index(host)
            if isinstance(self._switch, int):
                # Its own end stays up, as if the fault were further away.
                _ip(self._switch, [f"link set port{at} {bridge}"])
            else:
                self._order(f"{order} {at}")

    def _order(self, line: str) -> None:
        assert isinstance(self._switch, subprocess.Popen), "the kernel's switch loses nothing"
        assert self._switch.stdin is not None
        assert self._switch.stdout is not None
        self._switch.stdin.write(f"{line}\n")
        self._switch.stdin.flush()
        assert self._switch.stdout.readline() == "done\n"


def ends(launchers: Sequence[subprocess.Popen[bytes]], seconds: float = LONG_S) -> list[int]:
    """Return the exit codes of LAUNCHERS."""
    return [launcher.wait(seconds) for launcher in launchers]


@contextmanager
def hosts(number: int, folder: Path) -> Iterator[tuple[Host, ...]]:
    """Make NUMBER hosts that reach each other at 10.88.0.1, 10.88.0.2, ...; then remove them."""
    with network(number, folder) as made:
        yield made.hosts


@contextmanager
def network(number: int, folder: Path, *, is_slow: bool = False) -> Iterator[Network]:
    """Make NUMBER hosts that reach each other at 10.88.0.1, 10.88.0.2, ...; then remove them.

    On each host its own name resolves to 127.0.1.1, as Debian sets it up, and the others' to
    their addresses. A slow switch is a program, which can lose and delay, too.
    """
    holders: list[subprocess.Popen[bytes]] = []
    slow: subprocess.Popen[str] | None = None
    try:
        switch = _hold(["sleep", "infinity"], ["--net"], holders)
        made = tuple(_boot(index, number, folder, holders) for index in range(1, number + 1))
        for host in made:
            until((host.folder / "ready").exists)
        if is_slow:
            slow = _start_switch(made)
            yield Network(made, slow)
        else:
            _wire(switch, made)
            yield Network(made, switch)
    finally:
        if slow is not None:
            slow.kill()
            slow.communicate()
        for holder in holders:
            holder.kill()
        for holder in holders:
            holder.wait()


def _start_switch(made: Sequence[Host]) -> subprocess.Popen[str]:
    words = [f"{host.ip}/24@{host.pid}" for host in made]
    switch = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", sys.executable, SWITCH, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert switch.stdout is not None
    assert switch.stdout.readline() == "ready\n"
    return switch


def _boot(index: int, number: int, folder: Path, holders: list[subprocess.Popen[bytes]]) -> Host:
    name = f"node-{index}"
    home = folder / name
    home.mkdir(parents=True)
    others = [f"{SUBNET}.{i} node-{i}" for i in range(1, number + 1) if i != index]
    (home / "hosts").write_text(
        "\n".join(["127.0.0.1 localhost", f"127.0.1.1 {name}", *others, ""])
    )
    spaces = ["--net", "--uts", "--ipc", "--mount", "--pid", "--mount-proc"]
    pid = _hold(["sh", "-e", "-c", BOOT, "sh", name, str(home)], spaces, holders)
    return Host(name, f"{SUBNET}.{index}", pid, home)


def _hold(
    argv: Sequence[str], spaces: Sequence[str], holders: list[subprocess.Popen[bytes]]
) -> int:
    """Start ARGV in new namespaces; return its process id, which names them."""
    holder = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", "unshare", *spaces, "--fork", "--kill-child", *argv],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    holders.append(holder)
    children = Path(f"/proc/{holder.pid}/task/{holder.pid}/children")
    until(children.read_text)
    return int(children.read_text().split()[0])


def _wire(switch: int, made: Sequence[Host]) -> None:
    """Connect every host to a bridge that lives in a namespace of its own."""
    lines = ["link add switch type bridge", "link set switch up"]
    for at, host in enumerate(made):
        lines += [
            f"link add port{at} type veth peer name eth0 netns {host.pid}",
            f"link set port{at} master switch",
            f"link set port{at} up",
        ]
    _ip(switch, lines)
    for host in made:
        _ip(host.pid, ["link set lo up", f"addr add {host.ip}/24 dev eth0", "link set eth0 up"])


def _ip(pid: int, lines: Sequence[str]) -> None:
    subprocess.run(
        ["nsenter", "-t", str(pid), "-n", "ip", "-batch", "-"],
        input="\n".join(lines) + "\n",
        text=True,
        check=True,
    )


def is_root() -> bool:
    """Whether we may make namespaces at all."""
    return os.geteuid() == 0
