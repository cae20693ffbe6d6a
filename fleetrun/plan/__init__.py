"""Pure planning: devices, hosts, environment, command, and how a plan is shown."""
