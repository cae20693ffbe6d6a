"""The island: code that runs inside the user's training process. It imports nothing of fleetrun."""
