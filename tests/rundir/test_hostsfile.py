"""How each host ended is written for people and programs, without secrets."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING

from fleetrun.rundir import hostsfile, names, secrets
from fleetrun.rundir.folder import Folder
from fleetrun.rundir.hostsfile import HostEnd

if TYPE_CHECKING:
    from pathlib import Path


def test_each_host_is_an_entry_and_no_secret_is_written(tmp_path: Path) -> None:
    ends = (
        HostEnd(0, "10.0.0.1", "a", 2, "ended well", 0),
        HostEnd(1, "10.0.0.2", "b", 2, 'could not get "https://me:pw@h"', 3, is_first=True),
    )
    with closing(Folder(str(tmp_path))) as folder:
        hostsfile.write(folder, ends, secrets.mask)
    document = json.loads((tmp_path / names.HOSTS).read_text())
    assert document["schema"] == hostsfile.SCHEMA
    assert document["hosts"][0] == ends[0]._asdict()
    assert document["hosts"][1]["what"] == 'could not get "https://***@h"'
