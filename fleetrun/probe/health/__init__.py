"""Reads the facts about this host that only a check-up needs."""
