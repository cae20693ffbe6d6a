"""What an end meant: causes, last words, stacks, evidence, and the report of it."""
