"""The commands besides launching: one module each, read by click."""

# NAME is the click command `command` of fleetrun.commands.NAME.
COMMANDS = (
    *("attach", "completion", "doctor", "exec", "logs", "ps", "report", "stop"),
    *("stacks", "strategy", "submit", "top", "tune", "ui", "verify"),
)
