"""Explanations of signals, and of common failures that are recognised in the end of a log."""

from signal import Signals
from typing import NamedTuple


class KnownFailure(NamedTuple):
    """A failure recognised by any of `marks` in the end of a log, explained in one sentence.

    Where it has `places`, one of them must be there, too.
    """

    name: str
    marks: tuple[str, ...]
    sentence: str
    places: tuple[str, ...] = ()
    # Whether another attempt can help.
    may_retry: bool = True


SHARED_MEMORY, DISK_FULL = "shared-memory", "disk-full"

# To add a failure, add a row: the marks are plain text as in the log, the sentence says what
# happened and what to do. The first row that matches is used.
KNOWN_FAILURES = (
    KnownFailure(
        "gpu-out-of-memory",
        (
            "Out of memory error on GPU",
            "ResourceExhaustedError",
            # With its comma: CUDA error(209) is another one.
            "CUDA error(2),",
            "CUDA_ERROR_OUT_OF_MEMORY",
        ),
        "The GPU ran out of memory: use a smaller batch, recompute or amp, or free the GPU "
        "(nvidia-smi shows who holds it).",
    ),
    KnownFailure(
        "cpu-build",
        (
            "is not compiled with CUDA",
            "Not compiled with CUDA",
            "Cannot use GPU because you have installed CPU version PaddlePaddle",
        ),
        "This Paddle is a CPU build: install paddlepaddle-gpu, or train on the CPU with "
        "CUDA_VISIBLE_DEVICES='' and paddle.set_device('cpu').",
        may_retry=False,
    ),
    KnownFailure(
        "gpu-driver",
        (
            "libcuda.so.1: cannot open",
            "The third-party dynamic library (",
            "CUDA error(35)",
            "no kernel image is available for execution",
            "Device id must be less than GPU count",
            "CUDA error(10",
            # CUDA cannot start.
            "CUDA error(80",
            "Cannot use GPU because there is no GPU detected",
        ),
        "The NVIDIA driver or a library is missing or older than this Paddle needs, a mask hides "
        "the rank's GPU, or it is of another kind: `fleetrun doctor` starts CUDA and says what it "
        "lacks; compare --gpus and CUDA_VISIBLE_DEVICES with nvidia-smi -L.",
        may_retry=False,
    ),
    KnownFailure(
        "plug-in",
        # What Paddle makes of any function that fails: an allocation, a copy, a collective.
        ("CustomDevice error, the error code is : ",),
        "The plug-in of this device has failed at what Paddle asked it for: see its own lines "
        "before, or the logs of its driver.",
    ),
    KnownFailure(
        SHARED_MEMORY,
        (
            "Bus error",
            "Unexpected BUS error encountered in DataLoader worker",
            # Paddle's words for SIGBUS.
            "Access to an undefined portion of a memory object",
        ),
        # The signal is the same for both.
        "Shared memory ran out, unless a mapped file was truncated: give the container a larger "
        "/dev/shm (docker run --shm-size=8g) or use fewer DataLoader workers.",
    ),
    KnownFailure(
        "interface",
        ("Unable to find address for: ", "no socket interface found"),
        "gloo or NCCL found no way to the peers by the interface that GLOO_SOCKET_IFNAME or "
        "NCCL_SOCKET_IFNAME names: leave it out, and fleetrun names the one that leads to the "
        "other hosts, or give --env GLOO_SOCKET_IFNAME=eth0.",
        may_retry=False,
    ),
    KnownFailure(
        "nccl",
        (
            "ncclSystemError",
            "ncclRemoteError",
            "ncclInternalError",
            "unhandled system error",
            "NCCL WARN Call to connect",
            # Paddle's own watch over collective operations.
            "Find nccl comm error",
            "Find timeout init but not start task",
            "Find timeout start but not finish task",
        ),
        "NCCL lost a peer or waited too long: look for the rank that failed first; with several "
        "hosts check the firewall and NCCL_SOCKET_IFNAME; --env NCCL_DEBUG=INFO says more.",
    ),
    KnownFailure(
        "address-in-use",
        (
            "Address already in use",
            "EADDRINUSE",
            # Paddle's store; the second is all that Paddle 3 says before it aborts. (That the
            # server is destroyed in another abort means nothing.)
            "Bind network on ",
            "TCPServer::create(",
        ),
        "A port that this rank wanted is in use. One that Paddle was given (PADDLE_MASTER, "
        "PADDLE_TRAINER_ENDPOINTS) moves with --start_port; one that the script opens itself, "
        "such as a debugger's or TensorBoard's, must differ from rank to rank.",
    ),
    KnownFailure(
        DISK_FULL,
        ("No space left on device", "[Errno 28]", "Disk quota exceeded"),
        # Semaphores of multiprocessing are files in /dev/shm; the error does not say so.
        "The disk is full, or /dev/shm if multiprocessing is in the traceback: free space for "
        "checkpoints and logs (df -h), or give the container more (docker run --shm-size=8g).",
    ),
    KnownFailure(
        "file-size",
        ("[Errno 27] ",),
        "A file became larger than `ulimit -f` allows, or than its file system does: allow more, "
        "or write smaller checkpoints and logs (--log_max_size).",
    ),
    KnownFailure(
        "host-memory",
        ("MemoryError", "std::bad_alloc", "Cannot allocate memory"),
        "The host ran out of memory, or ulimit -v forbids more: use fewer DataLoader workers or "
        "ranks, or a smaller batch.",
    ),
    KnownFailure(
        "no-paddle",
        ("No module named 'paddle'",),
        "Paddle is not installed there: install it into that interpreter, or start fleetrun with "
        "the one that has it.",
        may_retry=False,
    ),
    KnownFailure(
        "missing-module",
        (
            "ModuleNotFoundError: ",
            "ImportError: ",
            # Of `python -m`, after the interpreter's name, without a traceback.
            ": No module named ",
        ),
        "Python could not import a module: install it into the interpreter that fleetrun uses "
        "(fleetrun --dry-run shows which), or set PYTHONPATH.",
        may_retry=False,
    ),
    KnownFailure(
        "usage",
        # Of argparse, and of click.
        (
            "error: unrecognized arguments: ",
            "error: the following arguments are required: ",
            "error: argument ",
            "Error: No such option",
            "Error: Missing ",
            "Error: Invalid value for ",
            "Error: Got unexpected extra argument",
        ),
        "The script rejects its arguments, which are all words after it on the command line.",
        places=("usage: ", "Usage: "),
        may_retry=False,
    ),
    KnownFailure(
        "syntax",
        ("SyntaxError: ", "IndentationError: "),
        "The script is not valid Python for this interpreter.",
        may_retry=False,
    ),
    KnownFailure(
        "server",
        ("urllib.error.URLError: ", "requests.exceptions.", "urllib3.exceptions.", "http.client."),
        "A server of data or models did not answer, or broke off: check its address, the network "
        "of this host and the proxy ($https_proxy).",
    ),
    KnownFailure(
        "peer-lost",
        (
            "Connection reset by peer",
            "Connection closed by peer",
            "Connection refused",
            "Socket Timeout",
            # gloo's.
            "TIMEOUT self_rank = ",
            "Timed out waiting ",
            "Read timeout",
            "Application timeout caused pair closure",
            "Broken pipe",
            # Paddle's store.
            "TCP send error",
            "TCP receive error",
            " cannot be connected.",
            "Wait timeout for key(s)",
        ),
        "This rank lost a peer, or waited too long for one. No rank on this host failed before it: "
        "look for the reason in the logs of the other hosts, for a peer that ended too early, or "
        "in the network between the hosts (`fleetrun doctor`).",
    ),
)

