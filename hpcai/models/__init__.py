"""Scientific models. Packages do not import one another."""
