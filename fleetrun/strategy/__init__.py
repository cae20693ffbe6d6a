"""Strategies: settings for Paddle's distributed training, from files to one document."""
