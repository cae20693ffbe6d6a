"""Reads for a check-up what a launch need not know of its host."""