# What a rank says whose DataLoader has lost a worker; why that ended stands before it in the log.
LOADER = ("the data reader raises an exception", "exit unexpectedly")

# Failures that mean that a peer has failed before; and those that an interface may have caused.
LOST = frozenset({"peer-lost", "nccl"})
OF_NETWORK = LOST | {"interface"}

SIGNAL_MEANINGS = {
    "SIGABRT": "the program aborted itself, often after a failed check in C++ code",
    "SIGBUS": "a mapped file lost its memory, usually because /dev/shm is too small",
    "SIGILL": "the program uses instructions that this processor does not support",
    "SIGKILL": "killed from outside, usually by the kernel's out-of-memory killer",
    "SIGSEGV": "native code accessed invalid memory",
    "SIGSYS": "a seccomp filter forbids a system call",
    "SIGTERM": "somebody has asked this process to end; it was not fleetrun",
    "SIGXCPU": "it used more processor time than `ulimit -t` allows",
    "SIGXFSZ": "a file became larger than `ulimit -f` allows",
}


def recognise(text: str) -> KnownFailure | None:
    """Return the known failure that the end of a log shows."""
    for known in KNOWN_FAILURES:
        is_there = not known.places or any(place in text for place in known.places)
        if is_there and any(mark in text for mark in known.marks):
            return known
    return None


def is_of_victim(text: str) -> bool:
    """Whether the end of a log says that a peer has failed before."""
    known = recognise(text)
    return known is not None and known.name in LOST


def meaning(signum: int) -> str:
    """Return the name of a signal and its usual meaning."""
    try:
        name = Signals(signum).name
    except ValueError:
        return f"signal {signum}"
    words = SIGNAL_MEANINGS.get(name)
    return f"{name} ({words})" if words else name
