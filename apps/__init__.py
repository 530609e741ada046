"""One folder per run that this package knows how to make; `hpcai run NAME` finds them, and yours beside them."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
