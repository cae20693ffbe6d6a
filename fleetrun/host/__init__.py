"""What this host has and how it is: devices, addresses, ports, scripts, Paddle, jobs."""
