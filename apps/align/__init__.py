"""Align language models by reinforcement learning and by preferences."""
