"""Facts about the installed Paddle, without importing it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from fleetrun.host import paddles
from fleetrun.host.paddles import InstalledPaddle
from fleetrun.plan.modes import BY_WORD

if TYPE_CHECKING:
    from pathlib import Path


def without(mode: str, path: list[str]) -> str | None:
    """Return the Paddle on PATH that lacks what MODE needs."""
    feature = BY_WORD[mode].feature
    assert feature is not None
    paddle = paddles.find(path)
    is_there = paddle is None or not paddles.lacks(paddle, feature.symbol)
    return None if is_there or paddle is None else paddle.version


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Make a Paddle 9.9.9 that holds no library yet."""
    home = tmp_path / "site" / "paddle"
    (home / "version").mkdir(parents=True)
    (home / "base").mkdir()
    (home / "version" / "__init__.py").write_text("full_version     = '9.9.9'\n")
    return home


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cuda_version = '12.6'\ncudnn_version = 'False'\nnccl_version = '0'", {"cuda": "12.6"}),
        ("hip_version = '5.7'", {"hip": "5.7"}),
    ],
)
def test_a_paddle_says_what_it_is_built_for(
    home: Path, text: str, expected: dict[str, object]
) -> None:
    (home / "version" / "__init__.py").write_text(f"full_version = '9.9.9'\n{text}\n")
    paddle = InstalledPaddle("9.9.9", str(home))._replace(**expected)  # type: ignore[arg-type]
    assert paddles.find([str(home.parents[1] / "empty"), str(home.parent)]) == paddle
    assert paddles.find([]) is None
