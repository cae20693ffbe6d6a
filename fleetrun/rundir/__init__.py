"""What is written down of a run: the names of its files, their schemas, writers and readers."""
