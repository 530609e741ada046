"""Run the `hpcai` command with this Python: python -m hpcai.cli COMMAND ..."""

from hpcai.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
