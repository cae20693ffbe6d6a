"""After a failure: its cause, last log lines, stacks, what the kernel knows, and the report."""
