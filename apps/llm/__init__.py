"""Train language models on text."""
