"""From a raw public format, or from a simulator, to the files that the apps read. Runs from a checkout; needs no torch."""
