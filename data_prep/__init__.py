"""Makers of the files that the apps read, from a raw public format or from a simulator. `hpcai prepare NAME` finds them; needs no torch."""
