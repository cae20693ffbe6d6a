"""AMD's GPUs, from made-up machines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from plans import a_request, some_facts

from fleetrun.host import devices

if TYPE_CHECKING:
    from pathlib import Path


def machine(root: Path, gpus: int, files: int | None = None) -> str:
    """Make a machine with GPUS GPUs beside a processor, and the device FILES of the first ones."""
    (root / "dev/dri").mkdir(parents=True)
    for node in range(gpus + 1):
        folder = root / f"sys/class/kfd/kfd/topology/nodes/{node}"
        folder.mkdir(parents=True)
        (folder / "gpu_id").write_text(f"{node * 1000}\n")
        minor = 127 + node if node else 0
        (folder / "properties").write_text(f"simd_count {node * 4}\ndrm_render_minor {minor}\n")
    for place in range(gpus if files is None else files):
        (root / f"dev/dri/renderD{128 + place}").touch()
    return str(root)


def paddle(folder: Path, hip: str) -> list[str]:
    """Put a Paddle into FOLDER, built for HIP."""
    (folder / "paddle/version").mkdir(parents=True)
    (folder / "paddle/version/__init__.py").write_text(f"hip_version      = {hip}\n")
    return [str(folder / "elsewhere"), str(folder)]


def test_gpus_of_amds_are_used_where_paddle_is_built_for_them(tmp_path: Path) -> None:
    path = paddle(tmp_path, "'6.1'")
    facts = devices.with_amd(some_facts(), a_request(), machine(tmp_path, 2), path)
    assert (facts.device_counts, facts.is_rocm) == ({"gpu": 2}, True)


def test_gpus_that_are_hidden_or_not_in_the_container_do_not_count(tmp_path: Path) -> None:
    root = machine(tmp_path, 4, files=3)
    named = a_request(devices="all")
    assert devices.with_amd(some_facts(), named, root, []).device_counts == {"gpu": 3}
    hidden = some_facts(environ={"ROCR_VISIBLE_DEVICES": "0,GPU-1"})
    assert devices.with_amd(hidden, named, root, []).device_counts == {"gpu": 2}
    nothing = some_facts(environ={"ROCR_VISIBLE_DEVICES": ""})
    assert devices.with_amd(nothing, named, root, []) == nothing
