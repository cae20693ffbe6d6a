"""Watchers of a run: console, events, run directory. They may fail without hurting the job."""
