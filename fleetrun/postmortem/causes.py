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


_SHARED_MEMORY = (
    "Shared memory ran out{}: give the container a larger /dev/shm (docker run --shm-size=8g) or "
    "use fewer DataLoader workers."
)

GLOO_INTERFACE = "gloo-interface"
_PYTHONS = ("", "3", *(f"3.{minor}" for minor in range(8, 20)))

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
            "CUDA out of memory",
        ),
        "The GPU ran out of memory: use a smaller batch, recompute or amp, or free the GPU "
        "(nvidia-smi shows who holds it).",
    ),
    KnownFailure(
        "gpu-id",
        (
            "Device id must be less than GPU count",
            "invalid device ordinal",
            "CUDA error(101)",
            "CUDA error(100)",
            "no CUDA-capable device",
        ),
        "The GPU assigned to this rank does not exist here: compare --gpus and "
        "CUDA_VISIBLE_DEVICES with nvidia-smi -L.",
        may_retry=False,
    ),
    KnownFailure(
        "cpu-build",
        (
            "PaddlePaddle is not compiled with CUDA",
            "Paddle is not compiled with CUDA",
            "PaddlePaddle not compiled with CUDA",
            "Not compiled with CUDA",
            "not compile with CUDA",
            "Cannot use GPU because you have installed CPU version PaddlePaddle",
        ),
        "This Paddle is a CPU build: install paddlepaddle-gpu, or train on the CPU with "
        "CUDA_VISIBLE_DEVICES='' and paddle.set_device('cpu').",
        may_retry=False,
    ),
    KnownFailure(
        "gpu-library",
        ("The third-party dynamic library (",),
        "An NVIDIA library that this Paddle needs and does not contain is missing; the text "
        "above names it. `fleetrun doctor` prints the command that installs it.",
        may_retry=False,
    ),
    KnownFailure(
        "plug-in",
        # What Paddle makes of any function that fails: an allocation, a copy, a collective.
        ("CustomDevice error, the error code is : ",),
        "The plug-in of this device has failed at what Paddle asked it for (code 2: memory or "
        "another resource ran out, or it refused; 3: wrong use; 4: its own fault). The traceback "
        "says at what; why, only the plug-in's own lines before, or the logs of its driver.",
    ),
    KnownFailure(
        "gpu-driver",
        (
            "CUDA driver version is insufficient",
            "libcuda.so.1: cannot open",
            "libcudart.so",
            "CUDA error(35)",
            "no kernel image is available for execution",
            # CUDA cannot start.
            "CUDA error(802)",
            "CUDA error(803)",
            "CUDA error(804)",
            "Cannot use GPU because there is no GPU detected",
        ),
        "The NVIDIA driver is missing or older than this Paddle needs, a mask hides the GPUs, or "
        "they are of another kind: `fleetrun doctor` starts CUDA and says what it lacks.",
        may_retry=False,
    ),
    KnownFailure(
        "shared-memory",
        (
            "Bus error",
            "Unexpected BUS error encountered in DataLoader worker",
            # Paddle's words for SIGBUS.
            "Access to an undefined portion of a memory object",
            "unable to open shared memory object",
        ),
        # The signal is the same for both.
        _SHARED_MEMORY.format(", unless a mapped file was truncated"),
    ),
    KnownFailure(
        "shared-memory-full",
        ("No space left on device", "[Errno 28]"),
        _SHARED_MEMORY.format(""),
        # Semaphores of multiprocessing are files there; the error does not say so.
        places=(
            "multiprocessing/synchronize.py",
            "multiprocessing/shared_memory.py",
            "multiprocessing/heap.py",
            "'/dev/shm/",
        ),
    ),
    KnownFailure(
        GLOO_INTERFACE,
        ("Unable to find address for: ",),
        "gloo connects the ranks by the interface that GLOO_SOCKET_IFNAME names: leave it out, and "
        "fleetrun names the one that leads to the other hosts.",
        may_retry=False,
    ),
    KnownFailure(
        "nccl-interface",
        ("no socket interface found", "NCCL WARN Bootstrap", "NCCL WARN Call to connect"),
        "NCCL found no way to the peers: name the interface with --nccl SOCKET_IFNAME=eth0.",
    ),
    KnownFailure(
        "nccl",
        (
            "ncclSystemError",
            "ncclRemoteError",
            "ncclInternalError",
            "unhandled system error",
            # Paddle's own watch over collective operations.
            "Find nccl comm error",
            "Find timeout init but not start task",
            "Find timeout start but not finish task",
            "Watchdog caught collective operation timeout",
        ),
        "NCCL lost a peer or waited too long: look for the rank that failed first; with several "
        "hosts check the firewall and --nccl SOCKET_IFNAME; --nccl DEBUG=INFO says more.",
    ),
    KnownFailure(
        "address-in-use",
        (
            "Address already in use",
            "EADDRINUSE",
            "[Errno 98]",
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
        "disk-full",
        ("No space left on device", "[Errno 28]", "Disk quota exceeded"),
        "The disk is full: free space for checkpoints and logs (df -h).",
    ),
    KnownFailure(
        "host-memory",
        ("MemoryError", "std::bad_alloc", "[Errno 12]", "Cannot allocate memory"),
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
        "setuptools",
        ("No module named 'setuptools'", "No module named 'distutils'"),
        "Paddle imports setuptools, which Python 3.12 and later do not bring: `pip install "
        "setuptools` into that interpreter.",
        may_retry=False,
    ),
    KnownFailure(
        "protobuf",
        ("FieldDescriptor' object has no attribute 'label'",),
        "This Paddle predates protobuf 7: `pip install 'protobuf>=4.21,<5'` into that interpreter.",
        may_retry=False,
    ),
    KnownFailure(
        "missing-module",
        (
            "ModuleNotFoundError: ",
            "ImportError: ",
            # Of `python -m`, after the interpreter's name, without a traceback.
            *(f"python{version}: No module named " for version in _PYTHONS),
        ),
        "Python could not import a module: install it into the interpreter that fleetrun uses "
        "(fleetrun --dry-run shows which), or set PYTHONPATH.",
        may_retry=False,
    ),
    KnownFailure(
        "usage",
        # Of argparse, and of click.
        (
            ".py: error: ",
            ": error: unrecognized arguments: ",
            ": error: the following arguments are required: ",
            ": error: argument ",
            "Error: No such option",
            "Error: Missing ",
            "Error: Invalid value for ",
            "Error: Got unexpected extra argument",
        ),
        "The script does not accept its arguments: everything after it on fleetrun's command line.",
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
        "This rank lost a peer. No rank on this host failed before it: look for the reason in the "
        "logs of the other hosts, or for a peer that ended too early.",
    ),
)

