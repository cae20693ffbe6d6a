"""fleetrun: start PaddlePaddle training on one machine or a thousand."""

__version__ = "0.1.0"
