"""Common failures are explained in one sentence, from the real output of programs."""

from __future__ import annotations

import pytest

from fleetrun.postmortem.causes import KNOWN_FAILURES, recognise

# The words of Paddle 2.6 and 3.3, Python, NCCL and CUDA.
TEXTS = (
    (
        "gpu-out-of-memory",
        (
            "ResourceExhaustedError: \n\nOut of memory error on GPU 0. Cannot allocate 15GB memory "
            "on GPU 0, 28.7GB memory has been allocated and available memory is only 10.8GB."
        ),
    ),
    (
        "gpu-driver",
        (
            "InvalidArgumentError: Device id must be less than GPU count, but received id is: 9. "
            "GPU count is: 8."
        ),
    ),
    (
        "gpu-driver",
        (
            "OSError: (External) CUDA error(101), invalid device ordinal.\n"
            "  [Hint: 'cudaErrorInvalidDevice'.]"
        ),
    ),
    (
        "cpu-build",
        (
            "ValueError: The device should not be <re.Match object; span=(0, 5), match='gpu:0'>, "
            "since PaddlePaddle is not compiled with CUDA"
        ),
    ),
    # The words of Paddle 2.6.2's GPU build without the library.
    (
        "gpu-driver",
        (
            "RuntimeError: (PreconditionNotMet) The third-party dynamic library (libnccl.so) that "
            "Paddle depends on is not configured correctly. (error code is libnccl.so: cannot open "
            "shared object file: No such file or directory)"
        ),
    ),
    ("gpu-driver", "ImportError: libcuda.so.1: cannot open shared object file: No such file"),
    (
        "shared-memory",
        (
            "FatalError: `Access to an undefined portion of a memory object` is detected by the "
            "operating system."
        ),
    ),
    ("shared-memory", "Fatal Python error: Bus error"),
    (
        "disk-full",
        (
            '  File "/usr/lib/python3.11/multiprocessing/process.py", line 314, in _bootstrap\n'
            "OSError: [Errno 28] No space left on device: '/home/me/cache'"
        ),
    ),
    (
        "plug-in",
        (
            "OSError: (External)  CustomDevice error, the error code is : 2.  "
            "(at /paddle/paddle/phi/backends/custom/custom_device.cc:799)"
        ),
    ),
    ("shared-memory", "ERROR: Unexpected BUS error encountered in DataLoader worker."),
    ("interface", "NCCL WARN Bootstrap : no socket interface found\nncclInternalError"),
    ("nccl", "ncclRemoteError: A call failed possibly due to a network error"),
    ("nccl", "Find timeout start but not finish task:group_key:x,group_ranks:[0,1]"),
    ("address-in-use", "OSError: [Errno 98] Address already in use"),
    ("address-in-use", "ValueError: (InvalidArgument) Bind network on IP_ANY:47123 failed."),
    (
        "address-in-use",
        (
            "2   phi::distributed::detail::TCPServer::create(unsigned short, int, int, bool)\n"
            "3   phi::distributed::detail::LibUVMasterDaemon::~LibUVMasterDaemon()"
        ),
    ),
    (
        "cpu-build",
        "place.cc:443] Cannot use GPU because you have installed CPU version PaddlePaddle.",
    ),
    ("gpu-driver", "OSError: (External) CUDA error(35), CUDA driver version is insufficient"),
    ("gpu-driver", "CUDA error(209), no kernel image is available for execution on the device."),
    ("no-paddle", "ModuleNotFoundError: No module named 'paddle'"),
    (
        "peer-lost",
        "RuntimeError: [gloo/tcp/pair.cc:584] TIMEOUT self_rank = 0 pair_rank = 1",
    ),
    ("peer-lost", "gloo::IoException: Read error [127.0.0.1]:20272: Connection reset by peer"),
    ("interface", "[enforce fail at device.cc:81] Unable to find address for: eth9"),
    ("disk-full", "OSError: [Errno 28] No space left on device: 'model.pdparams'"),
    ("file-size", "OSError: [Errno 27] File too large"),
    ("server", "urllib.error.URLError: <urlopen error [Errno 111] Connection refused>"),
    (
        "server",
        (
            "requests.exceptions.ConnectionError: HTTPSConnectionPool(host='a.b', port=443): Max "
            "retries exceeded with url: /x (Caused by NewConnectionError(': Connection refused'))"
        ),
    ),
    ("host-memory", "numpy.core._exceptions._ArrayMemoryError: Unable to allocate 8 TiB"),
    ("missing-module", "ModuleNotFoundError: No module named 'paddel'"),
    ("missing-module", "/venv/bin/python3.11: No module named paddel.train"),
    ("missing-module", "python: No module named a.__main__; 'a' is a package and cannot be ..."),
    ("usage", "usage: t.py [-h] [--lr LR]\nt.py: error: unrecognized arguments: --nope"),
    (
        "usage",
        "Usage: train [OPTIONS]\nTry 'train --help' for help.\n\nError: No such option: --nope",
    ),
    ("syntax", "    def f(:\n          ^\nSyntaxError: invalid syntax"),
    ("peer-lost", "ValueError: (InvalidArgument) TCP send error. Details: Broken pipe."),
    ("peer-lost", "ValueError: (InvalidArgument) Network 10.0.0.1:47199 cannot be connected."),
)


@pytest.mark.parametrize(("name", "text"), TEXTS)
def test_real_texts_are_recognised(name: str, text: str) -> None:
    known = recognise(text)
    assert known is not None
    assert known.name == name


@pytest.mark.parametrize(
    "text",
    [
        # The store is destroyed in every abort of its rank; its port was free.
        "0   phi::distributed::detail::LibUVMasterDaemon::~LibUVMasterDaemon()",
    ],
)
def test_what_means_nothing_gets_no_hint(text: str) -> None:
    assert recognise(text) is None


def test_every_row_is_met_by_a_real_text() -> None:
    assert {known.name for known in KNOWN_FAILURES} == {name for name, _ in TEXTS}
    assert len({known.name for known in KNOWN_FAILURES}) == len(KNOWN_FAILURES)


def test_a_lost_peer_never_hides_a_better_reason() -> None:
    assert KNOWN_FAILURES[-1].name == "peer-lost"