# What a rank says whose DataLoader has lost a worker; why that ended stands before it in the log.
LOADER = ("the data reader raises an exception", "exit unexpectedly")

# Failures that mean that a peer has failed before.
LOST = frozenset({"peer-lost", "nccl", "nccl-interface"})

SIGNAL_MEANINGS = {
    "SIGABRT": "the program aborted itself, often after a failed check in C++ code",
    "SIGBUS": "a mapped file lost its memory, usually because /dev/shm is too small",
    "SIGHUP": "the terminal or the ssh connection was closed",
    "SIGILL": "the program uses instructions that this processor does not support",
    "SIGINT": "interrupted, as by Ctrl-C",
    "SIGKILL": "killed from outside, usually by the kernel's out-of-memory killer",
    "SIGSEGV": "native code accessed invalid memory",
    "SIGTERM": "asked to stop",
}


def recognise(text: str) -> KnownFailure | None:
    """Return the known failure that the end of a log shows.

    >>> recognise("OSError: [Errno 98] Address already in use").name
    'address-in-use'
    >>> recognise("all is well")
    """
    return next(
        (
            known
            for known in KNOWN_FAILURES
            if any(mark in text for mark in known.marks)
            and (not known.places or any(place in text for place in known.places))
        ),
        None,
    )


def is_of_victim(text: str) -> bool:
    """Whether the end of a log says that a peer has failed before.

    >>> is_of_victim("RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.1]:20272")
    True
    """
    known = recognise(text)
    return known is not None and known.name in LOST


def meaning(signum: int) -> str:
    """Return the name of a signal and its usual meaning.

    >>> meaning(9)
    "SIGKILL (killed from outside, usually by the kernel's out-of-memory killer)"
    """
    try:
        name = Signals(signum).name
    except ValueError:
        return f"signal {signum}"
    words = SIGNAL_MEANINGS.get(name)
    return f"{name} ({words})" if words else name
