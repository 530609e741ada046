"""hpcai: scientific AI training for supercomputers. Importing it costs nothing: every part is imported on use."""

import sys

if sys.version_info < (3, 11):  # noqa: UP036  (an older one cannot import the other modules)
    raise SystemExit(f"hpcai needs Python 3.11 to 3.14, but {sys.executable} is {sys.version.split()[0]}; use another one")

__version__ = "0.1.0"
