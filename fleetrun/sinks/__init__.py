"""Sinks: observers that show or record a run. They may fail without hurting the job."""
