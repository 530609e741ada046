"""Makers of the files that the apps read, from a raw public format or from a simulator. They need no torch."""
