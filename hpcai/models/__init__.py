"""Scientific models; each folder stands alone."""
