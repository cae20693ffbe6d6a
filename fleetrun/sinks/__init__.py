"""Sinks: observers that show or record a run. A sink that fails does not affect the job."""
