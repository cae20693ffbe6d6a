"""Launchers on other hosts by ssh: the head here, and an agent at the other end of each."""
