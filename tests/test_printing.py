"""Which parts of a help page are coloured."""

from __future__ import annotations

import pytest

from fleetrun.printing import colored_page

BOLD, CYAN, END = "\x1b[1m", "\x1b[36m", "\x1b[0m"
# The one of full width, as in Chinese.
COLON = "\uff1a"


@pytest.mark.parametrize(
    ("line", "coloured"),
    [
        ("Examples:", f"{BOLD}Examples:{END}"),
        (f"示例{COLON}", f"{BOLD}示例{COLON}{END}"),
        ("Exit codes: 0 all well", f"{BOLD}Exit codes:{END} 0 all well"),
        (f"退出码{COLON}0 一切正常", f"{BOLD}退出码{COLON}{END}0 一切正常"),
        ("Start training: one process per device", "Start training: one process per device"),
        (f"启动训练{COLON}每个设备一个进程", f"启动训练{COLON}每个设备一个进程"),
        ("  --gpus LIST   GPUs", f"  {CYAN}--gpus LIST{END}   GPUs"),
        ("  fleetrun a|b|c", f"  {CYAN}fleetrun a|b|c{END}"),
        # The second line of a paragraph has no term.
        ("  124 hung, 126, 127 no program", "  124 hung, 126, 127 no program"),
        ("      --gpus of a paragraph", "      --gpus of a paragraph"),
    ],
)
def test_headings_and_terms_are_coloured_and_nothing_else(line: str, coloured: str) -> None:
    assert colored_page(line) == coloured
