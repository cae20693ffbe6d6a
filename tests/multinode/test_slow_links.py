"""One host's link is slower than those of the others: the job says so while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from lab import ends
from waiting import TRAINING_S, until

from fleetrun.records import eventfile, names

if TYPE_CHECKING:
    from lab import Network

pytestmark = pytest.mark.multinode

# Each rank exchanges numbers with all others, as a collective does, until told to end.
TALK = """
import os, socket, time
rank = int(os.environ["PADDLE_TRAINER_ID"])
ends = [end.split(":") for end in os.environ["PADDLE_TRAINER_ENDPOINTS"].split(",")]
server = socket.create_server(("", int(ends[rank][1])))
links = {}
for other in range(rank):
    while other not in links:
        try:
            links[other] = socket.create_connection((ends[other][0], int(ends[other][1])))
            links[other].sendall(bytes([rank]))
        except OSError:
            time.sleep(0.05)
while len(links) < len(ends) - 1:
    link, _ = server.accept()
    links[link.recv(1)[0]] = link
step = 0
while not os.path.exists("go"):
    step += 1
    try:
        for link in links.values():
            link.sendall(bytes(1000))
        for link in links.values():
            left = 1000
            while left:
                piece = link.recv(left)
                if not piece:
                    raise SystemExit
                left -= len(piece)
    except OSError:
        raise SystemExit
    print(f"step {step}", flush=True)
    time.sleep(0.01)
"""


def test_the_host_with_the_slow_link_is_named(slow_hosts: Network) -> None:
    first, *_, slow = hosts = slow_hosts.hosts
    slow_hosts.delay(slow, 200)
    for host in hosts:
        (host.folder / "job.py").write_text(TALK)
    # Some hosts are given by address, some by name.
    ips = [first.ip, *(host.name for host in hosts[1:])]
    options = (f"--ips={','.join(ips)}", "--nproc_per_node=1")
    launchers = [host.fleetrun(*options, "--metrics_period=0.5", "job.py") for host in hosts]
    run = first.folder / "log" / "latest"

    def remarks() -> list[eventfile.EventRecord]:
        events = eventfile.read(str(run / names.EVENTS))
        return [event for event in events if event.event == "warning"]

    until(remarks, TRAINING_S)
    for host in hosts:
        (host.folder / "go").touch()
    assert ends(launchers, TRAINING_S) == [0] * 4
    (remark,) = remarks()
    assert (remark.more["what"], remark.more["who"]) == ("straggler", ["rank 3"])
    text = f"The link of {slow.name} (rank 3) is slow: round trips take "
    assert remark.more["text"].startswith(text)
    assert text in first.output
