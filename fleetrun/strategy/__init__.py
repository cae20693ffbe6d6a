"""Strategies: what a job wants of Paddle's distributed training, from files to one document."""
