"""Fused operations, each with its plain-torch twin in the same file."""
