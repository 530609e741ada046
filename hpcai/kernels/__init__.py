"""Fused operations, each with its reference by operations of torch in the same file."""
