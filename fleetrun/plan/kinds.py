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
_CONTAINERS = (
    "ASCEND_VISIBLE_DEVICES",
    "ENFLAME_VISIBLE_DEVICES",
    "HABANA_VISIBLE_DEVICES",
    "IX_VISIBLE_DEVICES",
    "MTHREADS_VISIBLE_DEVICES",
    "NVIDIA_VISIBLE_DEVICES",
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


# Masks and files are those of each vendor's runtime and driver, as documented and tested in
# PaddleCustomDevice (backends/<kind>), FastDeploy and the vendors' container toolkits. All take
# numbers, and read a mask up to the first entry that names no device; exceptions are noted below.
VENDORS = {
    # Paddle's own launcher reads both (launch/context/device.py of 3.3.1): numbers.
    "xpu": Vendor(masks=("XPULINK_VISIBLE_DEVICES",), file="xpu", package="paddlepaddle-xpu"),
    # Huawei Ascend: its runtime reads ASCEND_RT_VISIBLE_DEVICES alone: numbers in ascending order,
    # to the first other character, blanks included (hiascend.com, envref_07_0028).
    "npu": Vendor(("ASCEND_RT_VISIBLE_DEVICES",), "davinci", "paddle-custom-npu"),
    # Cambricon: CNRT reads MLU_VISIBLE_DEVICES, after CN_VISIBLE_DEVICES: numbers, or whole UUIDs
    # (Cambricon's plug-in for torch, which keeps to CNRT).
    "mlu": Vendor(file="cambricon_dev", package="paddle-custom-mlu"),
    # Enflame: TopsRider's runtime reads TOPS_VISIBLE_DEVICES: numbers, or UUIDs, or beginnings of
    # them: GCU-..., of instances MIG-... and DRS-... (torch_gcu, Enflame's device plug-in).
    "gcu": Vendor(("TOPS_VISIBLE_DEVICES",), "gcu", "paddle-custom-gcu"),
    # Tecorigin: the plug-in's own tests set SDAA_VISIBLE_DEVICES.
    "sdaa": Vendor(file="tcaicard", package="paddle-sdaa"),
    # Iluvatar CoreX reads CUDA's variable.
    "iluvatar_gpu": Vendor(("CUDA_VISIBLE_DEVICES",), "iluvatar", "paddle-iluvatar-gpu"),
    # MetaX: MACA reads its own before CUDA's; it has no numbered files.
    "metax_gpu": Vendor(
        ("MACA_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"), package="paddle-metax-gpu"
    ),
    # Moore Threads: the driver reads MUSA_VISIBLE_DEVICES, -1 hides all (README of Paddle's fork).
    "musa": Vendor(file="mtgpu."),
    # Intel Gaudi: Habana's runtime reads HABANA_VISIBLE_MODULES (docs.habana.ai, Multiple Workloads
    # on a Single Docker). The plug-in reads neither and takes numbers for those of modules
    # (backends/intel_hpu/runtime). Its files /dev/accel/* are also those of other accelerators.
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
