"""`fleetrun completion`: the script that a shell sources."""

from __future__ import annotations

import click

from fleetrun.cli import shells
from fleetrun.printing import put

# Where each shell reads it.
_PLACES = {
    "bash": 'eval "$(fleetrun completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(fleetrun completion zsh)" in ~/.zshrc, after compinit',
    "fish": "fleetrun completion fish > ~/.config/fish/completions/fleetrun.fish",
}


@click.command(
    "completion",
    help="Print the script that makes a shell complete fleetrun's command line.",
    epilog="\b\n" + "\n".join(f"{shell + ':':<6}{text}" for shell, text in _PLACES.items()),
)
@click.argument("shell", type=click.Choice(list(_PLACES)))
def command(shell: str) -> int:
    """Print the script for SHELL."""
    return put(shells.script(shell))
