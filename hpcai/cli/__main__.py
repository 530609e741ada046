"""``python -m hpcai.cli``: the `hpcai` command where its script is not on the path, as in a batch job."""

from hpcai.cli import main

raise SystemExit(main())
