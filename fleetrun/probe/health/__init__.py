"""Reads about this host what only a check-up needs to know."""
