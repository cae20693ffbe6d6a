"""What other programs' Pythons run when they start, so that launches below them are ours."""
