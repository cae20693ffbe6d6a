"""A fake of NCCL's RAS, which refuses unknown requests."""

from __future__ import annotations

import socket
import threading

from waiting import LONG_S

# The format of NCCL 2.27 and, for the second communicator, of 2.24, which counts all together.
STATUS = """\
Job summary
===========
Communicators... (0.00s)
=============
Group     Comms     Nodes     Ranks     Ranks     Ranks    Status  Errors
    #  in group  per comm  per node  per comm  in group
    0         1         1         4         4         4   RUNNING  MISMATCH

Errors
======

#1-1 (77) ERROR
  Asynchronous error on 1 rank
  Rank 1 reported System error -- GPU 1 managed by process 8 on node 10.0.0.1

Warnings
========

#0-0 (27a079b828ff1a75) MISMATCH
  Communicator ranks have different AllReduce operation counts
  3 ranks have launched up to operation 6650
  Rank 3 has launched up to operation 6649 -- GPU 3 (NVML 7) managed by process 703 on node 10.0.0.1

#1-0 (5eb1) MISMATCH
  Communicator ranks have different operation counts
  2 ranks have launched up to operation 12
  Rank 0 -- GPU 0 managed by process 700 on node 10.0.0.1
  Rank 2 -- [process information not found]
  Rank 1 has not launched any operations -- GPU 1 managed by process 701 on node 10.0.0.1

#2-0 (abc) MISMATCH
  Communicator ranks have different AllGather operation counts
  3 ranks have launched up to operation 3
  1 ranks have launched up to operation 4
"""


class FakeRas:
    """Listens like NCCL, and answers STATUS to clients of its protocol."""

    def __init__(self, status: str = STATUS, hello: str = "SERVER PROTOCOL 2") -> None:
        self._status, self._hello = status, hello
        self.requests: list[str] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.environ = {"NCCL_RAS_ADDR": f"127.0.0.1:{self._socket.getsockname()[1]}"}
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        with self._socket, self._socket.accept()[0] as client:
            for line in client.makefile("r"):
                self.requests.append(line.rstrip("\n"))
                if line == "CLIENT PROTOCOL 2\n":
                    client.sendall(f"{self._hello}\n".encode())
                elif line.startswith("TIMEOUT ") and float(line.split()[1]) > 0:
                    client.sendall(b"OK\n")
                elif line == "VERBOSE STATUS\n":
                    client.sendall(self._status.encode())
                    return
                else:
                    raise AssertionError(line)

    def close(self) -> None:
        """Wait for the end."""
        self._thread.join(LONG_S)
        assert not self._thread.is_alive()
