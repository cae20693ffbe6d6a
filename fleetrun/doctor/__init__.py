"""What the facts of a host mean for a job: findings, each with the command that fixes it; pure."""
