"""Effects: spawning, supervising and collecting the processes of a plan."""
