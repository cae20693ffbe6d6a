"""Loaded by other programs' Pythons at start, so that launches below them are fleetrun's."""
