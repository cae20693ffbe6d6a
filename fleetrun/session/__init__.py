"""The session of a job's launchers: its protocol, and the connections below it."""
