"""The kinds of devices: one rule for Paddle's plug-ins, and the exceptions of vendors.

A kind has Paddle's name: `gpu` and `xpu` are built into Paddle's wheels, all others belong to a
plug-in (`mlu`). The name determines the option --mlus, the variables FLAGS_selected_mlus and
MLU_VISIBLE_DEVICES, and the backend xccl.
"""

from __future__ import annotations

from typing import NamedTuple

# The variables for the kind of the plug-in's devices, and for the plug-in's folder.
XCCL, ROOT = "PADDLE_XCCL_BACKEND", "CUSTOM_DEVICE_ROOT"

# The indexes of a rank's own devices.
SELECTED = "FLAGS_selected_"

# Built into Paddle itself.
BUILT_IN = ("gpu", "xpu")

# Paddle's launchers accept these for any kind.
GENERAL = ("gpus", "npus", "xpus")

# Variables of container tools, which runtimes do not read.
_CONTAINERS = tuple(
    f"{vendor}_VISIBLE_DEVICES"
    for vendor in ("ASCEND", "ENFLAME", "HABANA", "IX", "MTHREADS", "NVIDIA")
)

# Other names: Paddle's builds for ROCm call a DCU a GPU.
SYNONYMS = {"dcu": "gpu", "hcu": "gpu"}


class Vendor(NamedTuple):
    """The exceptions of one vendor's kind.

    `masks` come before <KIND>_VISIBLE_DEVICES, and the first that is set counts. `file` begins the
    names of its device files in /dev; `package` has Paddle's plug-in.
    """

    masks: tuple[str, ...] = ()
    file: str = ""
    package: str = ""


# As documented and tested in PaddleCustomDevice (backends/<kind>), FastDeploy and the vendors'
# container toolkits. All take numbers, and read a mask up to the first entry that names no device.
VENDORS = {
    # Paddle's own launcher reads both (launch/context/device.py of 3.3.1).
    "xpu": Vendor(masks=("XPULINK_VISIBLE_DEVICES",), file="xpu", package="paddlepaddle-xpu"),
    # Huawei Ascend reads this one alone, numbers in ascending order (hiascend.com, envref_07_0028).
    "npu": Vendor(("ASCEND_RT_VISIBLE_DEVICES",), "davinci", "paddle-custom-npu"),
    # Cambricon; numbers, or whole UUIDs.
    "mlu": Vendor(file="cambricon_dev", package="paddle-custom-mlu"),
    # Enflame; also UUIDs, or beginnings of them: GCU-..., of instances MIG-... and DRS-...
    "gcu": Vendor(("TOPS_VISIBLE_DEVICES",), "gcu", "paddle-custom-gcu"),
    # Tecorigin.
    "sdaa": Vendor(file="tcaicard", package="paddle-sdaa"),
    # Iluvatar CoreX.
    "iluvatar_gpu": Vendor(("CUDA_VISIBLE_DEVICES",), "iluvatar", "paddle-iluvatar-gpu"),
    # MetaX has no numbered files.
    "metax_gpu": Vendor(
        ("MACA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), package="paddle-metax-gpu"
    ),
    # Moore Threads; -1 hides all.
    "musa": Vendor(file="mtgpu."),
    # Intel Gaudi. The plug-in takes numbers for those of modules; its files /dev/accel/* are also
    # those of other accelerators.
    "intel_hpu": Vendor(("HABANA_VISIBLE_MODULES",), package="paddle-intel-hpu"),
}


def is_name(text: str) -> bool:
    """Whether TEXT can be the name of a kind.

    >>> is_name("iluvatar_gpu"), is_name("gpu:8"), is_name("")
    (True, False, False)
    """
    return text.isascii() and text.isidentifier() and not text.startswith("_")


def label(kind: str) -> str:
    """Return the name of KIND in messages.

    >>> label("mlu")
    'MLU'
    """
    return kind.upper()


def masks(kind: str) -> tuple[str, ...]:
    """Return the variables that hide devices of KIND; the first that is set counts.

    >>> masks("npu"), masks("gpu")
    (('ASCEND_RT_VISIBLE_DEVICES', 'NPU_VISIBLE_DEVICES'), ('CUDA_VISIBLE_DEVICES',))
    """
    if kind == "gpu":
        return ("CUDA_VISIBLE_DEVICES",)
    return (*VENDORS.get(kind, Vendor()).masks, f"{kind.upper()}_VISIBLE_DEVICES")


def is_mask(name: str) -> bool:
    """Whether the variable NAME hides devices of some kind."""
    if name in _CONTAINERS:
        return False
    return name.endswith("_VISIBLE_DEVICES") or any(
        name in vendor.masks for vendor in VENDORS.values()
    )


def backends(kind: str) -> tuple[str, ...]:
    """Return the backends of KIND; `auto` means the first.

    >>> backends("mlu")
    ('xccl', 'gloo')
    """
    match kind:
        case "gpu":
            return ("nccl", "gloo", "heter", "flagcx")
        case "xpu":
            return ("bkcl", "gloo", "heter", "flagcx")
        case "cpu":
            return ("gloo",)
    return ("xccl", "gloo")
