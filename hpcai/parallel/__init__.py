"""Parallelism: functions that shard a built model in place over the axes of a mesh."""
