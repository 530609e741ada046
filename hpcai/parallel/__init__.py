"""Parallel forms: functions that take a built model and a mesh."""
