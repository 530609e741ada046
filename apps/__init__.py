"""One folder per run that this package knows how to make; run them from a checkout."""
