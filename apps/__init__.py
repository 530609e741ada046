"""One folder per run that this package knows how to make; `hpcai run NAME` finds them in a checkout or a wheel."""
